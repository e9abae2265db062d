"""The journal of a cluster: a PostgreSQL database, written by one leader at a time.

    standing   one row: term, seq, head | holder, expires_at | endpoint, written_at
    entries    links    heads    snapshots     as in SQLite

Each write is one statement and one round trip. It locks the one row of `standing`, compares the
term and the head with the writer's, makes the lease longer, and adds its rows only if both were
right. So a writer that was stopped, for however long, is refused by the very statement that would
have written; the lease only says when somebody else may begin a term. Its time is the database's
alone: no clock of ours is read, sent or compared.

A connection that breaks raises Transient, and the next call connects anew. Whether a write that was
under way has landed is not known then: it is *in doubt*. The caller repeats the same call, and the
head tells: either it stands where the write would have brought it, and nothing is written twice, or
it does not, and the write is sent again. One that arrives late finds that the head has moved.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keepstep import codec
from keepstep.errors import ConfigError, Deposed, Permanent, Transient
from keepstep.model import Term
from keepstep.orchestrator import journal_schema
from keepstep.orchestrator import journal_sql as sql
from keepstep.orchestrator.cut_off import cut_off_late
from keepstep.orchestrator.journal import (
    CLUSTER,
    PAGE_LINKS,
    SNAPSHOTS_KEPT,
    START,
    TAIL_ENTRIES_MAX,
    Brought,
    Entry,
    Growth,
    Link,
    Loaded,
    Look,
    Place,
    Standing,
    grow,
    grow_by_snapshot,
    snapshot_link,
)

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.Connection[tuple[Any, ...]]

RETRY_SECONDS = 0.5
"""A restarted server needs about this long."""
LOOK_SECONDS_MAX = 1.0
"""How long one that waits for another's lease sleeps between two looks at it."""
RECONNECT_SECONDS_MAX = 0.5
"""How long a call waits for a new connection in place of a broken one. A host that is gone does not
say no: the attempt goes on in a thread, and the caller's loop can hear others meanwhile."""
CALL_SECONDS_MAX = 15.0
"""A call that has no answer by then is cut off. The server's own limits, below, end it earlier
unless the server is frozen or the network swallows everything."""
BRING_SECONDS_MAX = 300.0
"""The same for the text of a snapshot, for which nobody waits; the server's limit is raised to it.
A network that swallows everything is noticed by `tcp_user_timeout`."""
BRIEF_SECONDS_MAX = 2.0
"""The same for a write and for a page of an export. The caller's loop hears nobody meanwhile, and
agents leave that have no pulse for 4 s. An append that was merely slow is found to have landed."""
LOCK_SECONDS_MAX = 1.0
"""How long a write waits for the row. Nobody has it for longer but a write that is stuck itself."""
OFFER_LOCK = 0x6B73206F_66666572
"""The advisory lock's key, "ks offer" in ASCII. Whoever agents come to while another leads has it,
all of them share it, and nobody waits for it. It is gone with its connection: a sign, no lease."""
SETTINGS = {
    "connect_timeout": 5,
    "application_name": "keepstep",
    "client_encoding": "utf8",
    # Of several hosts in the URL, the one that can be written to.
    "target_session_attrs": "read-write",
    "tcp_user_timeout": 10_000,
}
"""Unless the URL says otherwise."""


@dataclass(frozen=True, slots=True)
class _Chains:
    """All that a write has to know beforehand. True as long as the cluster's head is `head`."""

    term: Term
    seq: int
    head: str
    holder: str
    places: dict[str, Place]

    def after(self, growth: Growth) -> _Chains:
        _, head = growth.heads.get(CLUSTER, (0, self.head))
        # Changed in place: a cluster has many chains, and a write adds to few of them.
        self.places.update(growth.heads)
        return _Chains(self.term, growth.seq, head, self.holder, self.places)


