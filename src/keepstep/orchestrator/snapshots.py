"""Snapshots of the state: when one is due, and its canonical JSON. Pure.

A leader writes one every few thousand events, and a fault that comes meanwhile waits for it. Most
of it is the text of nodes, few of which have changed since the last time. So texts are kept:

    of a node       for as long as it equals what its text was made of
    of a roster     for as long as there is the roster: rosters never change
    of a past name  for as long as there is its record, which never changes either
    of the rest     not at all

and put together to the very bytes that codec.dumps would make of the whole. (Equal is equal in
Python: a field that is a float must not be set to an integer.) Where many have changed, as after a
change of leader, their texts are made some at a time before the snapshot is.

A journal is read by the version that wrote it and by every later one: each event and each snapshot
says by its `v` which version that was (none: the first), what it lacks has a default, and samples
of every version are replayed by the tests for ever. An earlier one does not read it, because it
would not know what it misses: it is told so in a sentence. So the way back from an upgrade is a
backup that was made before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple

from keepstep import codec
from keepstep.model import JobId, NodeId, Roster
from keepstep.orchestrator import brain, events
from keepstep.orchestrator.past import Past
from keepstep.orchestrator.state import Cluster, Job, NodeState, Occupant, Settled

LARGE_NODES, ENTRIES_PER_NODE, ENTRIES_MOST = 1000, 3, 15_000
"""Between two snapshots of a large cluster: 15,000 events are replayed in seconds. Of reports that
are kept together each one counts."""
AGAIN_SECONDS = 60.0
"""Between two attempts at a snapshot that the journal could not take."""
AHEAD_NODES = 200
"""Whose texts are made without a break before a snapshot: some hundredths of a second."""
OVERDUE = 4
"""So many times the events that are enough: then it is written, however long it takes."""


def body_of(cluster: Cluster, now: float) -> str:
    """A state as a journal keeps it."""
    return Texts().body(cluster, now)


class Snapshots:
    """A leader's: when the next one is due."""

    def __init__(self, entries: int) -> None:
        self.texts = Texts()
        self.seq = 0
        """Of the newest that is written."""
        self.grown = 0
        """Events since then."""
        self._began_at = 0
        """What `grown` was when the one that is on its way was begun."""
        self._entries = entries
        self._again_at = 0.0

    def prepared(self, cluster: Cluster, moment: float) -> bool:
        """Whether to write one now: the journal has grown by enough, and it will not take long.

        Not in the middle of a recovery, where every millisecond counts, unless long overdue. Asked
        after each batch of events, it makes some of the texts each time until few are left.
        """
        nodes = len(cluster.nodes)
        enough = max(self._entries, nodes)
        if nodes > LARGE_NODES:
            enough = max(enough, min(ENTRIES_PER_NODE * nodes, ENTRIES_MOST))
        if self.grown < enough or moment < self._again_at:
            return False
        if self.grown >= OVERDUE * enough:
            return True
        return brain.due(cluster) is None and self.texts.look_ahead(cluster)

    @property
    def grown_since_it_began(self) -> int:
        return max(0, self.grown - self._began_at)

    def began(self) -> None:
        """One of the state as it is now is on its way."""
        self._began_at = self.grown

    def wrote(self, seq: int, grown: int = 0) -> None:
        """There is one of this seq, and so many events after it."""
        self.seq, self.grown = seq, grown

    def failed(self, moment: float) -> None:
        """The journal did not take it. It only shortens a replay: later is soon enough."""
        self._again_at = moment + AGAIN_SECONDS


class _Node(NamedTuple):
    """A node's text, and what it was made of."""

    scalars: tuple[Any, ...]
    uses: dict[int, Occupant]
    labels: dict[str, str]
    text: str


