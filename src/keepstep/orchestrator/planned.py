"""Planned moves: a rank leaves while its worker is alive and well.

    a wish (migrate, drain) -> WARM -> AGREE -> QUIESCE … RESUME as in any migration -> release

Nobody pauses before the target is completely warm and all ranks know one boundary that suits them
all. Until the first step of the new generation is committed the leaver waits with its state: if
the target fails, the rank goes back to it, and the wish stays. A fault of anybody else while
targets warm up comes first; the move is made afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from keepstep.model import (
    Generation,
    JobState,
    MigrationId,
    NodeId,
    Phase,
    Rank,
    Seat,
    Severity,
    Sign,
)
from keepstep.orchestrator import (
    launch,
    limits,
    orders,
    placing,
    policy,
    portions,
    remedies,
    seating,
    slots,
    spares,
    suspicion,
)
from keepstep.orchestrator.state import (
    Job,
    Leave,
    Migration,
    Occupant,
    in_migration,
    next_incarnation,
    slot_key,
)
from keepstep.orchestrator.turn import Turn
from keepstep.wire import Observed

LEAD_SECONDS = 0.1
"""The agreed boundary is so far ahead that the order reaches everybody before it."""
RETRY_SECONDS_MIN = 1.0
RETRY_SECONDS_MAX = 60.0

TRAINING = (Phase.WARM, Phase.AGREE)
"""Phases in which everybody still trains in the old generation."""


# ---------------------------------------------------------------- wishes


def wish(
    turn: Turn,
    job: Job,
    ranks: Iterable[Rank],
    why: str,
    to: NodeId = NodeId(""),
    *,
    urgent: bool = False,
    home: bool = False,
) -> None:
    """These ranks shall move; those that are already on their way stay on it."""
    assert job.roster is not None
    moving = job.migration.leavers if job.migration else {}
    new = []
    asked = set(ranks)
    if not to:
        asked |= placing.companions(placing.Search(turn.cluster, job, turn.now), asked)
    for rank in sorted(asked):
        seat = job.roster.seats[rank]
        known = job.leaving.get(rank)
        more = known is None or (urgent and not known.urgent)
        more = more or (not home and to not in ("", known.to if known else ""))
        # Who has to leave, and waits for one certain place, goes to any: it must not stay for ever.
        more = more or bool(not to and known and known.to and known.waits)
        if rank in moving or not more:
            continue
        job.leaving[rank] = Leave(seat.incarnation, why, turn.now, to, urgent=urgent, home=home)
        new.append(rank)
    if new:
        listed = ", ".join(map(str, new[:8]))
        where = f" to {to}" if to else ""
        turn.note(f"rank {listed} shall move{where}: {why}", job)
        job.leave_at = 0.0
        begin(turn, job)


def withdraw(turn: Turn, job: Job, why: str) -> None:
    """Wishes with this reason are not wanted any more. A move that is under way is made."""
    gone = sorted(rank for rank, leave in job.leaving.items() if leave.why == why)
    for rank in gone:
        del job.leaving[rank]
    if gone:
        turn.note(f"rank {', '.join(map(str, gone[:8]))} need not move any more", job)


def cancel(turn: Turn, job: Job, ranks: Iterable[Rank]) -> None:
    """Somebody takes a wish back. One that has a cause of its own comes back with it."""
    assert job.roster is not None
    for rank in ranks:
        moving, seat = job.migration, job.roster.seats[rank]
        if moving is not None and rank in moving.leavers:
            turn.ignore(
                f"rank {rank} is on its way to {seat.node} already; move it back afterwards"
            )
        elif rank not in job.leaving and (moving is None or rank not in moving.coming):
            turn.ignore(f"rank {rank} of {job.spec.job} is not asked to move")
        elif fix := _cause_stands(turn, seat):
            turn.ignore(f"rank {rank} has to leave: {fix} first")
        else:
            job.leaving.pop(rank, None)
            turn.note(f"rank {rank} stays on {seat.node}: the wish was taken back", job)
    moving = job.migration
    if moving is not None and moving.phase in TRAINING and set(moving.coming) - set(job.leaving):
        give_up(turn, job, "somebody who was to move stays")
        # It was nobody's fault: the others need not wait.
        job.moves_failed, job.leave_at = 0, turn.now
        begin(turn, job)


def _cause_stands(turn: Turn, seat: Seat) -> str:
    """What would have to be undone first; empty: nothing makes this rank leave but a wish."""
    if turn.cluster.nodes[seat.node].drained:
        return f"{seat.node} is drained; `keepstep undrain {seat.node}`"
    for place in (seat.node, slot_key(seat.node, seat.slot)):
        if any(t.severity is not Severity.AVOID for t in turn.cluster.taints.get(place, ())):
            return f"{place} is tainted; `keepstep untaint {place}`"
    return ""


def reword(job: Job, before: str, why: str) -> None:
    """The reason of these wishes has other words now; the wishes are what they were."""
    for rank, leave in job.leaving.items():
        if leave.why == before:
            job.leaving[rank] = replace(leave, why=why)


def refusal(job: Job, ranks: Iterable[Rank] = ()) -> str:
    """Why no rank of this job, or one of these, can be moved, ever; empty if they can."""
    if job.spec.world_size == 1:
        return (
            f"{job.spec.job} has one rank, and nobody from whom a second worker could get its "
            "state; use `keepstep stop --save` and run it again"
        )
    for rank, name in sorted(portions.alone(job, ranks).items()):
        return _no_second_home(job, rank, name)
    return ""


def _no_second_home(job: Job, rank: Rank, name: str) -> str:
    return (
        f"rank {rank} of {job.spec.job} holds portion {name} alone, and there is nobody from "
        "whom a second worker could get it; use `keepstep stop --save` and run it again"
    )


def steady(job: Job) -> bool:
    """It trains and nothing is going on: a move can begin."""
    still = job.migration is None and job.unsure is None
    return still and job.state is JobState.RUNNING and not job.finished


# ---------------------------------------------------------------- WARM


def begin(turn: Turn, job: Job) -> None:
    """Start to warm targets for all who wish to leave, if there is room for each."""
    if not steady(job) or not job.leaving or turn.now < job.leave_at or job.roster is None:
        return
    if turn.cluster.frozen or suspicion.yet_to_come(turn.cluster, turn.now):
        return  # Only a target's node knows of a move that was being prepared.
    _forget_stale(turn, job)
    # Of each portion somebody has to stay: the others get their state from those who do.
    first = sorted(job.leaving, key=lambda rank: (not job.leaving[rank].urgent, rank))
    _tell_alone(turn, job)
    ranks = limits.first_ones(turn, job, portions.leavable(job, first))
    chosen = _choose(turn, job, sorted(ranks))
    left = [rank for rank in first if rank not in ranks]
    if not chosen and left:
        # Who stays was not to stay for ever because another one waits for a place.
        others = limits.first_ones(turn, job, portions.leavable(job, left))
        chosen = _choose(turn, job, sorted(others))
    if not policy.acts(job):
        _only_tell(turn, job, chosen)
        return
    if not chosen:
        limits.let_go(turn, job)
        return
    if _waits_its_turn(turn, job, chosen):
        return
    launch.open_incident(turn, job)
    name = MigrationId(f"m{turn.cluster.next()}")
    migration = Migration(name, "planned", "move", Phase.WARM, turn.now, turn.now, outcome="moved")
    job.migration = migration
    job.promised = Generation(max(job.generation, job.promised) + 1)
    told = []
    for rank, choice in chosen.items():
        incarnation = next_incarnation(job, job.roster.seats[rank])
        job.incarnations[rank] = incarnation
        spares.take(turn.cluster, job, choice, rank, incarnation)
        migration.coming[rank] = Seat(rank, choice.node, choice.slot, incarnation)
        job.leaving[rank] = replace(job.leaving[rank], waits="")
        told.append(f"rank {rank} to {choice.why}")
    moved = ", ".join(told[:4]) + (f" and {len(told) - 4} more" if len(told) > 4 else "")
    why = job.leaving[min(chosen)].why
    turn.note(f"planned ({why}): warming {moved}; training goes on", job)
    orders.tell(turn, job)


def _waits_its_turn(turn: Turn, job: Job, chosen: Iterable[Rank]) -> bool:
    """Too many others are on the move: the wish stays, and says so."""
    waits = limits.planned_must_wait(turn, job)
    told = [rank for rank in chosen if waits and job.leaving[rank].waits != waits]
    for rank in told:
        job.leaving[rank] = replace(job.leaving[rank], waits=waits)
    if told:
        turn.note(f"rank {', '.join(map(str, told[:8]))} waits for its turn: {waits}", job)
    return bool(waits)


def _only_tell(turn: Turn, job: Job, chosen: dict[Rank, placing.Choice]) -> None:
    """In mode observe the wish stays, and says what would become of it."""
    for rank, choice in chosen.items():
        waits = f"observe: would move to {choice.why}; this job's policy says mode = observe"
        if job.leaving[rank].waits != waits:
            job.leaving[rank] = replace(job.leaving[rank], waits=waits)
            turn.note(f"observe: would move rank {rank} to {choice.why}", job)


def _forget_stale(turn: Turn, job: Job) -> None:
    assert job.roster is not None
    for rank, leave in sorted(job.leaving.items()):
        if job.roster.seats[rank].incarnation != leave.incarnation:
            # It moved for another reason: whoever is there now was not meant.
            del job.leaving[rank]
            turn.touched = True


def _choose(turn: Turn, job: Job, ranks: Sequence[Rank]) -> dict[Rank, placing.Choice]:
    """A target for each; the urgent ones go even if the others cannot. Nobody: each says why."""
    assert job.roster is not None
    wishes = job.leaving
    within = job.spec.policy.leave_within_seconds
    urgent = {r for r in ranks if wishes[r].urgent or turn.now >= wishes[r].asked_at + within}
    seats = [job.roster.seats[rank] for rank in sorted(ranks, key=lambda r: (r not in urgent, r))]
    only = {rank: wishes[rank].to for rank in ranks if wishes[rank].to}
    chosen = placing.place(placing.Search(turn.cluster, job, turn.now), seats, only)
    if missing := [rank for rank in ranks if rank not in chosen]:
        for to in sorted({wishes[rank].to for rank in missing}):
            _wait(turn, job, [rank for rank in missing if wishes[rank].to == to], len(chosen))
        # Who waits for one certain place holds up nobody.
        held_up = any(not wishes[rank].to for rank in missing)
        chosen = {rank: c for rank, c in chosen.items() if rank in urgent or not held_up}
    return chosen


def _wait(turn: Turn, job: Job, ranks: Sequence[Rank], found: int) -> None:
    """Who waits for the same says why, once, with what would help."""
    cluster, to = turn.cluster, job.leaving[ranks[0]].to
    if to:
        waits = f"no room yet: {remedies.place_shut(cluster, job, to, ranks, turn.now)}"
    else:
        waits = f"no room yet: {len(ranks) + found} needed, {found} free"
    if any(job.leaving[rank].waits != waits for rank in ranks):
        for rank in ranks:
            job.leaving[rank] = replace(job.leaving[rank], waits=waits)
        fix = "" if to else f"; {remedies.sentence(cluster, job, turn.now)}"
        turn.note(f"rank {', '.join(map(str, ranks[:8]))} cannot move: {waits}{fix}", job)


def _tell_alone(turn: Turn, job: Job) -> None:
    """Who alone holds something cannot be moved at all: the wish stays, and says so."""
    for rank, name in sorted(portions.alone(job, job.leaving).items()):
        waits = _no_second_home(job, rank, name)
        if job.leaving[rank].waits != waits:
            job.leaving[rank] = replace(job.leaving[rank], waits=waits)
            turn.note(f"rank {rank} cannot move: {waits}", job)


def late(turn: Turn, job: Job) -> None:
    limit = job.spec.policy.startup_seconds_max
    give_up(turn, job, f"not all targets were warm within {limit:g} s")


def warmed(turn: Turn, job: Job) -> None:
    """All targets are ready: where is everybody?"""
    migration = job.migration
    assert migration is not None
    migration.warm = dict(migration.reports)
    launch.change_phase(turn, job, Phase.AGREE)
    turn.note(f"{len(migration.warm)} targets are warm: looking for a common boundary", job)
    orders.tell(turn, job)


# ---------------------------------------------------------------- AGREE


def agreed(turn: Turn, job: Job) -> None:
    """All have said where they are: the boundary is just far enough ahead."""
    migration = job.migration
    assert migration is not None
    reports = migration.reports.values()
    if any(report.unsettled for report in reports):
        give_up(turn, job, "the run is in its very first steps")
        return
    step_seconds = max(report.step_seconds for report in reports)
    ahead = math.ceil(LEAD_SECONDS / max(step_seconds, 0.001))
    migration.agreed = max(report.boundary for report in reports) + max(1, ahead)
    _quiesce(turn, job, f"all ranks stop at boundary {migration.agreed}")


def disagreed(turn: Turn, job: Job) -> None:
    """Somebody did not answer: its agent is away, or it is about to be found hung."""
    give_up(turn, job, "not all ranks said where they are")


def _quiesce(turn: Turn, job: Job, why: str) -> None:
    migration, before = in_migration(job)
    new = orders.next_roster(turn.cluster, job)
    migration.leavers = {rank: before.seats[rank] for rank in sorted(migration.coming)}
    migration.joined = {rank: seat.incarnation for rank, seat in migration.coming.items()}
    migration.coming = {}
    for rank in migration.leavers:
        job.missing.pop(rank, None)
    # The pause begins here, and with it what is told as its duration.
    migration.began_at = turn.now
    job.generation = job.promised
    launch.enter_generation(turn, job, new)
    launch.change_phase(turn, job, Phase.QUIESCE)
    migration.reports, migration.warm = migration.warm, {}
    job.state = JobState.MIGRATING
    turn.note(f"{why}, in generation {job.generation}", job)
    orders.tell(turn, job)


# ---------------------------------------------------------------- ends


def release(turn: Turn, job: Job) -> None:
    """The first step without the leavers is committed: they may go."""
    migration = job.migration
    assert migration is not None
    if not migration.leavers:
        return
    for rank in migration.leavers:
        job.leaving.pop(rank, None)
        job.incarnations.pop(rank, None)
    job.moves_failed = 0
    left = ", ".join(f"{rank} from {seat.node}" for rank, seat in sorted(migration.leavers.items()))
    seating.dismiss(turn, job, migration.leavers.values())
    migration.leavers = {}
    turn.note(f"released: rank {left}", job)


def give_up(turn: Turn, job: Job, why: str) -> None:
    """The target failed while everybody trained on: nothing happened. The wish stays."""
    migration = job.migration
    assert migration is not None
    assert migration.phase in TRAINING
    seating.dismiss(turn, job, migration.coming.values())
    migration.coming = {}
    _retry_later(turn, job)
    turn.note(f"{why}: the move is given up for now; nothing is lost", job)
    launch.change_phase(turn, job, Phase.DONE)
    launch.close_incident(turn, job, "abandoned")
    job.migration = None


def _retry_later(turn: Turn, job: Job) -> None:
    wait = min(RETRY_SECONDS_MIN * 2.0**job.moves_failed, RETRY_SECONDS_MAX)
    job.moves_failed = min(job.moves_failed + 1, 16)
    job.leave_at = turn.now + wait


def turn_back(turn: Turn, job: Job) -> None:
    """A fault: ranks without a worker go to the one that waits for them, old or new."""
    migration, now = in_migration(job)
    seats = list(now.seats)
    for rank in sorted(migration.coming):
        coming = migration.coming.pop(rank)
        if rank in migration.gone and not migration.saves:
            seats[rank] = coming
            del migration.gone[rank]
            migration.fresh[rank] = turn.now
            migration.joined[rank] = coming.incarnation
            turn.note(f"rank {rank} died on the way: its target on {coming.node} takes over", job)
        else:
            seating.dismiss(turn, job, (coming,))
    migration.agreed = -1
    back = sorted(set(migration.leavers) & set(migration.gone))
    if back:
        _retry_later(turn, job)
    for rank in back:
        leaver = migration.leavers.pop(rank)
        seats[rank] = leaver
        del migration.gone[rank]
        migration.joined.pop(rank, None)
        turn.note(f"the target of rank {rank} failed: it goes on where it was, {leaver.node}", job)
    job.roster = replace(now, seats=tuple(seats))


def recall(turn: Turn, job: Job) -> bool:
    """Too few others are left: those who wait to leave hold whole state. False: nobody waits."""
    migration, now = in_migration(job)
    for rank in sorted(migration.leavers):
        if rank not in migration.gone:
            seating.dismiss(turn, job, (now.seats[rank],))
            migration.gone[rank] = "its leaver is needed"
        migration.fresh.pop(rank, None)
        migration.joined.pop(rank, None)
    return bool(migration.leavers)


def count_lost(turn: Turn, job: Job, boundary: int, winners: Mapping[str, Iterable[Rank]]) -> None:
    """If only leavers hold state, steps that were made without them are lost: it is a fallback.

    Nobody is left who could say whether there were any.
    """
    migration, now = in_migration(job)
    trained = job.settled[0].roster.seats if job.settled else now.seats
    if migration.outcome == "fallback" or any(
        now.seats[rank].incarnation >= trained[rank].incarnation
        for holders in winners.values()
        for rank in holders
    ):
        return
    migration.outcome = "fallback"
    job.fallbacks += 1
    turn.note(f"fallback: steps after boundary {boundary} are lost with those who made them", job)


def end_or_fall_back(turn: Turn, job: Job, why: str) -> None:
    """Nobody holds state. If all ended in good order, it is because nothing is left to do."""
    migration, now = in_migration(job)
    if len(migration.through) == len(now.seats):
        launch.finish(turn, job, JobState.FINISHED, 0, f"all {len(now.seats)} ranks finished")
    else:
        launch.fall_back(turn, job, why)


def ended(turn: Turn, job: Job, event: Observed) -> bool:
    """A worker that waits, old or new, has ended. False: it is neither."""
    migration = job.migration
    if migration is None:
        return False
    ends = (event.rank, event.node, event.incarnation)
    for seat in seating.waiting(job):
        if (seat.rank, seat.node, seat.incarnation) == ends:
            if event.sign is Sign.FINISHED:
                migration.through[event.rank] = event.incarnation
            lose(turn, job, seat, event.detail or f"it ended with {event.exit_code}")
            return True
    return False


def lose(turn: Turn, job: Job, seat: Seat, why: str) -> None:
    """A target or a leaver is gone."""
    migration = job.migration
    assert migration is not None
    slots.release(turn.cluster, seat.node, seat.slot)
    if migration.leavers.get(seat.rank) == seat:
        del migration.leavers[seat.rank]
        job.leaving.pop(seat.rank, None)
        turn.note(f"rank {seat.rank} left {seat.node} earlier than planned: {why}", job)
        return
    del migration.coming[seat.rank]
    gone = f"the target of rank {seat.rank} on {seat.node} is gone ({why})"
    if migration.phase in TRAINING:
        give_up(turn, job, gone)
    else:
        # Somebody's fault comes first: the targets that are left are looked at then.
        turn.note(gone, job)


def lose_node(turn: Turn, job: Job, node: NodeId) -> bool:
    """A node is lost: with it those who wait there. True: others may wait for them in vain."""
    migration = job.migration
    if migration is None:
        return False
    left = any(seat.node == node for seat in migration.leavers.values())
    for seat in [s for s in migration.leavers.values() if s.node == node]:
        lose(turn, job, seat, "its node is lost")
    for seat in [s for s in migration.coming.values() if s.node == node]:
        if job.migration is migration:
            lose(turn, job, seat, "its node is lost")
    return left and migration.phase is Phase.QUIESCE and migration.agreed >= 0


def avoid(turn: Turn, job: Job, node: NodeId, slot: int = -1) -> None:
    """Targets must not be warmed on this node (or this slot of it) any more."""
    migration = job.migration
    coming = migration.coming if migration else {}
    there = [s for s in coming.values() if s.node == node and slot in (-1, s.slot)]
    if not there or migration is None:
        return
    if migration.phase not in TRAINING:
        for seat in there:
            del migration.coming[seat.rank]
        seating.dismiss(turn, job, there)
    else:
        give_up(turn, job, f"{node} is no place to move to any more")
        job.leave_at = turn.now


def waits_here(job: Job, user: Occupant) -> Seat | None:
    """The target or leaver that a slot's occupant is, if it is one."""
    mine = (user.rank, user.incarnation)
    return next((s for s in seating.waiting(job) if (s.rank, s.incarnation) == mine), None)


def untold(job: Job, seat: Seat) -> bool:
    """A target whose order may never have arrived: it is told again, not mourned."""
    migration = job.migration
    return (
        migration is not None
        and migration.phase is Phase.WARM
        and migration.coming.get(seat.rank) == seat
        and seat.rank not in migration.reports
    )
