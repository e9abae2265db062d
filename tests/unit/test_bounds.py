"""What an agent says is bounded where it comes in: nothing without end is journaled or shown."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepstep import wire
from keepstep.model import JobId, JobSpec, JobState, NodeId, Phase, Rank, Severity, Sign
from keepstep.orchestrator import bounds, events
from keepstep.orchestrator.stepped import Waiting, come
from tests.unit.test_orchestrator_loop import HELLO, JOB, NODE, Scene, publish

LONG = "x" * 1_000_000


@pytest.fixture
def scene(tmp_path: Path):
    made = Scene(tmp_path)
    made.feed(HELLO, events.Submitted(JobSpec(JOB, "train.py", spares=1)))
    job = made.loop.cluster.jobs[JOB]
    seats = tuple(wire.SeatReport(Rank(r), 1, True, step=1) for r in range(len(job.roster.seats)))
    made.feed(wire.PhaseReport(NODE, JOB, job.generation, Phase.RESUME, seats))
    assert job.state is JobState.RUNNING
    yield made
    made.journal.close()


def receive(scene: Scene, message: wire.Message) -> list[wire.Message]:
    stream: Any = scene.stream
    asyncio.run(scene.loop._receive(stream, message))
    return [item.event for item in come(scene.loop._inbox, 10)]


def test_a_broken_collective_with_a_text_without_end_is_journaled_with_its_end(scene: Scene):
    generation = scene.loop.cluster.jobs[JOB].generation
    detail = LONG + "RuntimeError: what it was"
    broken = wire.Observed(NODE, JOB, Sign.BROKEN, Rank(0), 0, generation, 1, detail=detail)
    (heard,) = receive(scene, broken)
    scene.loop._handle([Waiting(heard)])
    (record,) = [told for told in scene.loop.history if told["kind"] == "Observed"]
    assert len(json.dumps(record)) < 40_000
    assert "what it was" in record["why"]
    assert "[cut: 1000025 characters, at most 8000]" in record["why"]
    assert scene.loop.cluster.jobs[JOB].broken_why in record["why"]


def test_other_texts_for_people_are_cut_with_a_mark(scene: Scene):
    seats = (wire.SeatReport(Rank(0), problem=LONG), wire.SeatReport(Rank(1), problem="short"))
    report = wire.PhaseReport(NODE, JOB, scene.loop.cluster.jobs[JOB].generation, Phase.SAVE, seats)
    (heard,) = receive(scene, report)
    assert [len(seat.problem) for seat in heard.seats] == [2000, 5]
    assert heard.seats[0].problem.endswith("[cut: 1000000 characters, at most 2000]")
    (heard,) = receive(scene, wire.StandbyReport(NODE, JOB, 2, 1, False, LONG))
    assert len(heard.detail) == 2000
    (heard,) = receive(scene, wire.Health(NODE, Severity.AVOID, LONG))
    assert len(heard.reason) == 500
    short = wire.StandbyReport(NODE, JOB, 2, 1, False, "it ended")
    assert receive(scene, short) == [short]


def test_what_a_job_is_busy_with_is_cut_and_a_beat_has_so_many_pulses(scene: Scene):
    stream: Any = scene.stream
    pulse = wire.JobPulse(JOB, scene.loop.cluster.jobs[JOB].generation, 1, 1, 0.1, busy=LONG)
    scene.loop._beats(stream, wire.Heartbeat(NODE, (pulse,) * 10_000))
    (beat,) = scene.loop.heartbeats
    assert len(beat.jobs) == 4096
    assert {len(each.busy) for each in beat.jobs} == {500}
    short = wire.Heartbeat(NODE, (replace(pulse, busy="evaluation"),))
    assert bounds.cut_beat(short) is short


def test_a_path_that_is_too_long_is_answered_and_never_journaled(scene: Scene):
    assert receive(scene, replace(publish(scene, 1), path="p" * 5000)) == []
    stream: Any = scene.stream
    (answer,) = [said for said in stream.sent if isinstance(said, wire.Published)]
    assert (answer.accepted, answer.request, stream.dropped) == (False, "1", "")
    assert "5000 characters; at most 4096" in answer.why
    assert len(receive(scene, replace(publish(scene, 1), path="p" * 4096))) == 1


@pytest.mark.parametrize(
    "message",
    [
        wire.Publish(NODE, JOB, 1, Rank(0), 1, "path", LONG),
        wire.Stalled(NODE, JOB, 1, (wire.StallFact(Rank(0), 0, 1, 1),) * 5000, 4.0),
        wire.PhaseReport(NODE, JOB, 1, Phase.QUIESCE, (wire.SeatReport(Rank(0), groups=LONG),)),
        wire.PhaseReport(
            NODE, JOB, 1, Phase.QUIESCE, (wire.SeatReport(Rank(0), entries=(1,) * 1_000_001),)
        ),
        wire.Publish(NodeId("another"), JOB, 1, Rank(0), 1, "path", "1"),
        wire.Published(JobId("job"), "1", True, ""),
    ],
)
def test_what_no_agent_of_ours_says_ends_its_stream(scene: Scene, message: wire.Message):
    assert receive(scene, message) == []
    assert scene.stream.dropped
