"""THE STORY of one migration.

    WARM -> AGREE ->  a planned one comes this way; planned.py tells of it
    ALLOCATE -> QUIESCE -> REFORM (transfer and verify inside) -> RESUME -> done
                   |  ^       |                            a fault in any phase: ALLOCATE again,
                   v  |       v                            with a new generation
                  HOLD -> SAVE -> saved        FALLBACK -> RESUME from a checkpoint

TABLE says, in that order, what each phase waits for, what follows when all have reported, how long
it may take, and what follows when it took longer. Everything else here is one function per arrow.
The generation is bumped before anybody re-forms: a returning old worker is fenced, not trusted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from keepstep.model import JobState, MigrationId, Phase, Rank, Sign
from keepstep.orchestrator import (
    alike,
    allocate,
    budgets,
    catching_up,
    launch,
    orders,
    planned,
    planning,
    policy,
    portions,
    reports,
    rules,
    saving,
    seating,
    spares,
    suspicion,
)
from keepstep.orchestrator.events import Tick
from keepstep.orchestrator.happenings import (
    Happening,
    RewindAsked,
    Room,
    SaveAsked,
    Thawed,
)
from keepstep.orchestrator.incidents import Fault
from keepstep.orchestrator.state import (
    CAUSES_MAX,
    Cause,
    Job,
    Migration,
    Settled,
    in_migration,
)
from keepstep.orchestrator.turn import Turn
from keepstep.wire import PhaseReport, SeatReport

PARK_RECOVERIES_MAX = 3
"""A job that is to be parked and meets so many faults goes on instead: its borrower waits."""
SAME_FAULT_SECONDS = 2.0
"""Deaths this close together are one fault: they do not use up the recoveries of an incident."""


def step(turn: Turn, job: Job, happening: Happening) -> None:
    """Take a job's migration one step further; a fault or a wish to save begins one."""
    match happening:
        case Fault():
            _fault(turn, job, happening)
        case PhaseReport():
            _report(turn, job, happening)
        case Room():
            allocate.room(turn, job)
        case SaveAsked():
            saving.leave(turn, job, happening.why)
        case RewindAsked():
            _rewind(turn, job, happening.why)
        case Thawed():
            _thawed(turn, job)
        case Tick():
            _tick(turn, job)
        case _:
            assert_never(happening)


# ---------------------------------------------------------------- a fault, at any moment


def _rewind(turn: Turn, job: Job, why: str) -> None:
    """Nobody is lost: all go back, because somebody wants them to."""
    launch.open_incident(turn, job)
    name = MigrationId(f"m{turn.cluster.next()}")
    job.migration = Migration(name, "unplanned", "recover", Phase.ALLOCATE, turn.now, turn.now)
    launch.fall_back(turn, job, f"rewound to step {job.published_step}: {why}")


def _fault(turn: Turn, job: Job, fault: Fault) -> None:
    incident = launch.open_incident(turn, job)
    incident.causes = (*incident.causes, *fault.causes)[:CAUSES_MAX]
    incident.causes_count += len(fault.causes)
    again = job.migration is not None
    if job.migration is None:
        name = MigrationId(f"m{turn.cluster.next()}")
        job.migration = Migration(name, "unplanned", "recover", Phase.ALLOCATE, turn.now, turn.now)
    migration, _ = in_migration(job)
    if migration.purpose == "start":
        migration.phase_at = turn.now
    if migration.purpose == "start" or migration.phase in planned.TRAINING:
        migration.began_at = turn.now
    if migration.purpose == "move":
        migration.outcome = "resumed"
    if migration.purpose in ("start", "move"):
        migration.kind, migration.purpose = "unplanned", "recover"
    turn.note(fault.why, job)
    early = migration.phase in (*planned.TRAINING, Phase.ALLOCATE, Phase.QUIESCE, Phase.HOLD)
    last = max(incident.opened_at, migration.counted_at)
    same = early and turn.now - last < SAME_FAULT_SECONDS
    if again and not same and not policy.stands_still(turn.cluster, job):
        migration.recoveries, migration.counted_at = migration.recoveries + 1, turn.now
        incident.recoveries = migration.recoveries
    if migration.phase is Phase.RESUME and not fault.dead and not fault.kill:
        migration.idle += 1
    seating.forget_finished(turn, job, migration)
    for rank in fault.dead:
        seating.vacate(turn, job, rank, fault.why)
    for rank in fault.kill:
        migration.fences[rank] = in_migration(job)[1].seats[rank].incarnation
    if not rules.asks_before_killing(turn.cluster):
        others = seating.companions(turn, job, {*fault.dead, *fault.kill})
        seating.take_along(turn, job, others)
    _after_fault(turn, job, fault)


