"""Nobody is killed for the sake of others before those have spoken, nor for being late at once."""

from __future__ import annotations

import pytest

from keepstep import wire
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
    Unit,
)
from keepstep.orchestrator import brain, budgets, events, rules, state

JOB = JobId("train")
HOLD = 60.0


def running(newest: int = rules.NEWEST, spares: int = 2) -> state.Cluster:
    """Ranks 0 and 1 in domain a, rank 2 in b; in c there is room for a whole domain."""
    cluster = state.new_cluster("test")
    cluster.rules = newest
    for i, domain in enumerate(("a", "a", "b", "c", "c")[: 3 + spares]):
        hello(cluster, i, domain, 0.0)
    policy = Policy(unit=Unit.DOMAIN, hold_seconds_max=HOLD)
    brain.step(cluster, events.Submitted(JobSpec(JOB, "t.py", nodes=3, policy=policy)), 0.0)
    for rank in range(3):
        say(cluster, rank, 1.0, phase=Phase.RESUME, at=1)
    assert job_of(cluster).state is JobState.RUNNING
    return cluster


def hello(cluster: state.Cluster, i: int, domain: str, now: float) -> brain.Decision:
    seats = job_of(cluster).roster.seats if JOB in cluster.jobs else ()
    there = tuple(
        wire.WorkerFact(JOB, seat.rank, seat.slot, seat.incarnation, job_of(cluster).generation)
        for seat in seats
        if seat.node == f"n{i}"
    )
    labels = {"nvlink_domain": domain}
    said = wire.Hello(NodeId(f"n{i}"), f"a{i}", 1, 1, 2, "b", workers=there, labels=labels)
    return brain.step(cluster, said, now)


def job_of(cluster: state.Cluster) -> state.Job:
    return cluster.jobs[JOB]


def say(
    cluster: state.Cluster,
    rank: int,
    now: float,
    phase: Phase = Phase.QUIESCE,
    at: int = 5,
    digest: str = "d",
    intact: bool = True,
) -> brain.Decision:
    job = job_of(cluster)
    assert job.roster is not None
    seat = job.roster.seats[rank]
    told = wire.SeatReport(
        seat.rank, at, intact, {"0-2": digest}, entries=(at,), step=at, step_seconds=0.1
    )
    return brain.step(
        cluster, wire.PhaseReport(seat.node, JOB, job.generation, phase, (told,)), now
    )


def lose(cluster: state.Cluster, i: int, now: float) -> brain.Decision:
    brain.step(cluster, events.NodeSilent(NodeId(f"n{i}")), now)
    return brain.step(cluster, events.Tick(), now + 0.3)


def killed(decision: brain.Decision) -> list[tuple[Rank, str]]:
    fences = [o.action for o in decision.orders if isinstance(o.action, wire.Fence)]
    return [(seat.rank, str(seat.node)) for fence in fences for seat in fence.seats]


def away_and_late(newest: int = rules.NEWEST) -> state.Cluster:
    """The groups are formed anew, and rank 2's agent comes back just before its time is over."""
    cluster = running(newest)
    job = job_of(cluster)
    brain.step(cluster, wire.Observed(NodeId("n0"), JOB, Sign.STORE_LOST), 2.0)
    assert job_of(cluster).migration.phase is Phase.QUIESCE
    for rank in (0, 1):
        say(cluster, rank, 2.1)
    brain.step(cluster, events.LinkLost(NodeId("n2")), 4.0)
    end = 2.0 + budgets.pace(job).seconds
    again = hello(cluster, 2, "b", end - 0.01)
    assert any(isinstance(order.action, wire.Quiesce) for order in again.orders)
    return cluster


def test_who_comes_back_is_not_late_at_once():
    """Simulator, seed 20207: its agent was back for 20 ms, and it was the last who held state."""
    cluster = away_and_late()
    end = 2.0 + budgets.pace(job_of(cluster)).seconds
    assert not killed(brain.step(cluster, events.Tick(), end + 0.01))
    assert brain.due(cluster) == pytest.approx(end - 0.01 + 5.0)
    assert "3 of 3 ranks at boundary 5 agree" in say(cluster, 2, end + 0.1).why


def test_who_is_heard_again_is_not_late_at_once():
    """Its stream was there all the time: what it was told is on its way."""
    cluster = running()
    brain.step(
        cluster,
        wire.Observed(NodeId("n0"), JOB, Sign.CORRUPT, Rank(0), generation=Generation(1)),
        2.0,
    )
    for rank in (0, 1):
        say(cluster, rank, 2.1)
    for i in (2, 3, 4):
        brain.step(cluster, events.NodeSilent(NodeId(f"n{i}")), 4.0)
    brain.step(cluster, events.Tick(), 4.3)
    assert cluster.self_doubt
    assert not killed(brain.step(cluster, events.Tick(), 8.0))
    assert "n2 is heard again" in say(cluster, 2, 8.1, phase=Phase.RESUME).why
    assert not killed(brain.step(cluster, events.Tick(), 8.2))
    assert "3 of 3 ranks at boundary 5 agree" in say(cluster, 2, 8.3).why


def test_by_the_rules_of_before_it_was():
    cluster = away_and_late(0)
    end = 2.0 + budgets.pace(job_of(cluster)).seconds
    assert killed(brain.step(cluster, events.Tick(), end + 0.01)) == [(Rank(2), "n2")]


def test_who_is_back_and_says_nothing_is_late_in_the_end():
    cluster = away_and_late()
    end = 2.0 + budgets.pace(job_of(cluster)).seconds
    assert killed(brain.step(cluster, events.Tick(), end + 5.0)) == [(Rank(2), "n2")]


def test_an_agent_that_comes_and_goes_holds_up_nobody_for_ever():
    cluster = away_and_late()
    now = 7.0
    while not killed(brain.step(cluster, events.Tick(), now)):
        now += 1.0
        assert now < 2.0 + HOLD + 10.0
        brain.step(cluster, events.LinkLost(NodeId("n2")), now)
        hello(cluster, 2, "b", now + 0.1)


def test_who_has_reported_and_comes_back_changes_no_ones_time():
    cluster = running()
    brain.step(cluster, wire.Observed(NodeId("n0"), JOB, Sign.STORE_LOST), 2.0)
    for rank in (0, 1):
        say(cluster, rank, 2.1)
    before = brain.due(cluster)
    brain.step(cluster, events.LinkLost(NodeId("n1")), 4.0)
    hello(cluster, 1, "a", 5.0)
    assert brain.due(cluster) == before
