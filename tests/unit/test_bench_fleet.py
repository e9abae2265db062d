"""Months of a fleet that are gone on with: what counts, and what is refused."""

from __future__ import annotations

import argparse

import pytest

from bench import fleet, record
from keepstep.chaos.fleet_report import Month
from keepstep.chaos.fleet_setting import Plan
from keepstep.errors import ConfigError

ASKED = argparse.Namespace(gpus=1024, days=30.0, months=9, first=7, minutes=0.0, onto=None)


def month(seed: int, broken: str = "", gpus: int = 1024) -> Month:
    return Month(Plan(gpus=gpus, seed=seed), failures=3, cpu_seconds=1.0, broken=broken)


@pytest.fixture(autouse=True)
def kept_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    return tmp_path


def newest(directory):
    (found,) = directory.glob("fleet-*")
    return found.rename(directory / "earlier.json.gz")


def test_months_of_several_sittings_are_one_result(kept_elsewhere, capsys):
    earlier = fleet.Earlier()
    for seeds in ((7, 8), (9,), (10, 11)):
        assert fleet._tell(ASKED, earlier, fleet.Ran([month(seed) for seed in seeds])) == 0
        earlier = fleet.Earlier.read(newest(kept_elsewhere), ASKED)
    assert [m.plan.seed for m in earlier.months] == [7, 8, 9, 10, 11]
    assert [part["seeds"] for part in earlier.history] == [[7, 8], [9], [10, 11]]
    assert earlier.first == 7
    assert "5 months of 1,024 GPUs, 2 of them now" in capsys.readouterr().out


def test_a_month_that_broke_is_told_and_run_again(kept_elsewhere, capsys):
    assert fleet._tell(ASKED, fleet.Earlier(), fleet.Ran([month(7), month(8, "two owners")])) == 1
    assert "seed 8: two owners" in capsys.readouterr().out
    earlier = fleet.Earlier.read(newest(kept_elsewhere), ASKED)
    assert [m.plan.seed for m in earlier.months] == [7]
    assert [part["seeds"] for part in earlier.history] == [[7]]


def test_other_months_are_refused_before_anything_is_run(kept_elsewhere):
    fleet._tell(ASKED, fleet.Earlier(), fleet.Ran([month(7, gpus=2048)]))
    with pytest.raises(ConfigError, match="months of Plan"):
        fleet.Earlier.read(newest(kept_elsewhere), ASKED)
    with pytest.raises(ConfigError, match="no fleet's result"):
        fleet.Earlier.read(record.keep("alarms", {"looks": 3}), ASKED)


def test_what_is_complete_is_kept_when_a_process_is_lost(kept_elsewhere, capsys):
    assert fleet._tell(ASKED, fleet.Earlier(), fleet.Ran([month(7)], "it was killed")) == 2
    assert "ended early: it was killed" in capsys.readouterr().out
    assert newest(kept_elsewhere).exists()
    assert fleet._tell(ASKED, fleet.Earlier(), fleet.Ran()) == 2