def _after_fault(turn: Turn, job: Job, fault: Fault) -> None:
    migration, _ = in_migration(job)
    if policy.stands_still(turn.cluster, job):
        frozen = "the cluster is frozen: nothing is done about it before it is unfrozen"
        turn.note(frozen if turn.cluster.frozen else "nothing is done about it so far", job)
        if migration.phase is not Phase.FALLBACK:
            allocate.begin(turn, job)
        return
    worn_out = f"{migration.recoveries} recoveries did not end it"
    often = migration.recoveries > job.spec.policy.recoveries_max and not migration.saves
    if often and not job.begun and migration.phase is not Phase.FALLBACK:
        # Nothing to save. Workers that all stand still can only be killed and started anew.
        launch.fall_back(turn, job, f"the first step was never made: {worn_out}", outcome="restart")
    elif migration.recoveries > 2 * job.spec.policy.recoveries_max:
        launch.fall_back(turn, job, worn_out)
    elif often and job.begun:
        # The survivors' state is whole: leaving with a checkpoint of it loses nothing.
        saving.leave(turn, job, worn_out)
    elif migration.phase is Phase.FALLBACK:
        launch.relaunch(turn, job)
    elif migration.purpose == "park" and migration.recoveries > PARK_RECOVERIES_MAX:
        saving.go_on(turn, job)
    elif migration.idle > policy.IDLE_REFORMS_MAX:
        saving.leave(turn, job, "the same step failed again and nobody is to blame")
    else:
        allocate.begin(turn, job, fault.settle_seconds)


def fenced(turn: Turn, job: Job, rank: Rank) -> None:
    """A worker that we had killed is dead: its seat may be taken."""
    seating.vacate(turn, job, rank, "fenced")
    turn.note(f"rank {rank} is fenced: its worker is dead", job)
    allocate.if_ready(turn, job)


# ---------------------------------------------------------------- reports


def _report(turn: Turn, job: Job, report: PhaseReport) -> None:
    migration, now = job.migration, job.roster
    ahead = migration is not None and migration.phase in planned.TRAINING
    spoken_of = job.promised if ahead else job.generation
    if migration is None or now is None or report.generation != spoken_of:
        turn.ignore(
            f"report of {report.phase} for generation {report.generation} from {report.node} "
            f"ignored: {job.spec.job} is {job.state} in generation {job.generation}"
        )
        return
    row = TABLE[migration.phase]
    if report.phase is not row.counts:
        reports.progress(turn, job, report)
        return
    taken = reports.take(turn, job, report)
    if not taken:
        return
    turn.touched = True
    budgets.hear(job, taken)
    trains = migration.phase is Phase.RESUME
    if trains or not policy.stands_still(turn.cluster, job):
        _weigh(turn, job, taken)


def _weigh(turn: Turn, job: Job, taken: list[SeatReport]) -> None:
    """What reports lead to: trouble at once, the next phase when all are there."""
    migration, _ = in_migration(job)
    row = TABLE[migration.phase]
    assert row.counts is not None
    _taken(turn, job, row.counts, taken)
    still = job.migration
    if still is migration and migration.phase in TABLE and TABLE[migration.phase] is row:
        _complete(turn, job)


def _thawed(turn: Turn, job: Job) -> None:
    """The cluster is not frozen any more: go on with what came meanwhile."""
    migration = job.migration
    if migration is None or migration.purpose == "save":
        return
    if TABLE[migration.phase].counts is None:
        orders.tell(turn, job)
        allocate.if_ready(turn, job)
    elif migration.phase is Phase.QUIESCE and migration.gone and not migration.saves:
        # What those who stay said before may be old by now: they are asked again.
        allocate.begin(turn, job)
    elif migration.reports:
        _weigh(turn, job, alike.distinct(migration.reports.values()))


