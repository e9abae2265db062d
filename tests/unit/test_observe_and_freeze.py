"""Two ways of doing nothing: a job that is only observed, and a cluster that is frozen."""

from __future__ import annotations

import pytest

from keepstep import wire
from keepstep.model import (
    Generation,
    JobId,
    JobSpec,
    JobState,
    Mode,
    NodeId,
    Phase,
    Policy,
    Rank,
    Sign,
    Term,
)
from keepstep.orchestrator import brain, events, state, view

JOB = JobId("train")


def running(mode: Mode = Mode.ACT, nodes: int = 3, spares: int = 1) -> state.Cluster:
    cluster = state.new_cluster("test")
    for i in range(nodes + 1):
        brain.step(cluster, wire.Hello(NodeId(f"n{i}"), f"a{i}", 2, 1, 2, "b"), 0.0)
    spec = JobSpec(JOB, "train.py", nodes=nodes, spares=spares, policy=Policy(mode))
    brain.step(cluster, events.Submitted(spec), 0.0)
    report(cluster, Phase.RESUME, 1.0)
    assert cluster.jobs[JOB].state is JobState.RUNNING
    return cluster


def report(cluster: state.Cluster, phase: Phase, now: float) -> list[wire.Order]:
    job = cluster.jobs[JOB]
    assert job.roster is not None
    fresh = dict(job.migration.fresh) if job.migration else {}
    orders: list[wire.Order] = []
    for seat in job.roster.seats:
        full = wire.SeatReport(
            seat.rank, 5, True, {"0-2": "d"}, entries=(5,), step=5, step_seconds=0.1
        )
        said = wire.SeatReport(seat.rank) if seat.rank in fresh else full
        told = wire.PhaseReport(seat.node, JOB, job.generation, phase, (said,))
        orders += brain.step(cluster, told, now).orders
    return orders


def seen(cluster: state.Cluster, rank: int, sign: Sign, code: int = 0) -> wire.Observed:
    job = cluster.jobs[JOB]
    assert job.roster is not None
    seat = job.roster.seats[rank]
    trace = "Traceback …\nValueError: bad batch" if sign is Sign.EXCEPTION else ""
    return wire.Observed(
        seat.node, JOB, sign, seat.rank, seat.incarnation, job.generation, 5, code, trace
    )


def kinds(decision: brain.Decision) -> set[str]:
    return {type(order.action).__name__ for order in decision.orders}


# ---------------------------------------------------------------- observe


def test_a_death_ends_an_observed_job_and_says_what_would_have_been_done():
    cluster = running(Mode.OBSERVE)
    decision = brain.step(cluster, seen(cluster, 2, Sign.EXIT, -9), 5.0)
    job = cluster.jobs[JOB]
    assert (job.state, job.exit_code) == (JobState.FAILED, 1)
    assert kinds(decision) == {"Stop"}
    assert "exited with signal 9" in job.detail
    assert "observe: would migrate rank 2 to the warming standby on n3 slot 0" in job.detail
    (incident,) = cluster.closed
    assert incident.outcome == "failed"
    assert incident.causes[0].rank == 2


def test_an_observed_jobs_own_traceback_comes_first():
    cluster = running(Mode.OBSERVE)
    brain.step(cluster, seen(cluster, 1, Sign.EXCEPTION, 1), 5.0)
    lines = cluster.jobs[JOB].detail.splitlines()
    assert lines[1] == "ValueError: bad batch"
    assert "observe: would" in lines[-1]


def test_finding_out_what_would_be_done_changes_nothing_else():
    cluster = running(Mode.OBSERVE)
    hang = seen(cluster, 1, Sign.HANG)
    before = state.to_plain(cluster)
    decision = brain.step(cluster, hang, 5.0)
    assert "observe: would kill rank 1 and migrate rank 1" in decision.why
    assert decision.orders == ()
    after = state.to_plain(cluster)
    assert after["jobs"][JOB].pop("observed").keys() == {"rank 1 on n1 hangs: "}
    assert before["jobs"][JOB].pop("observed") == {}
    assert after == before


def test_the_same_hang_is_told_once_and_another_one_again():
    cluster = running(Mode.OBSERVE)
    hang = seen(cluster, 1, Sign.HANG)
    assert brain.step(cluster, hang, 5.0).notes
    for now in range(6, 60, 10):
        assert not brain.step(cluster, hang, float(now)).notes
    assert brain.step(cluster, seen(cluster, 2, Sign.HANG), 60.0).notes
    assert brain.step(cluster, hang, 200.0).notes, "long after: that is another occurrence"


def test_an_observed_job_waits_for_its_first_step_however_long_it_takes():
    cluster = state.new_cluster("test")
    brain.step(cluster, wire.Hello(NodeId("n0"), "a", 2, 1, 2, "b"), 0.0)
    policy = Policy(Mode.OBSERVE, startup_seconds_max=10.0)
    brain.step(cluster, events.Submitted(JobSpec(JOB, "t.py", policy=policy)), 0.0)
    told = [brain.step(cluster, events.Tick(), float(now)).notes for now in range(1, 30)]
    assert cluster.jobs[JOB].state is JobState.STARTING
    assert sum(map(len, told)) == 2, "once for each time that the budget has passed"


def test_a_drain_of_an_observed_job_says_why_the_node_does_not_empty():
    cluster = running(Mode.OBSERVE)
    decision = brain.step(cluster, events.DrainAsked(NodeId("n1"), "patches"), 5.0)
    assert "observe: would move rank 1 to" in decision.why
    assert decision.orders == ()
    (wish,) = view.job_view(cluster, cluster.jobs[JOB], 5.0)["leaving"]
    assert "mode = observe" in wish["waits"]
    assert not brain.step(cluster, events.Tick(), 6.0).notes, "and says it once"


