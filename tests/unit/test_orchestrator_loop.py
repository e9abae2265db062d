"""The loop's promises, without sockets: journal then act, replay gives the live state."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepstep import wire
from keepstep.clock import VirtualClock
from keepstep.config import OrchestratorConfig
from keepstep.errors import Alone, Behind, Deposed, Permanent, Transient
from keepstep.model import (
    Generation,
    JobId,
    JobSpec,
    JobState,
    NodeId,
    Phase,
    Policy,
    Rank,
    Sign,
)
from keepstep.orchestrator import (
    brain,
    events,
    journal_sqlite,
    outages,
    run,
    snapshots,
    state,
)
from keepstep.orchestrator.http import Response
from keepstep.orchestrator.journal import Brought, Standing, verify
from keepstep.orchestrator.journal_sqlite import SqliteJournal
from keepstep.orchestrator.own import Own
from keepstep.orchestrator.run import Orchestrator
from keepstep.orchestrator.stepped import Waiting, next_of, with_its_age

NODE, JOB = NodeId("n0"), JobId("job")


class WatchedJournal(SqliteJournal):
    """Says when an append is done; may be away, and may have a lease."""

    def __init__(self, path: Path, happened: list[str]) -> None:
        super().__init__(path)
        self.happened = happened
        self.away = 0
        """How many appends to come find no database."""
        self.lease_seconds = 0.0
        self.unheard = 0
        """How many appends to come have no answer: the same write has to come again."""
        self.written: tuple[Any, ...] | None = None
        self.full = False
        """No room for a snapshot."""
        self.slow = False
        """Texts are brought when the test says so."""

    def bring(self, *arguments: Any) -> Future[Brought]:
        if self.full:
            self.happened.append("no room")
            raise Transient("no space left on device", 0.0)
        if not self.slow:
            return super().bring(*arguments)
        self.on_its_way = Future()
        self.brought = super().bring(*arguments).result()
        return self.on_its_way

    def append(self, *arguments: Any) -> Standing:
        if self.away:
            self.away -= 1
            self.happened.append("away")
            raise Transient("the database is away", 0.0)
        if arguments[2]:
            self.written = self.written or arguments
            assert arguments == self.written, "a write in doubt is repeated as it was"
        if self.unheard:
            self.unheard -= 1
            self.happened.append("unheard")
            raise Transient("the connection broke", 0.0)
        standing = super().append(*arguments)
        self.written = None
        self.happened.append("on disk" if arguments[2] else "renewed")
        return replace(standing, lease_seconds=self.lease_seconds)


class FakeStream:
    """Says when an order leaves."""

    node = NODE
    dropped = ""
    version = wire.VERSION

    def __init__(self, happened: list[str]) -> None:
        self.happened = happened
        self.sent: list[wire.Message] = []

    def send(self, frame: bytes) -> None:
        self.sent.append(wire.decode(frame[4:]))
        self.happened.append("sent")

    def say(self, message: wire.Message) -> None:
        self.send(wire.encode(message))

    def drop(self, why: str) -> None:
        self.dropped = why


class Scene:
    """One orchestrator whose inbox is fed by hand."""

    def __init__(self, path: Path, config: OrchestratorConfig = OrchestratorConfig()) -> None:
        self.happened: list[str] = []
        self.logged: list[str] = []
        self.clock = VirtualClock(1000.0)
        self.journal = WatchedJournal(path / "journal.db", self.happened)
        self.loop = Orchestrator(self.journal, config, self.clock, "token", self.log)
        self.stream = FakeStream(self.happened)
        self.loop._streams[NODE] = self.stream  # type: ignore[assignment]
        self.happened.clear()

    def log(self, event: str, **_: object) -> None:
        self.logged.append(event)

    def feed(self, *given: events.Event) -> None:
        self.clock.advance_to(self.clock.now() + 0.01)
        self.loop._handle([Waiting(event) for event in given])

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


def test_a_long_queue_is_written_in_slices_of_time(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    def slow(*arguments: object) -> brain.Decision:
        scene.clock.advance_to(scene.clock.now() + 0.04)
        return step(*arguments)  # type: ignore[arg-type]

    scene.feed(HELLO, SUBMITTED)
    scene.happened.clear()
    step = brain.step
    monkeypatch.setattr(brain, "step", slow)
    waiting = [Waiting(publish(scene, number)) for number in range(1, 8)]
    asyncio.run(scene.loop._until_written(waiting))
    assert scene.happened.count("on disk") == 3
    assert scene.happened.count("sent") == 7
    assert scene.loop.cluster.jobs[JOB].published_step == 7


def test_a_write_in_doubt_is_repeated_alone_and_what_waited_is_judged_by_clocks_moved_on(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
):
    stepped: list[str] = []

    def slow(*arguments: Any) -> brain.Decision:
        stepped.append(type(arguments[1]).__name__)
        scene.clock.advance_to(scene.clock.now() + 0.06)
        return step(*arguments)

    scene.feed(HELLO, SUBMITTED)
    scene.happened.clear()
    step = brain.step
    monkeypatch.setattr(brain, "step", slow)
    scene.journal.unheard = 12
    asleep = asyncio.sleep

    async def wait(seconds: float) -> None:
        scene.clock.advance_to(scene.clock.now() + 0.1)
        await asleep(0)

    monkeypatch.setattr(run.asyncio, "sleep", wait)
    waiting = [Waiting(publish(scene, number)) for number in range(1, 6)]
    asyncio.run(scene.loop._until_written(waiting))
    assert scene.happened[:13] == ["unheard"] * 12 + ["on disk"]
    assert scene.loop.cluster.jobs[JOB].published_step == 5
    (outage,) = scene.loop.cluster.outages
    assert 1.0 < outage.seconds < 1.6, "and not the time in which it was there"
    assert stepped == ["Publish"] * 2 + ["ControlPlaneBack"] + ["Publish"] * 3


def test_events_that_wait_together_share_one_write(scene: Scene):
    scene.feed(HELLO, SUBMITTED)
    assert scene.happened.count("on disk") == 1
    scene.happened.clear()
    scene.feed(publish(scene, 1), publish(scene, 2), publish(scene, 3))
    assert scene.happened == ["on disk", "sent", "sent", "sent"]


def reports_of_a_start(scene: Scene, *more: str) -> list[wire.PhaseReport]:
    """A job on several nodes that begins, and what they have to say for it to run."""
    names = [NODE, *map(NodeId, more)]
    hellos = [wire.Hello(name, "127.0.0.1", 1, 1, 2, "boot") for name in names]
    scene.feed(*hellos, events.Submitted(JobSpec(JOB, "train.py", nodes=len(names))))
    job = scene.loop.cluster.jobs[JOB]
    assert job.migration is not None
    assert job.roster is not None
    scene.happened.clear()
    phase, generation = job.migration.phase, job.generation
    return [
        wire.PhaseReport(seat.node, JOB, generation, phase, (wire.SeatReport(seat.rank, 0, True),))
        for seat in job.roster.seats
    ]


def test_reports_of_a_job_that_wait_together_are_one_entry(scene: Scene):
    reports = reports_of_a_start(scene, "n1", "n2", "n3")
    seq = scene.loop._standing.seq
    scene.feed(*reports[:2], events.NodeVouched(NODE), *reports[2:])
    assert scene.happened.count("on disk") == 1
    assert scene.loop.cluster.jobs[JOB].state is JobState.RUNNING
    kinds = [link["entry"]["event"]["kind"] for link in exported(scene)[-2:]]
    assert (scene.loop._standing.seq - seq, kinds) == (2, ["Reports", "Reports"])
    replayed, _ = scene.loop._restore()
    assert state.fingerprint(replayed) == scene.print()


def exported(scene: Scene) -> list[dict[str, Any]]:
    return [json.loads(link.body) for link in scene.journal.export(JOB)]


def test_reports_of_two_jobs_are_in_no_entry_together(scene: Scene):
    reports = reports_of_a_start(scene, "n1")
    others = [replace(report, job=JobId("other")) for report in reports]
    waiting = deque(Waiting(report) for report in (*reports, *others, reports[0]))
    found = [next_of(waiting).event for _ in range(3)]
    assert [events.job_of(event) for event in found] == [JOB, "other", JOB]
    assert found[2] is reports[0]
    assert not waiting


def test_a_strangers_report_next_to_others_is_not_kept_with_them(scene: Scene):
    reports = reports_of_a_start(scene, "n1", "n2")
    scene.feed(wire.Hello(NodeId("n9"), "127.0.0.1", 0, 1, 2, "boot"))
    lies = replace(reports[0], node=NodeId("n9"))
    late = replace(reports[0], generation=Generation(0))
    scene.feed(lies, reports[0], late, reports[1], lies)
    scene.feed(lies, reports[2], late)
    assert [link["entry"]["why"] for link in exported(scene)[-2:-1]] == [""], "it tells of n9"
    both, one = (link["entry"]["event"] for link in exported(scene)[-2:])
    assert [report["node"] for report in both["body"]["reports"]] == ["n0", "n1"]
    assert (one["kind"], one["body"]["node"]) == ("PhaseReport", "n2")
    replayed, _ = scene.loop._restore()
    assert state.fingerprint(replayed) == scene.print()


def test_a_snapshot_is_due_by_what_a_replay_has_to_step_through(tmp_path: Path):
    scene = Scene(tmp_path, OrchestratorConfig(snapshot_entries=10))
    scene.feed(*reports_of_a_start(scene, *(f"n{i}" for i in range(1, 12))))
    assert scene.loop._snapshots.due.grown > scene.loop._standing.seq
    replayed, _ = scene.loop._restore(), scene.loop._snapshot_if_due()
    assert state.fingerprint(replayed[0]) == scene.print()
    assert scene.loop._snapshots.due.seq == scene.loop._standing.seq
    assert scene.loop._snapshots.due.grown == 0
    scene.journal.close()


@pytest.mark.parametrize(
    ("seat", "sizes"),
    [
        (wire.SeatReport(Rank(0)), [64, 64, 2]),
        (wire.SeatReport(Rank(0), entries=tuple(range(150))), [3] * 43 + [1]),
        (wire.SeatReport(Rank(0), problem="no room"), [1] * 130),
    ],
)
def test_an_entry_of_reports_has_a_size(seat: wire.SeatReport, sizes: list[int]):
    report = wire.PhaseReport(NODE, JOB, Generation(1), Phase.RESUME, (seat,))
    waiting = deque(Waiting(report) for _ in range(130))
    found = []
    while waiting:
        found.append(events.weight(next_of(waiting).event))
    assert found == sizes


def test_one_report_that_cannot_be_stepped_takes_no_other_along(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
):
    reports = reports_of_a_start(scene, "n1", "n2")
    real, stepped = brain.step, []

    def buggy(cluster: state.Cluster, event: events.Event, now: float) -> brain.Decision:
        stepped.append(type(event).__name__)
        if "n1" in str(event) and not isinstance(event, events.Submitted | wire.Hello):
            cluster.counter += 7
            raise AssertionError("a bug that one of them meets")
        return real(cluster, event, now)

    monkeypatch.setattr(brain, "step", buggy)
    scene.feed(*reports)
    assert stepped[0] == "Reports"
    migration = scene.loop.cluster.jobs[JOB].migration
    assert migration is not None
    assert set(migration.reports) == {0, 2}


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
    loop = scene.loop
    loop._wrote(loop._snapshots.write(loop.cluster, loop._standing, loop.now()))
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


@pytest.mark.parametrize("part", ["_judge_silence", "_send_away_if_cut_off", "_until_written"])
def test_whichever_task_of_a_leader_fails_ends_it_with_its_error(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, part: str
):
    """Else it would decide, and keep its lease, and judge nobody's silence ever again."""

    def fail(*_: object) -> None:
        raise KeyError("a bug of ours")

    async def lead() -> None:
        async with asyncio.timeout(10):
            await scene.loop.run()

    monkeypatch.setattr(scene.loop, part, fail)
    with pytest.raises(KeyError, match="a bug of ours"):
        asyncio.run(lead())
    assert "leader.failed" in scene.logged
    assert scene.stream.dropped == "the orchestrator is leaving"


