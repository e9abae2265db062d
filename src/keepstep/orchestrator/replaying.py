"""From what a journal holds to the state that it implies. Pure.

A journal is read by the version that wrote it and by every later one: each event and each snapshot
says by its `v` which version that was (none: the first), what it lacks has a default, and samples
of every version are replayed by the tests for ever. An earlier one does not read it, because it
would not know what it misses: it is told so in a sentence. So the way back from an upgrade is a
backup that was made before.
"""

from __future__ import annotations

from typing import Any

from keepstep.orchestrator import brain, events, state
from keepstep.orchestrator.journal import Standing

LARGE_NODES, ENTRIES_PER_NODE, ENTRIES_MOST = 1000, 3, 15_000
"""Between two snapshots of a large cluster: one takes 0.1 ms per node, and 15,000 events are
replayed in seconds. Of reports that are kept together each one counts."""


def snapshot_of(cluster: state.Cluster, now: float) -> dict[str, Any]:
    """A state as a journal keeps it."""
    return {"cluster": state.to_plain(cluster), "now": now, "v": events.VERSION}


def snapshot_due(cluster: state.Cluster, grown: int, entries: int) -> bool:
    """Whether the journal has grown by enough for a snapshot; a large state takes longer to write.

    Not in the middle of a recovery, where every millisecond counts, unless long overdue. A fault
    that comes meanwhile waits for it.
    """
    nodes = len(cluster.nodes)
    due = max(entries, nodes)
    if nodes > LARGE_NODES:
        due = max(due, min(ENTRIES_PER_NODE * nodes, ENTRIES_MOST))
    return grown >= due and (grown >= 4 * due or brain.due(cluster) is None)


def keeping(standing: Standing, silent_seconds: float, snapshot_seq: int) -> dict[str, Any]:
    """How a journal fares, for people."""
    return {
        "written_seconds_ago": round(silent_seconds, 3),
        "seq": standing.seq,
        "snapshot_seq": snapshot_seq,
        "term": standing.term,
        "lease_seconds": standing.lease_seconds,
    }
