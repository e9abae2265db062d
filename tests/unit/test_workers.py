"""A worker's end is told whatever the node is short of, and nobody is ended for such a shortage."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from keepstep import wire
from keepstep.agent import forks, store, workers
from keepstep.agent.forks import Forks
from keepstep.agent.health import Health
from keepstep.agent.links import Link
from keepstep.agent.peer import Peer
from keepstep.agent.room import ProcessRecord, Room, StoreRecord, WorkerRecord, kill_group
from keepstep.agent.run import Agent, AgentConfig
from keepstep.agent.store import Store
from keepstep.agent.workers import Workers
from keepstep.config import AgentSettings
from keepstep.detect import process
from keepstep.errors import Transient, Unreachable
from keepstep.model import Endpoint, JobId, JobSpec, NodeId, Rank, Term

JOB = JobId("train")
SECONDS_MAX = 10.0
LOST = WorkerRecord(JOB, 0, 2**22 + 1, 1, Rank(0))
"""A rank that is gone: no process has such a pid."""


class Node:
    """A room and the workers in it, without an agent around."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.room = Room(directory, "127.0.0.1")
        self.room.open()
        self.room.meet_job(JobSpec(JOB, "train.py"))
        self.told: list[wire.Observed] = []
        self.workers = Workers(NodeId("n1"), self.room, lambda _, told: self.told.append(told))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "room")
    yield made
    made.room._lock.close()


@pytest.fixture
def child() -> Iterator[WorkerRecord]:
    """A living process, the leader of its group as a worker is."""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as started:
        reading = process.probe(started.pid)
        assert reading is not None
        yield WorkerRecord(JOB, 0, started.pid, reading.start, Rank(0))
        started.kill()


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def none_left(*_: object, **__: object) -> int:
    raise OSError(errno.EMFILE, "Too many open files")


def test_a_death_is_told_though_the_room_is_full_and_written_when_there_is_space(
    node: Node, monkeypatch: pytest.MonkeyPatch
):
    async def die() -> None:
        dead = node.workers.watch(LOST)
        monkeypatch.setattr(node.room, "save", full)
        async with asyncio.timeout(SECONDS_MAX):
            await dead.gone.wait()

    asyncio.run(die())
    assert [told.rank for told in node.told] == [0]
    monkeypatch.undo()
    node.room.save()
    node.room._lock.close()
    again = Node(node.directory)
    assert again.room.jobs[JOB].endings == tuple(node.told)
    assert not again.room.workers
    again.room._lock.close()


def test_a_worker_that_could_not_be_written_down_is_watched_all_the_same(
    node: Node, monkeypatch: pytest.MonkeyPatch
):
    async def die() -> None:
        with monkeypatch.context() as no_space:
            no_space.setattr(node.room, "save", full)
            dead = node.workers.watch(LOST)
        assert list(node.workers) == [dead]
        async with asyncio.timeout(SECONDS_MAX):
            await dead.gone.wait()

    asyncio.run(die())
    assert len(node.told) == 1


@pytest.mark.parametrize("what", ["pidfd_open", "open"])
def test_nobody_is_ended_for_want_of_a_file_to_watch_it_with(
    node: Node, child: WorkerRecord, monkeypatch: pytest.MonkeyPatch, what: str
):
    monkeypatch.setattr(workers, "LOOK_SECONDS", 0.001)

    async def live_and_die() -> None:
        with monkeypatch.context() as short:
            short.setattr(*((os, what) if what == "pidfd_open" else (Path, "read_text")), none_left)
            worker = node.workers.watch(child)
            looked = asyncio.Event()
            asyncio.get_running_loop().call_later(0.05, looked.set)
            await looked.wait()
        assert worker.is_alive
        assert process.life(child.pid, child.start) is process.Life.ALIVE
        node.workers.kill(worker)
        async with asyncio.timeout(SECONDS_MAX):
            await worker.gone.wait()
        assert not worker.is_alive

    asyncio.run(live_and_die())
    assert [told.rank for told in node.told] == [0]