def test_a_leader_that_is_told_to_leave_leaves_no_task_behind(scene: Scene):
    async def lead() -> None:
        running = asyncio.create_task(scene.loop.run())
        await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        for _ in range(3):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(lead())
    assert "leader.failed" not in scene.logged


def test_a_deposed_leader_sends_nothing(scene: Scene, tmp_path: Path):
    scene.feed(HELLO)
    scene.happened.clear()
    other = SqliteJournal(tmp_path / "journal.db")
    other.begin_term()
    other.close()
    with pytest.raises(Deposed):
        scene.feed(SUBMITTED)
    assert scene.happened == []


def test_an_agent_that_refuses_an_order_keeps_its_stream(scene: Scene):
    stream: Any = scene.stream
    asyncio.run(scene.loop._receive(stream, wire.Refused("order g1 failed: OSError()")))
    assert (stream.dropped, scene.logged[-1]) == ("", "agent.refuses")
    asyncio.run(scene.loop._receive(stream, publish_of(NodeId("n1"))))
    assert stream.dropped == "a Publish of another node, or of none"


def test_what_an_agent_says_of_an_order_is_not_logged_without_end(scene: Scene):
    told: dict[str, Any] = {}
    stream: Any = scene.stream
    scene.loop._log = lambda event, **facts: told.update(facts)
    asyncio.run(scene.loop._receive(stream, wire.Refused("x" * 1_000_000)))
    assert len(told["why"]) == state.DETAIL_CHARS_MAX


