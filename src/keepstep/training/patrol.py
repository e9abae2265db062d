"""A mirror looks after what it keeps, so that a flip in it is found before its owner is lost.

With --check-steps 1 it reads, at each begin of a step, an eighth of what a rebuild would need:

    step s     of the newest whole capsule the tensors of eighth s mod 8 | records s-8, s-16

so that each byte is compared with its owner's digest every 8 steps. With K > 8 the
eighths are spread over K steps. A capsule that still grows is looked at once it is whole: until
then the older one counts. What does not fit is kept no longer: all stop at the boundary, and before
anybody resumes the owner sends its whole shard again, as to a new mirror (covering.py).

Must never: say that a cover is good because it was not looked at; read all of it in one step.
"""

from __future__ import annotations

from collections.abc import Collection

from keepstep.errors import Permanent
from keepstep.training.cover import (
    PARTS,
    Keeping,
    landed,
    read_capsule,
    read_record,
    views_of,
)
from keepstep.training.kept import Kept


def due(step: int, every: int) -> tuple[int, ...]:
    """Which eighths a mirror reads at the begin of this step. Pure."""
    if every < PARTS:
        return (step % PARTS,) if every else ()
    turn = step % every
    return tuple(e for e in range(PARTS) if e * every // PARTS == turn)


def spoilt(keeping: Keeping, eighths: Collection[int]) -> str:
    """What of these eighths of a cover is not as its owner wrote it; empty: nothing."""
    kept = keeping.kept
    if kept is None:
        return keeping.spoilt
    reach = kept.reach()
    if reach is None or reach[1] < keeping.newest:
        # A flip in the file's own few numbers: something is not found that is there.
        return f"it should lead to boundary {keeping.newest}, and does not"
    try:
        for eighth in eighths:
            _look_at_capsule(kept, eighth)
    except Permanent as error:
        return f"boundary {reach[0]}: {error}"
    for number in range(reach[0], reach[1]):
        if number % PARTS in eighths:
            try:
                _look_at_record(kept, number)
            except Permanent as error:
                return f"step {number}: {error}"
    return ""


def _look_at_capsule(kept: Kept, eighth: int) -> None:
    boundary, raw = kept.capsule()
    meta, body = read_capsule(raw)
    if meta["boundary"] != boundary:
        raise Permanent(f"it is the capsule of boundary {meta['boundary']}")
    landed(meta, body, eighth)


def _look_at_record(kept: Kept, step: int) -> None:
    raw = kept.record(step)
    assert raw is not None, "it is in reach"
    views_of(read_record(raw))
