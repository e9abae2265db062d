"""Who was through first, repetition by repetition: disturbed or not, and whoever it was."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import documents, orders, record
from bench.__main__ import fit_results
from keepstep.errors import Permanent
from tests.raw_results import committed
from tests.unit.test_bench_tables import a_result, a_run

ROOT = Path(__file__).resolve().parents[2]


def kills(*repetitions, kernel="k"):
    made = a_result(*repetitions)
    made["cases"][0]["scenario"] = "kills"
    return made | {"machine": made["machine"] | {"kernel": kernel}}


def order(system, *results):
    """By kernel, which tells the machines apart here."""
    of_kind = orders.beside_keepstep(results)["ddp 3m x4", system]
    return {kind.rpartition(" ")[2]: one for kind, one in of_kind.items()}


def seconds(found):
    return [(ours.seconds, its.seconds) for ours, its in found.times]


def cells(*results):
    """Of the table's first row."""
    return [cell.strip() for cell in orders.table(results)[2].split("|")[1:-1]]


def test_each_repetition_counts_once_disturbed_or_not():
    noisy = {**a_run("torchft", 24.0), "others_share": 0.9}
    one = kills([a_run("keepstep", 10.0), noisy], [a_run("torchft", 9.0), a_run("keepstep", 10.0)])
    found = order("torchft", one)["k"]
    assert seconds(found) == [(10.0, 24.0), (10.0, 9.0)]
    assert (found.sides, found.side) == ([1, -1], 0)
    assert found.text == "1 of 2, 1.65 [0.90, 2.40]"


def test_times_that_are_no_further_apart_than_5_percent_are_a_tie():
    near, far = ([a_run("keepstep", 10.0), a_run("torchft", s)] for s in (10.5, 10.6))
    found = order("torchft", kills(near, far))["k"]
    assert found.sides == [0, 1]
    assert found.text == "1 of 2 (1 tied), 1.06 [1.05, 1.06]"


def test_another_interval_between_saves_is_another_system():
    runs = [a_run("restarts@5", 30.0), a_run("keepstep", 10.0), a_run("restarts@20", 20.0)]
    assert seconds(order("restarts@5", kills(runs))["k"]) == [(10.0, 30.0)]
    assert seconds(order("restarts@20", kills(runs))["k"]) == [(10.0, 20.0)]


def test_who_did_not_come_to_its_end_is_behind_who_did():
    stuck = a_run("torchft", None)
    assert order("torchft", kills([a_run("keepstep", 10.0), stuck]))["k"].text == "1 of 1"
    ours = kills([a_run("keepstep", None), a_run("torchft", 20.0)])
    assert order("torchft", ours)["k"].sides == [-1]
    with pytest.raises(Permanent, match="never run side by side"):
        orders.table([kills([a_run("keepstep", None), stuck])])


def test_the_bare_engine_other_scenarios_and_who_ran_alone_are_in_no_order():
    alone = kills([a_run("bare", 5.0), a_run("keepstep", 10.0)], [a_run("torchft", 20.0)])
    other = a_result([a_run("keepstep", 10.0), a_run("torchft", 20.0)])
    assert orders.repetitions_of([alone, other]) == {}


@pytest.mark.parametrize(
    ("there", "told"),
    [(20.0, "Keepstep"), (8.0, "differs"), (10.0, "Keepstep or nobody")],
)
def test_an_order_is_the_same_if_each_machine_has_it(there, told):
    here = kills([a_run("keepstep", 10.0), a_run("torchft", 20.0)])
    other = kills([a_run("keepstep", 10.0), a_run("torchft", there)], kernel="l")
    name, first, second, same = cells(here, other)
    assert (name, first) == ("ddp 3m x4 ranks, torchft", "1 of 1, 2.00")
    assert (second[:6], same) == (f"{int(there > 10)} of 1", told)
    assert cells(other, here)[-1] == told
    assert cells(here)[-1] == cells(here, here)[-1] == "Keepstep, on one machine"


@pytest.mark.parametrize(("its", "who"), [(9.0, "the other"), (10.0, "nobody")])
def test_it_is_said_where_the_other_one_is_ahead_on_all_or_nobody_is(its, who):
    one = [a_run("keepstep", 10.0), a_run("torchft", its)]
    assert cells(kills(one), kills(one, kernel="l"))[-1] == who


