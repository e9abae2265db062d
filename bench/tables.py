"""From raw results to figures and tables. Pure: everything comes out of the files that were kept.

A *group* is all repetitions of one arm under one scenario with one workload. Its figures are
medians with the smallest and the largest value beside them: with three to five repetitions nothing
finer would be honest. Ratios are taken against the bare run of the same repetition, or, if the
machine was another by then, against the one of the same case in which it was most alike.

A run is *quiet* if little of the machine went to others, in its bare run too, and the same work
cost the same in both. Only quiet runs tell times. What a system did to steps, samples and weights
is told of all runs: noise excuses no wrong bit.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench import figures, notes
from bench.plan import BATCH

MEASURE = 2
"""Raised when a figure means something else than before. 2: who is away does not hold up the end of
a step, neighbouring pauses are told apart, starts are kept."""
OTHERS_MAX, OTHERS_OFF_MAX = 0.10, 0.05
"""Above the first a run is called disturbed; so is one in which others took that much more than in
its bare run, or less."""
PACE_OFF_MAX = 0.05
"""So is one in which the same work cost more, or less, than in its bare run; or nobody knows."""
SAMPLES = ", batch "
"""Behind the workload's name where it is not the usual one: nor are those mixed."""
SHORT = ", short runs"
"""Behind the workload's name: what a try-out says is never mixed with measurements."""
UNQUIET = "disturbed"


class Times(enum.Enum):
    """Of which runs times are told."""

    ALL = enum.auto()
    QUIET = enum.auto()
    NOISY = enum.auto()


Run = Mapping[str, Any]
Pair = tuple[Run, Run | None]
"""A run, and the bare one that it is measured by."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and its range."""

    middle: float
    low: float
    high: float
    many: int

    def text(self, digits: int = 2, unit: str = "") -> str:
        if self.many == 1 or self.low == self.high:
            return f"{self.middle:.{digits}f}{unit}"
        low, high = f"{self.low:.{digits}f}", f"{self.high:.{digits}f}"
        return f"{self.middle:.{digits}f}{unit} [{low}, {high}]"


@dataclass(frozen=True, slots=True)
class Group:
    """One row of a table."""

    scenario: str
    workload: str
    arm: str
    runs: int
    completed: int
    outcome: str
    """Of the first run that did not complete."""
    seconds: Spread | None
    to_bare: Spread | None
    """Completion time by that of the bare run without faults."""
    goodput: Spread | None
    """Samples in the model per second, by those of the bare run."""
    step_ratio: Spread | None
    recomputed: Spread | None
    lost: Spread | None
    """Of the runs that were completed: of the others it says nothing."""
    doubled: Spread | None
    foreign: Spread | None
    pauses: tuple[float, ...]
    loss: Spread | None
    same_as_bare: str
    """yes, no, or - where nothing can be said: a rank did not write its end."""
    memory_gib: Spread | None
    moved_gib: Spread | None
    start_seconds: Spread | None
    """Of the runs that were completed: one that failed may have failed at its start."""
    strikes: Spread | None
    """Per run: those that hit somebody."""
    again_share: Spread | None
    """Finished steps that were computed again, by all steps of the run."""
    lost_share: Spread | None
    """Samples of the run that are not in the model."""
    quiet: int
    """How many of the runs were."""
    others: Spread | None
    """The share of the machine that went to others meanwhile."""
    slower: Spread | None
    """What the same work cost meanwhile, by what it cost in the bare run; None: not known."""
    notes: tuple[str, ...] = ()
    """What else has to be said about these runs."""
    refused: str = ""
    noisy: bool = False
    """A row of times only, those of its disturbed runs."""

    @property
    def label(self) -> str:
        return f"{self.arm} ({UNQUIET})" if self.noisy else self.arm

    @property
    def noise(self) -> tuple[str, ...]:
        """Why it has fewer times than runs, or none."""
        many = self.runs - self.quiet
        return (f"{many} of {self.runs} runs {UNQUIET}",) if many else ()

    @property
    def pause_text(self) -> str:
        if not self.pauses:
            return "-"
        p50, p95 = (figures.percentile(self.pauses, p) for p in (50, 95))
        return f"{p50:.2f} / {p95:.2f} / {max(self.pauses):.2f}"


