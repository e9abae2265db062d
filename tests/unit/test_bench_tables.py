"""Tables and pages of the benches, out of raw results made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import campaign, documents, notes, page, readme, record, scenario, tables
from bench.__main__ import fit_results
from bench.__main__ import main as bench_main
from bench.plan import BATCH
from keepstep.errors import Permanent
from tests.raw_results import committed

ROOT = Path(__file__).resolve().parents[2]
ALL = f"{readme.BEGIN} -->"


def a_run(arm, seconds, **truth):
    told = {
        "began": 100.0,
        "steps": 10,
        "seconds": seconds,
        "finished": [float(n) for n in range(10)],
        "recomputed": 0,
        "samples": 80,
        "lost": 0,
        "doubled": 0,
        "foreign": 0,
        "disagreements": 0,
        "pauses": [],
        "step_seconds": 1.0,
        "loss": 2.0,
        "digests": {"0": "a", "1": "b"},
        "torn": 0,
    }
    return {
        "arm": arm,
        "settings": {},
        "outcome": "completed" if seconds is not None else "no new step for 90 s, at 4",
        "start_seconds": 5.0,
        "strikes": [] if arm == "bare" else [{"at": 104.0, "pid": 7, "kind": "kill", "rank": 1}],
        "memory_bytes_max": 2**30,
        "moved_bytes": 2**30,
        "others_share": 0.02,
        "pace_seconds": 0.001,
        "truth": {**told, **truth},
    }


def a_result(*repetitions, refused=None, short=False):
    return {
        "at": "2026-01-01T00:00:00+00:00",
        "commit": "0" * 40,
        "machine": {"cpu": "c", "cores": 2, "memory": "m", "kernel": "k", "load": [1.0, 1.0, 1.0]},
        "versions": {"torch": "2.13.0"},
        "short": short,
        "seconds": 100.0,
        "cases": [
            {
                "scenario": "single_kill",
                "title": "One rank is <killed>",
                "why": "",
                "plan": {"parallel": "ddp", "size": "3m", "world": 4, "steps": 10},
                "refused": refused or {},
                "repetitions": [list(runs) for runs in repetitions],
            }
        ],
    }


def row(result, arm):
    return next(g for g in tables.groups([result]) if g.arm == arm)


def test_ratios_are_taken_within_a_repetition_and_told_by_median_and_range():
    slow = (a_run("bare", 10.0), a_run("x", 11.0))
    fast = (a_run("x", 6.0), a_run("bare", 5.0))
    middle = (a_run("bare", 10.0), a_run("x", 13.0))
    found = row(a_result(slow, fast, middle), "x").to_bare
    assert (found.low, found.middle, found.high, found.many) == (1.1, 1.2, 1.3, 3)
    assert found.text(2) == "1.20 [1.10, 1.30]"


def test_goodput_counts_samples_so_that_a_missing_replica_does_not_look_fast():
    result = a_result((a_run("bare", 10.0), a_run("x", 10.0, lost=20)))
    assert row(result, "x").to_bare.middle == 1.0
    assert row(result, "x").goodput.middle == pytest.approx(0.75)


def test_weights_are_the_same_only_if_every_rank_and_repetition_says_so():
    same = (a_run("bare", 10.0), a_run("x", 10.0))
    other = (a_run("bare", 10.0), a_run("x", 10.0, digests={"0": "a", "1": "c"}))
    nobody = (a_run("bare", 10.0), a_run("x", 10.0, digests={}))
    not_all = (a_run("bare", 10.0), a_run("x", 10.0, digests={"0": "a"}))
    wrong = (a_run("bare", 10.0), a_run("x", 10.0, digests={"0": "c"}))
    assert row(a_result(same), "x").same_as_bare == "yes"
    assert row(a_result(same, other), "x").same_as_bare == "no"
    assert row(a_result(nobody), "x").same_as_bare == "-"
    assert row(a_result(same, not_all), "x").same_as_bare == "-"
    assert row(a_result(not_all, wrong), "x").same_as_bare == "no"


def test_counts_are_told_of_a_run_and_not_summed_over_repetitions():
    runs = [(a_run("bare", 10.0), a_run("x", 12.0, recomputed=n, lost=2 * n)) for n in (1, 5, 3)]
    told = tables.cells(row(a_result(*runs), "x"))
    assert (told["recomputed"], told["lost"], told["doubled"]) == (
        "3 [1, 5]",
        "6 [2, 10]",
        "0",
    )
    assert told["start"] == "5.0"


def test_a_try_out_is_never_mixed_with_measurements():
    runs = (a_run("bare", 10.0), a_run("x", 12.0))
    found = tables.groups([a_result(runs), a_result(runs, short=True)])
    assert [g.runs for g in found if g.arm == "x"] == [1, 1]
    assert "12.0" in page.page(a_result(runs, short=True), "f")


def test_another_batch_is_another_workload():
    runs = (a_run("bare", 10.0), a_run("x", 12.0))
    usual, larger = a_result(runs), a_result(runs, short=True)
    usual["cases"][0]["plan"]["batch"] = BATCH
    larger["cases"][0]["plan"]["batch"] = 8
    found = [g for g in tables.groups([a_result(runs), usual, larger]) if g.arm == "x"]
    assert [(g.workload, g.runs) for g in found] == [
        ("ddp 3m x4", 2),
        ("ddp 3m x4, batch 8, short runs", 1),
    ]
    assert tables.spoken(found[1].workload) == "ddp 3m x4 ranks, batch 8, short runs"


def test_a_run_that_failed_is_counted_and_named():
    failed = a_result((a_run("bare", 10.0), a_run("x", None, loss=None, lost=40)))
    found = row(failed, "x")
    assert (found.completed, found.runs, found.to_bare) == (0, 1, None)
    assert "x: failed: no new step" in tables.terminal([found])


def test_what_others_took_is_told_and_nothing_is_left_out():
    noisy = {**a_run("x", 20.0), "others_share": 0.4}
    found = row(a_result((a_run("bare", 10.0), noisy)), "x")
    assert found.to_bare.middle == 2.0
    assert "x: 1 of 1 runs disturbed" in tables.terminal([found])


def test_disturbed_runs_stand_in_a_row_of_their_own_and_in_no_median():
    quiet = (a_run("bare", 10.0), a_run("x", 12.0, pauses=[0.5]))
    noisy = (a_run("bare", 10.0), {**a_run("x", 30.0, pauses=[9.0]), "others_share": 0.4})
    rows = [g for g in tables.apart([a_result(quiet, noisy)]) if g.arm == "x"]
    told = [tables.cells(group) for group in rows]
    assert [cells["arm"] for cells in told] == ["x", "x (disturbed)"]
    assert [cells["to_bare"] for cells in told] == ["1.200", "3.000"]
    assert [cells["pause"][:4] for cells in told] == ["0.50", "9.00"]
    assert [cells["done"] for cells in told] == ["2/2", ""], "what is told of all stands once"
    text = tables.terminal(rows)
    assert text.count("x: 1 of 2 runs disturbed") == 1
    assert "2.100" not in text, "the median of both"
    alone = tables.apart([a_result(noisy)])
    assert [(g.label, g.to_bare is None) for g in alone if g.arm == "x"] == [
        ("x", True),
        ("x (disturbed)", False),
    ]


def readme_row(text, arm):
    """By the names of the columns."""
    cells = next(line for line in text.splitlines() if line.startswith(f"| {arm} |"))
    return dict(zip(readme.COLUMNS, cells.strip("| ").split(" | "), strict=True))


@pytest.mark.parametrize("pace", [0.0012, 0.0008, None])
def test_a_machine_that_is_or_may_be_another_than_for_the_bare_run_disturbs(pace):
    """Nobody takes time from us then, and yet all that we do takes longer, or did."""
    uneven = a_result((a_run("bare", 10.0), {**a_run("x", 30.0), "pace_seconds": pace}))
    found = row(uneven, "x")
    assert (found.to_bare.middle, found.quiet) == (3.0, 0)
    assert tables.cells(found)["slower"] == ("-" if pace is None else f"{pace / 0.001:.2f}")
    assert "x: 1 of 1 runs disturbed" in tables.terminal([found])
    assert readme_row(readme.markdown([uneven], ["f"]), "x")["to_bare"] == "disturbed"
    even = a_result((a_run("bare", 10.0), {**a_run("x", 12.0), "pace_seconds": 0.00104}))
    told = readme_row(readme.markdown([uneven, even], ["f", "g"]), "x")
    assert (told["to_bare"], told["done"]) == ("1.200", "2/2 (1)")


def test_a_run_is_measured_by_the_bare_one_of_the_same_machine():
    slow = [{**a_run(arm, t), "pace_seconds": 0.002} for arm, t in (("bare", 20.0), ("x", 24.0))]
    first = (a_run("bare", 10.0), slow[1])
    found = tables.groups([a_result(first, (slow[0], a_run("x", 13.0)))], tables.Times.QUIET)
    (mine,) = [group for group in found if group.arm == "x"]
    assert (mine.quiet, mine.to_bare.low, mine.to_bare.high) == (2, 1.2, 1.3)


@pytest.mark.parametrize(("arm", "share"), [("x", 0.4), ("bare", 0.4), ("x", 0.08), ("x", None)])
def test_the_readme_tells_no_times_of_runs_that_were_or_may_have_been_disturbed(arm, share):
    runs = [a_run("bare", 10.0), a_run("x", 12.0, pauses=[0.1], lost=4)]
    for one in runs:
        one["others_share"] = share if one["arm"] == arm else 0.02
    text = readme.markdown([a_result(runs)], ["f"])
    told = readme_row(text, "x")
    assert [told[name] for name in readme.TIMES] == ["disturbed"] * 3
    assert (told["done"], told["lost_share"], told["same"]) == ("1/1 (0)", "5.00 %", "yes")
    assert "1.200" not in text


def test_noise_excuses_neither_a_failure_nor_wrong_bits():
    quiet = (a_run("bare", 10.0), a_run("x", 12.0))
    failed = {**a_run("x", None), "others_share": 0.4}
    wrong = {**a_run("x", 30.0, lost=8, recomputed=2, digests={"0": "c"}), "others_share": 0.4}
    text = readme.markdown([a_result(quiet, (quiet[0], failed), (quiet[0], wrong))], ["f"])
    told = readme_row(text, "x")
    assert (told["done"], told["to_bare"], told["same"]) == ("2/3 (1)", "1.200", "no")
    assert told["lost_share"] == "5.00 % [0.00, 10.00]"
    assert told["again_share"] == "10.00 % [0.00, 20.00]"


def test_deaths_that_nobody_meant_are_told():
    run = {**a_run("x", 10.0), "starts": [[0, 0.0], [1, 0.0], [1, 5.0]]}
    plan = {"parallel": "ddp", "world": 4}
    assert notes.unmeant_starts(run, plan) == 0, "its strike explains one start of each rank"
    run["starts"] += [[1, 9.0], [0, 9.0], [0, 12.0]]
    assert notes.unmeant_starts(run, plan) == 2
    found = row(a_result((a_run("bare", 10.0), run)), "x")
    assert "started 2 times more than strikes explain" in tables.terminal([found])


@pytest.mark.parametrize(
    ("arm", "parallel", "unmeant"),
    [
        ("checkpoint_restart:sync@20", "ddp", 0),
        ("torchft:tuned", "hsdp", 4),
        ("torchft", "ddp", 4),
        ("keepstep", "fsdp", 4),
    ],
)
def test_strikes_elsewhere_do_not_explain_the_deaths_of_a_healthy_rank(arm, parallel, unmeant):
    run = a_run(arm, 10.0)
    run["strikes"] = [{"at": at, "pid": 7, "kind": "kill", "rank": 1} for at in (1, 2, 3, 4)]
    run["starts"] = [[rank, 0.0] for rank in range(4)]
    run["starts"] += [[1, float(at)] for at in (1, 2, 3, 4)]
    plan = {"parallel": parallel, "world": 4}
    assert notes.unmeant_starts(run, plan) == 0
    run["starts"] += [[3, float(at)] for at in (5, 6, 7, 8)]
    assert notes.unmeant_starts(run, plan) == unmeant


def test_a_replica_groups_restart_is_explained_by_a_strike_of_any_of_its_ranks():
    run = a_run("torchft", 10.0)
    run["starts"] = [[rank, 0.0] for rank in range(4)] + [[0, 5.0], [1, 5.0]]
    assert notes.unmeant_starts(run, {"parallel": "hsdp", "world": 4}) == 0
    assert notes.unmeant_starts(run, {"parallel": "ddp", "world": 4}) == 1


def test_strikes_that_somebody_was_too_fast_for_are_told():
    planned = [{"at": at, "kind": "kill", "rank": 0} for at in (4.0, 9.0, 30.0)]
    run = {**a_run("x", 8.0), "planned": planned, "nominal_seconds": 10.0}
    assert notes.missed_strikes(run) == 1, "the third comes after the fault-free run's end"
    assert notes.missed_strikes({**run, "outcome": "ended at step 4"}) == 0


def test_which_results_the_readme_tells_is_decided_by_a_rule():
    fit = {**a_result(), "measure": tables.MEASURE}
    ours = scenario.shipped()
    assert readme.why_unfit(fit, ours) == "", "older ones do not tell what they were asked"
    for other in (
        {"short": True},
        {"measure": None},
        {"commit": "0" * 40 + "+changes"},
        {"seconds": 40.0},
        {"hosts": [2, 2, 2]},
    ):
        assert readme.why_unfit({**fit, **other}, ours)
    assert readme.why_unfit({**fit, "hosts": [], "ended": "interrupted"}, ours) == ""
    for name, value, why in (
        ("scenario_digest", ours["single_kill"], ""),
        ("scenario_digest", ours["kills"], "not the scenario that ships"),
        ("scenario", "llama3", "not the scenario that ships"),
        ("plan", fit["cases"][0]["plan"] | {"seed": 2}, "seed 2 instead of 1"),
    ):
        case = {**fit["cases"][0], name: value}
        told = readme.why_unfit({**fit, "cases": [case]}, ours)
        assert why in told
        assert bool(why) == bool(told)


def test_a_run_that_somebody_ended_is_told_and_is_no_failure():
    result = a_result((a_run("bare", 10.0), a_run("x", 12.0)))
    result["ended"] = "interrupted"
    result["cases"][0]["interrupted"] = [{"arm": arm, "outcome": "interrupted"} for arm in "xxy"]
    text = readme.markdown([result], ["f"])
    assert "`f` (ended before its time)" in text
    assert "x: 2 runs were interrupted." in text
    assert readme_row(text, "x")["done"] == "1/1 (1)"
    assert (readme_row(text, "y")["done"], readme_row(text, "y")["to_bare"]) == ("0/0 (0)", "-")
    assert "y: 1 run was interrupted" in page.page(result, "f")
    alone = {**result["cases"][0], "repetitions": []}
    assert "Ended before its time: interrupted" in page.page({**result, "cases": [alone]}, "f")


def test_a_run_that_failed_at_its_start_does_not_make_starts_longer():
    failed = {**a_run("x", None), "start_seconds": 180.0}
    found = row(
        a_result((a_run("bare", 10.0), a_run("x", 12.0)), (a_run("bare", 10.0), failed)), "x"
    )
    assert (found.start_seconds.middle, found.start_seconds.many) == (5.0, 1)


def test_the_readme_names_the_machines_and_that_nobody_knows_how_quiet_a_start_was():
    first, second = (a_result((a_run("bare", 10.0), a_run("x", 12.0))) for _ in range(2))
    second["machine"] = second["machine"] | {"kernel": "k2"}
    text = readme.markdown([first, first, second], ["f", "g", "h"])
    assert (
        "told apart (2): 2 cores of c, m, kernel k (2 files); 2 cores of c, m, kernel k2 (1 file)."
        in text
    )
    assert "nobody knows whether the machine was quiet then" in text


def test_the_matrix_goes_on_with_what_its_sweep_found():
    times = {"sync@5": 14.0, "sync@20": 12.0, "async@5": 11.0, "async@20": None}
    runs = [a_run(f"checkpoint_restart:{arm}", seconds) for arm, seconds in times.items()]
    best = campaign.best_of(a_result((a_run("bare", 10.0), *runs)))
    assert best == ["checkpoint_restart:async@5", "checkpoint_restart:sync@20"]
    assert campaign.filled("bare,{best}", best) == "bare,checkpoint_restart:async@5"
    assert campaign.filled("{sync},{async}", best).split(",") == [best[1], best[0]]


def test_arms_whose_runs_were_disturbed_are_run_again_however_they_came_out():
    noisy = {**a_run("y", 30.0), "others_share": 0.4}
    runs = [{**run, "spec": run["arm"]} for run in (a_run("bare", 10.0), a_run("x", None), noisy)]
    (case,) = a_result(runs)["cases"]
    assert campaign.disturbed(case, 1) == {"y"}
    assert campaign.disturbed(case, 2) == {"x", "y"}


def test_a_strike_that_found_nobody_is_told():
    missed = a_run("x", 10.0)
    missed["strikes"] = [{**missed["strikes"][0], "pid": 0}]
    found = row(a_result((a_run("bare", 10.0), missed)), "x")
    assert (found.strikes.middle, found.notes) == (0, ("1 strikes found nobody",))


def test_an_arm_that_cannot_do_a_workload_says_why():
    result = a_result((a_run("bare", 10.0),), refused={"y": "no replica"})
    assert "y: not run: no replica" in tables.terminal(tables.groups([result]))
    assert "| y | not run: no replica |" in readme.markdown([result], ["f"])


def test_the_markdown_names_its_sources_and_says_that_runs_were_short():
    runs = (a_run("bare", 10.0), a_run("x", 12.0, pauses=[0.1, 0.3]))
    text = readme.markdown([a_result(runs, short=True)], ["bench/results/run-1.json.gz"])
    assert "short runs" in text
    assert "`bench/results/run-1.json.gz`" in text
    assert readme_row(text, "x") == {
        "arm": "x",
        "done": "1/1 (1)",
        "strikes": "1",
        "to_bare": "1.200",
        "goodput": "0.833",
        "pause": "0.20 / 0.29 / 0.30",
        "again_share": "0",
        "lost_share": "0",
        "same": "yes",
        "start": "5.0",
        "memory": "1.00",
    }
    assert "short" not in readme.markdown([a_result(runs)], ["f"])


def test_of_many_intervals_the_readme_tells_the_best_one_and_that_there_were_others():
    runs = [a_run("bare", 10.0)]
    runs += [a_run(f"c:sync@{n}", t) for n, t in ((5, 14.0), (40, 12.0), (20, None), (80, 13.0))]
    text = readme.markdown([a_result([*runs, a_run("c:async@5", 11.0)])], ["f"])
    assert readme_row(text, "c:sync@40")["to_bare"] == "1.200"
    assert readme_row(text, "c:async@5")["to_bare"] == "1.100"
    assert text.count("| c:sync") == 1
    assert "c:sync: the best of every 5, 20, 40, 80 steps; c:async: only every 5 steps was" in text
    away = a_result([a_run("bare", 10.0)], refused={"c:sync@5": "no", "c:sync@10": "no"})
    assert "best of" not in readme.markdown([away], ["f"])


def test_one_interval_and_one_way_to_save_are_said_to_be_all_that_was_tried():
    runs = [a_run("bare", 10.0), a_run("x", 12.0), a_run("c:async@20", 14.0)]
    text = readme.markdown([a_result(runs)], ["f"])
    assert "c:async: only every 20 steps was tried, and no other way to save." in text
    assert "x: " not in text


def test_an_interval_that_was_tuned_for_something_else_is_labelled():
    result = a_result((a_run("bare", 10.0), a_run("x", 12.0), a_run("c:sync@5", 14.0)))
    result["cases"][0]["tuned_for"] = "kills, ddp 3m"
    for text in (tables.terminal(tables.apart([result])), readme.markdown([result], ["f"])):
        assert "c:sync@5: its interval was tuned for kills, ddp 3m, and not here" in text
        assert text.count("tuned") == 1


def test_the_matrix_says_where_its_intervals_come_from():
    swept = {(s, workload, size) for names, workload, size, arms, _ in campaign.MATRIX
             for s in names if arms == campaign.SWEEP}  # fmt: skip
    assert swept == {
        (campaign.SWEPT_UNDER, workload, campaign.SWEPT_SIZE) for workload in ("ddp", "fsdp")
    }
    assert campaign.tuned_for("kills", "ddp", "3m", campaign.ALL) == ""
    assert campaign.tuned_for("kills", "ddp", "3m", campaign.SWEEP) == ""
    assert campaign.tuned_for("hangs", "fsdp", "3m", campaign.FEW) == "kills, fsdp 3m"
    assert campaign.tuned_for("kills", "hsdp", "3m", campaign.ALL) == "kills, fsdp 3m"
    assert campaign.tuned_for("single_kill", "zero1", "3m", "bare,keepstep") == ""


def test_an_interval_without_a_quiet_run_may_still_be_the_best():
    runs = [a_run("bare", 10.0), a_run("c:sync@5", 20.0), a_run("c:sync@80", 30.0)]
    better = {**a_run("c:sync@20", 15.0), "others_share": 0.4}
    told = readme_row(readme.markdown([a_result([*runs, better])], ["f"]), "c:sync@20")
    assert told["to_bare"] == "disturbed"
    worse = {**a_run("c:sync@20", 45.0), "others_share": 0.4}
    assert readme_row(readme.markdown([a_result([*runs, worse])], ["f"]), "c:sync@5")


def test_a_run_that_counts_for_nothing_tells_no_times():
    broken = {**a_run("x", 10.1), "outcome": "strikes ended early: an error of its own"}
    found = row(
        a_result((a_run("bare", 10.0), a_run("x", 13.0)), (a_run("bare", 10.0), broken)), "x"
    )
    assert (found.completed, found.runs, found.to_bare.low) == (1, 2, 1.3)


DOCUMENTS = ("README.md", "docs/side-by-side.md")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_documents_tables_are_those_of_all_raw_results_that_are_fit(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    kept = fit_results()
    files = committed(list(kept))
    names = [f"bench/results/{path.name}" for path in files]
    results = [kept[path] for path in files]
    assert readme.markdown(results, names, readme.scenarios_of(text)) == documents.between(
        text, readme.MARKS
    )


def test_each_scenario_that_ships_is_told_of_in_one_document():
    asked = [readme.scenarios_of((ROOT / name).read_text(encoding="utf-8")) for name in DOCUMENTS]
    assert sorted(name for names in asked for name in names) == scenario.names()


def a_document(begin, table="old"):
    return f"see `{begin}`\n{begin}\n{table}\n{readme.END}\nb\n"


def test_a_document_tells_of_the_scenarios_that_its_mark_names():
    some = [a_result((a_run("bare", 10.0), a_run("x", 12.0))) for _ in range(2)]
    some[1]["cases"][0]["scenario"] = "hangs"
    text = a_document(f"{readme.BEGIN} hangs drain -->")
    assert readme.scenarios_of(text) == {"hangs", "drain"}
    found = readme.markdown(some, ["f", "g"], readme.scenarios_of(text))
    assert "**hangs**" in found
    assert "`g`" in found
    assert "`f`" not in found
    whole = documents.replaced(text, found, readme.MARKS)
    assert whole == a_document(f"{readme.BEGIN} hangs drain -->", found)
    assert documents.between(whole, readme.MARKS) == found
    everything = readme.markdown(some, ["f", "g"], readme.scenarios_of(a_document(ALL)))
    assert "`f`, `g`" in everything
    assert everything.count("**") == 4


def test_a_mark_that_asks_for_what_is_not_there_is_refused():
    for name in ("hang", "hangs,", ": hangs"):
        with pytest.raises(Permanent, match="no scenarios"):
            readme.scenarios_of(a_document(f"{readme.BEGIN} {name} -->"))
    some = [a_result((a_run("bare", 10.0),))]
    with pytest.raises(Permanent, match="no raw result"):
        readme.markdown(some, ["f"], frozenset({"hangs"}))


def test_only_what_is_between_the_marks_is_replaced():
    once = documents.replaced(a_document(ALL), "new", readme.MARKS)
    assert once == a_document(ALL, "new")
    assert documents.replaced(once, "new", readme.MARKS) == once
    for text in ("nothing here", f"{readme.BEGIN} kills\nx\n{readme.END}", f"a {ALL}\nx\n"):
        with pytest.raises(Permanent, match="no "):
            documents.replaced(text, "new", readme.MARKS)


def test_documents_are_written_all_or_none(monkeypatch, tmp_path, capsys):
    good, bad = tmp_path / "good.md", tmp_path / "bad.md"
    good.write_text(a_document(ALL), encoding="utf-8")
    bad.write_text("no marks", encoding="utf-8")
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    raw = record.keep("run", a_result((a_run("bare", 10.0), a_run("x", 12.0))))
    for line, code in ((["--write", good, "--write", bad], 2), (["--write", good], 0)):
        monkeypatch.setattr("sys.argv", ["bench", "table", str(raw), *map(str, line)])
        assert bench_main() == code
        assert ("\nold\n" in good.read_text(encoding="utf-8")) == (code == 2)
    assert f"no {readme.BEGIN}" in capsys.readouterr().err
    raw.write_bytes(raw.read_bytes()[:40])
    assert bench_main() == 2
    assert f"{raw} is no raw result" in capsys.readouterr().err


def test_an_arm_has_the_same_colour_in_every_plot():
    runs = (a_run("bare", 10.0), a_run("x", None, finished=[]), a_run("y", 12.0, pauses=[0.5]))
    text = page.page(a_result(runs), "f")
    assert text.count(page.COLOURS[2]) >= 3
    assert page.COLOURS[1] not in text


def test_a_page_says_which_runs_were_disturbed():
    noisy = {**a_run("x", 7.0), "others_share": 0.4}
    text = page.page(a_result((a_run("bare", 10.0), noisy)), "f")
    assert "x: 1 of 1 runs disturbed" in text
    assert ">x (disturbed)</text>" in text
    assert ">0.70</text>" in text
    assert "bare (" not in text


def test_a_page_says_that_its_tree_was_in_no_commit():
    result = a_result((a_run("bare", 10.0), a_run("x", 12.0)))
    assert f"commit {'0' * 12}, raw" in page.page(result, "f")
    assert f"commit {'0' * 12}+changes, raw" in page.page(
        {**result, "commit": "0" * 40 + "+changes"}, "f"
    )


def test_a_page_loads_nothing_and_escapes_what_it_is_told():
    runs = (
        a_run("bare", 10.0),
        a_run("<x>", 12.0, pauses=[0.1, 30.0]),
        a_run("z", None, finished=[]),
    )
    text = page.page(a_result(runs), "run-1.json.gz")
    assert "One rank is &lt;killed&gt;" in text
    assert "<x>" not in text
    assert "<script" not in text
    assert "http" not in text
    assert text.count("<svg") == 3
