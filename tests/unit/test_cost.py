"""What faults cost: the published figure, and arithmetic that must hold for any numbers."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.cli import main
from keepstep.cli.cost import PAUSE
from keepstep.errors import ConfigError
from keepstep.ledger import cost

PUBLISHED = [
    "cost",
    "--gpus",
    "1024",
    "--price",
    "3",
    "--mttf",
    "7.9h",
    "--checkpoint-interval",
    "1.5h",
    "--replacement",
    "10m",
    "--restore",
    "5m",
    "--startup",
    "5m",
]
ROOT = Path(__file__).resolve().parents[2]


def setting(**more: Any) -> cost.Setting:
    base = cost.Setting(
        1024, 3.0, 7.9 * 3600, 5400, 600, 300, 300, 60, 1.8, 0.9, 8, 24 * 3600, 0.999
    )
    return replace(base, **more)


def settings() -> st.SearchStrategy[cost.Setting]:
    return st.builds(
        setting,
        gpus=st.integers(1, 200_000),
        mttf=st.floats(600, 1e6),
        interval=st.floats(60, 86_400),
        save=st.floats(0.1, 600),
        pause=st.floats(0, 300),
        live=st.floats(0, 0.999),
    )


def test_the_published_figure_comes_out_with_its_formula(capsys: Any) -> None:
    assert main(PUBLISHED) == 0
    said = capsys.readouterr().out
    line = "1,024 x $3 x (half of 1.5 h + 20 min) x 730 h / 7.9 h = $307,524"
    assert line in said.splitlines()
    assert max(map(len, said.splitlines())) <= 80


def test_json_has_the_same_numbers(capsys: Any) -> None:
    assert main([*PUBLISHED, "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert round(found["money_per_month"]["restart"]) == 307_524
    assert found["goodput_by_gpus"]["1024"]["keepstep"] > 0.97


@given(settings())
def test_less_is_lost_if_some_faults_cost_less(case: cost.Setting) -> None:
    kept, lost = cost.lost_with_keepstep(case), cost.lost_by_restart(case)
    assert kept <= max(lost, case.pause) + 1e-6
    if case.pause <= lost:
        assert cost.goodput(case, keepstep=True) >= cost.goodput(case, keepstep=False) - 1e-12


@given(settings(), st.booleans(), st.sampled_from((0.5, 0.9, 1.1, 2.0)))
def test_no_other_interval_is_better_than_the_best(
    case: cost.Setting, keepstep: bool, factor: float
) -> None:
    best = cost.at_best(case, keepstep=keepstep)
    other = replace(best, interval=best.interval * factor)
    assert cost.goodput(best, keepstep=keepstep) >= cost.goodput(other, keepstep=keepstep) - 1e-12


@given(settings(), st.integers(1, 100_000))
def test_a_device_fails_as_often_in_a_cluster_of_any_size(case: cost.Setting, gpus: int) -> None:
    there = cost.at_size(case, gpus)
    assert there.gpus * there.mttf == pytest.approx(case.gpus * case.mttf)


@pytest.mark.parametrize(("mttf", "repair"), [(8.0, 24.0), (100.0, 24.0), (2.0, 48.0)])
def test_so_many_spares_are_enough_and_one_fewer_is_not(mttf: float, repair: float) -> None:
    """Against faults drawn one by one: how often does one find a node that is not in repair?"""
    case = setting(mttf=mttf * 3600, repair=repair * 3600, enough=0.9)
    spares, chance = cost.spare_nodes(case), random.Random(5)
    now, back, found, faults = 0.0, [], {spares: 0, spares - 1: 0}, 40_000
    for _ in range(faults):
        now += chance.expovariate(1 / mttf)
        back = [moment for moment in back if moment > now]
        for count in found:
            found[count] += len(back) < count
        back.append(now + repair)
    assert found[spares] / faults > 0.89
    assert found[spares - 1] / faults < 0.9


def test_many_failures_at_once_need_as_many_spares() -> None:
    case = setting(mttf=60.0, repair=30 * 24 * 3600.0)
    assert 43_200 < cost.spare_nodes(case) < 44_500


def test_a_trace_of_failures_gives_the_mean_between_them(tmp_path: Path, capsys: Any) -> None:
    trace = tmp_path / "failures.txt"
    trace.write_text("# ours\n2026-01-01T00:00\n2026-01-01T06:00\n2026-01-01T16:00\n")
    assert main(["cost", "--gpus", "64", "--trace", str(trace), "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["setting"]["mttf"] == 8 * 3600
    trace.write_text("0\n4.5\n")
    assert main(["cost", "--gpus", "64", "--trace", str(trace), "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["setting"]["mttf"] == 4.5 * 3600


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--gpus 0 --mttf 8h", "--gpus must be above 0"),
        ("--gpus 8 --mttf 8h --live 1.5", "--live is a share"),
        ("--gpus 8 --mttf 8h --checkpoint-interval 0m", "--checkpoint-interval must be above 0"),
        ("--gpus 8", "give --mttf TIME, or --trace"),
        ("--gpus 8 --mttf soon", "write for example 90s"),
        ("--gpus 8 --trace nowhere", "cannot be read"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_fix(words: str, says: str, capsys: Any) -> None:
    assert main(["cost", *words.split()]) == 2
    assert says in capsys.readouterr().err


def test_one_moment_is_no_trace() -> None:
    with pytest.raises(ConfigError, match="two moments"):
        cost.mttf_of([1.0])


def test_the_pause_is_the_one_of_the_committed_campaign() -> None:
    with gzip.open(ROOT / "bench/results/chaos-300-seed-13.json.gz") as file:
        faults = json.load(file)["faults"]
    pauses = [fault["pause_seconds"] for fault in faults if fault["pause_seconds"]]
    assert f"{sum(pauses) / len(pauses):.1f}s" == PAUSE
