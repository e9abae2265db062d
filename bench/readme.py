"""Tables of a document, out of raw results, and which raw results are fit for them. Pure.

A document's first mark names the scenarios that it tells of; one that names none tells of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bench import documents, intervals, scenario
from bench.plan import SECONDS, SEED
from bench.tables import MEASURE, UNQUIET, Times, cells, groups, spoken
from keepstep.errors import Permanent

MARKS = BEGIN, END = "<!-- bench:begin", "<!-- bench:end -->"
COLUMNS = (
    *("arm", "done", "strikes", "to_bare", "goodput", "pause"),
    *("again_share", "lost_share", "same", "start", "memory"),
)
HEADS = {
    "arm": "system",
    "done": "runs completed (quiet)",
    "strikes": "strikes met",
    "to_bare": "time, by the bare engine without faults",
    "goodput": "samples in the model per second, by the bare engine",
    "pause": "pause p50 / p95 / max, s",
    "again_share": "finished steps computed again",
    "lost_share": "samples lost",
    "same": "weights equal those of the bare engine",
    "start": "start, s",
    "memory": "memory, GiB",
}
TIMES = ("to_bare", "goodput", "pause")
CHANGED = ("llama3",)
"""Scenarios that were others when results did not tell their digests yet."""


def why_unfit(result: Mapping[str, Any], shipped: Mapping[str, str]) -> str:
    """Why a raw result is no part of the README's table; "" if it is. Never how it came out, and
    neither whether somebody ended it: then one could end what looks bad.

    `shipped`: the digests of the scenarios that ship. What older results do not tell is taken to be
    as usual.
    """
    if result["short"]:
        return "short runs"
    if result.get("measure") != MEASURE:
        return "its figures mean something else"
    if "+changes" in result["commit"]:
        return "made from a tree that is in no commit"
    if result["seconds"] != SECONDS:
        return f"runs of {result['seconds']:g} s instead of {SECONDS:g}"
    if result.get("hosts"):
        return "made on several hosts"
    for case in result["cases"]:
        name, digest = case["scenario"], case.get("scenario_digest")
        if digest != shipped.get(name) and (digest is not None or name in CHANGED):
            return f"{name} is not the scenario that ships under this name"
        if case["plan"].get("seed", SEED) != SEED:
            return f"seed {case['plan']['seed']} instead of {SEED}"
    return ""


def scenarios_of(text: str) -> frozenset[str]:
    """Those that a document's mark names. None named: all."""
    named = frozenset(documents.words(text, MARKS))
    if unknown := named - set(scenario.names()):
        raise Permanent(f"no scenarios {', '.join(sorted(unknown))}, which {BEGIN} … --> names")
    return named


def of_scenarios(result: Mapping[str, Any], names: frozenset[str]) -> Mapping[str, Any]:
    """Its cases under these scenarios alone."""
    cases = [case for case in result["cases"] if not names or case["scenario"] in names]
    return {**result, "cases": cases}


def markdown(
    results: Sequence[Mapping[str, Any]],
    sources: Sequence[str],
    scenarios: frozenset[str] = frozenset(),
) -> str:
    """A document's tables; they name their raw files, and say if runs were short."""
    told = [(of_scenarios(r, scenarios), s) for r, s in zip(results, sources, strict=True)]
    results = [result for result, _ in told if result["cases"]]
    sources = [source for result, source in told if result["cases"]]
    if not results:
        raise Permanent("no raw result is fit for this document")
    found, parts = groups(results, Times.QUIET), []
    order = list(dict.fromkeys(g.scenario for g in found))
    pairs = {(g.scenario, g.workload) for g in found}
    for title, workload in sorted(pairs, key=lambda pair: (order.index(pair[0]), pair[1])):
        every = intervals.choices(results, (title, workload))
        mine = [
            group
            for group in found
            if (group.scenario, group.workload) == (title, workload)
            and intervals.shown(group, every)
        ]
        heads = [HEADS[name] for name in COLUMNS]
        lines = [f"**{title}**, {spoken(workload)}:", ""]
        lines += [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
        for group in mine:
            if group.refused:
                rest = " |" * (len(COLUMNS) - 2)
                lines.append(f"| {group.arm} | not run: {group.refused} |{rest}")
                continue
            row = cells(group)
            row["done"] += f" ({group.quiet})"
            if group.runs and not group.quiet:
                row |= dict.fromkeys(TIMES, UNQUIET)
            lines.append("| " + " | ".join(row[name] for name in COLUMNS) + " |")
        notes = [f"{g.arm}: {note}." for g in mine for note in g.notes]
        notes += [f"{'; '.join(choice.told for choice in every.values())}."] if every else []
        lines += ["", " ".join(notes)] if notes else []
        parts.append("\n".join(lines))
    files = ", ".join(
        f"`{name}`{' (ended before its time)' if result.get('ended') else ''}"
        for name, result in zip(sources, results, strict=True)
    )
    closing = f"Raw results: {files}; made by `python -m bench table`. {machines(results)}"
    closing += (
        " Starts are those of completed runs, and nobody knows whether the machine was quiet then."
    )
    if any(UNQUIET in part for part in parts):
        closing += (
            f" {UNQUIET.capitalize()}: others used the machine meanwhile, it was faster or slower"
            " than for every bare run, or nobody looked. Only quiet runs tell times."
        )
    return "\n\n".join([*parts, closing])


def machines(results: Sequence[Mapping[str, Any]]) -> str:
    """Which they are from, as far as a machine knows itself: one that is rebooted is the same."""
    files = Counter(map(machine, results))
    told = [f"{name} ({many} {'file' if many == 1 else 'files'})" for name, many in files.items()]
    return f"Machines that can be told apart ({len(files)}): {'; '.join(told)}."


def machine(result: Mapping[str, Any]) -> str:
    """The kind of machine that a result is from."""
    one = result["machine"]
    return f"{one['cores']} cores of {one['cpu']}, {one['memory']}, kernel {one['kernel']}"
