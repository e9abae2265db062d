"""A machine that lost power comes back with its name and a new boot, and is let in by the edge."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepstep import wire
from keepstep.clock import VirtualClock
from keepstep.config import OrchestratorConfig
from keepstep.model import JobId, JobSpec, JobState, NodeId, Phase, Policy, Rank
from keepstep.orchestrator import admission, events, suspicion
from keepstep.orchestrator.admission import Holder
from keepstep.orchestrator.journal_sqlite import SqliteJournal
from keepstep.orchestrator.run import Orchestrator
from keepstep.orchestrator.state import NodeState, Occupant
from keepstep.orchestrator.stepped import Waiting, come

JOB, TOKEN = JobId("job"), "token"


class Stream:
    """Open until somebody drops it. Nobody reads it."""

    version, dropped, about = wire.VERSION, "", {}

    def __init__(self, node: NodeId) -> None:
        self.node = node

    def send(self, frame: bytes) -> None:
        del frame

    def drop(self, why: str) -> None:
        self.dropped = why


class Writer:
    """A connection without TLS."""

    def get_extra_info(self, _: str) -> None:
        return None


class Leader:
    """A real leader whose agents are words said by hand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = VirtualClock(1000.0)
        self.lead()

    def lead(self) -> None:
        journal = SqliteJournal(self.path / "journal.db")
        config = OrchestratorConfig()
        self.loop = Orchestrator(journal, config, self.clock, TOKEN, lambda *_, **__: None)

    def feed(self, *given: events.Event) -> None:
        self.loop._handle([Waiting(event) for event in given])

    def why_not(self, hello: wire.Hello) -> admission.Away | None:
        return self.loop._why_not(hello, Writer())  # type: ignore[arg-type]

    def greet(self, hello: wire.Hello) -> None:
        """As serve_agent does with one that is let in."""
        stream: Any = Stream(hello.node)
        self.loop._streams[hello.node], self.loop._boots[hello.node] = stream, hello.boot
        self.loop._heard(hello.node)
        self.feed(replace(hello, token=""))

    def train(self, size: int) -> None:
        policy = Policy(hold_seconds_max=600.0)
        self.feed(events.Submitted(JobSpec(JOB, "t.py", nodes=size, spares=0, policy=policy)))
        job = self.loop.cluster.jobs[JOB]
        assert job.roster is not None
        for seat in job.roster.seats:
            told = (wire.SeatReport(seat.rank, 1, True, step=1),)
            self.feed(wire.PhaseReport(seat.node, JOB, job.generation, Phase.RESUME, told))
        assert job.state is JobState.RUNNING

    def go_on(self, seconds: float, beating: list[NodeId]) -> None:
        async def pass_by() -> None:
            for _ in range(round(seconds * 4)):
                self.clock.advance_to(self.clock.now() + 0.25)
                for node in beating:
                    self.loop._heard(node)
                await self.loop._judge_silence(self.clock.monotonic())
                self.loop._tick_due = self.clock.monotonic()  # The loop is not late itself.
                self.feed(*(item.event for item in come(self.loop._inbox, 10**6)), events.Tick())

        asyncio.run(pass_by())

    def tries(self, hello: wire.Hello, seconds: float, beating: list[NodeId]) -> list[str]:
        """As an agent does, every other second, until it is let in. Returns what it was told."""
        told = []
        for _ in range(round(seconds / 2)):
            away = self.why_not(hello)
            if away is None:
                self.greet(hello)
                break
            told += [away.why] if away.for_good else []
            self.go_on(2.0, beating)
        return told


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[Leader]:
    made = Leader(tmp_path)
    yield made
    made.loop._journal.close()


def hello_of(node: NodeId, boot: str) -> wire.Hello:
    return wire.Hello(node, node, 1, 1, 2, boot, token=TOKEN)


def names(first: int, last: int) -> list[NodeId]:
    return [NodeId(f"n{number}") for number in range(first, last)]


