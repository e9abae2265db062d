"""The loop's promises, without sockets: journal then act, replay gives the live state."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from keepstep import wire
from keepstep.clock import VirtualClock
from keepstep.config import OrchestratorConfig
from keepstep.errors import Deposed, Permanent
from keepstep.model import JobId, JobSpec, NodeId, Rank
from keepstep.orchestrator import brain, events, state
from keepstep.orchestrator.journal import SqliteJournal, Standing, verify
from keepstep.orchestrator.run import Orchestrator, _Waiting

NODE, JOB = NodeId("n0"), JobId("job")


class WatchedJournal(SqliteJournal):
    """Says when an append is done."""

    def __init__(self, path: Path, happened: list[str]) -> None:
        super().__init__(path)
        self.happened = happened

    def append(self, *arguments: Any) -> Standing:
        standing = super().append(*arguments)
        self.happened.append("on disk")
        return standing


class FakeStream:
    """Says when an order leaves."""

    node = NODE
    dropped = ""

    def __init__(self, happened: list[str]) -> None:
        self.happened = happened
        self.sent: list[wire.Message] = []

    def send(self, frame: bytes) -> None:
        self.sent.append(wire.decode(frame[4:]))
        self.happened.append("sent")

    def drop(self, why: str) -> None:
        self.dropped = why


class Scene:
    """One orchestrator whose inbox is fed by hand."""

    def __init__(self, path: Path) -> None:
        self.happened: list[str] = []
        self.logged: list[str] = []
        self.clock = VirtualClock(1000.0)
        self.journal = WatchedJournal(path / "journal.db", self.happened)
        config = OrchestratorConfig()
        self.loop = Orchestrator(self.journal, config, self.clock, "token", self.log)
        self.stream = FakeStream(self.happened)
        self.loop._streams[NODE] = self.stream  # type: ignore[assignment]
        self.happened.clear()

    def log(self, event: str, **_: object) -> None:
        self.logged.append(event)

    def feed(self, *given: events.Event) -> None:
        self.clock.advance_to(self.clock.now() + 0.01)
        self.loop._handle([_Waiting(event) for event in given])

    def print(self) -> str:
        return state.fingerprint(self.loop.cluster)


@pytest.fixture
def scene(tmp_path: Path):
    made = Scene(tmp_path)
    yield made
    made.journal.close()


HELLO = wire.Hello(NODE, "127.0.0.1", 4, 1, 2, "boot")
SUBMITTED = events.Submitted(JobSpec(JOB, "train.py", spares=1))


def publish(scene: Scene, step: int) -> wire.Publish:
    generation = scene.loop.cluster.jobs[JOB].generation
    return wire.Publish(NODE, JOB, generation, Rank(0), step, "path", str(step))


def test_an_order_leaves_only_after_its_step_is_on_disk(scene: Scene):
    scene.feed(HELLO)
    scene.happened.clear()
    scene.feed(SUBMITTED)
    assert scene.happened[0] == "on disk"
    assert scene.happened.count("sent") >= 1
    assert any(isinstance(m, wire.Order) for m in scene.stream.sent)


def test_events_that_wait_together_share_one_write(scene: Scene):
    scene.feed(HELLO, SUBMITTED)
    assert scene.happened.count("on disk") == 1
    scene.happened.clear()
    scene.feed(publish(scene, 1), publish(scene, 2), publish(scene, 3))
    assert scene.happened == ["on disk", "sent", "sent", "sent"]


def test_a_step_that_changes_nothing_is_not_journaled(scene: Scene):
    scene.feed(HELLO, SUBMITTED)
    scene.happened.clear()
    scene.feed(events.Tick(), events.Tick(), SUBMITTED)
    assert scene.happened == []


def test_a_tick_that_our_own_loop_is_late_for_says_so_and_moves_the_budgets(scene: Scene):
    scene.feed(HELLO, SUBMITTED)
    migration = scene.loop.cluster.jobs[JOB].migration
    assert migration is not None
    began = migration.phase_at
    scene.clock.advance_to(scene.clock.now() + 60.0)
    scene.happened.clear()
    scene.feed(events.Tick())
    assert scene.happened == ["on disk"], "a replay has to move them too"
    assert migration.phase_at > began + 59.0
    replayed, _ = scene.loop._restore()
    assert state.fingerprint(replayed) == scene.print()


def test_replaying_the_journal_gives_the_live_state(scene: Scene, tmp_path: Path):
    scene.feed(HELLO, SUBMITTED)
    scene.feed(publish(scene, 1), events.LinkLost(NODE))
    scene.feed(events.NodeSilent(NODE))
    live = scene.print()
    replayed, _ = scene.loop._restore()
    assert state.fingerprint(replayed) == live


def test_replaying_from_a_snapshot_gives_the_live_state_too(scene: Scene):
    scene.feed(HELLO, SUBMITTED)
    scene.loop._write_snapshot(scene.loop.cluster, scene.loop._standing.seq, scene.loop.now())
    scene.feed(publish(scene, 1))
    replayed, _ = scene.loop._restore()
    assert state.fingerprint(replayed) == scene.print()
    verify(scene.journal)


def test_a_bug_in_one_step_leaves_the_state_as_the_journal_has_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
):
    scene.feed(HELLO, SUBMITTED)
    before, real = scene.print(), brain.step

    def buggy(cluster: state.Cluster, event: events.Event, now: float) -> brain.Decision:
        if isinstance(event, events.LinkLost):
            cluster.counter += 7  # Half a change,
            raise AssertionError("and then a bug")
        return real(cluster, event, now)

    monkeypatch.setattr(brain, "step", buggy)
    scene.feed(events.LinkLost(NODE))
    assert scene.print() == before
    assert "step.failed" in scene.logged
    scene.feed(publish(scene, 1), events.LinkLost(NODE), publish(scene, 2))
    assert scene.loop.cluster.jobs[JOB].published_step == 2, "the steps around it count"


def test_a_step_that_fails_for_ever_ends_the_process(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> brain.Decision:
        raise AssertionError("always")

    monkeypatch.setattr(scene.loop, "_restore", lambda: (scene.loop.cluster, 0.0))
    monkeypatch.setattr(brain, "step", broken)
    with pytest.raises(Permanent, match="steps failed"):
        scene.feed(*[events.Tick()] * 1000)


def test_a_deposed_leader_sends_nothing(scene: Scene, tmp_path: Path):
    scene.feed(HELLO)
    scene.happened.clear()
    other = SqliteJournal(tmp_path / "journal.db")
    other.begin_term()
    other.close()
    with pytest.raises(Deposed):
        scene.feed(SUBMITTED)
    assert scene.happened == []


def test_the_operators_wait_ends_with_a_decision_that_is_on_disk(scene: Scene):
    async def ask() -> brain.Decision:
        async with asyncio.timeout(10):
            working = asyncio.create_task(scene.loop._work())
            decision = await scene.loop.decide(SUBMITTED)
            working.cancel()
            return decision

    assert asyncio.run(ask()).changed
    assert scene.happened == ["on disk"]
    assert scene.loop.history[-1]["kind"] == "Submitted"
    assert scene.loop.history[-1]["seq"] == scene.loop._standing.seq
