"""Where a job's time went: every rank-second falls into exactly one class. Pure.

    the chain     waiting | startup | training | a migration's phase | held | parked | …
    the step log  makes `training` exact: each committed step's own time, the broken attempt and
                  the detection before a pause, declared slowness, gaps, steps made again

The time of a run is one line, cut into segments; classes are painted over it and never beside it,
so they sum to the whole, in integer nanoseconds. All ranks of a synchronous job do the same thing
at the same time, so a segment counts once for each rank. Spares are counted beside it.

The chain is dated by the orchestrator and the step log by rank 0. A generation's first step comes
after its order to resume and before its incident is closed: if the clocks contradict that, the step
log is shifted by the least that makes it so.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

from keepstep.ledger.verify import Chain

GAP_MEDIANS = 10.0
"""As in the guarantee: a longer gap than so many median steps is not one step's own time."""
_SECOND = 1_000_000_000


class Spent(StrEnum):
    """What a rank-second was spent on. USEFUL also stands for all training, as long as no step log
    says more."""

    USEFUL = "useful"
    """A step that was committed, for the first time."""
    RETRIED = "retried"
    """The attempt that a fault broke off: at most one median step before the pause."""
    DETECTION = "detection"
    """From there to the moment when the incident was opened."""
    ALLOCATE = "allocate"
    QUIESCE = "quiesce"
    REFORM = "reform"
    TRANSFER = "transfer"
    """State on its way, verification included: what receivers measured of REFORM."""
    RESUME = "resume"
    HELD = "held"
    """At a boundary, for want of a spare."""
    CONTROL_PLANE_DOWN = "control_plane_down"
    """Phases in which nobody was there to decide."""
    FALLBACK = "fallback"
    """Starting anew from a checkpoint, after state was lost."""
    RECOMPUTE = "recompute"
    """Committed steps, made again after a fallback."""
    STALLED = "stalled"
    """A gap in the step stream that no incident explains."""
    SAVE = "checkpoint_save"
    """Declared by the job, or the boundary that is saved before it leaves."""
    BUSY = "declared_busy"
    STARTUP = "startup"
    ENDING = "ending"
    """After the last committed step."""
    WAITING = "waiting"
    """For nodes: nothing is paid."""
    PARKED = "parked"
    """Its devices serve another job: nothing is paid."""
    IDLE_SPARE = "idle_spare"


