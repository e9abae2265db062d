"""Do the raw results of two machines say the same? Neither silence nor failure is agreement."""

from __future__ import annotations

import sys

import pytest

from bench import __main__ as command
from bench import agreement, record
from keepstep.errors import ConfigError
from tests.unit.test_bench_tables import a_result, a_run


def side(*runs, **more):
    """One repetition, times of quiet runs only."""
    return agreement.side_of([a_result(runs, **more)])


def noisy(run):
    return {**run, "others_share": 0.4}


def told(first, second):
    return agreement.verdict(first, second)


def test_two_results_with_the_same_ratios_and_ranking_agree():
    first, second = (
        side(a_run("bare", b), a_run("x", 1.1 * b), a_run("y", y * b))
        for b, y in ((10.0, 2.0), (20.0, 2.2))
    )
    found = told(first, second)
    assert len(found.lines) == 3
    assert all(line.endswith("same") for line in found.lines)
    assert found.code == 0


def test_another_ranking_and_a_ratio_off_by_more_than_15_percent_differ():
    first = side(a_run("bare", 10.0), a_run("x", 11.0), a_run("y", 12.0))
    second = side(a_run("bare", 10.0), a_run("x", 14.0), a_run("y", 12.0))
    found = told(first, second)
    assert len([line for line in found.lines if "DIFFERS" in line]) == 2
    assert found.code == 1


def test_it_does_not_matter_which_machine_is_called_the_first():
    """0.86 of 1 is 14% less, and 1 of 0.86 is 16% more."""
    first, second = (side(a_run("bare", 10.0), a_run("x", t), a_run("y", 20.0)) for t in (10, 8.6))
    assert told(first, second).code == told(second, first).code == 1


def test_systems_that_are_as_fast_as_each_other_have_no_order():
    first = side(a_run("bare", 10.0), a_run("x", 11.0), a_run("y", 11.5))
    second = side(a_run("bare", 10.0), a_run("x", 11.5), a_run("y", 11.0))
    assert told(first, second).code == 0
    apart = side(a_run("bare", 10.0), a_run("x", 12.0), a_run("y", 11.2))
    assert told(first, apart).code == 0, "no order in the first"
    clear = side(a_run("bare", 10.0), a_run("x", 11.0), a_run("y", 12.0))
    assert "ranking x, y: DIFFERS: y, x" in told(clear, apart).lines[-1]


def test_one_system_with_times_is_no_agreement():
    both = side(a_run("bare", 10.0), a_run("x", 11.0), noisy(a_run("y", 12.0)))
    found = told(both, both)
    assert found.lines[0].endswith("x: 1.100 and 1.100 x bare, +0.0%: same")
    assert found.lines[-1].startswith("no agreement: fewer than 2 systems")
    assert found.code == 2


def test_where_no_time_is_known_nothing_agrees():
    arms = [a_run("x", 11.0), a_run("y", 12.0)]
    first = side(a_run("bare", 10.0), *map(noisy, arms))
    second = side(a_run("bare", 10.0), *map(noisy, reversed(arms)))
    found = told(first, second)
    assert sorted(line.partition("x4, ")[2] for line in found.lines[:-1]) == [
        "x: no quiet run in the first and the second: times not compared",
        "y: no quiet run in the first and the second: times not compared",
    ]
    assert found.code == 2


def test_an_arm_without_a_time_in_one_of_them_has_no_place_in_the_ranking():
    first = side(a_run("bare", 10.0), a_run("x", 11.0), a_run("y", 12.0), a_run("z", 13.0))
    second = side(a_run("bare", 10.0), noisy(a_run("x", 19.0)), a_run("y", 12.0), a_run("z", 13.0))
    found = told(first, second)
    assert found.lines[0].endswith("x: no quiet run in the second: times not compared")
    assert found.lines[-1].endswith("ranking y, z: same")
    assert found.code == 0


def test_what_only_one_of_them_has_is_told():
    whole = side(a_run("bare", 10.0), a_run("x", 11.0), a_run("y", 12.0))
    part = side(a_run("bare", 10.0), a_run("x", 11.0), refused={"y": "no replica"})
    assert told(whole, part).lines[1].endswith("y: only in the first: not compared")
    assert told(part, whole).lines[1].endswith("y: only in the second: not compared")
    assert told(whole, part).code == 2


