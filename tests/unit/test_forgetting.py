"""Nodes that are gone for good leave the books, and nobody who is still referred to does."""

from __future__ import annotations

import pytest

from keepstep import codec, wire
from keepstep.cli import moves, parser
from keepstep.config import OrchestratorConfig
from keepstep.model import Generation, JobId, JobSpec, JobState, NodeId, Rank, Severity, Sign, Term
from keepstep.orchestrator import brain, events, snapshots, state
from keepstep.orchestrator.forgetting import LOOK_SECONDS
from keepstep.orchestrator.streams import ALLOWANCES_MIN, Allowance, Allowances
from tests.unit.test_access import Served, in_two_projects

DAY = 86_400.0
WEEK = 7 * DAY
JOB = JobId("train")


def hello(node: str, boot: str = "boot") -> wire.Hello:
    return wire.Hello(NodeId(node), node, 1, 1, 2, boot)


def cluster_of(*nodes: str) -> state.Cluster:
    cluster = state.new_cluster("test")
    brain.step(cluster, events.TermBegan(Term(1), seq=0, forget_seconds=WEEK), 0.0)
    for node in nodes:
        brain.step(cluster, hello(node), 0.0)
    return cluster


def lose(cluster: state.Cluster, node: str, now: float) -> None:
    """Its agent was stopped, and did not come back."""
    brain.step(cluster, events.LinkLost(NodeId(node)), now)
    brain.step(cluster, events.Tick(), now + 10.0)
    assert not cluster.nodes[NodeId(node)].alive


def tick(cluster: state.Cluster, now: float) -> brain.Decision:
    return brain.step(cluster, events.Tick(), now)


def forget(cluster: state.Cluster, node: str, now: float) -> brain.Decision:
    return brain.step(cluster, events.ForgetAsked(NodeId(node)), now)


def test_pods_of_random_names_do_not_stay_for_ever():
    cluster = cluster_of("keeper")
    for number in range(60):
        at = number * DAY / 2
        for name in ("keeper", f"pod-{number}"):
            brain.step(cluster, hello(name), at)
        lose(cluster, f"pod-{number}", at)
        tick(cluster, at + DAY / 2 - 1)
    assert len(cluster.nodes) < 20
    left = cluster_of("keeper").nodes.keys() | {f"pod-{n}" for n in range(45, 60)}
    assert cluster.nodes.keys() <= left


def test_who_is_gone_for_a_week_is_forgotten_in_one_entry():
    cluster = cluster_of("n0", "n1", "n2", "n3")
    lose(cluster, "n1", 100.0)
    lose(cluster, "n2", 200.0)
    assert not tick(cluster, WEEK).changed
    decision = tick(cluster, WEEK + 300.0)
    assert decision.why == "gone for 7 days and forgotten: n1, n2 (2 in all)"
    assert sorted(cluster.nodes) == ["n0", "n3"]
    assert not tick(cluster, WEEK + 300.0 + 2 * LOOK_SECONDS).changed, "nobody is left to look at"


def test_a_tick_that_changes_nothing_leaves_the_state_as_it_is():
    cluster = cluster_of("n0", "n1")
    lose(cluster, "n1", 100.0)
    before = state.fingerprint(cluster)
    assert not tick(cluster, WEEK / 2).changed
    assert state.fingerprint(cluster) == before


def test_who_came_back_is_not_forgotten():
    cluster = cluster_of("n0", "n1")
    lose(cluster, "n1", 100.0)
    brain.step(cluster, hello("n1"), DAY)
    tick(cluster, 2 * WEEK)
    assert NodeId("n1") in cluster.nodes


def test_what_an_operator_said_of_a_node_is_not_forgotten_by_itself():
    cluster = cluster_of("n0", "n1", "n2")
    brain.step(cluster, events.DrainAsked(NodeId("n1"), "broken"), 1.0)
    taint = events.TaintAsked(NodeId("n2"), "hot", Severity.AVOID, 0, seconds=3 * WEEK)
    brain.step(cluster, taint, 1.0)
    lose(cluster, "n1", 100.0)
    lose(cluster, "n2", 100.0)
    tick(cluster, 2 * WEEK)
    assert sorted(cluster.nodes) == ["n0", "n1", "n2"]
    assert "and so is its drain" in forget(cluster, "n1", 2 * WEEK).why
    assert forget(cluster, "n2", 2 * WEEK).changed
    assert (sorted(cluster.nodes), cluster.drained, cluster.taints) == (["n0"], (), {})


def test_a_frozen_cluster_forgets_nobody_by_itself():
    cluster = cluster_of("n0", "n1")
    lose(cluster, "n1", 100.0)
    brain.step(cluster, events.FreezeAsked("hands off"), 200.0)
    tick(cluster, 2 * WEEK)
    assert NodeId("n1") in cluster.nodes


def test_a_leader_that_takes_over_knows_who_is_gone_for_how_long():
    cluster = cluster_of("n0", "n1")
    cluster.forget_seconds, cluster.forget_due = 0.0, -1.0
    lose(cluster, "n1", 100.0)
    brain.step(cluster, events.TermBegan(Term(2), seq=9, forget_seconds=WEEK), WEEK)
    tick(cluster, WEEK + 200.0)
    assert NodeId("n1") not in cluster.nodes
    assert OrchestratorConfig().forget_nodes_seconds == WEEK


