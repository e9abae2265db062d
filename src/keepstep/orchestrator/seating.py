"""Empty seats and the spares that take them: the part of a migration that fills the roster."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from keepstep.model import JobState, Phase, Rank, Seat
from keepstep.orchestrator import orders, placing, portions, rules, slots, spares
from keepstep.orchestrator.state import (
    Cluster,
    Job,
    Migration,
    Occupant,
    in_migration,
    next_incarnation,
)
from keepstep.orchestrator.turn import Turn


def seat_joiners(turn: Turn, job: Job, seats: list[Seat]) -> list[str]:
    """Give empty seats to spares while there are any; says which."""
    migration = job.migration
    assert migration is not None
    told = []
    search = placing.Search(turn.cluster, job, turn.now)
    empty = [seats[rank] for rank in sorted(migration.gone)]
    for rank, choice in placing.place(search, empty).items():
        incarnation = next_incarnation(job, seats[rank])
        spares.take(turn.cluster, job, choice, rank, incarnation)
        seats[rank] = Seat(rank, choice.node, choice.slot, incarnation)
        del migration.gone[rank]
        migration.fresh[rank] = turn.now
        migration.joined[rank] = incarnation
        told.append(f"rank {rank} to {choice.why}")
    return told


def wanting(job: Job) -> list[Seat]:
    """Old seats of the ranks that wait for room: nobody sits there, or somebody shall leave."""
    migration, now = job.migration, job.roster
    if now is None or job.state.over:
        return []
    if migration is not None:
        waits = migration.phase in (Phase.HOLD, Phase.FALLBACK) and not migration.saves
        return [now.seats[rank] for rank in sorted(migration.gone)] if waits else []
    return [
        now.seats[rank]
        for rank, leave in sorted(job.leaving.items())
        # Who waits for its turn has a place in view: nobody has to make room for it.
        if leave.waits and not leave.to and job.turn_at < 0
    ]


def allocating(cluster: Cluster) -> int | None:
    """The highest priority of those about to look for spares: nobody below takes room till then.

    A job in doubt looks for none before its ranks are found, which may be never.
    """
    return max(
        (
            job.spec.priority
            for job in map(cluster.jobs.__getitem__, cluster.open_jobs)
            if (moving := job.migration) and _shall_seat(moving)
            if not rules.aside(cluster, job)
        ),
        default=None,
    )


def _shall_seat(migration: Migration) -> bool:
    asked = migration.phase is Phase.QUIESCE and bool(migration.gone)
    return (migration.phase is Phase.ALLOCATE or asked) and not migration.saves


def lost(job: Job) -> str:
    """What no worker is left of that was there before, in words; empty: nothing is lost so far."""
    migration, now = in_migration(job)
    if len(now.seats) == len(migration.gone) + len(migration.fresh):
        return "no rank survives"
    name = portions.bereft(job, {*migration.gone, *migration.fresh})
    held = portions.told_holders(name, len(now.seats)) if name else ""
    return f"portion {name} has no home left: {held} held it" if name else ""


def hold_clock(turn: Turn, job: Job, holding: bool) -> None:
    migration = job.migration
    assert migration is not None
    job.state = JobState.HELD if holding else JobState.MIGRATING
    if not holding:
        migration.hold_since = -1.0
    elif migration.hold_since < 0:
        migration.hold_since = turn.now


def allocated_why(job: Job, chosen: list[str], holding: bool) -> str:
    migration = job.migration
    assert migration is not None
    moved = ", ".join(chosen[:4]) + (f" and {len(chosen) - 4} more" if len(chosen) > 4 else "")
    if holding:
        empty = ", ".join(map(str, sorted(migration.gone)[:8]))
        rest = f"; migrating {moved}" if chosen else ""
        return f"no spare for rank {empty}: survivors hold in generation {job.generation}{rest}"
    if chosen:
        return f"migrating {moved} in generation {job.generation}"
    if migration.saves:
        return f"quiescing for a checkpoint in generation {job.generation}"
    return f"same seats, groups formed anew in generation {job.generation}"


def asked_why(job: Job, along: set[Rank]) -> str:
    migration = job.migration
    assert migration is not None
    return (
        f"rank {listed(migration.gone)} moves together with rank {listed(along)}: first the "
        f"others say what they hold, in generation {job.generation}"
    )


def listed(ranks: Collection[Rank]) -> str:
    return ", ".join(map(str, sorted(ranks)[:8])) + (" …" if len(ranks) > 8 else "")


def vacate(turn: Turn, job: Job, rank: Rank, why: str) -> None:
    """A seat's worker is gone. On a lost node the slot went with the node."""
    migration, now = in_migration(job)
    seat = now.seats[rank]
    node = turn.cluster.nodes[seat.node]
    user = node.uses.get(seat.slot)
    if user == Occupant(job.spec.job, rank, seat.incarnation) or (
        user == Occupant(job.spec.job, rank, seat.incarnation, fenced=True)
    ):
        slots.release(turn.cluster, seat.node, seat.slot)
    migration.fences.pop(rank, None)
    migration.fresh.pop(rank, None)
    migration.gone[rank] = why


