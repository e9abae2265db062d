"""The next generation: who is which rank, whose state counts, and who sends what to whom. Pure.

Whose state counts is a vote, for each portion of it: of the intact holders at the highest boundary,
the digest with a strict majority wins. A tie never resumes, nor does a portion that nobody holds
there. Whoever is not with the winners receives. The last home of a tensor is never received into in
place: see `moves`.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

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
from keepstep.orchestrator import alike, portions, strides
from keepstep.orchestrator.state import NodeState, Settled
from keepstep.wire import Home, SeatReport

_Said = Sequence[tuple[SeatReport, Sequence[Rank]]]
"""Reports, each with the ranks that share it: see alike.py."""
RACK_LABELS = ("rack", "switch", "nvlink_domain")
"""Labels of nodes that are lost together, the widest first."""
SOURCES_PER_MOVE_MAX = 4
LAST_RESORT_HOMES_MAX = 4
_NODE = operator.attrgetter("node")
_SHARES = operator.attrgetter("shares")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whose state counts. With a `problem` nobody's does."""

    boundary: int
    digests: dict[str, str]
    """Per portion of the state, as are the winners."""
    winners: dict[str, tuple[Rank, ...]]
    corrupt: tuple[Rank, ...]
    """Who lost a vote of any portion."""
    why: str
    problem: bool = False
    rebuilt: frozenset[str] = frozenset()
    """Portions that nobody holds there, and that their winner, a mirror, can rebuild."""
    synced: frozenset[str] = frozenset()
    """Portions that nobody holds there, and that all can complete together: each rank has updated
    its own part of them, and only the exchange of the parts is missing."""


def build(
    job: JobId,
    generation: Generation,
    secret: str,
    store_node: NodeId,
    seats: Sequence[Seat],
    nodes: Mapping[NodeId, NodeState],
) -> Roster:
    """A roster with the stride that its placement asks for."""
    own = list(map(_NODE, seats))
    texts = list(map(_SHARES, map(nodes.__getitem__, own)))
    said = {text: _shared(text) for text in set(texts)}
    told = {name for parts in said.values() for name in parts}
    domains = [_domain(name, said, texts, own) for name in RACK_LABELS if name in told]
    stride = strides.best(own, *domains)
    return Roster(job, generation, secret, store_node, stride, tuple(seats))


def _domain(
    name: str, said: Mapping[str, Mapping[str, str]], texts: list[str], own: list[NodeId]
) -> list[str]:
    """Per seat: the rack that its node says it is in, say; its own one where it says none."""
    racks = {text: parts[name] for text, parts in said.items() if name in parts}
    if len(racks) == len(said):
        # No line of Python per seat: there may be thousands, in each generation.
        return list(map(racks.__getitem__, texts))
    return [racks.get(text, node) for text, node in zip(texts, own, strict=True)]


def shares(labels: Mapping[str, str]) -> str:
    """What a node with these labels is lost together with, as far as anybody said."""
    return "\n".join(f"{name}={labels[name]}" for name in RACK_LABELS if labels.get(name))


@lru_cache(maxsize=65_536)
def _shared(text: str) -> Mapping[str, str]:
    """The labels of `shares`. Asked for each seat of each generation; racks are few."""
    # A label may hold anything, line breaks among it: what is left of one shares nothing.
    return {name: value for name, _, value in (s.partition("=") for s in text.splitlines())}


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


