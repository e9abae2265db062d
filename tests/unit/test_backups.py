"""Backups of a journal: whole, checked, and never put over one that is in use."""

from __future__ import annotations

import functools
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.cli import main
from keepstep.cli.client import RUNS
from keepstep.errors import ConfigError, Permanent
from keepstep.model import JobId
from keepstep.orchestrator import backups, events, state
from keepstep.orchestrator.journal import Entry, Standing, verify, write_snapshot
from keepstep.orchestrator.journal_sqlite import SqliteJournal
from keepstep.orchestrator.snapshots import body_of


def tick(now: float) -> Entry:
    return Entry((JobId("job"),), {"event": events.to_plain(events.Tick()), "now": now})


@pytest.fixture
def live(tmp_path: Path) -> Iterator[SqliteJournal]:
    """A journal that an orchestrator has open."""
    journal = SqliteJournal(tmp_path / "journal.db")
    standing = journal.begin_term()
    body = body_of(state.new_cluster("secret"), 0.0)
    standing = write_snapshot(journal, standing, body, 0)
    journal.append(standing.term, standing.head, [tick(1.0), tick(2.0)])
    yield journal
    journal.close()


def path_of(journal: SqliteJournal) -> Path:
    return journal._path


def test_a_journal_in_use_is_copied_whole(live: SqliteJournal, tmp_path: Path):
    copied = backups.copy(path_of(live), tmp_path / "backup.db")
    assert (copied.entries, copied.term, copied.jobs) == (2, 1, 1)
    assert copied.head == verify(live)[""]
    assert sorted(path.name for path in tmp_path.glob("backup*")) == ["backup.db"]
    # And its writer goes on.
    standing = live.begin_term()
    live.append(standing.term, standing.head, [tick(3.0)])
    assert backups.check(tmp_path / "backup.db").entries == 2


def grow(live: SqliteJournal) -> Standing:
    """By a thousand pages and more."""
    standing = live.begin_term()
    for number in range(6):
        large = Entry((), {**tick(3.0 + number).body, "more": "x" * 1_000_000})
        standing = live.append(standing.term, standing.head, [large])
    return standing


def test_a_copy_of_a_large_journal_ends_though_somebody_writes_whenever_it_pauses(
    live: SqliteJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    now, paused = grow(live), 0

    class Disturbed(sqlite3.Connection):
        def backup(self, target: sqlite3.Connection, **options: Any) -> None:
            super().backup(target, progress=write, **options)

    def write(*_: int) -> None:
        nonlocal now, paused
        paused += 1
        assert paused < 20, "it begins again and again"
        now = live.append(now.term, now.head, [tick(100.0 + paused)])

    connect = functools.partial(sqlite3.connect, factory=Disturbed)
    monkeypatch.setattr(backups.sqlite3, "connect", connect)
    assert backups.copy(path_of(live), tmp_path / "backup.db").entries == 8
    assert paused == 1, "at its end"


def test_a_copy_is_whole_though_its_journal_is_written_all_the_time(
    live: SqliteJournal, tmp_path: Path
):
    grow(live)
    began, copied, written = threading.Event(), threading.Event(), [0]

    def write() -> None:
        journal = SqliteJournal(path_of(live), synchronous="normal")
        now, until = journal.begin_term(), time.monotonic() + 20.0
        while not copied.is_set() and time.monotonic() < until:
            now = journal.append(now.term, now.head, [tick(100.0 + written[0])])
            written[0] += 1
            began.set()
            time.sleep(0.001)
        journal.close()

    writer = threading.Thread(target=write)
    writer.start()
    assert began.wait(10.0)
    before = written[0]
    found = backups.copy(path_of(live), tmp_path / "backup.db")
    busy = writer.is_alive()
    copied.set()
    writer.join()
    assert busy, "it ended only when nobody wrote any more"
    assert 8 + before <= found.entries <= 8 + written[0]
    assert backups.check(tmp_path / "backup.db").entries == found.entries


def test_nobody_else_reads_a_copy(live: SqliteJournal, tmp_path: Path):
    before = os.umask(0o022)
    try:
        path_of(live).chmod(0o644)  # As an earlier release made it.
        backups.copy(path_of(live), tmp_path / "backup.db")
        assert (tmp_path / "backup.db").stat().st_mode & 0o077 == 0
        live.close()
        backups.put_back(tmp_path / "backup.db", path_of(live))
    finally:
        os.umask(before)
    assert [path.name for path in tmp_path.iterdir() if path.stat().st_mode & 0o077] == []


def test_a_backup_does_not_replace_a_file(live: SqliteJournal, tmp_path: Path):
    target = tmp_path / "backup.db"
    target.write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match="is there already"):
        backups.copy(path_of(live), target)
    assert target.read_text(encoding="utf-8") == "mine"


