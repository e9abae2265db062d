"""One report for many ranks leads to what a report of each would lead to, and to nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep import wire
from keepstep.model import JobId, JobSpec, JobState, NodeId, Phase, Rank, Sign
from keepstep.orchestrator import alike, brain, events, state

JOB = JobId("train")
RANKS = 6


def running() -> state.Cluster:
    cluster = state.new_cluster("test")
    cluster.tree = True
    for i in range(RANKS + 2):
        brain.step(cluster, wire.Hello(NodeId(f"n{i}"), f"a{i}", 1, 1, 2, "b"), 0.0)
    spec = JobSpec(JOB, "train.py", nodes=RANKS, spares=1)
    brain.step(cluster, events.Submitted(spec), 0.0)
    tell(cluster, Phase.RESUME, seat(range(RANKS), 1))
    assert cluster.jobs[JOB].state is JobState.RUNNING
    return cluster


def seat(ranks: range | tuple[int, ...], at: int, digest: str = "") -> wire.SeatReport:
    name = "+".join(map(str, ranks)) if len(ranks) > 1 else ""
    held = {f"0-{RANKS - 1}": digest or f"d{at}"}
    first = Rank(ranks[0])
    return wire.SeatReport(
        first, at, True, held, entries=(at,), step=at, step_seconds=0.5, alike=name
    )


def tell(
    cluster: state.Cluster, phase: Phase, *seats: wire.SeatReport, node: str = ""
) -> brain.Decision:
    job = cluster.jobs[JOB]
    assert job.roster is not None
    speaker = NodeId(node) or job.roster.store_node
    report = wire.PhaseReport(speaker, JOB, job.generation, phase, seats)
    return brain.step(cluster, report, 2.0)


def tell_each(cluster: state.Cluster, phase: Phase, *seats: wire.SeatReport) -> list[wire.Order]:
    orders: list[wire.Order] = []
    job = cluster.jobs[JOB]
    assert job.roster is not None
    for one in (one for seat in seats for one in alike.apart(seat, RANKS)):
        node = job.roster.seats[one.rank].node
        orders += tell(cluster, phase, one, node=node).orders
    return orders


def lose_rank(cluster: state.Cluster, rank: int) -> None:
    job = cluster.jobs[JOB]
    assert job.roster is not None
    old = job.roster.seats[rank]
    died = wire.Observed(old.node, JOB, Sign.EXIT, old.rank, old.incarnation, job.generation, 5, -9)
    brain.step(cluster, died, 2.0)


def test_the_root_speaks_for_all_and_the_orders_are_those_that_each_report_would_have_led_to():
    one, each = running(), running()
    others = (0, 1, 2, 4, 5)
    for cluster in (one, each):
        lose_rank(cluster, 3)
    joiner = wire.SeatReport(Rank(3))
    steps = (
        (Phase.QUIESCE, (seat(others, 5), joiner)),
        (Phase.VERIFY, (seat(range(RANKS), 5),)),
        (Phase.RESUME, (seat(range(RANKS), 6),)),
    )
    for phase, seats in steps:
        assert list(tell(one, phase, *seats).orders) == tell_each(each, phase, *seats)
    for cluster in (one, each):
        assert cluster.jobs[JOB].migration is None
        assert cluster.closed[-1].outcome == "resumed"


def test_a_node_that_is_not_the_root_speaks_for_its_own_ranks_only():
    cluster = running()
    lose_rank(cluster, 3)
    tell(cluster, Phase.QUIESCE, seat((0, 1, 2, 4, 5), 5), node="n1")
    moving = cluster.jobs[JOB].migration
    assert moving is not None
    assert set(moving.reports) == {1}


@pytest.mark.parametrize("alike", [True, False])
def test_where_agents_report_each_for_itself_nobody_is_the_root(alike: bool):
    cluster = running()
    cluster.tree = False
    lose_rank(cluster, 3)
    job = cluster.jobs[JOB]
    assert job.roster is not None
    for ranks in [(0, 1, 2, 4, 5)] if alike else [(0,), (1,), (2,), (4,), (5,)]:
        tell(cluster, Phase.QUIESCE, seat(ranks, 5))
    assert job.migration is not None
    there = [job.roster.seats[rank].node for rank in job.migration.reports]
    assert there == [job.roster.store_node], "certificates name nodes, and a node has its own ranks"


@pytest.mark.parametrize("name", ["0-99", "5-2", "nonsense", "-3"])
def test_names_of_ranks_that_there_cannot_be_are_ignored(name: str):
    cluster = running()
    lose_rank(cluster, 3)
    tell(cluster, Phase.QUIESCE, replace(seat((0, 1), 5), alike=name))
    moving = cluster.jobs[JOB].migration
    assert moving is not None
    assert moving.reports == {}


@pytest.mark.parametrize("own", [{"problem": "disk full"}, {"busy_seconds": 3.0}])
def test_what_is_somebodys_own_cannot_be_said_of_many(own: dict[str, object]):
    cluster = running()
    lose_rank(cluster, 3)
    tell(cluster, Phase.QUIESCE, replace(seat((0, 1), 5), **own))  # type: ignore[arg-type]
    moving = cluster.jobs[JOB].migration
    assert moving is not None
    assert moving.reports == {}


def test_ranks_that_are_gone_or_have_reported_keep_what_is_known_of_them():
    cluster = running()
    lose_rank(cluster, 3)
    tell(cluster, Phase.QUIESCE, seat((1,), 4))
    tell(cluster, Phase.QUIESCE, seat((0, 1, 2), 5))
    moving = cluster.jobs[JOB].migration
    assert moving is not None
    assert {rank: report.boundary for rank, report in moving.reports.items()} == {0: 5, 1: 4, 2: 5}


def test_wrong_state_of_many_is_wrong_state_of_each():
    cluster = running()
    lose_rank(cluster, 3)
    tell(cluster, Phase.QUIESCE, seat((0, 1, 2, 4, 5), 5), wire.SeatReport(Rank(3)))
    decision = tell(cluster, Phase.VERIFY, seat((1, 2), 5, digest="wrong"))
    assert "rank 1 is not verified" in decision.why
    moving = cluster.jobs[JOB].migration
    assert moving is not None
    assert set(moving.excluded) == {1, 2}


def test_a_shared_report_survives_a_snapshot():
    cluster = running()
    lose_rank(cluster, 3)
    tell(cluster, Phase.QUIESCE, seat((0, 1, 2, 4, 5), 5))
    again = state.from_plain(state.to_plain(cluster))
    assert state.fingerprint(again) == state.fingerprint(cluster)
    joiner = wire.SeatReport(Rank(3))
    assert tell(again, Phase.QUIESCE, joiner).orders == tell(cluster, Phase.QUIESCE, joiner).orders


@given(st.lists(st.integers(0, 3), max_size=12))
def test_each_report_is_met_once_in_the_order_of_ranks(shared):
    # Equal, and not the same: what two ranks say for themselves stays two reports.
    told = [wire.SeatReport(Rank(0)) for _ in range(4)]
    met = alike.distinct(told[which] for which in shared)
    assert [id(report) for report in met] == [id(told[which]) for which in dict.fromkeys(shared)]
