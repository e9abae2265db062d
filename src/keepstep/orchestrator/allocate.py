"""ALLOCATE: spares for the empty seats, a new generation, and everybody back to a boundary.

It waits for the deaths of those who are to be killed. With too few spares the survivors HOLD; room
that appears later is used at once.
"""

from __future__ import annotations

from keepstep.model import JobState, Phase
from keepstep.orchestrator import (
    launch,
    limits,
    orders,
    planned,
    policy,
    remedies,
    roster,
    rules,
    seating,
    suspicion,
)
from keepstep.orchestrator.state import Job, in_migration
from keepstep.orchestrator.turn import Turn


def begin(turn: Turn, job: Job, settle_seconds: float = 0.0) -> None:
    migration, _ = in_migration(job)
    migration.cold = False
    migration.plan = None
    job.state = JobState.MIGRATING
    launch.change_phase(turn, job, Phase.ALLOCATE)
    if settle_seconds:
        migration.settle_until = max(migration.settle_until, turn.now + settle_seconds)
    orders.tell(turn, job)
    if_ready(turn, job)


def if_ready(turn: Turn, job: Job) -> None:
    migration, _ = in_migration(job)
    waits = migration.fences or turn.now < migration.settle_until
    waits = waits or policy.stands_still(turn.cluster, job)
    waits = waits or suspicion.knows_more(turn.cluster, job, turn.now)
    if migration.phase is Phase.ALLOCATE and not waits and not limits.must_wait(turn, job):
        _allocate(turn, job)


def _allocate(turn: Turn, job: Job) -> None:
    """Spares for the empty seats, a new generation, and everybody back to a boundary."""
    migration, before = in_migration(job)
    saving = migration.saves
    if saving:
        # Whoever was about to join has nothing to save: it ends, and its slot is free then.
        seating.dismiss(turn, job, [before.seats[rank] for rank in sorted(migration.fresh)])
        migration.gone.update(dict.fromkeys(migration.fresh, "it never got state"))
        migration.fresh = {}
    planned.turn_back(turn, job)
    if seating.lost(job) and planned.recall(turn, job):
        planned.turn_back(turn, job)
    if lost := seating.lost(job):
        planned.end_or_fall_back(turn, job, lost)
        return
    seats = list(in_migration(job)[1].seats)
    chosen = [] if saving else seating.seat_joiners(turn, job, seats)
    absent = {*migration.gone, *migration.fresh}
    store = roster.store_node(seats, turn.cluster.nodes, absent, before.store_node)
    launch.new_generation(turn, job, seats, store)
    holding = bool(migration.gone) and not saving
    launch.change_phase(turn, job, Phase.HOLD if holding else Phase.QUIESCE)
    seating.hold_clock(turn, job, holding)
    turn.note(seating.allocated_why(job, chosen, holding), job)
    if holding:
        turn.note(remedies.sentence(turn.cluster, job, turn.now), job)
    orders.tell(turn, job)


def room(turn: Turn, job: Job) -> None:
    """There is room again: what was held for lack of it goes on."""
    migration = job.migration
    if migration is None or migration.saves:
        return
    if rules.doubts_stand_aside(turn.cluster) and policy.stands_still(turn.cluster, job):
        return
    # After a takeover this is asked for each agent that comes back, and the next is dear then.
    if migration.phase not in (Phase.FALLBACK, Phase.HOLD):
        return
    if suspicion.knows_more(turn.cluster, job, turn.now):
        return
    if migration.phase is Phase.FALLBACK:
        launch.relaunch(turn, job)
    if migration.phase is not Phase.HOLD:
        return
    if seating.take_along(turn, job, set(migration.gone)):
        begin(turn, job)
        return
    _, before = in_migration(job)
    seats = list(before.seats)
    chosen = seating.seat_joiners(turn, job, seats)
    if not chosen:
        return
    # Same generation: nobody has formed a group of it yet, and the survivors wait at a boundary.
    job.roster = roster.build(
        before.job, before.generation, before.secret, before.store_node, seats, turn.cluster.nodes
    )
    holding = bool(migration.gone)
    if not holding:
        launch.change_phase(turn, job, Phase.QUIESCE, keep_reports=True)
    seating.hold_clock(turn, job, holding)
    turn.note(seating.allocated_why(job, chosen, holding), job)
    orders.tell(turn, job)


def last_resort(turn: Turn, job: Job, why: str) -> None:
    """Nobody in the roster can give whole state. Perhaps somebody can who was about to leave."""
    if planned.recall(turn, job):
        turn.note(f"{why}: those who were to leave are called back", job)
        in_migration(job)[0].attempts = 0
        begin(turn, job)
    else:
        planned.end_or_fall_back(turn, job, why)