class PostgresJournal:
    """A journal in a database that others may try to write too.

    An append of one entry of 1 kB took 0.8 ms at the median and 1.1 ms at p95, one of 256 entries
    27 ms (500 appends, PostgreSQL 15 with fsync on the same machine, by a Unix socket). Across a
    network add one round trip each.
    """

    def __init__(self, url: str, *, holder: str = "", lease_seconds: float = 10.0) -> None:
        self._psycopg = driver()
        self._settings = self._read(url)
        self._holder = holder
        self._lease = lease_seconds
        self._connection: Connection | None = None
        self._threads = ThreadPoolExecutor(1, "keepstep-journal")
        self._connecting: Future[Connection] | None = None
        self._carriers = ThreadPoolExecutor(1, "keepstep-snapshot")
        self._stop_carrying: Callable[[], None] = _nothing
        self._closed = False
        self._was_connected = self._offers = False
        self._chains: _Chains | None = None
        self._led: Term | None = None
        """The term that we began last."""
        self._returning = True
        """A lease under our name is of the process before us; later it is of a namesake."""
        self._doubts: dict[str, Growth] = {}
        """Writes that may have landed, by the head that they would have left."""
        self._moved: dict[str, str] = {}
        """Where our own snapshots, which we gave up and which landed, moved the caller's head."""

    # ---------------------------------------------------------------- the lease

    def begin_term(self, endpoint: str = "", above: Term = Term(0)) -> Standing:
        asked = {"holder": self._holder or endpoint or socket.gethostname(), "lease": self._lease}
        asked["longest"] = self._lease + CALL_SECONDS_MAX + BRIEF_SECONDS_MAX
        asked |= {"endpoint": endpoint, "above": above, "returning": self._returning}
        with self._session(CALL_SECONDS_MAX) as connection:
            # The lease and the chains in one transaction, with the row locked: nobody writes
            # between the two.
            with connection.transaction():
                taken = connection.execute(sql.BEGIN, asked).fetchone()
                self._returning = False
                if taken is None:
                    raise _leads_already(connection.execute(sql.LEASE).fetchone())
                chains = _read_chains(connection)
        self._chains, self._led, self._doubts, self._moved = chains, chains.term, {}, {}
        heads = {chain: hash_ for chain, (_, hash_) in chains.places.items() if chain != CLUSTER}
        return Standing(chains.term, chains.seq, chains.head, heads, self._lease, taken[1])

    def look(self, *, offers: bool = False) -> Look:
        with self._session(BRIEF_SECONDS_MAX) as connection:
            if offers != self._offers:
                connection.execute(sql.OFFER if offers else sql.TAKE_BACK, (OFFER_LOCK,))
                self._offers = offers
            row = connection.execute(sql.LEASE).fetchone()
        assert row is not None, "the one row of the standing is there since the first migration"
        term, holder, seconds, seq, endpoint = row
        return Look(Term(term), seq, holder, endpoint, max(0.0, seconds))

    def offered(self) -> bool:
        try:
            with self._session(BRIEF_SECONDS_MAX) as connection:
                return connection.execute(sql.OFFERED, (OFFER_LOCK,)).fetchone() is not None
        except Transient:
            return False  # Nobody can be seen, and nobody could take over.

    def lease_line(self) -> LeaseLine:
        return LeaseLine(lambda: self._connect(migrate=False), self._psycopg.Error, self._lease)

    def let_go(self) -> None:
        """Of the lease, if it is still ours and the database is there to be told."""
        if self._led is not None:
            try:
                with self._session(BRIEF_SECONDS_MAX) as connection:
                    connection.execute(sql.LET_GO, (self._led,))
            except (Transient, Permanent, ConfigError):
                pass  # It ends by itself.
        self._led = None

    def begin_again(self) -> None:
        """We step down only to begin a higher term: what is left of the lease is our own, and need
        not be waited for. Nor is it let go of: who does not know above which term would begin one
        in vain."""
        self._returning = self._returning or self._led is not None

    def close(self) -> None:
        self.let_go()
        self._drop()
        self._closed = True
        self._stop_carrying()
        self._carriers.shutdown(wait=False, cancel_futures=True)
        if self._connecting is not None:
            self._connecting.add_done_callback(_close_unused)
        self._threads.shutdown(wait=False)

    # ---------------------------------------------------------------- writing

    def append(self, term: Term, expected_head: str, entries: Sequence[Entry]) -> Standing:
        def growth_on(chains: _Chains) -> Growth:
            return grow(term, chains.seq, chains.places, entries)

        def send(connection: Connection, rows: dict[str, Any], growth: Growth) -> bool:
            rows["entries"] = _document(("seq", "body"), growth.entries)
            return connection.execute(sql.APPEND, rows).fetchone() is not None

        return self._write(term, expected_head, growth_on, send)

    def bring(self, term: Term, body: str, at_seq: int) -> Future[Brought]:
        try:
            return self._carriers.submit(self._carry, term, body, at_seq)
        except RuntimeError as error:
            raise Transient(f"nobody brings the snapshot: {error}", RETRY_SECONDS) from error

    def _carry(self, term: Term, body: str, at_seq: int) -> Brought:
        """In a thread, on a connection of its own: the writer's is not held up."""
        brought = Brought.of(body, at_seq)
        with self._in_our_words(_nothing), ExitStack() as bound:

            def connect() -> Connection:
                return bound.enter_context(closing(self._connect(migrate=False)))

            connection, self._stop_carrying = self._bounded(bound, connect, BRING_SECONDS_MAX)
            if self._closed:
                raise Transient("the journal is closed", RETRY_SECONDS)
            connection.execute(sql.LEISURE, (f"{BRING_SECONDS_MAX}s",))
            connection.execute(sql.BRING, {"at_seq": at_seq, "brought": -term, "body": body})
        return brought

    def vouch(self, term: Term, expected_head: str, brought: Brought) -> Standing:
        def growth_on(chains: _Chains) -> Growth:
            return grow_by_snapshot(brought, chains.seq, chains.places.get(CLUSTER, START))

        def send(connection: Connection, rows: dict[str, Any], growth: Growth) -> bool:
            link, _ = growth.heads[CLUSTER]
            rows |= {"at_seq": brought.at_seq, "brought": -term, "link": link}
            rows["others"] = SNAPSHOTS_KEPT - 1
            return connection.execute(sql.VOUCH, rows).fetchone() is not None

        return self._write(term, expected_head, growth_on, send)

    def _write(
        self,
        term: Term,
        expected_head: str,
        growth_on: Callable[[_Chains], Growth],
        send: Callable[[Connection, dict[str, Any], Growth], bool],
    ) -> Standing:
        expected_head = self._moved.get(expected_head, expected_head)
        with self._session(BRIEF_SECONDS_MAX) as connection:
            chains = self._chains
            if chains is None or (chains.term, chains.head) != (term, expected_head):
                chains = _read_chains(connection)
                _refuse_others(term, expected_head, chains)
            growth = growth_on(chains)
            if self._doubts and (landed := self._landed(connection, term, expected_head)):
                done = self._written(chains, landed)
                if landed.heads == growth.heads:
                    self._moved = {}
                    return done
                if landed.entries:
                    raise Deposed("entries that the writer gave up are in the journal after all")
                # A snapshot that was given up: what comes now goes behind it.
                self._moved = dict.fromkeys((*self._moved, chains.head), done.head)
                chains = chains.after(landed)
                growth = growth_on(chains)
            _, head = growth.heads.get(CLUSTER, (0, chains.head))
            known = head in self._doubts
            if growth.heads:
                self._doubts[head] = growth
            if send(connection, self._rows(term, chains, growth), growth):
                self._moved = {}
                return self._written(chains, growth)
            if not known:
                # Refused, so it will never land. One that was sent before may have landed, while
                # this one waited for the row.
                self._doubts.pop(head, None)
            found = _read_chains(connection)
            if found.term == term and found.head in self._doubts:
                raise Transient("a write in doubt landed just now", RETRY_SECONDS)
            _refuse_others(term, chains.head, found)
            raise Permanent("the journal refused a write that fits: its tables were changed")

    def _landed(self, connection: Connection, term: Term, expected_head: str) -> Growth | None:
        """The write in doubt that is there; None: none of them, so far."""
        found = _read_chains(connection)
        if (found.term, found.head) == (term, expected_head):
            return None
        growth = self._doubts.get(found.head) if found.term == term else None
        if growth is None:
            _refuse_others(term, expected_head, found)
        return growth

    def _written(self, chains: _Chains, growth: Growth) -> Standing:
        self._chains = now = chains.after(growth)
        self._doubts = {}
        return Standing(now.term, now.seq, now.head, growth.jobs, self._lease)

    def _rows(self, term: Term, chains: _Chains, growth: Growth) -> dict[str, Any]:
        _, head = growth.heads.get(CLUSTER, (0, chains.head))
        rows: dict[str, Any] = {"term": term, "expected": chains.head, "lease": self._lease}
        rows |= {"seq": growth.seq, "head": head}
        rows["links"] = _document(("chain", "number", "hash", "seq", "body"), growth.links)
        grown = [(chain, *place) for chain, place in growth.heads.items()]
        rows["heads"] = _document(("chain", "number", "hash"), grown)
        return rows

    # ---------------------------------------------------------------- reading

    def size(self) -> tuple[int | None, None]:
        """Bytes that the database has; None while it is away. Its disk is not ours to see."""
        try:
            with self._session(BRIEF_SECONDS_MAX) as connection:
                found = connection.execute("SELECT pg_database_size(current_database())").fetchone()
        except Transient:
            return None, None
        return (int(found[0]) if found else None), None

    def load(self) -> Loaded:
        with self._session(CALL_SECONDS_MAX) as connection:
            for at_seq, body, said in connection.execute(
                "SELECT s.seq, s.body, l.body FROM keepstep.snapshots s "
                "LEFT JOIN keepstep.links l ON l.chain = '' AND l.number = s.link "
                "WHERE s.link > 0 ORDER BY s.seq DESC"
            ).fetchall():
                # A snapshot that the chain does not vouch for was changed: replay more instead.
                if said == snapshot_link(at_seq, body):
                    return Loaded(codec.loads(body), at_seq, _entries_after(connection, at_seq))
            return Loaded(None, 0, _entries_after(connection, 0))

    def tail(self, after: int) -> tuple[tuple[int, str], ...]:
        with self._session(CALL_SECONDS_MAX) as connection:
            return tuple(connection.execute(sql.TAIL, (after, TAIL_ENTRIES_MAX)).fetchall())

    def export(self, chain: str, after: int = 0) -> Iterator[Link]:
        # Pages rather than one cursor: the loop appends between two pages and nothing is locked.
        number = after
        while True:
            with self._session(BRIEF_SECONDS_MAX) as connection:
                rows = connection.execute(sql.PAGE, (chain, number, PAGE_LINKS)).fetchall()
            if not rows:
                return
            for number, hash_, body in rows:
                yield Link(number, hash_, body)

    # ---------------------------------------------------------------- the connection

    @contextmanager
    def _session(self, seconds_max: float) -> Iterator[Connection]:
        """A connection for one call, with a bound on it; its troubles in the house's words."""
        with self._in_our_words(self._drop), ExitStack() as bound:
            yield self._bounded(bound, self._connected, seconds_max)[0]

    @contextmanager
    def _in_our_words(self, broken: Callable[[], None]) -> Iterator[None]:
        trouble = self._psycopg
        try:
            yield
        except (trouble.OperationalError, trouble.InterfaceError, trouble.InternalError) as error:
            # InternalError too: after a failover the server may be one that only reads.
            broken()
            raise Transient(
                f"the journal's database: {_in_a_line(error)}", RETRY_SECONDS
            ) from error
        except trouble.errors.InsufficientPrivilege as error:
            broken()
            raise ConfigError(
                f"the journal's database: {_in_a_line(error)}; make the user its owner"
            ) from error
        except trouble.Error as error:
            broken()
            raise Permanent(f"the journal's database: {_in_a_line(error)}") from error

    def _bounded(
        self, bound: ExitStack, connect: Callable[[], Connection], seconds_max: float
    ) -> tuple[Connection, Callable[[], None]]:
        """A connection, and what cuts it off before its time is up."""
        try:
            connection = connect()
            cut = bound.enter_context(cut_off_late(connection.fileno(), seconds_max))
        except (OSError, RuntimeError) as error:
            # No file or thread to be had is a bad moment, and not the end of a leader.
            raise Transient(f"no call to the journal's database: {error}", RETRY_SECONDS) from error
        return connection, cut

    def _connected(self) -> Connection:
        if self._connection is not None:
            return self._connection
        if self._connecting is None:
            self._connecting = self._threads.submit(self._connect)
        patience = RECONNECT_SECONDS_MAX if self._was_connected else None
        try:
            connection = self._connecting.result(patience)
        except TimeoutError:
            # Still under way: the next call asks again.
            raise Transient("the journal's database does not answer", RETRY_SECONDS) from None
        except (ConfigError, self._psycopg.Error, OSError, RuntimeError):
            self._connecting = None
            raise
        self._connecting, self._connection, self._was_connected = None, connection, True
        return connection

    def _connect(self, *, migrate: bool = True) -> Connection:
        connection: Connection = self._psycopg.connect(**self._settings, autocommit=True)
        try:
            with cut_off_late(connection.fileno(), CALL_SECONDS_MAX):
                connection.execute(sql.PREPARE)
                if migrate:
                    # Who was let in once goes on beside a newer one: its steps only add. It must
                    # not end because its connection broke in the middle of a rolling upgrade.
                    journal_schema.migrate(connection, newer_serves=self._was_connected)
                connection.execute(sql.HURRY, (f"{LOCK_SECONDS_MAX}s",))
        except (ConfigError, self._psycopg.Error, OSError, RuntimeError):
            connection.close()
            raise
        return connection

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection, self._offers = None, False

    def _read(self, url: str) -> dict[str, Any]:
        try:
            settings = {**SETTINGS, **self._psycopg.conninfo.conninfo_to_dict(url)}
            if _reads_well(settings):
                return settings
            raise self._psycopg.ProgrammingError
        except self._psycopg.ProgrammingError:
            # Nothing that the driver says: it quotes the URL, and with it the password.
            raise ConfigError(
                "the journal's URL cannot be read; write postgresql://USER@HOST:PORT/DATABASE, and "
                "in a password %2F for /, %40 for @"
            ) from None