def companions(turn: Turn, job: Job, ranks: set[Rank]) -> set[Rank]:
    """What is replaced as a whole goes with these ranks: the rest of their node or domain.

    Only if there is somewhere to go, and if somebody stays who may hold state. Otherwise they hold,
    and it is looked at again with every change of room.
    """
    migration, _ = in_migration(job)
    if not ranks or migration.saves or migration.cold:
        return set()
    others = placing.companions(placing.Search(turn.cluster, job, turn.now), ranks)
    others -= {*migration.gone, *migration.fences, *migration.leavers}
    return others if others and _can_do_without(turn, job, others) else set()


def take_along(turn: Turn, job: Job, others: set[Rank]) -> bool:
    """Kill the companions of those who are gone: they move, too. False: there are none."""
    migration, now = in_migration(job)
    if not others:
        return False
    for rank in sorted(others):
        migration.fences[rank] = now.seats[rank].incarnation
    turn.note(f"rank {listed(others)} moves too: a node or domain is replaced as a whole", job)
    return True


def _can_do_without(turn: Turn, job: Job, others: set[Rank]) -> bool:
    """There are places for them, perhaps lower jobs', and others hold state where nobody doubts."""
    migration, now = in_migration(job)
    away = {*migration.gone, *migration.fences, *others}
    # Joiners hold no state before they are verified; or they say so, if they are asked.
    asked = rules.asks_before_killing(turn.cluster)
    empty = set() if asked or migration.phase is Phase.RESUME else set(migration.joined)
    doubtful = turn.cluster.doubtful
    unsure = {s.rank for s in now.seats if s.rank in away | empty or s.node in doubtful}
    if portions.in_the_dark(job) or portions.bereft(job, unsure):
        return False
    lower = spares.lower_places(turn.cluster, job) if job.spec.policy.borrow else frozenset()
    search = placing.Search(turn.cluster, job, turn.now, lower)
    return others <= set(placing.place(search, [now.seats[rank] for rank in sorted(away)]))


def write_off_fences(turn: Turn, job: Job) -> None:
    """Kills that nobody confirmed: their seats are empty, their slots stay taken until a death."""
    migration, now = in_migration(job)
    for rank in sorted(migration.fences):
        seat = now.seats[rank]
        _keep_until_dead(turn, job, seat)
        del migration.fences[rank]
        migration.fresh.pop(rank, None)
        migration.gone[rank] = "fenced without an answer"
        turn.note(f"the kill of rank {rank} on {seat.node} is not confirmed: going on", job)


def dismiss(turn: Turn, job: Job, seats: Iterable[Seat]) -> None:
    """End workers that hold no seat: their slots are free once they are dead. While the journal is
    in doubt nobody is ended: who holds a seat is known when it is not."""
    if rules.aside(turn.cluster, job):
        return
    there = [seat for seat in seats if turn.cluster.nodes[seat.node].alive]
    for seat in there:
        _keep_until_dead(turn, job, seat)
        turn.touched = True
    orders.fence_seats(turn, job, "dismiss", there)


def _keep_until_dead(turn: Turn, job: Job, seat: Seat) -> None:
    """The slot stays taken, by somebody who is as good as dead, until the death is seen."""
    uses = turn.cluster.nodes[seat.node].uses
    user = Occupant(job.spec.job, seat.rank, seat.incarnation)
    if uses.get(seat.slot) == user:
        uses[seat.slot] = replace(user, fenced=True)


def waiting(job: Job) -> tuple[Seat, ...]:
    """Workers without a seat of the roster: targets that warm up, and leavers."""
    migration = job.migration
    if migration is None:
        return ()
    return (*migration.coming.values(), *migration.leavers.values())


def forget_finished(turn: Turn, job: Job, migration: Migration) -> None:
    """Ranks that have left in good order take their state with them: they have to come back."""
    if rules.last_ones_count(turn.cluster):
        migration.through |= job.finished
    for rank in job.finished:
        migration.gone[rank] = "it had finished"
        migration.fresh.pop(rank, None)
    job.finished = {}
