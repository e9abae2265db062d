"""From raw results to figures and tables. Pure: everything comes out of the files that were kept.

A *group* is all repetitions of one arm under one scenario with one workload. Its figures are
medians with the smallest and the largest value beside them: with three to five repetitions nothing
finer would be honest. Ratios are taken within a repetition, against its own bare run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench import figures
from bench.plan import BATCH

OTHERS_MAX = 0.10
"""Above this a run is called disturbed. It is told, never left out."""
PACE_OFF_MAX = 0.10
"""So is one in which the same work cost more, or less, than in its bare run."""
SAMPLES = ", batch "
"""Behind the workload's name where it is not the usual one: nor are those mixed."""
SHORT = ", short runs"
"""Behind the workload's name: what a try-out says is never mixed with measurements."""
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


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
    strikes: int
    others: Spread | None
    """The share of the machine that went to others meanwhile."""
    slower: Spread | None
    """What the same work cost meanwhile, by what it cost in the bare run; None: not known."""
    notes: tuple[str, ...] = ()
    """What else has to be said about these runs."""
    refused: str = ""

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


def groups(results: Sequence[Mapping[str, Any]]) -> list[Group]:
    """Of one or several raw results; arms in the order in which they were first run."""
    rows: dict[tuple[str, str, str], list[tuple[Mapping[str, Any], Mapping[str, Any] | None]]] = {}
    refused: dict[tuple[str, str, str], str] = {}
    for result in results:
        for case in result["cases"]:
            workload = workload_name(result, case)
            for repetition in case["repetitions"]:
                bare = next((run for run in repetition if run["arm"] == "bare"), None)
                for run in repetition:
                    key = (case["scenario"], workload, run["arm"])
                    rows.setdefault(key, []).append((run, bare))
            for arm, why in case["refused"].items():
                refused[case["scenario"], workload, arm] = why
    found = [_group(*key, pairs) for key, pairs in rows.items()]
    found += [_refused(*key, why) for key, why in refused.items() if key not in rows]
    order = {
        key: at for at, key in enumerate(dict.fromkeys((g.scenario, g.workload) for g in found))
    }
    return sorted(found, key=lambda g: order[g.scenario, g.workload])


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


def _group(
    scenario: str,
    workload: str,
    arm: str,
    pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any] | None]],
) -> Group:
    runs = [run for run, _ in pairs]
    bad = [run["outcome"] for run in runs if run["outcome"] != "completed"]
    ratios, goods, steps, same = [], [], [], set()
    for run, bare in pairs:
        if bare is None or bare["truth"]["seconds"] is None:
            continue
        mine, its = run["truth"], bare["truth"]
        if mine["step_seconds"]:
            steps.append(mine["step_seconds"] / its["step_seconds"])
        if mine["seconds"] is None:
            continue
        ratios.append(mine["seconds"] / its["seconds"])
        goods.append((1 - mine["lost"] / mine["samples"]) * its["seconds"] / mine["seconds"])
        same.add(_same(mine["digests"], its["digests"]))
    truths = [run["truth"] for run in runs]
    return Group(
        scenario,
        workload,
        arm,
        len(runs),
        len(runs) - len(bad),
        bad[0] if bad else "",
        spread(t["seconds"] for t in truths),
        spread(ratios),
        spread(goods),
        spread(steps),
        spread(t["recomputed"] for t in truths),
        spread(t["lost"] for t in truths if t["seconds"] is not None),
        spread(t["doubled"] for t in truths),
        spread(t["foreign"] for t in truths),
        tuple(p for t in truths for p in t["pauses"]),
        spread(t["loss"] for t in truths),
        next((word for word in ("no", "-", "yes") if word in same), "-"),
        spread(run["memory_bytes_max"] / 2**30 for run in runs),
        spread(run["moved_bytes"] / 2**30 for run in runs),
        spread(run["start_seconds"] for run in runs),
        sum(1 for run in runs for s in run["strikes"] if s["pid"]),
        spread(run.get("others_share") for run in runs),
        spread(slower(run, bare) for run, bare in pairs),
        tuple(_notes(pairs)),
    )


def slower(run: Mapping[str, Any], bare: Mapping[str, Any] | None) -> float | None:
    """By how much the machine was slower than for the bare run of the same repetition."""
    mine, its = run.get("pace_seconds"), (bare or {}).get("pace_seconds")
    return mine / its if mine and its else None


def same_pace(run: Mapping[str, Any], bare: Mapping[str, Any] | None) -> bool:
    """As far as it is known: earlier results do not tell."""
    ratio = slower(run, bare)
    return ratio is None or _even(ratio)


def _even(ratio: float) -> bool:
    return 1 / (1 + PACE_OFF_MAX) <= ratio <= 1 + PACE_OFF_MAX