def judge(
    reports: Mapping[Rank, SeatReport], size: int, known: Sequence[str] = (), *, told: bool = True
) -> Verdict:
    """The vote over the reports of a quiesced job, for each portion of its state.

    `known` are the portions that ranks told of when they last trained; not `told`: not all did.
    """
    said = alike.groups(reports)
    boundary = max((report.boundary for report, _ in said if report.intact), default=-1)
    if boundary < 0:
        return _problem(-1, "no surviving rank holds whole state")
    votes = _votes(said, boundary)
    if not votes and not known:
        at_it = [
            r for r, report in reports.items() if report.intact and report.boundary == boundary
        ]
        votes = {portions.of_all(size): {"": at_it}}
    halves = _halves(said, boundary)
    names = sorted({*known, *votes, *halves})
    if why := _untold(reports, size, names, told=told):
        return _problem(boundary, why)
    digests: dict[str, str] = {}
    winners: dict[str, tuple[Rank, ...]] = {}
    corrupt: set[Rank] = set()
    covers = _covers(said, boundary)
    rebuilt, synced = set(), set()
    for name in names:
        found = votes.get(name, {})
        if not found and name in covers:
            # Nobody's copy to compare with: the mirror's was checked as it came, piece by piece.
            digests[name], winners[name] = "", (covers[name],)
            rebuilt.add(name)
            continue
        if not found and name in halves:
            digests[name], winners[name] = "", tuple(sorted(halves[name]))
            synced.add(name)
            continue
        if why := _undecided(name, size, boundary, found):
            return _problem(boundary, why)
        digest = max(found, key=lambda known: (len(found[known]), known))
        digests[name] = digest
        winners[name] = tuple(sorted(found[digest]))
        if len(found) > 1:
            corrupt.update(r for other, ranks in found.items() if other != digest for r in ranks)
    why = _agreed(boundary, digests, winners, votes)
    away = tuple(sorted(corrupt))
    return Verdict(
        boundary,
        digests,
        winners,
        away,
        why,
        rebuilt=frozenset(rebuilt),
        synced=frozenset(synced),
    )


def _covers(said: _Said, boundary: int) -> dict[str, Rank]:
    """Per portion: the mirror that can rebuild it at the boundary."""
    return {
        cover.portion: ranks[0]
        for report, ranks in said
        for cover in report.covers
        # The mirror tells the target all that is no tensor, so it has to be there itself.
        if report.intact and report.boundary == boundary and cover.first <= boundary <= cover.last
    }


def _halves(said: _Said, boundary: int) -> dict[str, list[Rank]]:
    """Per portion: who has made the update there, and lacks what others updated."""
    halves: dict[str, list[Rank]] = {}
    for report, ranks in said:
        if report.unsynced and report.intact and report.boundary == boundary:
            for name in report.unsynced:
                halves.setdefault(name, []).extend(ranks)
    return halves


def _problem(boundary: int, why: str) -> Verdict:
    return Verdict(boundary, {}, {}, (), why, problem=True)


def _votes(said: _Said, boundary: int) -> dict[str, dict[str, list[Rank]]]:
    """Per portion: who at the boundary holds which digest of it."""
    votes: dict[str, dict[str, list[Rank]]] = {}
    for report, ranks in said:
        if report.boundary == boundary and report.intact:
            for name, digest in report.digests.items():
                found = votes.get(name)
                if found is None:
                    found = votes[name] = {}
                same = found.get(digest)
                if same is None:
                    found[digest] = list(ranks)
                else:
                    same.extend(ranks)
    return votes


def _untold(
    reports: Mapping[Rank, SeatReport], size: int, names: Sequence[str], *, told: bool
) -> str:
    """Why there may be portions that nobody spoke of; empty: all are known.

    A rank that died before it said what it holds may have held something that nobody else knows of.
    It is spoken for if the others' portions name it as often as any of them.
    """
    if told or all(len(portions.holders(name, size)) == size for name in names):
        return ""
    held = portions.index(portions.listed(names), size)
    most = max(len(report.digests) + len(report.unsynced) for report in reports.values())
    said = {rank for rank, report in reports.items() if report.digests or report.unsynced}
    mute = (rank for rank in range(size) if rank not in said and len(held[rank]) < most)
    lost = next(mute, None)
    return "" if lost is None else f"rank {lost} was lost before it said what it holds"


