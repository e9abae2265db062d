"""Which spare takes which seat, and why this one. Pure; nothing is taken here.

A spare is a ready standby of the job, one that is still warming up, or a free slot (its agent then
forks a worker). Tainted and drained places are none. Among them, in this order: the NVLink domain
that the rank had, a warm one, a node without other ranks of the job, the same switch, the same
rack, the emptiest node.

Some things move as a whole (policy `unit`, or `same_domain = "swap_whole"`): then all ranks of a
node, or of a domain, get places together or not at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from keepstep.model import NodeId, Rank, SameDomain, Seat, Unit
from keepstep.orchestrator import portions, slots
from keepstep.orchestrator.state import Cluster, Job, Standby, natural

FREE_NODES_LOOKED_AT_MAX = 2048
"""Enough to find a node without ranks of the job; looking at all would grow with the cluster."""
LABELS = DOMAIN, SWITCH, RACK = "nvlink_domain", "switch", "rack"
"""Labels of nodes that say what they share with others, the closest first."""

Place = tuple[NodeId, int]
Fit = tuple[bool, int, bool, bool, bool, int]
Key = tuple[Fit, tuple[str | int, ...], int]


@dataclass(frozen=True, slots=True)
class Choice:
    """A spare for a seat, and why this one."""

    node: NodeId
    slot: int
    standby: bool
    why: str


@dataclass(frozen=True, slots=True)
class Search:
    """What is asked: for whom, when, and which places are out of or in question besides."""

    cluster: Cluster
    job: Job
    now: float
    also: Set[Place] = frozenset()
    """Used by others, but they would go."""


def place(
    search: Search,
    seats: Sequence[Seat],
    only: Mapping[Rank, NodeId] | None = None,
) -> dict[Rank, Choice]:
    """A spare for each of these old seats, as far as there are any. `only`: nowhere else."""
    chosen: dict[Rank, Choice] = {}
    taken: set[Place] = set()
    wanted = only or {}
    for seat in (s for s in seats if s.rank in wanted):
        # Those who can go to one place only choose first.
        found = _one(search, seat, taken, frozenset((wanted[seat.rank],)))
        _note(chosen, taken, {seat.rank: found} if found else {})
    for group in _groups(search, [s for s in seats if s.rank not in wanted]):
        _note(chosen, taken, _together(search, group, taken))
    return dict(sorted(chosen.items()))


def _note(chosen: dict[Rank, Choice], taken: set[Place], found: Mapping[Rank, Choice]) -> None:
    chosen.update(found)
    taken.update((choice.node, choice.slot) for choice in found.values())


def companions(search: Search, ranks: Iterable[Rank]) -> set[Rank]:
    """Who has to move because these do: the rest of a node or a domain that has no room for them.

    If of some portion nobody were left there would be no state to move: then everybody stays.
    """
    job = search.job
    assert job.roster is not None
    moving, seats = set(ranks), job.roster.seats
    found: set[Rank] = set()
    units = {_kin(search, seats[rank]) for rank in moving if _unit(search, seats[rank])}
    for unit in sorted(units):
        mine = [seat for seat in seats if _kin(search, seat) == unit]
        leave = [seat for seat in mine if seat.rank in moving]
        if len(_spread(search, leave, frozenset(), _inside(search, leave[0]))) < len(leave):
            found |= {seat.rank for seat in mine}
    return set() if portions.bereft(job, found | moving) else found - moving


def _unit(search: Search, seat: Seat) -> str:
    """What a seat's device is replaced with as a whole; empty: nothing but itself."""
    policy = search.job.spec.policy
    if policy.unit is Unit.NODE:
        return seat.node
    if policy.unit is Unit.DOMAIN or policy.same_domain is SameDomain.SWAP_WHOLE:
        return search.cluster.nodes[seat.node].labels.get(DOMAIN, "")
    return ""


def _kin(search: Search, seat: Seat) -> tuple[str, str]:
    """Who has the same answer moves together: one unit now, and one when they last trained.

    Where a lost rank was, ranks of another unit may have come since: they are none of its own.
    """
    now = _unit(search, seat)
    settled = search.job.settled
    return now, _unit(search, settled[0].roster.seats[seat.rank]) if now and settled else now


def _inside(search: Search, seat: Seat) -> Set[NodeId]:
    """The nodes of a seat's unit; without one, of its NVLink domain."""
    if search.job.spec.policy.unit is Unit.NODE:
        return frozenset((seat.node,))
    return _domain_nodes(search, seat)


