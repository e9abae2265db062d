"""Every job's account to date, for the page and the metrics: read along in the journal.

Whoever watches must not slow down whoever is watched: each look reads a few jobs' new links and no
more than a page of each, so after a restart the accounts of a large cluster fill up in moments
rather than at once. While the journal cannot be reached they stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from keepstep import codec
from keepstep.errors import KeepstepError
from keepstep.ledger import verify
from keepstep.ledger.to_date import ToDate
from keepstep.model import JobId
from keepstep.orchestrator.board import Account
from keepstep.orchestrator.journal import PAGE_LINKS, Journal

JOBS_PER_LOOK = 4
LINKS_PER_LOOK = PAGE_LINKS
"""Of one job. A millisecond, or some tens if all of them are reports of many nodes."""


class Accounts:
    """What was read so far."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._found: dict[JobId, ToDate] = {}
        self._read: dict[JobId, int] = {}
        """The number of the newest link that was read."""
        self._turn: list[JobId] = []

    def look(self, jobs: Iterable[JobId]) -> None:
        """Read on, for those whose turn it is. Whoever is gone is forgotten."""
        known = dict.fromkeys(jobs)
        for gone in self._found.keys() - known.keys():
            del self._found[gone], self._read[gone]
        self._turn = [job for job in self._turn if job in known] or list(known)
        mine, self._turn = self._turn[:JOBS_PER_LOOK], self._turn[JOBS_PER_LOOK:]
        try:
            for job in mine:
                self._read_on(job)
        except KeepstepError:
            self._turn = []  # Nobody looks at accounts for the sake of the journal's troubles.

    def _read_on(self, job: JobId) -> None:
        found = self._found.setdefault(job, ToDate(str(job)))
        number = self._read.setdefault(job, 0)
        for link in islice(self._journal.export(str(job), number), LINKS_PER_LOOK):
            found.hear(codec.loads(link.body))
            self._read[job] = link.number

    def of(self, job: JobId, now: float) -> Account | None:
        """As far as it was read; None before its first link."""
        if not self._read.get(job):
            return None
        found = self._found[job]
        # Terms that the job names are in its owner's file: what they promise is not known here.
        return _account([found], now, None if found.terms else verify.Terms().promised)

    def of_all(self, now: float) -> Account | None:
        """All jobs together."""
        read = [found for job, found in self._found.items() if self._read[job]]
        return _account(read, now, None) if read else None


def _account(found: Sequence[ToDate], now: float, promised: float | None) -> Account:
    spent = [each.spent(now) for each in found]
    useful, paid = (sum(part) for part in zip(*spent, strict=True))
    resolved = sum(each.resolved for each in found)
    failures = sum(each.counted for each in found)
    return Account(
        useful / paid if paid else None,
        resolved / failures if failures else None,
        promised,
        failures,
    )
