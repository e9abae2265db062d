"""The ground truth of the benches, on small logs made by hand: honest ones, and lies."""

from __future__ import annotations

import json

import pytest

from bench import truth
from bench.workload.order import Order, mark_of, pass_order, whole_windows

ORDER = Order(windows=40, world=2, batch=2, seed=1)
STEPS = 6
SECOND = 1_000_000_000


class Written:
    """Two ranks' files."""

    def __init__(self):
        self.files = {0: [], 1: []}

    def step(self, step, began, ended, *, ranks=(0, 1), contributors=(0, 1), read=None):
        marks = [0, 0]
        for rank in contributors:
            ids = ORDER.ids(step, rank) if read is None else read[rank]
            marks[rank] = mark_of(ids)
        for rank in ranks:
            ids = ORDER.ids(step, rank) if read is None else read[rank]
            line = {"k": "step", "s": step, "b": int(began * SECOND), "t": int(ended * SECOND)}
            self.files[rank].append({**line, "ids": list(ids), "w": marks, "loss": 2.0 + rank})

    def run(self, first=0, past=STEPS, start=0.0):
        """Steps of one second each."""
        for number, step in enumerate(range(first, past)):
            self.step(step, start + number, start + number + 1)

    def end(self, at, ranks=(0, 1), digest="d"):
        for rank in ranks:
            line = {"k": "end", "s": STEPS, "t": int(at * SECOND), "digest": digest}
            self.files[rank].append({**line, "loss": 2.0, "windows": ORDER.windows})

    def found(self, strikes=()):
        logs = truth.Logs()
        for rank, lines in self.files.items():
            logs.add(rank, "".join(json.dumps(line) + "\n" for line in lines))
        return truth.evaluate(logs, truth.Asked(ORDER, STEPS), strikes)


@pytest.fixture
def written():
    return Written()


def test_a_clean_run_loses_doubles_and_recomputes_nothing(written):
    written.run()
    written.end(6.0)
    found = written.found()
    assert (found.steps, found.seconds, found.step_seconds) == (STEPS, 5.0, 1.0)
    assert (found.recomputed, found.lost, found.doubled, found.foreign) == (0, 0, 0, 0)
    assert found.samples == STEPS * 4
    assert found.pauses == ()
    assert found.digests == {0: "d", 1: "d"}


def test_a_rollback_shows_as_recomputed_steps_and_not_as_doubled_samples(written):
    written.run(0, 5)
    written.run(2, STEPS, start=9.0)
    found = written.found([5.2])
    assert found.recomputed == 3
    assert (found.lost, found.doubled) == (0, 0)
    # Further than before only once step 5 is finished: at 13, and 5 was the last before.
    assert found.pauses == pytest.approx([7.0])


def test_a_step_is_finished_when_those_who_have_a_part_in_it_have_written_it(written):
    written.run(0, 2)
    # Rank 1 is away for two steps; the second of them is a slow one.
    written.step(2, 2.0, 3.5, ranks=(0,), contributors=(0,))
    written.step(3, 3.5, 9.5, ranks=(0,), contributors=(0,))
    written.run(4, STEPS, start=9.5)
    found = written.found([2.5])
    assert found.finished[2:4] == pytest.approx((2.5, 8.5)), "since the first one, at 1.0"
    assert found.lost == 4


def test_a_step_of_which_one_contributor_never_wrote_is_finished_by_a_later_one(written):
    written.run(0, 2)
    written.step(2, 2.0, 3.0, ranks=(0,))
    written.run(3, STEPS, start=3.0)
    assert written.found().finished[2] == pytest.approx(3.0), "with step 3, at 4.0"


def test_two_rollbacks_over_the_same_step_count_twice(written):
    written.run(0, 4)
    written.run(3, 4, start=6.0)
    written.run(3, STEPS, start=9.0)
    assert written.found().recomputed == 2


def test_an_attempt_that_was_not_finished_may_be_repeated(written):
    written.run(0, 3)
    # Rank 0 alone had applied step 3 when rank 1 died; all ranks do it again.
    written.step(3, 3.0, 4.0, ranks=(0,))
    written.step(3, 4.5, 5.5)
    written.run(4, STEPS, start=5.5)
    found = written.found([3.9])
    assert (found.recomputed, found.lost, found.doubled) == (0, 0, 0)


def test_a_line_that_a_dying_rank_could_not_write_is_no_loss(written):
    written.run(0, 3)
    # Its gradients are in: the marks of the survivor say so, and the next step proves it.
    written.step(3, 3.0, 4.0, ranks=(0,))
    written.run(4, STEPS, start=5.0)
    found = written.found([3.9])
    assert (found.steps, found.lost, found.recomputed) == (STEPS, 0, 0)


def test_a_step_without_one_rank_loses_that_ranks_samples(written):
    written.run(0, 3)
    written.step(3, 3.0, 4.0, ranks=(0,), contributors=(0,))
    written.run(4, STEPS, start=4.0)
    found = written.found()
    assert found.seconds is not None
    assert (found.lost, found.doubled, found.foreign) == (2, 0, 0)


def test_a_healing_rank_that_writes_a_line_but_adds_nothing_is_a_loss(written):
    written.run(0, 3)
    written.step(3, 3.0, 4.0, contributors=(0,))
    written.run(4, STEPS, start=4.0)
    assert written.found().lost == 2