def publish_of(node: NodeId) -> wire.Publish:
    return wire.Publish(node, JOB, Generation(1), Rank(0), 1, "path", "r")


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


def until_written(scene: Scene, *given: events.Event) -> None:
    async def work() -> None:
        async with asyncio.timeout(10):
            await scene.loop._until_written([Waiting(event) for event in given])

    asyncio.run(work())


def test_while_the_journal_is_away_nothing_leaves_and_then_all_of_it_in_order(scene: Scene):
    scene.feed(HELLO)
    scene.happened.clear()
    scene.journal.away = 3
    until_written(scene, SUBMITTED, events.Tick())
    assert scene.happened[:4] == ["away"] * 3 + ["on disk"]
    assert set(scene.happened[4:]) == {"sent"}
    assert (scene.logged.count("journal.away"), scene.logged.count("journal.back")) == (1, 1)
    replayed, _ = scene.loop._restore()
    assert state.fingerprint(replayed) == scene.print()
    verify(scene.journal)


def test_a_full_disk_under_a_file_is_waited_for_by_the_same_process(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(journal_sqlite, "RETRY_SECONDS", 0.01)
    scene.feed(HELLO)
    scene.happened.clear()
    own, store = Own(scene.loop, scene.journal), scene.journal._connection
    asked: Any = None
    large = JobSpec(JOB, "train.py", arguments=("x" * 100_000,))
    (pages,) = store.execute("PRAGMA page_count").fetchone()
    store.execute(f"PRAGMA max_page_count = {pages}")

    async def ready() -> int:
        reply = await own.ready(asked)
        assert isinstance(reply, Response)
        return reply.status

    async def work() -> None:
        async with asyncio.timeout(10):
            waiting = [Waiting(events.Submitted(large))]
            writing = asyncio.create_task(scene.loop._until_written(waiting))
            await asyncio.sleep(0.05)
            assert "journal.away" in scene.logged
            assert (await ready(), scene.happened, writing.done()) == (503, [], False)
            store.execute("PRAGMA max_page_count = 1000000")
            await writing
            assert await ready() == 200

    asyncio.run(work())
    assert scene.happened[:2] == ["on disk", "sent"]
    replayed, _ = scene.loop._restore()
    assert state.fingerprint(replayed) == scene.print()
    verify(scene.journal)


def test_a_bug_while_the_journal_is_away_still_leaves_the_state_as_the_journal_has_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
):
    scene.feed(HELLO, SUBMITTED)
    real = brain.step

    def buggy(cluster: state.Cluster, event: events.Event, now: float) -> brain.Decision:
        if isinstance(event, events.LinkLost):
            cluster.counter += 7  # Half a change,
            raise AssertionError("and then a bug")
        return real(cluster, event, now)

    monkeypatch.setattr(brain, "step", buggy)
    scene.journal.away = 2
    until_written(scene, publish(scene, 1), events.LinkLost(NODE), publish(scene, 2))
    assert scene.loop.cluster.jobs[JOB].published_step == 2, "the steps around it count"
    monkeypatch.undo()
    replayed, _ = scene.loop._restore()
    assert state.fingerprint(replayed) == scene.print()