class LeaseLine:
    """The lease alone, on a connection of its own: for one thread, which is not the writer's."""

    def __init__(
        self, connect: Callable[[], Connection], trouble: type[Exception], lease_seconds: float
    ) -> None:
        self._connect, self._trouble, self._lease = connect, trouble, lease_seconds
        self._connection: Connection | None = None

    def ready(self) -> None:
        try:
            self._connection = self._connection or self._connect()
        except (self._trouble, OSError) as error:
            raise Transient(f"no connection: {_in_a_line(error)}", RETRY_SECONDS) from error

    def prolong(self, term: Term) -> bool:
        """False: this term has no lease any more."""
        for again in (True, False):
            self.ready()
            assert self._connection is not None
            try:
                with cut_off_late(self._connection.fileno(), BRIEF_SECONDS_MAX):
                    asked = {"term": term, "lease": self._lease}
                    return self._connection.execute(sql.PROLONG, asked).rowcount > 0
            except (self._trouble, OSError) as error:
                # It may have been lost long ago, while nobody asked anything of it.
                self.close()
                if not again:
                    raise Transient(_in_a_line(error), RETRY_SECONDS) from error
        raise AssertionError("returned, or raised")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def driver() -> Any:
    """The one dependency, and only for those who ask for it."""
    try:
        import psycopg
        import psycopg.conninfo
    except ImportError as error:
        raise ConfigError(
            "a journal in PostgreSQL needs the driver psycopg: pip install 'keepstep[postgres]'"
        ) from error
    return psycopg


