"""What really happened, from the lines that the ranks themselves wrote. Pure.

    found = evaluate(logs, Asked(order, steps=700), strikes)

The systems are asked nothing. A step is *finished* once every rank that has a part in its gradient
has written its line, or anybody has written a line of a later step, or its end: nobody gets through
a later step's collectives otherwise. Who has a part is read from the marks that travelled with the
gradients: a system that goes on without a replica has finished a step as soon as those present
have. A step is *recomputed* if a line of it began after it was finished. Which samples are in the
model is read from the marks of the last execution of each step.

Everything is in seconds of one clock. Lines that do not parse are counted, not guessed.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench import figures
from bench.workload.order import Order, mark_of

SETTLED_SECONDS = 10.0
"""Steps within this time after a strike do not count as steady."""
LATE_STEPS = 2.0
"""A step that takes so many steady ones is a standstill."""


@dataclass(frozen=True, slots=True)
class Line:
    """One step applied on one rank."""

    rank: int
    step: int
    began: float
    ended: float
    ids: tuple[int, ...]
    marks: tuple[int, ...]
    loss: float


@dataclass(frozen=True, slots=True)
class End:
    rank: int
    steps: int
    at: float
    digest: str
    loss: float
    windows: int


@dataclass(frozen=True, slots=True)
class Start:
    rank: int
    pid: int
    host: str
    at: float


@dataclass(slots=True)
class Logs:
    """All ranks' files, read."""

    lines: list[Line] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    torn: int = 0
    """Lines that a death cut short."""

    def add(self, rank: int, text: str) -> None:
        for line in text.splitlines():
            if not line.strip():
                continue
            try:
                self._add(rank, json.loads(line))
            except (ValueError, KeyError, TypeError):
                self.torn += 1

    def _add(self, rank: int, raw: Mapping[str, Any]) -> None:
        at = raw["t"] / 1e9
        match raw["k"]:
            case "step":
                began, ids, marks = raw["b"] / 1e9, tuple(raw["ids"]), tuple(raw["w"])
                line = Line(rank, int(raw["s"]), began, at, ids, marks, float(raw["loss"]))
                self.lines.append(line)
            case "end":
                digest, loss, windows = str(raw["digest"]), float(raw["loss"]), int(raw["windows"])
                self.ends.append(End(rank, int(raw["s"]), at, digest, loss, windows))
            case "start":
                self.starts.append(Start(rank, int(raw["pid"]), str(raw["host"]), at))
            case other:
                raise ValueError(f"no such line: {other}")


@dataclass(frozen=True, slots=True)
class Truth:
    """The figures of one run. Seconds count from the first finished step."""

    began: float
    """When the first step was finished, on the machine's clock."""
    steps: int
    """Finished, of those that were asked for."""
    seconds: float | None
    """From the first finished step to the last one; None if the last was never finished."""
    finished: tuple[float, ...]
    """When each step was finished for the first time."""
    recomputed: int
    """Executions of steps that were finished already."""
    samples: int
    """Asked for."""
    lost: int
    doubled: int
    foreign: int
    """Samples in the model that nobody can name: marks that fit no batch."""
    disagreements: int
    """Steps whose last execution looks different to different ranks."""
    pauses: tuple[float, ...]
    """One per strike that had an effect: the longest standstill after it, less a steady step."""
    step_seconds: float
    """The median of steady steps."""
    loss: float | None
    """Of the last step, the mean over all ranks; None if not every rank computed it."""
    digests: Mapping[int, str]
    """Of the weights at the end, by rank."""
    torn: int


@dataclass(frozen=True, slots=True)
class Asked:
    """What the run was to do."""

    order: Order
    steps: int


def evaluate(logs: Logs, asked: Asked, strikes: Sequence[float]) -> Truth:
    """`strikes`: when each fault was carried out, on the same clock as the lines."""
    over = min((end.at for end in logs.ends if end.steps >= asked.steps), default=None)
    # Who comes back when the others have finished finds nobody: what it does then is no part of it.
    lines = [
        line
        for line in logs.lines
        if 0 <= line.step < asked.steps and (over is None or line.began < over)
    ]
    finished = finish_times(lines, asked.order.world, over)
    whole = list(itertools.takewhile(lambda s: s in finished, range(asked.steps)))
    times = tuple(finished[step] for step in whole)
    complete = len(whole) == asked.steps
    began = times[0] if times else 0.0
    executions = last_executions(lines)
    used, foreign = samples_used(executions, asked)
    wanted = {i for s in range(asked.steps) for r in range(asked.order.world)
              for i in asked.order.ids(s, r)}  # fmt: skip
    step_seconds = steady_step(times, strikes)
    last = executions.get(asked.steps - 1, ())
    return Truth(
        began=began,
        steps=len(whole),
        seconds=times[-1] - began if complete else None,
        finished=tuple(round(t - began, 6) for t in times),
        recomputed=recomputed_steps(lines, finished),
        samples=len(wanted),
        lost=len(wanted - used.keys()),
        doubled=sum(count - 1 for count in used.values()),
        foreign=foreign,
        disagreements=disagreements(executions),
        pauses=tuple(pauses(times, strikes, step_seconds)),
        step_seconds=step_seconds,
        loss=last_loss(last, asked.order.world) if complete else None,
        digests={end.rank: end.digest for end in logs.ends if end.steps == asked.steps},
        torn=logs.torn,
    )