def test_events_are_decided_while_a_snapshot_is_on_its_way(tmp_path: Path):
    scene = Scene(tmp_path, OrchestratorConfig(snapshot_entries=2))
    scene.journal.slow = True
    until_written(scene, HELLO)
    begun_at, on_its_way = scene.loop._standing.seq, scene.journal.on_its_way
    for event in (events.LinkLost(NODE), HELLO, events.LinkLost(NODE)):
        until_written(scene, event)
    assert scene.loop._standing.seq == begun_at + 3
    assert scene.journal.on_its_way is on_its_way, "one at a time"
    assert scene.journal.load().at_seq == 0
    on_its_way.set_result(scene.journal.brought)
    until_written(scene, events.Tick())
    assert scene.journal.load().at_seq == scene.loop.keeping()["snapshot_seq"] == begun_at
    until_written(scene, HELLO)
    assert scene.journal.on_its_way is not on_its_way, "what came meanwhile counts for the next"
    replayed, _ = scene.loop._restore()
    assert state.fingerprint(replayed) == scene.print()
    scene.journal.on_its_way.set_exception(Transient("the way is cut", 0.0))
    until_written(scene, replace(HELLO, node=NodeId("n4")))
    assert scene.logged[-1] == "journal.snapshot_failed"
    verify(scene.journal)
    scene.journal.close()


