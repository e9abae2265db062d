"""What is kept in /dev/shm lies in directories of our own, whoever was there before us."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keepstep import private
from keepstep.agent.room import Room
from keepstep.cli.cluster import ClusterPlan, LocalCluster, NodePlan
from keepstep.errors import ConfigError

LEVELS = ("keepstep-1", "keepstep-1/run", "keepstep-1/run/n1")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """As /dev/shm is: everybody may make something there."""
    there = tmp_path / "shm"
    there.mkdir()
    there.chmod(0o1777)
    return there


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def before(planted: Path) -> None:
    """The levels above are as we make them."""
    if planted.parent.name != "shm":
        private.make(planted.parent)


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_each_level_is_for_us_alone_whatever_the_umask_says(shared: Path, umask: int):
    usual = os.umask(umask)
    try:
        private.make(shared / LEVELS[-1])
    finally:
        os.umask(usual)
    assert [mode(shared / level) for level in LEVELS] == [0o700] * 3
    private.make(shared / LEVELS[-1])  # As a second agent does, or the next run.


@pytest.mark.parametrize("planted", LEVELS)
def test_what_everybody_can_write_is_not_taken_over(shared: Path, planted: str):
    before(shared / planted)
    (shared / planted).mkdir()
    (shared / planted).chmod(0o777)
    with pytest.raises(ConfigError, match=r"open to others \(mode 0777\).*chmod 700"):
        private.make(shared / LEVELS[-1])
    assert list((shared / planted).iterdir()) == [], "and nothing is made in it"


@pytest.mark.parametrize("planted", LEVELS)
def test_a_link_is_not_followed_wherever_it_leads(shared: Path, planted: str, tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    before(shared / planted)
    (shared / planted).symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="is no directory"):
        private.make(shared / LEVELS[-1])
    assert list(elsewhere.iterdir()) == []


def test_what_belongs_to_somebody_else_is_refused(shared: Path, monkeypatch: pytest.MonkeyPatch):
    private.make(shared / LEVELS[-1])
    owner = os.geteuid()
    monkeypatch.setattr("keepstep.private.os.geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {owner}"):
        private.make(shared / LEVELS[-1])


def test_a_directory_of_ours_on_the_way_may_be_read_but_the_last_may_not(shared: Path):
    (shared / "mine").mkdir()
    (shared / "mine").chmod(0o755)
    private.make(shared / "mine" / "room")
    with pytest.raises(ConfigError, match="mode 0755"):
        private.make(shared / "mine")


def test_an_agent_keeps_nothing_in_a_room_that_was_there_for_everybody(shared: Path):
    there = shared / "room"
    there.mkdir()
    there.chmod(0o777)
    with pytest.raises(ConfigError, match="chmod 700"):
        Room(there, "127.0.0.1").open()
    assert list(there.iterdir()) == []


def test_a_run_does_not_begin_in_rooms_of_somebody_else(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rooms = shared / "keepstep-1" / "run"
    monkeypatch.setattr("keepstep.cli.cluster.rooms_directory", lambda run_dir: rooms)
    rooms.parent.mkdir()
    rooms.parent.chmod(0o777)
    cluster = LocalCluster(tmp_path / "run", [NodePlan("n0", slots=1)], ClusterPlan())
    with pytest.raises(ConfigError, match="chmod 700"):
        cluster.start()
    assert list(rooms.parent.iterdir()) == []


def test_a_level_of_ours_that_an_earlier_release_left_to_its_group_is_closed(shared: Path):
    above = shared / "mine"
    above.mkdir()
    above.chmod(0o775)
    private.make(above / "run" / "n1")
    assert mode(above) == 0o755
    assert mode(above / "run" / "n1") == 0o700


def test_a_file_is_made_anew_and_for_us_alone(tmp_path: Path):
    path, victim = tmp_path / "token", tmp_path / "victim"
    victim.write_bytes(b"kept")
    path.symlink_to(victim)
    with private.replacing(path) as out:
        out.write(b"secret")
    assert (path.read_bytes(), mode(path), path.is_symlink()) == (b"secret", 0o600, False)
    assert victim.read_bytes() == b"kept"


def test_of_a_file_that_could_not_be_written_nothing_is_left(tmp_path: Path):
    path = tmp_path / "token"
    path.write_bytes(b"old")

    def fail() -> None:
        with private.replacing(path) as out:
            out.write(b"new")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        fail()
    assert [file.name for file in tmp_path.iterdir()] == ["token"]
    assert path.read_bytes() == b"old"
