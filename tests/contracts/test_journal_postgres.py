"""What a journal in PostgreSQL adds to the contract: a lease, migrations, broken connections.

Every claim is made against a real server, with as many real connections as it needs.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import pytest

from keepstep import wire
from keepstep.clock import VirtualClock
from keepstep.config import OrchestratorConfig
from keepstep.errors import ConfigError, Deposed, Permanent, Transient
from keepstep.model import JobId, NodeId, Term
from keepstep.orchestrator import (
    journal_postgres,
    journal_schema,
    journal_sql,
    lease,
    replica,
    state,
    stepped,
)
from keepstep.orchestrator.__main__ import EXIT_USAGE, main
from keepstep.orchestrator.cut_off import cut_off_late
from keepstep.orchestrator.journal import (
    Brought,
    Entry,
    Standing,
    grow,
    verify,
    write_snapshot,
)
from keepstep.orchestrator.journal_postgres import PostgresJournal
from keepstep.orchestrator.journals import open_journal, refuse_password
from keepstep.orchestrator.run import Orchestrator
from tests.postgres import PostgresServer

pytestmark = pytest.mark.postgres

T = TypeVar("T")
A = JobId("a")
SECONDS_MAX = 20.0
LONG = 3600.0
"""A lease that does not end while a test runs."""


class Place:
    """One database, its journals, and an onlooker with a connection of its own."""

    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self.url = server.database()
        self._journals: list[PostgresJournal] = []
        self.threads = ThreadPoolExecutor()

    def journal(self, holder: str = "one", lease_seconds: float = LONG) -> PostgresJournal:
        made = PostgresJournal(self.url, holder=holder, lease_seconds=lease_seconds)
        self._journals.append(made)
        return made

    def look(self, statement: Any) -> Any:
        """The first value that a statement gives, if it gives any."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            found = connection.execute(statement)
            row = found.fetchone() if found.description else None
            return row[0] if row else None

    def entries(self) -> int:
        return int(self.look("SELECT count(*) FROM keepstep.entries"))

    def end(self) -> None:
        for journal in self._journals:
            journal.close()
        self.threads.shutdown()


class Stuck:
    """Texts of snapshots that come are stuck in the database, and nothing else is."""

    WAITERS = "SELECT pid FROM pg_locks WHERE NOT granted"

    def __init__(self, place: Place) -> None:
        self._place = place
        self._holder = psycopg.connect(place.url)
        self._holder.execute("LOCK TABLE keepstep.snapshots IN SHARE MODE")

    def somebody_waits(self) -> bool:
        return self._place.look(self.WAITERS) is not None

    def let_go(self) -> None:
        self._holder.close()


