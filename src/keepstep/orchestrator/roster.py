"""The next generation: who is which rank, whose state counts, and who sends what to whom. Pure.

Whose state counts is a vote: of the intact ranks at the highest boundary, the digest with a strict
majority wins. A tie never resumes. Whoever is not with the winners receives. The last home of a
tensor is never received into in place: see `moves`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from keepstep.model import (
    Endpoint,
    Generation,
    JobId,
    Move,
    NodeId,
    Rank,
    Roster,
    Seat,
)
from keepstep.orchestrator.state import NodeState, Settled
from keepstep.wire import Home, SeatReport

STRIDES_TRIED_MAX = 64
RACK_LABELS = ("rack", "switch", "nvlink_domain")
"""Labels of nodes that are lost together, the widest first."""
SOURCES_PER_MOVE_MAX = 4
LAST_RESORT_HOMES_MAX = 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whose state counts. With a `problem` nobody's does."""

    boundary: int
    digest: str
    winners: tuple[Rank, ...]
    corrupt: tuple[Rank, ...]
    why: str
    problem: bool = False


def build(
    job: JobId,
    generation: Generation,
    secret: str,
    store_node: NodeId,
    seats: Sequence[Seat],
    nodes: Mapping[NodeId, NodeState],
) -> Roster:
    """A roster with the stride that its placement asks for."""
    own = [seat.node for seat in seats]
    labelled = {node: _shares(nodes[node]) for node in set(own) if nodes[node].labels}
    stride = mirror_stride(own, [labelled.get(node, node) for node in own] if labelled else ())
    return Roster(job, generation, secret, store_node, stride, tuple(seats))


def _shares(state: NodeState) -> str:
    """What a node is lost together with: its rack, as far as anybody said."""
    labels = (name for name in RACK_LABELS if state.labels.get(name))
    return next((f"{name}={state.labels[name]}" for name in labels), state.node)


def mirror_stride(nodes: Sequence[NodeId], racks: Sequence[str] = ()) -> int:
    """The smallest k that puts rank r and rank (r + k) mod N on different nodes, for all r.

    And in different racks, if that can be had. Where nothing does (a node with most of the ranks),
    the k with fewest collisions; on one node none at all: a copy there would go with the original.
    """
    size = len(nodes)
    if len(set(nodes)) <= 1:
        return 0
    own, rack = list(nodes), list(racks or nodes)
    # Ranks lie in blocks: the first rank of another rack is as far away as all have to look.
    other_rack = next((k for k in range(1, size) if rack[k] != rack[0]), 1)
    best, fewest = 1, (size + 1, size + 1)
    for stride in (*range(1, min(size, STRIDES_TRIED_MAX + 1)), other_rack):
        if own[0] == own[stride] and fewest[0] == 0:
            continue
        same_node = _collisions(own, stride)
        collisions = (same_node, _collisions(rack, stride) if racks else same_node)
        if collisions < fewest:
            best, fewest = stride, collisions
        if collisions == (0, 0):
            break
    return best


def _collisions(places: list[NodeId] | list[str], stride: int) -> int:
    return sum(map(operator.eq, places, places[stride:] + places[:stride]))


def store_node(
    seats: Sequence[Seat], nodes: Mapping[NodeId, NodeState], fresh: Iterable[Rank], now: NodeId
) -> NodeId:
    """Where the generation meets: where it met before, or else with the lowest survivor."""

    def fit(node: NodeId) -> bool:
        state = nodes.get(node)
        return state is not None and state.alive and state.store_good

    joiners = set(fresh)
    if fit(now) and any(seat.node == now for seat in seats):
        return now
    for survivors_only in (True, False):
        for seat in seats:
            if fit(seat.node) and not (survivors_only and seat.rank in joiners):
                return seat.node
    return now


def judge(reports: Mapping[Rank, SeatReport]) -> Verdict:
    """The vote over the reports of a quiesced job."""
    boundary = max((report.boundary for report in reports.values() if report.intact), default=-1)
    if boundary < 0:
        return Verdict(-1, "", (), (), "no surviving rank holds whole state", problem=True)
    votes: dict[str, list[Rank]] = {}
    for rank, report in reports.items():
        if report.boundary == boundary and report.intact:
            votes.setdefault(report.digest, []).append(rank)
    holders = sum(map(len, votes.values()))
    digest = max(votes, key=lambda known: (len(votes[known]), known))
    if 2 * len(votes[digest]) <= holders:
        why = (
            f"{holders} ranks at boundary {boundary} hold {len(votes)} different states and "
            "none has a majority: a tie never resumes"
        )
        return Verdict(boundary, "", (), (), why, problem=True)
    winners = tuple(sorted(votes.pop(digest)))
    corrupt = tuple(sorted(rank for ranks in votes.values() for rank in ranks))
    why = f"{len(winners)} of {holders} ranks at boundary {boundary} agree on {digest[:12]}"
    return Verdict(boundary, digest, winners, corrupt, why)


