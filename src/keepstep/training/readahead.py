"""The next items of an iterator, made on a thread of their own while the present one is worked on.

For: steps that are made again while all wait. What comes over the network and is compared with its
digests takes as long as the update before it, and has nothing to do with it.

    for item in Readahead(items): …      in their order; what makes them may raise, and so does this

Must never: go far ahead of who takes them, for each may be large; wait for ever for somebody who
has left.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Generic, Self, TypeVar

from keepstep.training.errand import Errand

T = TypeVar("T")

ROOM = 1
"""Items that are made and not yet taken, beside the one that is being made."""
LEAVE_SECONDS_MAX = 1.0
"""For the thread to end, once nobody takes any more: it may wait for a peer that is gone."""


class Readahead(Generic[T]):
    """Used by `with`: who leaves in the middle leaves the thread to end by itself."""

    def __init__(self, items: Iterator[T]) -> None:
        self._made: queue.SimpleQueue[tuple[T] | None] = queue.SimpleQueue()
        self._free = threading.Semaphore(ROOM)
        self._left = False
        self._making = Errand("keepstep-readahead", lambda: self._make(items))

    def __enter__(self) -> Self:
        self._making.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left = True
        self._free.release()
        self._making.wait(LEAVE_SECONDS_MAX)

    def __iter__(self) -> Iterator[T]:
        while (made := self._made.get()) is not None:
            self._free.release()
            yield made[0]
        self._making.wait()
        self._making.result()

    def _make(self, items: Iterator[T]) -> None:
        try:
            for item in items:
                self._free.acquire()
                if self._left:
                    return
                self._made.put((item,))
        finally:
            self._made.put(None)