def _undecided(name: str, size: int, boundary: int, found: Mapping[str, list[Rank]]) -> str:
    """Why nobody's copy of a portion counts; empty: somebody's does."""
    held = portions.holders(name, size)
    what = portions.called(name, size)
    if not held:
        return f"{name!r} is no portion that ranks 0 to {size - 1} can hold"
    voters = sum(map(len, found.values()))
    if not voters:
        was = portions.told_holders(name, size)
        return f"nobody holds {what} at boundary {boundary}: it was with {was}"
    if not all(map(held.issuperset, found.values())):
        strange = min(set().union(*found.values()) - held)
        return f"rank {strange} speaks of {what}, which it does not hold"
    if 2 * max(map(len, found.values())) > voters:
        return ""
    of = "states" if len(held) == size else f"states of {what}"
    return (
        f"{voters} ranks at boundary {boundary} hold {len(found)} different {of} and "
        "none has a majority: a tie never resumes"
    )


def _agreed(
    boundary: int,
    digests: Mapping[str, str],
    winners: Mapping[str, tuple[Rank, ...]],
    votes: Mapping[str, Mapping[str, list[Rank]]],
) -> str:
    voted = [name for name in winners if name in votes]
    again = [
        f"rank {winners[name][0]} rebuilds {name}"
        if len(winners[name]) == 1
        else f"{len(winners[name])} ranks complete {name}"
        for name in winners
        if name not in votes
    ]
    if not voted:
        return f"boundary {boundary}: {'; '.join(again[: portions.NAMED_MAX])}"
    least = min(voted, key=lambda name: (len(winners[name]), name))
    voters = sum(map(len, votes[least].values()))
    if len(winners) == 1:
        digest = digests[least][:12]
        return f"{len(winners[least])} of {voters} ranks at boundary {boundary} agree on {digest}"
    majority = (
        f"{len(voted)} portions at boundary {boundary} have a majority each, the smallest "
        f"{len(winners[least])} of {voters} ranks for {least}"
    )
    return "; ".join([majority, *again[: portions.NAMED_MAX]])


def moves(
    verdict: Verdict,
    reports: Mapping[Rank, SeatReport],
    seats: Sequence[Seat],
    suspicion: Mapping[Rank, int],
) -> tuple[Move, ...]:
    """Who receives which portion from whom, in which wave.

    If all winners of a portion live on one node, its loss would lose the boundary. So a second node
    gets a copy first, from a receiver that has nothing to lose: a joiner, or a survivor that
    receives beside its old state (staged). Only then are the others, who still hold an older whole
    state, received into in place, whatever the portion: half an older state is none. So whoever
    receives is whole after one wave. Who wins some portions and receives others is never torn: it
    always receives beside.

    All ranks walk this one list, each doing its part of one move after another. Whoever comes first
    in the list waits for nobody behind it, so they cannot wait for each other in a circle.
    """
    wanting = _wanting(verdict, reports, len(seats))
    waves = {
        name: _first_wave(verdict.winners[name], reports, seats, targets)
        for name, targets in wanting.items()
    }
    late: set[Rank] = set()
    for name, targets in wanting.items():
        late.update(set(targets) - waves[name][0])
    beside = {chosen for _, chosen in waves.values()}
    wins_too = _wins_too(verdict, reports, wanting, len(seats))
    # Who held something corrupt may hold more of it.
    doubts = {**dict.fromkeys(verdict.corrupt, 1), **suspicion}
    planned: list[Move] = []
    for name, targets in wanting.items():
        sources = trusted_sources(verdict.winners[name], doubts)
        count = min(SOURCES_PER_MOVE_MAX, len(sources))
        ring = tuple(sources) + tuple(sources[:count])
        stripes, start, again = len(sources), 0, name in verdict.rebuilt
        for target in targets:
            wave = 1 if target in late and target not in beside else 0
            # What is made again is made in place: its mirror has it as long as that takes.
            staged = not again and (target in beside or target in wins_too)
            planned.append(Move(target, ring[start : start + count], wave, staged, name, again))
            start = (start + count) % stripes
    if late or verdict.rebuilt:
        # What is made again comes last: with it come parameters that others hold as well, and what
        # those sent may lack this rank's update.
        planned.sort(key=operator.attrgetter("wave", "rebuilt"))
    return tuple(planned)


