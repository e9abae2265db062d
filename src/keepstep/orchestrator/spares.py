"""Standbys: where they are kept, how they become seats, and what is left when a job ends."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from dataclasses import replace

from keepstep.model import NodeId, Rank
from keepstep.orchestrator import names, placing, rules, slots
from keepstep.orchestrator.placing import Choice
from keepstep.orchestrator.state import (
    SETTLED_MAX,
    Cluster,
    Job,
    Occupant,
    Settled,
    Standby,
    natural,
    slot_key,
)
from keepstep.orchestrator.turn import Turn
from keepstep.wire import DropStandby, StartStandby, Stop

REFILL_SECONDS_MAX = 60.0
_NODE = operator.attrgetter("node")


def lower_standbys(cluster: Cluster, job: Job) -> dict[placing.Place, Job]:
    """Standbys of jobs with a lower priority: they give way to anybody's rank. One of a job in
    doubt may be a rank by now, which trains."""
    return {
        (standby.node, standby.slot): other
        for other in map(cluster.jobs.__getitem__, cluster.open_jobs)
        if other.spec.priority < job.spec.priority and not rules.aside(cluster, other)
        for standby in other.standbys.values()
    }


def lower_places(cluster: Cluster, job: Job) -> frozenset[placing.Place]:
    """All that jobs of lower priority have, and might give up."""
    below = {
        other.spec.job
        for other in map(cluster.jobs.__getitem__, cluster.open_jobs)
        if other.spec.priority < job.spec.priority and not rules.aside(cluster, other)
    }
    return frozenset(
        (node, slot)
        for node, state in (cluster.nodes.items() if below else ())
        for slot, user in state.uses.items()
        if user.job in below
    )


def take(cluster: Cluster, job: Job, choice: Choice, rank: Rank, incarnation: int) -> None:
    """The chosen slot now belongs to a seat."""
    if choice.standby:
        del job.standbys[slot_key(choice.node, choice.slot)]
        slots.release(cluster, choice.node, choice.slot)
    slots.occupy(cluster, choice.node, choice.slot, Occupant(job.spec.job, rank, incarnation))


def refill(turn: Turn, job: Job) -> None:
    """Start standbys until there are as many as the job asked for, or no room is left."""
    if job.state.over or job.roster is None or job.finished or turn.now < job.refill_at:
        return
    if turn.cluster.frozen or job.unsure is not None:
        return
    while len(job.standbys) < job.spec.spares:
        found = _free_slot(turn.cluster, job, turn.now)
        if found is None:
            return
        node, slot = found
        standby = Standby(node, slot, turn.cluster.next(), level=job.spec.standby_level)
        slots.occupy(turn.cluster, node, slot, Occupant(job.spec.job))
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
    slots.release(turn.cluster, node, slot)
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
    slots.release(turn.cluster, node, slot)
    turn.order(job, f"drop/{node}.{slot}/{standby.serial}", (node,), DropStandby(slot))


def settle(cluster: Cluster, job: Job, *settled: Settled) -> None:
    """Private state is in these rosters' nodes, newest first. Where its ranks were before, nobody
    looks for it any more; but it is still in those nodes' memory, until they are told to stop. Not
    remembered: where a joiner died before all went on. That node asks with its next Hello."""
    before = _nodes_of(job.settled)
    job.settled = settled[:SETTLED_MAX]
    now = _nodes_of(job.settled)
    # Nodes that are forgotten tell of it when they come back. The others bound this.
    left = {node for node in {*before, *job.places} - now if node in cluster.nodes}
    job.places = tuple(sorted(left, key=natural))


def _nodes_of(settled: Iterable[Settled]) -> set[NodeId]:
    """No line of Python per seat: each generation asks."""
    return set(map(_NODE, itertools.chain.from_iterable(each.roster.seats for each in settled)))


def clear(turn: Turn, job: Job, exit_code: int, why: str) -> None:
    """The job is over: end what is left of it, and give its slots back."""
    nodes = {standby.node for standby in job.standbys.values()}
    if job.roster is not None:
        nodes |= {seat.node for seat in job.roster.seats}
    # Where its ranks were before, too: their private state is still in those nodes' memory.
    nodes |= set(job.places)
    nodes |= _nodes_of(job.settled)
    # Everywhere: a worker that was to be killed may hold a slot of a node without any seat.
    for node, state in turn.cluster.nodes.items():
        ours = [slot for slot, user in state.uses.items() if _ours(turn.cluster, job, node, user)]
        if ours:
            nodes.add(node)
            state.uses = {slot: user for slot, user in state.uses.items() if slot not in ours}
            slots.index(turn.cluster, state)
    known = turn.cluster.nodes
    told = sorted((n for n in nodes if n in known and known[n].alive), key=natural)
    # Some agents have heard of a generation that never came.
    newest = max(job.generation, job.promised)
    turn.order(job, "stop", told, Stop(exit_code, why), newest)
    job.standbys = {}


def _ours(cluster: Cluster, job: Job, node: NodeId, user: Occupant) -> bool:
    """What a run that the journal lacks has under this name is left alone here as well."""
    left_alone = node in cluster.behind_at and names.unknown(job, user)
    return user.job == job.spec.job and not left_alone


def _free_slot(cluster: Cluster, job: Job, now: float) -> tuple[NodeId, int] | None:
    """Where the next standby goes: a node without ranks of the job, else the emptiest."""
    best: tuple[tuple[bool, int, tuple[str | int, ...]], NodeId, int] | None = None
    for node in itertools.islice(cluster.free, placing.FREE_NODES_LOOKED_AT_MAX):
        state = cluster.nodes[node]
        free = slots.free_slots(cluster, state, now) if slots.usable(state) else []
        if not free:
            continue
        crowd = placing.crowd(cluster, job, node)
        if best is None or (*crowd, natural(node)) < best[0]:
            best = ((*crowd, natural(node)), node, free[0])
        if crowd == (False, 0):
            break
    return None if best is None else (best[1], best[2])
