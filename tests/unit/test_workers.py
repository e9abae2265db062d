"""A worker's end is told whatever the node is short of, and nobody is ended for such a shortage."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep import wire
from keepstep.agent import workers
from keepstep.agent.room import Room, WorkerRecord
from keepstep.agent.workers import Workers
from keepstep.detect import process
from keepstep.model import JobId, JobSpec, NodeId, Rank

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
            with pytest.raises(OSError, match="No space left"):
                node.workers.watch(LOST)
        (dead,) = node.workers
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