def _complete(turn: Turn, job: Job) -> None:
    """If all who are waited for have reported, the next phase begins."""
    migration, now = in_migration(job)
    warming = migration.phase is Phase.WARM
    awaited = len(migration.coming) if warming else len(now.seats) - len(migration.gone)
    if migration.phase is Phase.QUIESCE and migration.gone:
        # Those who stay are asked what they hold. Who is only about to join holds nothing.
        awaited -= len(migration.fresh)
    # Leavers are a way back: a frozen cluster does not let go of them.
    kept = migration.leavers and policy.stands_still(turn.cluster, job)
    if len(migration.reports) >= awaited and not kept:
        budgets.learn(job)
        TABLE[migration.phase].done(turn, job)


def _taken(turn: Turn, job: Job, phase: Phase, taken: list[SeatReport]) -> None:
    """What single reports say before all are there: trouble need not wait for the others."""
    migration, _ = in_migration(job)
    if phase is Phase.RESUME:
        job.begun = True
        job.step = max(job.step, *(seat.step for seat in taken))
        portions.note(job, taken)
    elif phase is Phase.VERIFY:
        assert migration.plan is not None
        bad = planning.unfit(job, migration.plan, taken)
        if bad:
            _unverified(turn, job, bad)
    elif migration.phase is Phase.WARM:
        unfit = [seat for seat in taken if seat.problem]
        if unfit:
            planned.give_up(turn, job, f"target {unfit[0].rank} cannot join: {unfit[0].problem}")
    elif phase is Phase.QUIESCE:
        broken = [seat for seat in taken if seat.problem and seat.rank in migration.joined]
        if broken and not any(seat.intact for seat in broken):
            ranks = tuple(seat.rank for seat in broken)
            why = f"joiner {ranks[0]} cannot join: {broken[0].problem}"
            causes = tuple(Cause(Sign.EXIT, rank, detail=why) for rank in ranks)
            _fault(turn, job, Fault(causes, why, kill=ranks))


# ---------------------------------------------------------------- QUIESCE -> REFORM


def _plan(turn: Turn, job: Job) -> None:
    """All are at a boundary: whose state counts, who sends what to whom."""
    migration, _ = in_migration(job)
    if migration.saves:
        if not catching_up.begin(turn, job):
            saving.save(turn, job)
        return
    if migration.gone:
        if migration.phase is Phase.QUIESCE and not catching_up.begin(turn, job):
            allocate.answered(turn, job)
        return
    if too_early := planning.too_early(job, migration):
        launch.fall_back(turn, job, f"{too_early}, so nothing is lost", outcome="restart")
        return
    if catching_up.begin(turn, job):
        return
    verdict = planning.judge(job)
    if verdict.problem:
        allocate.last_resort(turn, job, verdict.why)
        return
    planned.count_lost(turn, job, verdict.boundary, verdict.winners)
    for rank in verdict.corrupt:
        planning.taint(turn, job, rank, f"rank {rank} held corrupt state at {verdict.boundary}")
    migration.plan = planning.reform(turn, job, verdict)
    if job.incident is not None:
        job.incident.boundary = verdict.boundary
    launch.change_phase(turn, job, Phase.REFORM)
    receivers = {move.target for move in migration.plan.moves}
    turn.note(f"{verdict.why}; {len(receivers)} ranks receive", job)
    orders.tell(turn, job)


# ---------------------------------------------------------------- REFORM -> RESUME


def _unverified(turn: Turn, job: Job, bad: list[SeatReport]) -> None:
    """State did not arrive whole."""
    answer = planning.unverified(turn, job, bad)
    match answer:
        case Fault():
            _fault(turn, job, answer)
        case planning.Again():
            turn.note(answer.why, job)
            allocate.begin(turn, job)
        case planning.NoSource():
            allocate.last_resort(turn, job, answer.why)
        case _:
            assert_never(answer)


def _resume(turn: Turn, job: Job) -> None:
    migration, now = in_migration(job)
    assert migration.plan is not None
    spares.settle(turn.cluster, job, Settled(now, turn.cluster.counter), *job.settled)
    launch.change_phase(turn, job, Phase.RESUME)
    digests = migration.plan.digests
    what = f"{len(digests)} portions as agreed"
    if len(digests) == 1:
        what = next(iter(digests.values()))[:12]
    turn.note(
        f"all {len(now.seats)} ranks hold {what}: training goes on at "
        f"boundary {migration.plan.boundary}",
        job,
    )
    orders.tell(turn, job)


