"""What has to be said about runs beside their figures. Pure.

A figure that looks good because a strike hit nobody, or because a rank died unseen, is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.arms.restarts import restarted_with

Run = Mapping[str, Any]


def of(runs: Sequence[Run], case: Mapping[str, Any]) -> Iterator[str]:
    """Of one arm's runs in one case."""
    differ = sum(run["truth"]["disagreements"] for run in runs)
    if differ:
        yield f"ranks saw different gradients in {differ} steps"
    nobody = sum(1 for run in runs for strike in run["strikes"] if not strike["pid"])
    if nobody:
        yield f"{nobody} strikes found nobody"
    missed = sum(map(missed_strikes, runs))
    if missed:
        yield f"it was through before {missed} strikes that others met"
    deaths = sum(unmeant_starts(run, case["plan"]) for run in runs)
    if deaths:
        yield f"ranks were started {deaths} times more than strikes explain"
    if case.get("tuned_for") and any("@" in run["arm"] for run in runs):
        yield f"its interval was tuned for {case['tuned_for']}, and not here"
    yield from (run["striker_failed"] for run in runs if run.get("striker_failed"))


def missed_strikes(run: Run) -> int:
    """Of those within the length of the fault-free run. Later ones only who is slow meets."""
    if run["outcome"] != "completed":
        return 0
    wanted = [s for s in run.get("planned", ()) if s["at"] <= run["nominal_seconds"]]
    return max(0, len(wanted) - len(run["strikes"]))


def unmeant_starts(run: Run, plan: Mapping[str, Any]) -> int:
    """A strike starts each rank once at most that its system starts with the one that was struck.
    More are deaths that nobody meant, and that nobody would see otherwise."""
    parallel, world = plan["parallel"], plan["world"]
    explained = Counter(
        rank
        for strike in run["strikes"]
        if strike["pid"]
        for rank in restarted_with(run["arm"], strike["rank"], parallel, world)
    )
    times = Counter(rank for rank, _ in run.get("starts", ()))
    return sum(max(0, count - 1 - explained[rank]) for rank, count in times.items())
