from __future__ import annotations

import os
from pathlib import Path

import pytest

from keepstep.cli.client import find
from keepstep.cli.cluster import rooms_directory
from keepstep.cli.supervise import restart_due
from keepstep.config import LauncherConfig
from keepstep.errors import ConfigError


def run_dir(here: Path, name: str, *, age: int) -> Path:
    directory = here / "keepstep-runs" / name
    directory.mkdir(parents=True)
    (directory / "token").write_text(f"token-of-{name}\n", encoding="utf-8")
    port = directory / "orchestrator.port"
    port.write_text("4711\n", encoding="utf-8")
    os.utime(port, (1_000_000 - age, 1_000_000 - age))
    return directory


def test_the_newest_local_run_is_found(tmp_path: Path):
    run_dir(tmp_path, "old", age=9)
    new = run_dir(tmp_path, "new", age=1)
    environ = {"XDG_STATE_HOME": str(tmp_path / "state")}
    assert find("", "", environ, tmp_path).url == "http://127.0.0.1:4711"
    (new / "orchestrator.url").write_text("http://10.0.0.1:99\n", encoding="utf-8")
    found = find("", "", environ, tmp_path)
    assert (found.url, found.token) == ("http://10.0.0.1:99", "token-of-new")


def test_a_given_address_wins_over_the_environment_and_that_over_the_run(tmp_path: Path):
    run_dir(tmp_path, "one", age=1)
    environ = {"KEEPSTEP_ORCHESTRATOR": "http://env:1", "XDG_STATE_HOME": str(tmp_path)}
    assert find("http://arg:1", "", environ, tmp_path).url == "http://arg:1"
    assert find("", "", environ, tmp_path).url == "http://env:1"


def test_nothing_to_be_found_says_what_to_give(tmp_path: Path):
    environ = {"XDG_STATE_HOME": str(tmp_path / "state")}
    with pytest.raises(ConfigError, match="--orchestrator"):
        find("", "", environ, tmp_path)
    with pytest.raises(ConfigError, match="--token-file"):
        find("http://x:1", "", environ, tmp_path)


def test_rooms_have_short_paths_and_one_per_run(tmp_path: Path):
    one = rooms_directory(tmp_path / ("very-long-name-" * 10) / "a")
    two = rooms_directory(tmp_path / ("very-long-name-" * 10) / "b")
    assert one != two
    assert len(str(one)) < 60


def test_the_first_restart_is_at_once_and_the_next_ones_wait_ever_longer():
    config = LauncherConfig(restart_seconds_min=0.1, restart_seconds_max=1.0)
    assert restart_due([100.0], config) == 0.0
    assert restart_due([100.0, 100.1], config) == pytest.approx(100.2)
    assert restart_due([100.0, 100.1, 100.2], config) == pytest.approx(100.4)
    assert restart_due([100.0 + n / 10 for n in range(20)], config) == pytest.approx(102.9)


def test_a_child_that_lived_long_is_restarted_at_once_again():
    config = LauncherConfig(restart_seconds_min=0.1, restart_seconds_max=1.0)
    assert restart_due([100.0, 100.1, 150.0], config) == 0.0
