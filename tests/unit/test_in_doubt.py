"""What a job in doubt has is not given away, and it keeps nothing from others."""

from __future__ import annotations

import pytest

from keepstep import belonging, wire
from keepstep.model import (
    Generation,
    JobId,
    JobSpec,
    JobState,
    NodeId,
    Phase,
    Rank,
    Severity,
    Sign,
    Term,
)
from keepstep.orchestrator import (
    brain,
    events,
    launch,
    planned,
    portions,
    rules,
    slots,
    spares,
    state,
    turn,
)
from tests.unit.test_limits import doubt, kill, report
from tests.unit.test_reconcile import step

LOW, HIGH = JobId("low"), JobId("high")


def two_jobs(nodes: int, high_nodes: int = 2, spares: int = 0) -> state.Cluster:
    """`low` trains on n0 and n1, `high` on the next ones."""
    cluster = state.new_cluster("test")
    step(cluster, events.TermBegan(Term(1), rules=rules.NEWEST), 0.0)
    for i in range(nodes):
        step(cluster, wire.Hello(NodeId(f"n{i}"), f"a{i}", 1, 1, 2, "b"), 0.0)
    step(cluster, events.Submitted(JobSpec(LOW, "t.py", nodes=2, spares=spares)), 0.0)
    report(cluster, LOW, Phase.RESUME, 1.0)
    spec = JobSpec(HIGH, "t.py", nodes=high_nodes, spares=0, priority=5)
    step(cluster, events.Submitted(spec), 1.0)
    report(cluster, HIGH, Phase.RESUME, 2.0)
    return cluster


def come(
    cluster: state.Cluster, node: str, rank: int, incarnation: int, now: float, name: JobId = LOW
) -> None:
    """An agent that has obeyed a generation of a job which the journal lacks."""
    later = Generation(7)
    fact = wire.WorkerFact(name, Rank(rank), 0, incarnation, later)
    secret = state.generation_secret(cluster, name, later)
    told = {str(name): belonging.word(secret, name, later, NodeId(node))}
    said = wire.Hello(NodeId(node), "a", 1, 1, 2, "b", (fact,), obeyed={name: later}, belongs=told)
    step(cluster, said, now)


def with_a_standby_that_is_a_rank() -> state.Cluster:
    """In lost entries the standby of `low` on n4 became its rank 1. n0 and n1 are not heard."""
    cluster = two_jobs(5, spares=1)
    for node in ("n0", "n1"):
        step(cluster, events.LinkLost(NodeId(node)), 10.0)
    come(cluster, "n4", 1, 1, 10.5)
    assert cluster.jobs[LOW].unsure is not None
    assert list(cluster.jobs[LOW].standbys) == ["n4/0"]
    return cluster


def is_told(decision: brain.Decision, node: str) -> list[str]:
    return [type(o.action).__name__ for o in decision.orders if NodeId(node) in o.nodes]


def test_a_standby_of_a_job_in_doubt_gives_way_to_nobody_it_may_be_a_rank():
    cluster = with_a_standby_that_is_a_rank()
    step(cluster, events.TaintAsked(NodeId("n3"), "bad", Severity.AVOID), 10.6)
    told = is_told(kill(cluster, HIGH, 11.0), "n4")
    late = JobSpec(JobId("late"), "t.py", nodes=1, spares=0, priority=9)
    told += is_told(step(cluster, events.Submitted(late), 11.1), "n4")
    told += is_told(step(cluster, events.Tick(), 12.0), "n4")
    assert told == []
    assert cluster.jobs[late.job].state is JobState.WAITING
    assert spares.lower_places(cluster, cluster.jobs[HIGH]) == frozenset()
    come(cluster, "n0", 0, 0, 13.0)
    step(cluster, events.Tick(), 20.0)
    job = cluster.jobs[LOW]
    assert job.unsure is None
    assert job.roster is not None
    assert [(s.node, s.incarnation) for s in job.roster.seats] == [("n0", 0), ("n4", 1)]


@pytest.mark.parametrize("severity", [None, *Severity])
def test_what_a_job_in_doubt_has_on_a_node_is_not_ended_for_a_drain_or_a_taint(
    severity: Severity | None,
):
    cluster = with_a_standby_that_is_a_rank()
    asked: events.Event = events.DrainAsked(NodeId("n4"), "rack work")
    if severity is not None:
        asked = events.TaintAsked(NodeId("n4"), "XID 63", severity)
    decision = step(cluster, asked, 11.0)
    assert is_told(decision, "n4") == []
    assert "yet low stays: its ranks are not found yet" in decision.why
    assert not step(cluster, events.Tick(), 12.0).orders
    assert list(cluster.jobs[LOW].standbys) == ["n4/0"]


def test_a_target_of_a_move_in_doubt_is_not_dismissed_it_may_have_its_rank():
    cluster = two_jobs(6)
    step(cluster, events.MigrateAsked(LOW, (Rank(1),), "rack work"), 5.0)
    moving = cluster.jobs[LOW].migration
    assert moving is not None
    (target,) = moving.coming.values()
    doubt(cluster, LOW, 10.0)
    assert is_told(step(cluster, events.DrainAsked(target.node, "x"), 11.0), target.node) == []
    assert list(moving.coming.values()) == [target]


