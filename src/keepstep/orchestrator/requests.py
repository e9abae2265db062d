"""What operators ask for: each request is followed once, however often it arrives."""

from __future__ import annotations

from typing import assert_never

from keepstep.model import EXIT_REQUEUE, JobState
from keepstep.orchestrator import (
    forgetting,
    freeze,
    homes,
    launch,
    migration,
    planned,
    policy,
    reconcile,
    rules,
    taints,
)
from keepstep.orchestrator.events import (
    DrainAsked,
    ForgetAsked,
    FreezeAsked,
    MigrateAsked,
    StopAsked,
    TaintAsked,
    UndrainAsked,
    UnfreezeAsked,
    UntaintAsked,
)
from keepstep.orchestrator.happenings import RewindAsked, SaveAsked
from keepstep.orchestrator.state import REQUESTS_MAX, Cluster, Job
from keepstep.orchestrator.turn import Turn

Asked = (
    MigrateAsked
    | DrainAsked
    | UndrainAsked
    | ForgetAsked
    | TaintAsked
    | UntaintAsked
    | FreezeAsked
    | UnfreezeAsked
)


def follow(turn: Turn, event: Asked) -> None:
    """What an operator asks for is followed once, however often the request arrives."""
    known = turn.cluster.requests
    if event.request and event.request in known:
        turn.ignore(f"request {event.request} was followed already")
        return
    match event:
        case MigrateAsked():
            _migrate(turn, event)
        case DrainAsked():
            taints.drain(turn, event.node, event.why)
        case UndrainAsked():
            taints.undrain(turn, event.node)
        case ForgetAsked():
            forgetting.forget(turn, event.node)
        case TaintAsked():
            taints.taint(turn, event)
        case UntaintAsked():
            taints.untaint(turn, event)
        case FreezeAsked():
            freeze.freeze(turn, event)
        case UnfreezeAsked():
            freeze.unfreeze(turn)
        case _:
            assert_never(event)
    if turn.touched and turn.cluster.frozen and not isinstance(event, FreezeAsked):
        turn.note("the cluster is frozen: nothing moves before `keepstep unfreeze`")
    if event.request and turn.touched:
        known[event.request] = turn.cluster.next()
        if len(known) > REQUESTS_MAX:
            del known[min(known, key=known.__getitem__)]


def _migrate(turn: Turn, event: MigrateAsked) -> None:
    job = turn.cluster.jobs.get(event.job)
    if job is None or job.state.over or job.roster is None:
        turn.ignore(f"move of {event.job} ignored: it does not run")
    elif bad := [rank for rank in event.ranks if not 0 <= rank < len(job.roster.seats)]:
        turn.ignore(f"{event.job} has no rank {bad[0]}: it has {len(job.roster.seats)}")
    elif rules.aside(turn.cluster, job):
        turn.ignore(f"nothing of {event.job} can be moved before its ranks are found")
    elif event.cancel:
        planned.cancel(turn, job, event.ranks)
    elif why := planned.refusal(job, event.ranks):
        turn.ignore(why)
    elif event.home:
        homes.go(turn, job, event.why)
    else:
        planned.wish(turn, job, event.ranks, event.why, event.to)
        if not turn.touched:
            turn.ignore(f"rank {', '.join(map(str, event.ranks[:8]))} is already to move")


def stop(turn: Turn, event: StopAsked) -> None:
    job = turn.cluster.jobs.get(event.job)
    if job is None or job.state.over:
        turn.ignore(f"stop of {event.job} ignored: it does not run")
    elif event.save and job.unsure is not None:
        why = "without --save it can be ended"
        turn.ignore(f"nothing of {event.job} can be saved before its ranks are found; {why}")
    elif event.rewind:
        if refused := not_rewound(turn.cluster, job):
            turn.ignore(refused)
        else:
            migration.step(turn, job, RewindAsked(event.why))
    elif job.unsure is not None:
        reconcile.give_up(job)
        launch.finish(turn, job, JobState.STOPPED, 0, f"stopped: {event.why}")
    elif not event.save or job.state is JobState.WAITING:
        launch.finish(turn, job, JobState.STOPPED, 0, f"stopped: {event.why}")
    elif job.state is JobState.PARKED:
        why = f"boundary {job.published_step} is saved; run the job again to go on"
        launch.finish(turn, job, JobState.SAVED, EXIT_REQUEUE, why)
    elif job.migration is not None and job.migration.purpose == "save":
        turn.ignore(f"{event.job} is already saving")
    else:
        migration.step(turn, job, SaveAsked(event.why))


def not_rewound(cluster: Cluster, job: Job) -> str:
    """Why this job cannot go back to its newest checkpoint now; empty: it can."""
    name, step = job.spec.job, job.published_step
    if step < 0:
        return f"{name} has published no checkpoint: stop it and run it again to begin anew"
    if job.contaminated and step > job.contaminated[0]:
        return (
            f"the newest checkpoint of {name}, of step {step}, comes after step "
            f"{job.contaminated[0]}, the first that is contaminated: load an older one by hand"
        )
    if not policy.acts(job) or policy.stands_still(cluster, job):
        return f"nothing is done to {name} now: its policy says observe, or the cluster is frozen"
    if job.state is not JobState.RUNNING or job.migration is not None or job.finished:
        return f"{name} does not train now: ask again when it does"
    return ""
