"""Who uses which slot of which node. A slot has one owner at a time; `occupy` asserts it."""

from __future__ import annotations

import bisect

from keepstep.model import JobId, NodeId
from keepstep.orchestrator.state import Cluster, NodeState, Occupant, natural, slot_key


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
        cluster.free = cluster.free[:at] + (state.node,) + cluster.free[at:]  # noqa: RUF005
    elif listed and not roomy:
        cluster.free = cluster.free[:at] + cluster.free[at + 1 :]


def usable(state: NodeState) -> bool:
    """Whether anything new may be placed on this node."""
    return state.alive and state.linked and state.silent_at < 0 and not state.drained


def tainted(cluster: Cluster, node: NodeId, slot: int, now: float) -> bool:
    known = cluster.taints
    if not known:
        return False
    of_node, of_slot = known.get(node), known.get(slot_key(node, slot))
    if of_node is None and of_slot is None:
        return False
    return any(now < taint.until for taint in (*(of_node or ()), *(of_slot or ())))


def free_slots(cluster: Cluster, state: NodeState, now: float) -> list[int]:
    """A node's slots that can be used: empty and not tainted."""
    return [
        slot
        for slot in range(state.slots)
        if slot not in state.uses and not tainted(cluster, state.node, slot, now)
    ]


def room(cluster: Cluster, state: NodeState, job: JobId, now: float) -> int:
    """How many ranks of a job a node could take: free slots, and those of the job's standbys."""
    standbys = sum(1 for user in state.uses.values() if user.job == job and user.rank < 0)
    return len(free_slots(cluster, state, now)) + standbys
