"""Nodes that are gone for good leave the books: by an operator's word, or after some days. Pure.

Pods and rented machines come back under other names. Their old ones would stay in every snapshot,
picture and loop over all nodes, and be told of as lost, for ever. A node that comes back under its
name is met as a new one at any time, so little is lost by forgetting it: its faults, which are
forgiven after a week anyway, and whatever its memory held, which counts as gone then.

Must never: forget a node that may still be there, or that anything refers to; and by itself what an
operator or a monitor has said of a place, which would be used again when it comes back.
"""

from __future__ import annotations

from collections.abc import Iterator

from keepstep.model import NodeId
from keepstep.orchestrator.events import TermBegan
from keepstep.orchestrator.state import Cluster, Job, natural
from keepstep.orchestrator.turn import Turn

LOOK_SECONDS = 3600.0
"""Between two looks at all nodes: what is due meanwhile goes together, in one entry."""
NAMED_MAX = 8


def forget(turn: Turn, node: NodeId) -> None:
    """An operator says that a node will not come back, or need not be remembered if it does."""
    if why := refusal(turn.cluster, node):
        turn.ignore(why)
        return
    drained = turn.cluster.nodes[node].drained
    _drop(turn.cluster, node)
    lifted = ", and so is its drain" if drained else ""
    turn.note(f"node {node} is forgotten{lifted}")


def refusal(cluster: Cluster, node: NodeId) -> str:
    """Why a node cannot be forgotten; empty: it can."""
    state = cluster.nodes.get(node)
    if state is None:
        return f"no node is called {node}"
    if state.alive:
        return f"{node} is here, or may be back in a moment: stop its agent first, then ask again"
    return _referred(cluster).get(node, "")


def term_began(turn: Turn, event: TermBegan) -> None:
    """A new leader, and maybe other settings: when is somebody due?"""
    turn.cluster.forget_seconds = event.forget_seconds
    for state in turn.cluster.nodes.values():
        if not state.alive and not state.unlinked_at:
            # Lost by silence, under a leader that did not write down when: its time begins now.
            state.unlinked_at = turn.now
    _plan(turn, 0.0)


def gone(turn: Turn, node: NodeId) -> None:
    """From now on a node is lost, or has left."""
    cluster = turn.cluster
    cluster.nodes[node].unlinked_at = turn.now
    if cluster.forget_seconds and cluster.forget_due < 0:
        cluster.forget_due = turn.now + cluster.forget_seconds


def tick(turn: Turn) -> None:
    """Forget who is gone for long enough."""
    cluster = turn.cluster
    if not 0 <= cluster.forget_due <= turn.now:
        return
    # Expensive where jobs are large, and asked for at most once an hour.
    kept = {NodeId(place.partition("/")[0]) for place in cluster.taints}
    kept |= {*cluster.drained, *_referred(cluster)}
    since = turn.now - cluster.forget_seconds
    due = [node for node, at in _gone(cluster) if at <= since and node not in kept]
    for node in due:
        _drop(cluster, node)
    shown = cluster.behind_at.items()
    for node in [node for node, at in shown if at <= since and node not in cluster.nodes]:
        # It showed that the journal is behind, and never came.
        del cluster.behind_at[node]
        cluster.ahead.pop(node, None)
    if due:
        named = sorted(due, key=natural)
        some = ", ".join(named[:NAMED_MAX]) + (" …" if len(named) > NAMED_MAX else "")
        days = cluster.forget_seconds / 86_400
        turn.note(f"gone for {days:g} days and forgotten: {some} ({len(due)} in all)")
    _plan(turn, turn.now + LOOK_SECONDS)
    turn.touched = True


def _plan(turn: Turn, earliest: float) -> None:
    cluster = turn.cluster
    cluster.forget_due = -1.0
    if cluster.forget_seconds:
        first = min((at for _, at in _gone(cluster)), default=-1.0)
        if first >= 0:
            cluster.forget_due = max(first + cluster.forget_seconds, earliest)


def _gone(cluster: Cluster) -> Iterator[tuple[NodeId, float]]:
    return ((n, state.unlinked_at) for n, state in cluster.nodes.items() if not state.alive)


def _referred(cluster: Cluster) -> dict[NodeId, str]:
    """Who must not be forgotten, and why."""
    found = {
        node: f"{node} has rank {user.rank} of {user.job}"
        for node, state in cluster.nodes.items()
        for user in state.uses.values()
    }
    for name in cluster.open_jobs:
        job = cluster.jobs[name]
        if job.unsure is not None:
            why = f"not all ranks of {name} are found: they may be there"
            return dict.fromkeys(cluster.nodes, why)
        for node in _places(job):
            found.setdefault(
                node, f"{name} has a seat, a mirror or a standby on {node}, or had one lately"
            )
    return found


def _places(job: Job) -> set[NodeId]:
    rosters = [settled.roster for settled in job.settled]
    rosters += [job.roster] if job.roster is not None else []
    found = {seat.node for roster in rosters for seat in roster.seats}
    found |= {roster.store_node for roster in rosters}
    found |= {standby.node for standby in job.standbys.values()}
    found |= {leave.to for leave in job.leaving.values()}
    if job.migration is not None:
        waiting = (*job.migration.coming.values(), *job.migration.leavers.values())
        found |= {seat.node for seat in waiting}
    return found


def _drop(cluster: Cluster, node: NodeId) -> None:
    """Out of all books. Whoever comes back under its name shows again what it obeyed and this
    journal lacks: by its newest entry, or by the word of a run whose workers it has."""
    del cluster.nodes[node]
    cluster.ahead.pop(node, None)
    cluster.behind_at.pop(node, None)
    cluster.shown.pop(node, None)
    cluster.given_up.pop(node, None)
    if node in cluster.drained:
        cluster.drained = tuple(other for other in cluster.drained if other != node)
    for place in [place for place in cluster.taints if place.partition("/")[0] == node]:
        del cluster.taints[place]
