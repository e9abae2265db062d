"""Plans: what REFORM and SAVE are told to do, and whom a failed transfer casts doubt on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keepstep.model import TAINT_SECONDS, Rank, Sign
from keepstep.orchestrator import alike, homes, portions, roster
from keepstep.orchestrator.incidents import Fault
from keepstep.orchestrator.state import (
    Cause,
    Job,
    Migration,
    Plan,
    Taint,
    in_migration,
    put_taint,
    slot_key,
)
from keepstep.orchestrator.turn import Turn
from keepstep.wire import SeatReport

REBUILT_SHARDS = 8
"""So much more than a shard travels when it is made again: a third of one per step's record."""


def too_early(job: Job, migration: Migration) -> str:
    """Why nobody can have committed a step yet, or the empty string if somebody may have."""
    if not job.begun:
        at_first = (r for rank, r in migration.reports.items() if rank not in migration.joined)
        if any(report.boundary < 0 for report in at_first):
            return "some ranks had not reached their first step"
    if any(report.unsettled for report in alike.distinct(migration.reports.values())):
        return "the run is in its first steps and none of them is committed"
    return ""


def judge(job: Job, reports: Mapping[Rank, SeatReport] | None = None) -> roster.Verdict:
    """Whose state counts, by the reports of this phase, or by these of them."""
    migration, now = in_migration(job)
    said = migration.reports if reports is None else reports
    known = tuple(sorted(job.portions))
    return roster.judge(said, len(now.seats), known, told=job.portions_told)


def reform(turn: Turn, job: Job, verdict: roster.Verdict) -> Plan:
    """Who sends what to whom, and where private state is fetched."""
    migration, now = in_migration(job)
    reports = migration.reports
    said = alike.distinct(reports.values())
    moves = roster.moves(verdict, reports, now.seats, migration.excluded)
    needy = roster.needy(verdict.boundary, reports)
    homes = roster.homes(needy, job.settled, turn.cluster.nodes)
    size = max((report.state_bytes for report in said), default=0)
    names = portions.listed(verdict.digests)
    held = portions.index(names, len(now.seats))
    busiest = roster.bytes_through_busiest(moves, size, lambda rank: len(held[rank]))
    if job.covers:
        # New mirrors get whole shards, and who is rebuilt a capsule and gradients of many steps.
        busiest += size * (REBUILT_SHARDS if verdict.rebuilt else 1)
    return Plan(
        verdict.boundary,
        verdict.digests,
        moves,
        homes,
        winners=verdict.winners,
        names=names,
        bytes_max=busiest,
        groups_alike=roster.groups_alike(said),
    )


def save(turn: Turn, job: Job, verdict: roster.Verdict) -> Plan:
    """Trusted holders of the boundary write it down; the first also everybody's private state."""
    migration = job.migration
    assert migration is not None
    writers = roster.writers(verdict, migration.excluded)
    needy = roster.needy(verdict.boundary, migration.reports, migration.gone)
    homes = roster.homes(needy, job.settled, turn.cluster.nodes)
    path = f"{job.spec.state_directory or '.'}/boundary-{verdict.boundary}-g{job.generation}"
    return Plan(verdict.boundary, verdict.digests, (), homes, writers, path)


def taint(turn: Turn, job: Job, rank: Rank, why: str) -> None:
    now = job.roster
    assert now is not None
    seat = now.seats[rank]
    until = turn.now + TAINT_SECONDS
    put_taint(turn.cluster, slot_key(seat.node, seat.slot), Taint(why, turn.now, until))
    homes.found_bad(turn.cluster.nodes[seat.node], turn.now)
    turn.note(f"{why}: it receives, and {seat.node} slot {seat.slot} is tainted", job)


@dataclass(frozen=True, slots=True)
class Again:
    """Another round, without the sources that were used."""

    why: str


@dataclass(frozen=True, slots=True)
class NoSource:
    """Nobody in the roster can give whole state."""

    why: str


def unfit(job: Job, plan: Plan, taken: Sequence[SeatReport]) -> list[SeatReport]:
    """Those who do not hold what was agreed on, each portion of it and nothing else."""
    _, now = in_migration(job)
    held = portions.index(plan.names, len(now.seats))
    agreed = _agreed(job, plan)
    if len(agreed) > 1:
        taken = [one for seat in taken for one in alike.apart(seat, len(now.seats))]
    bad = [
        seat
        for seat in taken
        if seat.problem
        or any(_differs(seat, name, agreed) for name in held[seat.rank])
        or not agreed.keys() >= seat.digests.keys()
    ]
    return [one for seat in bad for one in alike.apart(seat, len(now.seats))]


def wrong(job: Job, plan: Plan, seat: SeatReport) -> list[str]:
    """The portions that a rank should hold and does not."""
    _, now = in_migration(job)
    held = portions.index(plan.names, len(now.seats))[seat.rank]
    agreed = _agreed(job, plan)
    return [name for name in held if _differs(seat, name, agreed)]


