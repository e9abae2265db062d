"""Checkpoints of the session's own: whole on disk, and published only when every part is there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keepstep.errors import Permanent
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


class Rerun:
    """Two ranks that look for a checkpoint, each in its own view of the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *views: Path) -> None:
        self.looks = 0
        self.between: Callable[[], None] = lambda: None
        self._rows: list[Any] = [None] * len(views)
        self._meet = threading.Barrier(len(views), timeout=30)
        self.keepers: list[Any] = [
            SimpleNamespace(
                place=SimpleNamespace(world_size=WORLD, state_directory=view, resume_from=""),
                groups=rank,
                has_state=True,
                saved=None,
            )
            for rank, view in enumerate(views)
        ]
        monkeypatch.setattr(checkpoint, "exchange_rows", self._exchange)
        monkeypatch.setattr(checkpoint, "time", SimpleNamespace(sleep=self._sleep))

    def _exchange(self, rank: int, row: Any) -> list[Any]:
        self._rows[rank] = json.loads(json.dumps(row))
        self._meet.wait()
        rows = list(self._rows)
        self._meet.wait()
        return rows

    def _sleep(self, _: float) -> None:
        if self._meet.wait() == 0:
            self.looks += 1
            self.between()
        self._meet.wait()

    def agree(self) -> list[Any]:
        """What each rank goes on from, or what it raised."""
        found: list[Any] = [None] * len(self.keepers)

        def one(rank: int) -> None:
            try:
                checkpoint.agree(self.keepers[rank])
                found[rank] = self.keepers[rank].saved
            except Permanent as error:
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(found))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


def saved(directory: Path) -> Path:
    directory.mkdir()
    job = Job(directory)
    job.save(0)
    return Path(job.save(1))


def test_ranks_that_find_the_same_checkpoint_go_on_from_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "a")
    rerun = Rerun(monkeypatch, path.parent, path.parent)
    assert [found.path for found in rerun.agree()] == [path, path]
    assert rerun.looks == 0


def test_ranks_that_find_none_begin_at_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rerun = Rerun(monkeypatch, tmp_path, tmp_path / "not there")
    assert rerun.agree() == [None, None]
    assert rerun.looks == 0


def test_ranks_do_not_train_on_from_different_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "a")
    rerun = Rerun(monkeypatch, path.parent, tmp_path / "b")
    for rerun.keepers[0].place.resume_from in ("", str(path)):
        errors = rerun.agree()
        assert [type(error) for error in errors] == [Permanent, Permanent]
        assert "rank 0 finds boundary-7-g3, rank 1 finds none" in str(errors[1])
    assert rerun.looks == 2 * (checkpoint.LOOKS_MAX - 1), "they looked again before"


def test_a_checkpoint_that_one_node_sees_later_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, late = saved(tmp_path / "a"), saved(tmp_path / "b")
    late.rename(tmp_path / "hidden")
    rerun = Rerun(monkeypatch, path.parent, late.parent)
    rerun.between = lambda: rerun.looks == 3 and (tmp_path / "hidden").rename(late) and None
    assert [found.path for found in rerun.agree()] == [path, late]
    assert rerun.looks == 3


@pytest.mark.parametrize("file", ["manifest.json", "entry-1.bin", "shared-0-1.json"])
def test_a_disk_that_cannot_be_read_is_not_one_without_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    path = saved(tmp_path / "a")
    real, works = Path.read_bytes, threading.Event()

    def read(this: Path) -> bytes:
        if this.name == file and not works.is_set():
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(this)

    monkeypatch.setattr(Path, "read_bytes", read)
    rerun = Rerun(monkeypatch, path.parent, path.parent)
    assert "rank 0 finds [Errno 116] Stale file handle" in str(rerun.agree()[1])
    works.set()
    assert [found.path for found in rerun.agree()] == [path, path]


def test_of_two_checkpoints_at_one_boundary_all_take_the_later_generations(tmp_path: Path) -> None:
    path = saved(tmp_path / "a")
    for generation in (9, 10):
        shutil.copytree(path, path.with_name(f"boundary-7-g{generation}"))
    place: Any = SimpleNamespace(world_size=WORLD, state_directory=path.parent, resume_from="")
    found = checkpoint.newest(place)
    assert found is not None
    assert found.path.name == "boundary-7-g10"
