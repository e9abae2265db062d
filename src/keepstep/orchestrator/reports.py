"""The reports of a phase: which of them count, which are late, and which only show progress."""

from __future__ import annotations

from keepstep.model import NodeId, Phase, Rank
from keepstep.orchestrator import alike, catching_up
from keepstep.orchestrator.state import Job, in_migration
from keepstep.orchestrator.turn import Turn
from keepstep.wire import Observed, PhaseReport, SeatReport


def take(turn: Turn, job: Job, report: PhaseReport) -> list[SeatReport]:
    """Keep what is new in a report of the present phase; returns the seats that are through it."""
    migration, _ = in_migration(job)
    taken: list[SeatReport] = []
    for seat in report.seats:
        if seat.alike:
            if not catching_up.still_before(migration, seat) and alike.take(
                turn, job, report, seat
            ):
                taken.append(seat)
            continue
        known = _speaks_for(turn, job, report.node, seat.rank)
        if not known or seat.rank in migration.gone or seat.rank in migration.reports:
            continue
        if catching_up.still_before(migration, seat):
            continue
        if seat.busy_seconds > 0:
            # Not done yet, and it said for how long at most: its budget waits.
            migration.busy[seat.rank] = turn.now + seat.busy_seconds
            turn.note(f"rank {seat.rank} is busy for up to {seat.busy_seconds:g} s", job)
        else:
            migration.reports[seat.rank] = seat
            migration.fresh.pop(seat.rank, None)
            taken.append(seat)
    if not taken and not turn.touched:
        turn.ignore(f"report of {report.phase} from {report.node} ignored: nothing new in it")
    return taken


def progress(turn: Turn, job: Job, report: PhaseReport) -> None:
    """News on the way to VERIFY is shown, and helps to tell who hangs; the rest is late."""
    migration = job.migration
    assert migration is not None
    if migration.phase is Phase.REFORM and report.phase in (Phase.REFORM, Phase.TRANSFER):
        for seat in report.seats:
            if _speaks_for(turn, job, report.node, seat.rank):
                migration.progress[seat.rank] = report.phase
                turn.touched = True
        if not turn.touched:
            turn.ignore(f"progress of ranks that are not on {report.node} ignored")
        return
    turn.ignore(f"stale report of {report.phase} from {report.node} ignored in {migration.phase}")


def _speaks_for(turn: Turn, job: Job, node: NodeId, rank: Rank) -> bool:
    """A node speaks for its own ranks; the root of a tree of agents, if there is one, for all."""
    migration, now = in_migration(job)
    if not 0 <= rank < len(now.seats):
        return False
    if turn.cluster.tree and migration.phase is not Phase.WARM and node == now.store_node:
        return True
    return _place(job, rank) == node


def _place(job: Job, rank: Rank) -> NodeId | None:
    """Where the worker is whose report counts."""
    migration, now = in_migration(job)
    if migration.phase is not Phase.WARM:
        return now.seats[rank].node
    return migration.coming[rank].node if rank in migration.coming else None


def uncovered(turn: Turn, job: Job, event: Observed, *, sits: bool) -> None:
    """A mirror got no record of a step. Until the next generation that portion has one home."""
    known = sits and event.generation == job.generation
    if not known or job.covers.get(event.cover) != event.rank:
        turn.ignore(f"rank {event.rank} keeps no portion {event.cover[:40]}")
        return
    del job.covers[event.cover]
    turn.note(f"portion {event.cover} has one home only: {event.detail}", job)
