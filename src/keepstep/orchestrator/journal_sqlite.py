"""The journal of one machine: an SQLite file in WAL mode, which whoever opens it may take over.

There is no lease: who is started on this machine's file is meant to lead, and the one before it is
dead or deposed. A disk that is full or does not answer is a store that is away.

The cluster's secret is in its snapshots: the file, and what SQLite keeps beside it, are its owner's
alone.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from keepstep import codec
from keepstep.errors import ConfigError, Deposed, Permanent, Transient, of_disk
from keepstep.model import Term
from keepstep.orchestrator.journal import (
    CLUSTER,
    PAGE_LINKS,
    ROOT,
    SNAPSHOTS_KEPT,
    START,
    Brought,
    Entry,
    Growth,
    Link,
    Loaded,
    Place,
    Standing,
    grow,
    grow_by_snapshot,
    snapshot_link,
)

WAL_PAGES_MAX = 20_000
"""Of 4 KiB: how far the write-ahead log may grow before an append has to fold it in."""
RETRY_SECONDS = 1.0
"""Somebody makes room on a full disk: that is no matter of milliseconds."""
FILES = ("", "-wal", "-shm")
"""What a journal consists of while it is in use, or after its writer was killed."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS standing (
    one INTEGER PRIMARY KEY CHECK (one = 1), term INTEGER NOT NULL, seq INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS entries (seq INTEGER PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS links (
    chain TEXT NOT NULL, number INTEGER NOT NULL, hash TEXT NOT NULL,
    seq INTEGER, body TEXT, PRIMARY KEY (chain, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS heads (
    chain TEXT PRIMARY KEY, number INTEGER NOT NULL, hash TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS snapshots (
    seq INTEGER PRIMARY KEY, link INTEGER NOT NULL, body TEXT NOT NULL
);
INSERT OR IGNORE INTO standing VALUES (1, 0, 0);
"""


class SqliteJournal:
    """A file that is written by one process at a time.

    With synchronous=FULL an append waits for the disk: 0.16 ms at the median and 0.3 ms at p95 on
    an idle machine, 1.5 and 12 ms with seven processes waiting for each core (500 appends of 1 kB,
    ext4 on a virtual disk). NORMAL took 0.03 and 0.1 ms in both cases. It survives a killed
    orchestrator just as well, but a machine that loses power may lose the newest entries, and then
    orders are out in the world that the journal does not know. So FULL, unless the whole cluster
    lives and dies with this one machine.
    """

    def __init__(self, path: Path, *, synchronous: str = "full") -> None:
        assert synchronous in ("full", "normal"), synchronous
        self._path = path
        make_private(path, parents=True)
        with _in_our_words():
            self._connection = _opened(path, synchronous)

    def begin_term(self, endpoint: str = "", above: Term = Term(0)) -> Standing:
        del endpoint  # Nobody else on this file is sent anywhere.
        with self._transaction():
            self._connection.execute("UPDATE standing SET term = max(term, ?) + 1", (above,))
            term, seq = self._term_and_seq()
            rows = self._connection.execute("SELECT chain, hash FROM heads").fetchall()
        heads = dict(rows)
        cluster = heads.pop(CLUSTER, ROOT)
        return Standing(Term(term), seq, cluster, heads)

    def append(self, term: Term, expected_head: str, entries: Sequence[Entry]) -> Standing:
        with self._transaction():
            seq = self._check(term, expected_head)
            chains = {CLUSTER}.union(*(entry.jobs for entry in entries))
            heads = {chain: self._stored_head(chain) for chain in chains}
            growth = grow(term, seq, heads, entries)
            self._connection.executemany("INSERT INTO entries VALUES (?, ?)", growth.entries)
            self._write_links(growth)
        _, head = growth.heads.get(CLUSTER, heads[CLUSTER])
        return Standing(term, growth.seq, head, growth.jobs)

    def bring(self, term: Term, body: str, at_seq: int) -> Future[Brought]:
        del term  # A file of this machine: the text is written with its link, or neither is.
        return Brought.at_once(body, at_seq)

    def vouch(self, term: Term, expected_head: str, brought: Brought) -> Standing:
        with self._transaction():
            seq = self._check(term, expected_head)
            growth = grow_by_snapshot(brought, seq, self._stored_head(CLUSTER))
            self._write_links(growth)
            link, head = growth.heads[CLUSTER]
            self._connection.execute(
                "INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?)",
                (brought.at_seq, link, brought.body),
            )
            self._connection.execute(
                "DELETE FROM snapshots WHERE seq > 0 AND seq NOT IN "
                "(SELECT seq FROM snapshots ORDER BY seq DESC LIMIT ?)",
                (SNAPSHOTS_KEPT,),
            )
        # The snapshot is there. A log that finds no room to be folded in now is so another time.
        with suppress(sqlite3.OperationalError):
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        return Standing(term, seq, head, {})

    def load(self) -> Loaded:
        with _in_our_words():
            for at_seq, link, body in self._connection.execute(
                "SELECT seq, link, body FROM snapshots ORDER BY seq DESC"
            ).fetchall():
                # A snapshot that the chain does not vouch for was changed: replay more instead.
                if self._link_body(link) == snapshot_link(at_seq, body):
                    return Loaded(codec.loads(body), at_seq, self._entries_after(at_seq))
            return Loaded(None, 0, self._entries_after(0))

    def export(self, chain: str, after: int = 0) -> Iterator[Link]:
        # Pages rather than one cursor: the loop appends between two pages and nothing is locked.
        number = after
        while True:
            with _in_our_words():
                rows = self._connection.execute(
                    "SELECT number, hash, coalesce(links.body, entries.body) FROM links "
                    "LEFT JOIN entries USING (seq) WHERE chain = ? AND number > ? "
                    "ORDER BY number LIMIT ?",
                    (chain, number, PAGE_LINKS),
                ).fetchall()
            if not rows:
                return
            for number, hash_, body in rows:
                yield Link(number, hash_, body)

    def standing(self) -> tuple[int, int]:
        """The newest term and the newest entry's seq, without taking over."""
        with _in_our_words():
            return self._term_and_seq()

    def size(self) -> tuple[int | None, int]:
        """Bytes that the file has, None if it cannot be read; and bytes that its disk has left."""
        free = shutil.disk_usage(self._path.parent).free
        try:
            with _in_our_words():
                (pages,) = self._connection.execute("PRAGMA page_count").fetchone()
                (page_bytes,) = self._connection.execute("PRAGMA page_size").fetchone()
        except Transient:
            return None, free
        return pages * page_bytes, free

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """BEGIN IMMEDIATE … COMMIT: the term and head that were checked are still so at the write.

        Of one that fails, at its COMMIT too, nothing is left that anybody reads: so the very same
        write may come again.
        """
        with _in_our_words():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            finally:
                # Of a full disk SQLite itself has rolled back, at times.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    def _check(self, term: Term, expected_head: str) -> int:
        """Refuse a deposed writer; otherwise the newest seq."""
        newest, seq = self._term_and_seq()
        if term != newest:
            raise Deposed(f"term {term} is over: term {newest} leads now")
        _, head = self._stored_head(CLUSTER)
        if head != expected_head:
            raise Deposed(f"the head moved to {head[:12]} while term {term} stood at another")
        return seq

    def _term_and_seq(self) -> tuple[int, int]:
        term, seq = self._connection.execute("SELECT term, seq FROM standing").fetchone()
        return int(term), int(seq)

    def _write_links(self, growth: Growth) -> None:
        self._connection.executemany("INSERT INTO links VALUES (?, ?, ?, ?, ?)", growth.links)
        self._connection.executemany(
            "INSERT OR REPLACE INTO heads VALUES (?, ?, ?)",
            [(chain, *place) for chain, place in growth.heads.items()],
        )
        if growth.entries:
            self._connection.execute("UPDATE standing SET seq = ?", (growth.seq,))

    def _stored_head(self, chain: str) -> Place:
        row = self._connection.execute(
            "SELECT number, hash FROM heads WHERE chain = ?", (chain,)
        ).fetchone()
        return (int(row[0]), str(row[1])) if row else START

    def _link_body(self, number: int) -> str | None:
        row = self._connection.execute(
            "SELECT body FROM links WHERE chain = ? AND number = ?", (CLUSTER, number)
        ).fetchone()
        return row[0] if row else None

    def _entries_after(self, seq: int) -> tuple[dict[str, Any], ...]:
        rows = self._connection.execute(
            "SELECT body FROM entries WHERE seq > ? ORDER BY seq", (seq,)
        ).fetchall()
        return tuple(codec.loads(body)["entry"] for (body,) in rows)


def make_private(path: Path, *, parents: bool = False) -> None:
    """Make the file if there is none, for its owner alone, and take back what others were allowed
    before. SQLite gives what it keeps beside the file the same mode."""
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        for end in FILES:
            tighten(path.with_name(path.name + end))
    except OSError as error:
        raise of_disk(error, f"cannot open {path}") from error


def tighten(path: Path) -> None:
    """Of a file that is ours, take back what others were allowed."""
    with suppress(FileNotFoundError):
        found = path.stat()
        if found.st_uid == os.geteuid() and found.st_mode & 0o077:
            # By its name: who closes a descriptor of it ends SQLite's locks of this process.
            path.chmod(found.st_mode & 0o700)


def _opened(path: Path, synchronous: str) -> sqlite3.Connection:
    connection = None
    try:
        connection = sqlite3.connect(path, isolation_level=None, timeout=10.0)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={synchronous}")
        # The WAL is folded in with each snapshot, which is taken when nothing is going on; this
        # bound is for the case that nothing ever stops going on.
        connection.execute(f"PRAGMA wal_autocheckpoint={WAL_PAGES_MAX}")
        connection.executescript(_SCHEMA)
    except sqlite3.Error as error:
        if connection is not None:
            connection.close()
        if _kind(error) in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
            raise ConfigError(f"cannot open {path} to write it: {error}") from error
        raise
    return connection


@contextmanager
def _in_our_words() -> Iterator[None]:
    """A full disk, one that does not answer, and a file that is locked may be well again; a damaged
    file stays so."""
    try:
        yield
    except sqlite3.ProgrammingError:
        raise  # A bug of ours.
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError) and _kind(error) != sqlite3.SQLITE_ERROR:
            raise Transient(f"the journal's file: {error}", RETRY_SECONDS) from error
        raise Permanent(
            f"the journal's file is damaged, or is no journal: {error}; restore a backup"
        ) from error


def _kind(error: sqlite3.Error) -> int:
    """SQLite's code without its finer distinctions."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