def test_a_snapshot_that_cannot_be_written_stops_no_decision(tmp_path: Path):
    scene = Scene(tmp_path, OrchestratorConfig(snapshot_entries=1))
    scene.journal.lease_seconds = 9.0
    scene.feed(HELLO)
    scene.happened.clear()
    scene.journal.full = True
    scene.clock.advance_to(scene.clock.now() + 4.0)
    until_written(scene, events.Tick())
    assert scene.happened == ["renewed", "no room"]
    scene.happened.clear()
    until_written(scene, replace(HELLO, node=NodeId("n1")))
    assert scene.happened == ["on disk"], "and is not tried again at once"
    scene.clock.advance_to(scene.clock.now() + snapshots.AGAIN_SECONDS)
    until_written(scene)
    assert scene.happened == ["on disk", "renewed", "no room"]
    scene.journal.full = False
    scene.clock.advance_to(scene.clock.now() + snapshots.AGAIN_SECONDS)
    until_written(scene)
    assert scene.logged[-1] == "journal.snapshot"
    assert scene.logged.count("journal.snapshot_failed") == 2
    verify(scene.journal)
    scene.journal.close()


def test_while_the_inbox_is_full_nobody_is_silent(tmp_path: Path):
    async def judge(seconds: float) -> None:
        scene.clock.advance_to(scene.clock.now() + seconds)
        await scene.loop._judge_silence(scene.clock.monotonic())

    async def outage() -> None:
        async with asyncio.timeout(10):
            scene.loop._heard(NODE)
            for _ in range(2):
                scene.loop._inbox.put_nowait(Waiting(events.Tick()))
            await judge(60.0)
            assert scene.stream.dropped == ""
            scene.loop._inbox.get_nowait()
            await judge(1.0)
            assert scene.stream.dropped == "", "and then it has its whole time"
            await judge(60.0)
            assert scene.stream.dropped == "silent"

    scene = Scene(tmp_path, OrchestratorConfig(inbox_events_max=2))
    asyncio.run(outage())
    scene.journal.close()


