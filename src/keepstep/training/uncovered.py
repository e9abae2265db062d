"""What a script does that cannot be covered, said once and loudly, while it runs.

A script does the same at each step, so it is watched in its first steps and now and then later.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

_WATCHED_STEPS = 64


class Uncovered:
    """Watches one rank's loop."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._drawn: torch.Tensor | None = None
        self._launched = 0

    def forward_done(self, step: int) -> None:
        """From here to the end of the attempt no random numbers may be drawn."""
        watched = step < _WATCHED_STEPS or step % _WATCHED_STEPS == 0
        self._drawn = torch.get_rng_state() if watched else None

    def update_done(self, launched: int) -> None:
        """And from here on no collective may be launched; so many were."""
        self._launched = launched

    def attempt_done(self, launched: int, *, updated: bool) -> None:
        if self._drawn is not None and not torch.equal(self._drawn, torch.get_rng_state()):
            self._say(
                "random numbers were drawn after the backward pass: a rank that dies there cannot "
                "be rebuilt exactly; draw them before loss.backward()"
            )
        if updated and launched != self._launched:
            self._say(
                "a collective runs after optimizer.step() inside the attempt: a fault there cannot "
                "be retried; move it before the update, or into session.on_commit"
            )

    def strays(self, names: Sequence[str]) -> None:
        if names:
            self._say(
                f"parameters of the optimizers belong to no registered module ({len(names)}, like "
                f"{names[0]}): they are not moved; register the model, before it first runs"
            )

    def no_room(self, rank: int, why: str) -> None:
        self._say(
            f"no room here for a copy of what rank {rank} alone holds ({why}): if that rank is "
            "lost, the job falls back to its newest checkpoint; give the tmpfs more memory"
        )

    def several_optimizers(self) -> None:
        self._say(
            "state that one rank holds alone has a second home only with one optimizer: with "
            "several, its loss is a fallback to the newest checkpoint"
        )

    def lonely(self, portions: Sequence[str]) -> None:
        self._say(
            f"state of ranks {', '.join(portions[:8])} is held by one rank each, and there is no "
            "second node for a copy: if such a rank is lost, the job falls back to its newest "
            "checkpoint"
        )

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            sys.stderr.write(f"keepstep: {text}\n")
            sys.stderr.flush()