def test_a_system_that_fails_in_one_result_alone_differs_and_failures_alone_do_not_agree():
    good = side(a_run("bare", 10.0), a_run("x", 11.0))
    bad = side(a_run("bare", 10.0), a_run("x", None), a_run("y", None))
    assert any(
        "1 of 1 and 0 of 1 runs completed: DIFFERS" in line for line in told(good, bad).lines
    )
    found = told(bad, bad)
    assert any("0 of 1 and 0 of 1 runs completed: same" in line for line in found.lines)
    assert found.lines[-2].endswith("ranking x, y: same")
    assert found.code == 2
    half = agreement.side_of(
        [a_result((a_run("bare", 10.0), a_run("x", None)), (a_run("bare", 10.0), a_run("x", 11.0)))]
    )
    assert any("1 of 1 and 1 of 2 runs completed: DIFF" in line for line in told(good, half).lines)


def test_of_each_way_to_save_the_best_interval_of_each_machine_is_compared():
    def machine(*times):
        runs = [a_run(f"c:sync@{n}", t) for n, t in zip((5, 20), times, strict=True)]
        return side(a_run("bare", 10.0), a_run("x", 11.0), *runs)

    found = told(machine(14.0, 16.0), machine(19.0, 15.0))
    assert any(
        "c:sync: every 5 steps 1.400 and every 20 steps 1.500 x bare, +7.1%: same" in line
        for line in found.lines
    )
    assert found.code == 0
    apart = agreement.side_of(
        [a_result((a_run("bare", 10.0), a_run(f"c:sync@{n}", 14.0))) for n in (5, 20)]
    )
    (line, _) = told(apart, apart).lines
    assert "intervals that were never run side by side in the first and the second" in line


# --- what may be compared at all ------------------------------------------------------------------


def struck(at, nominal=100.0, **more):
    """A raw result whose arms were to be struck then."""
    runs = [a_run("bare", 10.0), a_run("x", 11.0), a_run("y", 13.0)]
    for run in runs:
        run["planned"] = [{"at": t, "kind": "kill", "rank": 1} for t in at]
        run["nominal_seconds"] = nominal
    return {**a_result(runs), "measure": 2, "seconds": 100.0, **more}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (struck([15.0, 45.0], measure=1), "measure is 1 and 2"),
        (struck([15.0, 45.0], seconds=75.0), "seconds is 100.0 and 75.0"),
        (struck([15.0, 40.0]), "not the same scenario"),
        (struck([15.0]), "not the same scenario"),
        (struck([]), "not the same scenario"),
    ],
)
def test_what_was_not_measured_alike_is_refused(other, said):
    with pytest.raises(ConfigError, match=said):
        agreement.need_same_ground([struck([15.0, 45.0]), other])


def test_a_scenario_that_was_changed_is_refused_by_its_digest():
    one, other, unknown = (struck([15.0]) for _ in range(3))
    one["cases"][0]["scenario_digest"], other["cases"][0]["scenario_digest"] = "aa", "bb"
    agreement.need_same_ground([one, unknown])
    with pytest.raises(ConfigError, match="not the same scenario"):
        agreement.need_same_ground([one, other])


def test_strikes_after_the_end_of_a_shorter_run_and_moved_by_half_a_step_are_no_difference():
    """A run is struck up to three times its length and 90 s."""
    agreement.need_same_ground([struck([40.0]), struck([40.3, 391.0], nominal=100.4)])


# --- the command ----------------------------------------------------------------------------------


def compared(monkeypatch, *results):
    kept = dict(zip("ABC", results, strict=False))
    monkeypatch.setattr(record, "read", lambda path: kept[str(path)])
    monkeypatch.setattr(sys, "argv", ["bench", "compare", "A", ",".join(list(kept)[1:] or "A")])
    return command.main()


def machine(result, boot):
    return {**result, "machine": {**result["machine"], "boot": boot}}


def test_two_disturbed_results_end_with_2(monkeypatch, capsys):
    results = [
        machine(a_result((a_run("bare", 10.0), noisy(a_run("x", 11.0)))), boot) for boot in "ab"
    ]
    assert compared(monkeypatch, *results) == 2
    assert "no agreement" in capsys.readouterr().out


def test_a_file_with_itself_is_no_second_machine(monkeypatch, capsys):
    result = struck([15.0])
    assert compared(monkeypatch, result) == 2
    assert "the same machine and boot: no second machine" in capsys.readouterr().out
    assert compared(monkeypatch, *(machine(result, boot) for boot in "aa")) == 2
    capsys.readouterr()
    assert compared(monkeypatch, *(machine(result, boot) for boot in "ab")) == 0
    assert "no second machine" not in capsys.readouterr().out


def test_several_files_of_a_machine_are_taken_together(monkeypatch, capsys):
    one, other, third = (machine(struck([15.0]), boot) for boot in "abc")
    other["cases"][0]["repetitions"][0].pop()
    assert compared(monkeypatch, one, other) == 2, "only x is in both"
    assert compared(monkeypatch, one, other, third) == 0
