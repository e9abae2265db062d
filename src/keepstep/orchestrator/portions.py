"""The portions of a job's state: which there are, who holds them, and whether somebody is left.

A portion is what the same ranks hold alike, and its name says who they are (keepstep.portion).
Plain DDP has one, of all ranks. Ranks tell what they hold with their first step; the job remembers
the names, since of a portion that is lost altogether nobody is left to speak. A name that makes no
sense is remembered too, as held by nobody: the next vote finds it, and never resumes.

Pure. What is asked about all ranks at once comes from an index, so that nothing here is worse than
ranks x portions per rank.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from functools import lru_cache

from keepstep import portion
from keepstep.errors import WireError
from keepstep.model import Rank
from keepstep.orchestrator.state import Job
from keepstep.wire import SeatReport

PORTIONS_MAX = 65_536
TOO_MANY = f"more than {PORTIONS_MAX}"
"""Stands for all names beyond: no portion, so a job with that many never resumes from a vote."""
NAMED_MAX = 8


def of_all(size: int) -> str:
    """The portion that all ranks hold."""
    return f"0-{size - 1}" if size > 1 else "0"


@lru_cache(maxsize=16_384)
def holders(name: str, size: int) -> frozenset[Rank]:
    """Who holds a portion in a world of this size; nobody, if there can be no such portion."""
    try:
        runs = portion.runs_of(name)
    except WireError:
        return frozenset()
    if any(run[-1] >= size for run in runs):
        return frozenset()
    return frozenset(Rank(rank) for run in runs for rank in run)


def listed(names: Iterable[str]) -> str:
    """Names in one string: unlike a tuple's, its hash is computed once, however often it is used.

    No portion's name has a semicolon in it.
    """
    return ";".join(names)


@lru_cache(maxsize=32)
def index(names: str, size: int) -> tuple[tuple[str, ...], ...]:
    """By rank: which of the listed portions it holds."""
    apart = tuple(names.split(";"))
    if all(len(holders(name, size)) == size for name in apart):
        return (apart,) * size
    found: list[list[str]] = [[] for _ in range(size)]
    for name in apart:
        for rank in holders(name, size):
            found[rank].append(name)
    return tuple(map(tuple, found))


def note(job: Job, told: Iterable[SeatReport]) -> None:
    """Remember what ranks say that they hold, and what they can rebuild of others."""
    for seat in told:
        # What nobody covers any more is forgotten when all have told: until then a mirror that is
        # named in vain costs a question, and one that is not named a fallback.
        for cover in seat.covers:
            # One that does not lead to where its keeper is has a hole already.
            if cover.last >= seat.boundary:
                job.covers[cover.portion] = seat.rank
        for name in seat.portions:
            if name not in job.portions:
                kept = name if len(job.portions) < PORTIONS_MAX else TOO_MANY
                job.portions[kept] = len(holders(kept, job.spec.world_size))


def settle(job: Job, told: Collection[SeatReport]) -> None:
    """Every rank has made a step. If all said what they hold, it is that and no more."""
    if all(seat.portions for seat in told):
        job.portions, job.portions_told, job.covers = {}, True, {}
        note(job, told)


def known(job: Job) -> tuple[str, ...]:
    """All portions that ranks told of; none told, all state is one."""
    return tuple(sorted(job.portions)) or (of_all(job.spec.world_size),)


def in_the_dark(job: Job) -> bool:
    """Some ranks of a sharded job said what they hold, and not yet all."""
    size = job.spec.world_size
    return not job.portions_told and any(count < size for count in job.portions.values())


def mirror(job: Job, name: str) -> tuple[Rank, ...]:
    """Who keeps a cover of a portion; nobody, as a rule."""
    found = job.covers.get(name)
    return () if found is None else (found,)


def bereft(job: Job, away: Container[Rank]) -> str:
    """A portion of which nobody is left without these ranks; empty: each has somebody."""
    size = job.spec.world_size
    for name in known(job):
        held = holders(name, size)
        if held and all(rank in away for rank in (*held, *mirror(job, name))):
            return name
    return ""


def leavable(job: Job, ranks: Iterable[Rank]) -> list[Rank]:
    """Those who can leave at once, the first ones first: of each portion somebody stays."""
    size = job.spec.world_size
    stay = {name: count for name in known(job) if (count := len(holders(name, size)))}
    held = index(listed(stay), size)
    kept: dict[Rank, list[str]] = {}
    for name, mirror in job.covers.items():
        if name in stay:
            # A mirror counts as one more: from it, too, a portion can be had.
            stay[name] += 1
            kept.setdefault(mirror, []).append(name)
    going = []
    for rank in ranks:
        homed = [*held[rank], *kept.get(rank, ())]
        if all(stay[name] > 1 for name in homed):
            going.append(rank)
            for name in homed:
                stay[name] -= 1
    return going


def alone(job: Job, ranks: Iterable[Rank] | None = None) -> dict[Rank, str]:
    """Which of these ranks, or of all, hold a portion that is nowhere else, and which one."""
    size = job.spec.world_size
    single = [
        held
        for name in known(job)
        if len(held := holders(name, size)) == 1 and name not in job.covers
    ]
    owners = {rank: portion.name_of(held) for held in single for rank in held}
    if ranks is None:
        return owners
    return {rank: owners[rank] for rank in ranks if rank in owners}


def called(name: str, size: int) -> str:
    """A portion in a sentence; where all state is one, just that."""
    return "state" if name == of_all(size) else f"portion {name}"


def told_holders(name: str, size: int) -> str:
    """Whom a portion was with, in words."""
    ranks = sorted(holders(name, size))
    more = " …" if len(ranks) > NAMED_MAX else ""
    return f"rank {', '.join(map(str, ranks[:NAMED_MAX]))}{more}"
