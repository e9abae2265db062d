"""Campaigns: what was asked, what was begun, and how it ended is kept, whatever ends them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.campaign import INTERRUPTED, LOST, Campaign, Job, carry_out
from bench.plan import Plan
from keepstep.errors import ConfigError, Unreachable

JOBS = [Job(name, "ddp", "1m", ("bare",), 1) for name in ("clean", "kills")]


def options(**more: Any) -> argparse.Namespace:
    usual = {"hostfile": None, "keep": None, "ranks": 2, "batch": 2, "seed": 1, "seconds": 1.0}
    usual |= {"short": True, "repeat": 1, "again": 0}
    return argparse.Namespace(**(usual | more))


def completed(spec: str) -> dict[str, Any]:
    return {"spec": spec, "arm": spec, "outcome": "completed"}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What campaigns of this test keep; their runs are scripted, and take no time."""
    found: list[dict[str, Any]] = []

    def keep(name: str, result: dict[str, Any]) -> Path:
        found.append(result)
        return tmp_path / "raw.json.gz"

    monkeypatch.setattr("bench.record.keep", keep)
    monkeypatch.setattr("bench.record.read", lambda path: found[-1])
    monkeypatch.setattr("bench.tables.apart", lambda results: [])
    monkeypatch.setattr("bench.page.page", lambda result, name: "")
    monkeypatch.setattr("bench.campaign.page_of", lambda path: tmp_path / "page.html")
    return found


def scripted(
    monkeypatch: pytest.MonkeyPatch,
    ran: Callable[[str], dict[str, Any]],
    settled: Callable[[], tuple[int, float]] = lambda: (24, 0.1),
) -> None:
    monkeypatch.setattr(Campaign, "_settle", lambda self, plan: settled())
    monkeypatch.setattr(Campaign, "_run", lambda self, spec, *_: ran(spec))


def test_no_campaign_reads_what_an_earlier_one_left_in_the_same_place(tmp_path):
    args = options(keep=tmp_path)
    first = Campaign(args, tmp_path, 1.0)._new_room("kills-ddp-bare")
    Plan(directory=str(first)).write()
    assert Campaign(args, tmp_path, 1.0)._new_room("kills-ddp-bare") != first
    with pytest.raises(FileExistsError):
        Plan(directory=str(first)).write()


def test_a_scenario_that_does_not_exist_is_told_before_the_first_run(capsys):
    args = options()
    jobs = [Job(name, "ddp", "1m", ("bare",), 1) for name in ("clean", "klls")]
    with pytest.raises(ConfigError, match="klls"):
        carry_out(jobs, args, "run")


def test_a_lost_host_is_an_exit_of_its_own_and_costs_no_case_that_is_complete(
    kept, tmp_path, monkeypatch, capsys
):
    times: list[int] = []

    def settled() -> tuple[int, float]:
        times.append(1)
        if len(times) > 1:
            raise Unreachable("h1 cannot be reached by ssh")
        return 24, 0.1

    scripted(monkeypatch, completed, settled)
    args = options(keep=tmp_path)
    assert carry_out(JOBS, args, "run").code == LOST
    assert [case["scenario"] for case in kept[-1]["cases"]] == ["clean"]
    assert kept[-1]["ended"] == "h1 cannot be reached by ssh"
    assert kept[-1]["asked"]["jobs"][1]["scenario"] == "kills", "that it was asked for is kept"
    assert "cannot be reached" in capsys.readouterr().out
    assert carry_out(JOBS[1:], args, "run").code == LOST, "nothing was completed, and that is why"


@pytest.mark.parametrize(
    ("error", "code", "why"),
    [
        (KeyboardInterrupt(), INTERRUPTED, "interrupted"),
        (Unreachable("h1 is gone"), LOST, "h1 is gone"),
    ],
)
def test_a_run_that_is_ended_by_hand_leaves_a_trace(kept, tmp_path, monkeypatch, error, code, why):
    def ran(spec: str) -> dict[str, Any]:
        if spec == "keepstep":
            raise error
        return completed(spec)

    scripted(monkeypatch, ran)
    jobs = [Job("kills", "ddp", "1m", ("keepstep",), 1)]
    assert carry_out(jobs, options(keep=tmp_path), "run").code == code
    (case,) = kept[-1]["cases"]
    assert case["repetitions"] == [], "it was the first"
    (stub,) = case["interrupted"]
    assert (stub["arm"], stub["repetition"], stub["outcome"]) == ("keepstep", 1, "interrupted")
    assert kept[-1]["ended"] == why


def test_what_was_asked_is_kept_and_that_it_came_to_its_end(kept, tmp_path, monkeypatch):
    scripted(monkeypatch, completed)
    carry_out(JOBS, options(keep=tmp_path, seed=3), "run")
    assert (kept[-1]["ended"], kept[-1]["hosts"]) == ("", [])
    assert [case["interrupted"] for case in kept[-1]["cases"]] == [[], []]
    asked = kept[-1]["asked"]
    assert (asked["seed"], asked["seconds"], asked["ranks"], asked["batch"]) == (3, 1.0, 2, 2)
    assert [(job["arms"], job["repeat"]) for job in asked["jobs"]] == [(("bare",), 1)] * 2
