"""Do the raw results of two machines say the same? Pure.

Only what both know is compared: a system without a time that counts on one side has no place in a
ranking either. Silence is no agreement, and neither are failures alone: two sides agree if at least
two systems have times on both, and nothing differs. What could not be compared is said. Which
interval between saves is the best is each machine's own affair: its best stands for it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench import intervals, tables
from bench.harness import Limits
from keepstep.errors import ConfigError

SAME, DIFFERS, UNKNOWN = "same", "DIFFERS", "not compared"
AGREES, DISAGREES, SAYS_NOTHING = 0, 1, 2
"""Exits."""
RATIO_MAX = 1.15
"""Of the larger figure by the smaller one, so that it does not matter who is called the first."""
TIE_MAX = 1.05
"""Systems that are no further apart have no order."""
SYSTEMS_MIN = 2
STRIKE_OFF_SECONDS_MAX = 1.0
"""Strikes at a share of the run move with its length, which is a whole number of steps."""
ONE_MACHINE = "the same machine and boot: no second machine"

Row = tuple[str, str]
"""Scenario and workload, and a system."""


@dataclass(frozen=True, slots=True)
class Known:
    """What one side knows of a system."""

    ratio: float | None
    """Its time by the bare engine's; None: no time that counts, and `why` not."""
    why: str = ""
    completed: int = 1
    runs: int = 1
    chosen: str = ""
    """Which of its intervals this is."""


Side = Mapping[Row, Known]


@dataclass(frozen=True, slots=True)
class Verdict:
    code: int
    lines: tuple[str, ...]


def verdict(first: Side, second: Side, one_machine: bool = False) -> Verdict:
    """Row by row, then the rankings, then why it is no agreement if nothing differs."""
    lines = [ONE_MACHINE] if one_machine else []
    for row in dict.fromkeys([*first, *second]):
        lines += [f"{', '.join(row)}: {told}" for told in _row(first.get(row), second.get(row))]
    for case in dict.fromkeys(case for case, _ in first):
        lines += _ranked(first, second, case)
    timed = [row[0] for row, known in first.items() if _has_time(known, second.get(row))]
    enough = any(timed.count(case) >= SYSTEMS_MIN for case in timed)
    if any(DIFFERS in line for line in lines):
        return Verdict(DISAGREES, tuple(lines))
    if not enough:
        lines.append(f"no agreement: fewer than {SYSTEMS_MIN} systems have times on both sides")
    return Verdict(AGREES if enough and not one_machine else SAYS_NOTHING, tuple(lines))


def within(a: float, b: float, ratio_max: float = RATIO_MAX) -> bool:
    return max(a, b) / min(a, b) <= ratio_max


def _has_time(known: Known, other: Known | None) -> bool:
    return known.ratio is not None and other is not None and other.ratio is not None


def _row(a: Known | None, b: Known | None) -> Iterator[str]:
    if a is None or b is None:
        yield f"only in the {'second' if a is None else 'first'}: {UNKNOWN}"
        return
    if a.completed < a.runs or b.completed < b.runs:
        done = f"{a.completed} of {a.runs} and {b.completed} of {b.runs}"
        alike = a.completed * b.runs == b.completed * a.runs
        yield f"{done} runs completed: {SAME if alike else DIFFERS}"
    if a.ratio is not None and b.ratio is not None:
        told = f"{_chosen(a)}{a.ratio:.3f} and {_chosen(b)}{b.ratio:.3f} x bare"
        alike = within(a.ratio, b.ratio)
        yield f"{told}, {b.ratio / a.ratio - 1:+.1%}: {SAME if alike else DIFFERS}"
    elif a.completed or b.completed:
        words: dict[str, list[str]] = {}
        for word, known in (("first", a), ("second", b)):
            if known.ratio is None:
                words.setdefault(known.why, []).append(f"the {word}")
        without = [f"{why} in {' and '.join(where)}" for why, where in words.items()]
        yield f"{', '.join(without)}: times {UNKNOWN}"


def _chosen(known: Known) -> str:
    return f"{known.chosen} " if known.chosen else ""