def test_a_leader_that_was_stopped_for_20_s_and_wakes_up_fences_nobody(tmp_path: Path):
    """All agents have left it meanwhile, and take some seconds to find it again."""
    scene = Scene(tmp_path)
    nodes = [NodeId(f"n{i}") for i in range(12)]
    loop, clock = scene.loop, scene.clock

    def hello(node: NodeId, *workers: wire.WorkerFact) -> wire.Hello:
        return wire.Hello(node, node, 1, 1, 2, "boot", workers)

    async def beats(seconds: float) -> None:
        """The loop's own clock goes on in tenths, as if it ran."""
        for _ in range(round(seconds * 10)):
            clock.advance_to(clock.now() + 0.1)
            loop._hurried.set()
            for _ in range(8):
                await asyncio.sleep(0)

    def heard() -> None:
        for node in loop._streams:
            loop._heard(node)

    async def play() -> None:
        running = asyncio.create_task(loop.run())
        for node in nodes:
            loop._streams[node] = FakeStream(scene.happened)  # type: ignore[assignment]
            await loop._inbox.put(Waiting(hello(node)))
        spec = JobSpec(JOB, "train.py", nodes=12)
        await loop.decide(events.Submitted(spec))
        job = loop.cluster.jobs[JOB]
        for i, node in enumerate(nodes):
            seat = wire.SeatReport(Rank(i), 1, True, {"0-11": "d"}, step=1, step_seconds=0.1)
            report = wire.PhaseReport(node, JOB, job.generation, Phase.RESUME, (seat,))
            await loop._inbox.put(Waiting(report))
        heard()
        await beats(1.0)
        assert job.state is JobState.RUNNING
        # The process stands still; the agents hear nothing for 4 s and leave.
        clock.advance_to(clock.now() + 20.0)
        for stream in tuple(loop._streams.values()):
            stream.node = next(n for n, s in loop._streams.items() if s is stream)
            await loop._link_ended(stream)
        await beats(8.0)
        assert "we suspect ourselves" in loop.cluster.self_doubt
        for i, node in enumerate(nodes):
            loop._streams[node] = FakeStream(scene.happened)  # type: ignore[assignment]
            fact = wire.WorkerFact(JOB, Rank(i), 0, 0, job.generation)
            await loop._inbox.put(Waiting(hello(node, fact)))
        heard()
        await beats(2.0)
        running.cancel()
        assert (job.generation, job.incidents, job.state) == (1, 0, JobState.RUNNING)
        assert all(node.alive for node in loop.cluster.nodes.values())
        assert not loop.cluster.self_doubt
        sent = [m for s in loop._streams.values() for m in s.sent]  # type: ignore[attr-defined]
        assert not any(isinstance(m, wire.Order) for m in sent), "nobody is fenced"

    async def bounded() -> None:
        async with asyncio.timeout(20):
            await play()

    asyncio.run(bounded())
    scene.journal.close()


