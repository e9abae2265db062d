"""Commits: every step is told of once, whoever made it, and every line gets written."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from keepstep.page import Page
from keepstep.training import steplog
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


class Disk:
    """Stands before os.write: full while `room` is not None, after that many bytes more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        self._write = os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, file: int, data: bytes) -> int:
        if self.room is None:
            return self._write(file, data)
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        part, self.room = bytes(data)[: self.room], 0
        return self._write(file, part)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.mark.parametrize("room", [0, 7])
def test_a_full_disk_does_not_break_training_and_the_lines_follow(
    tmp_path: Path, log: StepLog, disk: Disk, capsys: pytest.CaptureFixture[str], room: int
) -> None:
    made, told = commits(tmp_path, log)
    log.start_at(0)
    for step in range(60):
        remember(log, step)
        if step == 10:
            disk.room = room
        if step == 50:
            disk.room = None
        made.here(step)
    assert told == list(range(60))
    assert lines(log) == list(range(60))
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_whoever_takes_rank_0_goes_on_after_a_line_that_a_full_disk_cut_short(
    tmp_path: Path, log: StepLog, disk: Disk
) -> None:
    made, _ = commits(tmp_path, log)
    for step in range(3):
        remember(log, step)
        disk.room = 7 if step == 2 else None
        made.here(step)
    disk.room = None
    heir = StepLog(log.path)
    heir.adopt(log.records())
    remember(heir, 3)
    heir.commit(3, "")
    assert lines(log) == [0, 1, 2, 3]


def test_a_close_that_fails_loses_no_line(
    tmp_path: Path, log: StepLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = commits(tmp_path, log)
    assert log.path is not None
    path, real, fails = log.path, os.close, [True]

    def close(file: int) -> None:
        real(file)
        if fails:
            # As a network file system tells of writes that it could not make.
            fails.clear()
            path.write_text("")
            raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "close", close)
        for step in range(6):
            remember(log, step)
            made.here(step)
    assert lines(log) == list(range(6))


def test_a_fallback_that_a_full_disk_kept_from_the_log_is_told_later(
    tmp_path: Path, log: StepLog, disk: Disk
) -> None:
    made, _ = commits(tmp_path, log)
    remember(log, 0, 1, 2)
    made.here(2)
    again = StepLog(log.path)
    disk.room = 7
    again.start_at(1)
    remember(again, 1)
    again.commit(1, "")
    disk.room = None
    remember(again, 2)
    again.commit(2, "")
    assert log.path is not None
    told = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [line.get("step", "back") for line in told] == [0, 1, 2, "back", 1, 2]


def test_beyond_a_bound_lines_are_missing(
    tmp_path: Path, log: StepLog, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steplog, "LINES_OWED_MAX", 20)
    log = StepLog(log.path)
    made, _ = commits(tmp_path, log)
    for step in range(60):
        remember(log, step)
        disk.room = 0 if 10 <= step < 59 else None
        made.here(step)
    assert lines(log) == [*range(10), *range(39, 60)]


def test_a_disk_that_is_slow_to_say_no_is_asked_less_often(
    tmp_path: Path, log: StepLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, asked = [0.0], [0]

    def slow(*_: object) -> int:
        asked[0] += 1
        now[0] += 10.0
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(steplog.time, "monotonic", lambda: now[0])
        made, _ = commits(tmp_path, log)
        patched.setattr(os, "write", slow)
        for step in range(1000):
            remember(log, step)
            made.here(step)
            now[0] += 1.0
        patched.undo()
        monkeypatch.setattr(steplog.time, "monotonic", lambda: now[0] + 1000.0)
        remember(log, 1000)
        made.here(1000)
    assert asked[0] <= 3
    assert lines(log) == list(range(1001))
