"""A journal in memory: the same chains, terms and refusals as on a disk, and nothing left of it.

It passes the contract of every journal. A simulation that lasts for a month forgets entries that no
restart can ask for any more; heads, numbers and hashes are those of the whole chain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from keepstep import codec
from keepstep.errors import Deposed, Transient
from keepstep.model import Term
from keepstep.orchestrator.journal import (
    CLUSTER,
    ROOT,
    SNAPSHOTS_KEPT,
    START,
    Brought,
    Entry,
    Growth,
    Link,
    Loaded,
    Place,
    Row,
    Standing,
    grow,
    grow_by_snapshot,
    snapshot_link,
)


class MemoryJournal:
    """What several orchestrators of one process share."""

    def __init__(self, *, forgets: bool = False) -> None:
        self.away = False
        """The store does not answer."""
        self._forgets = forgets
        self._term, self._seq = Term(0), 0
        self._heads: dict[str, Place] = {}
        self._entries: dict[int, str] = {}
        self._links: dict[str, list[Row]] = {}
        self._snapshots: dict[int, tuple[int, str]] = {}
        """By seq: the number of the link that vouches for it, and its body."""
        self.appended = 0

    def begin_term(self, endpoint: str = "", above: Term = Term(0)) -> Standing:
        del endpoint  # Nobody is sent anywhere: there is one process.
        self._answer()
        self._term = Term(max(self._term, above) + 1)
        heads = {chain: place[1] for chain, place in self._heads.items()}
        cluster = heads.pop(CLUSTER, ROOT)
        return Standing(self._term, self._seq, cluster, heads)

    def append(self, term: Term, expected_head: str, entries: Sequence[Entry]) -> Standing:
        self._check(term, expected_head)
        growth = grow(term, self._seq, self._heads, entries)
        self._entries.update(growth.entries)
        self._keep(growth)
        self._seq = growth.seq
        self.appended += len(entries)
        return Standing(term, growth.seq, self._heads.get(CLUSTER, START)[1], growth.jobs)

    def bring(self, term: Term, body: str, at_seq: int) -> Future[Brought]:
        del term  # In memory: the text is there with its link.
        return Brought.at_once(body, at_seq)

    def vouch(self, term: Term, expected_head: str, brought: Brought) -> Standing:
        self._check(term, expected_head)
        growth = grow_by_snapshot(brought, self._seq, self._heads.get(CLUSTER, START))
        self._keep(growth)
        number, head = growth.heads[CLUSTER]
        at_seq, body = brought.at_seq, brought.body
        self._snapshots[at_seq] = (number, body)
        for old in sorted(filter(None, self._snapshots))[:-SNAPSHOTS_KEPT]:
            del self._snapshots[old]
        if self._forgets:
            self._snapshots = {at_seq: (number, body)}
            self._entries = {seq: text for seq, text in self._entries.items() if seq > at_seq}
        return Standing(term, self._seq, head, {})

    def load(self) -> Loaded:
        self._answer()
        for at_seq, (number, body) in sorted(self._snapshots.items(), reverse=True):
            said = self._link_body(number)
            if said is None or said == snapshot_link(at_seq, body):
                return Loaded(codec.loads(body), at_seq, self._entries_after(at_seq))
        return Loaded(None, 0, self._entries_after(0))

    def export(self, chain: str, after: int = 0) -> Iterator[Link]:
        self._answer()
        for _, number, hash_, seq, body in tuple(self._links.get(chain, ()))[after:]:
            yield Link(number, hash_, self._entries[seq] if seq is not None else body or "")

    def close(self) -> None:
        """Nothing is held that another would need."""

    def _answer(self) -> None:
        if self.away:
            raise Transient("the store does not answer", 1.0)

    def _check(self, term: Term, expected_head: str) -> None:
        self._answer()
        if term != self._term:
            raise Deposed(f"term {term} is over: term {self._term} leads now")
        head = self._heads.get(CLUSTER, START)[1]
        if head != expected_head:
            raise Deposed(f"the head moved to {head[:12]} while term {term} stood at another")

    def _keep(self, growth: Growth) -> None:
        self._heads.update(growth.heads)
        for row in () if self._forgets else growth.links:
            self._links.setdefault(row[0], []).append(row)

    def _link_body(self, number: int) -> str | None:
        for row in reversed(self._links.get(CLUSTER, ())):
            if row[1] == number:
                return row[4]
        return None

    def _entries_after(self, seq: int) -> tuple[dict[str, Any], ...]:
        after = sorted(number for number in self._entries if number > seq)
        return tuple(codec.loads(self._entries[number])["entry"] for number in after)
