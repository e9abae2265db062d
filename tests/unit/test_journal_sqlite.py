"""A journal in a file: a full disk is one that is away, and nobody but its owner reads it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep import codec
from keepstep.errors import ConfigError, Permanent, Transient
from keepstep.model import JobId
from keepstep.orchestrator import events, state
from keepstep.orchestrator.journal import Entry, Standing, verify, write_snapshot
from keepstep.orchestrator.journal_sqlite import SqliteJournal
from keepstep.orchestrator.snapshots import body_of

ROOM = 1_000_000
"""Pages that no test here needs."""


def tick(now: float, more: str = "") -> Entry:
    body = {"event": events.to_plain(events.Tick()), "now": now}
    return Entry((JobId("job"),), {**body, "more": more} if more else body)


def first_snapshot(journal: SqliteJournal) -> Standing:
    return write_snapshot(
        journal, journal.begin_term(), body_of(state.new_cluster("secret"), 0.0), 0
    )


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[SqliteJournal]:
    opened = SqliteJournal(tmp_path / "journal.db")
    yield opened
    opened.close()


def leave_pages(journal: SqliteJournal, pages: int) -> None:
    """As a disk does that has no more."""
    journal._connection.execute(f"PRAGMA max_page_count = {pages}")


def fill(journal: SqliteJournal) -> None:
    (pages,) = journal._connection.execute("PRAGMA page_count").fetchone()
    leave_pages(journal, pages)


def test_an_append_to_a_full_disk_may_come_again_and_is_written_once(journal: SqliteJournal):
    now = first_snapshot(journal)
    entries = [tick(1.0, "x" * 100_000), tick(2.0)]
    fill(journal)
    for _ in range(2):
        with pytest.raises(Transient, match="full") as away:
            journal.append(now.term, now.head, entries)
        assert away.value.retry_after_seconds > 0
    assert journal.load().entries == (), "and it can be read meanwhile"
    leave_pages(journal, ROOM)
    assert journal.append(now.term, now.head, entries).seq == 2
    assert len(journal.load().entries) == 2
    verify(journal)


def test_so_may_a_snapshot(journal: SqliteJournal):
    now = first_snapshot(journal)
    now = journal.append(now.term, now.head, [tick(1.0)])
    body = codec.dumps({"state": "x" * 100_000}).decode()
    fill(journal)
    with pytest.raises(Transient, match="full"):
        write_snapshot(journal, now, body, now.seq)
    now = journal.append(now.term, now.head, [tick(2.0)])
    leave_pages(journal, ROOM)
    write_snapshot(journal, now, body, now.seq)
    assert journal.load().at_seq == 2
    verify(journal)


class Disk:
    """A connection whose disk refuses one statement so many times."""

    def __init__(self, connection: sqlite3.Connection, statement: str, times: int = 1) -> None:
        self._connection, self._statement, self._times = connection, statement, times

    def execute(self, statement: str, *rows: Any) -> Any:
        if statement.startswith(self._statement) and self._times:
            self._times -= 1
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
            raise error
        return self._connection.execute(statement, *rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


@pytest.mark.parametrize("statement", ["BEGIN", "INSERT OR", "COMMIT"])
def test_a_write_that_fails_at_any_statement_may_come_again(
    journal: SqliteJournal, statement: str, monkeypatch: pytest.MonkeyPatch
):
    now = first_snapshot(journal)
    now = journal.append(now.term, now.head, [tick(1.0)])
    body = body_of(state.new_cluster("secret"), 1.0)
    monkeypatch.setattr(journal, "_connection", Disk(journal._connection, statement))
    with pytest.raises(Transient, match="disk I/O error"):
        write_snapshot(journal, now, body, now.seq)
    now = write_snapshot(journal, now, body, now.seq)
    assert journal.append(now.term, now.head, [tick(2.0)]).seq == 2
    assert len(list(journal.export(""))) == 4
    verify(journal)


def test_a_snapshot_is_written_though_its_log_cannot_be_folded_in(
    journal: SqliteJournal, monkeypatch: pytest.MonkeyPatch
):
    """Its writer would not know the new head otherwise, and take itself for deposed."""
    now = first_snapshot(journal)
    monkeypatch.setattr(journal, "_connection", Disk(journal._connection, "PRAGMA wal_checkpoint"))
    now = write_snapshot(journal, now, body_of(state.new_cluster("secret"), 1.0), 0)
    assert journal.append(now.term, now.head, [tick(1.0)]).seq == 1


@pytest.mark.parametrize("statement", ["SELECT", "PRAGMA"])
def test_what_cannot_be_read_now_may_be_later(
    journal: SqliteJournal, statement: str, monkeypatch: pytest.MonkeyPatch
):
    now = first_snapshot(journal)
    journal.append(now.term, now.head, [tick(1.0)])
    broken = Disk(journal._connection, statement, times=ROOM)
    if statement == "PRAGMA":
        monkeypatch.setattr(journal, "_connection", broken)
        assert journal.size()[0] is None
        return
    for read in (journal.load, journal.standing, lambda: list(journal.export(""))):
        with monkeypatch.context() as patch:
            patch.setattr(journal, "_connection", broken)
            with pytest.raises(Transient):
                read()
        read()


def test_a_damaged_file_is_no_disk_that_may_be_well_again(tmp_path: Path):
    path = tmp_path / "journal.db"
    path.write_bytes(b"not a database, but as long as a page of one" * 200)
    with pytest.raises(Permanent, match=r"damaged, or is no journal.*restore a backup"):
        SqliteJournal(path)
    (tmp_path / "directory").mkdir()
    with pytest.raises(ConfigError, match="cannot open"):
        SqliteJournal(tmp_path / "directory")


# --- who reads it ---------------------------------------------------------------------------------


@pytest.fixture
def _open_to_all() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def open_to_others(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.stat().st_mode & 0o077]


@pytest.mark.usefixtures("_open_to_all")
def test_nobody_else_reads_a_journal(tmp_path: Path):
    journal = SqliteJournal(tmp_path / "journal.db")
    now = first_snapshot(journal)
    journal.append(now.term, now.head, [tick(1.0)])
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["journal.db", "journal.db-shm", "journal.db-wal"]
    assert open_to_others(tmp_path) == []
    journal.close()


@pytest.mark.usefixtures("_open_to_all")
def test_a_journal_that_others_could_read_is_closed_to_them(tmp_path: Path):
    path = tmp_path / "journal.db"
    SqliteJournal(path).close()
    path.chmod(0o644)
    earlier = sqlite3.connect(path)
    earlier.execute("PRAGMA user_version = 1")
    assert len(open_to_others(tmp_path)) == 3, "with its log, and what SQLite keeps in memory"
    SqliteJournal(path).close()
    assert open_to_others(tmp_path) == []
    earlier.close()
