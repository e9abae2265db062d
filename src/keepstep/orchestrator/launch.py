"""Workers from the top of the user's script: the first start, and the restart of a fallback.

Also the other end of a job's life: `finish` closes what is open and gives the slots back.
"""

from __future__ import annotations

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
from keepstep.orchestrator import orders, roster, seating, spares
from keepstep.orchestrator.state import (
    CLOSED_MAX,
    JOBS_OVER_MAX,
    STORY_LINES_CLOSED_MAX,
    Incident,
    Job,
    Migration,
    Occupant,
    Settled,
    generation_secret,
    next_incarnation,
)
from keepstep.orchestrator.turn import Turn


def start_waiting(turn: Turn) -> None:
    """Start what waits and fits, the most urgent first."""
    cluster = turn.cluster
    waiting = [
        job
        for job in map(cluster.jobs.__getitem__, cluster.open_jobs)
        if job.state is JobState.WAITING and job.spec.nodes <= len(cluster.free)
    ]
    for job in sorted(waiting, key=lambda j: (-j.spec.priority, j.since, j.spec.job)):
        seats = _place(turn, job)
        if seats is None:
            continue
        for seat in seats:
            user = Occupant(job.spec.job, seat.rank, seat.incarnation)
            spares.occupy(cluster, seat.node, seat.slot, user)
        job.migration = Migration(
            MigrationId(f"m{cluster.next()}"), "start", "start", Phase.ALLOCATE, turn.now, turn.now
        )
        start_cold(turn, job, seats)
        nodes = len({seat.node for seat in seats})
        turn.note(f"started {len(seats)} ranks of {job.spec.job} on {nodes} nodes", job)
        spares.refill(turn, job)


def _place(turn: Turn, job: Job) -> list[Seat] | None:
    """Block placement: the i-th node holds ranks i*k to i*k+k-1."""
    seats: list[Seat] = []
    cluster, each = turn.cluster, job.spec.ranks_per_node
    for node in cluster.free:
        state = cluster.nodes[node]
        fit = state.linked and state.silent_at < 0 and state.store_good and not state.drained
        if not fit:
            continue
        slots = spares.free_slots(cluster, state, turn.now)
        if len(slots) >= each:
            first = len(seats)
            mine = job.first_incarnation
            seats += [Seat(Rank(first + i), node, slots[i], mine) for i in range(each)]
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
    job.settled = (Settled(job.roster, turn.cluster.counter),)
    job.begun = False
    job.finished = {}
    job.state = JobState.STARTING
    job.step = job.published_step
    migration.cold = True
    migration.gone, migration.fresh, migration.fences = {}, {}, {}
    change_phase(turn, job, Phase.RESUME)
    orders.tell(turn, job)


def fall_back(turn: Turn, job: Job, why: str, outcome: str = "fallback") -> None:
    """Some state has no home left: everybody starts anew from the newest published checkpoint.

    A `restart` is the same before anybody can have committed a step: nothing is lost by it.
    """
    migration, now = job.migration, job.roster
    assert migration is not None
    assert now is not None
    if outcome == "fallback" and migration.purpose != "save":
        job.fallbacks += 1
    if migration.outcome != "fallback":
        migration.outcome = outcome
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
    migration, now = job.migration, job.roster
    assert migration is not None
    assert now is not None
    cluster = turn.cluster
    seats = list(now.seats)
    for rank in sorted(migration.gone):
        choice = spares.choose(cluster, job, turn.now)
        if choice is None:
            break
        if choice.standby:
            spares.drop_standby(turn, job, choice.node, choice.slot)
        seat = Seat(rank, choice.node, choice.slot, seats[rank].incarnation)
        spares.occupy(cluster, seat.node, seat.slot, Occupant(job.spec.job, rank, seat.incarnation))
        seats[rank] = seat
        del migration.gone[rank]
        turn.touched = True
    if migration.gone:
        job.roster = roster.build(now.job, now.generation, now.secret, now.store_node, seats)
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
    new = roster.build(job.spec.job, job.generation, secret, store, seats)
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
    job.state = state
    job.exit_code = exit_code
    job.detail = job.detail or why
    job.migration = None
    job.settled = ()
    job.stalls, job.deaths = {}, {}
    job.broken_at = -1.0
    cluster = turn.cluster
    cluster.open_jobs = tuple(name for name in cluster.open_jobs if name != job.spec.job)
    over = sorted(
        (j for j in cluster.jobs.values() if j.state.over), key=lambda j: (j.since, j.spec.job)
    )
    for old in over[:-JOBS_OVER_MAX]:
        del cluster.jobs[old.spec.job]
    job.since = turn.now
    start_waiting(turn)
