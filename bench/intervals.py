"""How often a system saves (NAME@STEPS): which of the intervals tried stands for it. Pure.

The best interval depends on the workload, the faults and the machine of that hour. So intervals are
compared only where they were run side by side: in one case of one raw file. What was run elsewhere
has won nothing and lost nothing, and is shown as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench import tables
from bench.tables import Group

Key = tuple[str, str]
"""Scenario and workload."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Intervals of one way to save that were run side by side."""

    at: str
    quiet: bool
    """All of them have a quiet run, and are compared by those."""
    costs: Mapping[str, tuple[bool, float]]
    """By arm."""

    @property
    def best(self) -> str:
        """ "" if none of them has a time."""
        arm = min(self.costs, key=self.costs.__getitem__)
        return arm if math.isfinite(self.costs[arm][1]) else ""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is shown of one way to save."""

    arms: tuple[str, ...]
    told: str
    """Which intervals there were: what nobody compared with others may be a bad choice."""


def family_of(arm: str) -> str:
    return arm.partition("@")[0]


def cost(group: Group) -> tuple[bool, float]:
    """For finding the best of several. One that was not completed is the worst."""
    return bool(group.outcome), group.to_bare.middle if group.to_bare else math.inf


def shown(group: Group, found: Mapping[str, Choice]) -> bool:
    """Whether it has a row of its own."""
    choice = found.get(family_of(group.arm))
    return choice is None or "@" not in group.arm or group.arm in choice.arms


def choices(results: Sequence[Mapping[str, Any]], key: Key) -> dict[str, Choice]:
    """By way to save; systems without intervals are not in it."""
    families: dict[str, list[str]] = {}
    for group in tables.groups(results):
        if (group.scenario, group.workload) == key and "@" in group.arm and not group.refused:
            families.setdefault(family_of(group.arm), []).append(group.arm)
    return {
        name: _choice(name, arms, sweep_of(results, key, name), _alone(name, families))
        for name, arms in families.items()
    }


def sweep_of(results: Sequence[Mapping[str, Any]], key: Key, family: str) -> Sweep | None:
    """Of several the one with the most intervals, of those a quiet one, of those the newest: never
    the one that came out in some way."""
    found = [sweep for result in results for sweep in _sweeps(result, key, family)]
    found = [sweep for sweep in found if sweep.best]
    return max(found, key=lambda sweep: (len(sweep.costs), sweep.quiet, sweep.at), default=None)


def _sweeps(result: Mapping[str, Any], key: Key, family: str) -> Iterator[Sweep]:
    for case in result["cases"]:
        if (case["scenario"], tables.workload_name(result, case)) != key:
            continue
        quiet, whole = (
            [g for g in groups if family_of(g.arm) == family and "@" in g.arm and g.runs]
            for groups in (
                tables.groups([{**result, "cases": [case]}], times)
                for times in (tables.Times.QUIET, tables.Times.ALL)
            )
        )
        if len(whole) > 1:
            calm = all(group.quiet for group in quiet)
            costs = {group.arm: cost(group) for group in (quiet if calm else whole)}
            yield Sweep(result["at"], calm, costs)


def _choice(name: str, arms: Sequence[str], sweep: Sweep | None, alone: bool) -> Choice:
    other = ", and no other way to save" if alone else ""
    if sweep is None:
        many = len(arms) > 1
        told = "were never run side by side" if many else "was tried"
        return Choice(tuple(arms), f"{name}: {'' if many else 'only '}{_every(arms)} {told}{other}")
    apart = [arm for arm in arms if arm not in sweep.costs]
    told = (
        f"{name}: the best of {_every(sweep.costs)}{'' if sweep.quiet else ', by disturbed runs'}"
    )
    if apart:
        told += f", beside which {_every(apart)} was not run"
    shown = tuple(arm for arm in arms if arm == sweep.best or arm in apart)
    return Choice(shown, told + other)


def _every(arms: Iterable[str]) -> str:
    steps = sorted(int(arm.partition("@")[2]) for arm in arms)
    return f"every {', '.join(map(str, steps))} steps"


def _alone(name: str, families: Iterable[str]) -> bool:
    """Whether no other way to save was tried beside this one."""
    system = name.partition(":")[0]
    return sum(other.partition(":")[0] == system for other in families) == 1
