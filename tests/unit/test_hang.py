"""The hang detector's pure half: who stands still, and who only seems to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.detect import hang
from keepstep.model import Policy
from keepstep.page import Mark, Progress

POLICY = Policy(hang_seconds_min=4.0, hang_steps=4.0, startup_seconds_max=600.0)
PERIOD = 0.1


def reading(
    mark: Mark = Mark.FORWARD,
    step: int = 7,
    *,
    launched: int = 0,
    busy_until: float = 0.0,
    step_seconds: float = 0.0,
    generation: int = 1,
) -> Progress:
    return Progress(
        pid=1,
        generation=generation,
        step=step,
        mark=mark,
        launched=launched,
        busy_until_ns=int(busy_until * 1e9),
        committed=step - 1,
        step_ns=int(step_seconds * 1e9),
        busy="",
    )


def watched(readings: list[Progress], *, start: float = 1000.0) -> list[tuple[float, bool]]:
    """Feed one rank's readings, one per period; (time, stalled) for each."""
    watches: dict[int, hang.Watch] = {}
    told = []
    for index, one in enumerate(readings):
        now = start + index * PERIOD
        verdict = hang.judge(watches, {0: one}, now, POLICY)
        watches = dict(verdict.watches)
        told.append((now - start, bool(verdict.stalls)))
    return told


def first_alarm(readings: list[Progress]) -> float | None:
    return next((at for at, stalled in watched(readings) if stalled), None)


def test_a_still_rank_is_stalled_after_the_shortest_time_and_not_before():
    at = first_alarm([reading()] * 100)
    assert at is not None
    assert 4.0 <= at < 4.0 + 2 * PERIOD


def test_long_steps_are_given_their_time():
    at = first_alarm([reading(step_seconds=2.0)] * 100)
    assert at is not None
    assert 8.0 <= at < 8.0 + 2 * PERIOD


def test_a_launched_collective_is_progress():
    assert first_alarm([reading(launched=n // 30) for n in range(300)]) is None


def test_declared_slowness_is_no_hang_and_counts_from_its_end():
    busy = [reading(Mark.APPLIED, busy_until=1000.0 + 60.0)] * 700
    at = first_alarm(busy)
    assert at is not None
    assert 64.0 - PERIOD <= at <= 64.0 + 2 * PERIOD


def test_the_time_of_a_declaration_that_was_taken_back_does_not_count():
    busy = [reading(Mark.APPLIED, busy_until=1000.0 + 3600.0)] * 600
    assert first_alarm(busy + [reading(Mark.APPLIED)] * 35) is None


def test_a_starting_rank_has_the_startup_time():
    watches = hang.judge({}, {0: reading(Mark.STARTING)}, 0.0, POLICY).watches
    assert not hang.judge(watches, {0: reading(Mark.STARTING)}, 599.0, POLICY).stalls
    assert hang.judge(watches, {0: reading(Mark.STARTING)}, 600.0, POLICY).stalls


@given(mark=st.sampled_from([Mark.RECOVERING, Mark.FINISHED]), seconds=st.floats(0, 1e6))
def test_recovering_and_finished_ranks_are_never_stalled(mark: Mark, seconds: float):
    watches = hang.judge({}, {0: reading(mark)}, 0.0, POLICY).watches
    assert hang.judge(watches, {0: reading(mark)}, seconds, POLICY).stalls == ()


def test_all_still_ranks_are_named_and_the_moving_one_is_not():
    still = {rank: reading() for rank in range(4)}
    watches = hang.judge({}, still, 0.0, POLICY).watches
    moved = {**still, 2: reading(step=8)}
    stalls = hang.judge(watches, moved, 5.0, POLICY).stalls
    assert [stall.rank for stall in stalls] == [0, 1, 3]
    assert stalls[0].why == "rank 0 has been in FORWARD of step 7 for 5.0 s; 4.0 s are allowed"


def test_time_in_which_the_probe_did_not_run_is_not_held_against_the_ranks():
    watches = hang.judge({}, {0: reading()}, 100.0, POLICY).watches
    late = hang.lateness(due=100.1, now=160.1)
    assert late == 60.0
    watches = hang.discount(watches, late)
    assert not hang.judge(watches, {0: reading()}, 160.1, POLICY).stalls
    assert hang.judge(watches, {0: reading()}, 164.1, POLICY).stalls


@given(late=st.floats(-10.0, hang.LATE_SECONDS_MAX))
def test_ordinary_delays_are_not_discounted(late: float):
    assert hang.lateness(due=0.0, now=late) == 0.0


@given(
    gaps=st.lists(st.floats(0.01, 3.9), min_size=1, max_size=60),
    step_seconds=st.floats(0.0, 100.0),
)
def test_a_rank_that_moves_faster_than_its_patience_never_alarms(
    gaps: list[float], step_seconds: float
):
    watches: dict[int, hang.Watch] = {}
    now = 0.0
    for step, gap in enumerate(gaps):
        verdict = hang.judge(
            watches, {0: reading(step=step, step_seconds=step_seconds)}, now, POLICY
        )
        assert verdict.stalls == ()
        watches = dict(verdict.watches)
        now += gap


@given(
    step_seconds=st.floats(0.0, 50.0),
    mark=st.sampled_from([Mark.FORWARD, Mark.GRADS_READY, Mark.APPLIED]),
)
def test_a_hang_is_named_within_its_time(step_seconds: float, mark: Mark):
    still = reading(mark, step_seconds=step_seconds)
    patience = hang.patience(still, POLICY)
    assert patience is not None
    assert patience <= max(5.0, 5 * step_seconds), "the promise, before the settling time"
    watches = hang.judge({}, {0: still}, 0.0, POLICY).watches
    assert hang.judge(watches, {0: still}, patience + 1e-6, POLICY).stalls


def test_a_rank_that_is_gone_is_forgotten():
    watches = hang.judge({}, {0: reading(), 1: reading()}, 0.0, POLICY).watches
    assert set(hang.judge(watches, {1: reading()}, 1.0, POLICY).watches) == {1}


def test_the_verdict_says_when_the_first_patience_ends():
    """The agent looks twice a second, and once more exactly then."""
    watches = {0: hang.Watch((1, 7, int(Mark.FORWARD), 0), 100.0)}
    readings = {0: reading(), 1: reading(step_seconds=3.0), 2: reading(Mark.RECOVERING)}
    verdict = hang.judge(watches, readings, 103.0, POLICY)
    assert (verdict.stalls, verdict.due) == ((), 104.0)
    stalled = hang.judge(verdict.watches, readings, 104.0, POLICY)
    # Rank 0 is told now; the next to run out is rank 1, first seen at 103, with steps of 3 s.
    assert [stall.rank for stall in stalled.stalls] == [0]
    assert stalled.due == 103.0 + 4 * 3.0


def test_nobody_to_wait_for_has_no_end():
    verdict = hang.judge({}, {0: reading(Mark.RECOVERING)}, 10.0, POLICY)
    assert verdict.due == float("inf")
