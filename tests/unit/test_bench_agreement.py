"""Do two raw results of the benches say the same? Silence is no agreement."""

from __future__ import annotations

import sys

from bench import __main__ as command
from bench import agreement, record, tables
from tests.unit.test_bench_tables import a_result, a_run


def known(*runs):
    """One repetition, times of quiet runs only."""
    return tables.groups([a_result(runs)], tables.Times.QUIET)


def noisy(run):
    return {**run, "others_share": 0.4}


def test_two_results_with_the_same_ratios_and_ranking_agree():
    first, second = (
        known(a_run("bare", b), a_run("x", 1.1 * b), a_run("y", y * b))
        for b, y in ((10.0, 2.0), (20.0, 2.2))
    )
    lines = agreement.compared(first, second)
    assert len(lines) == 3
    assert all(line.endswith("same") for line in lines)
    assert agreement.verdict(lines) == 0


def test_another_ranking_and_a_ratio_off_by_more_than_15_percent_differ():
    first = known(a_run("bare", 10.0), a_run("x", 11.0), a_run("y", 12.0))
    second = known(a_run("bare", 10.0), a_run("x", 14.0), a_run("y", 12.0))
    lines = agreement.compared(first, second)
    assert len([line for line in lines if "DIFFERS" in line]) == 2
    assert agreement.verdict(lines) == 1


def test_where_no_time_is_known_nothing_agrees():
    arms = [a_run("x", 11.0), a_run("y", 12.0)]
    first = known(a_run("bare", 10.0), *map(noisy, arms))
    second = known(a_run("bare", 10.0), *map(noisy, reversed(arms)))
    lines = agreement.compared(first, second)
    assert sorted(line.partition("x4, ")[2] for line in lines) == [
        "x: no quiet run in the first and the second: times not compared",
        "y: no quiet run in the first and the second: times not compared",
    ]
    assert agreement.verdict(lines) == 2


def test_an_arm_without_a_time_in_one_of_them_has_no_place_in_the_ranking():
    first = known(a_run("bare", 10.0), a_run("x", 11.0), a_run("y", 12.0), a_run("z", 13.0))
    second = known(a_run("bare", 10.0), noisy(a_run("x", 19.0)), a_run("y", 12.0), a_run("z", 13.0))
    lines = agreement.compared(first, second)
    assert lines[0].endswith("x: no quiet run in the second: times not compared")
    assert lines[-1].endswith("ranking bare, y, z: same")
    assert agreement.verdict(lines) == 0


def test_a_system_that_fails_in_one_result_alone_differs():
    def told(first, second):
        return agreement.compared(first, second)

    good = known(a_run("bare", 10.0), a_run("x", 11.0))
    bad = known(a_run("bare", 10.0), a_run("x", None))
    assert any("1 of 1 and 0 of 1 runs completed: DIFFERS" in line for line in told(good, bad))
    assert any("0 of 1 and 0 of 1 runs completed: same" in line for line in told(bad, bad))
    assert told(bad, bad)[-1].endswith("ranking bare, x: same")
    half = tables.groups(
        [a_result((a_run("bare", 10.0), a_run("x", None)), (a_run("bare", 10.0), a_run("x", 11.0)))]
    )
    assert any("1 of 1 and 1 of 2 runs completed: DIFF" in line for line in told(good, half))
    gone = tables.groups([a_result((a_run("bare", 10.0),), refused={"x": "no replica"})])
    assert told(good, gone) == []


def test_two_disturbed_results_end_with_2(monkeypatch, capsys):
    result = a_result((a_run("bare", 10.0), noisy(a_run("x", 11.0))))
    monkeypatch.setattr(record, "read", lambda path: result)
    monkeypatch.setattr(sys, "argv", ["bench", "compare", "A", "B"])
    assert command.main() == 2
    assert "nothing could be compared" in capsys.readouterr().out
