"""The account of a campaign: its journal is checked as a customer would, and must add up.

A campaign is where accounts meet real faults: whatever it did to the job, each rank-second is in
one class, the export is whole, and the step log's quoted heads are all in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from keepstep.cli import sources
from keepstep.errors import KeepstepError
from keepstep.ledger import verify
from keepstep.ledger.account import account


@dataclass(frozen=True, slots=True)
class Reckoning:
    """What a campaign's account says."""

    problem: str = ""
    """Why the account cannot be trusted; empty: it can."""
    goodput: float = 0.0
    resolved: int = 0
    counted: int = 0
    classes: dict[str, float] = field(default_factory=dict)
    """Rank-seconds."""


def reckon(run_dir: Path, job: str) -> Reckoning:
    if not (run_dir / "journal.db").exists():
        # The settings put it into a database, which outlives the campaign: report on it there.
        return Reckoning()
    try:
        source = sources.from_run(run_dir, job)
        verify.check_heads(source.chain, source.steps)
        found = account(source.chain, source.steps)
    except (KeepstepError, verify.Broken) as error:
        return Reckoning(problem=str(error))
    if sum(found.classes.values()) != found.total:
        return Reckoning(problem="the classes do not sum to the total")
    seconds = {name: value / 1e9 for name, value in found.classes.items()}
    kept = found.guarantee
    return Reckoning("", found.goodput, kept.resolved, kept.counted, seconds)
