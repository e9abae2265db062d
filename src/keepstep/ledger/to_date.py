"""A running job's account to date, from its chain alone and link by link. Pure.

For those who watch: it costs the same after a year as after an hour. Without the step log all
training counts as useful, and an incident that was resumed counts as resolved: what the control
plane says of itself. `keepstep report` and `keepstep verify` hold the step log against it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from keepstep.ledger import verify
from keepstep.ledger.goodput import OVER, UNPAID, Spent, nanoseconds, spent_on


class ToDate:
    """Of one job."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._facts: dict[str, Any] = {}
        self._at = 0
        """When the newest link was written: what it says is so since then."""
        self._world, self._over = 0, True
        self._run: Counter[Spent] = Counter()
        """Of the run that is not over yet: per rank, since ranks do the same at the same time."""
        self._useful = self._paid = 0
        """Of the runs before it: rank-nanoseconds."""
        self.counted = self.resolved = 0
        """Failures that count, and how many of them were resolved live."""
        self.terms = ""
        """The digest of the terms that the job names; empty: it names none."""

    def hear(self, body: Mapping[str, Any]) -> None:
        """The next link of the chain."""
        entry, event = body["entry"], body["entry"]["event"]
        at = nanoseconds(entry["now"])
        self._run = self._passed(at)
        if event["kind"] == "Submitted":
            self._end_run()
            self._at, self._over = at, False
            self.terms = str(event["body"].get("spec", {}).get("terms") or "")
        self._at = max(at, self._at)
        self._facts = dict(entry.get("jobs", {}).get(self._job, {})) or self._facts
        if closed := self._facts.pop("closed", None):
            self._judge(closed)
        if not self._over:
            self._world = max(self._world, int(self._facts.get("world", 0)))
            self._over = self._facts.get("state") in OVER

    def spent(self, now: float) -> tuple[int, int]:
        """Useful and paid rank-nanoseconds."""
        passed = self._passed(nanoseconds(now))
        world = max(1, self._world)
        useful = self._useful + passed[Spent.USEFUL] * world
        return useful, self._paid + _paid(passed) * world

    def _end_run(self) -> None:
        """Another one is submitted."""
        world = max(1, self._world)
        self._useful += self._run[Spent.USEFUL] * world
        self._paid += _paid(self._run) * world
        self._run, self._world, self._facts = Counter(), 0, {}

    def _passed(self, at: int) -> Counter[Spent]:
        """This run's time, if all stays as the newest link says. It never goes back."""
        passed = Counter(self._run)
        if not self._over:
            passed[spent_on(self._facts)] += max(0, at - self._at)
        return passed

    def _judge(self, closed: Mapping[str, Any]) -> None:
        outcome = closed["outcome"]
        if outcome in verify.WISHED and not closed["causes_count"]:
            return
        if verify.EXCLUDED.get(outcome, outcome) in verify.Terms().excluded:
            return
        self.counted += 1
        self.resolved += outcome == "resumed"


def _paid(passed: Counter[Spent]) -> int:
    return sum(length for kind, length in passed.items() if kind not in UNPAID)
