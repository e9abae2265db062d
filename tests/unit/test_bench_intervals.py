"""Which interval between saves stands for a system: only what ran side by side can be compared."""

from __future__ import annotations

from bench import campaign, readme
from tests.unit.test_bench_tables import a_result, a_run


def noisy(run):
    return {**run, "others_share": 0.4}


def runs_of(bare, times):
    return [a_run("bare", bare), *(a_run(f"c:sync@{n}", t) for n, t in times)]


def shown(*results):
    text = readme.markdown(list(results), ["f"] * len(results))
    return {line.split(" | ")[0][2:] for line in text.splitlines() if line.startswith("| c:")}, text


def test_intervals_of_different_files_have_not_been_compared_and_are_all_shown():
    slow, fast = runs_of(10.0, [(5, 20.0)]), runs_of(10.0, [(20, 11.0)])
    rows, text = shown(a_result(slow), a_result(fast))
    assert rows == {"c:sync@5", "c:sync@20"}
    assert "c:sync: every 5, 20 steps were never run side by side" in text
    assert "best of" not in text


def test_the_best_is_chosen_among_the_runs_of_one_case_whatever_others_say():
    swept = a_result(runs_of(10.0, [(5, 22.0), (20, 16.0)]))
    elsewhere = [a_result(runs_of(10.0, [(20, 40.0)])) for _ in range(3)]
    rows, text = shown(*elsewhere, swept)
    assert rows == {"c:sync@20"}, "its other runs are slower than every 5, on another day"
    assert "c:sync: the best of every 5, 20 steps" in text
    rows, _ = shown(swept, a_result(runs_of(10.0, [(40, 10.0)])))
    assert rows == {"c:sync@20", "c:sync@40"}, "every 40 has lost to nobody"


def test_it_is_chosen_by_quiet_runs_only_if_all_of_them_have_one():
    runs = runs_of(10.0, [(5, 14.0), (20, 12.0)])
    calm = (runs[0], *map(noisy, runs_of(10.0, [(5, 10.0), (20, 30.0)])[1:]))
    rows, text = shown(a_result(runs, calm))
    assert rows == {"c:sync@20"}
    assert "disturbed runs" not in text
    half = [runs[0], runs[1], noisy(a_run("c:sync@20", 30.0))]
    rows, text = shown(a_result(half))
    assert rows == {"c:sync@5"}
    assert "the best of every 5, 20 steps, by disturbed runs" in text


def test_where_none_came_to_its_end_none_is_the_best():
    failed = runs_of(10.0, [(5, None), (20, None)])
    assert shown(a_result(failed))[0] == {"c:sync@5", "c:sync@20"}
    swept = a_result([a_run("bare", 10.0), a_run("checkpoint_restart:async@5", 14.0),
                      a_run("checkpoint_restart:async@20", 12.0),
                      a_run("checkpoint_restart:sync@5", None)])  # fmt: skip
    found = ["checkpoint_restart:async@20", "checkpoint_restart:sync@20"]
    assert campaign.best_of(swept) == found, "the usual one in place of what nobody knows"
