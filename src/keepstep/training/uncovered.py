"""What a script does that cannot be covered, said once and loudly, while it runs.

A script does the same at each step, so it is watched in its first steps and now and then later.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from keepstep.training.randomness import Randomness, read_randomness

_WATCHED_STEPS = 64

Launched = tuple[int, int] | None
"""Collectives so far, and how often a save's thread had some; None while it has."""


def is_watched(step: int) -> bool:
    return step < _WATCHED_STEPS or step % _WATCHED_STEPS == 0


class Uncovered:
    """Watches one rank's loop."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._drawn: Randomness | None = None
        self._idle: Randomness | None = None
        self._launched: Launched = None
        self._versions = 0
        self._tells_of_buffers = True
        self.closure = False
        """An optimizer was given a closure, which computes gradients inside its update."""
        self.tail_moves = False
        """Registered tensors change after the update, inside the attempt."""

    def forward_done(self, step: int) -> None:
        """From here to the end of the attempt no random numbers may be drawn."""
        self._idle = None
        self._drawn = read_randomness() if is_watched(step) else None

    def update_begins(self, launched: Launched) -> None:
        """And from here on no collective may be launched but the optimizer's own; so many were."""
        self._launched = launched

    def update_done(self, launched: Launched, versions: int = 0) -> None:
        """`versions`: the sum over registered tensors, where none may change any more."""
        self._versions = versions
        closure, self.closure = self.closure, False
        if closure and _more(self._launched, launched):
            self._say(
                "a collective runs inside optimizer.step(closure), after the update has begun: a "
                "fault there cannot be retried, and is a fallback to the newest checkpoint"
            )
        elif _more(self._launched, launched):
            self._say(
                "a collective runs between the updates of two optimizers: a fault there cannot be "
                "retried; compute all gradients first, then step all optimizers"
            )
        self._launched = launched

    def attempt_done(self, launched: Launched, *, updated: bool, versions: int = 0) -> None:
        if updated and versions != self._versions:
            self.tail_moves = True
            self._say(
                "registered tensors change after optimizer.step() inside the attempt, and the "
                "optimizer has collectives of its own: a fault in those is a fallback to the "
                "newest checkpoint; move the change behind the attempt, or into session.on_commit"
            )
        if self._drawn is not None and self._drawn != read_randomness():
            self._say(
                "random numbers were drawn after the update began: a rank that dies there cannot "
                "be rebuilt exactly; draw them before optimizer.step()"
            )
        if updated and _more(self._launched, launched):
            self._say(
                "a collective runs after optimizer.step() inside the attempt: a fault there cannot "
                "be retried; move it before the update, or into session.on_commit"
            )

    def late_change(self, step: int, until: int) -> None:
        self._say(
            f"step {step} was the first whose backward pass changes what one rank alone holds "
            f"(buffers, or the state of a generator): a rank that is lost before step {until} is "
            "not rebuilt exactly"
        )

    def idle_from(self, step: int) -> None:
        """Between two attempts, outside the loader, no random numbers may be drawn either."""
        self._idle = read_randomness() if is_watched(step) else None

    def idle_until(self) -> None:
        idle, self._idle = self._idle, None
        if idle is not None and idle != read_randomness():
            self._say(
                "random numbers are drawn between two attempts: those of a replaced rank would "
                "differ; draw them in the attempt, or put an evaluation into session.evaluation"
            )

    def workers_draw(self) -> None:
        self._say(
            "the loader's workers draw random numbers, and those of a replaced rank would draw "
            "others: wrap the dataset in keepstep.seeded(dataset, seed)"
        )

    def save_on_default_group(self) -> None:
        self._say(
            "async_save runs its collectives in the default group, between those of training: "
            "give it one of its own, process_group=dist.new_group(backend='gloo')"
        )

    def save_in_a_process(self) -> None:
        self._say(
            "async_save in a process of its own has groups that are not re-formed: after a fault "
            "it waits for a rank that is gone; use AsyncCheckpointerType.THREAD"
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

    def grown(self) -> None:
        self._say(
            "what this rank alone holds has outgrown its second home (an optimizer with more state "
            "than two tensors a parameter?): its loss is a fallback to the newest checkpoint"
        )

    def regrouped(self) -> None:
        self._say(
            "an optimizer was given other parameters after the session began: who takes a lost "
            "rank's place has none of them, so a loss is a fallback to the newest checkpoint; call "
            "optimizer.add_param_group before keepstep.session"
        )

    def several_optimizers(self) -> None:
        self._say(
            "state that one rank holds alone has a second home only with one optimizer: with "
            "several, its loss is a fallback to the newest checkpoint"
        )

    def beyond_gradients(self, why: str) -> None:
        self._say(
            f"{why}: gradients alone do not lead to what one rank holds alone, so it has no second "
            "home after such a step, and a loss of that rank is a fallback to the newest checkpoint"
        )

    def strange_optimizer(self, kind: str) -> None:
        self._say(
            f"{kind} is not known to update each element by itself: what one rank holds alone has "
            "no second home with it, and its loss is a fallback to the newest checkpoint"
        )

    def evaluation_moves(self) -> None:
        self._say(
            "a fault ended an evaluation that had changed parameters: this rank's are not used any "
            "more, it receives others'; if all did the same, that is a fallback. Evaluate a copy"
        )

    def buffer_moves_unseen(self, name: str) -> None:
        self._say(
            f"buffer {name} was made in an attempt that broke, or began to change in mid-run "
            "through .data or a function that raises no version: it cannot be put back, and this "
            "rank receives its state; if all do, that is a fallback to the newest checkpoint. "
            "Register it in __init__, and write to it in place, with x.copy_"
        )

    def buffer_put_back(self, name: str) -> None:
        self._say(
            f"buffer {name} was given another size in an attempt that broke, and has the one of "
            "before again: if the step now ends with an error of the script, something beside the "
            "buffer says which size it has; ask the buffer itself (if n > self.table.shape[0])"
        )

    def buffer_comes_or_goes(self, name: str) -> None:
        if not self._tells_of_buffers:
            return
        self._tells_of_buffers = False
        self._say(
            f"buffer {name} was registered, dropped or given another size after the session began: "
            "who takes a lost rank's place has to make the same ones, in its start or its first "
            "step, or the job falls back to its newest checkpoint; register buffers in __init__"
        )

    def not_carried(self, name: str, kind: str) -> None:
        self._say(
            f"state of {name!r} is of {kind} and cannot be moved exactly: training goes on, but a "
            "fault or a planned move is a fallback, and session.save cannot write a checkpoint"
        )

    def nothing_to_give(self, why: str) -> None:
        self._say(f"this rank has nothing to give to others: {why}")

    def entry_outgrown(self, name: str) -> None:
        self._say(
            f"{name}, which no other rank gives back, has outgrown its second home: until homes "
            "are made anew (at a fault, or at steps 2, 16, 256 ...), the loss of a rank is a "
            "fallback to the newest checkpoint"
        )

    def private_moves(self, name: str, count: int) -> None:
        self._say(
            f"ranks have different values of what optimizers update ({count}, like {name}), and "
            "nothing says who holds them: if a rank is lost, or has to receive its state, the job "
            "falls back to its newest checkpoint; declare it with keepstep.held_by(layer, ranks)"
        )

    def lonely_moves(self, *, always: bool) -> None:
        """`always`: before this update and before the one that came before it."""
        if not always:
            self._say(
                "something other than an optimizer changed parameters or moments that one rank "
                "holds alone (were they reset?): between such a change and the next update a loss "
                "of that rank is a fallback to the newest checkpoint"
            )
            return
        self._say(
            "something other than an optimizer changes parameters that one rank holds alone (an "
            "average of weights?): they have no second home, and the loss of a rank is a fallback "
            "to the newest checkpoint; keep such weights replicated"
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


def _more(before: Launched, now: Launched) -> bool:
    """Was a collective launched in between? Unknown where a save's thread launched some, too."""
    if before is None or now is None or before[1] != now[1]:
        return False
    return before[0] != now[0]
