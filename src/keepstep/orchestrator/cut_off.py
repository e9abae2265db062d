"""Calls that end: what waits for an answer over a socket is cut off when its time is up."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def cut_off_late(descriptor: int, seconds_max: float) -> Iterator[Callable[[], None]]:
    """Shut the socket down if the call is not over in time: a frozen server never answers.

    On a duplicate: by then the number itself may belong to another connection. Yields what does it
    at once, for whoever leaves earlier.
    """
    line = socket.socket(fileno=os.dup(descriptor))

    def cut() -> None:
        try:
            line.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # It broke by itself, or is over.

    timer = threading.Timer(seconds_max, cut)
    timer.daemon = True
    try:
        timer.start()
        yield cut
    finally:
        timer.cancel()
        line.close()
