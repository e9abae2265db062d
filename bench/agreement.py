"""Do two raw results say the same? Pure.

Only what both know is compared: an arm without a quiet run in one of them has no time there, and no
place in a ranking either. Silence is no agreement: what could not be compared is said, and two
results of which nothing can be say nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from bench.tables import Group

SAME, DIFFERS, UNKNOWN = "same", "DIFFERS", "not compared"
WITHIN = 0.15


def compared(first: Sequence[Group], second: Sequence[Group], within: float = WITHIN) -> list[str]:
    """A line or two per common row, and one per ranking. The bare engine is the measure of the
    rest, and agrees with itself always: it has none."""
    lines, others = [], {(g.scenario, g.workload, g.arm): g for g in second}
    for group in first:
        other = others.get((group.scenario, group.workload, group.arm))
        if other is None or group.refused or other.refused or group.arm == "bare":
            continue
        name = f"{group.scenario}, {group.workload}, {group.arm}"
        lines += [f"{name}: {told}" for told in _row(group, other, within)]
    for key in dict.fromkeys((g.scenario, g.workload) for g in first):
        lines += _ranked(first, second, key)
    return lines


def verdict(lines: Sequence[str]) -> int:
    """The exit: 0 they agree in all that was compared, 1 they do not, 2 nothing was."""
    if any(DIFFERS in line for line in lines):
        return 1
    return 0 if any(line.endswith(SAME) for line in lines) else 2


def _row(group: Group, other: Group, within: float) -> Iterator[str]:
    if group.outcome or other.outcome:
        done = f"{group.completed} of {group.runs} and {other.completed} of {other.runs}"
        alike = group.completed * other.runs == other.completed * group.runs
        yield f"{done} runs completed: {SAME if alike else DIFFERS}"
    if group.to_bare is not None and other.to_bare is not None:
        a, b = group.to_bare.middle, other.to_bare.middle
        off = b / a - 1
        yield f"{a:.3f} and {b:.3f} x bare, {off:+.1%}: {SAME if abs(off) <= within else DIFFERS}"
    elif group.completed or other.completed:
        without = [
            word
            for word, one in (("first", group), ("second", other))
            if one.completed and one.to_bare is None
        ]
        if without:
            yield f"no quiet run in the {' and the '.join(without)}: times {UNKNOWN}"


def _ranked(first: Sequence[Group], second: Sequence[Group], key: tuple[str, str]) -> list[str]:
    ranks = [ranking(some, key) for some in (first, second)]
    common = [[arm for arm in one if all(arm in other for other in ranks)] for one in ranks]
    if len(common[0]) < 2:
        return []
    told = SAME if common[0] == common[1] else f"{DIFFERS}: {', '.join(common[1])}"
    return [f"{key[0]}, {key[1]}: ranking {', '.join(common[0])}: {told}"]


def ranking(found: Sequence[Group], key: tuple[str, str]) -> list[str]:
    """Arms by completion time against bare, the fastest first; who never completed is last, by
    name. Who completed and has no quiet run has no place."""
    mine = [g for g in found if (g.scenario, g.workload) == key and not g.refused]
    known = [g for g in mine if g.to_bare is not None or not g.completed]
    return [
        g.arm
        for g in sorted(known, key=lambda g: (g.to_bare.middle if g.to_bare else math.inf, g.arm))
    ]