class Texts:
    """The canonical JSON of a state that changes little."""

    def __init__(self) -> None:
        self._nodes: dict[NodeId, _Node] = {}
        self._rosters: dict[int, tuple[Roster, str]] = {}
        """By identity: a roster that is kept here has its number for itself."""
        self._past: dict[JobId, tuple[Past, str]] = {}
        self._ahead = 0

    def body(self, cluster: Cluster, now: float) -> str:
        """A state as a journal keeps it."""
        version = _json(events.VERSION)
        return f'{{"cluster":{self.of(cluster)},"now":{_json(now)},"v":{version}}}'

    def of(self, cluster: Cluster) -> str:
        """The very text of codec.dumps(state.to_plain(cluster))."""
        rosters, self._rosters = self._rosters, {}
        nodes = ",".join(self._node(name, cluster.nodes[name]) for name in sorted(cluster.nodes))
        jobs = ",".join(
            f"{_json(name)}:{self._job(cluster.jobs[name], rosters)}"
            for name in sorted(cluster.jobs)
        )
        if len(self._nodes) > len(cluster.nodes):
            self._nodes = {name: self._nodes[name] for name in cluster.nodes}
        past = self._of_past(cluster)
        return _object(cluster, {"jobs": f"{{{jobs}}}", "nodes": f"{{{nodes}}}", "past": past})

    def look_ahead(self, cluster: Cluster, made_max: int = AHEAD_NODES) -> bool:
        """Make the texts of some nodes that have changed. True: all have been looked at since the
        last time that this was true, and a snapshot has little to do."""
        made = 0
        for name, state in islice(cluster.nodes.items(), self._ahead, None):
            before = self._nodes.get(name)
            self._node(name, state)
            self._ahead += 1
            made += self._nodes[name] is not before
            if made == made_max:
                break
        if self._ahead < len(cluster.nodes):
            return False
        self._ahead = 0
        return True

    def _node(self, name: NodeId, state: NodeState) -> str:
        scalars = _SCALARS(state)
        known = self._nodes.get(name)
        if (
            known is None
            or known.scalars != scalars
            or known.uses != state.uses
            or known.labels != state.labels
        ):
            text = f"{_json(name)}:{_json(state)}"
            known = _Node(scalars, dict(state.uses), dict(state.labels), text)
            self._nodes[name] = known
        return known.text

    def _of_past(self, cluster: Cluster) -> str:
        before, self._past = self._past, {}
        for name in sorted(cluster.past):
            past, known = cluster.past[name], before.get(name)
            if known is None or known[0] is not past:
                known = (past, f"{_json(name)}:{_json(past)}")
            self._past[name] = known
        return f"{{{','.join(text for _, text in self._past.values())}}}"

    def _job(self, job: Job, before: Mapping[int, tuple[Roster, str]]) -> str:
        settled = ",".join(
            _object(each, {"roster": self._roster(each.roster, before)}) for each in job.settled
        )
        return _object(job, {"roster": self._roster(job.roster, before), "settled": f"[{settled}]"})

    def _roster(self, roster: Roster | None, before: Mapping[int, tuple[Roster, str]]) -> str:
        if roster is None:
            return "null"
        known = self._rosters.get(id(roster)) or before.get(id(roster)) or (roster, _json(roster))
        self._rosters[id(roster)] = known
        return known[1]


def _json(value: object) -> str:
    return codec.dumps(codec.to_plain(value)).decode()


def _object(value: Any, known: Mapping[str, str]) -> str:
    """A record as canonical JSON, with the texts of some fields given."""
    fields = (
        f'"{name}":{known[name] if name in known else _json(getattr(value, name))}'
        for name in _NAMES[type(value)]
    )
    return f"{{{','.join(fields)}}}"


_NAMES = {
    kind: sorted(f.name for f in dataclasses.fields(kind)) for kind in (Cluster, Job, Settled)
}
_SCALARS = attrgetter(
    *(f.name for f in dataclasses.fields(NodeState) if f.name not in ("uses", "labels"))
)
"""Of a node: all that does not change in place."""
