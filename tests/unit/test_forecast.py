"""What would happen, without anything happening."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from keepstep import wire
from keepstep.cli import policy_view
from keepstep.errors import ConfigError
from keepstep.model import JobId, JobSpec, Mode, NodeId, Phase, Policy
from keepstep.orchestrator import brain, events, forecast, remedies, state
from keepstep.orchestrator.access import WITHHELD, Sight

JOB = JobId("train")


def running(policy: Policy | None = None, *, extra: int = 1) -> state.Cluster:
    """Six ranks on three nodes, two of them in domain d0; one node more by default."""
    cluster = state.new_cluster("test")
    for i in range(3 + extra):
        labels = {"nvlink_domain": f"d{i // 2}"}
        hello = wire.Hello(NodeId(f"n{i}"), f"a{i}", 2, 1, 2, "b", labels=labels)
        brain.step(cluster, hello, 0.0)
    spec = JobSpec(
        JOB, "t.py", nodes=3, ranks_per_node=2, spares=1, priority=5, policy=policy or Policy()
    )
    brain.step(cluster, events.Submitted(spec), 0.0)
    job = cluster.jobs[JOB]
    assert job.roster is not None
    for seat in job.roster.seats:
        said = wire.SeatReport(
            seat.rank,
            5,
            True,
            {"0-5": "d"},
            entries=(5,),
            state_bytes=1_500_000_000,
            step=5,
            step_seconds=0.8,
        )
        told = wire.PhaseReport(seat.node, JOB, job.generation, Phase.RESUME, (said,))
        brain.step(cluster, told, 1.0)
    return cluster


def looked_at(cluster: state.Cluster, *faults: str) -> Any:
    before = state.fingerprint(cluster)
    answer = forecast.policy_view(cluster, JOB, faults, 5.0)
    assert state.fingerprint(cluster) == before, "a look changes nothing"
    return answer


def test_the_budgets_are_told_with_what_they_are_made_of():
    budgets = looked_at(running())["budgets"]
    assert budgets["quiesce"] == {"seconds": 8.0, "why": "max(5 s, 10 x 0.8 s a step)"}
    assert budgets["reform"]["seconds"] == 8.0 + 30.0
    assert "1,500 MB at half of the assumed 100 MB/s" in budgets["reform"]["why"]


def test_by_default_rank_zero_dies_and_its_node_is_lost():
    assert [f["fault"] for f in looked_at(running())["forecasts"]] == ["rank:0", "node:n0"]


def test_a_rank_goes_to_the_standby():
    (found,) = looked_at(running(), "rank:4")["forecasts"]
    assert found["outcome"] == "migrate"
    (move,) = found["moves"]
    assert (move["rank"], move["to"]["node"], move["why"]) == (4, "n3", "standby, still warming up")


def test_what_has_no_spare_holds_and_says_what_would_make_one():
    cluster = running()
    brain.step(cluster, events.DrainAsked(NodeId("n3"), "patches"), 2.0)
    (found,) = looked_at(cluster, "node:n1")["forecasts"]
    assert (found["outcome"], found["without_spare"]) == ("hold", [2, 3])
    assert "keepstep undrain n3: 2 free slots (patches)" in found["remedies"]
    assert "bring n1 back: 2 slots" in found["remedies"]
    assert found["remedies"][-1].startswith("add a node")


def test_taints_and_lesser_jobs_are_among_the_remedies():
    cluster = running(extra=2)
    lesser = JobSpec(JobId("lesser"), "t.py", nodes=1, ranks_per_node=2)
    brain.step(cluster, events.Submitted(lesser), 2.0)
    brain.step(cluster, events.TaintAsked(NodeId("n3"), "XID 79", slot=1), 2.0)
    brain.step(cluster, events.TaintAsked(NodeId("n3"), "XID 63", slot=0), 2.0)
    (found,) = looked_at(cluster, "node:n1")["forecasts"]
    assert "keepstep untaint n3/1: XID 79" in found["remedies"]
    assert "keepstep stop --save lesser: 2 slots, priority 0" in found["remedies"]


def test_no_node_of_a_lost_domain_is_a_spare_for_another():
    (found,) = looked_at(running(), "domain:d0")["forecasts"]
    assert found["outcome"] == "hold"
    assert {move["to"]["node"] for move in found["moves"]} == {"n3"}


def test_a_drain_warms_its_targets():
    (found,) = looked_at(running(), "drain:n1")["forecasts"]
    assert found["outcome"] == "migrate"
    assert [move["rank"] for move in found["moves"]] == [2, 3]


def test_a_drain_without_room_waits():
    cluster = running(extra=0)
    (found,) = looked_at(cluster, "drain:n1")["forecasts"]
    assert found["outcome"] == "waits"
    assert found["remedies"]


def test_losing_everything_is_a_fallback():
    cluster = running()
    for node in ("n1", "n2"):
        brain.step(cluster, events.NodeSilent(NodeId(node)), 2.0)
    brain.step(cluster, events.Tick(), 3.0)
    (found,) = looked_at(cluster, "node:n0")["forecasts"]
    assert found["outcome"] == "fallback"


def test_an_observed_job_and_a_frozen_cluster_are_played_as_if_they_were_not():
    cluster = running(Policy(Mode.OBSERVE))
    brain.step(cluster, events.FreezeAsked("a switch"), 2.0)
    answer = looked_at(cluster, "rank:2")
    assert answer["forecasts"][0]["outcome"] == "migrate"
    text = "\n".join(policy_view.lines(answer))
    assert "the cluster is frozen (a switch)" in text
    assert "mode = observe" in text


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("rank:6", "its ranks are 0 to 5"),
        ("rank:x", "its ranks are 0 to 5"),
        ("rank:-1", "its ranks are 0 to 5"),
        ("rank:" + "1" * 5000, "its ranks are 0 to 5"),
        ("node:n9", "there are: n0, n1"),
        ("domain:d9", "there are: d0, d1"),
        ("domain:", "there are: d0, d1"),
        ("power", "is no fault; give rank:2"),
    ],
)
def test_a_fault_that_cannot_be_is_refused_with_those_that_can(fault: str, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        looked_at(running(), fault)


def shared() -> state.Cluster:
    """Two projects' jobs on the same two nodes; nothing else is free but a drained node."""
    cluster = state.new_cluster("test")
    for node in ("n0", "n1", "n2"):
        brain.step(cluster, wire.Hello(NodeId(node), node, 2, 1, 2, "b"), 0.0)
    brain.step(cluster, events.DrainAsked(NodeId("n2"), "patches"), 0.0)
    for name, project, priority in (("mine", "a", 5), ("zebra", "b", 0)):
        spec = JobSpec(JobId(name), "t.py", nodes=2, priority=priority, project=project)
        brain.step(cluster, events.Submitted(spec), 0.0)
        job = cluster.jobs[JobId(name)]
        assert job.roster is not None
        for seat in job.roster.seats:
            done = (wire.SeatReport(seat.rank, 1, True, step=1),)
            told = wire.PhaseReport(seat.node, spec.job, job.generation, Phase.RESUME, done)
            brain.step(cluster, told, 1.0)
    return cluster


