"""What has to be said about runs beside their figures. Pure.

A figure that looks good because a strike hit nobody, or because a rank died unseen, is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.arms import torchft
from bench.arms.restarts import restarted_with

Run = Mapping[str, Any]


def begun(case: Mapping[str, Any]) -> Iterator[Run]:
    """All of its runs, also those that somebody or something ended: of these nothing is known."""
    for runs in case["repetitions"]:
        yield from runs
    yield from case.get("interrupted", ())


def of(arm: str, runs: Sequence[Run], cases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Of one arm's runs, and of the cases that they are of: all with one workload."""
    ended = sum(run["arm"] == arm for case in cases for run in case.get("interrupted", ()))
    if ended:
        yield f"{ended} {'run was' if ended == 1 else 'runs were'} interrupted"
    differ = sum(run["truth"]["disagreements"] for run in runs)
    if differ:
        yield f"ranks saw different gradients in {differ} steps"
    nobody = sum(1 for run in runs for strike in run["strikes"] if not strike["pid"])
    if nobody:
        yield f"{nobody} strikes found nobody"
    missed = sum(map(missed_strikes, runs))
    if missed:
        yield f"it was through before {missed} strikes that were planned"
    deaths = sum(unmeant_starts(run, cases[0]["plan"]) for run in runs)
    if deaths:
        yield f"ranks were started {deaths} times more than strikes explain"
    if "@" in arm:
        for swept in dict.fromkeys(filter(None, (case.get("tuned_for") for case in cases))):
            yield f"its interval was tuned for {swept}, and not here"
    for where in dict.fromkeys(timeouts_tuned_for(arm, case) for case in cases):
        if where:
            yield f"its timeouts were tuned for {where}, and not here"
    yield from (run["striker_failed"] for run in runs if run.get("striker_failed"))


def timeouts_tuned_for(arm: str, case: Mapping[str, Any]) -> str:
    """Also of older results, which do not tell: it was always the same sweep."""
    plan = case["plan"]
    return torchft.tuned_for(arm, case["scenario"], plan["parallel"], plan["size"])


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
