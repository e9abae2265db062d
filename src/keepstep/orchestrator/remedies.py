"""What would make room for ranks that wait for some: said wherever they wait. Pure.

Told when a job begins to hold or a wish begins to wait, shown by `status` for as long as it lasts,
and by `keepstep admin policy check` before anything has happened.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from keepstep.model import JobState, NodeId, Phase, Rank, SameDomain, Unit
from keepstep.orchestrator import slots
from keepstep.orchestrator.state import Cluster, Job, NodeState, natural, slot_key

REMEDIES_MAX = 6
NODES_LOOKED_AT_MAX = 64
"""Nodes with a free slot that a policy may keep a job from using: one of them is enough."""
ADD = "add a node: `keepstep join` on another machine"
_STOP = "keepstep stop --save"
_HELP = "what would help: "


def remedies(cluster: Cluster, job: Job, now: float) -> list[str]:
    """What would make a spare, the easiest first. The last one always would."""
    undrain: list[tuple[NodeId, str]] = []
    away: list[tuple[NodeId, str]] = []
    lost: list[tuple[NodeId, str]] = []
    behind = _left_behind(job)
    for node, there in cluster.nodes.items():
        if node in behind:
            continue
        free = there.slots - len(there.uses)
        if not there.alive:
            lost.append((node, f"bring {node} back: {_slots(there.slots)}"))
        elif there.drained and free:
            text = f"keepstep undrain {node}: {_free(free)} ({there.drained})"
            undrain.append((node, text))
        elif (not there.linked or there.silent_at >= 0) and free:
            away.append((node, f"look after {node}: its agent is away, and {_free(free)}"))
    found = _texts(undrain) + _tainted(cluster, behind, now) + _texts(away) + _texts(lost)
    found += _shut_out(cluster, job, now) + _lower_jobs(cluster, job)
    return [*found[: REMEDIES_MAX - 1], ADD]


def of_owners(found: Sequence[str]) -> list[str]:
    """Of these, what the owners of jobs can do themselves, who touch nothing that all share."""
    return [text for text in found if text.startswith(_STOP) or text == ADD]


def told_to_owners(text: str) -> str:
    """A sentence of ours without the remedies in it: they name others' nodes and jobs."""
    before, found, _ = text.partition(_HELP)
    return f"{before}{found}whoever runs the cluster can make room" if found else text


def sentence(cluster: Cluster, job: Job, now: float) -> str:
    """The same in one line, for the story of an incident."""
    return f"{_HELP}{'; or '.join(remedies(cluster, job, now))}"


def needed(cluster: Cluster, job: Job, now: float) -> list[str]:
    """What would help a job as it stands; nothing, if it does not wait for room."""
    moving = job.migration
    held = moving is not None and moving.phase is Phase.HOLD
    wishes = any(leave.waits and not leave.to for leave in job.leaving.values())
    if held or job.state is JobState.WAITING or (wishes and moving is None):
        return remedies(cluster, job, now)
    return []


def place_shut(cluster: Cluster, job: Job, node: NodeId, ranks: Sequence[Rank], now: float) -> str:
    """Why ranks that were sent to one certain node cannot go there, and what would help."""
    state = cluster.nodes.get(node)
    if state is None or not state.alive:
        why, fix = f"{node} is lost", "bring it back"
    elif state.drained:
        why, fix = f"{node} is drained", f"`keepstep undrain {node}`"
    elif not slots.usable(state):
        why, fix = f"the agent of {node} is away", "start it again"
    elif _tainted_slots(cluster, state, now):
        why, fix = f"{node} is tainted", "`keepstep untaint` it (see `keepstep taints`)"
    else:
        why, fix = f"{node} has no free slot", "move or end what is there"
    which = " ".join(f"--rank {rank}" for rank in ranks[:8])
    back = f"`keepstep migrate --job {job.spec.job} {which} --cancel`"
    return f"{why}; {fix}, or take the wish back: {back}"


def _left_behind(job: Job) -> set[NodeId]:
    """Where the ranks are that wish to leave: what is free there helps none of them."""
    if job.roster is None or job.migration is not None:
        return set()
    return {job.roster.seats[rank].node for rank in job.leaving}


def _texts(found: list[tuple[NodeId, str]]) -> list[str]:
    return [text for _, text in sorted(found, key=lambda pair: natural(pair[0]))[:REMEDIES_MAX]]


def _slots(count: int) -> str:
    return f"{count} slot{'' if count == 1 else 's'}"


def _free(count: int) -> str:
    return f"{count} free slot{'' if count == 1 else 's'}"


def _tainted_slots(cluster: Cluster, there: NodeState, now: float) -> list[int]:
    empty = [slot for slot in range(there.slots) if slot not in there.uses]
    return [slot for slot in empty if slots.tainted(cluster, there.node, slot, now)]


def _tainted(cluster: Cluster, behind: set[NodeId], now: float) -> list[str]:
    """By place: nobody else uses what these taints keep empty."""
    found = []
    for node in sorted({NodeId(place.partition("/")[0]) for place in cluster.taints}, key=natural):
        there = cluster.nodes.get(node)
        if there is None or node in behind or not slots.usable(there):
            continue
        shut = _tainted_slots(cluster, there, now)
        keys = [str(node)] if node in cluster.taints else [slot_key(node, slot) for slot in shut]
        if shut:
            found += [f"keepstep untaint {key}: {cluster.taints[key][0].reason}" for key in keys]
    return found


def _shut_out(cluster: Cluster, job: Job, now: float) -> list[str]:
    """There is room, but this job's own policy forbids it."""
    policy = job.spec.policy
    if job.state is JobState.WAITING:
        return []
    if policy.same_domain is SameDomain.PREFER and policy.unit is Unit.DEVICE:
        return []
    for node in itertools.islice(cluster.free, NODES_LOOKED_AT_MAX):
        state = cluster.nodes[node]
        if slots.usable(state) and slots.free_slots(cluster, state, now):
            setting = f'unit = "{policy.unit}"'
            if policy.same_domain is not SameDomain.PREFER:
                setting = f'same_domain = "{policy.same_domain}"'
            again = f"`keepstep stop --save {job.spec.job}`, and run it with another --policy"
            return [f"{node} has a free slot, but the job's policy says {setting}: {again}"]
    return []


def _lower_jobs(cluster: Cluster, job: Job) -> list[str]:
    lower = [
        other
        for other in map(cluster.jobs.__getitem__, cluster.open_jobs)
        if other.spec.priority < job.spec.priority and other.roster is not None
    ]
    return [
        f"{_STOP} {other.spec.job}: {_slots(other.spec.world_size)}, priority {other.spec.priority}"
        for other in sorted(lower, key=lambda o: (o.spec.priority, o.spec.job))
    ]
