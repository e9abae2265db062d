"""Workers from the top of the user's script: the first start, and the restart of a fallback.

Also the other end of a job's life: `finish` closes what is open and gives the slots back.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from keepstep.model import (
    EXIT_REQUEUE,
    Generation,
    IncidentId,
    JobState,
    MigrationId,
    NodeId,
    Phase,
    Rank,
    Roster,
    Seat,
)
from keepstep.orchestrator import (
    names,
    orders,
    placing,
    roster,
    rules,
    seating,
    slots,
    spares,
    suspicion,
)
from keepstep.orchestrator.events import Submitted
from keepstep.orchestrator.state import (
    CLOSED_MAX,
    JOBS_OVER_MAX,
    LOANS_MAX,
    STORY_LINES_CLOSED_MAX,
    Incident,
    Job,
    Migration,
    Occupant,
    Settled,
    generation_secret,
    in_migration,
    natural,
    next_incarnation,
)
from keepstep.orchestrator.turn import Turn


def submitted(turn: Turn, event: Submitted) -> None:
    """A job waits for room, for the first time or again under its name."""
    cluster, spec = turn.cluster, event.spec
    before = cluster.jobs.get(spec.job)
    if before is not None and not before.state.over:
        turn.ignore(f"job {spec.job} is already there")
        return
    job = Job(spec, JobState.WAITING, turn.now)
    names.go_on(cluster, job)
    cluster.jobs[spec.job] = job
    cluster.open_jobs = tuple(sorted((*cluster.open_jobs, spec.job)))
    turn.note(f"job {spec.job} waits for {spec.nodes} nodes with {spec.ranks_per_node} slots", job)
    if cluster.frozen:
        turn.note("the cluster is frozen: it starts after `keepstep unfreeze`", job)


def start_waiting(turn: Turn) -> None:
    """Start what waits and fits, the most urgent first."""
    cluster, first = turn.cluster, seating.allocating(turn.cluster)
    if cluster.frozen:
        return
    waiting = [
        job
        for job in map(cluster.jobs.__getitem__, cluster.open_jobs)
        if job.state is JobState.WAITING or (job.state is JobState.PARKED and _due(turn, job))
        if first is None or job.spec.priority > first
        if not may_run(turn, job)
    ]
    for job in sorted(waiting, key=lambda j: _order(turn, j)):
        seats = place(turn, job)
        if seats is None:
            continue
        for seat in seats:
            _make_way(turn, job, seat)
            user = Occupant(job.spec.job, seat.rank, seat.incarnation)
            slots.occupy(cluster, seat.node, seat.slot, user)
        job.migration = Migration(
            MigrationId(f"m{cluster.next()}"), "start", "start", Phase.ALLOCATE, turn.now, turn.now
        )
        parked = job.state is JobState.PARKED
        start_cold(turn, job, seats)
        job.homes = {seat.rank: seat.node for seat in seats}
        nodes = len({seat.node for seat in seats})
        if parked:
            _end_loan(turn, job)
        else:
            turn.note(f"started {len(seats)} ranks of {job.spec.job} on {nodes} nodes", job)
        spares.refill(turn, job)


def may_run(turn: Turn, job: Job) -> bool:
    """Whether it may run already, though the journal has it waiting: then that one is behind.

    Only agents know, so a job of an earlier term waits a little for those that have yet to come.
    """
    cluster = turn.cluster
    if job.unsure is not None:
        return True
    return job.spec.job in cluster.begun_with and suspicion.yet_to_come(cluster, turn.now)


def _due(turn: Turn, job: Job) -> bool:
    """A parked job does not take back what its borrower still waits for, and can use. One that is
    in doubt can use nothing before its ranks are found: they have as long as is waited for them."""
    if job.loan is None or lending_is_over(job, turn.now):
        return True
    borrower = turn.cluster.jobs.get(job.loan.borrower)
    if borrower is None or borrower.state.over:
        return True
    if rules.aside(turn.cluster, borrower) and borrower.unsure is not None:
        return borrower.unsure.told
    wanted = seating.wanting(borrower)
    lower = frozenset(spares.lower_standbys(turn.cluster, borrower))
    found = placing.place(placing.Search(turn.cluster, borrower, turn.now, lower), wanted)
    return not wanted or (len(found) < len(wanted) and not lenders_to_come(turn, borrower))


def lenders_to_come(turn: Turn, borrower: Job) -> bool:
    """Whether somebody is about to be parked for this job."""
    jobs = map(turn.cluster.jobs.__getitem__, turn.cluster.open_jobs)
    return any(
        job.loan is not None and job.loan.borrower == borrower.spec.job and job.loan.began_at < 0
        for job in jobs
        if not rules.aside(turn.cluster, job)
    )


def lending_is_over(job: Job, now: float) -> bool:
    """A parked lender that has waited as long as its policy lets it."""
    loan = job.loan
    return loan is not None and 0 <= loan.began_at <= now - job.spec.policy.lend_seconds_max


def _order(turn: Turn, job: Job) -> tuple[bool, int, bool, float, str]:
    """Whose lending is over first, then the most urgent, and who was running before the new."""
    parked = job.state is JobState.PARKED
    over = lending_is_over(job, turn.now)
    return (not over, -job.spec.priority, not parked, job.since, job.spec.job)


def _make_way(turn: Turn, job: Job, seat: Seat) -> None:
    """A standby of a lower priority may be on the slot: it ends."""
    user = turn.cluster.nodes[seat.node].uses.get(seat.slot)
    if user is not None:
        owner = turn.cluster.jobs[user.job]
        spares.drop_standby(turn, owner, seat.node, seat.slot)
        turn.note(f"the standby of {user.job} gives way to {job.spec.job}", owner)


def _end_loan(turn: Turn, job: Job) -> None:
    at, away = job.published_step, turn.now - job.since
    why = f"{job.spec.job} goes on at boundary {at}: it was parked for {away:.1f} s"
    if job.loan is not None:
        over = replace(job.loan, ended_at=turn.now)
        turn.cluster.loans = (*turn.cluster.loans[-(LOANS_MAX - 1) :], over)
        why += f", with {over.devices} devices lent to {over.borrower}"
    job.loan = None
    turn.note(why, job)


def place(turn: Turn, job: Job, also: Set[placing.Place] = frozenset()) -> list[Seat] | None:
    """Block placement: the i-th node holds ranks i*k to i*k+k-1. `also`: their users would go."""
    seats: list[Seat] = []
    cluster, each = turn.cluster, job.spec.ranks_per_node
    lower = also | spares.lower_standbys(cluster, job).keys()
    nodes = cluster.free
    if lower:
        nodes = tuple(sorted({*nodes, *(node for node, _ in lower)}, key=natural))
    if job.spec.nodes > len(nodes):
        return None
    for node in nodes:
        state = cluster.nodes[node]
        if not slots.usable(state) or not state.store_good:
            continue
        free = slots.free_slots(cluster, state, turn.now)
        if len(free) < each:
            given = (s for s in range(state.slots) if (node, s) in lower)
            free += [s for s in given if not slots.tainted(cluster, node, s, turn.now)]
        if len(free) >= each:
            first = len(seats)
            mine = names.first_incarnation(job)
            seats += [Seat(Rank(first + i), node, free[i], mine) for i in range(each)]
        if len(seats) == job.spec.world_size:
            return seats
    return None


def start_cold(turn: Turn, job: Job, seats: list[Seat]) -> None:
    """A new generation whose workers begin at the top of the script."""
    migration = job.migration
    assert migration is not None
    before = job.roster.store_node if job.roster else NodeId("")
    store = roster.store_node(seats, turn.cluster.nodes, (), before)
    new_generation(turn, job, seats, store)
    assert job.roster is not None
    spares.settle(turn.cluster, job, Settled(job.roster, turn.cluster.counter))
    job.begun = False
    job.portions, job.portions_told = {}, False
    # Whoever an agent did not find was of the old run: its successor is not dead.
    job.finished, job.missing = {}, {}
    job.state = JobState.STARTING
    job.step = job.published_step
    if job.contaminated and job.published_step <= job.contaminated[0]:
        job.contaminated = ()
    job.step_seconds = 0.0
    migration.cold = True
    migration.gone, migration.fresh, migration.fences = {}, {}, {}
    if rules.last_ones_count(turn.cluster):
        migration.through = {}  # That was the run before.
    change_phase(turn, job, Phase.RESUME)
    orders.tell(turn, job)


def fall_back(turn: Turn, job: Job, why: str, outcome: str = "fallback") -> None:
    """Some state has no home left: everybody starts anew from the newest published checkpoint.

    A `restart` is the same before anybody can have committed a step: nothing is lost by it.
    """
    migration, now = in_migration(job)
    if outcome == "fallback" and migration.purpose != "save":
        job.fallbacks += 1
    if migration.outcome != "fallback":
        migration.outcome = outcome
    if migration.purpose == "park":
        migration.purpose, job.loan = "recover", None
    if migration.purpose == "save":
        job.detail = f"nothing could be saved: {why}"
        finish(turn, job, JobState.SAVED, EXIT_REQUEUE, job.detail)
        return
    migration.recoveries += 1
    if migration.recoveries > 2 * job.spec.policy.recoveries_max:
        finish(turn, job, JobState.FAILED, 1, f"{why}; starting anew did not help either")
        return
    living = {s.rank: s.incarnation for s in now.seats if s.rank not in migration.gone}
    orders.fence(turn, job, living)
    seating.dismiss(turn, job, seating.waiting(job))
    migration.coming, migration.leavers = {}, {}
    migration.fences, migration.fresh, migration.joined = {}, {}, {}
    migration.excluded, migration.attempts, migration.plan = {}, 0, None
    change_phase(turn, job, Phase.FALLBACK)
    job.state = JobState.HELD
    migration.hold_since = turn.now
    turn.note(f"{outcome}: {why}", job)
    relaunch(turn, job)


def no_room(turn: Turn, job: Job) -> None:
    """Nothing runs and nothing can: the rerun starts from the newest published checkpoint."""
    origin = job.published_path or "the beginning"
    why = f"no room to start anew within the hold time; run the job again to start from {origin}"
    finish(turn, job, JobState.SAVED, EXIT_REQUEUE, why)


def relaunch(turn: Turn, job: Job) -> None:
    """Start all seats from the top, once there is room for each."""
    migration, now = in_migration(job)
    cluster = turn.cluster
    seats = list(now.seats)
    empty = [seats[rank] for rank in sorted(migration.gone)]
    for rank, choice in placing.place(placing.Search(cluster, job, turn.now), empty).items():
        if choice.standby:
            spares.drop_standby(turn, job, choice.node, choice.slot)
        seat = Seat(rank, choice.node, choice.slot, seats[rank].incarnation)
        slots.occupy(cluster, seat.node, seat.slot, Occupant(job.spec.job, rank, seat.incarnation))
        seats[rank] = seat
        del migration.gone[rank]
        turn.touched = True
    if migration.gone:
        job.roster = roster.build(
            now.job, now.generation, now.secret, now.store_node, seats, cluster.nodes
        )
        return
    seats = [Seat(s.rank, s.node, s.slot, next_incarnation(job, s)) for s in seats]
    for seat in seats:
        user = Occupant(job.spec.job, seat.rank, seat.incarnation)
        cluster.nodes[seat.node].uses[seat.slot] = user
    start_cold(turn, job, seats)
    origin = job.published_path or "the beginning"
    turn.note(f"all {len(seats)} ranks start from {origin}", job)


def new_generation(turn: Turn, job: Job, seats: list[Seat], store: NodeId) -> None:
    """The next generation number, its secret and its roster."""
    job.generation = job.promised = Generation(max(job.generation, job.promised) + 1)
    secret = generation_secret(turn.cluster, job.spec.job, job.generation)
    new = roster.build(job.spec.job, job.generation, secret, store, seats, turn.cluster.nodes)
    enter_generation(turn, job, new)


def enter_generation(turn: Turn, job: Job, new: Roster) -> None:
    """From here on only what is said of this roster counts."""
    job.roster = new
    job.broken_at, job.broken_why = -1.0, ""
    job.stalls, job.stalls_at = {}, -1.0
    if job.incident is not None:
        job.incident.generation = job.generation
    turn.touched = True


def change_phase(turn: Turn, job: Job, phase: Phase, *, keep_reports: bool = False) -> None:
    """Enter a phase: its clock and its reports begin anew, the old one's time is on record."""
    migration = job.migration
    assert migration is not None
    if job.incident is not None:
        spent = turn.now - migration.phase_at
        seconds = job.incident.seconds
        seconds[migration.phase.value] = seconds.get(migration.phase.value, 0.0) + spent
    migration.phase = phase
    migration.phase_at = turn.now
    migration.applying, migration.apply_to = (), -1
    if not keep_reports:
        migration.reports = {}
        migration.progress = {}
        migration.busy = {}
    turn.touched = True