def _reads_well(settings: dict[str, Any]) -> bool:
    """No piece of a password is taken for a host, a port or a database, which errors quote."""
    hosts = str(settings.get("host", "")).split(",")
    ports = str(settings.get("port", "")).split(",")
    # A host that begins with @ is an abstract Unix socket.
    return (
        not any("@" in host[1:] for host in hosts)
        and all(port.isdigit() or not port for port in ports)
        and "@" not in str(settings.get("dbname", ""))
    )


def _read_chains(connection: Connection) -> _Chains:
    """Where everything stands, in one statement: no write can come in between."""
    rows = connection.execute(sql.STANDING).fetchall()
    term, seq, head, holder = rows[0][:4]
    places = {row[4]: (int(row[5]), str(row[6])) for row in rows if row[4] is not None}
    return _Chains(Term(term), seq, head, holder, places)


def _refuse_others(term: Term, expected_head: str, found: _Chains) -> None:
    if found.term != term:
        raise Deposed(f"term {term} is over: term {found.term} leads now, of {found.holder}")
    if found.head != expected_head:
        raise Deposed(f"the head moved to {found.head[:12]} while term {term} stood at another")


def _leads_already(row: tuple[Any, ...] | None) -> Transient:
    assert row is not None, "the one row of the standing is there since the first migration"
    term, holder, seconds = row[:3]
    return Transient(
        f"{holder} leads term {term}, and its lease has {max(seconds, 0.0):.1f} s to go",
        # Not only at its end: a holder that leaves in good order lets go of it earlier.
        min(max(seconds, 0.0) + 0.05, LOOK_SECONDS_MAX),
    )


def _entries_after(connection: Connection, seq: int) -> tuple[dict[str, Any], ...]:
    rows = connection.execute(
        "SELECT body FROM keepstep.entries WHERE seq > %s ORDER BY seq", (seq,)
    ).fetchall()
    return tuple(codec.loads(body)["entry"] for (body,) in rows)


def _document(names: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> str:
    """Rows as `json_to_recordset` takes them. A text comes out of it as it went in."""
    return json.dumps([dict(zip(names, row, strict=True)) for row in rows])


def _nothing() -> None:
    """To stop, or to drop."""


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _close_unused(connecting: Future[Connection]) -> None:
    if connecting.exception() is None:
        connecting.result().close()
