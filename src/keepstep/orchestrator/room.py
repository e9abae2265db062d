"""Who gets what has become free: in which order jobs may ask for slots and standbys. Pure."""

from __future__ import annotations

from keepstep.model import JobState, Phase
from keepstep.orchestrator import launch, lending, migration, planned, seating, spares
from keepstep.orchestrator.happenings import Room
from keepstep.orchestrator.state import Job
from keepstep.orchestrator.turn import Turn


def use(turn: Turn) -> None:
    """Held jobs first, then those with ranks that shall move, then waiting ones, then standbys."""
    if turn.cluster.frozen:
        return
    cluster = turn.cluster
    jobs = [job for job in map(cluster.jobs.__getitem__, cluster.open_jobs) if _wants_room(job)]
    if not jobs:
        return
    jobs.sort(key=lambda job: (-job.spec.priority, job.spec.job))
    first = seating.allocating(cluster)
    for job in jobs:
        if first is not None and job.spec.priority < first:
            break
        if job.unsure is not None:
            continue
        migration.step(turn, job, Room())
        planned.begin(turn, job)
        if lending.seek(turn, job):
            migration.step(turn, job, Room())
            planned.begin(turn, job)
    launch.start_waiting(turn)
    first = seating.allocating(cluster)
    few = [job for job in map(cluster.jobs.__getitem__, cluster.open_jobs) if _few_standbys(job)]
    for job in sorted(few, key=lambda job: (-job.spec.priority, job.spec.job)):
        if job.state.over or (first is not None and job.spec.priority <= first):
            continue
        if job.migration is None or job.migration.purpose == "start":
            spares.refill(turn, job)


def _wants_room(job: Job) -> bool:
    """Whether more room could change anything for a job: with most of them all is well."""
    moving = job.migration
    held = moving is not None and moving.phase in (Phase.HOLD, Phase.FALLBACK)
    waits = job.state in (JobState.WAITING, JobState.PARKED)
    return held or waits or bool(job.leaving) or _few_standbys(job)


def _few_standbys(job: Job) -> bool:
    return len(job.standbys) < job.spec.spares
