"""The account of one job: what `keepstep report`, the live page and programs show. Pure.

Made of a checked chain (verify.py), the job's own step log, and the terms of its guarantee. Frozen
data with a plain form: numbers are seconds and shares, except for rank-nanoseconds, which are
integers so that the classes sum to the total exactly.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from keepstep.ledger import cost, goodput, verify
from keepstep.ledger.goodput import UNPAID, Run, Segment, Spent, Step

BUCKETS = 60
"""Points of goodput over time."""
_SECOND = 1_000_000_000
Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds (or steps) of several incidents; percentiles by nearest rank."""

    count: int
    p50: float = 0.0
    p95: float = 0.0
    mean: float = 0.0
    max: float = 0.0


@dataclass(frozen=True, slots=True)
class IncidentAccount:
    """One incident: what it was, how long training stood still and on what, what it cost."""

    incident: str
    opened_at: float
    closed_at: float | None
    outcome: str
    what: str
    standing: str
    """As the guarantee sees it: verify.Judged says which there are."""
    why: str
    generation: int
    boundary: int
    recoveries: int
    parts: Mapping[str, float]
    """Seconds of the pause by class, in the order in which they came first."""
    rto_seconds: float
    """From the last useful work before it to the next: detection and the broken attempt too."""
    rpo_steps: int
    """Committed steps that had to be made again."""
    rpo_seconds: float


@dataclass(frozen=True, slots=True)
class Work:
    """What the job reported of its steps."""

    tokens: float
    flops: float
    tokens_per_second_per_device: float
    """Over all time that was paid, pauses included."""
    flops_per_second_per_device: float
    mfu: float
    """Of a device's peak, which only its owner knows; 0: not told."""


@dataclass(frozen=True, slots=True)
class Account:
    """The whole."""

    job: str
    world: int
    began_at: float
    ended_at: float
    over: bool
    runs: int
    steps: int
    step_seconds: float
    """The median; 0 without a step log."""
    total: int
    """Rank-nanoseconds of all runs, spares included."""
    classes: Mapping[str, int]
    """Rank-nanoseconds by class, in the order of `Spent`; they sum to the total."""
    goodput: float
    """Useful over paid rank-seconds: of the job's own ranks, while they had devices."""
    goodput_with_spares: float
    """The same, with spares that stood idle among what was paid."""
    ettr: float
    """Useful over all time from the first start, of the job's own ranks."""
    mttf_seconds: float | None
    """Paid time between two unplanned incidents; None without any."""
    rto: Spread
    rpo: Spread
    """In steps."""
    incidents: tuple[IncidentAccount, ...]
    guarantee: verify.Guarantee
    terms: verify.Terms
    work: Work | None
    timeline: tuple[Segment, ...]
    over_time: tuple[tuple[float, float], ...]
    """The end of each bucket, and the goodput in it."""
    clock_shift_seconds: float
    notes: tuple[str, ...]
    """What the account had to do without."""

    def to_plain(self) -> dict[str, Any]:
        """For programs: JSON as it is, without the timeline's many segments."""
        plain = asdict(self)
        del plain["timeline"]
        plain["seconds"] = {name: value / _SECOND for name, value in self.classes.items()}
        return plain


def account(
    chain: verify.Chain,
    lines: Lines = (),
    terms: verify.Terms | None = None,
    *,
    now: float = 0.0,
    peak_flops: float = 0.0,
) -> Account:
    """Reckon it. `now` is where the account of a job that still runs ends."""
    terms = terms or verify.Terms()
    runs = goodput.runs_of(chain, lines, goodput.nanoseconds(now))
    steps = goodput.steps_of(chain, lines)
    classes = _classes(runs)
    total = sum(run.total for run in runs)
    assert sum(classes.values()) == total, "every rank-second is in one class"
    own = sum((run.end - run.begin) * run.world for run in runs)
    useful = classes.get(Spent.USEFUL, 0)
    median = goodput.median_step(steps)
    promise = verify.guarantee(chain, lines, terms)
    incidents = _incidents(chain, runs, steps, promise, lines)
    counted = [each for each in incidents if each.standing not in ("planned", "excluded")]
    seated = own - sum(classes.get(kind, 0) for kind in UNPAID)
    world = max(run.world for run in runs)
    return Account(
        job=chain.job,
        world=world,
        began_at=runs[0].begin / _SECOND,
        ended_at=runs[-1].end / _SECOND,
        over=runs[-1].over,
        runs=len(runs),
        steps=len({step.number for step in steps}) or _known_steps(chain),
        step_seconds=median / _SECOND,
        total=total,
        classes={kind.value: classes[kind] for kind in Spent if kind in classes},
        goodput=_share(useful, seated),
        goodput_with_spares=_share(useful, seated + classes.get(Spent.IDLE_SPARE, 0)),
        ettr=_share(useful, own - classes.get(Spent.WAITING, 0)),
        mttf_seconds=seated / world / _SECOND / len(counted) if counted else None,
        rto=spread([each.rto_seconds for each in counted if each.closed_at is not None]),
        rpo=spread([float(each.rpo_steps) for each in counted if each.closed_at is not None]),
        incidents=incidents,
        guarantee=promise,
        terms=terms,
        work=_work(steps, seated, peak_flops),
        timeline=tuple(segment for run in runs for segment in run.segments),
        over_time=tuple(_over_time(runs)),
        clock_shift_seconds=goodput.clock_shift(chain, lines) / _SECOND,
        notes=tuple(_notes(chain, lines, steps)),
    )


