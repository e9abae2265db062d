"""A copy of a journal that is a file, made while it is written, and the way back.

    copy     read as of one moment, checked link by link, then renamed into place
    put_back checked first; refused while a process has the journal open; the old file is kept

A database is its administrator's to copy: pg_dump, or base backups with point-in-time recovery. A
journal that was put back is behind what agents have done since; the leader finds that out from what
they say they have obeyed, and journals the gap (docs/operating.md).

It must never leave half a journal in the place of a whole one, and never delete one. Each copy is
as secret as the journal.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from keepstep.errors import ConfigError, Permanent
from keepstep.orchestrator import replica
from keepstep.orchestrator.journal import CLUSTER, verify
from keepstep.orchestrator.journal_sqlite import FILES, SqliteJournal, make_private, tighten

WHOLE = -1
"""Pages at once: one read of the journal as it was when it began, during which its writer goes on
(and its log is not folded in). After portions SQLite begins again whenever somebody has written
between two of them, and beside a busy leader somebody always has."""


@dataclass(frozen=True, slots=True)
class Copied:
    """What a copy holds."""

    path: Path
    term: int
    entries: int
    head: str
    """Of the cluster chain: whoever kept an earlier export can compare."""
    jobs: int


def copy(journal: Path, target: Path) -> Copied:
    """Copy a journal, which may be in use, to a new file, and check the copy."""
    if not journal.is_file():
        raise ConfigError(f"there is no journal at {journal}; give --journal FILE")
    if target.exists():
        raise ConfigError(f"{target} is there already; give a name that is not")
    with _copied(journal, target) as (fresh, found):
        fresh.replace(target)
    return found


def put_back(backup: Path, journal: Path) -> tuple[Copied, Path | None]:
    """Make a backup the journal. What was there is moved aside; where to is told."""
    if not backup.is_file():
        raise ConfigError(f"there is no backup at {backup}")
    with _copied(backup, journal) as (fresh, found):
        aside = _set_aside(journal)
        fresh.replace(journal)
    return found, aside


def check(path: Path) -> Copied:
    """Walk all chains of a journal's file and replay it; Permanent or ConfigError if it is bad."""
    try:
        with closing(SqliteJournal(path)) as journal:
            heads = verify(journal)
            loaded = journal.load()
            if loaded.snapshot is None:
                raise Permanent("it has no snapshot that its chain vouches for")
            replica.of(loaded)
            term, entries = journal.standing()
    except Permanent as error:
        raise Permanent(f"{path}: {error}") from error
    return Copied(path, term, entries, heads[CLUSTER], len(heads) - 1)


@contextmanager
def _copied(path: Path, target: Path) -> Iterator[tuple[Path, Copied]]:
    """A copy that was checked, beside its target, for the caller to rename into place."""
    fresh = target.with_name(target.name + ".new")
    fresh.unlink(missing_ok=True)
    try:
        make_private(fresh)
        with (
            closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(fresh)) as copied,
        ):
            source.backup(copied, pages=WHOLE)
        yield fresh, replace(check(fresh), path=target)
    except sqlite3.Error as error:
        raise ConfigError(f"{path} could not be read, or not copied: {error}") from error
    finally:
        fresh.unlink(missing_ok=True)


def _set_aside(journal: Path) -> Path | None:
    """Move a journal that nobody uses out of the way, and in any case what lies beside it: SQLite
    would apply a log of another file to the one that comes in its place."""
    if there := journal.exists():
        _refuse_if_in_use(journal)
    number = 1
    while any(_beside(journal, f".replaced-{number}{end}").exists() for end in FILES):
        number += 1
    for end in FILES:
        if (left := _beside(journal, end)).exists():
            tighten(left)
            left.replace(_beside(journal, f".replaced-{number}{end}"))
    return _beside(journal, f".replaced-{number}") if there else None


def _beside(journal: Path, end: str) -> Path:
    return journal.with_name(journal.name + end)


def _refuse_if_in_use(journal: Path) -> None:
    try:
        with closing(sqlite3.connect(journal, timeout=0.0)) as connection:
            # Leaving WAL mode needs the file for oneself: whoever has it open keeps us from it.
            # And it folds the write-ahead log in, so that one file is all that has to be moved.
            (mode,) = connection.execute("PRAGMA journal_mode=DELETE").fetchone()
    except sqlite3.OperationalError as error:
        mode = str(error)
    except sqlite3.DatabaseError:
        mode = "delete"  # Damaged, which may be why there is a restore: aside with it.
    if mode != "delete":
        raise ConfigError(
            f"{journal} is in use ({mode}): stop the orchestrator first; its workers train on"
        )