class Leading:
    """A leader without sockets, whose inbox is fed by hand."""

    def __init__(self, journal: PostgresJournal) -> None:
        self.loop = Orchestrator(
            journal, OrchestratorConfig(), VirtualClock(1000.0), "token", lambda *_, **__: None
        )

    def hear(self, node: str) -> None:
        hello = wire.Hello(NodeId(node), "127.0.0.1", 4, 1, 2, "boot")
        self.loop._handle([stepped.Waiting(hello)])


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are made to wait on purpose here, and a loaded machine is slow to let them go."""
    monkeypatch.setattr(journal_postgres, "BRIEF_SECONDS_MAX", SECONDS_MAX)
    monkeypatch.setattr(journal_postgres, "LOCK_SECONDS_MAX", SECONDS_MAX)


@pytest.fixture
def place(postgres: PostgresServer) -> Iterator[Place]:
    made = Place(postgres)
    yield made
    made.end()


def entry(text: str) -> Entry:
    return Entry((A,), {"why": text})


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not holds():
        assert time.monotonic() < deadline, f"waited {SECONDS_MAX} s for {what}"
        time.sleep(0.005)


def again(call: Callable[[], T]) -> T:
    """Repeat a call while the database is away, as the loop does."""
    deadline = time.monotonic() + SECONDS_MAX
    while True:
        try:
            return call()
        except Transient as error:
            if time.monotonic() > deadline:
                raise
            time.sleep(min(error.retry_after_seconds, 0.05))


# --- the lease -----------------------------------------------------------------------------------


def test_a_stopped_writers_lease_ends_another_takes_over_and_the_first_is_refused(place: Place):
    stopped, other = place.journal("one", 0.5), place.journal("two")
    before = stopped.begin_term()
    before = stopped.append(before.term, before.head, [entry("one")])
    with pytest.raises(Transient, match=r"one leads term 1, and its lease has 0\.\d s") as refused:
        other.begin_term()
    assert 0.0 < refused.value.retry_after_seconds < 0.6
    deadline = time.monotonic() + SECONDS_MAX
    while True:
        assert time.monotonic() < deadline
        try:
            now = other.begin_term()
            break
        except Transient as error:
            time.sleep(error.retry_after_seconds)
    assert (now.term, now.seq, now.head) == (2, 1, before.head)
    for late in ([entry("late")], []):
        with pytest.raises(Deposed, match="term 1 is over: term 2 leads now, of two"):
            stopped.append(before.term, before.head, late)
    with pytest.raises(Deposed):
        write_snapshot(stopped, before, "{}", 1)
    other.append(now.term, now.head, [entry("two")])
    assert [plain["why"] for plain in other.load().entries] == ["one", "two"]
    stopped.close()
    with pytest.raises(Transient, match="two leads term 2"):
        place.journal("three").begin_term()
    verify(other)


def test_a_lease_that_ended_and_that_nobody_took_still_serves(place: Place):
    journal = place.journal("one", 0.001)
    now = journal.begin_term()
    until(
        lambda: place.look("SELECT expires_at < clock_timestamp() FROM keepstep.standing"),
        "the end of the lease",
    )
    assert journal.append(now.term, now.head, [entry("one")]).seq == 1


def test_a_text_on_its_way_holds_up_no_write(place: Place):
    journal, other = place.journal(lease_seconds=2.0), place.journal("two")
    now = journal.begin_term()
    stuck = Stuck(place)
    bringing = journal.bring(now.term, '{"count":0}', 0)
    until(stuck.somebody_waits, "the text to be stuck")
    for n in range(3):
        now = journal.append(now.term, now.head, [entry(str(n))])
    assert not bringing.done()
    assert 0.5 < other.look().lease_seconds_left <= 2.0, "the lease is what it always is"
    stuck.let_go()
    now = journal.vouch(now.term, now.head, bringing.result(SECONDS_MAX))
    assert (journal.load().snapshot, len(journal.load().entries)) == ({"count": 0}, 3)
    verify(journal)


def test_a_text_may_take_longer_than_any_other_statement(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    journal = place.journal()
    now = journal.begin_term()
    monkeypatch.setattr(journal_sql, "PREPARE", journal_sql.PREPARE.replace("'10s'", "'300ms'", 1))
    stuck = Stuck(place)
    bringing = journal.bring(now.term, "{}", 0)
    until(stuck.somebody_waits, "the text to be stuck")
    with pytest.raises(TimeoutError):
        bringing.result(0.8)
    stuck.let_go()
    journal.vouch(now.term, now.head, bringing.result(SECONDS_MAX))
    assert journal.load().snapshot == {}


def test_a_text_that_is_gone_costs_no_earlier_snapshot(place: Place):
    journal = place.journal()
    now = write_snapshot(journal, journal.begin_term(), '{"count":0}', 0)
    for count in (1, 2, 3):
        now = journal.append(now.term, now.head, [entry(str(count))])
        brought = journal.bring(now.term, f'{{"count":{count}}}', count).result(SECONDS_MAX)
        if count == 3:  # A server took over that had not seen it yet.
            place.look("DELETE FROM keepstep.snapshots WHERE seq = 3")
        now = journal.vouch(now.term, now.head, brought)
    assert journal.load().snapshot == {"count": 2}
    assert place.look("SELECT count(*) FROM keepstep.snapshots") == 3
    verify(journal)


def test_a_late_text_replaces_neither_a_later_terms_nor_one_that_is_vouched_for(place: Place):
    old, new = place.journal("one", 0.001), place.journal("two")
    before = old.begin_term()
    before = old.append(before.term, before.head, [entry("one")])
    now = again(new.begin_term)
    brought = new.bring(now.term, '{"by":"two"}', 1).result(SECONDS_MAX)
    old.bring(before.term, '{"by":"one"}', 1).result(SECONDS_MAX)
    now = new.vouch(now.term, now.head, brought)
    assert new.load().snapshot == {"by": "two"}
    old.bring(before.term, '{"by":"one"}', 1).result(SECONDS_MAX)
    assert new.load().snapshot == {"by": "two"}
    # One of an earlier term, which nobody will vouch for any more, makes room, at its own seq too.
    old.bring(before.term, '{"by":"one"}', 7).result(SECONDS_MAX)
    now = new.append(now.term, now.head, [entry(str(n)) for n in range(6)])
    now = write_snapshot(new, now, '{"by":"two again"}', 7)
    old.bring(before.term, '{"by":"one"}', 5).result(SECONDS_MAX)
    now = new.append(now.term, now.head, [entry("eight")])
    write_snapshot(new, now, "{}", 8)
    left = "SELECT string_agg(seq::text, ' ' ORDER BY seq) FROM keepstep.snapshots"
    assert place.look(left) == "7 8"
    place.look("UPDATE keepstep.snapshots SET body = 'null' WHERE seq = 8")
    assert new.load().snapshot == {"by": "two again"}
    verify(new)


def a_text_that_is_stuck(
    place: Place,
) -> tuple[PostgresJournal, Standing, Stuck, Future[Brought]]:
    journal = place.journal()
    now = journal.begin_term()
    stuck = Stuck(place)
    bringing = journal.bring(now.term, "{}", 0)
    until(stuck.somebody_waits, "the text to be stuck")
    return journal, now, stuck, bringing


def test_a_text_whose_connection_breaks_is_transient_trouble(place: Place):
    journal, now, stuck, bringing = a_text_that_is_stuck(place)
    place.look(f"SELECT pg_terminate_backend(pid) FROM ({Stuck.WAITERS}) waiters")
    with pytest.raises(Transient, match="the journal's database"):
        bringing.result(SECONDS_MAX)
    stuck.let_go()
    assert write_snapshot(journal, now, "{}", 0).seq == 0


def test_who_leaves_does_not_wait_for_a_text_on_its_way(place: Place):
    journal, now, stuck, bringing = a_text_that_is_stuck(place)
    journal.close()
    with pytest.raises(Transient):
        bringing.result(SECONDS_MAX)
    with pytest.raises(Transient, match="nobody brings the snapshot"):
        journal.bring(now.term, "{}", 0)
    stuck.let_go()


def test_every_write_makes_the_lease_longer_and_an_empty_one_does_only_that(place: Place):
    journal = place.journal()
    now = journal.begin_term()
    ends = [place.look("SELECT expires_at FROM keepstep.standing")]
    for entries in ([entry("one")], []):
        now = journal.append(now.term, now.head, entries)
        ends.append(place.look("SELECT expires_at FROM keepstep.standing"))
    write_snapshot(journal, now, "{}", 1)
    ends.append(place.look("SELECT expires_at FROM keepstep.standing"))
    assert ends == sorted(set(ends))
    assert place.entries() == 1
    assert now.lease_seconds == LONG


def test_the_lease_of_a_loop_that_is_late_is_kept_from_beside_it(place: Place):
    # Long enough for a thread that others keep from running for a second or two.
    first, second = place.journal("one", 3.0), place.journal("two", 3.0)
    standing = first.begin_term()
    fares = {"away": False, "written_seconds_ago": 1.6, "lease_seconds": 3.0}
    said: list[str] = []
    with lease.kept(first, standing.term, lambda: fares, lambda name, **_: said.append(name)):
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            with pytest.raises(Transient, match="one leads term"):
                second.begin_term()
            time.sleep(0.05)
    assert "lease.prolonged" in said
    assert again(lambda: second.begin_term()).term == standing.term + 1
    # A term that is over has no lease to keep.
    before = second.look().lease_seconds_left
    line = first.lease_line()
    assert not line.prolong(standing.term)
    line.close()
    assert second.look().lease_seconds_left <= before
    with pytest.raises(Deposed):
        first.append(standing.term, standing.head, ())


def test_a_lease_is_never_made_shorter_and_a_broken_connection_is_replaced(place: Place):
    journal = place.journal("one", LONG)
    term = journal.begin_term().term
    line = place.journal("one", 1.0).lease_line()
    written = place.look("SELECT written_at FROM keepstep.standing")
    assert line.prolong(term)
    assert journal.look().lease_seconds_left > LONG / 2
    # Nothing was decided: whoever takes over has to know since when.
    assert place.look("SELECT written_at FROM keepstep.standing") == written
    place.look(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE query LIKE '%SET expires_at = greatest%' AND pid <> pg_backend_pid()"
    )
    assert line.prolong(term)
    journal.let_go()
    assert not line.prolong(term), "what was let go of is not taken back"
    line.close()


def test_who_comes_back_under_its_name_need_not_wait_and_who_leaves_lets_go(place: Place):
    killed, returned, other = place.journal("one"), place.journal("one"), place.journal("two")
    killed.begin_term()
    assert returned.begin_term().term == 2
    with pytest.raises(Transient):
        other.begin_term()
    # The lease is the returned one's now: the killed one cannot give it away.
    killed.close()
    with pytest.raises(Transient):
        other.begin_term()
    returned.close()
    assert other.begin_term().term == 3


def test_who_steps_down_to_begin_a_higher_term_does_so_in_its_own_lease(place: Place):
    one, two = place.journal("one"), place.journal("two")
    one.begin_again()
    two.begin_term()
    with pytest.raises(Transient, match="two leads term 1"):
        one.begin_term()
    two.begin_again()
    with pytest.raises(Transient, match="two leads term 1"):
        one.begin_term()
    assert two.begin_term(above=Term(9)).term == 10
    with pytest.raises(Transient, match="two leads term 10"):
        two.begin_term()


def test_a_name_that_two_have_is_no_way_to_depose_each_other_for_ever(place: Place):
    one, two = place.journal("same"), place.journal("same")
    one.begin_term()
    assert two.begin_term().term == 2, "as after a restart"
    with pytest.raises(Transient, match="same leads term 2"):
        one.begin_term()


def test_followers_see_who_leads_where_and_for_how_long(place: Place):
    leader, other = place.journal("one"), place.journal("two")
    leader.begin_term("http://one:7070")
    seen = other.look()
    assert (seen.term, seen.seq, seen.holder, seen.endpoint) == (1, 0, "one", "http://one:7070")
    assert LONG - 60.0 < seen.lease_seconds_left <= LONG
    # A leader of an earlier version does not write its own.
    place.look("UPDATE keepstep.standing SET term = 2, holder = 'old'")
    assert (other.look().term, other.look().endpoint) == (2, "")
    place.look("UPDATE keepstep.standing SET expires_at = clock_timestamp() - interval '5 s'")
    assert other.look().lease_seconds_left == 0.0
    assert other.begin_term("http://two:7070", above=Term(40)).term == 41
    assert leader.look().endpoint == "http://two:7070"


def test_a_leader_sees_that_agents_come_to_another_and_not_that_they_come_to_itself(place: Place):
    leads, follows, third = place.journal("one"), place.journal("two"), place.journal("three")
    leads.look(offers=True)
    leads.begin_term()
    assert not leads.offered()
    follows.look()
    third.look()
    assert not leads.offered(), "to be there is no offer"
    follows.look(offers=True)
    third.look(offers=True)
    follows.look(offers=True)
    assert leads.offered()
    follows.look(offers=False)
    assert leads.offered(), "there is the third"
    sever(third)
    until(lambda: not leads.offered(), "an offer to end with its connection")
    again(lambda: third.look(offers=True))
    assert leads.offered(), "and it is made again on the next one"
    elsewhere = Place(place.server)
    other = elsewhere.journal("four")
    other.look()
    assert not other.offered(), "another database is another cluster"
    elsewhere.end()


def test_a_term_says_for_how_long_nobody_wrote(place: Place):
    one, two = place.journal("one", 2.0), place.journal("two", 2.0)
    assert one.begin_term().vacant_seconds == 0.0, "there was nobody before"
    place.look(
        "UPDATE keepstep.standing SET written_at = written_at - interval '30 s', "
        "expires_at = expires_at - interval '30 s'"
    )
    assert 30.0 <= two.begin_term().vacant_seconds < 60.0
    two.close()
    assert place.journal("three").begin_term().vacant_seconds < 20.0, "it had let go just now"


def test_a_follower_reads_on_and_notices_another_past(place: Place):
    journal, reader = place.journal("one"), place.journal("two")
    scene = Leading(journal)
    scene.hear("n0")
    found = replica.read(reader)
    assert found is not None
    for name in ("n1", "n2"):
        scene.hear(name)
        found = replica.follow(found, reader)
        assert found is not None
        assert state.fingerprint(found.cluster) == state.fingerprint(scene.loop.cluster)
    assert found.replayed == scene.loop._standing.seq, "each entry once"
    # The database is put back to a copy, and somebody leads on from there.
    place.look(
        "UPDATE keepstep.entries SET body = replace(body, 'n2', 'n7') WHERE body LIKE '%%n2%%'"
    )
    again = replica.follow(found, reader)
    assert again is not None
    assert sorted(again.cluster.nodes) == ["n0", "n1", "n7"]


def test_a_lease_that_is_let_go_of_while_another_asks_for_it_is_no_accident(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    leaving, other = place.journal("one"), place.journal("two")
    leaving.begin_term()
    real = psycopg.Connection.execute
    asked = []

    def between(self: Any, query: Any, *rest: Any, **more: Any) -> Any:
        if query == journal_sql.LEASE:
            asked.append(query)
            # Of another thread, since it has to be committed before we go on.
            place.threads.submit(place.look, let_go).result(SECONDS_MAX)
        return real(self, query, *rest, **more)

    monkeypatch.setattr(psycopg.Connection, "execute", between)
    for moment in ("clock_timestamp()", "'-infinity'"):
        let_go = f"UPDATE keepstep.standing SET expires_at = {moment}"
        with pytest.raises(Transient, match=r"its lease has 0\.0 s to go") as refused:
            other.begin_term()
        assert refused.value.retry_after_seconds < 0.1
        leaving.begin_term()
    assert len(asked) == 2
    leaving.close()
    assert other.begin_term().term == 4


@pytest.mark.parametrize("wrong_by", [-1e6, 1e6])
def test_the_clients_clock_plays_no_part(
    place: Place, monkeypatch: pytest.MonkeyPatch, wrong_by: float
):
    holder, other = place.journal("one", 60.0), place.journal("two", 60.0)
    holder.begin_term()
    for name in ("time", "monotonic", "time_ns", "monotonic_ns"):
        unit = 1_000_000_000 if name.endswith("ns") else 1
        real = getattr(time, name)
        monkeypatch.setattr(time, name, lambda real=real, unit=unit: real() + wrong_by * unit)
    with pytest.raises(Transient) as refused:
        other.begin_term()
    assert "its lease has 5" in str(refused.value) or "its lease has 60.0" in str(refused.value)
    place.look("UPDATE keepstep.standing SET expires_at = clock_timestamp()")
    assert other.begin_term().term == 2
    left = "extract(epoch FROM expires_at - clock_timestamp())"
    assert 50.0 < float(place.look(f"SELECT {left} FROM keepstep.standing")) <= 60.0


def test_a_lease_by_a_clock_that_was_ahead_is_none(place: Place):
    """As after a promotion, or a restore, on a machine whose clock is an hour behind."""
    holder, other = place.journal("one"), place.journal("two")
    standing = holder.begin_term()
    moved = (
        "UPDATE keepstep.standing SET expires_at = expires_at + {0}, written_at = written_at + {0}"
    )
    place.look(moved.format("interval '2 s'"))
    with pytest.raises(Transient, match="one leads term 1"):
        other.begin_term()
    assert other.look().lease_seconds_left > 0, "a clock that was set right ends no lease"
    place.look(moved.format("interval '1 h'"))
    assert other.look().lease_seconds_left == 0.0
    begun = other.begin_term()
    assert (begun.term, begun.vacant_seconds) == (2, 0.0)
    with pytest.raises(Deposed):
        holder.append(standing.term, standing.head, [entry("late")])
    third = place.journal("three")
    with pytest.raises(Transient, match="two leads term 2"):
        third.begin_term()


def test_of_many_who_want_a_free_lease_one_gets_it(place: Place):
    place.journal().close()
    barrier = threading.Barrier(4)

    def compete(holder: str) -> Term | None:
        journal = place.journal(holder)
        barrier.wait(SECONDS_MAX)
        try:
            return journal.begin_term().term
        except Transient:
            return None

    # The tables are not there yet either: they are made once.
    got = list(place.threads.map(compete, "abcd", timeout=SECONDS_MAX))
    assert sorted(got, key=str) == [1, None, None, None]


# --- the term and the write are one transaction --------------------------------------------------


class Waiting:
    """A call that waits for the one row, which somebody else has locked."""

    def __init__(self, place: Place, call: Callable[[], Standing]) -> None:
        self._place = place
        self.lock = psycopg.connect(place.url)
        self.lock.execute("SELECT FROM keepstep.standing FOR UPDATE")
        self.answer: Future[Standing] = place.threads.submit(call)
        until(lambda: self.backend() is not None, "the call to wait for the lock")

    def backend(self) -> int | None:
        """The server process that waits."""
        found = self._place.look(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
            "AND wait_event_type = 'Lock'"
        )
        return None if found is None else int(found)

    def backends(self) -> int:
        """How many wait."""
        return int(
            self._place.look(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                "AND wait_event_type = 'Lock'"
            )
        )

    def let_go(self) -> None:
        self.lock.commit()
        self.lock.close()


def test_a_term_that_begins_while_an_append_waits_deposes_it(place: Place):
    journal = place.journal()
    now = journal.begin_term()
    late = Waiting(place, lambda: journal.append(now.term, now.head, [entry("late")]))
    late.lock.execute("UPDATE keepstep.standing SET term = 2, holder = 'two'")
    late.let_go()
    with pytest.raises(Deposed, match="term 2 leads now, of two"):
        late.answer.result(SECONDS_MAX)
    assert place.entries() == 0


def test_an_append_is_one_statement(place: Place, monkeypatch: pytest.MonkeyPatch):
    journal = place.journal()
    now = journal.begin_term()
    sent = []
    real = psycopg.Connection.execute

    def counted(self: Any, query: Any, *rest: Any, **more: Any) -> Any:
        sent.append(query)
        return real(self, query, *rest, **more)

    monkeypatch.setattr(psycopg.Connection, "execute", counted)
    for n in range(3):
        now = journal.append(now.term, now.head, [entry(str(n)), Entry((), {"n": n})])
        assert len(sent) == n + 1
    monkeypatch.undo()
    brought = journal.bring(now.term, "{}", now.seq).result(SECONDS_MAX)
    monkeypatch.setattr(psycopg.Connection, "execute", counted)
    journal.vouch(now.term, now.head, brought)
    assert len(sent) == 4


# --- connections that break ----------------------------------------------------------------------


def test_a_restarted_server_is_transient_trouble_and_nothing_is_half_written(place: Place):
    journal = place.journal()
    now = journal.begin_term()
    now = journal.append(now.term, now.head, [entry("one")])
    place.server.stop()
    for _ in range(2):
        with pytest.raises(Transient, match="the journal's database"):
            journal.append(now.term, now.head, [entry("two")])
    with pytest.raises(Transient):
        journal.load()
    place.server.start()
    now = again(lambda: journal.append(now.term, now.head, [entry("two")]))
    assert now.seq == 2
    assert len(journal.load().entries) == 2
    verify(journal)


def test_an_append_whose_server_process_dies_is_repeated_and_is_there_once(place: Place):
    journal = place.journal()
    now = journal.begin_term()
    waiting = Waiting(place, lambda: journal.append(now.term, now.head, [entry("one")]))
    place.look(f"SELECT pg_terminate_backend({waiting.backend()})")
    with pytest.raises(Transient):
        waiting.answer.result(SECONDS_MAX)
    waiting.let_go()
    assert place.entries() == 0
    assert again(lambda: journal.append(now.term, now.head, [entry("one")])).seq == 1
    assert place.entries() == 1
    verify(journal)


def sever(journal: PostgresJournal) -> None:
    assert journal._connection is not None
    line = journal_postgres.socket.socket(fileno=os.dup(journal._connection.fileno()))
    line.shutdown(journal_postgres.socket.SHUT_RDWR)
    line.close()


def cut(journal: PostgresJournal, waiting: Waiting) -> None:
    """The connection breaks; the server does not notice, and finishes what it was told."""
    sever(journal)
    with pytest.raises(Transient):
        waiting.answer.result(SECONDS_MAX)
    waiting.let_go()


def test_an_append_that_landed_without_an_answer_is_not_written_twice(place: Place):
    journal = place.journal()
    now = journal.begin_term()
    waiting = Waiting(place, lambda: journal.append(now.term, now.head, [entry("one")]))
    cut(journal, waiting)
    until(lambda: place.entries() == 1, "the append to land")
    after = again(lambda: journal.append(now.term, now.head, [entry("one")]))
    assert (after.seq, set(after.jobs)) == (1, {A})
    after = journal.append(after.term, after.head, [entry("two")])
    assert (after.seq, place.entries()) == (2, 2)
    verify(journal)


def test_an_append_that_lands_while_its_repeat_waits_does_not_depose_its_own_writer(place: Place):
    journal = place.journal()
    now = journal.begin_term()
    first = Waiting(place, lambda: journal.append(now.term, now.head, [entry("one")]))
    sever(journal)
    with pytest.raises(Transient):
        first.answer.result(SECONDS_MAX)
    repeat = place.threads.submit(
        lambda: again(lambda: journal.append(now.term, now.head, [entry("one")]))
    )
    until(lambda: first.backends() == 2, "the repeat to wait behind the first")
    first.let_go()
    after = repeat.result(SECONDS_MAX)
    assert (after.seq, place.entries()) == (1, 1)
    assert journal.append(after.term, after.head, [entry("two")]).seq == 2
    verify(journal)


def test_another_append_in_place_of_one_that_landed_is_refused(place: Place):
    journal = place.journal()
    now = journal.begin_term()
    waiting = Waiting(place, lambda: journal.append(now.term, now.head, [entry("one")]))
    cut(journal, waiting)
    until(lambda: place.entries() == 1, "the append to land")
    with pytest.raises(Deposed, match="gave up"):
        again(lambda: journal.append(now.term, now.head, [entry("another")]))
    assert place.entries() == 1


def test_a_snapshot_that_landed_without_an_answer_does_not_depose_its_own_writer(place: Place):
    journal = place.journal()
    now = journal.begin_term()
    now = journal.append(now.term, now.head, [entry("one")])
    brought = journal.bring(now.term, '{"count":1}', 1).result(SECONDS_MAX)
    waiting = Waiting(place, lambda: journal.vouch(now.term, now.head, brought))
    cut(journal, waiting)
    there = "SELECT count(*) FROM keepstep.snapshots WHERE link > 0"
    until(lambda: place.look(there) == 1, "the snapshot")
    # The next call breaks too, after it has learned of the snapshot; the one after it succeeds.
    waiting = Waiting(place, lambda: journal.append(now.term, now.head, [entry("two")]))
    place.look(f"SELECT pg_terminate_backend({waiting.backend()})")
    with pytest.raises(Transient):
        waiting.answer.result(SECONDS_MAX)
    waiting.let_go()
    after = again(lambda: journal.append(now.term, now.head, [entry("two")]))
    assert after.seq == 2
    journal.append(after.term, after.head, [entry("three")])
    loaded = journal.load()
    assert (loaded.snapshot, len(loaded.entries)) == ({"count": 1}, 2)
    verify(journal)


def test_a_frozen_server_is_left_and_what_it_writes_when_it_wakes_up_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    journal = place.journal()
    now = journal.begin_term()
    assert journal._connection is not None
    frozen = journal._connection.info.backend_pid
    os.kill(frozen, signal.SIGSTOP)
    try:
        monkeypatch.setattr(journal_postgres, "BRIEF_SECONDS_MAX", 0.3)
        with pytest.raises(Transient):
            journal.append(now.term, now.head, [entry("one")])
        monkeypatch.undo()
        now = again(lambda: journal.append(now.term, now.head, [entry("one")]))
        now = journal.append(now.term, now.head, [entry("two")])
    finally:
        os.kill(frozen, signal.SIGCONT)
    gone = f"SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = {frozen}"
    until(lambda: place.look(gone), "the server process to notice that its client has left")
    assert place.entries() == 2
    assert journal.append(now.term, now.head, [entry("three")]).seq == 3
    verify(journal)


def test_an_append_that_is_stuck_behind_another_gives_up_soon(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(journal_postgres, "LOCK_SECONDS_MAX", 0.2)
    journal = place.journal()
    now = journal.begin_term()
    stuck = Waiting(place, lambda: journal.append(now.term, now.head, [entry("one")]))
    with pytest.raises(Transient, match="lock timeout"):
        stuck.answer.result(5.0)
    stuck.let_go()
    assert again(lambda: journal.append(now.term, now.head, [entry("one")])).seq == 1
    assert place.entries() == 1


def test_a_host_that_does_not_answer_holds_nobody_up(place: Place):
    journal = place.journal()
    now = journal.begin_term()
    place.look(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE application_name = 'keepstep' AND datname = current_database()"
    )
    with pytest.raises(Transient):
        journal.append(now.term, now.head, [entry("one")])
    os.kill(place.server.pid, signal.SIGSTOP)
    try:
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(Transient, match="does not answer"):
                journal.append(now.term, now.head, [entry("one")])
            assert time.monotonic() - began < 3.0, "it waits for the connection no longer than that"
    finally:
        os.kill(place.server.pid, signal.SIGCONT)
    assert again(lambda: journal.append(now.term, now.head, [entry("one")])).seq == 1


@pytest.mark.parametrize("trouble", [OSError(24, "Too many open files"), RuntimeError("no thread")])
@pytest.mark.parametrize("connected", [True, False])
def test_no_file_or_thread_to_be_had_is_a_bad_moment_and_not_the_end_of_a_leader(
    place: Place, monkeypatch: pytest.MonkeyPatch, trouble: Exception, connected: bool
):
    def none(*_: object) -> None:
        raise trouble

    journal = place.journal()
    now = journal.begin_term()
    if not connected:
        journal._drop()
    with monkeypatch.context() as short:
        short.setattr(journal_postgres, "cut_off_late", none)
        for _ in range(2):
            with pytest.raises(Transient, match=r"Too many open files|no thread"):
                journal.append(now.term, now.head, [entry("one")])
    assert again(lambda: journal.append(now.term, now.head, [entry("one")])).seq == 1
    assert place.entries() == 1


def test_a_timer_that_cannot_be_started_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch):
    def none(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", none)
    ours, other = socket.socketpair()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(RuntimeError), cut_off_late(ours.fileno(), 1.0):
            raise AssertionError("nothing is begun without a bound")
    assert len(os.listdir("/proc/self/fd")) == before
    ours.close()
    other.close()


# --- opening -------------------------------------------------------------------------------------


def test_a_journal_of_version_one_is_upgraded_with_all_that_is_in_it(place: Place):
    growth = grow(Term(4), 0, {}, [entry("one"), Entry((), {"why": "two"})])
    with psycopg.connect(place.url, autocommit=True) as old:
        journal_schema.migrate(old, 1)
        for row in growth.entries:
            old.execute("INSERT INTO keepstep.entries VALUES (%s, %s)", row)
        for link in growth.links:
            old.execute("INSERT INTO keepstep.links VALUES (%s, %s, %s, %s, %s)", link)
        for chain, where in growth.heads.items():
            old.execute("INSERT INTO keepstep.heads VALUES (%s, %s, %s)", (chain, *where))
        head = growth.heads[""][1]
        old.execute("UPDATE keepstep.standing SET term = 4, seq = 2, head = %s", (head,))
    journal = place.journal()
    now = journal.begin_term()
    assert (now.term, now.seq, now.head, now.jobs) == (5, 2, head, growth.jobs)
    now = journal.append(now.term, now.head, [entry("three")])
    assert [plain["why"] for plain in journal.load().entries] == ["one", "two", "three"]
    verify(journal)
    versions = place.look("SELECT array_agg(version ORDER BY version) FROM keepstep.migrations")
    assert versions == list(range(1, len(journal_schema.MIGRATIONS) + 1))


def test_a_newer_journal_is_refused_with_the_fix(place: Place):
    place.journal().begin_term()
    place.look("INSERT INTO keepstep.migrations VALUES (99)")
    with pytest.raises(ConfigError, match="version 99, and this Keepstep knows 3: a newer one"):
        place.journal().begin_term()


def test_who_led_before_the_tables_were_upgraded_leads_on_after_its_connection_broke(place: Place):
    """The middle of a rolling upgrade: followers are newer, and have added to the tables."""
    journal = place.journal()
    now = journal.begin_term()
    place.look("INSERT INTO keepstep.migrations VALUES (99)")
    sever(journal)
    now = again(lambda: journal.append(now.term, now.head, [entry("one")]))
    assert (now.seq, journal.look().term) == (1, now.term)
    verify(journal)


def test_a_failed_upgrade_leaves_the_version_that_was_there(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    with psycopg.connect(place.url, autocommit=True) as connection:
        journal_schema.migrate(connection, 1)
        broken = (*journal_schema.MIGRATIONS[:2], "SELECT 1 FROM keepstep.no_such_table")
        monkeypatch.setattr(journal_schema, "MIGRATIONS", broken)
        with pytest.raises(psycopg.errors.UndefinedTable):
            journal_schema.migrate(connection, 3)
    assert place.look("SELECT max(version) FROM keepstep.migrations") == 1
    monkeypatch.undo()
    assert place.journal().begin_term().term == 1


def test_a_user_without_rights_is_told_what_is_missing(place: Place):
    place.look("CREATE ROLE guest LOGIN")
    guest = PostgresJournal(place.url.replace("keepstep@", "guest@"))
    with pytest.raises(ConfigError, match=r"permission denied.*make the user its owner"):
        guest.begin_term()
    guest.close()


def test_tables_that_were_taken_away_are_no_transient_trouble(place: Place):
    journal = place.journal()
    now = journal.begin_term()
    place.look("DROP TABLE keepstep.entries")
    with pytest.raises(Permanent, match="does not exist"):
        journal.append(now.term, now.head, [entry("one")])


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:secret@host/db?colour=red",
        "postgresql://u:secret@[half/db",
        "postgresql://u:pa@secret@host/db",
        "postgresql://u:secret/pa@host/db",
        "postgresql://u:12/secret@host/db",
    ],
)
def test_a_url_that_cannot_be_read_is_refused_without_its_password(url: str):
    with pytest.raises(ConfigError, match="write postgresql://") as refused:
        open_journal(url, OrchestratorConfig())
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "where",
    [
        "postgresql+psycopg://u:secret@db/x",
        "postgresql:/u:secret@db/x",
        "host=db password=secret",
        "password = secret dbname=x",
    ],
)
def test_what_is_nearly_a_url_is_no_file_named_after_a_password(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="postgresql://HOST/DATABASE") as refused:
        open_journal(where, OrchestratorConfig())
    assert "secret" not in str(refused.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["journal.db", "a@b:c.db", "./host=x"])
def test_other_names_are_files(name: str, tmp_path: Path):
    open_journal(str(tmp_path / name), OrchestratorConfig(tick_seconds=5.0)).close()
    assert (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("where", "has_one"),
    [
        ("postgresql://u:secret@db/x", True),
        ("postgres://u:se/cret@db/x", True),
        ("postgresql://db/x?user=u&password=secret", True),
        ("postgresql://u@[::1]:5432,db:5433/x?sslmode=require", False),
        ("postgresql://db/x", False),
        ("journal.db", False),
    ],
)
def test_a_password_on_the_command_line_is_refused(
    where: str, has_one: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    if not has_one:
        refuse_password(where)
        return
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    assert main(["--journal", where, "--token-file", str(token)]) == EXIT_USAGE
    said = capsys.readouterr().err
    assert "a command line shows in `ps`" in said
    assert "secret" not in said


def test_a_place_says_which_journal_is_meant(place: Place):
    config = OrchestratorConfig(journal_holder="me", lease_seconds=7.0)
    journal = open_journal(place.url, config)
    assert isinstance(journal, PostgresJournal)
    assert journal.begin_term().lease_seconds == 7.0
    assert place.look("SELECT holder FROM keepstep.standing") == "me"
    journal.close()
    for wrong, fix in (("mysql://x/y", "no journal is known for mysql://"), ("", "give --journal")):
        with pytest.raises(ConfigError, match=fix):
            open_journal(wrong, config)