def moves(
    verdict: Verdict,
    reports: Mapping[Rank, SeatReport],
    seats: Sequence[Seat],
    suspicion: Mapping[Rank, int],
) -> tuple[Move, ...]:
    """Who receives from whom, in which wave.

    If all winners live on one node, its loss would lose the boundary. So a second node gets a copy
    first, from a receiver that has nothing to lose: a joiner, or a survivor that receives beside
    its old state (staged). Only then are the others, who still hold an older whole state, received
    into in place.
    """
    won = frozenset(verdict.winners)
    targets = [rank for rank in sorted(reports) if rank not in won]
    if not targets:
        return ()
    sources = trusted_sources(verdict.winners, suspicion)
    first, staged = _first_wave(verdict, reports, seats, targets)
    count = min(SOURCES_PER_MOVE_MAX, len(sources))
    ring = tuple(sources) + tuple(sources[:count])
    planned = []
    for place, target in enumerate(targets):
        start = place * count % len(sources)
        wave = 0 if target in first else 1
        planned.append(Move(target, ring[start : start + count], wave, target == staged))
    return tuple(planned)


def bytes_through_busiest(planned: Sequence[Move], state_bytes: int) -> int:
    """What the busiest rank sends or receives: waves one after another, a wave's moves at once."""
    waves: dict[int, dict[tuple[str, Rank], float]] = {}
    for move in planned:
        loads = waves.setdefault(move.wave, {})
        for source in move.sources:
            loads["out", source] = loads.get(("out", source), 0.0) + 1 / len(move.sources)
        loads["in", move.target] = 1.0
    return math.ceil(state_bytes * sum(max(loads.values()) for loads in waves.values()))


def trusted_sources(winners: Sequence[Rank], suspicion: Mapping[Rank, int]) -> list[Rank]:
    """Winners that were in no failed transfer; failing that, the least suspected one alone.

    Alone, because a stripe that fails again names nobody: one bad source among four would be
    asked again and again. One at a time, it is found.
    """
    clean = [rank for rank in winners if rank not in suspicion]
    return clean or [min(winners, key=lambda rank: (suspicion[rank], rank))]


def _first_wave(
    verdict: Verdict,
    reports: Mapping[Rank, SeatReport],
    seats: Sequence[Seat],
    targets: Sequence[Rank],
) -> tuple[frozenset[Rank], Rank]:
    """The targets of wave 0, and the one among them that receives beside its old state."""
    domains = {seats[rank].node for rank in verdict.winners}
    if len(domains) > 1:
        return frozenset(targets), Rank(-1)
    empty = [r for r in targets if not (reports[r].intact and reports[r].boundary >= 0)]
    elsewhere = [r for r in targets if seats[r].node not in domains]
    if any(seats[r].node not in domains for r in empty) or (empty and not elsewhere):
        return frozenset(empty), Rank(-1)
    # Nobody empty in a second domain (a whole but older rank is all that there is).
    chosen = elsewhere[0] if elsewhere else targets[0]
    return frozenset([*empty, chosen]), chosen


def groups_alike(reports: Iterable[SeatReport]) -> bool:
    """Whether all have said what groups they made, and the same. Else they meet to find out."""
    logs = {report.groups for report in reports}
    return len(logs) == 1 and "" not in logs


def needy(
    boundary: int, reports: Mapping[Rank, SeatReport], gone: Iterable[Rank] = ()
) -> list[Rank]:
    """Ranks whose private state at the boundary has to come from somewhere else."""
    wanting = [
        rank
        for rank, report in reports.items()
        if not (report.boundary == boundary and report.intact) and boundary not in report.entries
    ]
    return sorted({*wanting, *gone})


def homes(
    ranks: Sequence[Rank], settled: Sequence[Settled], nodes: Mapping[NodeId, NodeState]
) -> tuple[Home, ...]:
    """Where each rank's private state may be: its own node, its mirror's, then anybody's.

    A node that lost its memory since then (a newer boot) is no home, however alive it is.
    """
    found = []
    for rank in ranks:
        places: dict[NodeId, None] = {}
        for home in settled:
            seats = home.roster.seats
            mirror = (rank + home.roster.mirror_stride) % len(seats)
            for node in (seats[rank].node, seats[mirror].node):
                if _remembers(nodes.get(node), home):
                    places.setdefault(node)
        places.update(dict.fromkeys(_last_resort(rank, settled, nodes, places)))
        endpoints = tuple(Endpoint(nodes[n].address, nodes[n].peer_port) for n in places)
        found.append(Home(rank, endpoints, tuple(home.roster.secret for home in settled)))
    return tuple(found)


def _last_resort(
    rank: Rank,
    settled: Sequence[Settled],
    nodes: Mapping[NodeId, NodeState],
    known: Mapping[NodeId, None],
) -> list[NodeId]:
    others: list[NodeId] = []
    for home in settled[:1]:
        seats = home.roster.seats
        for away in range(1, min(len(seats), 64)):
            node = seats[(rank + away) % len(seats)].node
            if node in known or node in others or not _remembers(nodes.get(node), home):
                continue
            others.append(node)
            if len(others) == LAST_RESORT_HOMES_MAX:
                break
    return others


def _remembers(node: NodeState | None, home: Settled) -> bool:
    return node is not None and node.alive and node.serial <= home.serial
