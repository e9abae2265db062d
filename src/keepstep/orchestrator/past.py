"""What is kept of a job when the job itself is forgotten. It is small, so that it can stay."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.model import Generation

PAST_MAX = 20_000
"""Names that are kept: each is 200 bytes of every snapshot."""


@dataclass(frozen=True, slots=True)
class Unissued:
    """Numbers under a name that this journal never gave out: they are skipped, because a run that
    it lacks may have them."""

    first: Generation
    last: int
    """Of generations; incarnations end below it."""
    incarnation: int
    """The first one."""


@dataclass(frozen=True, slots=True)
class Past:
    """A name that was used: whose it is, where its next run goes on, and above which numbers."""

    project: str
    ended_at: float
    generation: Generation
    promised: Generation
    first_incarnation: int
    """Of its next run: agents remember how each incarnation ended."""
    published_step: int = -1
    published_path: str = ""
    contaminated: tuple[int, ...] = ()
    unissued: tuple[Unissued, ...] = ()