def _notes(
    pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any] | None]],
) -> Iterator[str]:
    runs = [run for run, _ in pairs]
    differ = sum(run["truth"]["disagreements"] for run in runs)
    if differ:
        yield f"ranks saw different gradients in {differ} steps"
    nobody = sum(1 for run in runs for strike in run["strikes"] if not strike["pid"])
    if nobody:
        yield f"{nobody} strikes found nobody"
    disturbed = sum(1 for run in runs if (run.get("others_share") or 0.0) > OTHERS_MAX)
    if disturbed:
        yield f"others took more than {OTHERS_MAX:.0%} of the machine in {disturbed} of its runs"
    uneven = sum(1 for run, bare in pairs if not same_pace(run, bare))
    if uneven:
        yield f"the machine was faster or slower than for the bare run in {uneven} of its runs"
    yield from (run["striker_failed"] for run in runs if run.get("striker_failed"))


def _refused(scenario: str, workload: str, arm: str, why: str) -> Group:
    return replace(_group(scenario, workload, arm, ()), refused=why)


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
    ("goodput", "goodput"),
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


def cells(group: Group) -> dict[str, str]:
    def told(value: Spread | None, digits: int = 2) -> str:
        return "-" if value is None else value.text(digits)

    return {
        "arm": group.arm,
        "done": f"{group.completed}/{group.runs}",
        "seconds": told(group.seconds, 1),
        "to_bare": told(group.to_bare, 3),
        "goodput": told(group.goodput, 3),
        "pause": group.pause_text,
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


def terminal(found: Sequence[Group]) -> str:
    """One table per scenario and workload."""
    parts = []
    for key in dict.fromkeys((g.scenario, g.workload) for g in found):
        mine = [g for g in found if (g.scenario, g.workload) == key]
        rows = [dict(COLUMNS), *(cells(g) for g in mine if not g.refused)]
        width = {name: max(len(row[name]) for row in rows) for name, _ in COLUMNS}
        lines = [f"{key[0]}, {key[1]}"]
        lines += ["  ".join(row[name].ljust(width[name]) for name, _ in COLUMNS) for row in rows]
        lines += [f"{g.arm}: not run: {g.refused}" for g in mine if g.refused]
        lines += [f"{g.arm}: failed: {g.outcome}" for g in mine if g.outcome]
        lines += [f"{g.arm}: {note}" for g in mine for note in g.notes]
        parts.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(parts)


README_COLUMNS = ("arm", "done", "to_bare", "goodput", "pause", "recomputed", "lost", "same")
README_HEADS = {
    "arm": "system",
    "done": "runs completed",
    "to_bare": "time, by the bare engine without faults",
    "goodput": "goodput",
    "pause": "pause p50 / p95 / max, s",
    "recomputed": "finished steps computed again",
    "lost": "samples lost",
    "same": "weights equal those of the bare engine",
}


def best_intervals(mine: Sequence[Group]) -> tuple[list[Group], str]:
    """Of an arm with several intervals (NAME@STEPS) the best one, and a word about the others.

    Which is the best depends on the workload and the faults: only a sweep finds it, and only the
    best is a fair opponent. One that was not completed is the worst.
    """

    def cost(group: Group) -> tuple[bool, float]:
        done = group.to_bare is not None and not group.outcome
        # A ratio of a disturbed run says nothing, and may look good.
        return not (done and is_quiet(group)), group.to_bare.middle if group.to_bare else math.inf

    families: dict[str, list[Group]] = {}
    for group in mine:
        families.setdefault(group.arm.partition("@")[0], []).append(group)
    best = {id(min(family, key=cost)) for family in families.values()}
    swept = [
        f"{name}: the best of every {', '.join(_intervals(family))} steps"
        for name, family in families.items()
        if sum(not group.refused for group in family) > 1
    ]
    return [g for g in mine if id(g) in best], "; ".join(swept)


def _intervals(family: Sequence[Group]) -> list[str]:
    return [str(n) for n in sorted(int(g.arm.partition("@")[2]) for g in family)]


TIMES = ("to_bare", "goodput", "pause")
UNQUIET = "disturbed"


def is_quiet(group: Group) -> bool:
    """Whether figures of time may be told: it is known what others took, and it was little."""
    if group.others is None or group.others.high > OTHERS_MAX:
        return False
    pace = group.slower
    return pace is None or (_even(pace.low) and _even(pace.high))


def quietest(
    results: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], int]:
    """Without the disturbed runs of arms that also had a quiet one, and how many those were."""

    def took_little(run: Mapping[str, Any]) -> bool:
        share = run.get("others_share")
        return share is not None and share <= OTHERS_MAX

    def is_bare(run: Mapping[str, Any]) -> bool:
        return str(run["arm"]) == "bare"

    def quiet(run: Mapping[str, Any], repetition: Sequence[Mapping[str, Any]]) -> bool:
        return took_little(run) and all(
            took_little(other) and same_pace(run, other) for other in repetition if is_bare(other)
        )

    def key(
        result: Mapping[str, Any], case: Mapping[str, Any], run: Mapping[str, Any]
    ) -> tuple[str, str, str]:
        return case["scenario"], workload_name(result, case), run["arm"]

    had = {
        key(result, case, run)
        for result in results
        for case in result["cases"]
        for repetition in case["repetitions"]
        for run in repetition
        if quiet(run, repetition)
    }
    kept_results, left_out = [], 0
    for result in results:
        cases = []
        for case in result["cases"]:
            repetitions = []
            for runs in case["repetitions"]:
                told = [r for r in runs if quiet(r, runs) or key(result, case, r) not in had]
                # What is told of a run is told by its bare one.
                kept = [r for r in runs if r in told or (told and is_bare(r))]
                left_out += len(runs) - len(kept)
                repetitions.append(kept)
            cases.append({**case, "repetitions": repetitions})
        kept_results.append({**result, "cases": cases})
    return kept_results, left_out


