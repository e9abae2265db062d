"""What runs of bench.turns say together, from their raw results alone.

    python -m bench.turn_report [FILE…]                    default: all raw results that are fit
    python -m bench.turn_report --write README.md          the same, between its marks
    python -m bench.turn_report THERE… --against HERE…     two machines: same ranking, within 15%?

One row per workload and arm. Rounds are pairs of an arm's seconds and the bare engine's, so those
of several runs are taken together: the interval gets narrower, and the control's error smaller.
Machines may differ, as the pace of one does. "Calm" is the ratio without the rounds in which
somebody was struck, "with all steps" that with those at the start of each turn, which do not count
otherwise, and a pause what a round with a strike took longer than calm ones would have.
An invalid run, whose control is off or in which a rank died that nobody struck, becomes no better
beside others: such runs have a row of their own, in brackets, and are compared with nobody's.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import agreement, documents, figures, readme, record, scenario
from bench.plan import BATCH, SEED
from bench.turns import CONTROL_OFF_MAX, weights_equal
from keepstep.errors import KeepstepError, Permanent

MARKS = "<!-- turns:begin", "<!-- turns:end -->"
STEPS_MIN = 500
"""Of a run that is told of: a short one may have met no strike at all."""
HEAD = (
    "workload, arm",
    "runs",
    "strikes",
    "time, by the bare engine",
    "calm",
    "with all steps",
    "pauses, s",
    "control",
    "steps again, samples lost",
    "weights",
)


@dataclass(frozen=True, slots=True)
class Turns:
    """Runs of one arm with one workload, one after another."""

    runs: Sequence[dict[str, Any]]
    seed: int

    def rounds(self, struck: bool | None = None) -> list[dict[str, Any]]:
        """All of them; or only those with a strike, or without."""
        return [
            one
            for run in self.runs
            for one, strikes in zip(run["rounds"], _strikes(run), strict=True)
            if struck is None or struck == (strikes > 0)
        ]

    def ratio(self, name: str) -> figures.Ratio:
        """Of the sums over rounds, by the bare engine's."""
        rounds = self.rounds()
        return figures.ratio_of_sums(
            [one[name] for one in rounds], [one["bare"] for one in rounds], self.seed
        )

    def value(self, name: str, struck: bool | None = None) -> float:
        """That ratio alone: how far it can be trusted takes a second to find out."""
        rounds = self.rounds(struck)
        assert rounds, "no rounds"
        mine, bare = (sum(one[which] for one in rounds) for which in (name, "bare"))
        return float(mine / bare)

    def with_all_steps(self) -> float | None:
        """None: not all runs tell."""
        told = [run["seconds_with_leads"] for run in self.runs if "seconds_with_leads" in run]
        if len(told) < len(self.runs):
            return None
        arm, bare = (sum(seconds[name] for seconds in told) for name in ("arm", "bare"))
        return float(arm / bare)

    def pauses(self) -> list[float]:
        calm = self.value("arm", struck=False)
        return [one["arm"] - calm * one["bare"] for one in self.rounds(struck=True)]

    def sum_of(self, name: str) -> int:
        return sum(int(run["truths"]["arm"][name]) for run in self.runs)

    @property
    def strikes(self) -> int:
        return sum(len(run["strikes"]) for run in self.runs)

    @property
    def weights_equal(self) -> bool:
        """Rank by rank, and known at all."""
        return all(weights_equal(run["truths"]) for run in self.runs)


Runs = Mapping[tuple[str, str], Turns]
"""By workload and arm."""


def is_valid(run: Mapping[str, Any]) -> bool:
    """By what was found when it was made, of all its rounds."""
    if "valid" in run:
        return bool(run["valid"])
    control, bare = (sum(one[name] for one in run["rounds"]) for name in ("control", "bare"))
    unmeant = any(found.get("unmeant_starts") for found in run["truths"].values())
    return abs(control / bare - 1) <= CONTROL_OFF_MAX and not unmeant


def main(line: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.turn_report", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--against", nargs="+", type=Path, default=[], help="of another machine")
    documents.add_option(parser)
    args = parser.parse_args(line)
    if args.write and args.against:
        parser.error("--against compares, and --write tells of one side: one of them")
    try:
        kept = {path: record.read(path) for path in args.files} or fit_results()
        here, there = list(kept.values()), [record.read(path) for path in args.against]
        need_same_training([*here, *there])
        lines = (*table(here), *failures(here))
        found = compared(here, there) if there else agreement.Verdict(0, lines)
        names = [f"bench/results/{path.name}" for path in kept]
        documents.write(args.write, MARKS, lambda _: markdown(here, names))
    except (KeepstepError, OSError) as error:
        print(f"bench.turn_report: {error}", file=sys.stderr)
        return 2
    print("\n".join(found.lines))
    return found.code


def fit_results() -> dict[Path, dict[str, Any]]:
    shipped = scenario.shipped()
    return record.fit(("turns-2",), lambda result: why_unfit(result, shipped))