def test_a_job_whose_nodes_all_lost_power_goes_on_when_they_have_booted(leader: Leader):
    """A fifth of the cluster: too many at once to believe it, and no rank is left to testify."""
    for node in names(0, 8):
        leader.greet(hello_of(node, "old"))
    leader.train(8)
    others = names(8, 40)
    for node in others:
        leader.greet(hello_of(node, "old"))
    cluster, job = leader.loop.cluster, leader.loop.cluster.jobs[JOB]
    leader.go_on(120.0, others)
    assert "we suspect ourselves" in cluster.self_doubt
    assert (job.state, job.incidents, job.migration) == (JobState.RUNNING, 0, None)
    for node in names(0, 8):
        assert leader.tries(hello_of(node, "new"), 60.0, others) == []
    assert all(cluster.nodes[node].boot == "new" for node in names(0, 8))
    assert job.migration is not None
    leader.go_on(1.0, names(0, 40))
    assert not cluster.self_doubt


def test_a_cluster_of_two_that_lost_power_does_not_wait_for_the_longest_hold(leader: Leader):
    for node in names(0, 2):
        leader.greet(hello_of(node, "old"))
    leader.train(2)
    job = leader.loop.cluster.jobs[JOB]
    leader.go_on(60.0, [])
    began = leader.clock.now()
    for node in names(0, 2):
        assert leader.tries(hello_of(node, "new"), 60.0, names(0, 1)) == []
    assert leader.clock.now() - began < 2 * suspicion.TERM_GRACE_SECONDS
    assert job.migration is not None
    assert all(leader.loop.cluster.nodes[node].boot == "new" for node in names(0, 2))


def test_a_machine_that_boots_while_the_lead_changes_is_not_told_to_take_another_name(
    leader: Leader,
):
    for node in names(0, 4):
        leader.greet(hello_of(node, "old"))
    leader.train(2)
    leader.loop._journal.close()
    leader.lead()
    for node in names(1, 4):
        leader.greet(hello_of(node, "old"))
    began = leader.clock.now()
    assert leader.tries(hello_of(NodeId("n0"), "new"), 60.0, names(1, 4)) == []
    silent_seconds_max = leader.loop._patient().of(NodeId("n0"))
    waited = leader.clock.now() - began
    # The right one would have found us by then, whoever it is that comes with its name.
    assert waited >= suspicion.TERM_GRACE_SECONDS + silent_seconds_max
    assert waited < suspicion.LEADER_SECONDS
    assert leader.loop.cluster.jobs[JOB].migration is not None


def test_a_stream_that_looks_open_is_no_reason_to_send_a_rebooted_machine_away_for_good(
    leader: Leader,
):
    for node in names(0, 4):
        leader.greet(hello_of(node, "old"))
    leader.train(2)
    new = hello_of(NodeId("n0"), "new")
    twin = leader.why_not(new)
    assert twin is not None
    assert twin.for_good, "somebody is there"
    assert "give this one another name" in twin.why
    leader.go_on(2.0, names(1, 4))
    quiet = leader.why_not(new)
    assert quiet is not None
    assert not quiet.for_good, "it may have no power"
    assert leader.tries(new, 10.0, names(1, 4)) == []
    assert leader.loop.cluster.nodes[NodeId("n0")].boot == "new"


def test_a_name_is_not_given_away_while_its_ranks_make_steps_or_it_may_come_back():
    def known(**fields: Any) -> Holder:
        rank = Occupant(JOB, Rank(0), 0)
        old = NodeState(NodeId("n0"), "a", 2, 1, 2, "old", 1)
        return Holder(replace(old, **{"uses": {0: rank}, **fields}))

    def free(holder: Holder, boot: str = "new") -> bool:
        return admission.why_not_name(hello_of(NodeId("n0"), boot), holder, 100.0, 3.5) is None

    assert not free(known(linked=False, unlinked_at=97.0)), "it may come back"
    assert free(known(linked=False, unlinked_at=97.0), "old")
    assert free(known(linked=False, unlinked_at=96.0))
    assert not free(known(linked=False, unlinked_at=96.0, vouched_at=99.0)), "its ranks make steps"
    assert not free(known()), "nobody has missed it yet"
    assert not free(known(silent_at=105.0)), "one was heard, and all have time to come"
    assert free(known(silent_at=99.0))
    assert free(known(alive=False))
