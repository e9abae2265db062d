"""The one durable, hash-chained record of what was seen and decided.

    append(term, expected_head, entries) -> where the chains stand now, or Deposed

Each job has a chain of its own, so that it can be given to the job's owner; the cluster chain
holds what belongs to no job, and the head of every job chain that grew:

    cluster  --[node-3 fell silent]--[job a: head 7f…]--[job b: head 01…]--[snapshot: 9c…]--
    job a    --[submitted]--[rank 2 exited]--[all unwound]--
    job b    --[submitted]--[rank 2 of a…]--

A link's hash is sha256 over the previous link's hash and the link's canonical bytes, so whoever
kept an old head can catch a rewritten past. `seq` numbers the entries of the whole journal in the
order in which a restart replays them.

The journal must never accept an entry from a leader that was replaced: an append with an older
term, or onto a head that has moved, raises Deposed and writes nothing.

This is the seam: what a journal is, and what its chains are made of. journal_sqlite keeps one in a
file, journal_postgres in a database, and both pass the same contract tests. A store that is away
raises Transient: the very same call may be repeated, and nothing is written twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from keepstep import codec
from keepstep.errors import Permanent
from keepstep.model import JobId, Term

CLUSTER = ""
"""The name of the cluster's own chain; no job is called that."""
ROOT = hashlib.sha256(b"keepstep journal 1").hexdigest()
"""What the first link of every chain points back to."""
SNAPSHOTS_KEPT = 2
"""The newest, and the one before it in case the newest turns out to be unreadable. The very first
one, at seq 0, is small and always stays: from it everything can be replayed."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One step of the brain, as it goes to disk."""

    jobs: tuple[JobId, ...]
    """The chains it belongs to; none: the cluster's."""
    body: dict[str, Any]
    """Plain JSON: the event, the moment, and the reason of the decision."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the chains stand."""

    term: Term
    seq: int
    """Of the newest entry; 0 when there is none."""
    head: str
    """Of the cluster chain."""
    jobs: Mapping[str, str]
    """The heads of the job chains: of all of them at the start of a term, of those that grew
    after an append."""
    lease_seconds: float = 0.0
    """How long the store lets nobody else begin a term after a write; 0: it never does. A leader
    that has nothing to write appends nothing in time."""
    vacant_seconds: float = 0.0
    """At the start of a term: how long nobody had written, on the store's own clock."""


@dataclass(frozen=True, slots=True)
class Look:
    """What one who does not lead sees of who does."""

    term: Term
    seq: int
    holder: str
    endpoint: str
    """Where that leader is reached; empty: it did not say."""
    lease_seconds_left: float
    """0: anybody may begin a term."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a restart reads: the newest snapshot and the entries after it."""

    snapshot: Any
    """None when there is none."""
    at_seq: int
    entries: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Brought:
    """A snapshot's text that is in the store, or can be written along with its link."""

    at_seq: int
    body: str
    digest: str

    @staticmethod
    def of(body: str, at_seq: int) -> Brought:
        return Brought(at_seq, body, _digest(body))

    @staticmethod
    def at_once(body: str, at_seq: int) -> Future[Brought]:
        """Of a store that is so near that nobody brings anything."""
        done: Future[Brought] = Future()
        done.set_result(Brought.of(body, at_seq))
        return done


@dataclass(frozen=True, slots=True)
class Link:
    """One link of a chain, as it is exported."""

    number: int
    hash: str
    body: str
    """Canonical JSON: exactly the bytes that were hashed."""


class Journal(Protocol):
    """What the loop needs of a journal, whatever stores it."""

    def begin_term(self, endpoint: str = "", above: Term = Term(0)) -> Standing:
        """Take over: a term higher than any before it, and than `above`. Whoever wrote until now is
        deposed. `endpoint` is where others may send agents and operators. Transient while somebody
        else has a lease; it says for how long."""

    def append(self, term: Term, expected_head: str, entries: Sequence[Entry]) -> Standing:
        """All the entries or none, on disk when this returns. Of none, it is the proof that this
        term still leads, and makes its lease longer."""

    def bring(self, term: Term, body: str, at_seq: int) -> Future[Brought]:
        """The state as it was after the entry `at_seq`, as canonical JSON, to the store. Others may
        write meanwhile, and nobody believes it before its digest is in the cluster chain."""

    def vouch(self, term: Term, expected_head: str, brought: Brought) -> Standing:
        """Keep a snapshot that this term has brought: its digest joins the cluster chain."""

    def load(self) -> Loaded:
        """What a restart needs, and no more."""

    def export(self, chain: str, after: int = 0) -> Iterator[Link]:
        """A chain, from the link after this number on; CLUSTER, or a job's name."""

    def close(self) -> None:
        """Let go of the store, and of the lease."""


class LeaseLine(Protocol):
    """The lease and nothing else. Transient if the store does not answer."""

    def ready(self) -> None:
        """Connect, if need be."""

    def prolong(self, term: Term) -> bool:
        """Make this term's lease longer. False: it has none any more."""

    def close(self) -> None: ...


class SharedJournal(Journal, Protocol):
    """What followers need besides: a journal that others write, and that they read."""

    def lease_line(self) -> LeaseLine:
        """A way to the lease for another thread than the writer's, and for that one alone."""

    def look(self, *, offers: bool = False) -> Look:
        """Who leads, and for how long at least. `offers`: agents come to us; whoever leads and has
        none may know."""

    def offered(self) -> bool:
        """Whether agents come to anybody else, by its last look."""

    def tail(self, after: int) -> tuple[tuple[int, str], ...]:
        """The entries after a seq, oldest first, each with its seq and its canonical JSON; at most
        TAIL_ENTRIES_MAX of them."""


