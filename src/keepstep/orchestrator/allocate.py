"""ALLOCATE: spares for the empty seats, a new generation, and everybody back to a boundary.

It waits for the deaths of those who are to be killed. With too few spares the survivors HOLD; room
that appears later is used at once.

Where a node or a domain is replaced as a whole, the rest of it is well, and holds state. So nobody
of it is killed before those who stay have just said that they hold all state themselves:

    ALLOCATE -> QUIESCE with empty seats -> ALLOCATE, the rest is killed -> QUIESCE with joiners
                        |
                        v  they do not hold all of it, or there is no room any more
                       HOLD
"""

from __future__ import annotations

from keepstep.model import JobState, Phase, Rank, Seat
from keepstep.orchestrator import (
    catching_up,
    launch,
    limits,
    orders,
    planned,
    planning,
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
    asks = rules.asks_before_killing(turn.cluster)
    along = seating.companions(turn, job, set(migration.gone)) if asks else set()
    chosen = [] if saving or along else seating.seat_joiners(turn, job, seats)
    absent = {*migration.gone, *migration.fresh}
    store = roster.store_node(seats, turn.cluster.nodes, absent, before.store_node)
    launch.new_generation(turn, job, seats, store)
    holding = bool(migration.gone) and not saving and not along
    launch.change_phase(turn, job, Phase.HOLD if holding else Phase.QUIESCE)
    if along:
        turn.note(seating.asked_why(job, along), job)
    else:
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
    others = seating.companions(turn, job, set(migration.gone))
    if rules.asks_before_killing(turn.cluster):
        # What they said may be old: if it would do, they are asked again.
        if others and _all_said(job) and (_between(job) or not _wanting(turn, job, others)):
            begin(turn, job)
            return
    elif seating.take_along(turn, job, others):
        begin(turn, job)
        return
    _, before = in_migration(job)
    seats = list(before.seats)
    if chosen := seating.seat_joiners(turn, job, seats):
        _go_on(turn, job, seats, chosen)


def answered(turn: Turn, job: Job) -> None:
    """Those who stay have said what they hold: the rest of a node or a domain may move, or not."""
    migration, before = in_migration(job)
    others = seating.companions(turn, job, set(migration.gone))
    wanting = _wanting(turn, job, others) if others else ""
    if others and not wanting:
        seating.take_along(turn, job, others)
        begin(turn, job)
        return
    if wanting:
        turn.note(f"nobody else moves for rank {seating.listed(migration.gone)}: {wanting}", job)
    seats = list(before.seats)
    _go_on(turn, job, seats, seating.seat_joiners(turn, job, seats))
    if migration.phase is Phase.HOLD:
        turn.note(remedies.sentence(turn.cluster, job, turn.now), job)


def _all_said(job: Job) -> bool:
    migration, now = in_migration(job)
    return len(migration.reports) >= len(now.seats) - len(migration.gone) - len(migration.fresh)


def _between(job: Job) -> bool:
    """They are between two boundaries: what they hold is known when they are at one."""
    return bool(catching_up.behind(in_migration(job)[0].reports)[1])


def _wanting(turn: Turn, job: Job, others: set[Rank]) -> str:
    """What the vote misses without these, and without those whom nobody hears; empty: nothing."""
    migration, now = in_migration(job)
    if planning.too_early(job, migration):
        return ""
    doubtful = turn.cluster.doubtful
    stay = {
        rank: report
        for rank, report in migration.reports.items()
        if rank not in others and now.seats[rank].node not in doubtful
    }
    verdict = planning.judge(job, stay)
    return verdict.why if verdict.problem else ""


def _go_on(turn: Turn, job: Job, seats: list[Seat], chosen: list[str]) -> None:
    """Some of the empty seats have joiners now, or all."""
    migration, before = in_migration(job)
    # Same generation: nobody has formed a group of it yet, and the survivors wait at a boundary.
    job.roster = roster.build(
        before.job, before.generation, before.secret, before.store_node, seats, turn.cluster.nodes
    )
    holding = bool(migration.gone)
    if not holding or migration.phase is not Phase.HOLD:
        phase = Phase.HOLD if holding else Phase.QUIESCE
        launch.change_phase(turn, job, phase, keep_reports=True)
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