def markdown(results: Sequence[Mapping[str, Any]], sources: Sequence[str]) -> str:
    """The README's tables; each names its raw files, and says if runs were short.

    Disturbed runs are not told there if there is a quiet one, and else without times and failures:
    what others took decides it, never how it came out.
    """
    results, left_out = quietest(results)
    found = groups(results)
    parts = []
    for scenario, workload in dict.fromkeys((g.scenario, g.workload) for g in found):
        mine, swept = best_intervals(
            [g for g in found if (g.scenario, g.workload) == (scenario, workload)]
        )
        heads = [README_HEADS[name] for name in README_COLUMNS]
        lines = [f"**{scenario}**, {spoken(workload)}:", ""]
        lines += [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
        for group in mine:
            if group.refused:
                rest = " |" * (len(README_COLUMNS) - 2)
                lines.append(f"| {group.arm} | not run: {group.refused} |{rest}")
                continue
            row = cells(group)
            if not (is_quiet(group) and all(is_quiet(g) for g in mine if g.arm == "bare")):
                row |= {name: UNQUIET for name in TIMES if row[name] != "-"}
                row |= {"done": UNQUIET} if group.completed < group.runs else {}
            lines.append("| " + " | ".join(row[name] for name in README_COLUMNS) + " |")
        notes = [f"{g.arm}: {note}." for g in mine for note in g.notes if is_quiet(g)]
        notes += [f"{swept}."] if swept else []
        lines += ["", " ".join(notes)] if notes else []
        parts.append("\n".join(lines))
    files = ", ".join(f"`{name}`" for name in sources)
    told = f"Raw results: {files}; made by `python -m bench table`."
    if any(UNQUIET in part for part in parts):
        told += f" {UNQUIET.capitalize()}: others used the machine meanwhile, or nobody looked."
    if left_out:
        told += f" Disturbed runs of systems that also had quiet ones, left out: {left_out}."
    return "\n\n".join([*parts, told])


def replaced(text: str, table: str, marks: tuple[str, str] = (BEGIN, END)) -> str:
    """A document with what is between the markers replaced."""
    before, begin, rest = text.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise ValueError(f"no {marks[0]} … {marks[1]} in it")
    return f"{before}{begin}\n{table}\n{end}{after}"


def compared(first: Sequence[Group], second: Sequence[Group], within: float = 0.15) -> list[str]:
    """Do two results say the same? One line per common row, and one per ranking."""
    lines, others = [], {(g.scenario, g.workload, g.arm): g for g in second}
    for group in first:
        other = others.get((group.scenario, group.workload, group.arm))
        if other is None or group.refused or other.refused:
            continue
        name = f"{group.scenario}, {group.workload}, {group.arm}"
        if group.outcome or other.outcome:
            done = f"{group.completed} of {group.runs} and {other.completed} of {other.runs}"
            alike = group.completed * other.runs == other.completed * group.runs
            lines.append(f"{name}: {done} runs completed: {'same' if alike else 'DIFFERS'}")
        if group.to_bare is None or other.to_bare is None:
            continue
        a, b = group.to_bare.middle, other.to_bare.middle
        off = b / a - 1
        verdict = "same" if abs(off) <= within else "DIFFERS"
        lines.append(f"{name}: {a:.3f} and {b:.3f} x bare, {off:+.1%}: {verdict}")
    for key in dict.fromkeys((g.scenario, g.workload) for g in first):
        ranks = [ranking(some, key) for some in (first, second)]
        common = [[arm for arm in one if all(arm in other for other in ranks)] for one in ranks]
        if len(common[0]) > 1:
            verdict = "same" if common[0] == common[1] else f"DIFFERS: {', '.join(common[1])}"
            lines.append(f"{key[0]}, {key[1]}: ranking {', '.join(common[0])}: {verdict}")
    return lines


def ranking(found: Sequence[Group], key: tuple[str, str]) -> list[str]:
    """Arms by completion time against bare, the fastest first; who did not complete is last."""
    mine = [g for g in found if (g.scenario, g.workload) == key and not g.refused]
    return [g.arm for g in sorted(mine, key=lambda g: g.to_bare.middle if g.to_bare else 1e9)]