def test_a_machine_without_such_a_repetition_has_no_figure_and_its_file_is_no_source():
    here = kills([a_run("keepstep", 10.0), a_run("torchft", 20.0)])
    other = kills([a_run("keepstep", 10.0), a_run("restarts@5", 20.0)], kernel="l")
    alone = kills([a_run("torchft", 5.0), a_run("restarts@5", 9.0)], kernel="m")
    results = [here, other | {"ended": True}, alone]
    rows = orders.table(results)
    assert rows[2].split("|")[2:4] == [" - ", " 1 of 1, 2.00 "]
    text = orders.markdown(results, ["f", "g", "h"])
    assert "machine 1: 2 cores of c, m, kernel k; machine 2: 2 cores of c, m, kernel l." in text
    assert "`f`, `g` (ended before its time); made by" in text
    assert "torchft < restarts" not in text, "Keepstep was not beside them"


def test_all_systems_are_ranked_by_who_was_mostly_ahead_of_whom():
    three = [a_run("keepstep", 10.0), a_run("torchft", 20.0), a_run("restarts", 30.0)]
    turned = [a_run("keepstep", 10.0), a_run("torchft", 40.0), a_run("restarts", 30.0)]
    here, other = kills(three, three, turned), kills(turned, kernel="l")
    name = "| ddp 3m x4 ranks |"
    assert orders.rankings([here])[2:] == [f"{name} keepstep < torchft < restarts | none |"]
    assert orders.rankings([here, other])[2].endswith(
        "| keepstep < restarts < torchft | restarts and torchft |"
    )
    tied = kills(three, turned)
    assert orders.rankings([tied])[2:] == [f"{name} keepstep < restarts = torchft | none |"]
    # Who has no order on one machine has not turned around on the other.
    assert orders.rankings([tied, other])[2].endswith("| none |")


def test_who_met_fewer_is_not_behind_for_that():
    """a was ahead of the only one that it met, which is ahead of two others."""
    many = [a_run("keepstep", 10.0), a_run("b", 20.0), a_run("c", 30.0)]
    few = [a_run("keepstep", 10.0), a_run("a", 8.0)]
    assert orders.rankings([kills(many, few)])[2].split("|")[2].strip() == ("a < keepstep < b < c")


def test_of_three_each_may_be_ahead_of_the_next():
    def pair(**seconds_of):
        return [a_run("keepstep", 100.0), *(a_run(name, s) for name, s in seconds_of.items())]

    ring = [pair(a=10.0, b=20.0), pair(b=10.0, c=20.0), pair(c=10.0, a=20.0)]
    assert orders.rankings([kills(*ring)])[2].split("|")[2].strip() == "a < b < c < keepstep"


def test_what_starts_and_interruptions_would_change_is_told():
    slow = a_run("keepstep", 10.0) | {"start_seconds": 30.0}
    one = kills([slow, a_run("torchft", 20.0)], [a_run("keepstep", 10.0), a_run("torchft", 20.0)])
    told = orders.beside([one])
    assert told == "Keepstep was first in 2 of 2 pairs; with starts it would be in 1."
    one["cases"][0]["interrupted"] = [a_run("keepstep", None)]
    assert orders.beside([one]).endswith("in no pair: keepstep.")


def test_the_documents_table_of_orders_is_that_of_its_raw_results():
    text = (ROOT / "docs" / "side-by-side.md").read_text(encoding="utf-8")
    told = documents.between(text, orders.MARKS)
    kept = fit_results()
    paths = committed(list(kept))
    names = [f"bench/results/{path.name}" for path in paths]
    assert orders.markdown([kept[path] for path in paths], names) == told
    assert re.findall(r"bench/results/[\w.-]+\.json\.gz", told)


def test_a_file_that_is_none_is_told_and_a_document_is_written(tmp_path, capsys, monkeypatch):
    assert orders.main([str(tmp_path / "none.json.gz")]) == 2
    assert "is no raw result" in capsys.readouterr().err
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    path = record.keep("run", kills([a_run("keepstep", 10.0), a_run("torchft", 20.0)]))
    document = tmp_path / "d.md"
    document.write_text("a\n<!-- orders:begin -->\n<!-- orders:end -->\nb\n", encoding="utf-8")
    assert orders.main([str(path), "--write", str(document)]) == 0
    assert "1 of 1, 2.00" in capsys.readouterr().out
    row = "| ddp 3m x4 ranks, torchft | 1 of 1, 2.00 | Keepstep, on one machine |"
    assert row in document.read_text()
