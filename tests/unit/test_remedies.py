"""What would make room is said where somebody waits for it; and who leaves is no lemon."""

from __future__ import annotations

from keepstep import wire
from keepstep.model import JobId, JobSpec, NodeId, Phase, Policy, SameDomain, Severity
from keepstep.orchestrator import brain, events, remedies, state, view

JOB = JobId("train")


def hello(cluster: state.Cluster, node: str, boot: str = "b", now: float = 1.0) -> None:
    labels = {"nvlink_domain": f"d{node[1:]}"}
    brain.step(cluster, wire.Hello(NodeId(node), "10.0.0.1", 1, 1, 2, boot, labels=labels), now)


def running(*spares: str, policy: Policy = Policy()) -> state.Cluster:
    """Two ranks on n0 and n1, and these nodes beside them."""
    cluster = state.new_cluster("test")
    for node in ("n0", "n1", *spares):
        hello(cluster, node)
    spec = JobSpec(JOB, "train.py", nodes=2, ranks_per_node=1, policy=policy)
    brain.step(cluster, events.Submitted(spec), 1.0)
    job = cluster.jobs[JOB]
    assert job.roster is not None
    for seat in job.roster.seats:
        reports = (wire.SeatReport(seat.rank, 1, True, "d", (1,), step=1),)
        told = wire.PhaseReport(seat.node, JOB, job.generation, Phase.RESUME, reports)
        brain.step(cluster, told, 2.0)
    return cluster


def lose(cluster: state.Cluster, node: str, now: float) -> None:
    brain.step(cluster, events.NodeSilent(NodeId(node)), now)
    brain.step(cluster, events.Tick(), now + 1.0)


def needed(cluster: state.Cluster) -> list[str]:
    found: list[str] = view.describe(cluster, 20.0)["jobs"][JOB]["remedies"]
    return found


def test_a_job_that_trains_needs_no_remedy():
    assert needed(running()) == []


def test_a_held_job_says_what_would_make_a_spare_and_so_does_its_story():
    cluster = running("n2", "n3")
    brain.step(cluster, events.DrainAsked(NodeId("n2"), "patches"), 3.0)
    brain.step(cluster, events.TaintAsked(NodeId("n3"), "XID 63", Severity.AVOID), 3.0)
    lose(cluster, "n1", 5.0)
    assert cluster.jobs[JOB].state == "held"
    assert needed(cluster) == [
        "keepstep undrain n2: 1 free slot (patches)",
        "keepstep untaint n3: XID 63",
        "bring n1 back: 1 slot",
        remedies.ADD,
    ]
    incident = cluster.jobs[JOB].incident
    assert incident is not None
    assert any(line.why.startswith("what would help: keepstep undrain") for line in incident.story)
    # The easiest of them helps.
    brain.step(cluster, events.UndrainAsked(NodeId("n2")), 7.0)
    brain.step(cluster, events.Tick(), 7.5)
    assert needed(cluster) == []


def test_a_policy_that_forbids_the_free_slot_is_named():
    cluster = running("n2", policy=Policy(same_domain=SameDomain.REQUIRE))
    lose(cluster, "n1", 5.0)
    assert any(
        'n2 has a free slot, but the job\'s policy says same_domain = "require"' in text
        for text in needed(cluster)
    )


def test_a_job_that_waits_for_nodes_says_so():
    cluster = state.new_cluster("test")
    spec = JobSpec(JOB, "train.py", nodes=2, ranks_per_node=1)
    brain.step(cluster, events.Submitted(spec), 1.0)
    assert needed(cluster) == [remedies.ADD]


def test_leaving_in_good_order_is_no_fault_and_failing_is():
    cluster = running("n2")
    n0, n2 = cluster.nodes[NodeId("n0")], cluster.nodes[NodeId("n2")]
    brain.step(cluster, events.LinkLost(NodeId("n2")), 5.0)
    brain.step(cluster, events.Tick(), 50.0)
    assert (n2.alive, n2.left, n2.faults) == (False, True, 0)
    hello(cluster, "n2", "b2", 60.0)
    assert (n2.alive, n2.left) == (True, False)
    lose(cluster, "n2", 70.0)
    assert (n2.left, n2.faults) == (False, 1)
    # With a rank on it, a closed stream that stays closed is a fault.
    brain.step(cluster, events.LinkLost(NodeId("n0")), 80.0)
    brain.step(cluster, events.Tick(), 120.0)
    assert (n0.alive, n0.left, n0.faults) == (False, False, 1)