def finish_times(lines: Iterable[Line], world: int, over: float | None = None) -> dict[int, float]:
    """When each step was finished for the first time; `over`: when the first rank wrote its end."""
    by_step: dict[int, list[Line]] = defaultdict(list)
    for line in lines:
        by_step[line.step].append(line)
    found: dict[int, float] = {}
    later = over
    for step in sorted(by_step, reverse=True):
        mine = by_step[step]
        known = [at for at in (later, written_by_all(mine, world)) if at is not None]
        if known:
            found[step] = min(known)
        later = min([line.ended for line in mine] + ([] if later is None else [later]))
    return found


def written_by_all(lines: Sequence[Line], world: int) -> float | None:
    """When all who have a part in one execution of this step had written it; None: never.

    A line without marks is one of a rank that did not see the gradient, because others had finished
    the step: it counts for every execution. If nobody saw one, all ranks have a part.
    """
    done = []
    for marks in {line.marks for line in lines if line.marks} or {()}:
        first: dict[int, float] = {}
        for line in lines:
            if line.marks in (marks, ()):
                first[line.rank] = min(line.ended, first.get(line.rank, line.ended))
        part = {rank for rank, mark in enumerate(marks) if mark} or set(range(world))
        if part <= first.keys():
            done.append(max(first[rank] for rank in part))
    return min(done, default=None)


def recomputed_steps(lines: Iterable[Line], finished: Mapping[int, float]) -> int:
    """Counted once per execution, however many ranks took part in it."""
    again: Counter[tuple[int, int]] = Counter()
    for line in lines:
        if line.step in finished and line.began > finished[line.step]:
            again[line.step, line.rank] += 1
    worst: dict[int, int] = {}
    for (step, _), count in again.items():
        worst[step] = max(worst.get(step, 0), count)
    return sum(worst.values())


def last_executions(lines: Iterable[Line]) -> dict[int, list[Line]]:
    """The lines of each step's last execution: those that overlap the one that ended last."""
    by_step: dict[int, list[Line]] = defaultdict(list)
    for line in lines:
        by_step[line.step].append(line)
    found = {}
    for step, all_lines in by_step.items():
        newest = max(all_lines, key=lambda line: line.ended)
        found[step] = [line for line in all_lines if line.ended > newest.began]
    return found


def last_loss(lines: Sequence[Line], world: int) -> float | None:
    """Over ranks whose own samples are in the gradient: who only learned that others had finished
    the step tells the loss of the one before. A mean over fewer ranks is one of other samples."""
    own = {
        line.rank: line.loss
        for line in lines
        if line.rank < len(line.marks) and line.marks[line.rank]
    }
    return sum(own.values()) / world if len(own) == world else None


def samples_used(
    executions: Mapping[int, Sequence[Line]], asked: Asked
) -> tuple[Counter[int], int]:
    """How often each sample is in the final model, and how many of unknown origin are."""
    used: Counter[int] = Counter()
    foreign = 0
    for step, lines in executions.items():
        marks = next((line.marks for line in reversed(lines) if line.marks), ())
        read = {line.rank: line.ids for line in lines}
        for rank, mark in enumerate(marks):
            if not mark:
                continue
            if mark == asked.order.mark(step, rank):
                used.update(asked.order.ids(step, rank))
            elif rank in read and mark == mark_of(read[rank]):
                used.update(read[rank])
            else:
                foreign += asked.order.batch
    return used, foreign


def disagreements(executions: Mapping[int, Sequence[Line]]) -> int:
    return sum(
        1 for lines in executions.values() if len({line.marks for line in lines if line.marks}) > 1
    )


def pauses(times: Sequence[float], strikes: Sequence[float], step: float) -> list[float]:
    """The longest standstill between each strike and the next, less one steady step.

    The step in which the next strike comes is that one's, unless it was late already: then it is
    one standstill that outlasts several strikes, and one pause.
    """
    gaps = list(itertools.pairwise(times))
    found: dict[int, float] = {}
    for number, struck in enumerate(strikes):
        until = strikes[number + 1] if number + 1 < len(strikes) else float("inf")
        last = until - LATE_STEPS * step
        mine = [
            (b - a, i)
            for i, (a, b) in enumerate(gaps)
            if b > struck and (b <= until or a < last or a <= struck)
        ]
        if mine:
            longest, at = max(mine)
            found[at] = max(0.0, longest - step)
    return [found[at] for at in sorted(found)]


def steady_step(times: Sequence[float], strikes: Sequence[float]) -> float:
    """The median of steps away from strikes; of all, if there are none such."""
    gaps = list(itertools.pairwise(times))
    if not gaps:
        return 0.0
    calm = [b - a for a, b in gaps if not any(a - SETTLED_SECONDS <= s <= b for s in strikes)]
    return figures.median(calm or [b - a for a, b in gaps])
