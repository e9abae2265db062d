"""A node's room is memory: what a job left there goes, and nothing that somebody may still need."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from keepstep import wire
from keepstep.agent import room
from keepstep.agent.forks import Forks
from keepstep.agent.links import Links
from keepstep.agent.orders import JOBS_MAX, Hands, Orders
from keepstep.agent.reports import Reports
from keepstep.agent.room import ProcessRecord, Room, WorkerRecord
from keepstep.agent.tee import Tee
from keepstep.agent.workers import Workers
from keepstep.detect import process
from keepstep.model import (
    Endpoint,
    Generation,
    JobId,
    JobSpec,
    JobState,
    NodeId,
    OrderId,
    Rank,
    Seat,
    Sign,
    Term,
)
from keepstep.orchestrator import brain, events, names, spares, state

NODE, JOB = NodeId("n1"), JobId("train")
RINGS = ("seat-0-0.page", "seat-0-0.ring", "mirror-3.ring", "ending-0-0.json", "seat-0-0.new")
COVERS = ("cover-3.kept", "cover-3.new")


class Node:
    """An agent's room and what obeys in it, without an agent around."""

    def __init__(self, directory: Path) -> None:
        self.room = Room(directory / "room", "127.0.0.1")
        self.room.open()
        self.workers = Workers(NODE, self.room, lambda worker, observed: None)
        self.work: list[Coroutine[Any, Any, None]] = []
        unused = cast(Any, None)
        self.orders = Orders(
            Hands(
                room=self.room,
                forks=cast(Forks, unused),
                workers=self.workers,
                links=cast(Links, unused),
                reports=Reports(NODE),
                tee=Tee(),
                send=lambda message: True,
                spawn=self.work.append,
            )
        )

    def leave(self, job: str, *names: str) -> Path:
        self.room.meet_job(JobSpec(JobId(job), "train.py"))
        there = self.room.job_room(JobId(job))
        for name in names:
            (there / name).write_bytes(b"state")
        return there

    def told_to_stop(self, job: str = JOB) -> None:
        ids = (Term(1), Generation(1), OrderId(f"stop-{job}"))
        self.orders.obey(wire.Order(*ids, JobId(job), (NODE,), wire.Stop(0, "over")))

    async def settle(self) -> None:
        while self.work:
            await self.work.pop()

    def stop(self, job: str = JOB) -> None:
        self.told_to_stop(job)
        asyncio.run(self.settle())

    async def lose(self, *slots: int) -> None:
        """Ranks that are gone: no process has such a pid and start."""
        records = [WorkerRecord(JOB, slot, 2**22 + 1 + slot, 1, Rank(slot)) for slot in slots]
        for worker in [self.workers.watch(record) for record in records]:
            await worker.gone.wait()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.room._lock.close()


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


def test_nothing_of_a_job_is_left_once_it_is_put_away(node: Node) -> None:
    there = node.leave(JOB, *RINGS, *COVERS, "a user's file")
    assert node.room.kept_jobs() == (JOB,)
    node.stop()
    assert files(there) == ["a user's file"]
    assert node.room.kept_jobs() == ()


def test_covers_go_with_the_last_rank_and_rings_stay_for_its_recovery(node: Node) -> None:
    there = node.leave(JOB, *RINGS, *COVERS)
    asyncio.run(node.lose(0, 1))
    assert files(there) == sorted(RINGS)


def test_covers_stay_while_another_rank_of_the_job_lives_here(node: Node) -> None:
    there = node.leave(JOB, *COVERS)

    async def lose_one() -> None:
        node.workers.watch(_myself())
        await node.lose(1)

    asyncio.run(lose_one())
    assert files(there) == sorted(COVERS)


def test_a_restarted_agent_finds_its_ranks_dead_and_keeps_only_their_rings(
    tmp_path: Path,
) -> None:
    before = Node(tmp_path)
    there = before.leave(JOB, *RINGS, *COVERS)
    before.room.workers[2**22 + 1] = WorkerRecord(JOB, 0, 2**22 + 1, 1, Rank(0))
    before.room.save()
    before.room._lock.close()
    after = Node(tmp_path)

    async def adopt() -> None:
        after.workers.adopt()
        (worker,) = after.workers
        worker.status_seconds_max = 0.0
        await worker.gone.wait()

    asyncio.run(adopt())
    assert files(there) == sorted(RINGS)
    assert after.room.kept_jobs() == (JOB,), "its Hello asks whether that job is over"
    after.room._lock.close()


def test_a_rerun_keeps_what_it_has_begun_when_an_old_stop_comes_to_its_end(
    node: Node,
) -> None:
    there = node.leave(JOB, *RINGS)
    node.told_to_stop()
    node.room.jobs[JOB] = replace(node.room.jobs[JOB], generation=Generation(2))
    asyncio.run(node.settle())
    assert files(there) == sorted(RINGS)


