"""A worker's end is told whatever the node is short of, and nobody is ended for such a shortage."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep import wire
from keepstep.agent.room import Room, WorkerRecord
from keepstep.agent.workers import Workers
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


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


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
