"""Who was through first under kills, repetition by repetition, on each kind of machine.

    python -m bench.orders [FILE…]                         default: all raw results that are fit
    python -m bench.orders --write docs/side-by-side.md    the same, between its marks

A ratio needs a quiet machine, and a rented one may have no quiet time for some system at all. An
order needs less: in one repetition all systems meet the same faults, one after another. So every
repetition counts in which Keepstep ran beside another system, disturbed or not. Noise may turn one
of them around; so may a machine that gets slower all the while, for in which sequence systems run
is drawn, but not anew on each machine. Who did not come to its end is behind who did, and times
within 5% of each other are a tie, as in `bench compare`. Time counts from the first finished step;
how often Keepstep would be first with starts is told beside it.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import agreement, documents, figures, readme, record, tables
from bench.__main__ import fit_results
from keepstep.errors import KeepstepError, Permanent

MARKS = "<!-- orders:begin", "<!-- orders:end -->"
OURS, SCENARIO = "keepstep", "kills"

Row = tuple[str, str]
"""Workload, and the other system."""


@dataclass(frozen=True, slots=True)
class Time:
    """Of one run; inf: not completed."""

    seconds: float
    start: float = 0.0


Repetition = Mapping[str, Time]
"""By system; where it saves, with its interval: others are other systems."""


@dataclass(frozen=True, slots=True)
class Orders:
    """Of two systems on one kind of machine."""

    times: tuple[tuple[Time, Time], ...]
    """In each repetition the one's and the other's."""

    @property
    def sides(self) -> list[int]:
        """Who was first in each: 1 the one, -1 the other, 0 nobody."""
        return [_side(a.seconds, b.seconds) for a, b in self.times]

    @property
    def sides_with_starts(self) -> list[int]:
        return [_side(a.seconds + a.start, b.seconds + b.start) for a, b in self.times]

    @property
    def side(self) -> int:
        """Who was so more often."""
        total = sum(self.sides)
        return (total > 0) - (total < 0)

    @property
    def text(self) -> str:
        told = f"{self.sides.count(1)} of {len(self.times)}"
        if ties := self.sides.count(0):
            told += f" ({ties} tied)"
        longer = [its.seconds / ours.seconds for ours, its in self.times]
        if known := [ratio for ratio in longer if 0.0 < ratio < math.inf]:
            told += f", {figures.median(known):.2f}"
            if len(known) > 1:
                told += f" [{min(known):.2f}, {max(known):.2f}]"
        return told


def _side(one: float, other: float) -> int:
    if agreement.within(one, other, agreement.TIE_MAX):
        return 0
    return 1 if one < other else -1


def main(line: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.orders", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", nargs="*", type=Path)
    documents.add_option(parser)
    args = parser.parse_args(line)
    try:
        kept = {path: record.read(path) for path in args.files} or fit_results()
        results = list(kept.values())
        print("\n".join([*table(results), "", *rankings(results), "", beside(results)]))
        names = [f"bench/results/{path.name}" for path in kept]
        documents.write(args.write, MARKS, lambda _: markdown(results, names))
    except (KeepstepError, OSError) as error:
        print(f"bench.orders: {error}", file=sys.stderr)
        return 2
    return 0


def repetitions_of(
    results: Sequence[Mapping[str, Any]],
) -> dict[str, dict[str, list[Repetition]]]:
    """Those with Keepstep, by workload and kind of machine. Without the bare engine, which nobody
    struck."""
    found: dict[str, dict[str, list[Repetition]]] = {}
    for result in results:
        for case in _cases(result):
            for runs in case["repetitions"]:
                one = {run["arm"]: _time(run) for run in runs if run["arm"] != "bare"}
                if OURS in one and len(one) > 1:
                    of_kind = found.setdefault(tables.workload_name(result, case), {})
                    of_kind.setdefault(readme.machine(result), []).append(one)
    return dict(sorted(found.items()))


def _cases(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [case for case in result["cases"] if case["scenario"] == SCENARIO]


def _time(run: Mapping[str, Any]) -> Time:
    if not tables.is_done(run):
        return Time(math.inf)
    return Time(run["truth"]["seconds"], run["start_seconds"])


def beside_keepstep(results: Sequence[Mapping[str, Any]]) -> dict[Row, dict[str, Orders]]:
    """By row and by kind of machine."""
    found: dict[Row, dict[str, Orders]] = {}
    for workload, of_kind in repetitions_of(results).items():
        for kind, repetitions in of_kind.items():
            for system in sorted({name for one in repetitions for name in one} - {OURS}):
                if (orders := between(repetitions, OURS, system)).times:
                    found.setdefault((workload, system), {})[kind] = orders
    return dict(sorted(found.items()))


def between(repetitions: Sequence[Repetition], one: str, other: str) -> Orders:
    """Where both ran and not both failed: of these nobody can say who would have been first."""
    met = [(each[one], each[other]) for each in repetitions if one in each and other in each]
    return Orders(tuple((a, b) for a, b in met if math.isfinite(min(a.seconds, b.seconds))))


# ---------------------------------------------------------------- text


def table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keepstep beside each other system, in Markdown: one column per kind of machine."""
    found, kinds = beside_keepstep(results), _kinds(results)
    rows = []
    for (workload, system), of_kind in found.items():
        told = [of_kind[kind].text if kind in of_kind else "-" for kind in kinds]
        name = f"{tables.spoken(workload)}, {system}"
        rows.append([name, *told, _same([one.side for one in of_kind.values()])])
    if not rows:
        raise Permanent(f"{OURS} and another system were never run side by side in these files")
    return documents.table(["workload, system", *_titles(kinds), "first"], rows)