def spread(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(figures.median(known), min(known), max(known), len(known))


def groups(results: Sequence[Mapping[str, Any]], times: Times = Times.ALL) -> list[Group]:
    """Of one or several raw results; arms in the order in which they were first run.

    `times`: of which runs; of nobody if there were none such.
    """
    rows: dict[tuple[str, str, str], list[Pair]] = {}
    refused: dict[tuple[str, str, str], str] = {}
    cases: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for result in results:
        for case in result["cases"]:
            workload = workload_name(result, case)
            for run, bare in pairs_of(case):
                key = (case["scenario"], workload, run["arm"])
                rows.setdefault(key, []).append((run, bare))
            for arm in dict.fromkeys(run["arm"] for run in notes.begun(case)):
                key = (case["scenario"], workload, arm)
                rows.setdefault(key, [])
                cases.setdefault(key, []).append(case)
            for arm, why in case["refused"].items():
                refused[case["scenario"], workload, arm] = why
    found = [_group(key, pairs, times, cases[key]) for key, pairs in rows.items()]
    found += [
        replace(_group(key, (), times, ()), refused=why)
        for key, why in refused.items()
        if key not in rows
    ]
    order = {
        key: at for at, key in enumerate(dict.fromkeys((g.scenario, g.workload) for g in found))
    }
    return sorted(found, key=lambda g: order[g.scenario, g.workload])


def pairs_of(case: Mapping[str, Any]) -> Iterator[Pair]:
    """Each run with the bare one that it is measured by."""
    bares = [
        run for runs in case["repetitions"] for run in runs if run["arm"] == "bare" and is_done(run)
    ]
    for runs in case["repetitions"]:
        own = next((run for run in runs if run["arm"] == "bare"), None)
        for run in runs:
            if run["arm"] == "bare" or is_quiet((run, own)):
                yield run, own
                continue
            alike = [bare for bare in bares if is_quiet((run, bare))]
            yield run, min(alike, key=lambda bare, run=run: _apart(run, bare), default=own)


def _apart(run: Run, bare: Run) -> float:
    ratio = slower(run, bare)
    return math.inf if ratio is None else abs(math.log(ratio))


def is_quiet(pair: Pair) -> bool:
    """What others took and how fast the machine was decides it, never how the run came out."""
    run, bare = pair
    if bare is None or not (took_little(run) and took_little(bare)):
        return False
    if abs(run["others_share"] - bare["others_share"]) > OTHERS_OFF_MAX:
        return False
    ratio = slower(run, bare)
    return ratio is not None and 1 / (1 + PACE_OFF_MAX) <= ratio <= 1 + PACE_OFF_MAX


def is_done(run: Run | None) -> bool:
    return run is not None and run["outcome"] == "completed"


def took_little(run: Run) -> bool:
    share = run.get("others_share")
    return share is not None and share <= OTHERS_MAX


def slower(run: Run, bare: Run | None) -> float | None:
    """By how much the machine was slower than for the bare run."""
    mine, its = run.get("pace_seconds"), (bare or {}).get("pace_seconds")
    return mine / its if mine and its else None


def workload_name(result: Mapping[str, Any], case: Mapping[str, Any]) -> str:
    plan = case["plan"]
    name = f"{plan['parallel']} {plan['size']} x{plan['world']}"
    if (batch := plan.get("batch", BATCH)) != BATCH:
        name += f"{SAMPLES}{batch}"
    return name + (SHORT if result["short"] else "")


def spoken(workload: str) -> str:
    name, short, _ = workload.partition(SHORT)
    name, apart, batch = name.partition(SAMPLES)
    return f"{name} ranks{apart}{batch}{short}"


def apart(results: Sequence[Mapping[str, Any]]) -> list[Group]:
    """For reading: times of quiet runs, and behind an arm's row those of its disturbed ones."""
    found = []
    for calm, noisy in zip(groups(results, Times.QUIET), groups(results, Times.NOISY), strict=True):
        found.append(calm)
        if noisy.seconds is not None:
            found.append(replace(noisy, noisy=True))
    return found


def _group(
    key: tuple[str, str, str],
    pairs: Sequence[Pair],
    times: Times,
    cases: Sequence[Mapping[str, Any]],
) -> Group:
    runs = [run for run, _ in pairs]
    bad = [run["outcome"] for run in runs if run["outcome"] != "completed"]
    quiet = [pair for pair in pairs if is_quiet(pair)]
    noisy = [pair for pair in pairs if not is_quiet(pair)]
    asked = {Times.ALL: pairs, Times.QUIET: quiet, Times.NOISY: noisy}[times]
    # One that counts for nothing may have times: who was struck less is sooner through.
    timed = [pair for pair in asked if all(map(is_done, pair))]
    done = [run["truth"] for run in runs if run["outcome"] == "completed"]
    truths = [run["truth"] for run in runs]
    same = {
        _same(run["truth"]["digests"], bare["truth"]["digests"])
        for run, bare in pairs
        if bare is not None and run["outcome"] == "completed"
    }
    return Group(
        *key,
        len(runs),
        len(runs) - len(bad),
        bad[0] if bad else "",
        spread(run["truth"]["seconds"] for run, _ in timed),
        spread(_to_bare(*pair) for pair in timed),
        spread(_goodput(*pair) for pair in timed),
        spread(_step_ratio(*pair) for pair in timed),
        spread(t["recomputed"] for t in truths),
        spread(t["lost"] for t in done),
        spread(t["doubled"] for t in truths),
        spread(t["foreign"] for t in truths),
        tuple(p for run, _ in timed for p in run["truth"]["pauses"]),
        spread(t["loss"] for t in truths),
        next((word for word in ("no", "-", "yes") if word in same), "-"),
        spread(run["memory_bytes_max"] / 2**30 for run in runs),
        spread(run["moved_bytes"] / 2**30 for run in runs),
        spread(run["start_seconds"] for run in runs if is_done(run)),
        spread(sum(1 for s in run["strikes"] if s["pid"]) for run in runs),
        spread(t["recomputed"] / t["steps"] for t in done),
        spread(t["lost"] / t["samples"] for t in done),
        len(quiet),
        spread(run.get("others_share") for run in runs),
        spread(slower(run, bare) for run, bare in pairs),
        tuple(notes.of(key[2], runs, cases)),
    )


def _to_bare(run: Run, bare: Run | None) -> float | None:
    mine, its = run["truth"]["seconds"], bare and bare["truth"]["seconds"]
    return mine / its if mine and its else None


def _goodput(run: Run, bare: Run | None) -> float | None:
    ratio = _to_bare(run, bare)
    found = run["truth"]
    return (1 - found["lost"] / found["samples"]) / ratio if ratio else None


def _step_ratio(run: Run, bare: Run | None) -> float | None:
    mine, its = run["truth"]["step_seconds"], bare and bare["truth"]["step_seconds"]
    return mine / its if mine and its else None


def _same(mine: Mapping[str, str], its: Mapping[str, str]) -> str:
    """Rank by rank, because a digest is of what that rank holds. Of a rank without an end nothing
    is known."""
    if any(mine[rank] != its[rank] for rank in mine.keys() & its.keys()):
        return "no"
    return "yes" if mine and mine.keys() == its.keys() else "-"


# ---------------------------------------------------------------- text

COLUMNS = (
    ("arm", "arm"),
    ("done", "done"),
    ("seconds", "seconds"),
    ("to_bare", "x bare"),
    ("goodput", "samples/s x bare"),
    ("strikes", "strikes"),
    ("pause", "pause p50/p95/max s"),
    ("recomputed", "recomp."),
    ("lost", "lost"),
    ("doubled", "doubled"),
    ("step", "step x bare"),
    ("same", "= bare"),
    ("loss", "loss"),
    ("memory", "GiB"),
    ("moved", "GiB moved"),
    ("start", "start s"),
    ("others", "others"),
    ("slower", "slower"),
)

NOISY_COLUMNS = ("arm", "seconds", "to_bare", "goodput", "pause", "step")


def cells(group: Group) -> dict[str, str]:
    def told(value: Spread | None, digits: int = 2) -> str:
        return "-" if value is None else value.text(digits)

    row = {
        "arm": group.label,
        "done": f"{group.completed}/{group.runs}",
        "seconds": told(group.seconds, 1),
        "to_bare": told(group.to_bare, 3),
        "goodput": told(group.goodput, 3),
        "pause": group.pause_text,
        "strikes": told(group.strikes, 0),
        "again_share": _percent(group.again_share),
        "lost_share": _percent(group.lost_share),
        "recomputed": told(group.recomputed, 0),
        "lost": told(group.lost, 0)
        + (f" +{group.foreign.text(0)}?" if group.foreign and group.foreign.high else ""),
        "doubled": told(group.doubled, 0),
        "step": told(group.step_ratio, 3),
        "same": group.same_as_bare,
        "loss": told(group.loss, 3),
        "memory": told(group.memory_gib),
        "moved": told(group.moved_gib),
        "start": told(group.start_seconds, 1),
        "others": told(group.others),
        "slower": told(group.slower),
    }
    if group.noisy:
        # What is told of all runs stands in the arm's own row.
        row = {name: text if name in NOISY_COLUMNS else "" for name, text in row.items()}
    return row


def _percent(share: Spread | None) -> str:
    """Nothing at all is told as such, and never the rounding of a little."""
    if share is None:
        return "-"
    if not share.high:
        return "0"
    return replace(
        share, middle=100 * share.middle, low=100 * share.low, high=100 * share.high
    ).text(2, " %")


def terminal(found: Sequence[Group]) -> str:
    """One table per scenario and workload."""
    parts = []
    for key in dict.fromkeys((g.scenario, g.workload) for g in found):
        mine = [g for g in found if (g.scenario, g.workload) == key]
        rows = [dict(COLUMNS), *(cells(g) for g in mine if not g.refused)]
        width = {name: max(len(row[name]) for row in rows) for name, _ in COLUMNS}
        lines = [f"{key[0]}, {key[1]}"]
        lines += ["  ".join(row[name].ljust(width[name]) for name, _ in COLUMNS) for row in rows]
        lines += told_beside(mine)
        parts.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(parts)


def told_beside(mine: Sequence[Group]) -> list[str]:
    """What has to be said under a table."""
    own = [g for g in mine if not g.noisy]
    lines = [f"{g.arm}: not run: {g.refused}" for g in own if g.refused]
    lines += [f"{g.arm}: failed: {g.outcome}" for g in own if g.outcome]
    return lines + [f"{g.arm}: {note}" for g in own for note in (*g.notes, *g.noise)]
