"""What every journal must do, whatever stores it. PostgreSQL joins by a factory of its own."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.errors import Deposed, Permanent
from keepstep.model import JobId, Term
from keepstep.orchestrator.journal import (
    CLUSTER,
    ROOT,
    Entry,
    Journal,
    SqliteJournal,
    check_chain,
    json_lines,
    verify,
)

Open = Callable[[], Journal]
"""Opens the same journal again, as another process would."""

A, B = JobId("a"), JobId("b")


def sqlite_factory(path: Path) -> Open:
    return lambda: SqliteJournal(path / "journal.db")


@pytest.fixture(params=[sqlite_factory], ids=["sqlite"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    factory = request.param(tmp_path)
    opened: list[Journal] = []

    def open_and_remember() -> Journal:
        opened.append(factory())
        return opened[-1]

    yield open_and_remember
    for journal in opened:
        journal.close()


def entry(text: str, *jobs: JobId) -> Entry:
    return Entry(jobs, {"why": text})


def test_a_new_journal_starts_at_the_root_with_term_one(reopen: Open):
    standing = reopen().begin_term()
    assert (standing.term, standing.seq, standing.head, standing.jobs) == (1, 0, ROOT, {})


def test_terms_only_grow_across_openings(reopen: Open):
    assert [reopen().begin_term().term for _ in range(3)] == [1, 2, 3]


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
        old.snapshot(before.term, before.head, {}, 0)
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
    now = journal.snapshot(now.term, now.head, {"count": 2}, now.seq)
    now = journal.append(now.term, now.head, [entry("three", A)])
    loaded = reopen().load()
    assert (loaded.snapshot, loaded.at_seq) == ({"count": 2}, 2)
    assert [plain["why"] for plain in loaded.entries] == ["three"]
    verify(journal)


def test_a_long_chain_is_exported_whole(reopen: Open):
    journal = reopen()
    now = journal.begin_term()
    journal.append(now.term, now.head, [entry(str(n), A) for n in range(1234)])
    assert [link.number for link in journal.export(A)] == list(range(1, 1235))
    verify(journal)


# --- tampering, which needs to know how SQLite stores things ------------------------------------


def tamper(path: Path, statement: str) -> None:
    with sqlite3.connect(path / "journal.db") as connection:
        connection.execute(statement)
    connection.close()


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
def test_a_rewritten_past_is_found(tmp_path: Path, statement: str):
    journal = SqliteJournal(tmp_path / "journal.db")
    now = journal.begin_term()
    for text in ("one", "two", "three"):
        now = journal.append(now.term, now.head, [entry(text, A)])
    verify(journal)
    tamper(tmp_path, statement)
    with pytest.raises(Permanent):
        verify(journal)
    journal.close()


def test_a_changed_snapshot_is_not_used(tmp_path: Path):
    journal = SqliteJournal(tmp_path / "journal.db")
    now = journal.begin_term()
    now = journal.append(now.term, now.head, [entry("one")])
    journal.snapshot(now.term, now.head, {"count": 1}, now.seq)
    tamper(tmp_path, "UPDATE snapshots SET body = '{\"count\":9}'")
    loaded = journal.load()
    assert loaded.snapshot is None
    assert len(loaded.entries) == 1
    journal.close()