def rankings(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """All systems beside each other, in Markdown."""
    kinds = _kinds(results)
    rows = []
    for workload, of_kind in repetitions_of(results).items():
        told = [ranking(of_kind[kind]) if kind in of_kind else "-" for kind in kinds]
        turned = "; ".join(_turned(list(of_kind.values()))) or "none"
        rows.append([tables.spoken(workload), *told, turned])
    return documents.table(["workload", *_titles(kinds), "turned around"], rows)


def ranking(repetitions: Sequence[Repetition]) -> str:
    """By how many others each was mostly ahead of, less those that were ahead of it. Between two
    neighbours stands who of them was so: of three each may be ahead of the next."""
    systems = sorted({name for one in repetitions for name in one})
    sides = {(a, b): between(repetitions, a, b).side for a, b in itertools.permutations(systems, 2)}
    first = sorted(systems, key=lambda a: (-sum(sides[a, b] for b in systems if b != a), a))
    told = first[:1]
    for before, system in itertools.pairwise(first):
        told += [{1: "<", 0: "=", -1: ">"}[sides[before, system]], system]
    return " ".join(told)


def _turned(machines: Sequence[Sequence[Repetition]]) -> list[str]:
    """Pairs of which one is mostly ahead on one machine, and the other on another."""
    systems = sorted({name for each in machines for one in each for name in one})
    return [
        f"{a} and {b}"
        for a, b in itertools.combinations(systems, 2)
        if {1, -1} <= {between(each, a, b).side for each in machines}
    ]


def _same(sides: Sequence[int]) -> str:
    """Who was first, by machine."""
    found = set(sides)
    if {1, -1} <= found:
        return "differs"
    who = "Keepstep" if 1 in found else "the other" if -1 in found else "nobody"
    if len(sides) < 2:
        return f"{who}, on one machine"
    return who if len(found) == 1 else f"{who} or nobody"


def beside(results: Sequence[Mapping[str, Any]]) -> str:
    """What the tables leave out."""
    orders = [one for of_kind in beside_keepstep(results).values() for one in of_kind.values()]
    first, whole = (
        sum(getattr(one, name).count(1) for one in orders)
        for name in ("sides", "sides_with_starts")
    )
    pairs = sum(len(one.times) for one in orders)
    told = f"Keepstep was first in {first} of {pairs} pairs; with starts it would be in {whole}."
    ended = [run["arm"] for r in results for c in _cases(r) for run in c.get("interrupted", ())]
    if ended:
        told += f" Runs that were interrupted are in no pair: {', '.join(ended)}."
    return told


def markdown(results: Sequence[Mapping[str, Any]], sources: Sequence[str]) -> str:
    """A document's tables, with their machines and the raw results that they are made from."""
    what = (
        f"**{SCENARIO}**: in how many repetitions Keepstep was through before the other system, "
        "and the other's seconds by Keepstep's (median, lowest and highest):"
    )
    ranked = (
        "All systems of these repetitions, by who was mostly ahead of whom (`<`); `=`: neither "
        "was, or they did not meet:"
    )
    kinds = _kinds(results)
    named = zip(_titles(kinds), kinds, strict=True)
    where = "; ".join(f"{title}: {kind}" for title, kind in named)
    files = ", ".join(
        f"`{source}`{' (ended before its time)' if result.get('ended') else ''}"
        for result, source in zip(results, sources, strict=True)
        if repetitions_of([result])
    )
    closing = f"{beside(results)} Of each kind of machine, {where}. Raw results: {files}; made by "
    closing += "`python -m bench.orders`."
    parts = [what, "\n".join(table(results)), ranked, "\n".join(rankings(results)), closing]
    return "\n\n".join(parts)


def _kinds(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """In the order of their first result."""
    told = {kind for of_kind in repetitions_of(results).values() for kind in of_kind}
    return [kind for kind in dict.fromkeys(map(readme.machine, results)) if kind in told]


def _titles(kinds: Sequence[str]) -> list[str]:
    return [f"machine {at + 1}" for at in range(len(kinds))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