def test_restoring_over_a_journal_in_use_is_refused(live: SqliteJournal, tmp_path: Path):
    backups.copy(path_of(live), tmp_path / "backup.db")
    before = verify(live)
    with pytest.raises(ConfigError, match=r"is in use.*stop the orchestrator first"):
        backups.put_back(tmp_path / "backup.db", path_of(live))
    assert verify(live) == before
    standing = live.begin_term()
    live.append(standing.term, standing.head, [tick(3.0)])
    assert [path.name for path in tmp_path.glob("journal.db.*")] == []


def test_what_was_there_before_a_restore_is_kept(live: SqliteJournal, tmp_path: Path):
    backups.copy(path_of(live), tmp_path / "backup.db")
    standing = live.begin_term()
    live.append(standing.term, standing.head, [tick(3.0)])
    live.close()
    restored, aside = backups.put_back(tmp_path / "backup.db", path_of(live))
    assert (restored.entries, restored.term) == (2, 1)
    assert aside is not None
    assert backups.check(aside).entries == 3
    assert backups.check(path_of(live)).entries == 2


def test_a_log_without_its_journal_is_not_applied_to_what_is_restored(
    live: SqliteJournal, tmp_path: Path
):
    backups.copy(path_of(live), tmp_path / "backup.db")
    standing = live.begin_term()
    live.append(standing.term, standing.head, [tick(3.0)])
    log = tmp_path / "journal.db-wal"
    left = log.read_bytes()
    live.close()
    path_of(live).unlink()
    log.write_bytes(left)
    restored, aside = backups.put_back(tmp_path / "backup.db", path_of(live))
    assert (restored.entries, aside) == (2, None)
    assert backups.check(path_of(live)).entries == 2
    assert (tmp_path / "journal.db.replaced-1-wal").read_bytes() == left


def test_a_backup_that_was_changed_is_not_put_back(live: SqliteJournal, tmp_path: Path):
    backup = tmp_path / "backup.db"
    backups.copy(path_of(live), backup)
    live.close()
    with sqlite3.connect(backup) as connection:
        connection.execute("UPDATE entries SET body = replace(body, '2.0', '9.0') WHERE seq = 2")
    connection.close()
    with pytest.raises(Permanent, match="was changed after it was written"):
        backups.put_back(backup, path_of(live))
    assert backups.check(path_of(live)).entries == 2
    assert not (tmp_path / "journal.db.new").exists()


def test_what_is_no_journal_is_not_put_back(live: SqliteJournal, tmp_path: Path):
    noise = tmp_path / "noise"
    noise.write_bytes(b"not a database, but as long as a page of one" * 200)
    live.close()
    with pytest.raises((ConfigError, Permanent), match=r"could not be read|no journal"):
        backups.put_back(noise, path_of(live))
    assert backups.check(path_of(live)).entries == 2


def test_the_commands_say_what_they_did(
    live: SqliteJournal, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    backup, journal = str(tmp_path / "b.db"), str(path_of(live))
    assert main(["admin", "backup", backup, "--journal", journal]) == 0
    assert "2 entries of 1 jobs up to term 1" in capsys.readouterr().out
    assert main(["admin", "restore", backup, "--journal", journal]) == 2
    assert "stop the orchestrator first" in capsys.readouterr().err
    live.close()
    assert main(["admin", "restore", backup, "--journal", journal]) == 0
    assert "journal.db.replaced-1" in capsys.readouterr().out
    assert main(["admin", "backup", backup, "--journal", "postgresql://db/keepstep"]) == 2
    assert "pg_dump" in capsys.readouterr().err


def test_no_journal_is_replaced_that_was_not_named_and_a_copy_of_such_a_one_says_whose_it_is(
    live: SqliteJournal,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    run = tmp_path / "here" / RUNS / "newest"
    run.mkdir(parents=True)
    (run / "orchestrator.port").write_text("1\n", encoding="utf-8")
    live.close()
    guessed = run / "journal.db"
    path_of(live).rename(guessed)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    monkeypatch.delenv("KEEPSTEP_ORCHESTRATOR_JOURNAL", raising=False)
    backup = str(tmp_path / "b.db")
    assert main(["admin", "backup", backup]) == 0
    said = capsys.readouterr().out
    assert f"no journal was named: this is the newest run's here; --journal {guessed}" in said
    assert f"b.db, a copy of {guessed}: 2 entries" in said
    before = guessed.read_bytes()
    assert main(["admin", "restore", backup]) == 2
    assert "--journal FILE, --run-dir DIR" in capsys.readouterr().err
    assert (guessed.read_bytes(), [*run.glob("*.replaced*")]) == (before, [])
    assert main(["admin", "restore", backup, "--run-dir", str(run)]) == 0
    monkeypatch.setenv("KEEPSTEP_ORCHESTRATOR_JOURNAL", str(guessed))
    assert main(["admin", "restore", backup]) == 0
    assert len([*run.glob("*.replaced*")]) == 2
    capsys.readouterr()
    assert main(["admin", "backup", str(tmp_path / "c.db")]) == 0
    assert "no journal was named" not in capsys.readouterr().out