def test_who_is_gone_since_nobody_knows_when_is_gone_since_the_first_term_that_forgets():
    cluster = cluster_of("n0", "n1")
    lose(cluster, "n1", 100.0)
    # As a leader of before left a node that fell silent with its stream open.
    cluster.nodes[NodeId("n1")].unlinked_at = 0.0
    cluster.forget_seconds, cluster.forget_due = 0.0, -1.0
    upgraded = 50 * 365 * DAY
    for term, at in ((2, upgraded), (3, upgraded + DAY)):
        brain.step(cluster, events.TermBegan(Term(term), seq=9, forget_seconds=WEEK), at)
        brain.step(cluster, hello("n0"), at + 1.0)
        assert not tick(cluster, at + 60.0).changed
    assert NodeId("n1") in cluster.nodes
    tick(cluster, upgraded + WEEK)
    assert sorted(cluster.nodes) == ["n0"]


@pytest.mark.parametrize("now", [50.0, 5.0])
def test_a_node_that_is_here_or_was_a_moment_ago_is_not_forgotten(now: float):
    cluster = cluster_of("n0", "n1", "n2", "n3")
    if now == 5.0:
        brain.step(cluster, events.LinkLost(NodeId("n1")), now)
    decision = forget(cluster, "n1", now)
    assert not decision.changed
    assert "stop its agent first" in decision.why
    assert "no node is called n9" in forget(cluster, "n9", now).why


def test_a_node_that_a_job_refers_to_is_not_forgotten():
    cluster = cluster_of("n0", "n1", "n2")
    brain.step(cluster, events.Submitted(JobSpec(JOB, "train.py", nodes=2)), 1.0)
    lose(cluster, "n1", 100.0)
    why = forget(cluster, "n1", 200.0).why
    assert "train has a seat, a mirror or a standby on n1" in why
    cluster.jobs[JOB].unsure = state.Unsure(200.0, "the journal is behind")
    lose(cluster, "n2", 300.0)
    assert "they may be there" in forget(cluster, "n2", 400.0).why
    tick(cluster, 300.0 + 2 * WEEK)
    assert sorted(cluster.nodes) == ["n0", "n1", "n2"]


def test_a_job_that_is_over_keeps_nobody():
    cluster = cluster_of("n0", "n1")
    brain.step(cluster, events.Submitted(JobSpec(JOB, "train.py", nodes=2)), 1.0)
    for rank in (0, 1):
        end = wire.Observed(
            NodeId(f"n{rank}"), JOB, Sign.FINISHED, Rank(rank), generation=Generation(1)
        )
        brain.step(cluster, end, 2.0)
    assert cluster.jobs[JOB].state is JobState.FINISHED
    lose(cluster, "n1", 100.0)
    assert forget(cluster, "n1", 200.0).why == "node n1 is forgotten"
    # Its roster still names that node: all that looks at it must do without.
    brain.step(cluster, events.Submitted(JobSpec(JOB, "train.py", nodes=2)), 300.0)
    brain.step(cluster, hello("n1", "another"), 310.0)
    assert cluster.jobs[JOB].state is JobState.STARTING


def test_a_snapshot_is_the_same_after_nodes_are_forgotten():
    cluster, texts = cluster_of("n0", "n1", "n2"), snapshots.Texts()
    texts.of(cluster)
    lose(cluster, "n1", 100.0)
    forget(cluster, "n1", 200.0)
    assert texts.of(cluster).encode() == codec.dumps(state.to_plain(cluster))
    assert NodeId("n1") not in texts._nodes


@in_two_projects
async def test_an_operator_forgets_a_node_and_the_journal_names_who(made: Served):
    made.feed(wire.Hello(NodeId("pod-7"), "127.0.0.1", 1, 1, 2, "boot"))
    status, text = await made.ask("operator", "POST", "/v1/nodes/pod-7/forget", {})
    assert (status, codec.loads(text.encode())["changed"]) == (200, False)
    made.orchestrator.cluster.nodes[NodeId("pod-7")].alive = False
    assert (await made.ask("operatora", "POST", "/v1/nodes/pod-7/forget", {}))[0] == 403
    _, text = await made.ask("operator", "POST", "/v1/nodes/pod-7/forget", {"dry_run": True})
    assert codec.loads(text.encode())["changed"]
    assert NodeId("pod-7") in made.orchestrator.cluster.nodes
    _, text = await made.ask("operator", "POST", "/v1/nodes/pod-7/forget", {})
    assert codec.loads(text.encode())["why"] == ["node pod-7 is forgotten"]
    (entry,) = [
        event
        for body in made.journal.load().entries
        if isinstance(event := events.from_plain(body["event"]), events.ForgetAsked)
    ]
    assert (entry.node, entry.by) == ("pod-7", "operator")
    assert (await made.ask("operator", "POST", "/v1/nodes/pod-7/forget", {}))[0] == 404


def test_the_command_is_there():
    asked = parser().parse_args(["forget", "n3", "--dry-run"])
    assert (asked.run, asked.node, asked.dry_run) == (moves.run_forget, "n3", True)


def test_allowances_of_nodes_that_have_rested_are_not_kept(monkeypatch: pytest.MonkeyPatch):
    now = [1000.0]
    monkeypatch.setattr("keepstep.orchestrator.streams.monotonic", lambda: now[0])
    allowances = Allowances()
    talker = _stream("talker")
    for _ in range(100):
        talker.allowance.take(1000.0, now[0])
    allowances.greet(talker)
    for number in range(3 * ALLOWANCES_MIN):
        now[0] += 0.001 if number <= ALLOWANCES_MIN else 10.0
        assert allowances.greet(_stream(f"pod-{number}"))
        if number == ALLOWANCES_MIN:
            again = _stream("talker")
            allowances.greet(again)
            assert again.allowance is talker.allowance, "a new connection is no way to say more"
    assert len(allowances._known) <= ALLOWANCES_MIN + 2


def _stream(node: str):  # type: ignore[no-untyped-def]
    return type("Stream", (), {"node": NodeId(node), "allowance": Allowance()})()