def test_where_the_kernel_has_no_such_descriptors_an_end_is_seen_by_looking(
    node: Node, child: WorkerRecord, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(workers, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(os, "pidfd_open", none_left)

    async def live_and_die() -> None:
        worker = node.workers.watch(child)
        assert worker.is_alive
        async with asyncio.timeout(SECONDS_MAX):
            await node.workers.fence(worker)

    asyncio.run(live_and_die())
    assert [told.rank for told in node.told] == [0]


@pytest.fixture
def no_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No process can be looked at, until it is undone. Looks are many."""
    monkeypatch.setattr(workers, "LOOK_SECONDS", 0.001)
    with monkeypatch.context() as short:
        short.setattr(Path, "read_text", none_left)
        yield short


async def some_looks_later() -> None:
    looked = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, looked.set)
    await looked.wait()


@pytest.mark.parametrize("how", ["fence", "kill"])
def test_who_is_to_be_killed_dies_once_it_can_be_looked_at(
    node: Node, child: WorkerRecord, no_files: pytest.MonkeyPatch, how: str
):
    no_files.setattr(os, "pidfd_open", none_left)

    async def live_and_die() -> None:
        worker = node.workers.watch(child)
        fenced = asyncio.ensure_future(node.workers.fence(worker)) if how == "fence" else None
        node.workers.kill(worker)
        await some_looks_later()
        assert worker.is_alive
        os.kill(child.pid, 0)
        no_files.undo()
        async with asyncio.timeout(SECONDS_MAX):
            await (fenced or worker.gone.wait())

    asyncio.run(live_and_die())
    assert [told.rank for told in node.told] == [0]


def test_a_worker_with_a_descriptor_is_fenced_at_once_without_any_other(
    node: Node, child: WorkerRecord, monkeypatch: pytest.MonkeyPatch
):
    async def live_and_die() -> None:
        worker = node.workers.watch(child)
        with monkeypatch.context() as short:
            short.setattr(Path, "read_text", none_left)
            async with asyncio.timeout(SECONDS_MAX):
                await node.workers.fence(worker)

    asyncio.run(live_and_die())
    assert [told.rank for told in node.told] == [0]


def test_a_worker_that_cannot_be_looked_at_is_asked_to_leave_before_it_is_killed(
    node: Node, child: WorkerRecord, monkeypatch: pytest.MonkeyPatch
):
    async def live_and_die() -> None:
        worker = node.workers.watch(child)
        with monkeypatch.context() as short:
            short.setattr(Path, "read_text", none_left)
            async with asyncio.timeout(SECONDS_MAX):
                await node.workers.end(worker, 2 * SECONDS_MAX, ask=True)

    asyncio.run(live_and_die())
    (told,) = node.told
    assert told.exit_code != 0


def test_the_children_of_a_dead_rank_follow_once_it_can_be_told_whose_they_are(
    node: Node, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(workers, "LOOK_SECONDS", 0.001)
    line = ["sh", "-c", "sleep 60 & echo $!; exec sleep 60"]

    async def live_and_die(rank: int, loader: int) -> None:
        reading, its = process.probe(rank), process.probe(loader)
        assert reading is not None
        assert its is not None
        worker = node.workers.watch(WorkerRecord(JOB, 0, rank, reading.start, Rank(0)))
        with monkeypatch.context() as short:
            short.setattr(Path, "read_text", none_left)
            node.workers.kill(worker)
            async with asyncio.timeout(SECONDS_MAX):
                await worker.gone.wait()
            assert _is_there(loader)
        async with asyncio.timeout(SECONDS_MAX):
            while True:
                if process.life(loader, its.start) is process.Life.GONE:
                    break
                await asyncio.sleep(0.001)

    with subprocess.Popen(line, stdout=subprocess.PIPE, start_new_session=True) as rank:
        assert rank.stdout is not None
        try:
            asyncio.run(live_and_die(rank.pid, int(rank.stdout.readline())))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)


def _is_there(pid: int) -> bool:
    os.kill(pid, 0)
    return True


def test_what_cannot_be_looked_at_is_neither_signalled_nor_taken_for_gone(
    child: WorkerRecord, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as short:
        short.setattr(Path, "read_text", none_left)
        assert not kill_group(child.pid, child.start, signal.SIGKILL)
    assert kill_group(child.pid, child.start + 1, signal.SIGKILL), "gone: nothing is left to do"
    assert process.life(child.pid, child.start) is process.Life.ALIVE
    assert kill_group(child.pid, child.start, signal.SIGKILL)


def test_a_preload_server_that_cannot_be_looked_at_is_not_replaced(
    node: Node, child: WorkerRecord, monkeypatch: pytest.MonkeyPatch
):
    served = Forks(node.room, (), lambda _: None)
    known = node.room.preload = ProcessRecord(child.pid, child.start)
    monkeypatch.setattr(Path, "read_text", none_left)
    monkeypatch.setattr(subprocess, "Popen", none_left)
    asyncio.run(served._ensure_server())
    assert node.room.preload == known


def test_a_preload_server_is_not_ended_because_we_have_no_file_to_reach_it_with(
    node: Node, child: WorkerRecord, monkeypatch: pytest.MonkeyPatch
):
    served = Forks(node.room, (), lambda _: None)
    node.room.preload = ProcessRecord(child.pid, child.start)
    monkeypatch.setattr(forks, "CONNECT_SECONDS_MAX", -1.0)
    monkeypatch.setattr(asyncio, "open_unix_connection", none_left)
    with pytest.raises(Unreachable):
        asyncio.run(served._connect())
    assert process.life(child.pid, child.start) is process.Life.ALIVE


def test_a_store_that_cannot_be_looked_at_is_adopted_and_watched(
    node: Node, child: WorkerRecord, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store, "LOOK_SECONDS", 0.001)
    replaced: list[None] = []
    node.room.store = StoreRecord(child.pid, child.start, 29500)
    kept = Store(node.room, lambda: replaced.append(None))

    class Fork(Exception):
        pass

    class NoForks:
        async def fork(self, _: object) -> None:
            raise Fork

    async def live_and_die() -> None:
        run = asyncio.ensure_future(kept.run(cast(Forks, NoForks())))
        with monkeypatch.context() as short:
            short.setattr(Path, "read_text", none_left)
            short.setattr(os, "pidfd_open", none_left)
            await some_looks_later()
        assert not run.done()
        assert kept.ready.is_set()
        assert kept.port == 29500
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(Fork):
            async with asyncio.timeout(SECONDS_MAX):
                await run

    asyncio.run(live_and_die())
    assert not replaced


def reopened(node: Node) -> Room:
    """What an agent that starts now finds."""
    found = Room(node.directory, "127.0.0.1")
    node.room._lock.close()
    found.open()
    found._lock.close()
    return found


def test_an_agent_that_starts_in_a_full_room_watches_all_who_live_there_and_listens(
    node: Node, child: WorkerRecord, monkeypatch: pytest.MonkeyPatch
):
    dead = [replace(LOST, slot=slot, pid=LOST.pid + slot, rank=Rank(slot)) for slot in (1, 2)]
    node.room.workers = {record.pid: record for record in (*dead, child)}
    node.room.term = Term(7)
    node.room.save()
    monkeypatch.setattr(workers, "ADOPTED_STATUS_SECONDS_MAX", 0.0)

    async def start() -> None:
        monkeypatch.setattr(node.room, "save", full)
        node.workers.adopt()
        peer = Peer(node.room)
        await peer.start()
        assert peer.port > 0
        assert peer._server is not None
        peer._server.close()
        async with asyncio.timeout(SECONDS_MAX):
            await asyncio.gather(*(w.gone.wait() for w in node.workers if w.record != child))
        assert [worker.record for worker in node.workers] == [child]

    asyncio.run(start())
    assert sorted(told.rank for told in node.told) == [1, 2]
    monkeypatch.undo()
    assert reopened(node).term == 7, "what is refused is as it was"


def test_who_was_not_written_down_is_when_there_is_space(
    node: Node, child: WorkerRecord, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(workers, "SAVE_SECONDS", 0.001)

    async def start() -> None:
        with monkeypatch.context() as no_space:
            no_space.setattr(node.room, "save", full)
            node.workers.watch(child)
            await some_looks_later()
        assert child.pid in node.room.workers
        await some_looks_later()

    asyncio.run(start())
    assert reopened(node).workers == {child.pid: child}


def test_a_standby_takes_no_seat_that_a_full_room_has_no_space_for_but_says_that_it_is_ready(
    node: Node, child: WorkerRecord, monkeypatch: pytest.MonkeyPatch
):
    async def start() -> None:
        standby = replace(child, rank=Rank(-1))
        worker = node.workers.watch(standby)
        monkeypatch.setattr(node.room, "save", full)
        with pytest.raises(OSError, match="No space left"):
            node.workers.update(worker, child)
        assert worker.record == node.room.workers[child.pid] == standby
        node.workers.heard(worker, replace(standby, ready=True))
        assert worker.record.ready

    asyncio.run(start())


def test_half_a_state_takes_no_space_in_a_full_room(node: Node, monkeypatch: pytest.MonkeyPatch):
    node.room.save()

    def half(path: Path, _: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as no_space:
        no_space.setattr(Path, "write_bytes", half)
        assert not node.room.save_if_possible()
    assert not list(node.directory.glob("*.new"))
    assert reopened(node).jobs.keys() == {JOB}


def test_a_stranger_that_cannot_be_looked_at_is_sent_away_to_come_again(
    tmp_path: Path, child: WorkerRecord, monkeypatch: pytest.MonkeyPatch
):
    closed: list[None] = []

    class Writer:
        def close(self) -> None:
            closed.append(None)

    hello = wire.WorkerHello(JOB, 0, child.pid, Rank(0))

    async def come() -> None:
        leader = Endpoint("127.0.0.1", 1)
        agent = Agent(AgentConfig(NodeId("n0"), 1, (leader,), "127.0.0.1", tmp_path / "room"))
        agent.room.open()
        with agent.room._lock:
            link = Link(child.pid, cast(asyncio.StreamWriter, Writer()))
            with monkeypatch.context() as short:
                short.setattr(Path, "read_text", none_left)
                assert agent._meet_stranger(link, hello) is None
            assert len(closed) == 1
            met = agent._meet_stranger(link, hello)
            assert met is not None
            assert met.record.start == child.start

    asyncio.run(come())


def test_a_preload_server_that_could_not_be_written_down_by_name_is_not_left_behind(
    node: Node, monkeypatch: pytest.MonkeyPatch
):
    served = Forks(node.room, (), lambda _: None)
    monkeypatch.setattr(forks, "command", lambda _: ("sleep", "60"))
    with monkeypatch.context() as short:
        short.setattr(process, "look", none_left)
        with pytest.raises(OSError, match="Too many"):
            served._started(())
    assert served._own is not None
    assert served._own.wait(SECONDS_MAX) == -signal.SIGKILL


def test_a_health_program_that_cannot_be_named_is_ended_at_its_limit_all_the_same(
    node: Node, monkeypatch: pytest.MonkeyPatch
):
    settings = AgentSettings(health_program="sleep 60", health_seconds_max=0.05)
    health = Health(NodeId("n1"), 1, settings, node.room, lambda _: None)
    monkeypatch.setattr(process, "look", none_left)
    monkeypatch.setattr(node.room, "save", full)

    async def run() -> None:
        async with asyncio.timeout(SECONDS_MAX):
            with pytest.raises(Transient, match="did not end within"):
                await health._run_once()

    asyncio.run(run())
