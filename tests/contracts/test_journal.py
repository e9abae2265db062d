"""What every journal must do, whatever stores it: a file, or a real PostgreSQL server."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from keepstep import codec
from keepstep.chaos.fleet_journal import MemoryJournal
from keepstep.errors import Deposed, Permanent
from keepstep.model import JobId, Term
from keepstep.orchestrator.journal import (
    CLUSTER,
    ROOT,
    Entry,
    Journal,
    check_chain,
    json_lines,
    verify,
    write_snapshot,
)
from keepstep.orchestrator.journal_postgres import PostgresJournal
from keepstep.orchestrator.journal_sqlite import SqliteJournal
from tests.postgres import PostgresServer

Open = Callable[[], Journal]
"""Opens the same journal again, as another process would."""

A, B = JobId("a"), JobId("b")
SECONDS_MAX = 20.0


def text(plain: object) -> str:
    return codec.dumps(plain).decode()


class Store:
    """A place for one journal, which can be opened many times and written to behind its back."""

    def __init__(self, open_journal: Open, tamper: Callable[[str], None]) -> None:
        self._open = open_journal
        self.tamper = tamper
        self.opened: list[Journal] = []

    def __call__(self) -> Journal:
        self.opened.append(self._open())
        return self.opened[-1]


def sqlite_store(request: pytest.FixtureRequest) -> Store:
    path: Path = request.getfixturevalue("tmp_path") / "journal.db"

    def tamper(statement: str) -> None:
        with sqlite3.connect(path) as connection:
            connection.execute(statement)
        connection.close()

    return Store(lambda: SqliteJournal(path), tamper)


def postgres_store(request: pytest.FixtureRequest) -> Store:
    server: PostgresServer = request.getfixturevalue("postgres")
    url = server.database()

    def tamper(statement: str) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET search_path TO keepstep")
            connection.execute(statement)  # type: ignore[call-overload]

    return Store(lambda: PostgresJournal(url), tamper)


def memory_store(request: pytest.FixtureRequest) -> Store:
    journal = MemoryJournal()

    def tamper(statement: str) -> None:
        raise AssertionError("nobody else reaches a process's own memory")

    return Store(lambda: journal, tamper)


DURABLE = [
    pytest.param(sqlite_store, id="sqlite"),
    pytest.param(postgres_store, id="postgres", marks=pytest.mark.postgres),
]


@pytest.fixture(params=[pytest.param(memory_store, id="memory"), *DURABLE])
def reopen(request: pytest.FixtureRequest) -> Iterator[Store]:
    yield from opened(request)


@pytest.fixture(params=DURABLE)
def durable(request: pytest.FixtureRequest) -> Iterator[Store]:
    """What somebody else can reach."""
    yield from opened(request)


def opened(request: pytest.FixtureRequest) -> Iterator[Store]:
    store = request.param(request)
    yield store
    for journal in store.opened:
        journal.close()


def entry(text: str, *jobs: JobId) -> Entry:
    return Entry(jobs, {"why": text})


def test_a_new_journal_starts_at_the_root_with_term_one(reopen: Open):
    standing = reopen().begin_term()
    assert (standing.term, standing.seq, standing.head, standing.jobs) == (1, 0, ROOT, {})


def test_terms_only_grow_across_openings(reopen: Open):
    assert [reopen().begin_term().term for _ in range(3)] == [1, 2, 3]
    assert reopen().begin_term(above=Term(7)).term == 8
    assert reopen().begin_term(above=Term(2)).term == 9


def test_entries_come_back_in_order_after_a_restart(reopen: Open):
    journal = reopen()
    now = journal.begin_term()
    now = journal.append(now.term, now.head, [entry("one", A), entry("two")])
    journal.append(now.term, now.head, [entry("three", A, B)])
    loaded = reopen().load()
    assert loaded.snapshot is None
    assert [plain["why"] for plain in loaded.entries] == ["one", "two", "three"]


def test_an_older_term_is_deposed_and_writes_nothing(reopen: Open):
    old, new = reopen(), reopen()
    before = old.begin_term()
    new.begin_term()
    with pytest.raises(Deposed, match="term 2 leads"):
        old.append(before.term, before.head, [entry("late", A)])
    with pytest.raises(Deposed):
        write_snapshot(old, before, text({}), 0)
    assert reopen().load().entries == ()


def test_a_term_that_never_began_is_refused(reopen: Open):
    journal = reopen()
    now = journal.begin_term()
    with pytest.raises(Deposed):
        journal.append(Term(7), now.head, [entry("from the future")])


def test_a_moved_head_is_deposed_and_writes_nothing(reopen: Open):
    journal = reopen()
    before = journal.begin_term()
    after = journal.append(before.term, before.head, [entry("one")])
    with pytest.raises(Deposed, match="head moved"):
        journal.append(before.term, before.head, [entry("two")])
    assert journal.append(after.term, after.head, [entry("three")]).seq == 2


def test_a_job_has_its_own_chain_and_the_cluster_chain_vouches_for_it(reopen: Open):
    journal = reopen()
    now = journal.begin_term()
    first = journal.append(now.term, now.head, [entry("one", A), entry("node")])
    second = journal.append(now.term, first.head, [entry("two", A, B)])
    assert set(first.jobs) == {A}
    assert set(second.jobs) == {A, B}
    heads = verify(journal)
    assert heads == {CLUSTER: second.head, A: second.jobs[A], B: second.jobs[B]}
    assert [link.number for link in journal.export(A)] == [1, 2]
    assert reopen().begin_term().jobs == second.jobs


def test_an_exported_chain_can_be_checked_by_its_owner_alone(reopen: Open):
    journal = reopen()
    now = journal.begin_term()
    for text in ("one", "two", "three"):
        now = journal.append(now.term, now.head, [entry(text, A)])
    links = list(check_chain(A, journal.export(A)))
    assert links[-1].hash == now.jobs[A]
    assert len(list(json_lines(links))) == 3
    with pytest.raises(Permanent, match="link 2 is missing"):
        list(check_chain(A, [links[0], links[2]]))


def test_a_restart_reads_the_snapshot_and_only_what_came_after(reopen: Open):
    journal = reopen()
    now = journal.begin_term()
    now = journal.append(now.term, now.head, [entry("one"), entry("two", A)])
    now = write_snapshot(journal, now, text({"count": 2}), now.seq)
    now = journal.append(now.term, now.head, [entry("three", A)])
    loaded = reopen().load()
    assert (loaded.snapshot, loaded.at_seq) == ({"count": 2}, 2)
    assert [plain["why"] for plain in loaded.entries] == ["three"]
    verify(journal)


def test_a_text_that_was_brought_is_not_believed_before_the_chain_vouches_for_it(reopen: Open):
    journal = reopen()
    now = journal.begin_term()
    now = write_snapshot(journal, now, text({"count": 0}), 0)
    now = journal.append(now.term, now.head, [entry("one"), entry("two")])
    brought = journal.bring(now.term, text({"count": 2}), now.seq).result(SECONDS_MAX)
    now = journal.append(now.term, now.head, [entry("three", A)])
    loaded = reopen().load()
    assert (loaded.snapshot, len(loaded.entries)) == ({"count": 0}, 3)
    now = journal.vouch(now.term, now.head, brought)
    now = journal.append(now.term, now.head, [entry("four")])
    loaded = reopen().load()
    assert (loaded.snapshot, loaded.at_seq) == ({"count": 2}, 2)
    assert [plain["why"] for plain in loaded.entries] == ["three", "four"]
    verify(journal)


def test_who_was_deposed_vouches_for_nothing_that_it_brought(reopen: Open):
    old, new = reopen(), reopen()
    before = old.begin_term()
    brought = old.bring(before.term, text({"count": 0}), 0).result(SECONDS_MAX)
    now = write_snapshot(new, new.begin_term(), text({"count": 1}), 0)
    with pytest.raises(Deposed, match="term 2 leads"):
        old.vouch(before.term, before.head, brought)
    assert reopen().load().snapshot == {"count": 1}
    assert verify(new) == {CLUSTER: now.head}


def test_a_long_chain_is_exported_whole(reopen: Open):
    journal = reopen()
    now = journal.begin_term()
    journal.append(now.term, now.head, [entry(str(n), A) for n in range(1234)])
    assert [link.number for link in journal.export(A)] == list(range(1, 1235))
    assert [link.number for link in journal.export(A, after=1200)] == list(range(1201, 1235))
    assert [*journal.export(A, after=1234)] == []
    verify(journal)


def test_an_append_of_nothing_changes_nothing_and_is_refused_to_a_deposed_writer(reopen: Open):
    old = reopen()
    now = old.begin_term()
    now = old.append(now.term, now.head, [entry("one", A)])
    again = old.append(now.term, now.head, [])
    assert (again.term, again.seq, again.head, again.jobs) == (now.term, 1, now.head, {})
    reopen().begin_term()
    with pytest.raises(Deposed, match="term 2 leads"):
        old.append(now.term, now.head, [])
    verify(old)


def test_only_the_newest_snapshots_and_the_first_are_kept(durable: Store):
    journal = durable()
    now = journal.begin_term()
    now = write_snapshot(journal, now, text({"count": 0}), 0)
    for count in range(1, 5):
        now = journal.append(now.term, now.head, [entry(str(count), A)])
        now = write_snapshot(journal, now, text({"count": count}), now.seq)
    for seq, left in ((4, 3), (3, 0)):
        durable.tamper(f"UPDATE snapshots SET body = 'null' WHERE seq = {seq}")
        loaded = durable().load()
        assert (loaded.snapshot, loaded.at_seq) == ({"count": left}, left)
        assert len(loaded.entries) == 4 - left
    verify(journal)


@pytest.mark.postgres
def test_a_file_and_a_database_make_the_same_chains(tmp_path: Path, postgres: PostgresServer):
    stood = []
    for journal in (SqliteJournal(tmp_path / "journal.db"), PostgresJournal(postgres.database())):
        now = journal.begin_term()
        now = journal.append(now.term, now.head, [entry("one", A), entry("two")])
        now = write_snapshot(journal, now, text({"ö": [1.5, None, "\0"]}), now.seq)
        now = journal.append(now.term, now.head, [entry("three", B, A), entry("four", A)])
        lines = [line for chain in (CLUSTER, A, B) for line in json_lines(journal.export(chain))]
        stood.append((now.seq, now.head, now.jobs, lines, journal.load()))
        journal.close()
    assert stood[0] == stood[1]


# --- tampering -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entries SET body = replace(body, 'two', 'zwo')",
        "DELETE FROM links WHERE chain = 'a' AND number = 2",
        "DELETE FROM links WHERE chain = 'a' AND number = 3",
        "UPDATE links SET hash = 'f' WHERE chain = '' AND number = 1",
        "DELETE FROM links WHERE chain = '' AND number = 2",
    ],
)
def test_a_rewritten_past_is_found(durable: Store, statement: str):
    journal = durable()
    now = journal.begin_term()
    for text in ("one", "two", "three"):
        now = journal.append(now.term, now.head, [entry(text, A)])
    verify(journal)
    durable.tamper(statement)
    with pytest.raises(Permanent):
        verify(journal)


def test_a_changed_snapshot_is_not_used(durable: Store):
    journal = durable()
    now = journal.begin_term()
    now = journal.append(now.term, now.head, [entry("one")])
    write_snapshot(journal, now, text({"count": 1}), now.seq)
    durable.tamper("UPDATE snapshots SET body = '{\"count\":9}'")
    loaded = journal.load()
    assert loaded.snapshot is None
    assert len(loaded.entries) == 1
