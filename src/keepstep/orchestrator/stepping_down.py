"""When a leader steps down by itself: it hears nobody, or an agent knows another history. Pure.

If it hears nobody while it can write, others may be nearer to the agents.
Its network may be cut towards the nodes and not towards the database, and it would keep its lease
for ever. So it lets go of it:

    its streams are open, and all are silent     at once, and once per silence: the next leader has
                                                 none. Agents that leave in good order close theirs
    it has no stream                             after a while, if agents come to somebody else

Agents that find no leader go round all orchestrators, for ever. So one that follows knows whether
they reach it, and says so (Knocks); where they reach nobody, or nobody else is there, to let go
would be of no use. Should they come to all and stay with none, the turns get longer and longer.

An agent that has seen a later term is the proof that the journal was put back, and so is one that
has seen this very term and was never greeted by its leader: it was begun before, by another, whose
entries are gone. One that lies, or is broken, must not be able to depose every leader there is: no
backup is a million terms old, and one node is heeded once a minute by each process. Who steps down
for it begins the next term itself, at once, in what is left of its own lease: it knows above which
term, and that it has heeded that node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from keepstep.errors import Alone, Behind, Permanent
from keepstep.model import NodeId, Term
from keepstep.orchestrator.events import JournalBehind, Tick
from keepstep.orchestrator.reconcile import TERM_MAX, believed
from keepstep.orchestrator.state import Cluster
from keepstep.wire import Hello

ALONE_SECONDS = 2.5
"""Five heartbeats of every node up to 4,000 of them; of more at least one each, at moments of their
own. Shorter than the silence for which a node is given up."""
NODES_MIN = 2
"""One node alone may simply be restarting its agent."""
OTHERS_SECONDS = 5.0
"""How long the others have to take the lease, before it is taken again."""
TERMS_AHEAD_MAX = 1_000_000
"""Ten days of a new leader each second: a term beyond was never begun."""
UNHEARD_SECONDS = 10.0
"""Without a stream, before others may have the lease: longer than any way back to a leader. And
between two times that a process lets go for it, the first time."""
UNHEARD_SECONDS_MAX = 300.0
"""The same, when it has not helped: they double up to here."""
OFFERED_LOOK_SECONDS = 1.0
"""Between two looks at who else is there."""
KNOCK_SECONDS_MAX = 8.0
"""Agents go round in less. Shorter than what a leader waits: it had nobody when they came."""
SENT_ON_SECONDS = 2.0
"""Whom we send to a leader is there by then, if it can be reached."""
HEED_SECONDS = 60.0
"""Between two leaders that step down because of the same node's word."""


@dataclass(slots=True)
class Past:
    """What a process remembers of the leaders that it was: the next one has to know."""

    heeded: dict[NodeId, float] = field(default_factory=dict)
    """Nodes whose word made a leader step down, and when."""
    let_go_at: float = -math.inf
    """When one let go because no agent came."""
    wait_seconds: float = UNHEARD_SECONDS
    """So long after that the next one may."""

    def let_go(self, now: float) -> None:
        """Again, and soon: then it was of no use, and is worth less."""
        soon = now < self.let_go_at + 4 * self.wait_seconds
        longer = min(2 * self.wait_seconds, UNHEARD_SECONDS_MAX)
        self.let_go_at, self.wait_seconds = now, longer if soon else UNHEARD_SECONDS


@dataclass(slots=True)
class Knocks:
    """Agents that come to one who does not lead."""

    first: float = math.inf
    last: float = -math.inf

    def hear(self, now: float) -> None:
        self.first = self.first if self.come(now) else now
        self.last = now

    def come(self, now: float) -> bool:
        return now <= self.last + KNOCK_SECONDS_MAX

    def stay(self, now: float) -> bool:
        """They still come, after they were sent to whoever leads."""
        return self.come(now) and now >= self.first + SENT_ON_SECONDS


class Leaving:
    """Whether one leader leaves, and why."""

    def __init__(self, now: float) -> None:
        self.why: Permanent | None = None
        """Raised when what is under way is written."""
        self.past = Past()
        self.offered: Callable[[], bool] = lambda: False
        """Whether agents come to another who could lead: never, where nobody else is."""
        self._heard_at = self._looked_at = now

    def heed(
        self, hello: Hello, cluster: Cluster, seq: int, now: float
    ) -> JournalBehind | Tick | None:
        """What to write before we leave because of this agent; None: its word has had its turn."""
        if not heeds(self.past.heeded, hello.node, now):
            return None
        self.why = Behind(min(hello.term_seen, TERM_MAX), hello.node)
        return last_words(
            believed(cluster, hello), cluster.term, cluster.terms.get(cluster.term, seq)
        )

    def listen(
        self,
        last_heard: Mapping[NodeId, float],
        connected: Collection[NodeId],
        now: float,
        *,
        excused: bool,
    ) -> None:
        """Leave if nobody is heard. `excused`: we know why, and it is no network."""
        if connected or excused:
            self._heard_at = now
        self.why = self.why or hears_nobody(last_heard, connected, now) or self._unheard(now)

    def _unheard(self, now: float) -> Alone | None:
        past = self.past
        due = max(self._heard_at + UNHEARD_SECONDS, past.let_go_at + past.wait_seconds)
        if now < max(due, self._looked_at + OFFERED_LOOK_SECONDS):
            return None
        self._looked_at = now
        if not self.offered():
            return None
        past.let_go(now)
        silent = now - self._heard_at
        return Alone(f"no agent came for {silent:.1f} s, and they come to another orchestrator")


def hears_nobody(
    last_heard: Mapping[NodeId, float], connected: Collection[NodeId], now: float
) -> Alone | None:
    """Why to let go of the lease; None: somebody is heard."""
    heard = [last_heard[node] for node in connected if node in last_heard]
    if len(heard) < NODES_MIN or now - max(heard) <= ALONE_SECONDS:
        return None
    return Alone(f"none of {len(heard)} nodes was heard for {now - max(heard):.1f} s")


def why_not_term(hello: Hello, term: Term) -> str:
    """Why what an agent says it has seen cannot be; empty if it can."""
    if hello.term_seen <= term + TERMS_AHEAD_MAX:
        return ""
    return (
        f"no leader ever began term {hello.term_seen}, and this is {term}; clear the agent's room"
    )


def of_another(hello: Hello, term: Term, greeted: Mapping[NodeId, str]) -> bool:
    """Whether an agent has obeyed another history than that of this term's leader.

    A leader tells its term to nobody whom it has not greeted; `greeted` are all of those, with the
    boots that they named: a node that was renamed comes with its room.
    """
    if hello.term_seen != term:
        return hello.term_seen > term
    return hello.node not in greeted and hello.boot not in greeted.values()


def last_words(hello: Hello, term: Term, began_at_seq: int) -> JournalBehind | Tick:
    """What the leader of such a term writes before it leaves. All entries since it began are its
    own: those that this agent has obeyed are others of the same number. Later nobody could tell."""
    if hello.term_seen != term or hello.seq_seen <= began_at_seq:
        return Tick()
    first, obeyed = began_at_seq + 1, {**hello.obeyed}
    return JournalBehind(hello.node, hello.term_seen, hello.seq_seen, first, obeyed)


def heeds(heeded: dict[NodeId, float], node: NodeId, now: float) -> bool:
    """Whether to step down because of this node's word; `heeded` remembers those of a while."""
    for known in [known for known, at in heeded.items() if now - at >= HEED_SECONDS]:
        del heeded[known]
    if node in heeded:
        return False
    heeded[node] = now
    return True
