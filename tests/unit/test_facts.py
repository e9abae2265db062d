"""What a chain keeps of a step: an incident that closed is told, and told once."""

from __future__ import annotations

from keepstep.model import JobId, JobSpec, JobState
from keepstep.orchestrator import brain, facts, launch
from keepstep.orchestrator.events import Tick
from keepstep.orchestrator.state import JOBS_OVER_MAX, Cluster, Job
from keepstep.orchestrator.stepped import Waiting, stepped_of
from keepstep.orchestrator.turn import Note, Turn

NOW = 5000.0


def failed(jobs: int, others_over: int = 0) -> Cluster:
    cluster = Cluster(secret="s")
    for number in range(others_over):
        name = JobId(f"over{number}")
        cluster.jobs[name] = Job(JobSpec(name, "x.py"), JobState.FINISHED, 1000.0 + number)
    turn = Turn(cluster, NOW)
    for number in range(jobs):
        name = JobId(f"job{number}")
        job = cluster.jobs[name] = Job(JobSpec(name, "x.py"), JobState.RUNNING, 5.0)
        launch.open_incident(turn, job)
        launch.finish(turn, job, JobState.FAILED, 1, "gone")
    return cluster


def test_a_job_that_ends_is_not_the_one_that_is_forgotten() -> None:
    cluster = failed(jobs=1, others_over=JOBS_OVER_MAX)
    told = facts.of(cluster, [JobId("job0")], NOW)
    assert told["job0"]["closed"]["outcome"] == "failed"
    assert len(cluster.jobs) == JOBS_OVER_MAX


def test_all_incidents_that_one_step_closed_are_told() -> None:
    cluster = failed(jobs=100)
    told = facts.of(cluster, list(cluster.jobs), NOW)
    assert all("closed" in each for each in told.values())


def test_two_steps_at_one_instant_tell_a_closed_incident_once() -> None:
    cluster = failed(jobs=1)
    notes = (Note("gone", JobId("job0")),)
    decision = brain.Decision(cluster, (), (), notes, "gone", changed=True)
    waiting = Waiting(Tick())
    first = stepped_of(waiting, decision, NOW)
    second = stepped_of(waiting, decision, NOW, [first])
    assert "closed" in first.facts["job0"]
    assert "closed" not in second.facts["job0"]