UNPAID = frozenset({Spent.WAITING, Spent.PARKED})
PAUSED = frozenset(
    {Spent.ALLOCATE, Spent.QUIESCE, Spent.REFORM, Spent.TRANSFER, Spent.RESUME, Spent.HELD}
    | {Spent.CONTROL_PLANE_DOWN, Spent.FALLBACK, Spent.SAVE}
)
NEEDS_DECISIONS = frozenset({Spent.ALLOCATE, Spent.QUIESCE, Spent.REFORM, Spent.TRANSFER})
"""Phases that stand still while no orchestrator leads."""
_PHASES: Mapping[str, Spent] = {
    "warm": Spent.USEFUL,
    "agree": Spent.USEFUL,
    "allocate": Spent.ALLOCATE,
    "quiesce": Spent.QUIESCE,
    "reform": Spent.REFORM,
    "transfer": Spent.TRANSFER,
    "verify": Spent.TRANSFER,
    "resume": Spent.RESUME,
    "hold": Spent.HELD,
    "save": Spent.SAVE,
    "fallback": Spent.FALLBACK,
}
_STATES: Mapping[str, Spent] = {
    "waiting": Spent.WAITING,
    "starting": Spent.STARTUP,
    "parked": Spent.PARKED,
    "held": Spent.HELD,
}
_TRAINING = frozenset({Spent.USEFUL})
_OUTAGES = frozenset({"TermBegan", "ControlPlaneBack", "ControlPlaneDown"})
"""Events that say for how long nothing could be decided."""
OVER = frozenset({"finished", "saved", "failed", "stopped"})


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a run, in nanoseconds of the orchestrator's clock."""

    begin: int
    end: int
    spent: Spent
    incident: str = ""
    planned: bool = False

    @property
    def nanoseconds(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Step:
    """A line of the step log, on the chain's clock."""

    number: int
    generation: int
    at: int
    busy: int
    save: int
    again: bool
    """Committed before, and made once more after a fallback."""
    work: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Run:
    """From a submission to its end; a job that is requeued has several."""

    begin: int
    end: int
    world: int
    segments: tuple[Segment, ...]
    spares: tuple[tuple[int, int, int], ...]
    """How many standbys were kept, from when to when."""
    over: bool

    @property
    def total(self) -> int:
        """Rank-nanoseconds, whatever they were spent on."""
        return (self.end - self.begin) * self.world + self.spare_total

    @property
    def spare_total(self) -> int:
        return sum((end - begin) * count for begin, end, count in self.spares)


def runs_of(chain: Chain, lines: Sequence[Mapping[str, Any]] = (), until: int = 0) -> list[Run]:
    """The whole account of time, run by run."""
    steps = steps_of(chain, lines)
    parts = list(_by_run(chain))
    ends = [_moments(part)[0] for part in parts[1:]]
    ends.append(max([until, *(step.at for step in steps)]))
    runs = [_overlaid(_base_run(chain, *each), each[0]) for each in zip(parts, ends, strict=True)]
    return _refined(runs, steps, _down(chain))


def nanoseconds(seconds: float) -> int:
    return round(float(seconds) * _SECOND)


# ---------------------------------------------------------------- from the chain


Entry = Mapping[str, Any]


def _by_run(chain: Chain) -> Iterator[list[Entry]]:
    """The entries of each run: a submission begins one."""
    entries: list[Entry] = []
    for body in chain.bodies:
        if body["entry"]["event"]["kind"] == "Submitted" and entries:
            yield entries
            entries = []
        entries.append(body)
    if entries:
        yield entries


def _base_run(chain: Chain, entries: Sequence[Entry], until: int) -> Run:
    """What the chain alone says. Time never goes back, whatever an entry claims."""
    moments = _moments(entries)
    segments: list[Segment] = []
    spares: list[tuple[int, int, int]] = []
    world, over = 0, False
    facts: dict[str, Any] = {}
    last = max(until, moments[-1])
    for body, at, end in zip(entries, moments, [*moments[1:], last], strict=True):
        facts = chain.facts(body) or facts
        world = max(world, int(facts.get("world", 0)))
        over = facts.get("state") in OVER
        if over:
            break
        if end > at:
            incident, planned = str(facts.get("incident", "")), facts.get("kind") == "planned"
            segments.append(Segment(at, end, spent_on(facts), incident, planned))
            if facts.get("spares"):
                spares.append((at, end, int(facts["spares"])))
    end = segments[-1].end if segments else moments[0]
    return Run(moments[0], end, max(1, world), tuple(segments), tuple(spares), over)


def _moments(entries: Iterable[Entry]) -> list[int]:
    moments: list[int] = []
    for body in entries:
        at = nanoseconds(body["entry"]["now"])
        moments.append(max(at, moments[-1]) if moments else at)
    return moments


def spent_on(facts: Mapping[str, Any]) -> Spent:
    """What a job that stands like this spends its time on."""
    state, phase = str(facts.get("state", "waiting")), str(facts.get("phase", ""))
    if facts.get("kind") == "start":
        return Spent.STARTUP
    if phase == "resume" and facts.get("cold"):
        return Spent.FALLBACK
    if state in ("waiting", "parked"):
        return _STATES[state]
    return _PHASES.get(phase) or _STATES.get(state, Spent.USEFUL)


def _overlaid(run: Run, entries: Sequence[Entry]) -> Run:
    """What entries say of the time before them: transfers, and nobody there to decide."""
    segments = list(_merged(run.segments))
    moments = _moments(entries)
    for one, two in pairwise(zip(entries, moments, strict=True)):
        body, at = two
        event = body["entry"]["event"]
        told = event.get("body") or {}
        reports = [r for r in told.get("reports", [told]) if r.get("phase") == "verify"]
        if seats := [seat for report in reports for seat in report["seats"]]:
            moved = max(float(seat.get("moved_seconds", 0)) for seat in seats)
            over = frozenset({Spent.REFORM})
            _paint(segments, at - nanoseconds(moved), at, Spent.TRANSFER, over)
        away = told.get("down_seconds", told.get("seconds"))
        if event["kind"] in _OUTAGES and away is not None:
            over = NEEDS_DECISIONS | {Spent.HELD, Spent.FALLBACK}
            _paint(segments, at - nanoseconds(away), at, Spent.CONTROL_PLANE_DOWN, over)
        elif body["term"] > one[0]["term"]:
            # How long nobody led is not told: at most since the entry before.
            _paint(segments, one[1], at, Spent.CONTROL_PLANE_DOWN, NEEDS_DECISIONS)
    return replace(run, segments=tuple(segments))


def _paint(
    segments: list[Segment],
    begin: int,
    end: int,
    spent: Spent,
    over: frozenset[Spent],
    incident: str | None = None,
) -> list[Segment]:
    """The line, changed in place: [begin, end) is of another class, where it was one of `over`.

    Incident None: it stays whose it was.
    """
    if begin >= end:
        return segments
    low = bisect_right(segments, begin, key=lambda each: each.end)
    high = bisect_left(segments, end, lo=low, key=lambda each: each.begin)
    found: list[Segment] = []
    for each in segments[low:high]:
        first, last = max(begin, each.begin), min(end, each.end)
        if each.spent not in over:
            found.append(each)
            continue
        whose = each.incident if incident is None else incident
        parts = (
            replace(each, end=first),
            replace(each, begin=first, end=last, spent=spent, incident=whose),
            replace(each, begin=last),
        )
        found += [part for part in parts if part.end > part.begin]
    segments[low:high] = found
    return segments


# ---------------------------------------------------------------- from the step log


def steps_of(chain: Chain, lines: Sequence[Mapping[str, Any]]) -> list[Step]:
    """The dated lines, in order, shifted where the two clocks contradict each other."""
    shift = clock_shift(chain, lines)
    found: list[Step] = []
    highest, at = -1, 0
    for line in lines:
        if "step" not in line or not line.get("at"):
            continue
        at = max(at, nanoseconds(line["at"]) + shift)
        busy = {str(name): nanoseconds(value) for name, value in line.get("busy", {}).items()}
        save = sum(value for name, value in busy.items() if _is_save(name))
        number = int(line["step"])
        again, highest = number <= highest, max(highest, number)
        rest = sum(busy.values()) - save
        step = Step(number, int(line["generation"]), at, rest, save, again, line.get("work", {}))
        found.append(step)
    return found


def _is_save(name: str) -> bool:
    return name.startswith(("save", "checkpoint"))


def clock_shift(chain: Chain, lines: Sequence[Mapping[str, Any]]) -> int:
    """Nanoseconds to add to the step log's dates; 0 where nothing speaks against them.

    A generation's first step is made after all were told to resume, and before that is known to
    have worked: the two moments are not much more than a step apart.
    """
    first: dict[int, int] = {}
    for line in lines:
        if line.get("at") and "generation" in line:
            first.setdefault(int(line["generation"]), nanoseconds(line["at"]))
    low: dict[int, int] = {}
    high: dict[int, int] = {}
    for body in chain.bodies:
        facts, now = chain.facts(body), nanoseconds(body["entry"]["now"])
        closed, generation = facts.get("closed") or {}, facts.get("generation")
        if generation in first and facts.get("phase") == "resume":
            low.setdefault(generation, now - first[generation])
        if closed.get("outcome") in ("resumed", "moved") and closed.get("generation") in first:
            high[closed["generation"]] = now - first[closed["generation"]]
    least, most = max(low.values(), default=0), min(high.values(), default=0)
    return least if least > 0 else min(0, most)


def median_step(steps: Sequence[Step]) -> int:
    """Of the steps' own lengths; 0 where there are none."""
    lengths = [two.at - one.at - two.busy - two.save for one, two in pairwise(steps)]
    return int(statistics.median(lengths)) if lengths else 0


def _refined(runs: Sequence[Run], steps: Sequence[Step], down: Mapping[str, int]) -> list[Run]:
    """With what the step log knows. Without one, training is taken for useful."""
    if not steps:
        return list(runs)
    median = median_step(steps)
    begins = [run.begin for run in runs[1:]]
    found, left = [], list(steps)
    for run, border in zip(runs, [*begins, None], strict=True):
        mine = [step for step in left if border is None or step.at < border]
        left = left[len(mine) :]
        segments = list(_merged(_windows(run, mine, median)))
        found.append(replace(run, segments=tuple(_undetected(segments, down))))
    return found


def _undetected(segments: list[Segment], down: Mapping[str, int]) -> list[Segment]:
    """A fault that came while nobody could decide: that part of its detection is the outage's."""
    for incident, length in down.items():
        mine = [s for s in segments if s.incident == incident]
        booked = (s.nanoseconds for s in mine if s.spent is Spent.CONTROL_PLANE_DOWN)
        end = max((s.end for s in mine if s.spent is Spent.DETECTION), default=0)
        begin = end - (length - sum(booked))
        _paint(segments, begin, end, Spent.CONTROL_PLANE_DOWN, frozenset({Spent.DETECTION}))
    return segments


def _down(chain: Chain) -> dict[str, int]:
    """By incident: how long nobody could decide about it, as the orchestrator booked it."""
    found = {}
    for body in chain.bodies:
        closed = chain.facts(body).get("closed") or {}
        seconds = (closed.get("seconds") or {}).get(Spent.CONTROL_PLANE_DOWN.value, 0.0)
        if seconds > 0:
            found[str(closed["id"])] = nanoseconds(seconds)
    return found


def _windows(run: Run, steps: Sequence[Step], median: int) -> Iterator[Segment]:
    """From each committed step to the next; each looks at the few segments that it spans."""
    at, begin, first = 0, run.begin, True
    for step in [*steps, None]:
        end = run.end if step is None else min(max(step.at, begin), run.end)
        inside: list[Segment] = []
        while at < len(run.segments) and run.segments[at].begin < end:
            inside += _clipped([run.segments[at]], begin, end)
            if run.segments[at].end > end:
                break
            at += 1
        yield from _window(inside, step, median, first=first)
        begin, first = end, False


def _window(
    inside: list[Segment], step: Step | None, median: int, *, first: bool
) -> Iterable[Segment]:
    """One step's stretch: its own time is at its end, and before it whatever held it up."""
    if not inside:
        return inside
    if not first:
        inside = _trained_already(inside)
    begin, end = inside[0].begin, inside[-1].end
    useful = Spent.RECOMPUTE if step and step.again else Spent.USEFUL
    border = end
    if step is not None:
        border = end - min(median or end - begin, end - begin)
    before, own = _clipped(inside, begin, border), _clipped(inside, border, end)
    own = [s if s.spent in UNPAID else Segment(s.begin, s.end, useful) for s in own]
    # Where everybody trains no rank-second belongs to an incident, whatever is being prepared.
    before = [Segment(s.begin, s.end, s.spent) if s.spent in _TRAINING else s for s in before]
    declared = 0
    if step is not None:
        till = border
        for spent, length in ((Spent.SAVE, step.save), (Spent.BUSY, step.busy)):
            before = _paint(before, till - length, till, spent, _TRAINING)
            till -= length
        declared = border - till
    pause = next((s for s in before if s.spent in PAUSED and s.incident), None)
    if pause is not None:
        before = _around(before, pause, median)
    elif first:
        before = _paint(before, begin, end, Spent.STARTUP, _TRAINING)
    elif step is None:
        before = _paint(before, begin, end, Spent.ENDING, _TRAINING)
    elif end - begin - declared > GAP_MEDIANS * median:
        before = _paint(before, begin, end, Spent.STALLED, _TRAINING)
    else:
        before = _paint(before, begin, end, useful, _TRAINING)
    return [*before, *own]


def _trained_already(inside: list[Segment]) -> list[Segment]:
    """A step was made where this stretch begins: what has not stopped since then trains.

    The orchestrator learns of a generation's first step a little later than it is made, and in a
    planned move ranks train on to the boundary that was agreed upon.
    """
    if inside[0].spent is Spent.RESUME:
        return [replace(inside[0], spent=Spent.USEFUL), *inside[1:]]
    if all(s.spent is Spent.USEFUL or (s.planned and s.spent is Spent.QUIESCE) for s in inside):
        return [replace(s, spent=Spent.USEFUL) for s in inside]
    return inside


def _around(before: list[Segment], pause: Segment, median: int) -> list[Segment]:
    """Training that led to a pause, and what is left of it after the pause."""
    begin, opened, whose = before[0].begin, pause.begin, pause.incident
    if pause.planned:
        # Nothing had failed: they stand at the boundary that all agreed upon.
        before = _paint(before, begin, opened, Spent.QUIESCE, _TRAINING, whose)
    else:
        broken = min(begin + median, opened)
        before = _paint(before, begin, broken, Spent.RETRIED, _TRAINING, whose)
        before = _paint(before, broken, opened, Spent.DETECTION, _TRAINING, whose)
    return _paint(before, opened, before[-1].end, Spent.RESUME, _TRAINING, whose)


def _clipped(segments: Iterable[Segment], begin: int, end: int) -> list[Segment]:
    cut = (replace(s, begin=max(s.begin, begin), end=min(s.end, end)) for s in segments)
    return [piece for piece in cut if piece.end > piece.begin]


def _merged(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Neighbours that say the same become one."""
    last: Segment | None = None
    for each in segments:
        if last is not None and replace(each, begin=last.begin) == replace(last, end=each.end):
            last = replace(last, end=each.end)
            continue
        if last is not None:
            yield last
        last = each
    if last is not None:
        yield last