TAIL_ENTRIES_MAX = 500
PAGE_LINKS = 100
"""Of a chain, read at once."""

Place = tuple[int, str]
"""The number and the hash of a chain's newest link."""
START: Place = (0, ROOT)
Row = tuple[str, int, str, int | None, str | None]
"""A link as a store keeps it: chain, number, hash, and the entry's seq or a body of its own. An
entry's text is stored once, whatever its chains."""


@dataclass(frozen=True, slots=True)
class Growth:
    """What a write adds to the chains, worked out before anything is written."""

    seq: int
    entries: tuple[tuple[int, str], ...]
    """The seq and the canonical JSON of each."""
    links: tuple[Row, ...]
    heads: Mapping[str, Place]
    """Of the chains that grew."""

    @property
    def jobs(self) -> dict[str, str]:
        return {chain: head for chain, (_, head) in self.heads.items() if chain != CLUSTER}


def grow(term: Term, seq: int, heads: Mapping[str, Place], entries: Sequence[Entry]) -> Growth:
    """The links of new entries after `seq`, where the chains stand at `heads`."""
    grown: dict[str, Place] = {}
    bodies: list[tuple[int, str]] = []
    links: list[Row] = []

    def link(chain: str, body: str, of_seq: int | None = None) -> str:
        number, previous = grown.get(chain) or heads.get(chain, START)
        grown[chain] = number + 1, link_hash(previous, body)
        links.append((chain, *grown[chain], of_seq, None if of_seq is not None else body))
        return grown[chain][1]

    for entry in entries:
        seq += 1
        body = codec.dumps({"entry": entry.body, "seq": seq, "term": term}).decode()
        bodies.append((seq, body))
        if not entry.jobs:
            link(CLUSTER, body, seq)
        for job in entry.jobs:
            vouch = {"head": link(job, body, seq), "job": job, "seq": seq}
            link(CLUSTER, codec.dumps(vouch).decode())
    return Growth(seq, tuple(bodies), tuple(links), grown)


def write_snapshot(journal: Journal, standing: Standing, body: str, at_seq: int) -> Standing:
    """Bring it and vouch for it, where nobody has to be led meanwhile."""
    brought = journal.bring(standing.term, body, at_seq).result()
    return journal.vouch(standing.term, standing.head, brought)


def grow_by_snapshot(brought: Brought, seq: int, head: Place) -> Growth:
    """The link that vouches for a snapshot, on the cluster chain that stands at `head`."""
    assert brought.at_seq <= seq, "a snapshot of entries that are not there yet"
    said = _vouching(brought.at_seq, brought.digest)
    number, hash_ = head[0] + 1, link_hash(head[1], said)
    return Growth(seq, (), ((CLUSTER, number, hash_, None, said),), {CLUSTER: (number, hash_)})


def snapshot_link(at_seq: int, body: str) -> str:
    """What the cluster chain says of a snapshot."""
    return _vouching(at_seq, _digest(body))


def _vouching(at_seq: int, digest: str) -> str:
    return codec.dumps({"seq": at_seq, "snapshot": digest}).decode()


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def keeping(standing: Standing, silent_seconds: float, snapshot_seq: int) -> dict[str, Any]:
    """How a journal fares, for people."""
    return {
        "written_seconds_ago": round(silent_seconds, 3),
        "seq": standing.seq,
        "snapshot_seq": snapshot_seq,
        "term": standing.term,
        "lease_seconds": standing.lease_seconds,
    }


def link_hash(previous: str, body: str) -> str:
    return hashlib.sha256(f"{previous}\n{body}".encode()).hexdigest()


def json_lines(links: Iterable[Link]) -> Iterator[str]:
    """A chain as its owner gets it: one link per line, each line enough to check the next."""
    for link in links:
        plain = {"number": link.number, "hash": link.hash, "body": link.body}
        yield codec.dumps(plain).decode() + "\n"


def check_chain(name: str, links: Iterable[Link]) -> Iterator[Link]:
    """Pass the links of one chain on, or raise Permanent at the first that does not fit."""
    previous = ROOT
    for number, link in enumerate(links, start=1):
        if link.number != number:
            raise Permanent(f"{_called(name)}: link {number} is missing")
        if link.hash != link_hash(previous, link.body):
            raise Permanent(f"{_called(name)}: link {number} was changed after it was written")
        previous = link.hash
        yield link


def verify(journal: Journal) -> Mapping[str, str]:
    """Walk every chain and return its head; the cluster chain must vouch for each job's head.

    Raises Permanent, naming the link, if anything was changed, removed or put in between.
    """
    vouched: dict[str, list[str]] = {}
    heads: dict[str, str] = {CLUSTER: ROOT}
    for link in check_chain(CLUSTER, journal.export(CLUSTER)):
        heads[CLUSTER] = link.hash
        said = codec.loads(link.body)
        if "head" in said:
            vouched.setdefault(said["job"], []).append(said["head"])
    for job, known in vouched.items():
        found = [link.hash for link in check_chain(job, journal.export(job))]
        if found != known:
            raise Permanent(
                f"{_called(job)}: {len(found)} links, but the cluster chain vouches for "
                f"{len(known)} others"
            )
        heads[job] = found[-1]
    return heads


def _called(chain: str) -> str:
    return f"the chain of job {chain}" if chain else "the cluster chain"