def _ranked(first: Side, second: Side, case: str) -> Iterator[str]:
    """Arms by time, the fastest first; who never completed is last. Who completed and has no time
    that counts has no place."""
    both = [
        {system: known for (of, system), known in side.items() if of == case and _placed(known)}
        for side in (first, second)
    ]
    common = [system for system in both[0] if system in both[1]]
    if len(common) < SYSTEMS_MIN:
        return
    orders = [
        ", ".join(sorted(common, key=lambda system: (_time(side[system]), system))) for side in both
    ]
    turned = any(
        _order(both[0][x], both[0][y]) * _order(both[1][x], both[1][y]) < 0
        for x, y in itertools.combinations(common, 2)
    )
    yield f"{case}: ranking {orders[0]}: {f'{DIFFERS}: {orders[1]}' if turned else SAME}"


def _placed(known: Known) -> bool:
    return known.ratio is not None or not known.completed


def _time(known: Known) -> float:
    return math.inf if known.ratio is None else known.ratio


def _order(x: Known, y: Known) -> int:
    """-1: the first of them is faster; 0: neither is."""
    a, b = _time(x), _time(y)
    if a == b or (math.isfinite(a) and math.isfinite(b) and within(a, b, TIE_MAX)):
        return 0
    return -1 if a < b else 1


# ---------------------------------------------------------------- of `bench run`


def side_of(results: Sequence[Mapping[str, Any]]) -> dict[Row, Known]:
    """Of the raw results of one machine: times of quiet runs. The bare engine is the measure of the
    rest, and agrees with itself always: it has no row."""
    found: dict[Row, list[tables.Group]] = {}
    for group in tables.groups(results, tables.Times.QUIET):
        every = intervals.choices(results, (group.scenario, group.workload))
        if group.arm != "bare" and group.runs and intervals.shown(group, every):
            row = f"{group.scenario}, {group.workload}", intervals.family_of(group.arm)
            found.setdefault(row, []).append(group)
    return {row: _known(mine) for row, mine in found.items()}


def _known(mine: Sequence[tables.Group]) -> Known:
    completed, runs = (sum(getattr(g, name) for g in mine) for name in ("completed", "runs"))
    if len(mine) > 1:
        return Known(None, "intervals that were never run side by side", completed, runs)
    _, _, steps = mine[0].arm.partition("@")
    chosen = f"every {steps} steps" if steps else ""
    if mine[0].to_bare is None:
        return Known(None, "no quiet run", completed, runs, chosen)
    return Known(mine[0].to_bare.middle, "", completed, runs, chosen)


def one_machine(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> bool:
    """Whether any of them come from the same boot of the same machine. Where a boot was not kept,
    whether they are the same file."""
    ours, theirs = ({r["machine"].get("boot") or r["at"] for r in side} for side in (first, second))
    return bool(ours & theirs)


def need_same_ground(results: Sequence[Mapping[str, Any]]) -> None:
    """Raises ConfigError if their figures mean something else, or the arms met other faults."""
    for name in ("measure", "seconds"):
        values = {result.get(name) for result in results}
        if len(values) > 1:
            raise ConfigError(f"they cannot be compared: {name} is {_listed(values)}")
    cases: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        for case in result["cases"]:
            name = f"{case['scenario']}, {tables.workload_name(result, case)}"
            cases.setdefault(name, []).append(case)
    for name, mine in cases.items():
        digests = {digest for case in mine if (digest := case.get("scenario_digest"))}
        if len(digests) > 1 or not _struck_alike([_planned(case) for case in mine]):
            raise ConfigError(f"they cannot be compared: {name}: not the same scenario")


def _listed(values: set[Any]) -> str:
    return " and ".join(sorted(map(str, values)))


Planned = tuple[Sequence[Mapping[str, Any]], float]
"""The strikes, and up to when they were drawn."""


def _planned(case: Mapping[str, Any]) -> Planned | None:
    """None: nobody was to be struck, or it was not kept."""
    for runs in case["repetitions"]:
        for run in runs:
            if run["arm"] != "bare" and "planned" in run:
                return run["planned"], Limits(run["nominal_seconds"]).seconds_max
    return None


def _struck_alike(planned: Sequence[Planned | None]) -> bool:
    known = [one for one in planned if one is not None]
    return all(_same_strikes(known[0], other) for other in known[1:])


def _same_strikes(a: Planned, b: Planned) -> bool:
    (short, until), (long, _) = sorted((a, b), key=lambda one: len(one[0]))
    off = STRIKE_OFF_SECONDS_MAX
    for one, other in zip(short, long, strict=False):
        if any(one[name] != other[name] for name in ("kind", "rank")):
            return False
        if abs(one["at"] - other["at"]) > off:
            return False
    # What only one of them has must come after the other's end.
    return all(strike["at"] > until - off for strike in long[len(short) :])