def test_a_leader_that_is_cut_off_for_a_lease_sends_its_agents_away_and_gives_up_none(
    scene: Scene,
):
    async def outage() -> None:
        async with asyncio.timeout(10):
            scene.journal.away = 1_000_000
            writing = asyncio.create_task(scene.loop._until_written([Waiting(SUBMITTED)]))
            await asyncio.sleep(0)
            scene.clock.advance_to(scene.clock.now() + 8.0)
            scene.loop._send_away_if_cut_off()
            assert (scene.loop.cut_off, scene.stream.dropped) == ("", "")
            scene.clock.advance_to(scene.clock.now() + 60.0)
            assert "another may lead" in scene.loop.cut_off
            scene.loop._send_away_if_cut_off()
            assert scene.stream.dropped == scene.loop.cut_off
            await scene.loop._judge_silence(scene.clock.monotonic())
            await scene.loop._link_ended(scene.stream)  # type: ignore[arg-type]
            assert scene.loop._inbox.empty(), "it is not its fault"
            scene.journal.away = 0
            scene.clock.advance_to(scene.clock.now() + 60.0)
            await writing
            assert scene.loop.cut_off == ""
            await scene.loop._judge_silence(scene.clock.monotonic())
            assert scene.loop._inbox.empty(), "it has time to come back"
            scene.clock.advance_to(scene.clock.now() + 60.0)
            await scene.loop._judge_silence(scene.clock.monotonic())
            assert scene.loop._inbox.get_nowait().event == events.NodeSilent(NODE)

    scene.journal.lease_seconds = 9.0
    scene.feed(HELLO)
    scene.loop._heard(NODE)
    asyncio.run(outage())


@pytest.mark.parametrize("sent_away", [True, False])
def test_after_an_outage_in_which_it_sent_all_away_a_leader_is_as_patient_as_a_new_one(
    scene: Scene, sent_away: bool
):
    """Where nobody was sent away all are still connected: no Hello will come, and none is due."""

    async def outage() -> None:
        async with asyncio.timeout(10):
            scene.journal.away = 1_000_000
            writing = asyncio.create_task(scene.loop._until_written([Waiting(SUBMITTED)]))
            await asyncio.sleep(0)
            scene.clock.advance_to(scene.clock.now() + 60.0)
            if sent_away:
                scene.loop._send_away_if_cut_off()
            scene.journal.away = 0
            await writing

    scene.journal.lease_seconds = 9.0
    scene.feed(HELLO)
    scene.loop._heard(NODE)
    asyncio.run(outage())
    cluster, back = scene.loop.cluster, scene.clock.now()
    assert (cluster.led_at >= 0, cluster.nodes[NODE].linked) == (sent_away, not sent_away)
    assert (NODE in cluster.doubtful) is sent_away
    patience = scene.loop._alive.last_heard[NODE] - scene.clock.monotonic()
    assert (patience > 0) is sent_away
    replayed, _ = scene.loop._restore()
    assert state.fingerprint(replayed) == scene.print(), "and the journal has it"
    scene.feed(HELLO)
    scene.clock.advance_to(back + 20.0)
    scene.feed(events.Tick())
    assert scene.loop.cluster.nodes[NODE].alive


def test_an_idle_leader_renews_its_lease_by_writing_nothing(scene: Scene):
    scene.journal.lease_seconds = 9.0
    scene.feed(HELLO)
    scene.happened.clear()
    for seconds in (2.0, 2.0, 2.0, 2.0):
        scene.clock.advance_to(scene.clock.now() + seconds)
        until_written(scene, events.Tick())
    assert [what for what in scene.happened if what != "on disk"] == ["renewed"] * 2


@pytest.mark.parametrize(("lease", "offered"), [(9.0, True), (9.0, False), (0.0, True)])
def test_a_leader_that_no_agent_comes_to_leaves_if_they_come_to_another(
    scene: Scene, lease: float, offered: bool
):
    async def lead() -> None:
        running = asyncio.create_task(scene.loop.run())
        for _ in range(300):
            scene.clock.advance_to(scene.clock.now() + 0.1)
            scene.loop._hurried.set()
            for _ in range(8):
                await asyncio.sleep(0)
        running.cancel()
        await running

    scene.journal.lease_seconds = lease
    scene.feed(HELLO)
    scene.loop._streams.clear()
    scene.loop.leaving.offered = lambda: offered
    leaves = lease and offered
    with pytest.raises(Alone if leaves else asyncio.CancelledError):
        asyncio.run(lead())