def _domain_nodes(search: Search, seat: Seat) -> Set[NodeId]:
    nodes = search.cluster.nodes
    label = nodes[seat.node].labels.get(DOMAIN, "")
    return frozenset(node for node, s in nodes.items() if s.labels.get(DOMAIN, "") == label)


# ---------------------------------------------------------------- what goes together


def _groups(search: Search, seats: Sequence[Seat]) -> list[list[Seat]]:
    groups: dict[tuple[str, str], list[Seat]] = {}
    for seat in seats:
        unit = _kin(search, seat) if _unit(search, seat) else (f"rank {seat.rank}", "")
        groups.setdefault(unit, []).append(seat)
    return list(groups.values())


def _together(search: Search, group: Sequence[Seat], taken: Set[Place]) -> dict[Rank, Choice]:
    """Places for all of a unit or for nobody; a seat without one has its policy's freedom."""
    policy = search.job.spec.policy
    unit = _unit(search, group[0])
    if not unit:
        domain = search.cluster.nodes[group[0].node].labels.get(DOMAIN)
        strict = policy.same_domain is SameDomain.REQUIRE and domain
        found = _one(search, group[0], taken, _inside(search, group[0]) if strict else None)
        return {group[0].rank: found} if found else {}
    assert search.job.roster is not None
    going, kin = {seat.rank for seat in group}, _kin(search, group[0])
    stay = any(
        seat.rank not in going and _kin(search, seat) == kin for seat in search.job.roster.seats
    )
    if stay:
        # The rest of the unit is well and had room: they stay together.
        places = _spread(search, group, taken, _inside(search, group[0]))
    elif policy.unit is Unit.NODE:
        places = _on_one_node(search, group, taken)
    else:
        places = _in_one_domain(search, group, taken, unit)
    return places if len(places) == len(group) else {}


def _on_one_node(
    search: Search, group: Sequence[Seat], taken: Set[Place], within: Set[NodeId] | None = None
) -> dict[Rank, Choice]:
    strict = search.job.spec.policy.same_domain is SameDomain.REQUIRE
    if strict and within is None and search.cluster.nodes[group[0].node].labels.get(DOMAIN):
        within = _domain_nodes(search, group[0])
    best: tuple[Key, NodeId, list[tuple[int, int]]] | None = None
    for node in _candidates(search, within):
        there = sorted(_open(search, node, taken))[: len(group)]
        if len(there) == len(group):
            key = _key(search, group[0], node, max(kind for kind, _ in there), there[0][1])
            if best is None or key < best[0]:
                best = (key, node, there)
    if best is None:
        return {}
    return {
        seat.rank: _choice(best[1], slot, kind)
        for seat, (kind, slot) in zip(group, best[2], strict=True)
    }


def _in_one_domain(
    search: Search, group: Sequence[Seat], taken: Set[Place], own: str
) -> dict[Rank, Choice]:
    """The domain they are in, if it has room for all; else the one with the least room to spare."""
    by_domain: dict[str, dict[NodeId, int]] = {}
    for node in _candidates(search, None):
        label = search.cluster.nodes[node].labels.get(DOMAIN)
        room = len(_open(search, node, taken)) if label else 0
        if label and room:
            by_domain.setdefault(label, {})[node] = room
    fits = [name for name, rooms in by_domain.items() if sum(rooms.values()) >= len(group)]
    for name in sorted(fits, key=lambda n: (n != own, sum(by_domain[n].values()), n)):
        found: dict[Rank, Choice] = {}
        mine = set(taken)
        per_node: dict[NodeId, list[Seat]] = {}
        for seat in group:
            per_node.setdefault(seat.node, []).append(seat)
        for together in sorted(per_node.values(), key=len, reverse=True):
            # Ranks that shared a node share one again if they can.
            places = _on_one_node(search, together, mine, frozenset(by_domain[name]))
            if not places:
                places = _spread(search, together, mine, frozenset(by_domain[name]))
            _note(found, mine, places)
        if len(found) == len(group):
            return found
    return {}


def _spread(
    search: Search, seats: Sequence[Seat], taken: Set[Place], within: Set[NodeId]
) -> dict[Rank, Choice]:
    found: dict[Rank, Choice] = {}
    mine = set(taken)
    for seat in seats:
        choice = _one(search, seat, mine, within=within)
        if choice is not None:
            _note(found, mine, {seat.rank: choice})
    return found


# ---------------------------------------------------------------- one seat