@pytest.mark.parametrize("fault", ["node:n1", "drain:n1"])
def test_a_forecast_tells_a_project_of_its_own_jobs_only(fault: str):
    cluster = shared()
    sight = Sight("a", {"mine": "a", "zebra": "b"})
    seen = forecast.Seen(sight.places(cluster), sight.job)
    (whole,) = forecast.policy_view(cluster, JobId("mine"), (fault,), 5.0)["forecasts"]
    (mine,) = forecast.policy_view(cluster, JobId("mine"), (fault,), 5.0, seen)["forecasts"]
    told = sight.cleaned(mine)
    assert set(mine["says"]) < set(whole["says"]), "the other job would have its share of it"
    assert told["says"]
    assert WITHHELD not in told["says"], "of ours all is told, but for the remedies"
    assert any("n2" in text for text in (*whole["remedies"], *whole["says"]))
    assert not any("n2" in text for text in (*told["remedies"], *told["says"]))
    assert told["remedies"] == [remedies.ADD]


def test_nothing_happens_to_a_job_that_is_over():
    cluster = running()
    brain.step(cluster, events.StopAsked(JOB, "enough"), 2.0)
    assert looked_at(cluster)["forecasts"] == []
    with pytest.raises(ConfigError, match="does not run"):
        looked_at(cluster, "rank:0")


def test_the_tables_are_aligned_and_mark_what_is_not_the_default():
    policy = replace(Policy(), hold_seconds_max=1200.0)
    text = policy_view.lines(looked_at(running(policy), "rank:4", "domain:d0"))
    assert "  hold_seconds_max       1200.0    (default 600.0)" in text
    assert "  quiesce   8.0 s     max(5 s, 10 x 0.8 s a step)" in text
    at = text.index("if rank 4 dies: migrate")
    assert text[at + 1 : at + 3] == [
        "  rank  from       to         why",
        "  4     n2 slot 0  n3 slot 0  standby, still warming up",
    ]
    assert "if domain d0 is lost: hold" in text
    assert "  what would make a spare:" in text
