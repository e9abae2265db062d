"""A rank's side of bench.turns: it stops where the driver says, by the number of its step.

By numbers, and not by how many steps were made since: whoever takes over a rank in the middle of a
block, or makes steps again, comes to a halt with the others. No torch here.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

Pause = Callable[[], contextlib.AbstractContextManager[None]]


class Turn:
    """A connection to the driver. `pause`: around a wait for it."""

    def __init__(self, path: str, rank: int, pause: Pause) -> None:
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._line.connect(path)
        self._lines = self._line.makefile("rb")
        self._pause = pause
        self._until = 0
        """Nothing was heard yet: the first step is told, and waited after."""
        self._say({"rank": rank, "pid": os.getpid()})

    def passed(self, done: int) -> None:
        """So many steps are in on this rank."""
        if done < self._until:
            return
        self._say({"done": done, "at": time.monotonic_ns()})
        with self._pause():
            while self._until <= done:
                line = self._lines.readline()
                if not line:
                    raise ConnectionError("the driver of the turns is gone")
                self._until = int(json.loads(line)["until"])

    def close(self) -> None:
        self._lines.close()
        self._line.close()

    def _say(self, plain: dict[str, Any]) -> None:
        self._line.sendall(json.dumps(plain).encode() + b"\n")
