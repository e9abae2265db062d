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


def test_nobody_is_killed_for_its_domain_before_the_others_have_spoken():
    """Simulator, seed 20054: the others were one rank, which had stopped, and nobody knew yet."""
    cluster = running()
    assert not killed(lose(cluster, 1, 2.0))
    assert not killed(say(cluster, 0, 2.4))
    assert killed(say(cluster, 2, 2.5)) == [(Rank(0), "n0")]


def test_if_the_others_do_not_answer_it_is_they_who_are_replaced():
    cluster = running()
    lose(cluster, 1, 2.0)
    say(cluster, 0, 2.4)
    late = brain.step(cluster, events.Tick(), 8.0)
    assert "rank 2 did not report quiesce in time: replaced" in late.why
    assert killed(late) == [(Rank(2), "n2")]


def test_by_the_rules_of_before_the_rest_of_a_domain_goes_at_once():
    assert killed(lose(running(0), 1, 2.0)) == [(Rank(0), "n0")]


@pytest.mark.parametrize(
    ("said", "why"),
    [({"intact": False}, "no surviving rank holds whole state"), ({"at": -1}, "no surviving rank")],
)
def test_nobody_moves_along_if_the_others_do_not_hold_all_state(said: dict[str, int], why: str):
    cluster = running()
    lose(cluster, 1, 2.0)
    say(cluster, 0, 2.4)
    found = say(cluster, 2, 2.5, **said)  # type: ignore[arg-type]
    assert f"nobody else moves for rank 1: {why}" in found.why
    assert not killed(found)
    job = job_of(cluster)
    assert job.state is JobState.HELD
    # They are not asked again and again: what they said stands.
    before = job.generation
    for i in range(20):
        assert not killed(brain.step(cluster, events.Tick(), 3.0 + i / 10))
    assert job_of(cluster).generation == before


def test_where_places_come_late_they_are_asked_again():
    cluster = running(spares=0)
    lose(cluster, 1, 2.0)
    assert job_of(cluster).state is JobState.HELD
    for rank in (0, 2):
        say(cluster, rank, 2.5)
    before = job_of(cluster).generation
    hello(cluster, 3, "c", 30.0)
    found = hello(cluster, 4, "c", 30.0)
    assert "first the others say what they hold" in found.why
    assert not killed(found)
    assert job_of(cluster).generation == before + 1
    say(cluster, 0, 30.1)
    assert killed(say(cluster, 2, 30.2)) == [(Rank(0), "n0")]


def test_what_was_said_before_a_freeze_is_asked_again_after_it():
    cluster = running()
    lose(cluster, 1, 2.0)
    brain.step(cluster, events.FreezeAsked("a switch is replaced"), 2.4)
    for rank in (0, 2):
        assert not killed(say(cluster, rank, 2.5))
    found = brain.step(cluster, events.UnfreezeAsked(), 50.0)
    assert "first the others say what they hold" in found.why
    assert not killed(found)
    say(cluster, 0, 50.1)
    assert killed(say(cluster, 2, 50.2)) == [(Rank(0), "n0")]


def test_while_they_are_asked_nobody_below_takes_their_places():
    cluster = running()
    lower = JobSpec(JobId("lower"), "t.py", nodes=2, priority=-1)
    lose(cluster, 1, 2.0)
    brain.step(cluster, events.Submitted(lower), 2.4)
    assert cluster.jobs[JobId("lower")].state is JobState.WAITING
    say(cluster, 0, 2.5)
    say(cluster, 2, 2.5)
    brain.step(cluster, wire.Observed(NodeId("n0"), JOB, Sign.EXIT, Rank(0), 0), 2.6)
    assert {seat.node for seat in job_of(cluster).roster.seats} == {"n2", "n3", "n4"}


# ---------------------------------------------------------------- who comes back


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
