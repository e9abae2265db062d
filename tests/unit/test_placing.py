"""Which spare takes which seat: units, domains, and a whole rack at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep import wire
from keepstep.model import JobId, JobSpec, NodeId, Phase, Policy, Rank, SameDomain, Sign, Unit
from keepstep.orchestrator import brain, events, homes, placing, state
from keepstep.orchestrator.state import NodeState, Taint

JOB = JobId("train")


def cluster_of(nodes: int, slots: int, per_rack: int, spec: JobSpec) -> state.Cluster:
    """Nodes in racks that are NVLink domains too, and one running job."""
    cluster = state.new_cluster("test")
    for i in range(nodes):
        labels = {"nvlink_domain": f"d{i // per_rack}", "rack": f"r{i // per_rack}"}
        hello = wire.Hello(NodeId(f"n{i}"), f"10.0.0.{i}", slots, 1, 2, "b", labels=labels)
        cluster = brain.step(cluster, hello, 1.0).cluster
    cluster = brain.step(cluster, events.Submitted(spec), 1.0).cluster
    for seat in cluster.jobs[JOB].roster.seats:
        report = wire.PhaseReport(
            seat.node,
            JOB,
            cluster.jobs[JOB].generation,
            Phase.RESUME,
            (wire.SeatReport(seat.rank, 1, True, entries=(1,), step=1),),
        )
        cluster = brain.step(cluster, report, 2.0).cluster
    assert cluster.jobs[JOB].state == "running"
    return cluster


def test_the_loss_of_a_rack_of_18_nodes_is_one_incident_and_one_migration():
    policy = Policy(unit=Unit.DOMAIN)
    spec = JobSpec(JOB, "train.py", nodes=54, ranks_per_node=4, policy=policy)
    cluster = cluster_of(nodes=72, slots=4, per_rack=18, spec=spec)
    before = cluster.jobs[JOB].roster
    # A quarter of all nodes is silent: that it is not our own fault is known from their peers.
    broken = wire.Observed(NodeId("n0"), JOB, Sign.BROKEN, Rank(0), 0, before.generation, 5)
    cluster = brain.step(cluster, broken, 9.9).cluster
    for i in range(18, 36):
        cluster = brain.step(cluster, events.NodeSilent(NodeId(f"n{i}")), 10.0).cluster
    decision = brain.step(cluster, events.Tick(), 10.5)
    job = decision.cluster.jobs[JOB]
    assert job.incidents == 1
    assert job.migration.phase is Phase.QUIESCE
    moved = [seat for seat in job.roster.seats if 54 <= int(seat.node[1:]) < 72]
    assert [seat.rank for seat in moved] == list(range(72, 144))
    assert len({(seat.node, seat.slot) for seat in job.roster.seats}) == 216
    # Ranks that shared a node share one again.
    for first in range(72, 144, 4):
        assert len({job.roster.seats[rank].node for rank in range(first, first + 4)}) == 1
    # Private state of the lost rack has its second home in another one.
    assert before.mirror_stride % 216 >= 72
    told = [order.action for order in decision.orders if isinstance(order.action, wire.Quiesce)]
    assert len(told) == 1, "one generation for all of them"


def seats_of(cluster, ranks):
    return [cluster.jobs[JOB].roster.seats[rank] for rank in ranks]


def search(cluster, **more):
    return placing.Search(cluster, cluster.jobs[JOB], 3.0, **more)


@pytest.mark.parametrize("same_domain", list(SameDomain))
def test_a_rank_stays_in_its_domain_if_that_has_room(same_domain):
    policy = Policy(same_domain=same_domain)
    spec = JobSpec(JOB, "train.py", nodes=4, ranks_per_node=1, policy=policy)
    cluster = cluster_of(nodes=8, slots=2, per_rack=4, spec=spec)
    found = placing.place(search(cluster), seats_of(cluster, [2]))
    assert found[2].node in ("n0", "n1", "n2", "n3")


def test_a_node_is_replaced_by_one_with_room_for_all_its_ranks():
    spec = JobSpec(JOB, "train.py", nodes=2, ranks_per_node=2, policy=Policy(unit=Unit.NODE))
    cluster = cluster_of(nodes=5, slots=2, per_rack=5, spec=spec)
    state.put_taint(cluster, "n2/0", Taint("bad", 0.0, 1e9))
    assert placing.companions(search(cluster), [2]) == {3}
    found = placing.place(search(cluster), seats_of(cluster, [2, 3]))
    assert {choice.node for choice in found.values()} == {"n3"}


def test_nobody_moves_along_if_nobody_would_be_left():
    spec = JobSpec(JOB, "train.py", nodes=1, ranks_per_node=2, policy=Policy(unit=Unit.NODE))
    cluster = cluster_of(nodes=3, slots=2, per_rack=3, spec=spec)
    assert placing.companions(search(cluster), [0]) == set()


@settings(max_examples=60)
@given(
    tainted=st.sets(st.integers(0, 15)),
    gone=st.sets(st.integers(0, 5), min_size=1, max_size=5),
    unit=st.sampled_from(list(Unit)),
    same_domain=st.sampled_from(list(SameDomain)),
)
def test_no_place_is_given_twice_and_none_that_is_tainted(tainted, gone, unit, same_domain):
    policy = Policy(unit=unit, same_domain=same_domain)
    spec = JobSpec(JOB, "train.py", nodes=3, ranks_per_node=2, spares=1, policy=policy)
    cluster = cluster_of(nodes=8, slots=2, per_rack=4, spec=spec)
    for number in tainted:
        state.put_taint(cluster, f"n{number // 2}/{number % 2}", Taint("bad", 0.0, 1e9))
    found = placing.place(search(cluster), seats_of(cluster, sorted(gone)))
    places = [(choice.node, choice.slot) for choice in found.values()]
    assert len(set(places)) == len(places)
    for node, slot in places:
        assert int(node[1:]) * 2 + slot not in tainted
        user = cluster.nodes[node].uses.get(slot)
        assert user is None or user.rank < 0
    assert set(found) <= gone
    if unit is Unit.DEVICE and same_domain is SameDomain.PREFER:
        room = 16 - 6 - sum(1 for n in tainted if cluster_slot_is_open(cluster, n))
        assert len(found) == min(len(gone), room)


def cluster_slot_is_open(cluster, number):
    user = cluster.nodes[f"n{number // 2}"].uses.get(number % 2)
    return user is None or user.rank < 0


def test_a_lemon_gets_its_ranks_back_later_each_time_and_never_later_than_a_day():
    node = NodeState(NodeId("n1"), "a", 1, 1, 2, "b", 1)
    policy = Policy(home_clean_seconds=1800.0)
    assert homes.worthy_at(node, policy) == 0.0
    waits = []
    for fault in range(1, 9):
        homes.found_bad(node, 1e6 + fault)
        waits.append(homes.worthy_at(node, policy) - node.fault_at)
    assert waits[:3] == [1800.0, 3600.0, 7200.0]
    assert waits[-1] == 86_400.0
    homes.found_bad(node, 1e6 + 8 * 86_400.0)
    assert node.faults == 1, "a week without a fault is forgiven"