def _one(
    search: Search, old: Seat, taken: Set[Place], within: Set[NodeId] | None = None
) -> Choice | None:
    """The best spare for one seat."""
    best: tuple[Key, Choice] | None = None
    for standby in _standbys(search):
        if (standby.node, standby.slot) in taken or (within and standby.node not in within):
            continue
        kind = 0 if standby.ready else 1
        key = _key(search, old, standby.node, kind, standby.slot)
        if best is None or key < best[0]:
            best = (key, _choice(standby.node, standby.slot, kind))
    if best is not None and not best[0][0][0]:
        # Warm, and in the right domain: a cold slot cannot be better.
        return best[1]
    for node in _candidates(search, within):
        fit, name = _fit(search, old, node, _COLD), natural(node)
        if best is not None and (fit, name) > best[0][:2]:
            # Whatever it has: of hundreds of free nodes nearly all end here.
            continue
        cold = [slot for kind, slot in _open(search, node, taken) if kind == _COLD]
        if not cold:
            continue
        key = (fit, name, min(cold))
        if best is None or key < best[0]:
            best = (key, _choice(node, min(cold), _COLD))
        if fit == _PERFECT:
            break
    return best[1] if best else None


_COLD = 2
_PERFECT: Fit = (False, _COLD, False, False, False, 0)


def _key(search: Search, old: Seat, node: NodeId, kind: int, slot: int) -> Key:
    """Smaller is better."""
    return _fit(search, old, node, kind), natural(node), slot


def _fit(search: Search, old: Seat, node: NodeId, kind: int) -> Fit:
    """How good a node is for a seat: all but the names, which decide between equals."""
    nodes = search.cluster.nodes
    labels, before = nodes[node].labels, nodes[old.node].labels
    domain, switch, rack = [
        bool(before.get(name)) and labels.get(name) != before[name] for name in LABELS
    ]
    seats, ours = crowd(search.cluster, search.job, node)
    return domain, kind, seats, switch, rack, ours


def crowd(cluster: Cluster, job: Job, node: NodeId) -> tuple[bool, int]:
    """Prefer nodes without ranks of this job, then the emptiest: one fault then takes less."""
    uses = cluster.nodes[node].uses
    if not uses:
        return False, 0
    users = [user for user in uses.values() if user.job == job.spec.job]
    return any(user.rank >= 0 for user in users), len(users)


def _choice(node: NodeId, slot: int, kind: int) -> Choice:
    if kind == _COLD:
        return Choice(node, slot, False, f"the free slot {slot} on {node} (no standby was left)")
    ready = "ready" if kind == 0 else "warming"
    return Choice(node, slot, True, f"the {ready} standby on {node} slot {slot}")


# ---------------------------------------------------------------- what is there


def _standbys(search: Search) -> Iterator[Standby]:
    for standby in search.job.standbys.values():
        good = slots.usable(search.cluster.nodes[standby.node])
        if good and not slots.tainted(search.cluster, standby.node, standby.slot, search.now):
            yield standby


def _open(search: Search, node: NodeId, taken: Set[Place]) -> list[tuple[int, int]]:
    """What can be had on a node: (0 ready, 1 warming, 2 cold; slot)."""
    cluster = search.cluster
    state = cluster.nodes[node]
    found = [(_COLD, slot) for slot in range(state.slots) if slot not in state.uses]
    for slot, user in state.uses.items():
        if user.job == search.job.spec.job and user.rank < 0 and not user.fenced:
            ready = search.job.standbys[f"{node}/{slot}"].ready
            found.append((0 if ready else 1, slot))
        elif (node, slot) in search.also:
            found.append((_COLD, slot))
    return [
        (kind, slot)
        for kind, slot in found
        if (node, slot) not in taken and not slots.tainted(cluster, node, slot, search.now)
    ]


def _candidates(search: Search, within: Set[NodeId] | None) -> Iterator[NodeId]:
    """Nodes that may have something; those with a standby of the job or a loan first."""
    known = {standby.node for standby in search.job.standbys.values()}
    known |= {node for node, _ in search.also}
    free = itertools.islice(search.cluster.free, FREE_NODES_LOOKED_AT_MAX)
    if within is not None:
        looked_at: Iterable[NodeId] = sorted(within, key=natural)
    else:
        looked_at = dict.fromkeys(itertools.chain(sorted(known, key=natural), free))
    for node in looked_at:
        state = search.cluster.nodes.get(node)
        if state is not None and slots.usable(state):
            yield node
