"""One budget, derived from the job's own pace and links."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep import wire
from keepstep.model import JobId, JobSpec, JobState, Move, NodeId, Phase, Policy, Rank, Sign
from keepstep.orchestrator import brain, budgets, events, roster, state

JOB = JobId("train")


def started(step_seconds: float = 0.0, **policy: float) -> state.Cluster:
    """Three ranks and a standby; the first step is made if it has a duration."""
    cluster = state.new_cluster("test")
    for i in range(4):
        brain.step(cluster, wire.Hello(NodeId(f"n{i}"), f"a{i}", 2, 1, 2, "b"), 0.0)
    spec = JobSpec(JOB, "train.py", nodes=3, spares=1, policy=Policy(**policy))  # type: ignore[arg-type]
    brain.step(cluster, events.Submitted(spec), 0.0)
    if step_seconds:
        report(cluster, Phase.RESUME, 1, step_seconds)
        assert cluster.jobs[JOB].state is JobState.RUNNING
    return cluster


def report(
    cluster: state.Cluster,
    phase: Phase,
    now: float,
    *step_seconds: float,
    moved: tuple[int, float] = (0, 0.0),
    only: tuple[int, ...] = (0, 1, 2),
) -> None:
    job = cluster.jobs[JOB]
    assert job.roster is not None
    fresh = job.migration.fresh if job.migration else {}
    for rank in only:
        seat = job.roster.seats[rank]
        pace = step_seconds[rank % len(step_seconds)] if step_seconds else 0.0
        full = wire.SeatReport(
            seat.rank, 5, True, {"0-2": "d"}, entries=(5,), state_bytes=8000, step=5,
            step_seconds=pace,
            moved_bytes=moved[0], moved_seconds=moved[1],
        )  # fmt: skip
        said = wire.SeatReport(seat.rank) if rank in fresh else full
        brain.step(cluster, wire.PhaseReport(seat.node, JOB, job.generation, phase, (said,)), now)


def kill(cluster: state.Cluster, rank: int, now: float) -> None:
    job = cluster.jobs[JOB]
    assert job.roster is not None
    seat = job.roster.seats[rank]
    brain.step(
        cluster, wire.Observed(seat.node, JOB, Sign.EXIT, seat.rank, seat.incarnation, step=5), now
    )


def due(cluster: state.Cluster) -> float:
    found = brain.due(cluster)
    assert found is not None
    return found


def test_before_the_first_step_the_start_up_time_counts():
    cluster = started()
    assert cluster.jobs[JOB].step_seconds == 0.0
    assert budgets.pace(cluster.jobs[JOB]).seconds == Policy().startup_seconds_max


def test_the_first_step_is_the_first_pace():
    cluster = started(3.0)
    assert budgets.pace(cluster.jobs[JOB]).seconds == 30.0


def test_the_first_rank_that_made_its_first_step_sets_the_pace():
    cluster = started()
    report(cluster, Phase.RESUME, 1.0, 3.0, only=(1,))
    assert budgets.pace(cluster.jobs[JOB]).seconds == 30.0
    report(cluster, Phase.RESUME, 1.0, 4.0, only=(0, 2))
    assert budgets.pace(cluster.jobs[JOB]).seconds == 40.0


def test_ranks_that_all_hang_in_their_start_are_started_anew_after_one_start_up_time():
    cluster = started(startup_seconds_max=100.0)
    kill(cluster, 1, 10.0)
    assert brain.step(cluster, events.Tick(), 109.0).orders == ()
    decision = brain.step(cluster, events.Tick(), 110.1)
    assert "restart: no step was made yet" in decision.why
    assert {type(order.action).__name__ for order in decision.orders} >= {"StartWorkers"}


def test_short_steps_get_the_least_that_a_loaded_machine_needs():
    cluster = started(0.01)
    assert budgets.pace(cluster.jobs[JOB]).seconds == 5.0


def test_the_slowest_rank_of_the_newest_reports_sets_the_pace():
    cluster = started(30.0)
    kill(cluster, 1, 10.0)
    report(cluster, Phase.QUIESCE, 11.0, 0.5, 0.0, 2.0)
    assert cluster.jobs[JOB].step_seconds == 2.0


def test_a_joiners_first_step_says_nothing_about_the_pace():
    cluster = started(2.0)
    kill(cluster, 1, 10.0)
    report(cluster, Phase.QUIESCE, 11.0, 2.0)
    report(cluster, Phase.VERIFY, 12.0)
    report(cluster, Phase.RESUME, 13.0, 2.0, 90.0, 2.0)
    assert cluster.jobs[JOB].state is JobState.RUNNING
    assert cluster.jobs[JOB].step_seconds == 2.0


def test_steps_that_have_become_longer_count_before_all_have_reported():
    cluster = started(1.0)
    kill(cluster, 1, 10.0)
    assert due(cluster) == 20.0
    report(cluster, Phase.QUIESCE, 11.0, 60.0, only=(0,))
    assert due(cluster) == 10.0 + 600.0


def test_a_start_from_the_top_forgets_the_pace():
    cluster = started(1.0)
    for rank in range(3):
        kill(cluster, rank, 10.0)
    job = cluster.jobs[JOB]
    assert job.migration is not None
    assert job.migration.cold
    assert job.step_seconds == 0.0


def test_bandwidth_is_assumed_until_a_transfer_was_measured():
    cluster = started(0.1)
    job = cluster.jobs[JOB]
    assert budgets.moving(job, 100_000_000).seconds == 5.0 + 2.0
    kill(cluster, 1, 10.0)
    report(cluster, Phase.QUIESCE, 11.0, 0.1)
    report(cluster, Phase.VERIFY, 12.0, moved=(8000, 0.004))
    assert job.bytes_per_second == pytest.approx(2e6)
    assert budgets.moving(job, 100_000_000).seconds == pytest.approx(5.0 + 100.0)
    assert "measured 2 MB/s" in budgets.moving(job, 1).why


def test_the_slowest_receiver_is_the_bandwidth():
    cluster = started(0.1)
    kill(cluster, 1, 10.0)
    report(cluster, Phase.QUIESCE, 11.0, 0.1)
    report(cluster, Phase.VERIFY, 12.0, moved=(8000, 0.004), only=(0,))
    report(cluster, Phase.VERIFY, 12.0, moved=(8000, 0.008), only=(1,))
    report(cluster, Phase.VERIFY, 12.0, only=(2,))
    assert cluster.jobs[JOB].bytes_per_second == pytest.approx(1e6)


@given(st.floats(0.001, 1000.0), st.integers(0, 10**12), st.floats(1e3, 1e11))
def test_more_steps_more_bytes_and_slower_links_get_more_time(step, size, rate):
    job = state.Job(JobSpec(JOB, "t.py"), JobState.RUNNING, 0.0, step_seconds=step)
    job.bytes_per_second = rate
    budget = budgets.moving(job, size).seconds
    assert budget == pytest.approx(max(5.0, 10 * step) + size / (rate / 2))
    job.step_seconds *= 2
    assert budgets.moving(job, size).seconds >= budget
    job.bytes_per_second /= 2
    assert budgets.moving(job, size + 1).seconds >= budget


def test_one_source_for_many_is_the_busiest():
    r = Rank
    alone = [Move(r(target), (r(0),)) for target in (1, 2, 3)]
    assert roster.bytes_through_busiest(alone, 1000) == 3000
    striped = [Move(r(4), (r(0), r(1), r(2), r(3)))]
    assert roster.bytes_through_busiest(striped, 1000) == 1000
    waves = [Move(r(1), (r(0),)), Move(r(2), (r(0), r(1)), wave=1)]
    assert roster.bytes_through_busiest(waves, 1000) == 2000
    assert roster.bytes_through_busiest([], 1000) == 0


# ---------------------------------------------------------------- whose lateness it is


def test_nobody_is_blamed_for_what_our_own_loop_slept_through():
    cluster = started(0.1)
    kill(cluster, 1, 10.0)
    report(cluster, Phase.QUIESCE, 10.5, 0.1, only=(0, 1))
    # 2 s of its 5 s were over when our loop stopped for a minute.
    decision = brain.step(cluster, events.Tick(late_seconds=60.0), 72.0)
    assert decision.orders == ()
    assert decision.changed
    assert due(cluster) == pytest.approx(75.0)
    decision = brain.step(cluster, events.Tick(), 75.1)
    assert "rank 2 did not report quiesce in time: replaced" in decision.why


def test_time_that_our_own_loop_slept_is_on_record():
    cluster = started(0.1)
    kill(cluster, 1, 10.0)
    brain.step(cluster, events.Tick(late_seconds=60.0), 72.0)
    report(cluster, Phase.QUIESCE, 73.0, 0.1)
    incident = cluster.jobs[JOB].incident
    assert incident is not None
    assert incident.seconds["late"] == pytest.approx(60.0)
    assert sum(incident.seconds.values()) == pytest.approx(63.0)


def test_a_node_is_not_given_up_for_what_our_own_loop_slept_through():
    cluster = started(0.1)
    brain.step(cluster, events.LinkLost(NodeId("n1")), 10.0)
    assert "lost" not in brain.step(cluster, events.Tick(late_seconds=60.0), 71.0).why
    assert "n1 is lost" in brain.step(cluster, events.Tick(), 75.0).why
