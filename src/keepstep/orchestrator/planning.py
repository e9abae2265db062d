"""Plans: what REFORM and SAVE are told to do, and whom a failed transfer casts doubt on."""

from __future__ import annotations

import re

from keepstep.model import TAINT_SECONDS, Rank
from keepstep.orchestrator import homes, roster
from keepstep.orchestrator.state import Job, Migration, Plan, Taint, slot_key
from keepstep.orchestrator.turn import Turn
from keepstep.wire import SeatReport


def too_early(job: Job, migration: Migration) -> str:
    """Why nobody can have committed a step yet, or the empty string if somebody may have."""
    at_first = [r for rank, r in migration.reports.items() if rank not in migration.joined]
    if not job.begun and any(report.boundary < 0 for report in at_first):
        return "some ranks had not reached their first step"
    if any(report.unsettled for report in migration.reports.values()):
        return "the run is in its first steps and none of them is committed"
    return ""


def reform(turn: Turn, job: Job, verdict: roster.Verdict) -> Plan:
    """Who sends what to whom, and where private state is fetched."""
    migration, now = job.migration, job.roster
    assert migration is not None
    assert now is not None
    reports = migration.reports
    moves = roster.moves(verdict, reports, now.seats, migration.excluded)
    needy = roster.needy(verdict.boundary, reports)
    homes = roster.homes(needy, job.settled, turn.cluster.nodes)
    size = max((report.state_bytes for report in reports.values()), default=0)
    return Plan(
        verdict.boundary, verdict.digest, moves, homes, winners=verdict.winners, bytes_max=size
    )


def save(turn: Turn, job: Job, verdict: roster.Verdict) -> Plan:
    """The lowest trusted holder of the boundary writes it down, with everybody's private state."""
    migration = job.migration
    assert migration is not None
    writer = roster.trusted_sources(verdict.winners, migration.excluded)[0]
    needy = roster.needy(verdict.boundary, migration.reports, migration.gone)
    homes = roster.homes(needy, job.settled, turn.cluster.nodes)
    path = f"{job.spec.state_directory or '.'}/boundary-{verdict.boundary}-g{job.generation}"
    return Plan(verdict.boundary, verdict.digest, (), homes, writer, path)


def taint(turn: Turn, job: Job, rank: Rank, why: str) -> None:
    now = job.roster
    assert now is not None
    seat = now.seats[rank]
    until = turn.now + TAINT_SECONDS
    turn.cluster.taints[slot_key(seat.node, seat.slot)] = Taint(why, turn.now, until)
    homes.found_bad(turn.cluster.nodes[seat.node], turn.now)
    turn.note(f"{why}: it receives, and {seat.node} slot {seat.slot} is tainted", job)


def homes_returned(turn: Turn, job: Job, plan: Plan, ranks: list[Rank]) -> bool:
    """Whether each of these ranks has a home by now that was not asked: a node came back."""
    asked = {home.rank: set(home.endpoints) for home in plan.homes}
    known = roster.homes(ranks, job.settled, turn.cluster.nodes)
    return all(set(home.endpoints) - asked.get(home.rank, set()) for home in known)


def _named(problem: str) -> tuple[Rank, ...]:
    """The source that a receiver blames by its rank: "source 3: …"; () if it names none."""
    found = re.match(r"source (\d+)\b", problem)
    return (Rank(int(found[1])),) if found else ()


def suspects(plan: Plan, bad: list[SeatReport]) -> list[Rank]:
    """Whom these failed receipts cast doubt on; nobody, if it was not the state that was wrong."""
    moves = {move.target: move for move in plan.moves}
    found: set[Rank] = set()
    for seat in bad:
        if seat.problem and not seat.problem.startswith("source"):
            continue
        move = moves.get(seat.rank)
        found.update(_named(seat.problem) or (move.sources if move else (seat.rank,)))
    return sorted(found)
