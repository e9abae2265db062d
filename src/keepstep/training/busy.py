"""Declared slowness: what this rank is at that takes longer than a step, and for how long at most.

Declarations nest: a compilation inside an evaluation ends before the evaluation does.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from keepstep import wire
from keepstep.model import Generation, Phase, Rank

if TYPE_CHECKING:
    from keepstep.training.keeper import Keeper


class Busy:
    """One per protected process; the training thread declares, the link's thread reports."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._declared: list[tuple[str, float]] = []
        self._since = 0.0

    def begin(self, name: str, seconds_max: float) -> None:
        if not self._declared:
            self._since = time.monotonic()
        self._declared = [*self._declared, (name, time.monotonic() + seconds_max)]
        self._show()

    def end(self) -> None:
        outermost, *nested = self._declared or [("", 0.0)]
        if not nested and outermost[0]:
            # The step log says what the time was for: it is neither training nor a pause of ours.
            self._keeper.log.spend(outermost[0], time.monotonic() - self._since)
        self._declared = self._declared[:-1]
        self._show()

    def _show(self) -> None:
        name, until = self._longest()
        self._keeper.page.set_busy(name, int(until * 1e9))

    def _longest(self) -> tuple[str, float]:
        return max(self._declared, key=lambda each: each[1], default=("", 0.0))

    def report(self) -> wire.WorkerReport | None:
        name, until = self._longest()
        if not name:
            return None
        keeper = self._keeper
        seconds = max(0.0, until - time.monotonic())
        seat = wire.SeatReport(Rank(keeper.place.rank), busy_seconds=seconds + 1.0)
        return wire.WorkerReport(
            keeper.place.job, Generation(keeper.inbox.generation), Phase.QUIESCE, seat
        )
