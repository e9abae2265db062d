"""A name that lives in what the journal lacks is submitted again: its run goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep import wire
from keepstep.model import Generation, JobId, JobSpec, JobState, NodeId, Rank, Sign, Term
from keepstep.orchestrator import brain, events, reconcile, replica, snapshots, state
from keepstep.orchestrator.journal import Loaded
from tests.unit.test_reconcile import begin, behind, hello, publish, step, worker

X = JobId("x")
SPEC = JobSpec(X, "train.py", nodes=2)
DAY = 86_400.0


def with_a_run(*, known: bool, generation: int = 1, room: bool = False) -> state.Cluster:
    """n0 and n1 train x, which the journal lacks, or has as over; maybe there is room elsewhere."""
    cluster = state.new_cluster("test")
    if known:
        step(cluster, events.Submitted(SPEC), 0.0)
        step(cluster, events.StopAsked(X, "enough"), 1.0)
        assert cluster.jobs[X].state.over
    begin(cluster, 6, 50)
    for node, rank in (("n0", 0), ("n1", 1)):
        found = reconcile.gap(cluster, Term(6), 50, says(node, rank, generation))
        assert found is not None
        step(cluster, found, 11.0)
        told = step(cluster, says(node, rank, generation), 11.1)
        assert told.orders == (), "left alone"
    for node in ("n8", "n9") if room else ():
        step(cluster, hello(node), 11.2)
    return cluster


def says(node: str, rank: int, generation: int = 1) -> wire.Hello:
    fact = worker(rank, X, generation)
    obeyed = {str(X): Generation(generation)}
    return replace(hello(node, fact, term=5, seq=90, obeyed=obeyed), slots=1)


def ended(decision: brain.Decision) -> list[wire.Order]:
    return [o for o in decision.orders if isinstance(o.action, wire.Fence | wire.Stop)]


def seats(cluster: state.Cluster) -> list[tuple[str, int]]:
    now = cluster.jobs[X].roster
    assert now is not None
    return [(seat.node, seat.incarnation) for seat in now.seats]


@pytest.mark.parametrize("room", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_a_run_that_the_journal_lacks_goes_on_when_its_job_is_submitted_again(
    known: bool, room: bool
):
    cluster = with_a_run(known=known, room=room)
    assert cluster.past_number >= 600
    again = step(cluster, events.Submitted(SPEC), 20.0)
    assert "as 2 agents list them" in again.why
    assert not ended(again)
    assert not any(isinstance(order.action, wire.StartWorkers) for order in again.orders)
    job = cluster.jobs[X]
    assert (job.state, job.unsure) == (JobState.MIGRATING, None)
    assert seats(cluster) == [("n0", 0), ("n1", 0)]
    assert job.generation > cluster.past_number, "above all that any agent may remember"
    for node, rank in (("n0", 0), ("n1", 1)):
        assert not ended(step(cluster, says(node, rank), 21.0))
    assert seats(cluster) == [("n0", 0), ("n1", 0)]
    # From now on it is a job like any other: who is replaced, and comes again, is ended.
    cluster.nodes[NodeId("n0")].uses.clear()
    assert ended(step(cluster, says("n0", 0), 22.0))


@pytest.mark.parametrize("known", [False, True])
def test_who_comes_after_the_submission_is_found_as_well(known: bool):
    """The numbers of another lost run are skipped already: its own are below what is promised."""
    cluster = state.new_cluster("test")
    if known:
        step(cluster, events.Submitted(SPEC), 0.0)
        step(cluster, events.StopAsked(X, "enough"), 1.0)
    begin(cluster, 6, 50)
    cluster.past_number = 700
    step(cluster, events.Submitted(SPEC), 10.1)
    for node, rank in (("n0", 0), ("n1", 1)):
        found = reconcile.gap(cluster, Term(6), 50, says(node, rank))
        assert found is not None
        step(cluster, found, 11.0)
        assert not ended(step(cluster, says(node, rank), 11.1))
    assert seats(cluster) == [("n0", 0), ("n1", 0)]


def test_a_rank_that_died_in_the_doubt_is_replaced_though_numbers_were_skipped():
    cluster = with_a_run(known=False, room=True)
    step(cluster, events.LinkLost(NodeId("n1")), 19.0)
    step(cluster, events.Submitted(SPEC), 20.0)
    assert cluster.jobs[X].unsure is not None, "it is not started beside those who live"
    step(cluster, replace(says("n1", 1), workers=()), 20.1)
    end = wire.Observed(NodeId("n1"), X, Sign.EXIT, Rank(1), 0, Generation(1), 9, exit_code=-9)
    step(cluster, end, 20.2)
    step(cluster, events.Tick(), 26.0)
    job = cluster.jobs[X]
    assert job.unsure is None
    assert seats(cluster)[0] == ("n0", 0)


def test_who_stops_a_job_that_was_found_ends_what_was_found():
    cluster = with_a_run(known=False)
    step(cluster, events.Submitted(SPEC), 20.0)
    (stop,) = ended(step(cluster, events.StopAsked(X, "enough"), 21.0))
    assert stop.nodes == ("n0", "n1")
    assert stop.generation > cluster.past_number
    assert ended(step(cluster, says("n0", 0), 22.0)), "it was not told"


@pytest.mark.parametrize("known", [False, True])
def test_a_stop_of_a_job_that_was_run_again_beside_it_ends_no_worker_that_is_left_alone(
    known: bool,
):
    """Nobody lived when it was submitted, as far as was known; or whoever did could not show it."""
    cluster = with_a_run(known=known)
    for node, rank in (("n0", 0), ("n1", 1)):
        step(cluster, replace(says(node, rank), workers=()), 12.0)
        step(cluster, events.LinkLost(NodeId(node)), 12.1)
    for node in ("n8", "n9"):
        step(cluster, hello(node), 13.0)
    step(cluster, events.Submitted(SPEC), 20.0)
    assert [node for node, _ in seats(cluster)] == ["n8", "n9"]
    assert ended(step(cluster, says("n0", 0), 21.0)) == []
    assert step(cluster, publish("n0", 1, X), 21.1).answers == ()
    (stop,) = ended(step(cluster, events.StopAsked(X, "enough"), 22.0))
    assert stop.nodes == ("n8", "n9")
    assert cluster.nodes[NodeId("n0")].uses, "its slot is not free"
    keeps = replace(says("n0", 0), keeps=(str(X),))
    for now in (23.0, 24.0):
        assert ended(step(cluster, keeps, now)) == []
        cluster = state.from_plain(state.to_plain(cluster))
    others_end(cluster)
    assert X in cluster.past
    assert ended(step(cluster, keeps, 900.0)) == [], "also when the job is forgotten"
    # And it can still be had: now it is known to live.
    step(cluster, says("n1", 1), 901.0)
    assert "as 2 agents list them" in step(cluster, events.Submitted(SPEC), 902.0).why
    assert seats(cluster) == [("n0", 0), ("n1", 0)]


def others_end(cluster: state.Cluster) -> None:
    for number in range(state.JOBS_OVER_MAX):
        name = JobId(f"other{number}")
        step(cluster, events.Submitted(JobSpec(name, "t.py", nodes=9)), 40.0 + number)
        step(cluster, events.StopAsked(name, "enough"), 40.0 + number)


def test_nobody_takes_a_seat_of_a_job_to_come_without_having_been_told_of_it():
    cluster = state.new_cluster("test")
    begin(cluster, 2, 50)
    behind(cluster, "n0", 11.0)
    step(cluster, replace(says("n0", 0), belongs={str(X): f"1/{'0' * 64}"}, slots=2), 11.1)
    step(cluster, hello("n1"), 11.2)
    step(cluster, events.Submitted(SPEC), 12.0)
    job = cluster.jobs[X]
    assert (job.state, job.unsure) == (JobState.STARTING, None)


# --- a snapshot of before the moments were kept ---------------------------------------------------


def test_who_was_left_alone_before_an_upgrade_is_left_alone_after_it():
    cluster = with_a_run(known=True)
    behind(cluster, "n2", 12.0)
    cluster.gaps = tuple(gap for gap in cluster.gaps if gap.node != "n2")
    body = snapshots.body_of(cluster, 30.0)
    loaded = Loaded(replica.codec.loads(body), 90, ())
    for field in ("behind_at", "shown", "past", "past_number"):
        del loaded.snapshot["cluster"][field]
    read = replica.of(loaded).cluster
    assert read.behind_at == {"n0": 11.0, "n1": 11.0, "n2": 30.0}
    for node, rank in (("n0", 0), ("n1", 1)):
        assert ended(step(read, says(node, rank), 40.0)) == []
    assert ended(step(read, hello("n2", worker(0, JobId("y"))), 40.0)) == []
    # A newer one says itself whose moments it has.
    cluster.behind_at = {}
    newer = Loaded(replica.codec.loads(snapshots.body_of(cluster, 30.0)), 90, ())
    assert replica.of(newer).cluster.behind_at == {}


# --- nodes that are gone --------------------------------------------------------------------------


def lose(cluster: state.Cluster, node: str, now: float) -> None:
    step(cluster, events.LinkLost(NodeId(node)), now)
    step(cluster, events.Tick(), now + 10.0)
    assert not cluster.nodes[NodeId(node)].alive


def test_pods_that_showed_a_gap_do_not_stay_in_any_book_for_ever():
    cluster = state.new_cluster("test")
    step(cluster, events.TermBegan(Term(6), seq=50, forget_seconds=DAY), 0.0)
    step(cluster, hello("keeper"), 0.0)
    behind(cluster, "never-came", 0.0)
    for number in range(10):
        pod, now = f"pod-{number}", number * DAY
        behind(cluster, pod, now + 1.0)
        step(cluster, replace(says(pod, 0), seq_seen=90 - number % 2), now + 2.0)
        lose(cluster, pod, now + 10.0)
        step(cluster, hello("keeper"), now + 30.0)
        step(cluster, events.Tick(), now + DAY - 1.0)
    step(cluster, events.Tick(), 20 * DAY)
    assert sorted(cluster.nodes) == ["keeper"]
    assert (cluster.ahead, cluster.behind_at, cluster.shown) == ({}, {}, {})


def test_a_node_that_was_forgotten_shows_again_what_the_journal_lacks():
    cluster = with_a_run(known=True)
    # n0 has obeyed entries of this history since: by them nobody sees a gap any more.
    later = replace(says("n0", 0), term_seen=Term(6), seq_seen=60)
    step(cluster, later, 12.0)
    lose(cluster, "n0", 20.0)
    assert step(cluster, events.ForgetAsked(NodeId("n0")), 40.0).changed
    assert NodeId("n0") not in cluster.behind_at
    assert reconcile.gap(cluster, Term(6), 70, later) is None
    assert ended(step(cluster, later, 50.0)) == []
    assert step(cluster, publish("n0", 1, X), 51.0).answers == ()
    assert "as 2 agents list them" in step(cluster, events.Submitted(SPEC), 52.0).why
