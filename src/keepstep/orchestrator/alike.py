"""One report for many ranks: what agents say of ranks that are all in the same state. Pure.

A report with `alike` holds for all the ranks that it names. The brain keeps the one object under
each of their numbers: what is asked about all ranks is then asked about a few distinct reports, and
a phase of 16,384 ranks is one message from the root of the agents' tree. The root is the node where
the generation meets: the brain itself has chosen it, and it has a seat of the job. It is believed
only where there is such a tree (Cluster.tree): else every node speaks for its own ranks.

Only what is well can be alike: a problem, a cover or a rank that is busy is somebody's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, compress, repeat
from operator import is_, is_not
from typing import cast

from keepstep import portion
from keepstep.errors import WireError
from keepstep.model import Phase, Rank
from keepstep.orchestrator.state import Job, in_migration
from keepstep.orchestrator.turn import Turn
from keepstep.wire import PhaseReport, SeatReport

GROUPS_FEW = 8
"""So few are gathered one by one, faster than all of them rank by rank."""


def distinct(reports: Iterable[SeatReport]) -> list[SeatReport]:
    """Each report once, however many ranks share it."""
    # No line of Python per rank, here and below: there may be thousands, in every phase. Of
    # neighbours that share one the first is enough.
    told = tuple(reports)
    first = tuple(compress(told, map(is_not, told, chain((None,), told))))
    return list(dict(zip(map(id, first), first, strict=True)).values())


def groups(reports: Mapping[Rank, SeatReport]) -> list[tuple[SeatReport, Sequence[Rank]]]:
    """Each report with the ranks that share it."""
    if len(few := distinct(reports.values())) <= GROUPS_FEW:
        return [
            (report, list(compress(reports, map(is_, reports.values(), repeat(report)))))
            for report in few
        ]
    if len(few) == len(reports):
        # Nobody shares any: the ranks of agents that speak for each of them.
        return list(zip(few, zip(reports, strict=True), strict=True))
    found: dict[int, list[Rank]] = {id(report): [] for report in few}
    for rank, report in reports.items():
        found[id(report)].append(rank)
    return list(zip(few, found.values(), strict=True))


def apart(seat: SeatReport, size: int) -> list[SeatReport]:
    """What was said of many, said of each."""
    if not seat.alike:
        return [seat]
    return [replace(seat, rank=Rank(rank), alike="") for run in _runs(seat, size) for rank in run]


def take(turn: Turn, job: Job, report: PhaseReport, seat: SeatReport) -> bool:
    """Keep one report for all the ranks that it names and that are waited for. False: for none."""
    migration, now = in_migration(job)
    if migration.phase is Phase.WARM or seat.problem or seat.covers or seat.busy_seconds > 0:
        return False
    said: dict[Rank, SeatReport] = {}
    for run in _runs(seat, len(now.seats)):
        # No call per rank: a run of thousands is the point of it.
        said.update(dict.fromkeys(cast(Iterable[Rank], run), seat))
    if not turn.cluster.tree or report.node != now.store_node:
        said = {rank: seat for rank in said if now.seats[rank].node == report.node}
    for rank in migration.gone:
        said.pop(rank, None)
    if len(migration.reports) < len(said):
        for rank in migration.reports:
            said.pop(rank, None)
    else:
        said = {rank: seat for rank in said if rank not in migration.reports}
    migration.reports.update(said)
    for rank in tuple(migration.fresh):
        if rank in said:
            del migration.fresh[rank]
    return bool(said)


def _runs(seat: SeatReport, size: int) -> tuple[range, ...]:
    """The ranks that it names; none, if there can be no such ranks."""
    try:
        runs = portion.runs_of(seat.alike)
    except WireError:
        return ()
    return () if any(run[-1] >= size for run in runs) else runs
