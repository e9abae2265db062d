"""Portions of a job's state: what the same ranks hold alike. A portion's name says who they are.

    0-3        ranks 0, 1, 2 and 3: plain DDP in a world of four
    0-6/2      every second one of them: one shard of HSDP, or one slice of tensor parallelism
    0-1+4-5    two runs, where no stride fits

Tensors with the same holders are one portion, so a job of 16,384 ranks has few of them, and their
names are short whatever the number of their holders. Pure; both sides of the wire read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from keepstep.errors import WireError
from keepstep.model import Rank

NAMES_CACHED_MAX = 65_536


def name_of(holders: Iterable[int]) -> str:
    """The one name of a set of holders."""
    ranks = sorted(set(holders))
    if not ranks:
        raise ValueError("a portion has at least one holder")
    return "+".join(_run_name(run) for run in _runs(ranks))


@lru_cache(maxsize=NAMES_CACHED_MAX)
def runs_of(name: str) -> tuple[range, ...]:
    """The holders that a name speaks of, as they stand in it."""
    try:
        return tuple(_run(part) for part in name.split("+"))
    except ValueError as error:
        raise WireError(f"{name!r} is no portion's name: {error}") from error


def holders_of(name: str) -> list[Rank]:
    return [Rank(rank) for run in runs_of(name) for rank in run]


def holds(name: str, rank: int) -> bool:
    """Does this rank hold the portion? Without looking at the others."""
    return any(rank in run for run in runs_of(name))


def _runs(ranks: list[int]) -> Iterator[range]:
    """Greedy, so that the same set always gives the same runs."""
    at = 0
    while at < len(ranks):
        stride = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 1
        end = at + 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == stride:
            end += 1
        if end - at == 2 and stride > 1 and end < len(ranks):
            # Two that only happen to be apart: the second may begin a longer run.
            end = at + 1
        yield range(ranks[at], ranks[end - 1] + 1, stride if end - at > 1 else 1)
        at = end


def _run_name(run: range) -> str:
    if len(run) == 1:
        return str(run[0])
    return f"{run[0]}-{run[-1]}" + (f"/{run.step}" if run.step > 1 else "")


def _run(text: str) -> range:
    ends, _, stride = text.partition("/")
    first, dash, last = ends.partition("-")
    start, stop, step = int(first), int(last if dash else first), int(stride or 1)
    if start < 0 or stop < start or step < 1 or (stop - start) % step:
        raise ValueError("its numbers do not fit")
    return range(start, stop + 1, step)