def why_unfit(result: Mapping[str, Any], shipped: Mapping[str, str]) -> str:
    """Why a raw result is no part of a document's table; "" if it is. Never how it came out."""
    options = result["options"]
    if "+changes" in result["commit"]:
        return "made from a tree that is in no commit"
    if options["quick"] or options["steps"] < STEPS_MIN:
        return f"fewer than {STEPS_MIN} steps"
    usual = {"scenario": "kills", "size": "3m", "ranks": 4, "seed": SEED}
    for name, value in usual.items():
        if options[name] != value:
            return f"{name} {options[name]} instead of {value}"
    # Older ones do not tell, and were of the scenario as it is.
    if result.get("scenario_digest", shipped["kills"]) != shipped["kills"]:
        return "kills is not the scenario that ships under this name"
    return ""


def markdown(results: Sequence[dict[str, Any]], sources: Sequence[str]) -> str:
    """A document's table, with what it is of and the raw results that it is made from."""
    options = results[0]["options"]
    what = (
        f"**{options['scenario']}**, {options['size']} x{options['ranks']} ranks, in turns; in "
        f"brackets, what does not count: the control is off by more than {CONTROL_OFF_MAX:.0%}, or "
        "a rank died that nobody struck:"
    )
    files = ", ".join(f"`{name}`" for name in sources)
    closing = f"Raw results: {files}; made by `python -m bench.turn_report`. "
    closing += readme.machines(results)
    return "\n\n".join([what, "\n".join(table(results)), *failures(results), closing])


def failures(results: Iterable[Mapping[str, Any]]) -> list[str]:
    """Arms that have no row, or a row of fewer runs, because they did not come to their end."""
    return [
        f"One run of {_workload(result['options'])}, {arm}, failed: {run['failed']}."
        for result in results
        for arm, run in result["runs"].items()
        if "failed" in run
    ]


def compared(
    first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]]
) -> agreement.Verdict:
    """Do both tell of the same ratios, and of the same ranking? Pure."""
    same = agreement.one_machine(first, second)
    return agreement.verdict(_side(first), _side(second), one_machine=same)


def _side(results: Sequence[dict[str, Any]]) -> dict[agreement.Row, agreement.Known]:
    valid, invalid = gathered(results), gathered(results, valid=False)
    found: dict[agreement.Row, agreement.Known] = {}
    for workload, arm in sorted(valid.keys() | invalid.keys()):
        turns = valid.get((workload, arm))
        family, _, steps = arm.partition("@")
        known = agreement.Known(None, "no valid run")
        if turns is not None:
            known = agreement.Known(turns.value("arm"))
        known = replace(known, chosen=f"every {steps} steps" if steps else "")
        before = found.get((workload, family))
        # Of several intervals the best one stands for them, as in each machine's own tables.
        found[workload, family] = known if before is None else min(before, known, key=_time)
    return found


def _time(known: agreement.Known) -> float:
    return math.inf if known.ratio is None else known.ratio


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """In Markdown, by workload and then by time; behind an arm's row that of its invalid runs."""
    rows = []
    for valid in (True, False):
        for (workload, arm), turns in gathered(results, valid).items():
            rows.append((workload, not valid, turns.value("arm"), arm, turns))
    if not rows:
        raise Permanent("no run in these files came to its end")
    lines = []
    for workload, invalid, _, arm, turns in sorted(rows, key=lambda row: row[:4]):
        line = _row(f"{workload}, {arm}", turns)
        lines.append([f"({cell})" for cell in line] if invalid else line)
    return documents.table(HEAD, lines)


def need_same_training(results: Sequence[dict[str, Any]]) -> None:
    """What is told together, or compared, must have trained the same under the same faults."""
    alike = {json.dumps([r["options"][n] for n in ("scenario", "size", "ranks")]) for r in results}
    if len(alike) > 1:
        raise Permanent(f"not one scenario, size and number of ranks: {'; '.join(sorted(alike))}")


def gathered(results: Sequence[dict[str, Any]], valid: bool = True) -> Runs:
    """The valid runs, or those that are not."""
    need_same_training(results)
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in results:
        for arm, run in result["runs"].items():
            if result["options"]["quick"] or "failed" in run or is_valid(run) != valid:
                continue
            runs.setdefault((_workload(result["options"]), arm), []).append(run)
    seed = results[0]["options"]["seed"] if results else 0
    return {key: Turns(of_key, seed) for key, of_key in runs.items()}


def _workload(options: dict[str, Any]) -> str:
    """With what makes its steps longer, where that is not as usual."""
    batch = options.get("batch", BATCH)
    return options["workload"] if batch == BATCH else f"{options['workload']} batch {batch}"


def _row(name: str, turns: Turns) -> list[str]:
    ratio, pauses = turns.ratio("arm"), turns.pauses()
    figure = f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
    return [
        name,
        str(len(turns.runs)),
        str(turns.strikes),
        figure,
        f"{turns.value('arm', struck=False):.3f}",
        "-" if (whole := turns.with_all_steps()) is None else f"{whole:.3f}",
        f"{min(pauses):.1f} to {max(pauses):.1f}" if pauses else "-",
        f"{turns.value('control'):.3f}",
        f"{turns.sum_of('recomputed')}, {turns.sum_of('lost')}",
        "equal" if turns.weights_equal else "differ",
    ]


def _strikes(run: dict[str, Any]) -> Iterator[float]:
    """In each round: it says how many there were so far."""
    before = 0.0
    for one in run["rounds"]:
        yield one["strikes"] - before
        before = one["strikes"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
