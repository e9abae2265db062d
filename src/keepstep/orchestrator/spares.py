"""Slots and spares: who uses which slot, which spare takes a seat, and where standbys are kept.

A spare is, in this order: a ready standby of the job, one that is still warming up, or a free slot
(its agent then forks a worker). Tainted devices are never chosen. A slot has one owner at a time;
`occupy` asserts it.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Set
from dataclasses import dataclass, replace

from keepstep.model import NodeId, Rank
from keepstep.orchestrator.state import (
    Cluster,
    Job,
    NodeState,
    Occupant,
    Standby,
    natural,
    slot_key,
)
from keepstep.orchestrator.turn import Turn
from keepstep.wire import DropStandby, StartStandby, Stop

FREE_NODES_LOOKED_AT_MAX = 2048
"""Enough to find a node without ranks of the job; looking at all would grow with the cluster."""
REFILL_SECONDS_MAX = 60.0


@dataclass(frozen=True, slots=True)
class Choice:
    """A spare for a seat, and why this one."""

    node: NodeId
    slot: int
    standby: bool
    why: str


def occupy(cluster: Cluster, node: NodeId, slot: int, occupant: Occupant) -> None:
    """Give a slot to a worker or a standby."""
    state = cluster.nodes[node]
    assert slot not in state.uses, f"slot {slot} of {node} is used by {state.uses[slot]}"
    state.uses[slot] = occupant
    index(cluster, state)


def release(cluster: Cluster, node: NodeId, slot: int) -> None:
    state = cluster.nodes.get(node)
    if state is not None and state.uses.pop(slot, None) is not None:
        index(cluster, state)


def index(cluster: Cluster, state: NodeState) -> None:
    """Keep the sorted list of nodes with room up to date."""
    roomy = state.alive and len(state.uses) < state.slots
    at = bisect.bisect_left(cluster.free, natural(state.node), key=natural)
    listed = at < len(cluster.free) and cluster.free[at] == state.node
    if roomy and not listed:
        cluster.free = (*cluster.free[:at], state.node, *cluster.free[at:])
    elif listed and not roomy:
        cluster.free = (*cluster.free[:at], *cluster.free[at + 1 :])


def free_slots(cluster: Cluster, state: NodeState, now: float) -> list[int]:
    """A node's slots that can be used: empty and not tainted."""
    return [
        slot
        for slot in range(state.slots)
        if slot not in state.uses and not tainted(cluster, state.node, slot, now)
    ]


def tainted(cluster: Cluster, node: NodeId, slot: int, now: float) -> bool:
    found = (cluster.taints.get(node), cluster.taints.get(slot_key(node, slot)))
    return any(taint is not None and now < taint.until for taint in found)


def choose(
    cluster: Cluster,
    job: Job,
    now: float,
    without: Set[tuple[NodeId, int]] = frozenset(),
    only: NodeId = NodeId(""),
) -> Choice | None:
    """The best spare for one seat of the job, or None. Some slots may be spoken for already."""
    parked = [
        standby
        for standby in job.standbys.values()
        if _usable(cluster.nodes[standby.node])
        and not tainted(cluster, standby.node, standby.slot, now)
        and (standby.node, standby.slot) not in without
        and only in ("", standby.node)
    ]
    if parked:
        best = min(parked, key=lambda s: (not s.ready, *_crowd(cluster, job, s.node), s.slot))
        why = f"the {'ready' if best.ready else 'warming'} standby on {best.node} slot {best.slot}"
        return Choice(best.node, best.slot, True, why)
    found = _free_slot(cluster, job, now, without, only)
    if found is None:
        return None
    node, slot = found
    return Choice(node, slot, False, f"the free slot {slot} on {node} (no standby was left)")


def take(cluster: Cluster, job: Job, choice: Choice, rank: Rank, incarnation: int) -> None:
    """The chosen slot now belongs to a seat."""
    if choice.standby:
        del job.standbys[slot_key(choice.node, choice.slot)]
        release(cluster, choice.node, choice.slot)
    occupy(cluster, choice.node, choice.slot, Occupant(job.spec.job, rank, incarnation))