def _wanting(
    verdict: Verdict, reports: Mapping[Rank, SeatReport], size: int
) -> dict[str, list[Rank]]:
    """Per portion: its holders that did not win it, and so receive it."""
    wanting: dict[str, list[Rank]] = {}
    for name, won in verdict.winners.items():
        held = portions.holders(name, size)
        if len(won) < len(held) or name in verdict.rebuilt:
            targets = [rank for rank in sorted(held.difference(won)) if rank in reports]
            if targets:
                wanting[name] = targets
    return wanting


def _wins_too(
    verdict: Verdict,
    reports: Mapping[Rank, SeatReport],
    wanting: Mapping[str, Sequence[Rank]],
    size: int,
) -> set[Rank]:
    """Receivers that are at the boundary and hold some of their portions as they should be."""
    if len(verdict.digests) == 1:
        return set()
    wanted = Counter(
        rank
        for targets in wanting.values()
        for rank in targets
        if reports[rank].intact and reports[rank].boundary == verdict.boundary
    )
    held = portions.index(portions.listed(verdict.digests), size)
    return {rank for rank, count in wanted.items() if count < len(held[rank])}


def bytes_through_busiest(
    planned: Sequence[Move],
    state_bytes: int,
    portions_held: Callable[[Rank], int] = lambda _: 1,
) -> int:
    """What the busiest rank sends or receives: waves one after another, a wave's moves at once.

    A rank's bytes are taken to be spread evenly over its portions.
    """
    waves: dict[int, dict[int, float]] = {}
    for move in planned:
        loads = waves.get(move.wave)
        if loads is None:
            loads = waves[move.wave] = {}
        target, sources = move.target, move.sources
        part = 1 / portions_held(target)
        sent = part / len(sources)
        for source in sources:
            loads[source] = loads.get(source, 0.0) + sent
        # Both ways at once: what a rank receives is counted apart from what it sends.
        loads[~target] = loads.get(~target, 0.0) + part
    return math.ceil(state_bytes * sum(max(loads.values()) for loads in waves.values()))


def writers(verdict: Verdict, suspicion: Mapping[Rank, int]) -> dict[str, Rank]:
    """Who writes each portion down: trusted holders, the work spread over them.

    Those with the fewest holders choose first, so that what many hold goes to somebody idle.
    """
    chosen: dict[str, Rank] = {}
    load: dict[Rank, int] = {}
    for name in sorted(verdict.winners, key=lambda name: (len(verdict.winners[name]), name)):
        able = trusted_sources(verdict.winners[name], suspicion)
        writer = min(able, key=lambda rank: (load.get(rank, 0), rank))
        load[writer] = load.get(writer, 0) + 1
        chosen[name] = writer
    return dict(sorted(chosen.items()))


def trusted_sources(winners: Sequence[Rank], suspicion: Mapping[Rank, int]) -> list[Rank]:
    """Winners that were in no failed transfer; failing that, the least suspected one alone.

    Alone, because a stripe that fails again names nobody: one bad source among four would be
    asked again and again. One at a time, it is found.
    """
    clean = [rank for rank in winners if rank not in suspicion]
    return clean or [min(winners, key=lambda rank: (suspicion[rank], rank))]


def _first_wave(
    winners: Sequence[Rank],
    reports: Mapping[Rank, SeatReport],
    seats: Sequence[Seat],
    targets: Sequence[Rank],
) -> tuple[frozenset[Rank], Rank]:
    """A portion's targets of wave 0, and the one among them that receives beside its old state."""
    domains = {seats[rank].node for rank in winners}
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
