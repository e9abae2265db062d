"""SAVE: a boundary is written down, and then the job leaves, or is parked until there is room."""

from __future__ import annotations

from dataclasses import replace

from keepstep.model import EXIT_REQUEUE, JobState, MigrationId, Phase
from keepstep.orchestrator import (
    allocate,
    launch,
    orders,
    planned,
    planning,
    seating,
    spares,
)
from keepstep.orchestrator.state import Job, Loan, Migration, Plan, in_migration, next_incarnation
from keepstep.orchestrator.turn import Turn

LEND_RETRY_SECONDS = 600.0
"""A job that could not save its state is not asked to lend again for so long."""


def leave(turn: Turn, job: Job, why: str) -> None:
    """Leave in good order: a boundary, a checkpoint of it, exit 75."""
    migration = job.migration or _begin(turn, job, "save")
    turn.note(f"asked to save and leave: {why}", job)
    migration.purpose = "save"
    job.loan = None
    if migration.phase is Phase.FALLBACK or (migration.cold and not job.begun):
        saved(turn, job)
        return
    allocate.begin(turn, job)


def park(turn: Turn, job: Job, why: str, loan: Loan | None = None) -> None:
    """Save a boundary and free the devices; the job goes on there when there is room again."""
    assert job.migration is None
    _begin(turn, job, "park")
    job.loan = loan
    turn.note(f"{job.spec.job} is to be parked: {why}", job)
    allocate.begin(turn, job)


def _begin(turn: Turn, job: Job, purpose: str) -> Migration:
    launch.open_incident(turn, job)
    name = MigrationId(f"m{turn.cluster.next()}")
    migration = Migration(name, "planned", purpose, Phase.ALLOCATE, turn.now, turn.now)
    job.migration = migration
    seating.forget_finished(turn, job, migration)
    return migration


def save(turn: Turn, job: Job) -> None:
    """All survivors are at a boundary: of each portion one who holds it writes it down."""
    migration, _ = in_migration(job)
    verdict = planning.judge(job)
    if verdict.problem:
        allocate.last_resort(turn, job, verdict.why)
        return
    planned.count_lost(turn, job, verdict.boundary, verdict.winners)
    plan = migration.plan = planning.save(turn, job, verdict)
    if job.incident is not None:
        job.incident.boundary = verdict.boundary
    launch.change_phase(turn, job, Phase.SAVE)
    write = sorted(set(plan.writers.values()))
    verb = "saves" if len(write) == 1 else "save"
    listed = ", ".join(map(str, write[:8])) + (" …" if len(write) > 8 else "")
    turn.note(f"{verdict.why}; rank {listed} {verb} boundary {plan.boundary}", job)
    orders.tell(turn, job)


def saved(turn: Turn, job: Job) -> None:
    migration, _ = in_migration(job)
    plan = migration.plan
    failed = [r for r in migration.reports.values() if r.problem] if plan is not None else []
    if plan is not None and failed:
        # A checkpoint is whole or nothing: any rank's trouble counts, a writer's also bars it.
        for writer in sorted(set(plan.writers.values())):
            if migration.reports[writer].problem:
                migration.excluded[writer] = migration.excluded.get(writer, 0) + 1
        migration.attempts += 1
        turn.note(f"rank {failed[0].rank} could not save: {failed[0].problem}", job)
        _again(turn, job)
        return
    if plan is not None:
        # The rerun starts there, whoever places it.
        job.published_step, job.published_path = plan.boundary, plan.path
    if plan is not None and migration.purpose == "park":
        _parked(turn, job, plan)
        return
    at = f"boundary {plan.boundary} is saved" if plan else "there was nothing to save"
    launch.finish(turn, job, JobState.SAVED, EXIT_REQUEUE, f"{at}; run the job again to go on")


def _again(turn: Turn, job: Job) -> None:
    migration, _ = in_migration(job)
    if migration.attempts < job.spec.policy.transfer_attempts_max:
        allocate.begin(turn, job)
    elif migration.purpose == "park":
        # Nobody has to leave: it is the disk that is at fault, not the state.
        go_on(turn, job)
    else:
        allocate.last_resort(turn, job, f"{migration.attempts} attempts to save failed")


def go_on(turn: Turn, job: Job) -> None:
    """It cannot be parked, and need not: it trains on, and is not asked again for a while."""
    migration, _ = in_migration(job)
    migration.purpose, migration.attempts, migration.excluded = "recover", 0, {}
    job.loan, job.lend_at = None, turn.now + LEND_RETRY_SECONDS
    turn.note(f"{job.spec.job} cannot be parked: it goes on", job)
    allocate.begin(turn, job)


def _parked(turn: Turn, job: Job, plan: Plan) -> None:
    """The state is kept on disk, the devices are free: first of all for whoever asked."""
    migration, now = in_migration(job)
    launch.change_phase(turn, job, Phase.DONE)
    free = len(now.seats) - len(migration.gone)
    turn.note(f"parked at boundary {plan.boundary}: {free} devices are free", job)
    # Agents remember how each incarnation ended: the next ones must not be taken for them.
    job.first_incarnation = max(next_incarnation(job, seat) for seat in now.seats)
    spares.clear(turn, job, EXIT_REQUEUE, "parked")
    launch.close_incident(turn, job, "parked")
    launch.forget_run(job)
    job.roster, job.begun = None, False
    job.finished, job.missing, job.leaving, job.incarnations = {}, {}, {}, {}
    job.state, job.since = JobState.PARKED, turn.now
    if job.loan is not None:
        job.loan = replace(job.loan, began_at=turn.now, boundary=plan.boundary)
        borrower = turn.cluster.jobs.get(job.loan.borrower)
        if borrower is not None and not borrower.state.over:
            allocate.room(turn, borrower)
            planned.begin(turn, borrower)
    launch.start_waiting(turn)
