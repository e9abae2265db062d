"""Time as a thing one can hand over: the real clock, and a virtual one for tests and simulation.

Two readings of `monotonic()` on one machine may be subtracted; readings of two machines never.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where a loop gets its `now` from."""

    def now(self) -> float:
        """Seconds since 1970, for records that people read."""

    def monotonic(self) -> float:
        """Seconds that never go back, for durations on this machine."""


class RealClock:
    """The machine's own clocks."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that stands still until it is told to move."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._now

    def advance_to(self, moment: float) -> None:
        assert moment >= self._now, "a virtual clock never goes back"
        self._now = moment
