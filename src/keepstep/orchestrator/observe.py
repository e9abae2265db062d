"""Jobs in mode `observe`: Keepstep writes down what it would do, and does nothing.

    somebody is dead          the job ends, as it would under torchrun without restarts
    nobody is dead (a hang,   it is told once what would be done; nobody is killed
    a broken collective)

What would be done is found out by doing it: on a copy of the cluster, with the brain itself, and
with nobody told. Every fault of every job comes through `fault`, so that there is one place where
the mode decides.
"""

from __future__ import annotations

from dataclasses import replace

from keepstep.model import JobId, JobState, Mode
from keepstep.orchestrator import launch, migration, policy
from keepstep.orchestrator.copies import copy_of
from keepstep.orchestrator.incidents import Fault
from keepstep.orchestrator.state import CAUSES_MAX, Cluster, Job
from keepstep.orchestrator.turn import Turn

SAME_SECONDS = 30.0
"""The same sentence again within this time is about the same occurrence: agents repeat theirs."""


def fault(turn: Turn, job: Job, found: Fault) -> None:
    """Act upon a fault, or only tell of it."""
    if policy.acts(job):
        migration.step(turn, job, found)
    elif found.dead:
        _end(turn, job, found)
    else:
        _tell_once(turn, job, found)


def tick(turn: Turn, job: Job) -> None:
    """A budget that runs out ends in a sentence."""
    moving = job.migration
    if moving is None or turn.now < migration.deadline(job):
        return
    waited = turn.now - moving.phase_at
    turn.note(f"observe: not all ranks made a step within {waited:.0f} s; nothing is done", job)
    moving.phase_at = turn.now


def foresee(cluster: Cluster, name: JobId, found: Fault, now: float) -> tuple[str, ...]:
    """What the brain would say to a fault if it acted, once those to be killed are dead."""
    copy = copy_of(cluster)
    copy.begun_with = {}
    job = copy.jobs[name]
    job.spec = replace(job.spec, policy=replace(job.spec.policy, mode=Mode.ACT))
    copy.frozen = ""
    gone = (*found.dead, *found.kill)
    turn = Turn(copy, now)
    migration.step(turn, job, replace(found, dead=gone, kill=(), settle_seconds=0.0))
    return tuple(note.why for note in turn.notes if note.why != found.why)


def _would(turn: Turn, job: Job, found: Fault) -> str:
    said = "; ".join(foresee(turn.cluster, job.spec.job, found, turn.now))
    first = f"kill rank {', '.join(map(str, found.kill))} and " if found.kill else ""
    done = said.removeprefix("migrating ")
    return f"observe: would {first}" + (f"migrate {done}" if done != said else f"go on: {said}")


def _end(turn: Turn, job: Job, found: Fault) -> None:
    incident = launch.open_incident(turn, job)
    incident.causes = found.causes[:CAUSES_MAX]
    incident.causes_count = len(found.causes)
    would = _would(turn, job, found)
    turn.note(found.why, job)
    turn.note(would, job)
    # The script's traceback, whether it raised by itself or because a peer was gone.
    traces = [cause.detail for cause in found.causes if "\n" in cause.detail]
    told = f"{found.why}; {would}"
    job.detail = "\n".join([*traces[:1], told])
    why = "the job ends as it would without Keepstep: its policy says mode = observe"
    launch.finish(turn, job, JobState.FAILED, 1, why)


def _tell_once(turn: Turn, job: Job, found: Fault) -> None:
    recent = {why: at for why, at in job.observed.items() if turn.now - at <= SAME_SECONDS}
    known = found.why in recent
    job.observed = {**recent, found.why: turn.now}
    turn.touched = True
    if not known:
        turn.note(f"{found.why}; {_would(turn, job, found)}", job)
