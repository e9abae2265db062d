"""The state that a journal implies: read once, then kept up to date by reading on.

    newest snapshot -- entry -- entry -- entry -- …      the brain steps through them again

A leader makes one when it begins; a follower keeps one warm, so that a takeover has only the last
few entries to read. A journal that is not the one that was read (its database was put back to an
earlier time) is noticed by the last entry that was read, and everything is read anew: a state made
of two histories must never lead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from keepstep import codec
from keepstep.errors import Permanent
from keepstep.model import Term
from keepstep.orchestrator import brain, events, reconcile, state
from keepstep.orchestrator.journal import Journal, Loaded, SharedJournal, Standing


@dataclass(slots=True)
class Replica:
    """A state, and how much of the journal it has seen."""

    cluster: state.Cluster
    moment: float
    """Of the newest entry."""
    seq: int
    snapshot_seq: int
    replayed: int = 0
    """Events stepped through, snapshot aside."""
    last: str = ""
    """The newest entry as the journal has it; empty: it was not looked at yet."""

    def step(self, bodies: Iterable[dict[str, Any]]) -> None:
        for body in bodies:
            self.moment = float(body["now"])
            event = events.from_plain(body["event"])
            self.cluster = brain.step(self.cluster, event, self.moment).cluster
            self.seq += 1
            self.replayed += events.weight(event)


def read(journal: Journal) -> Replica | None:
    """From the newest snapshot on; None: nobody has ever led here."""
    loaded = journal.load()
    if loaded.snapshot is None:
        if loaded.entries:
            raise Permanent("the journal has entries but no first snapshot: it was damaged")
        return None
    return of(loaded)


def of(loaded: Loaded) -> Replica:
    """The state after the newest entry. There is a snapshot."""
    events.refuse_newer(loaded.snapshot)
    cluster = state.from_plain(loaded.snapshot["cluster"])
    moment = float(loaded.snapshot["now"])
    if "behind_at" not in loaded.snapshot["cluster"]:
        reconcile.date_gaps(cluster, moment)
    replica = Replica(cluster, moment, loaded.at_seq, loaded.at_seq)
    replica.step(loaded.entries)
    return replica


def follow(replica: Replica, journal: SharedJournal) -> Replica | None:
    """Read on, to the journal's end. What went in must not be used again."""
    while True:
        # The last one again: it says whether this is still the same journal.
        known = 1 if replica.seq else 0
        rows = journal.tail(replica.seq - known)
        if known and (
            not rows or rows[0][0] != replica.seq or replica.last not in ("", rows[0][1])
        ):
            return read(journal)
        if known and not replica.last:
            replica.last = rows[0][1]
        fresh = rows[known:]
        if not fresh:
            return replica
        replica.step(codec.loads(body)["entry"] for _, body in fresh)
        replica.last = fresh[-1][1]
        if replica.seq != fresh[-1][0]:
            raise Permanent(f"the journal has no entry between {replica.seq} and {fresh[-1][0]}")


@dataclass(frozen=True, slots=True)
class Begun:
    """A term that began, and the state that it begins with."""

    standing: Standing
    replica: Replica | None
    endpoint: str = ""


def begin(journal: Journal, above: Term = Term(0)) -> Begun:
    """For who leads alone: nobody follows, and nothing was read before.

    Who cannot read a journal must not depose who can: so it is read first, and again only if
    somebody has written since.
    """
    found = read(journal)
    standing = journal.begin_term(above=above)
    if found is None or found.seq != standing.seq:
        found = read(journal)
    return Begun(standing, found)