def test_a_deposed_leader_learns_of_it_when_it_renews(scene: Scene, tmp_path: Path):
    scene.journal.lease_seconds = 9.0
    scene.feed(HELLO)
    other = SqliteJournal(tmp_path / "journal.db")
    other.begin_term()
    other.close()
    scene.clock.advance_to(scene.clock.now() + 4.0)
    with pytest.raises(Deposed):
        until_written(scene)


@pytest.mark.parametrize("deposed", [False, True])
def test_why_a_leader_leaves_is_not_lost_with_a_journal_that_is_away_just_then(
    scene: Scene, tmp_path: Path, deposed: bool
):
    """Else it leads on in a term that agents refuse, and heeds the node that knows no sooner."""
    scene.feed(HELLO)
    scene.loop.leaving.why = Behind(9, "n3")
    scene.journal.away = 0 if deposed else 1
    if deposed:
        other = SqliteJournal(tmp_path / "journal.db")
        other.begin_term()
        other.close()

    async def work() -> None:
        await scene.loop._inbox.put(Waiting(events.Tick()))
        await scene.loop._work()

    with pytest.raises(Deposed if deposed else Behind):
        asyncio.run(work())
    assert ("away" in scene.happened) is not deposed


# --- time in which nobody decides ----------------------------------------------------------------


def outage(scene: Scene, seconds: float, *meanwhile: Waiting) -> None:
    """The journal is away for so long, on the virtual clock; then it is back."""

    async def last() -> None:
        async with asyncio.timeout(10):
            scene.journal.away = 1_000_000
            other = Waiting(replace(HELLO, node=NodeId("n9")))
            writing = asyncio.create_task(scene.loop._until_written([other]))
            await asyncio.sleep(0)
            scene.clock.advance_to(scene.clock.now() + seconds)
            scene.journal.away = 0
            await writing
            await scene.loop._until_written(list(meanwhile))

    asyncio.run(last())


def test_an_outage_of_five_minutes_is_booked_and_uses_up_no_hold(tmp_path: Path):
    scene = Scene(tmp_path)
    spec = JobSpec(JOB, "train.py", policy=Policy(hold_seconds_max=60.0))
    scene.feed(replace(HELLO, slots=1), events.Submitted(spec))
    job = scene.loop.cluster.jobs[JOB]
    report = wire.PhaseReport(
        NODE, JOB, job.generation, Phase.RESUME, (wire.SeatReport(Rank(0), step=1),)
    )
    scene.feed(report)
    died_at = scene.clock.monotonic() + 120.0
    died = wire.Observed(NODE, JOB, Sign.EXIT, Rank(0), 0, job.generation, 5, -9)
    outage(scene, 300.0, Waiting(died, heard_at=died_at))
    (down,) = scene.loop.cluster.outages
    assert (down.seconds, down.why) == (pytest.approx(300.0), "the journal was away")
    assert "the database is away" not in str(state.to_plain(scene.loop.cluster)), "in our log only"
    (incident,) = [job.incident for job in scene.loop.cluster.jobs.values() if job.incident]
    assert incident.seconds[outages.PART] == pytest.approx(180.0, abs=0.1), "since it died"
    replayed, _ = scene.loop._restore()
    assert state.fingerprint(replayed) == scene.print(), "and the journal has it"
    scene.journal.close()


def test_a_stall_that_waited_for_the_journal_is_no_hang(scene: Scene):
    stalled = wire.Stalled(NODE, JOB, Generation(1), (), 5.0)
    now = scene.clock.monotonic()
    assert with_its_age(Waiting(stalled, heard_at=now - 1.0), now) is stalled
    assert with_its_age(Waiting(stalled, heard_at=now - 2.0), now) is None


def test_a_blink_of_the_journal_is_no_outage(scene: Scene):
    outage(scene, 0.3)
    assert scene.loop.cluster.outages == ()


def test_after_an_outage_a_tick_that_waited_is_not_late_once_more(scene: Scene):
    scene.feed(HELLO)
    scene.loop._tick_due = scene.clock.monotonic()
    outage(scene, 300.0, Waiting(events.Tick()))
    assert scene.loop._tick_now().late_seconds == 0.0