@dataclass(frozen=True, slots=True)
class Saved:
    """The same faults under checkpoint and restart, with the owner's own times."""

    faults: int
    restart_seconds: float
    """Of the whole job, for all of them."""
    keepstep_seconds: float
    device_hours: float
    """Kept."""
    money: float
    formula: str


def against_restart(found: Account, setting: cost.Setting) -> Saved:
    """What the incidents that count cost, against what they would have cost."""
    faults = [each for each in found.incidents if each.standing not in ("planned", "excluded")]
    each = cost.lost_by_restart(setting)
    restart, ours = len(faults) * each, sum(f.rto_seconds + f.rpo_seconds for f in faults)
    hours = (restart - ours) * found.world / cost.HOUR
    formula = (
        f"{len(faults)} faults x (half of {setting.interval:g} s + {setting.replacement:g} s + "
        f"{setting.restore:g} s + {setting.startup:g} s) - {ours:.1f} s, on {found.world} devices"
    )
    return Saved(len(faults), restart, ours, hours, hours * setting.price, formula)


def spread(values: Sequence[float]) -> Spread:
    if not values:
        return Spread(0)
    ordered = sorted(values)

    def rank(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return Spread(len(ordered), rank(0.5), rank(0.95), statistics.fmean(ordered), ordered[-1])


# ---------------------------------------------------------------- parts


def _share(part: int, whole: int) -> float:
    return part / whole if whole > 0 else 0.0


def _classes(runs: Sequence[Run]) -> dict[Spent, int]:
    found: dict[Spent, int] = {}
    for run in runs:
        for each in run.segments:
            found[each.spent] = found.get(each.spent, 0) + each.nanoseconds * run.world
        if run.spare_total:
            found[Spent.IDLE_SPARE] = found.get(Spent.IDLE_SPARE, 0) + run.spare_total
    return found


def _known_steps(chain: verify.Chain) -> int:
    """Without a step log: the newest boundary that the chain speaks of."""
    return max((int(chain.facts(body).get("step", -1)) for body in chain.bodies), default=-1) + 1


def _incidents(
    chain: verify.Chain,
    runs: Sequence[Run],
    steps: Sequence[Step],
    promise: verify.Guarantee,
    lines: Lines,
) -> tuple[IncidentAccount, ...]:
    closed = {}
    for body in chain.bodies:
        told = chain.facts(body).get("closed")
        if told:
            closed[str(told["id"])] = told
    parts: dict[str, dict[str, float]] = {}
    for segment in (segment for run in runs for segment in run.segments):
        if segment.incident and segment.spent not in (Spent.USEFUL, Spent.RECOMPUTE):
            mine = parts.setdefault(segment.incident, {})
            seconds = segment.nanoseconds / _SECOND
            mine[segment.spent.value] = mine.get(segment.spent.value, 0.0) + seconds
    median = goodput.median_step(steps) / _SECOND
    gaps = {f"gap-{b.number}": (b.at - a.at) / _SECOND - median for a, b in pairwise(steps)}
    lost = _lost_steps(closed, lines)
    found = []
    for judged in promise.incidents:
        told = closed.get(judged.incident, {})
        mine = parts.get(judged.incident, {})
        if judged.incident in gaps:
            mine = {Spent.STALLED.value: gaps[judged.incident]}
        again = lost.get(judged.incident, 0)
        found.append(
            IncidentAccount(
                incident=judged.incident,
                opened_at=judged.at,
                closed_at=float(told["closed_at"]) if told else _closed_gap(judged, gaps),
                outcome=str(told.get("outcome", "open" if judged.standing == "open" else "gap")),
                what=_what(told, judged),
                standing=judged.standing,
                why=judged.why,
                generation=int(told.get("generation", 0)),
                boundary=int(told.get("boundary", -1)),
                recoveries=int(told.get("recoveries", 0)),
                parts=mine,
                rto_seconds=sum(mine.values()),
                rpo_steps=again,
                rpo_seconds=again * median,
            )
        )
    return tuple(sorted(found, key=lambda each: each.opened_at))


def _closed_gap(judged: verify.Judged, gaps: Mapping[str, float]) -> float | None:
    length = gaps.get(judged.incident)
    return None if length is None else judged.at + length


def _lost_steps(closed: Mapping[str, Mapping[str, Any]], lines: Lines) -> dict[str, int]:
    """How many committed steps each fallback gave up: the step log says where it went back to."""
    found: dict[str, int] = {}
    highest, back = -1, -1
    for line in lines:
        if "fallback_to" in line:
            back = int(line["fallback_to"])
        elif back >= 0:
            for name, told in closed.items():
                if told["outcome"] == "fallback" and told["generation"] == line["generation"]:
                    found[name] = max(0, highest + 1 - back)
            back = -1
        highest = max(highest, int(line.get("step", -1)))
    return found


def _what(told: Mapping[str, Any], judged: verify.Judged) -> str:
    """In a few words: what was seen."""
    causes = told.get("causes", [])
    if not causes:
        return "a gap in the step stream" if judged.standing == "missed" else "planned"
    seen = [
        f"{cause['sign']} of rank {cause['rank']}" if cause["rank"] >= 0 else str(cause["sign"])
        for cause in causes
    ]
    unique = list(dict.fromkeys(seen))
    more = f" and {len(unique) - 2} more" if len(unique) > 2 else ""
    return ", ".join(unique[:2]) + more


def _work(steps: Sequence[Step], seated: int, peak_flops: float) -> Work | None:
    made = [step for step in steps if step.work and not step.again]
    if not made or seated <= 0:
        return None
    tokens = sum(float(step.work.get("tokens", 0)) for step in made)
    flops = sum(float(step.work.get("flops", 0)) for step in made)
    seconds = seated / _SECOND
    mfu = flops / seconds / peak_flops if peak_flops > 0 else 0.0
    return Work(tokens, flops, tokens / seconds, flops / seconds, mfu)


def _over_time(runs: Sequence[Run]) -> list[tuple[float, float]]:
    """Useful over paid, bucket by bucket; buckets in which nothing was paid are left out."""
    # The clock of a later run may have been set back.
    begin, end = min(run.begin for run in runs), max(run.end for run in runs)
    width = max(1, -(-(end - begin) // BUCKETS))
    useful, paid = [0] * BUCKETS, [0] * BUCKETS
    for run in runs:
        for each in run.segments:
            first, last = (each.begin - begin) // width, (each.end - 1 - begin) // width
            for bucket in range(first, last + 1):
                low = begin + bucket * width
                part = min(each.end, low + width) - max(each.begin, low)
                paid[bucket] += part * run.world if each.spent not in UNPAID else 0
                useful[bucket] += part * run.world if each.spent is Spent.USEFUL else 0
    return [
        ((begin + (at + 1) * width) / _SECOND, useful[at] / paid[at])
        for at in range(BUCKETS)
        if paid[at]
    ]


def _notes(chain: verify.Chain, lines: Lines, steps: Sequence[Step]) -> list[str]:
    found = []
    if not lines:
        found.append("no step log was given: detection and gaps are not known, training is useful")
    elif not steps:
        found.append("the step log has no times (an older Keepstep wrote it): as if there was none")
    if not chain.key:
        found.append("the chain is not signed")
    if not any(chain.facts(body) for body in chain.bodies):
        found.append("the chain is of an older Keepstep, which did not say where the job stood")
    shift = goodput.clock_shift(chain, lines) / _SECOND
    if shift:
        found.append(f"the step log's clock was moved by {shift:.3f} s to agree with the chain")
    return found
