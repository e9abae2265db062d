"""What people see of a job's policy: a plain dictionary in, small tables out. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from keepstep.cli.view import Painter, Plain, plain
from keepstep.config import toml

_TONES = {"migrate": "good", "nothing": "good", "waits": "busy"}


def lines(answer: Plain, paint: Painter = plain) -> list[str]:
    """The policy, the budgets, and each forecast."""
    told = [f"{paint(str(answer['job']), 'strong')}  {str(answer['state']).upper()}"]
    if answer["frozen"]:
        told.append(paint(f"the cluster is frozen ({answer['frozen']}): all of it waits", "bad"))
    if answer["policy"]["mode"]["value"] == "observe":
        told.append(paint("mode = observe: what follows is written down, and not done", "busy"))
    told += ["", paint("policy", "strong"), *_indented(_policy_rows(answer["policy"]))]
    told += ["", paint("budgets now", "strong"), *_indented(_budget_rows(answer["budgets"]))]
    for forecast in answer["forecasts"]:
        told += ["", *_forecast_lines(forecast, paint)]
    return told


def _policy_rows(policy: Plain) -> list[tuple[str, ...]]:
    return [
        (name, toml(one["value"]), "" if one["value"] == one["default"] else _default(one))
        for name, one in policy.items()
    ]


def _default(one: Plain) -> str:
    return f"(default {toml(one['default'])})"


def _budget_rows(budgets: Plain) -> list[tuple[str, ...]]:
    return [
        (phase, f"{budget['seconds']:.1f} s", str(budget["why"]))
        for phase, budget in budgets.items()
    ]


def _forecast_lines(forecast: Plain, paint: Painter) -> Iterator[str]:
    outcome = str(forecast["outcome"])
    tone = _TONES.get(outcome, "bad")
    yield f"{paint(_named(str(forecast['fault'])), 'strong')}: {paint(outcome, tone)}"
    if forecast["moves"]:
        rows = [("rank", "from", "to", "why")]
        rows += [
            (str(move["rank"]), _place(move["from"]), _place(move["to"]), str(move["why"]))
            for move in forecast["moves"]
        ]
        yield from _indented(rows)
    if forecast["without_spare"]:
        yield f"  no spare for rank {', '.join(map(str, forecast['without_spare'][:16]))}"
    for sentence in forecast["says"]:
        yield f"  - {sentence}"
    if forecast["remedies"]:
        yield "  what would make a spare:"
        yield from (f"    {remedy}" for remedy in forecast["remedies"])


def _named(fault: str) -> str:
    kind, _, what = fault.partition(":")
    known = {
        "rank": f"if rank {what} dies",
        "node": f"if node {what} is lost",
        "domain": f"if domain {what} is lost",
        "drain": f"if {what} is drained",
    }
    return known.get(kind, fault)


def _place(seat: Plain) -> str:
    return f"{seat['node']} slot {seat['slot']}"


def _indented(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns as wide as they need to be."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