def _agreed(job: Job, plan: Plan) -> dict[str, str]:
    """What each portion should be. Of one that was synced anew: what the first to tell has."""
    migration, now = in_migration(job)
    unknown = [
        name
        for name, digest in plan.digests.items()
        if not digest and len(portions.holders(name, len(now.seats))) > 1
    ]
    if not unknown:
        return plan.digests
    first = {
        name: next((r.digests[name] for r in migration.reports.values() if name in r.digests), "")
        for name in unknown
    }
    return {**plan.digests, **first}


def _differs(seat: SeatReport, name: str, agreed: Mapping[str, str]) -> bool:
    """Of a portion that was rebuilt nobody could say what it should be, only that it is there."""
    found = seat.digests.get(name, "")
    return found != agreed[name] if agreed[name] else not found


def in_doubt(job: Job, plan: Plan, seat: SeatReport) -> list[str]:
    """What a rank received wrongly; all that it was to receive, if it stopped half-way.

    A receiver stops at the first portion that is wrong: those behind it are not there yet.
    """
    received = [move.portion for move in plan.moves if move.target == seat.rank]
    if seat.problem and received:
        return received
    parts = wrong(job, plan, seat)
    return [name for name in parts if name in seat.digests] or parts


def unverified(turn: Turn, job: Job, bad: list[SeatReport]) -> Fault | Again | NoSource:
    """State did not arrive whole: whom that casts doubt on, and what follows."""
    migration = job.migration
    assert migration is not None
    plan = migration.plan
    assert plan is not None
    worst = bad[0]
    why = f"rank {worst.rank} is not verified: {worst.problem or _difference(job, plan, worst)}"
    if any(seat.digests.keys() - plan.digests.keys() for seat in bad if not seat.problem):
        # Some receiver knows of a portion that no survivor spoke of: it has no home left.
        return NoSource(why)
    orphans = [seat.rank for seat in bad if seat.problem.startswith("no private state")]
    if orphans and not homes_returned(turn, job, plan, orphans):
        return NoSource(why)
    doubtful = suspects(job, plan, bad)
    if not doubtful:
        return Fault((Cause(Sign.BROKEN, worst.rank, detail=why),), why)
    for rank in doubtful:
        migration.excluded[rank] = migration.excluded.get(rank, 0) + 1
    migration.attempts += 1
    if migration.attempts < job.spec.policy.transfer_attempts_max:
        barred = ", ".join(map(str, sorted(migration.excluded)[:8]))
        return Again(f"{why}; another round, suspected as sources: {barred}")
    missing = {name for seat in bad for name in in_doubt(job, plan, seat)}
    if any(all(r in migration.excluded for r in plan.winners[name]) for name in missing):
        return NoSource(f"{why}; {migration.attempts} attempts failed")
    # Fresh sources each time and still wrong: it is the receiver.
    migration.attempts = 0
    taint(turn, job, worst.rank, f"rank {worst.rank} cannot receive whole state")
    return Fault((Cause(Sign.HANG, worst.rank, detail=why),), why, kill=(worst.rank,))


def homes_returned(turn: Turn, job: Job, plan: Plan, ranks: list[Rank]) -> bool:
    """Whether each of these ranks has a home by now that was not asked: a node came back."""
    asked = {home.rank: set(home.endpoints) for home in plan.homes}
    known = roster.homes(ranks, job.settled, turn.cluster.nodes)
    return all(set(home.endpoints) - asked.get(home.rank, set()) for home in known)


def _named(problem: str) -> tuple[Rank, ...]:
    """The source that a receiver blames by its rank: "source 3: …"; () if it names none."""
    found = re.match(r"source (\d+)\b", problem)
    return (Rank(int(found[1])),) if found else ()


def suspects(job: Job, plan: Plan, bad: list[SeatReport]) -> list[Rank]:
    """Whom these failed receipts cast doubt on; nobody, if it was not the state that was wrong."""
    moves = {(move.target, move.portion): move for move in plan.moves}
    found: set[Rank] = set()
    for seat in bad:
        if seat.problem and not seat.problem.startswith("source"):
            continue
        if named := _named(seat.problem):
            found.update(named)
            continue
        for name in in_doubt(job, plan, seat):
            move = moves.get((seat.rank, name))
            found.update(move.sources if move else (seat.rank,))
    return sorted(found)


def _difference(job: Job, plan: Plan, seat: SeatReport) -> str:
    _, now = in_migration(job)
    parts = wrong(job, plan, seat)
    if not parts:
        strange = min(seat.digests.keys() - plan.digests.keys())
        return f"it knows of portion {strange}, and nobody at the boundary spoke of it"
    name, size = parts[0], len(now.seats)
    of = "" if name == portions.of_all(size) else f" of portion {name}"
    agreed = _agreed(job, plan)[name]
    return f"digest {seat.digests.get(name, '')[:12]}{of} is not {agreed[:12]}"