def refill(turn: Turn, job: Job) -> None:
    """Start standbys until there are as many as the job asked for, or no room is left."""
    if job.state.over or job.roster is None or job.finished or turn.now < job.refill_at:
        return
    while len(job.standbys) < job.spec.spares:
        found = _free_slot(turn.cluster, job, turn.now)
        if found is None:
            return
        node, slot = found
        standby = Standby(node, slot, turn.cluster.next(), level=job.spec.standby_level)
        occupy(turn.cluster, node, slot, Occupant(job.spec.job))
        job.standbys[slot_key(node, slot)] = standby
        turn.touched = True
        start_standby(turn, job, standby)


def start_standby(turn: Turn, job: Job, standby: Standby) -> None:
    name = f"standby/{standby.node}.{standby.slot}/{standby.serial}"
    turn.order(job, name, (standby.node,), StartStandby(job.spec, standby.slot))


def lose_standby(turn: Turn, job: Job, node: NodeId, slot: int, why: str) -> None:
    """A standby is gone. The next one waits a little longer each time: imports may be broken."""
    if job.standbys.pop(slot_key(node, slot), None) is None:
        return
    release(turn.cluster, node, slot)
    job.refill_at = turn.now + min(0.25 * 2.0**job.standby_losses, REFILL_SECONDS_MAX)
    job.standby_losses = min(job.standby_losses + 1, 16)
    turn.note(f"the standby on {node} slot {slot} is gone: {why}", job)


def standby_ready(turn: Turn, job: Job, node: NodeId, slot: int, level: int) -> None:
    key = slot_key(node, slot)
    if not job.standbys[key].ready:
        job.standbys[key] = replace(job.standbys[key], ready=True, level=level)
        turn.note(f"the standby on {node} slot {slot} is ready", job)


def drop_standby(turn: Turn, job: Job, node: NodeId, slot: int) -> None:
    """End a standby whose slot is needed for something else."""
    standby = job.standbys.pop(slot_key(node, slot))
    release(turn.cluster, node, slot)
    turn.order(job, f"drop/{node}.{slot}/{standby.serial}", (node,), DropStandby(slot))


def clear(turn: Turn, job: Job, exit_code: int, why: str) -> None:
    """The job is over: end what is left of it, and give its slots back."""
    nodes = {standby.node for standby in job.standbys.values()}
    if job.roster is not None:
        nodes |= {seat.node for seat in job.roster.seats}
    # Everywhere: a worker that was to be killed may hold a slot of a node without any seat.
    for node, state in turn.cluster.nodes.items():
        if any(user.job == job.spec.job for user in state.uses.values()):
            nodes.add(node)
            kept = {slot: user for slot, user in state.uses.items() if user.job != job.spec.job}
            state.uses = kept
            index(turn.cluster, state)
    told = sorted((n for n in nodes if turn.cluster.nodes[n].alive), key=natural)
    # Some agents have heard of a generation that never came.
    newest = max(job.generation, job.promised)
    turn.order(job, "stop", told, Stop(exit_code, why), newest)
    job.standbys = {}


def _usable(state: NodeState) -> bool:
    return state.alive and state.linked and state.silent_at < 0 and not state.drained


def _crowd(cluster: Cluster, job: Job, node: NodeId) -> tuple[bool, int, tuple[str | int, ...]]:
    """Prefer nodes without ranks of this job, then the emptiest: one fault then takes less."""
    ours = sum(1 for user in cluster.nodes[node].uses.values() if user.job == job.spec.job)
    seats = any(
        user.job == job.spec.job and user.rank >= 0 for user in cluster.nodes[node].uses.values()
    )
    return (seats, ours, natural(node))


def _free_slot(
    cluster: Cluster,
    job: Job,
    now: float,
    without: Set[tuple[NodeId, int]] = frozenset(),
    only: NodeId = NodeId(""),
) -> tuple[NodeId, int] | None:
    best: tuple[tuple[bool, int, tuple[str | int, ...]], NodeId, int] | None = None
    looked_at = (only,) if only else cluster.free
    for node in itertools.islice(looked_at, FREE_NODES_LOOKED_AT_MAX):
        state = cluster.nodes.get(node)
        if state is None or not _usable(state):
            continue
        slots = [s for s in free_slots(cluster, state, now) if (node, s) not in without]
        if not slots:
            continue
        crowd = _crowd(cluster, job, node)
        if best is None or crowd < best[0]:
            best = (crowd, node, slots[0])
        if not crowd[0] and crowd[1] == 0:
            break
    return None if best is None else (best[1], best[2])
