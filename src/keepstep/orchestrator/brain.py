"""The single entry to the brain: `step(cluster, event, now) -> Decision`.

No I/O, no clock, no chance: the same events in the same order give the same state, orders and
reasons. The cluster that goes in is owned by the step and must not be used again; the one in the
Decision takes its place. An event that changes nothing has `changed=False` and need not be
journaled: replaying without it gives the same state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

from keepstep import sabotage
from keepstep.model import JobId, JobState, NodeId, Phase, Rank, Sign
from keepstep.orchestrator import (
    clocks,
    forgetting,
    homes,
    incidents,
    launch,
    lending,
    migration,
    nodes,
    observe,
    orders,
    outages,
    planned,
    planning,
    policy,
    reconcile,
    reports,
    requests,
    room,
    slots,
    spares,
    taints,
)
from keepstep.orchestrator.events import (
    ControlPlaneBack,
    DrainAsked,
    Event,
    ForgetAsked,
    FreezeAsked,
    JournalBehind,
    LinkLost,
    MigrateAsked,
    NodeSilent,
    NodeVouched,
    Reports,
    StopAsked,
    Submitted,
    TaintAsked,
    TermBegan,
    Tick,
    UndrainAsked,
    UnfreezeAsked,
    UntaintAsked,
)
from keepstep.orchestrator.state import (
    Cause,
    Cluster,
    Job,
    NodeState,
    slot_key,
)
from keepstep.orchestrator.turn import Note, Turn
from keepstep.wire import (
    Health,
    Hello,
    Observed,
    Order,
    PhaseReport,
    Publish,
    Published,
    SeatReport,
    Stalled,
    StandbyReport,
)


@dataclass(frozen=True, slots=True)
class Decision:
    """What an event led to: the new state, what to tell whom, and why."""

    cluster: Cluster
    orders: tuple[Order, ...]
    answers: tuple[tuple[NodeId, Published], ...]
    notes: tuple[Note, ...]
    """One per transition, with the job and the incident it belongs to."""
    why: str
    """The notes in one line, or why the event was ignored."""
    changed: bool
    """False: the state is what it was, and the event need not be journaled."""
    counted: tuple[PhaseReport, ...] = ()
    """Of reports that came together, those that changed something: the others are not kept."""


def step(cluster: Cluster, event: Event, now: float) -> Decision:
    """Take one event into account."""
    turn = Turn(cluster, now)
    _dispatch(turn, event)
    if isinstance(event, Hello | StandbyReport | Tick | Submitted | UnfreezeAsked):
        room.use(turn)
    changed = turn.touched or bool(turn.orders)
    return Decision(
        turn.cluster,
        tuple(turn.orders),
        tuple(turn.answers),
        tuple(turn.notes),
        turn.why,
        changed,
        tuple(turn.counted),
    )


def due(cluster: Cluster) -> float | None:
    """When the next Tick would matter at the latest; None while nothing waits for time.

    Ticks at other moments do no harm: this lets a loop be punctual without ticking fast.
    """
    moments: list[float] = []
    for name in cluster.open_jobs:
        job = cluster.jobs[name]
        # Nearly always nearly all of them, after every event.
        if _nothing_due(job) or policy.stands_still(cluster, job):
            continue
        if job.missing:
            moments += job.missing.values()
        if job.migration is not None and job.turn_at < 0 and not cluster.self_doubt:
            moments.append(migration.deadline(job))
            if job.migration.phase is Phase.ALLOCATE:
                moments.append(job.migration.settle_until)
        if job.broken_at >= 0:
            moments.append(job.broken_at + policy.BROKEN_SECONDS_MAX)
        if job.stalls_at >= 0:
            moments.append(job.stalls_at + job.spec.policy.hang_settle_seconds)
    if cluster.doubtful and not cluster.frozen and not cluster.self_doubt:
        # What is waited for otherwise is somebody's word, or an ordinary tick.
        moments.append(min(cluster.doubtful.values()) + nodes.SILENT_SETTLE_SECONDS)
    return min(moments, default=None)


def _dispatch(turn: Turn, event: Event) -> None:
    match event:
        case Hello():
            nodes.hello(turn, event)
        case Observed() | Stalled() | PhaseReport() | StandbyReport():
            job = _sender_and_job(turn, event.node, event.job)
            if job is not None and job.unsure is not None:
                reconcile.heard(turn, job, event)
            elif job is not None:
                _message(turn, job, event)
            elif isinstance(event, Observed) and event.node in turn.cluster.nodes:
                # A stray of a job that is over: at least its slot is free.
                _bury(turn, event)
        case Reports():
            _reports(turn, event)
        case Publish():
            _publish(turn, event)
        case Health():
            if (sender := _sender(turn, event.node)) is not None:
                taints.health(turn, sender, event)
        case Submitted():
            launch.submitted(turn, event)
            reconcile.submitted(turn, event.spec.job)
        case StopAsked():
            requests.stop(turn, event)
        case MigrateAsked() | DrainAsked() | UndrainAsked() | TaintAsked() | UntaintAsked():
            requests.follow(turn, event)
        case ForgetAsked() | FreezeAsked():
            requests.follow(turn, event)
        case UnfreezeAsked():
            requests.follow(turn, event)
            if turn.touched:
                _tick(turn, Tick())
        case NodeSilent():
            nodes.silent(turn, event)
        case NodeVouched():
            nodes.vouched(turn, event.node)
        case LinkLost():
            nodes.link_lost(turn, event.node)
        case TermBegan():
            turn.cluster.term = event.term
            turn.cluster.migrations_max, turn.cluster.tree = event.migrations_max, event.tree
            turn.cluster.rules = event.rules
            turn.note(f"term {event.term} began")
            outages.term_began(turn, event)
            nodes.term_began(turn)
            forgetting.term_began(turn, event)
        case ControlPlaneBack():
            outages.back(turn, event)
        case JournalBehind():
            reconcile.behind(turn, event)
        case Tick():
            _tick(turn, event)
        case _:
            assert_never(event)


def _message(turn: Turn, job: Job, event: Observed | Stalled | PhaseReport | StandbyReport) -> None:
    match event:
        case Observed():
            before = job.incident
            _observed(turn, job, event)
            if job.incident is not before:
                outages.told_late(turn, job, event.age_seconds)
        case Stalled():
            _stalled(turn, job, event)
        case PhaseReport():
            migration.step(turn, job, event)
        case StandbyReport():
            _standby(turn, job, event)
        case _:
            assert_never(event)


def _reports(turn: Turn, event: Reports) -> None:
    """One after the other. A word that changes nothing does not get into the journal because it
    lay next to one that does: whoever reads the chain takes what is there for heard."""
    for report in event.reports:
        turn.touched, told = False, len(turn.orders)
        _dispatch(turn, report)
        if turn.touched or len(turn.orders) > told:
            turn.counted.append(report)
    turn.touched = bool(turn.counted)


def _sender_and_job(turn: Turn, node: NodeId, name: JobId) -> Job | None:
    """The job that a node speaks of, if both are known and in play."""
    if _sender(turn, node) is None:
        return None
    job = turn.cluster.jobs.get(name)
    if job is None or job.state.over or (job.roster is None and job.unsure is None):
        turn.ignore(f"message about {name} from {node} ignored: that job does not run")
        return None
    return job


def _sender(turn: Turn, node: NodeId) -> NodeState | None:
    state = turn.cluster.nodes.get(node)
    if state is None or not state.alive:
        turn.ignore(f"message from {node} ignored: it has to say hello first")
        return None
    nodes.heard(turn, state)
    return state


# ---------------------------------------------------------------- observations


def _observed(turn: Turn, job: Job, event: Observed) -> None:
    match event.sign:
        case Sign.BROKEN:
            _broken(turn, job, event)
        case Sign.STORE_LOST:
            _store_lost(turn, job, event)
        case Sign.UNCOVERED:
            sits = _sits(job, event.node, event.rank)
            reports.uncovered(turn, job, event, sits=sits)
        case Sign.EXIT | Sign.EXCEPTION | Sign.FINISHED:
            _ended(turn, job, event)
        case Sign.CORRUPT:
            _corrupt(turn, job, event)
        case Sign.HANG:
            why = incidents.stale(job, event)
            if why or event.rank in job.finished:
                turn.ignore(why or f"hang of rank {event.rank} ignored: it has finished")
                return
            what = f"rank {event.rank} on {event.node} hangs: {event.detail}"
            fault = incidents.Fault((incidents.cause_of(event),), what, kill=(event.rank,))
            observe.fault(turn, job, fault)
        case _:
            assert_never(event.sign)


def _corrupt(turn: Turn, job: Job, event: Observed) -> None:
    """A rank says that its state is wrong: all stop, it receives anew, its device is suspect."""
    known = job.migration is not None and event.rank in job.migration.reports
    stale = incidents.stale(job, event) or ("its state is known already" if known else "")
    if stale or event.generation != job.generation:
        turn.ignore(stale or f"corrupt state of generation {event.generation} ignored")
        return
    what = f"state of rank {event.rank} on {event.node} is corrupt: {event.detail}"
    if event.cover:
        # Until its owner has sent it anew, `status` says that this portion has no second home.
        job.covers.pop(event.cover, None)
        what = f"what rank {event.rank} on {event.node} keeps is corrupt: {event.detail}"
    else:
        job.contaminated = incidents.contaminated(job, event.step)
    if policy.acts(job):
        planning.taint(turn, job, event.rank, what)
    observe.fault(turn, job, incidents.Fault((incidents.cause_of(event),), what))


def _ended(turn: Turn, job: Job, event: Observed) -> None:
    """A worker ended: on its own, by our hand, or in good order."""
    if planned.ended(turn, job, event):
        return
    stale = incidents.stale(job, event)
    if stale:
        if not _bury(turn, event):
            turn.ignore(stale)
        return
    if event.rank in job.finished:
        turn.ignore(f"{event.sign} of rank {event.rank} ignored: it has finished")
        return
    job.missing.pop(event.rank, None)
    if event.sign is Sign.FINISHED and job.migration and job.migration.phase in planned.TRAINING:
        planned.give_up(turn, job, f"{job.spec.job} has made its last step")
    moving = job.migration
    if moving is not None and event.sign is Sign.FINISHED:
        moving.through[event.rank] = event.incarnation
    if moving is not None and event.rank in moving.fences:
        migration.fenced(turn, job, event.rank)
    elif event.sign is Sign.FINISHED and (moving is None or moving.phase is Phase.RESUME):
        _finished(turn, job, event)
    else:
        _died(turn, job, incidents.cause_of(event))


def _bury(turn: Turn, event: Observed) -> bool:
    """An old incarnation is dead at last: its slot is free."""
    for slot, user in turn.cluster.nodes[event.node].uses.items():
        mine = (user.job, user.rank, user.incarnation)
        if user.fenced and mine == (event.job, event.rank, event.incarnation):
            slots.release(turn.cluster, event.node, slot)
            turn.note(
                f"incarnation {event.incarnation} of rank {event.rank} on {event.node} is dead: "
                f"slot {slot} is free"
            )
            return True
    return False


def _finished(turn: Turn, job: Job, event: Observed) -> None:
    assert job.roster is not None
    seat = job.roster.seats[event.rank]
    job.finished[event.rank] = event.incarnation
    job.step = max(job.step, event.step)
    # Whoever has finished got through the last collective, so all others have come to it: what they
    # said before about standing still is not true any more. A collective that broke for another
    # rank stays broken: that rank waits for orders.
    job.stalls, job.stalls_at = {}, -1.0
    slots.release(turn.cluster, seat.node, seat.slot)
    turn.touched = True
    if len(job.finished) == len(job.roster.seats):
        launch.finish(turn, job, JobState.FINISHED, 0, f"all {len(job.finished)} ranks finished")
    elif job.migration is not None:
        # With no step left to make, leaving in good order is the sign that the resume worked.
        seat_report = SeatReport(event.rank, step=event.step)
        report = PhaseReport(event.node, job.spec.job, job.generation, Phase.RESUME, (seat_report,))
        migration.step(turn, job, report)


def _died(turn: Turn, job: Job, cause: Cause) -> None:
    if cause.sign is Sign.FINISHED:
        why = f"rank {cause.rank} on {cause.node} had finished before the others came back"
        observe.fault(turn, job, incidents.Fault((cause,), why, dead=(cause.rank,)))
        return
    if job.migration is not None and cause.rank in job.migration.leavers:
        # A target: what befalls it on its way says nothing about the user's step.
        observe.fault(turn, job, incidents.died(cause))
        return
    judgement = policy.respond(job, cause)
    stops = judgement.response is policy.Response.STOP
    if stops and not policy.stands_still(turn.cluster, job):
        first = job.exception if cause.sign is Sign.EXCEPTION else None
        job.detail = (first or cause).detail or judgement.why
        turn.note(incidents.died(cause).why, job)
        launch.finish(turn, job, JobState.FAILED, 1, judgement.why)
        return
    if cause.sign is Sign.EXCEPTION:
        job.exception = cause
    elif not policy.died_joining(job, cause):
        job.deaths[cause.rank] = policy.counted(job.deaths.get(cause.rank), cause)
    fault = incidents.died(cause)
    observe.fault(turn, job, replace(fault, settle_seconds=judgement.settle_seconds))


def _sits(job: Job, node: NodeId, rank: Rank) -> bool:
    """A node speaks for the ranks that it has: it may be the only one that somebody broke into."""
    seats = job.roster.seats if job.roster is not None else ()
    return 0 <= rank < len(seats) and seats[rank].node == node


def _listens(job: Job) -> bool:
    """Evidence counts while groups of the present generation are in use."""
    in_use = (*planned.TRAINING, Phase.REFORM, Phase.RESUME)
    return job.migration is None or job.migration.phase in in_use


def _broken(turn: Turn, job: Job, event: Observed) -> None:
    if event.generation != job.generation or not _listens(job):
        turn.ignore(
            f"broken collective of generation {event.generation} ignored: {job.spec.job} is "
            f"{job.state} in generation {job.generation}"
        )
        return
    if not _sits(job, event.node, event.rank):
        turn.ignore(f"broken collective from {event.node} ignored: rank {event.rank} is not there")
        return
    why = f"rank {event.rank} on {event.node} has a broken collective: {event.detail}"
    if incidents.note_broken(job, why, turn.now):
        turn.note(f"{job.broken_why}; looking for a culprit", job)
    else:
        turn.ignore(f"rank {event.rank} has a broken collective too")


def _store_lost(turn: Turn, job: Job, event: Observed) -> None:
    state = turn.cluster.nodes[event.node]
    if state.store_good:
        state.store_good = False
        turn.note(f"the store on {event.node} is gone")
    if job.roster is not None and job.roster.store_node == event.node:
        why = f"the store of generation {job.generation} on {event.node} is gone"
        observe.fault(turn, job, incidents.Fault((incidents.cause_of(event),), why))


def _stalled(turn: Turn, job: Job, event: Stalled) -> None:
    if policy.stands_still(turn.cluster, job):
        turn.ignore(f"stall on {event.node} ignored: the cluster is frozen")
        return
    if event.generation != job.generation or not _listens(job):
        turn.ignore(f"stall of generation {event.generation} ignored: {job.spec.job} moved on")
        return
    own = tuple(fact for fact in event.ranks if _sits(job, event.node, fact.rank))
    if not own:
        turn.ignore(f"stall of ranks that are not on {event.node} ignored")
        return
    if job.finished and not incidents.last_ones_stopped(turn.cluster, job, own):
        turn.ignore(f"stall on {event.node} ignored: {job.spec.job} has made its last step")
        return
    incidents.note_stalled(job, replace(event, ranks=own), turn.now)
    turn.touched = True
    _judge_evidence(turn, job, ticking=False)


def _judge_evidence(turn: Turn, job: Job, *, ticking: bool) -> None:
    known = job.stalls
    fault = incidents.stall_due(job, turn.now, ticking=ticking)
    # Some were too old to count: who replays the journal must not have them either.
    turn.touched |= job.stalls is not known
    if fault is None and ticking:
        fault = incidents.broken_due(job, turn.now)
    if fault is not None:
        job.broken_at, job.stalls, job.stalls_at = -1.0, {}, -1.0
        observe.fault(turn, job, fault)


# ---------------------------------------------------------------- standbys, checkpoints


def _standby(turn: Turn, job: Job, event: StandbyReport) -> None:
    if slot_key(event.node, event.slot) not in job.standbys:
        turn.ignore(f"no standby is expected on {event.node} slot {event.slot}: ignored")
    elif event.ready:
        spares.standby_ready(turn, job, event.node, event.slot, event.level)
    else:
        why = event.detail or "it ended"
        spares.lose_standby(turn, job, event.node, event.slot, why)


def _publish(turn: Turn, event: Publish) -> None:
    """A compare-and-swap on the generation: a fenced worker cannot publish."""
    job = turn.cluster.jobs.get(event.job)
    state = turn.cluster.nodes.get(event.node)
    unsure = job is not None and job.unsure is not None
    if unsure or reconcile.forgotten(turn.cluster, event.job, event.node, event.generation):
        # It may be the journal that is behind, not this worker: it asks again without an answer.
        turn.ignore(f"checkpoint {event.path} has to wait: the journal is behind")
        return
    if job is None or job.state.over:
        refused = f"job {event.job} does not run"
    elif state is None or not state.alive:
        refused = f"node {event.node} was declared lost"
    elif event.generation != job.generation and not sabotage.off("fence"):
        refused = f"generation {event.generation} is fenced: {job.generation} is current"
    elif not _sits(job, event.node, event.rank) and not sabotage.off("fence"):
        refused = f"rank {event.rank} of {event.job} is not on {event.node}"
    elif event.step < job.published_step:
        refused = f"step {event.step} is older than the published step {job.published_step}"
    else:
        refused = ""
        job.published_step, job.published_path = event.step, event.path
        turn.note(f"checkpoint of step {event.step} published: {event.path}", job)
    why = refused or f"step {event.step} is the newest checkpoint"
    if refused:
        turn.ignore(f"checkpoint {event.path} refused: {refused}")
    turn.answers.append((event.node, Published(event.job, event.request, not refused, why)))


# ---------------------------------------------------------------- time and room


def _tick(turn: Turn, event: Tick) -> None:
    if event.late_seconds > 0:
        clocks.late(turn, event.late_seconds)
    if not turn.cluster.frozen:
        nodes.tick(turn)
        taints.tick(turn)
        homes.tick(turn)
        lending.tick(turn)
        reconcile.tick(turn)
        forgetting.tick(turn)
    for name in turn.cluster.open_jobs:
        job = turn.cluster.jobs[name]
        if _nothing_due(job) or job.roster is None or policy.stands_still(turn.cluster, job):
            continue
        for rank, moment in sorted(job.missing.items()):
            if turn.now >= moment and not job.state.over:
                _not_found(turn, job, rank)
        if not job.state.over and _listens(job):
            _judge_evidence(turn, job, ticking=True)
        if not job.state.over and policy.acts(job):
            migration.step(turn, job, Tick())
        elif not job.state.over:
            observe.tick(turn, job)


def _nothing_due(job: Job) -> bool:
    """It trains and nobody has complained: with most jobs time changes nothing."""
    return job.migration is None and not job.missing and not job.stalls and job.broken_at < 0


def _not_found(turn: Turn, job: Job, rank: Rank) -> None:
    """A reconnected agent neither listed this worker nor said how it ended: it is dead."""
    assert job.roster is not None
    job.missing.pop(rank, None)
    turn.touched = True
    seat = job.roster.seats[rank]
    moving = job.migration
    if policy.acts(job) and moving is not None and moving.phase is not Phase.FALLBACK:
        # An order that was told again may have started it meanwhile.
        orders.fence_seats(turn, job, "unfound", [seat])
    detail = "not found by its restarted agent"
    _ended(
        turn,
        job,
        Observed(
            seat.node,
            job.spec.job,
            Sign.EXIT,
            rank,
            seat.incarnation,
            job.generation,
            job.step,
            detail=detail,
        ),
    )
