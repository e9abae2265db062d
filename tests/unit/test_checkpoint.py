"""Checkpoints of the session's own: whole on disk, and published only when every part is there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keepstep.training import checkpoint, saves
from keepstep.training.registry import Registry
from keepstep.training.session import Session

WORLD = 2


class Job:
    """Two ranks that save to one directory; what rank 0 publishes is kept."""

    def __init__(self, directory: Path) -> None:
        self.published: list[tuple[int, str]] = []
        self.keepers = [self._keeper(rank, directory) for rank in range(WORLD)]
        self.sessions = [SimpleNamespace(_keeper=keeper, step=7) for keeper in self.keepers]

    def _keeper(self, rank: int, directory: Path) -> Any:
        def publish(step: int, path: str, *_: float) -> tuple[bool, str]:
            self.published.append((step, path))
            return True, ""

        registry = Registry(rank, WORLD)
        registry.add("model", torch.nn.Linear(2, 2))
        made: Any = SimpleNamespace(
            place=SimpleNamespace(rank=rank, world_size=WORLD, state_directory=directory),
            boundary=SimpleNamespace(step=7, unsynced=False),
            commits=SimpleNamespace(newest=5),
            log=SimpleNamespace(records=list),
            homes=SimpleNamespace(get=lambda _: b"entry"),
            recorder=SimpleNamespace(late=False),
            registry=registry,
            generation=3,
            publish=publish,
            reach=lambda _: None,
            uncovered=None,
            inbox=None,
        )
        made.saves = saves.Saves(made)
        return made

    def save(self, rank: int) -> str:
        path = Session.save(self.sessions[rank])  # type: ignore[arg-type]
        assert path is not None
        return path

    def boundary(self, newest: int) -> list[tuple[int, str]]:
        """Rank 0 comes to a boundary with this step committed."""
        self.keepers[0].commits.newest = newest
        self.keepers[0].saves.publish_complete()
        return self.published


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(saves.time, "monotonic", lambda: now[0])
    return now


def test_a_checkpoint_is_published_once_a_commit_proves_that_all_have_left_it(job: Job) -> None:
    path = job.save(0)
    assert job.boundary(5) == []
    job.save(1)
    # The step before this boundary may have been committed before anybody saved.
    assert job.boundary(6) == []
    assert job.boundary(7) == [(7, path)]
    assert job.boundary(8) == [(7, path)], "once"


def test_a_checkpoint_that_lacks_a_part_is_never_published(
    job: Job, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    job.save(0)
    for step in range(5, 100):
        clock[0] += 10.0
        assert job.boundary(step) == []
    assert capsys.readouterr().err.count("was not completed") == 1


def test_parts_that_a_network_file_system_shows_late_are_waited_for(
    job: Job, clock: list[float]
) -> None:
    path = job.save(0)
    assert job.boundary(7) == []
    clock[0] += 30.0
    job.save(1)
    assert job.boundary(8) == [(7, path)]


def test_ranks_that_were_replaced_meanwhile_leave_a_checkpoint_unpublished(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.save(0)
    job.save(1)
    job.keepers[0].generation = 4
    assert job.boundary(9) == []
    assert "ranks were replaced meanwhile" in capsys.readouterr().err


@pytest.mark.parametrize("gone", ["shared-0-1.pt", "shared-0-1.json", "entry-1.bin"])
def test_every_file_counts(job: Job, gone: str) -> None:
    path = Path(job.save(0))
    job.save(1)
    assert checkpoint.has_all_files(path)
    (path / gone).rename(path / f"{gone}.partial")
    assert not checkpoint.has_all_files(path)


def test_tensors_are_on_the_disk_before_they_have_their_name(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real_sync, real_replace = os.fsync, os.replace

    def sync(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        real_sync(file)

    def replace(source: Path, target: Path) -> None:
        assert str(source) in synced, f"{target.name} may be empty after a loss of power"
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    path = Path(job.save(0))
    assert json.loads((path / "shared-0-1.json").read_bytes())["boundary"] == 7
    assert synced[-2:] == [str(path), str(path.parent)], "and their names"
