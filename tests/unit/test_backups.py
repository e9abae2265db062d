"""Backups of a journal: whole, checked, and never put over one that is in use."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.cli import main
from keepstep.errors import ConfigError, Permanent
from keepstep.model import JobId
from keepstep.orchestrator import backups, events, state
from keepstep.orchestrator.journal import Entry, verify, write_snapshot
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