def open_incident(turn: Turn, job: Job) -> Incident:
    """The job's open incident, or a new one."""
    if job.incident is None:
        name = IncidentId(f"i{turn.cluster.next()}")
        job.incident = Incident(name, job.spec.job, turn.now)
        job.incidents += 1
    return job.incident


def close_incident(turn: Turn, job: Job, outcome: str) -> None:
    """Keep a short record; the journal keeps the whole."""
    incident = job.incident
    if incident is None:
        return
    incident.closed_at = turn.now
    incident.outcome = outcome
    incident.causes = tuple(replace(c, detail=c.detail[-500:]) for c in incident.causes)
    incident.story = incident.story[-STORY_LINES_CLOSED_MAX:]
    turn.cluster.closed = (*turn.cluster.closed[-(CLOSED_MAX - 1) :], incident)
    job.incident = None


def forget_run(job: Job) -> None:
    """No worker of this job is left: nothing that was seen of them counts."""
    job.migration = None
    job.settled = job.places = ()
    job.stalls, job.deaths = {}, {}
    job.broken_at = job.stalls_at = job.turn_at = -1.0


def finish(turn: Turn, job: Job, state: JobState, exit_code: int, why: str) -> None:
    """The job is over: everything of it ends, and its slots are free."""
    migration = job.migration
    if migration is not None:
        change_phase(turn, job, Phase.DONE)
        migration.phase = Phase.STOPPED
    turn.note(why, job)
    spares.clear(turn, job, exit_code, why)
    outcome = "fallback" if migration and migration.outcome == "fallback" else state.value
    close_incident(turn, job, outcome)
    job.state, job.since = state, turn.now
    job.exit_code = exit_code
    job.detail = job.detail or why
    job.loan = None
    forget_run(job)
    cluster = turn.cluster
    cluster.open_jobs = tuple(name for name in cluster.open_jobs if name != job.spec.job)
    over = sorted(
        (j for j in cluster.jobs.values() if j.state.over and j is not job),
        key=lambda j: (j.since, j.spec.job),
    )
    for old in over[: 1 - JOBS_OVER_MAX]:
        names.forget(cluster, old)
    start_waiting(turn)
