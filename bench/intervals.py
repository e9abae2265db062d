"""How often a system saves (NAME@STEPS): which interval stands for all that were tried. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from bench.tables import Group


def cost(group: Group) -> tuple[bool, float]:
    """For finding the best of several."""
    return bool(group.outcome), group.to_bare.middle if group.to_bare else math.inf


def best_intervals(
    mine: Sequence[Group], disturbed_too: Sequence[Group] = ()
) -> tuple[list[Group], str]:
    """Of an arm with several intervals (NAME@STEPS) the best one, and a word about the others.

    Which is the best depends on the workload and the faults: only a sweep finds it, and only the
    best is a fair opponent. One that was not completed is the worst. If one of them has no quiet
    run, the best is chosen from all runs: it may be that one.
    """
    whole = {group.arm: group for group in disturbed_too}
    families: dict[str, list[Group]] = {}
    for group in mine:
        families.setdefault(group.arm.partition("@")[0], []).append(group)
    best = set()
    for family in families.values():
        unknown = any(group.to_bare is None and not group.refused for group in family)
        costs = [cost(whole.get(g.arm, g) if unknown else g) for g in family]
        best.add(id(family[costs.index(min(costs))]))
    tried = [
        _tried(name, [g for g in family if not g.refused], alone=_alone(name, families))
        for name, family in families.items()
    ]
    return [g for g in mine if id(g) in best], "; ".join(filter(None, tried))


def _alone(name: str, families: Iterable[str]) -> bool:
    """Whether no other way to save was tried beside this one."""
    system = name.partition(":")[0]
    return sum(other.partition(":")[0] == system for other in families) == 1


def _tried(name: str, family: Sequence[Group], alone: bool) -> str:
    """Which intervals there were: what nobody compared with others may be a bad choice."""
    steps = sorted(int(n) for g in family if (n := g.arm.partition("@")[2]))
    if not steps:
        return ""
    every = f"every {', '.join(map(str, steps))} steps"
    told = f"the best of {every}" if len(steps) > 1 else f"only {every} was tried"
    return f"{name}: {told}{', and no other way to save' if alone else ''}"
