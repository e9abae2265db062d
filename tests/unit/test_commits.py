"""Commits: every step is told of once, whoever made it, and every line gets written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keepstep.page import Page
from keepstep.training.commits import Commits
from keepstep.training.steplog import StepLog, StepRecord


@pytest.fixture
def log(tmp_path: Path) -> StepLog:
    return StepLog(tmp_path / "steps.jsonl")


def commits(tmp_path: Path, log: StepLog, *, joining: bool = False) -> tuple[Commits, list[int]]:
    made = Commits(Page(tmp_path / "page", create=True), log, joining=joining)
    told: list[int] = []
    made.callbacks.append(told.append)
    return made, told


def remember(log: StepLog, *steps: int) -> None:
    for step in steps:
        log.remember(StepRecord(step, 1, (step, step + 1), "d"))


def lines(log: StepLog) -> list[int]:
    assert log.path is not None
    return [json.loads(line)["step"] for line in log.path.read_text().splitlines()]


def test_each_step_is_told_once_also_if_it_is_retried(tmp_path: Path, log: StepLog) -> None:
    made, told = commits(tmp_path, log)
    remember(log, 0, 1, 2, 3)
    for step in (-1, 0, 1, 1, 2):
        made.here(step)
    assert told == [0, 1, 2]
    assert lines(log) == [0, 1, 2]
    assert made.newest == 2


def test_a_survivor_that_lagged_hears_of_what_its_source_had_heard(
    tmp_path: Path, log: StepLog
) -> None:
    made, told = commits(tmp_path, log)
    made.here(18)
    made.elsewhere(19)
    assert made.newest == 19
    assert told == list(range(19)), "nothing is told in the middle of a recovery"
    made.here(20)
    assert told == list(range(21))


def test_a_joiner_hears_of_the_steps_after_it_joined(tmp_path: Path, log: StepLog) -> None:
    made, told = commits(tmp_path, log, joining=True)
    made.elsewhere(19)
    made.here(20)
    # Its next recovery is a survivor's.
    made.elsewhere(21)
    made.here(22)
    assert told == [20, 21, 22]


def test_the_last_line_is_written_although_the_step_was_committed_elsewhere(
    tmp_path: Path, log: StepLog
) -> None:
    made, _ = commits(tmp_path, log, joining=True)
    remember(log, 148, 149)
    made.elsewhere(149)
    made.here(149)
    assert lines(log) == [148, 149]


def test_a_rerun_tells_of_no_step_of_the_checkpoint(tmp_path: Path, log: StepLog) -> None:
    made, told = commits(tmp_path, log)
    made.start_after(9)
    made.here(9)
    made.here(10)
    assert told == [10]