# ---------------------------------------------------------------- freeze


def freeze(cluster: state.Cluster, now: float) -> None:
    assert brain.step(cluster, events.FreezeAsked("a switch"), now).changed


@pytest.mark.parametrize("sign", [Sign.EXIT, Sign.EXCEPTION, Sign.HANG, Sign.STORE_LOST])
def test_whatever_is_seen_while_frozen_is_only_recorded(sign: Sign):
    cluster = running()
    freeze(cluster, 5.0)
    decision = brain.step(cluster, seen(cluster, 0, sign, -9), 6.0)
    assert decision.changed
    assert decision.orders == ()
    for now in range(7, 2000, 100):
        assert brain.step(cluster, events.Tick(), float(now)).orders == ()
    assert brain.due(cluster) is None, "nothing waits for time"
    assert cluster.jobs[JOB].generation == 1
    assert brain.step(cluster, events.UnfreezeAsked(), 3000.0).orders


def test_nodes_that_fall_silent_while_frozen_are_given_up_only_long_after():
    cluster = running()
    freeze(cluster, 5.0)
    for i in range(4):
        brain.step(cluster, events.LinkLost(NodeId(f"n{i}")), 6.0)
        brain.step(cluster, events.NodeSilent(NodeId(f"n{i}")), 9.0)
    brain.step(cluster, events.Tick(), 500.0)
    brain.step(cluster, events.UnfreezeAsked(), 1000.0)
    brain.step(cluster, events.Tick(), 1005.0)
    assert all(node.alive for node in cluster.nodes.values())
    assert cluster.jobs[JOB].state is JobState.RUNNING
    worker = wire.WorkerFact(JOB, Rank(0), 0, 0, Generation(1))
    hello = wire.Hello(NodeId("n0"), "a0", 2, 1, 2, "b", (worker,))
    brain.step(cluster, hello, 1006.0)
    brain.step(cluster, events.Tick(), 1030.0)
    assert cluster.self_doubt, "three of four did not come back: the fault may be ours"
    fact = wire.StallFact(Rank(0), 0, 5, 3, False)
    brain.step(cluster, wire.Stalled(NodeId("n0"), JOB, Generation(1), (fact,), 4.0), 1031.0)
    brain.step(cluster, events.Tick(), 1031.1)
    alive = [name for name, node in cluster.nodes.items() if node.alive]
    assert alive == ["n0"], "those who did not come back are lost after all"


def test_two_ranks_that_raise_while_frozen_do_not_end_the_job():
    cluster = running()
    freeze(cluster, 5.0)
    brain.step(cluster, seen(cluster, 1, Sign.EXCEPTION, 1), 6.0)
    brain.step(cluster, seen(cluster, 2, Sign.EXCEPTION, 1), 6.0)
    assert cluster.jobs[JOB].state is JobState.MIGRATING


def test_a_budget_goes_on_after_a_freeze_with_what_was_left_of_it():
    cluster = running()
    brain.step(cluster, seen(cluster, 1, Sign.EXIT, -9), 10.0)
    freeze(cluster, 13.0)
    brain.step(cluster, events.UnfreezeAsked(), 1000.0)
    job = cluster.jobs[JOB]
    assert job.migration is not None
    assert job.migration.phase is Phase.QUIESCE
    assert job.migration.phase_at == pytest.approx(997.0)
    incident = job.incident
    assert incident is not None
    assert incident.seconds["frozen"] == pytest.approx(987.0)
    # Agents may have to come back first: nobody is late before they had time to.
    assert brain.step(cluster, events.Tick(), 1009.9).orders == ()
    assert "did not report quiesce" in brain.step(cluster, events.Tick(), 1010.1).why


def test_after_a_change_of_leader_nobody_is_late_before_agents_had_time_to_come():
    cluster = running()
    brain.step(cluster, seen(cluster, 1, Sign.EXIT, -9), 10.0)
    # Nobody led for a minute: the survivors' reports reached nobody.
    brain.step(cluster, events.TermBegan(Term(2)), 70.0)
    assert "did not report" not in brain.step(cluster, events.Tick(), 70.1).why
    assert brain.due(cluster) is not None


def test_a_job_that_is_submitted_while_frozen_starts_afterwards():
    cluster = state.new_cluster("test")
    freeze(cluster, 0.0)
    brain.step(cluster, wire.Hello(NodeId("n0"), "a", 2, 1, 2, "b"), 1.0)
    decision = brain.step(cluster, events.Submitted(JobSpec(JOB, "t.py")), 2.0)
    assert decision.orders == ()
    assert "starts after `keepstep unfreeze`" in decision.why
    assert kinds(brain.step(cluster, events.UnfreezeAsked(), 3.0)) == {"StartWorkers"}


def test_the_first_step_counts_while_frozen_and_no_standby_is_started():
    cluster = running(spares=0)
    job = cluster.jobs[JOB]
    brain.step(cluster, seen(cluster, 1, Sign.EXIT, -9), 10.0)
    report(cluster, Phase.QUIESCE, 11.0)
    report(cluster, Phase.VERIFY, 12.0)
    freeze(cluster, 13.0)
    assert report(cluster, Phase.RESUME, 14.0) == []
    assert job.state is JobState.RUNNING


def test_a_save_is_obeyed_while_frozen():
    cluster = running()
    freeze(cluster, 5.0)
    brain.step(cluster, events.StopAsked(JOB, "SIGTERM", save=True), 6.0)
    report(cluster, Phase.QUIESCE, 7.0)
    report(cluster, Phase.SAVE, 8.0)
    assert cluster.jobs[JOB].state is JobState.SAVED