def test_what_is_left_of_a_job_without_a_record_goes_with_its_directory(node: Node) -> None:
    there = node.leave(JOB, *RINGS, *COVERS)
    node.room.jobs.clear()
    assert node.room.kept_jobs() == (JOB,)
    node.stop()
    assert not there.exists()


def test_forgotten_records_take_their_directories_along(node: Node) -> None:
    for number in range(JOBS_MAX + 2):
        node.leave(f"job{number}", *RINGS)
        node.stop(f"job{number}")
    rooms = [path.name for path in node.room.directory.iterdir() if path.is_dir()]
    assert len(node.room.jobs) == len(rooms) == JOBS_MAX
    assert "job0" not in rooms


def test_every_job_that_left_something_is_told_of_however_many_stay(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "KEPT_JOBS_MAX", 3)
    for name in "abcde":
        node.leave(name, *RINGS)
    assert node.room.kept_jobs() == ("a", "b", "c")
    assert node.room.kept_jobs() == ("d", "e", "a")
    node.stop("e")
    assert node.room.kept_jobs() == ("b", "c", "d")
    for name in "bc":
        node.stop(name)
    assert node.room.kept_jobs() == ("a", "d"), "each once, if there is room for all"


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def starts(*seats: Seat, generation: int = 1) -> wire.Order:
    begin = wire.StartWorkers(
        JobSpec(JOB, "train.py"), seats, wire.Membership(1, "s", Endpoint("n1", 1), 1)
    )
    ids = (Term(1), Generation(generation), OrderId(f"start-{generation}"))
    return wire.Order(*ids, JOB, (NODE,), begin)


def test_a_start_that_could_not_be_written_down_is_as_fresh_when_it_is_told_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = node.leave(JOB, *RINGS)
    with monkeypatch.context() as no_space:
        no_space.setattr(node.room, "save", full)
        with pytest.raises(OSError, match="No space left"):
            node.orders.obey(starts())
    assert not node.work
    assert node.room.jobs[JOB].generation == 0
    node.orders.obey(starts())
    asyncio.run(node.settle())
    assert files(there) == [], "entries of an earlier run would be lies"