def test_a_sample_used_again_is_doubled_and_the_one_in_its_place_is_lost(written):
    written.run(0, 3)
    written.step(3, 3.0, 4.0, read={0: ORDER.ids(2, 0), 1: ORDER.ids(3, 1)})
    written.run(4, STEPS, start=4.0)
    found = written.found()
    assert (found.lost, found.doubled, found.foreign) == (2, 2, 0)


def test_a_log_that_claims_other_samples_than_the_gradients_hold_is_caught(written):
    written.run()
    liar = next(line for line in written.files[0] if line["s"] == 4)
    for lines in written.files.values():
        next(line for line in lines if line["s"] == 4)["w"] = [12345, ORDER.mark(4, 1)]
    assert liar["ids"] == list(ORDER.ids(4, 0))
    found = written.found()
    assert (found.lost, found.foreign) == (2, 2)


def test_ranks_that_saw_different_gradients_disagree(written):
    written.run()
    next(line for line in written.files[1] if line["s"] == 4)["w"] = [ORDER.mark(4, 0), 0]
    assert written.found().disagreements == 1


def test_a_missing_step_ends_the_run_there(written):
    written.run(0, 3)
    found = written.found()
    assert (found.steps, found.seconds, found.loss) == (3, None, None)
    assert found.lost == 12


def test_an_end_proves_the_last_step_where_a_rank_wrote_nothing(written):
    written.run(0, 5)
    written.step(5, 5.0, 6.0, ranks=(0,))
    assert written.found().seconds is None
    written.end(6.1, ranks=(0,))
    found = written.found()
    assert found.seconds == pytest.approx(5.1)
    assert found.lost == 0, "its gradient is in"


def test_the_loss_at_the_end_is_that_of_all_ranks_or_of_none(written):
    written.run()
    assert written.found().loss == 2.5
    last = written.files[1][-1]
    # Others had finished it: this rank did not see the gradient, and tells of the step before.
    last["w"] = []
    written.end(6.1)
    assert written.found().loss is None
    last["w"] = [ORDER.mark(5, 0), 0]
    assert written.found().loss is None, "its samples are not in it"
    written.files[1].remove(last)
    found = written.found()
    assert (found.steps, found.loss) == (STEPS, None)


def test_what_a_rank_does_after_the_first_end_is_no_part_of_the_run(written):
    written.run()
    written.end(6.0, ranks=(0,))
    # Started anew while the others were leaving: it found nobody and began from the top, alone.
    written.step(0, 7.0, 8.0, ranks=(1,), contributors=(1,))
    found = written.found()
    assert (found.recomputed, found.lost, found.disagreements) == (0, 0, 0)


def test_a_line_cut_short_is_counted_and_not_guessed_at():
    logs = truth.Logs()
    logs.add(
        0, '{"k":"start","pid":7,"host":"a","t":1}\n{"k":"step","s":3,"b"\n\n{"k":"other","t":1}\n'
    )
    assert (len(logs.starts), logs.lines, logs.torn) == (1, [], 2)


def test_a_pause_is_the_longest_standstill_less_a_step():
    times = [0.0, 1.0, 2.0, 6.0, 7.0, 8.0, 10.5, 11.5]
    assert truth.pauses(times, [2.5, 8.5], 1.0) == pytest.approx([3.0, 1.5])


def test_a_longer_pause_does_not_hide_the_one_before_it():
    times = [0.0, 1.0, 2.0, 4.5, 5.5, 6.5, 11.5, 12.5]
    assert truth.pauses(times, [2.5, 7.0], 1.0) == pytest.approx([1.5, 4.0])


def test_a_step_that_was_late_before_the_next_strike_is_one_pause_with_it():
    times = [0.0, 1.0, 2.0, 3.0, 13.0, 14.0]
    assert truth.pauses(times, [1.5, 9.0], 1.0) == pytest.approx([9.0])


def test_one_standstill_over_two_strikes_is_one_pause():
    assert truth.pauses([0.0, 1.0, 9.0, 10.0], [1.5, 4.0], 1.0) == pytest.approx([7.0])


def test_steps_near_a_strike_are_not_steady():
    times = [float(t) for t in range(40)] + [45.0]
    assert truth.steady_step(times, [39.5]) == 1.0
    assert truth.steady_step([0.0, 3.0], [1.0]) == 3.0
    assert truth.steady_step([], []) == 0.0


# --- the order of samples -------------------------------------------------------------------------


def test_every_sample_of_a_pass_belongs_to_exactly_one_step_and_rank():
    ids = [i for s in range(20) for r in range(2) for i in ORDER.ids(s, r)]
    assert ORDER.steps_per_pass == 10
    assert sorted(ids) == list(range(80))
    assert [i % 40 for i in ids[:40]] != [i % 40 for i in ids[40:]]


def test_a_pass_holds_whole_steps_only():
    assert whole_windows(characters=1001, context=10, world=4, batch=3) == 96
    assert sorted(pass_order(3, 0, 10)) == list(range(10))


def test_a_mark_is_never_nothing_and_fits_into_a_float():
    marks = {ORDER.mark(s, r) for s in range(500) for r in range(2)}
    assert min(marks) >= 1
    assert max(marks) < 1 << 24