def test_the_loss_of_one_target_ends_no_other_of_a_job_in_doubt():
    cluster = two_jobs(8)
    step(cluster, events.MigrateAsked(LOW, (Rank(0),), "rack work"), 5.0)
    moving = cluster.jobs[LOW].migration
    assert moving is not None
    (target,) = moving.coming.values()
    doubt(cluster, LOW, 10.0)
    taken_back = events.MigrateAsked(LOW, (Rank(0),), "", cancel=True)
    assert not step(cluster, taken_back, 10.5).orders
    # As if another one had been lost: the move cannot be made.
    now = turn.Turn(cluster, 11.0)
    planned.give_up(now, cluster.jobs[LOW], "the target of rank 1 is gone")
    assert now.orders == []
    user = cluster.nodes[target.node].uses[target.slot]
    assert not user.fenced


def test_two_jobs_do_not_share_a_slot_that_was_given_away_and_the_doubt_says_so():
    cluster = with_a_standby_that_is_a_rank()
    low = cluster.jobs[LOW]
    # As a leader of an older release did.
    low.standbys.clear()
    slots.release(cluster, NodeId("n4"), 0)
    step(cluster, events.TaintAsked(NodeId("n3"), "bad", Severity.AVOID), 10.6)
    kill(cluster, HIGH, 11.0)
    high = state.Occupant(HIGH, Rank(1), 1)
    assert cluster.nodes[NodeId("n4")].uses == {0: high}
    come(cluster, "n0", 0, 0, 12.0)
    for now in (13.0, 20.0, 43.0):
        step(cluster, events.Tick(), now)
        assert low.unsure is not None
        assert cluster.nodes[NodeId("n4")].uses == {0: high}
    assert "slot 0 of n4, where rank 1 was, is another job's seat" in low.unsure.why
    # Its worker was ended for that seat, and says so: now all is known.
    ended = wire.Observed(NodeId("n4"), LOW, Sign.EXIT, Rank(1), 1, Generation(7), 5, -9)
    step(cluster, ended, 44.0)
    step(cluster, events.Tick(), 50.0)
    assert low.unsure is None
    assert cluster.nodes[NodeId("n4")].uses == {0: high}


def parking(cluster: state.Cluster) -> None:
    """`high` lacks a spare, and `low` is about to be parked for it."""
    for node in ("n4", "n5"):
        step(cluster, events.DrainAsked(NodeId(node), "x"), 9.0)
    kill(cluster, HIGH, 10.0, 2)
    step(cluster, events.Tick(), 11.0)
    assert cluster.jobs[LOW].loan is not None
    report(cluster, LOW, Phase.QUIESCE, 14.0)


def park(cluster: state.Cluster, now: float) -> list[wire.Order]:
    job, orders = cluster.jobs[LOW], []
    assert job.roster is not None
    world = portions.of_all(2)
    for seat in job.roster.seats:
        saved = wire.SeatReport(seat.rank, 5, True, {world: "d"}, entries=(5,), step=5)
        said = wire.PhaseReport(seat.node, LOW, job.generation, Phase.SAVE, (saved,))
        orders += step(cluster, said, now).orders
    assert job.state is JobState.PARKED
    return orders


def test_a_lender_that_is_parked_seats_nobody_of_a_borrower_in_doubt():
    cluster = two_jobs(6, 4)
    parking(cluster)
    doubt(cluster, HIGH, 15.0)
    high = cluster.jobs[HIGH]
    before = high.roster
    assert [order for order in park(cluster, 16.0) if order.job == HIGH] == []
    assert high.roster == before


def test_a_borrower_in_doubt_does_not_keep_its_lender_parked():
    cluster = two_jobs(6, 4)
    parking(cluster)
    doubt(cluster, HIGH, 15.0)
    park(cluster, 16.0)
    step(cluster, events.Tick(), 17.0)
    assert cluster.jobs[LOW].state is JobState.PARKED, "its ranks may be found, and the room used"
    step(cluster, events.Tick(), 50.0)
    assert cluster.jobs[HIGH].unsure is not None
    assert cluster.jobs[LOW].state is JobState.STARTING
    assert cluster.loans[-1].borrower == HIGH


def test_a_lender_takes_no_device_back_where_a_rank_of_its_borrower_in_doubt_may_live():
    """The forgotten entries gave n1 to the borrower: its agent lists it, or is not heard at all."""
    for heard in (True, False):
        cluster = two_jobs(6, 4)
        parking(cluster)
        doubt(cluster, HIGH, 15.0)
        park(cluster, 16.0)
        if heard:
            come(cluster, "n1", 2, 1, 17.0, HIGH)
        else:
            step(cluster, events.LinkLost(NodeId("n1")), 17.0)
        for now in (50.0, 90.0):
            assert is_told(step(cluster, events.Tick(), now), "n1") == []
        assert cluster.jobs[LOW].state is JobState.PARKED


def test_nobody_waits_for_a_lender_that_came_into_doubt_before_it_was_parked():
    cluster = two_jobs(8, 4)
    for node in ("n6", "n7"):
        step(cluster, events.DrainAsked(NodeId(node), "x"), 8.0)
    parking(cluster)
    assert launch.lenders_to_come(turn.Turn(cluster, 14.5), cluster.jobs[HIGH])
    doubt(cluster, LOW, 15.0)
    assert not launch.lenders_to_come(turn.Turn(cluster, 15.5), cluster.jobs[HIGH])