def test_a_seat_that_was_fenced_as_it_came_to_life_is_killed_also_in_a_full_room(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    seat = Seat(Rank(0), NODE, 0, 0)
    ids = (Term(1), Generation(1), OrderId("fence"))
    fence = wire.Order(*ids, JOB, (NODE,), wire.Fence((seat,)))

    async def start(born: ProcessRecord) -> None:
        class OneFork:
            async def fork(self, _: object) -> ProcessRecord:
                node.orders.obey(fence)
                monkeypatch.setattr(node.room, "save", full)
                return born

        hands = replace(node.orders._hands, forks=cast(Forks, OneFork()))
        node.orders._hands = hands
        node.orders.obey(starts(seat))
        await node.settle()
        (worker,) = node.workers
        async with asyncio.timeout(10.0):
            await worker.gone.wait()

    with subprocess.Popen(["sleep", "60"], start_new_session=True) as child:
        try:
            reading = process.probe(child.pid)
            assert reading is not None
            asyncio.run(start(ProcessRecord(child.pid, reading.start)))
        finally:
            child.kill()


def _myself() -> WorkerRecord:
    reading = process.probe(os.getpid())
    assert reading is not None
    return WorkerRecord(JOB, 0, os.getpid(), reading.start, Rank(0))


# ---------------------------------------------------------------- what the brain answers


def hello(node: str, *keeps: str, obeyed: int = 1, seq: int = 0) -> wire.Hello:
    told = dict.fromkeys(keeps, Generation(obeyed))
    return wire.Hello(NodeId(node), node, 1, 1, 2, "boot", obeyed=told, keeps=keeps, seq_seen=seq)


def ended(how: JobState = JobState.FINISHED) -> state.Cluster:
    """A job that ran on n1 and n2 is over; n2 was lost before it was told."""
    cluster = state.new_cluster("test")
    brain.step(cluster, events.TermBegan(Term(1), seq=10), 0.0)
    for node in ("n1", "n2"):
        brain.step(cluster, hello(node), 0.0)
    brain.step(cluster, events.Submitted(JobSpec(JOB, "train.py", nodes=2)), 0.0)
    for rank, node in enumerate(("n1", "n2")):
        end = wire.Observed(
            NodeId(node), JOB, Sign.FINISHED, Rank(rank), generation=Generation(1), step=9
        )
        brain.step(cluster, end, 1.0)
    assert cluster.jobs[JOB].state is JobState.FINISHED
    cluster.jobs[JOB].state = how
    return cluster


def told(decision: brain.Decision) -> list[tuple[str, tuple[NodeId, ...]]]:
    return [(order.job, order.nodes) for order in decision.orders]


@pytest.mark.parametrize("how", [JobState.FINISHED, JobState.FAILED, JobState.SAVED])
def test_a_node_that_keeps_something_of_a_job_that_is_over_is_told_to_stop_it(
    how: JobState,
) -> None:
    decision = brain.step(ended(how), hello("n2", JOB), 5.0)
    assert told(decision) == [(JOB, (NodeId("n2"),))]
    (order,) = decision.orders
    assert isinstance(order.action, wire.Stop)
    assert "train is over, and n2 was not told" in decision.why


@pytest.mark.parametrize("how", [JobState.PARKED, JobState.WAITING, JobState.RUNNING])
def test_a_job_that_may_go_on_keeps_its_rooms(how: JobState) -> None:
    assert told(brain.step(ended(how), hello("n2", JOB), 5.0)) == []


def test_a_node_is_told_to_stop_a_job_of_which_only_the_name_is_left() -> None:
    def forgotten() -> state.Cluster:
        cluster = ended()
        names.forget(cluster, cluster.jobs[JOB])
        return cluster

    decision = brain.step(forgotten(), hello("n2", JOB), 5.0)
    assert told(decision) == [(JOB, (NodeId("n2"),))]
    (order,) = decision.orders
    assert (order.order_id, order.generation) == ("train/g1/stop", 1)
    assert isinstance(order.action, wire.Stop)
    assert told(brain.step(forgotten(), hello("n2", JOB, obeyed=2), 5.0)) == []
    behind = forgotten()
    brain.step(behind, events.JournalBehind(NodeId("n2"), Term(1), 99, 50), 5.0)
    assert told(brain.step(behind, hello("n2", JOB), 5.0)) == []


def test_a_job_that_this_journal_does_not_have_keeps_its_rooms() -> None:
    assert told(brain.step(ended(), hello("n2", "another"), 5.0)) == []


def test_who_has_obeyed_more_than_this_journal_knows_keeps_its_rooms() -> None:
    assert told(brain.step(ended(), hello("n2", JOB, obeyed=2), 5.0)) == []
    cluster = ended()
    behind = events.JournalBehind(NodeId("n2"), Term(1), 99, 50)
    brain.step(cluster, behind, 5.0)
    assert told(brain.step(cluster, hello("n2", JOB), 5.0)) == []


def test_whoever_a_rank_left_is_told_when_its_job_is_over_however_long_ago() -> None:
    cluster = state.new_cluster("test")
    brain.step(cluster, events.TermBegan(Term(1), seq=10), 0.0)
    for node in ("n1", "n2", "n3"):
        brain.step(cluster, hello(node), 0.0)
    brain.step(cluster, events.Submitted(JobSpec(JOB, "train.py")), 0.0)
    job = cluster.jobs[JOB]
    been = [_seat_of(job).node]
    for at in (1.0, 2.0):
        # It starts anew elsewhere: nobody asks the node before for anything any more.
        brain.step(cluster, events.DrainAsked(_seat_of(job).node, "broken"), at)
        brain.step(cluster, _end_of(job, Sign.EXIT), at)
        brain.step(cluster, events.Tick(), at + 0.9)
        been.append(_seat_of(job).node)
        assert [seat.node for each in job.settled for seat in each.roster.seats] == been[-1:]
    assert len(set(been)) == 3
    again = state.from_plain(state.to_plain(cluster))
    decision = brain.step(again, _end_of(job, Sign.FINISHED), 5.0)
    assert again.jobs[JOB].state is JobState.FINISHED
    assert told(decision) == [(JOB, tuple(NodeId(node) for node in ("n1", "n2", "n3")))]
    assert again.jobs[JOB].places == ()


def test_only_nodes_that_are_known_and_have_no_seat_are_remembered() -> None:
    cluster = ended()
    job = state.Job(JobSpec(JOB, "train.py"), JobState.RUNNING, 0.0)
    for number in range(8):
        seats = (Seat(Rank(0), NodeId("n1" if number == 1 else f"pod-{number}"), 0, number),)
        roster = replace(cast(Any, cluster.jobs[JOB].roster), seats=seats)
        spares.settle(cluster, job, state.Settled(roster, number), *job.settled)
    assert len(job.settled) == state.SETTLED_MAX
    assert job.places == ("n1",)
    at_home = replace(cast(Any, cluster.jobs[JOB].roster), seats=(Seat(Rank(0), NODE, 0, 9),))
    spares.settle(cluster, job, state.Settled(at_home, 9))
    assert job.places == ()


def _seat_of(job: state.Job) -> Seat:
    assert job.roster is not None
    return job.roster.seats[0]


def _end_of(job: state.Job, sign: Sign) -> wire.Observed:
    seat = _seat_of(job)
    return wire.Observed(
        seat.node, JOB, sign, seat.rank, seat.incarnation, job.generation, exit_code=1
    )