def _done(turn: Turn, job: Job) -> None:
    migration, now = in_migration(job)
    portions.settle(job, alike.distinct(migration.reports.values()))
    launch.change_phase(turn, job, Phase.DONE)
    spares.settle(turn.cluster, job, Settled(now, job.settled[0].serial))
    job.begun, job.state, job.standby_losses = True, JobState.RUNNING, 0
    took = turn.now - migration.began_at
    turn.note(
        f"generation {job.generation} committed its first step after {took:.3f} s"
        + ("" if migration.outcome == "resumed" else f" ({migration.outcome})"),
        job,
    )
    planned.release(turn, job)
    launch.close_incident(turn, job, migration.outcome)
    job.migration = None
    spares.refill(turn, job)


# ---------------------------------------------------------------- time


def _tick(turn: Turn, job: Job) -> None:
    migration = job.migration
    if migration is None:
        return
    if migration.phase is Phase.ALLOCATE:
        allocate.if_ready(turn, job)
    migration = job.migration
    if migration is not None and turn.now >= deadline(job) and not suspicion.excuses(turn, job):
        TABLE[migration.phase].late(turn, job)


def deadline(job: Job) -> float:
    """When the present phase must be over."""
    migration, _ = in_migration(job)
    row = TABLE[migration.phase]
    return row.until(job) if row.counts is None else max(row.until(job), migration.spared_until)


def _late_fences(turn: Turn, job: Job) -> None:
    """A kill that nobody confirms: the node may be cut off. The new generation shuts it out."""
    seating.write_off_fences(turn, job)
    allocate.if_ready(turn, job)


def _late_quiesce(turn: Turn, job: Job) -> None:
    migration, _ = in_migration(job)
    if migration.phase is Phase.HOLD and turn.now >= budgets.hold(job):
        held = turn.now - migration.hold_since
        saving.leave(turn, job, f"no spare came within {held:.1f} s")
        return
    if migration.agreed >= 0:
        turn.note(f"not all came to boundary {migration.agreed}: they stop where they can", job)
        allocate.begin(turn, job)
        return
    fault = _blame(turn, job, budgets.slow_to_quiesce(job, turn.now))
    if not job.begun and not fault.kill:
        # A whole start-up time, and most have not come as far as to hear us.
        launch.fall_back(turn, job, f"no step was made yet, and {fault.why}", outcome="restart")
        return
    _fault(turn, job, fault)


def _late_reports(turn: Turn, job: Job) -> None:
    migration, now = in_migration(job)
    missing = budgets.silent_ranks(job)
    if migration.cold and 2 * len(missing) > len(now.seats):
        limit = job.spec.policy.startup_seconds_max
        why = f"{len(missing)} ranks made no step within {limit:g} s of their start"
        launch.finish(turn, job, JobState.FAILED, 1, f"{why} (startup_seconds_max)")
        return
    _fault(turn, job, _blame(turn, job, missing))


def _blame(turn: Turn, job: Job, missing: list[Rank]) -> Fault:
    # Whom we cannot hear, perhaps by our own fault, is blamed only if there is nobody else.
    missing = suspicion.heard(turn.cluster, job, missing) or missing
    return budgets.blame(job, missing, turn.cluster.doubtful)


@dataclass(frozen=True, slots=True)
class Row:
    """One phase: the report that counts, what follows, its budget, and what follows its end."""

    counts: Phase | None
    done: Callable[[Turn, Job], None]
    until: Callable[[Job], float]
    late: Callable[[Turn, Job], None]


TABLE: dict[Phase, Row] = {
    Phase.WARM: Row(Phase.QUIESCE, planned.warmed, budgets.startup, planned.late),
    Phase.AGREE: Row(Phase.AGREE, planned.agreed, budgets.agree, planned.disagreed),
    Phase.ALLOCATE: Row(None, allocate.if_ready, budgets.allocate, _late_fences),
    Phase.QUIESCE: Row(Phase.QUIESCE, _plan, budgets.quiesce, _late_quiesce),
    Phase.HOLD: Row(Phase.QUIESCE, _plan, budgets.quiesce, _late_quiesce),
    Phase.REFORM: Row(Phase.VERIFY, _resume, budgets.reform, _late_reports),
    Phase.RESUME: Row(Phase.RESUME, _done, budgets.startup, _late_reports),
    Phase.SAVE: Row(Phase.SAVE, saving.saved, budgets.startup, _late_reports),
    Phase.FALLBACK: Row(None, launch.relaunch, budgets.hold, launch.no_room),
}
