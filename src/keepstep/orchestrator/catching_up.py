"""Catching up: ranks that stand before an update which others have made, make it too.

In a sharded job all ranks vote before the update of a step, each with its gradients complete. So
once anybody has made the update, everybody can. When a fault cuts the vote short, some have heard
its end and updated, and some wait before the update and say `ready`:

    all in QUIESCE -> somebody is at B, others ready at B-1 -> Apply(B) to those -> QUIESCE from B

If nobody has updated, nobody does: the step is retried. In plain DDP nobody is ever ready.
"""

from __future__ import annotations

from collections.abc import Mapping

from keepstep.model import Phase, Rank
from keepstep.orchestrator import alike, launch, orders
from keepstep.orchestrator.state import Job, Migration, in_migration
from keepstep.orchestrator.turn import Turn
from keepstep.wire import SeatReport


def behind(reports: Mapping[Rank, SeatReport]) -> tuple[int, tuple[Rank, ...]]:
    """The newest boundary, and who can still make the update that leads to it."""
    said = alike.distinct(reports.values())
    newest = max((report.boundary for report in said if report.intact), default=-1)
    if not any(report.ready for report in said):
        return newest, ()
    ready = (
        rank
        for rank, report in reports.items()
        if report.ready and report.intact and report.boundary == newest - 1
    )
    return newest, tuple(sorted(ready))


def begin(turn: Turn, job: Job) -> bool:
    """Tell those who are behind to make the update. False: nobody is."""
    migration, _ = in_migration(job)
    boundary, ranks = behind(migration.reports)
    if not ranks:
        return False
    # Their time begins here, as if the phase had.
    launch.change_phase(turn, job, Phase.QUIESCE, keep_reports=True)
    migration.apply_to, migration.applying = boundary, ranks
    for rank in ranks:
        del migration.reports[rank]
    listed = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    turn.note(f"others have made the update to {boundary}: rank {listed} shall make it too", job)
    orders.tell_apply(turn, job)
    return True


def still_before(migration: Migration, seat: SeatReport) -> bool:
    """What a rank said before it was told to make the update, again: not what is waited for.

    All have reported before anybody is told, so whoever is still waited for was told.
    """
    return seat.ready and seat.boundary < migration.apply_to
