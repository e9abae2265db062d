"""One HTML file with everything: tables, plots as inline SVG, the raw file's facts. Pure.

It loads nothing from anywhere: no scripts, no fonts, no stylesheets, so it can be mailed and kept.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench import tables

COLOURS = ("#5b6770", "#1768ac", "#c1550b", "#e0a030", "#3a7d44", "#7fae5a", "#8a4fae", "#b04a6a")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 860, 300, 60, 36, 14
NAMES = 262
"""Left of bars and dots: as wide as the longest name of a system, with what it is marked by."""

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1180px; color: #222; }
table { border-collapse: collapse; margin: 0.6em 0 1em; font-size: 12.5px; }
td, th { padding: 3px 5px; text-align: right; border-bottom: 1px solid #ddd; }
th { vertical-align: bottom; font-weight: 600; } td { white-space: nowrap; }
.wide { overflow-x: auto; }
.legend span { margin-right: 1.4em; white-space: nowrap; font-size: 13px; }
.legend b { display: inline-block; width: 10px; height: 10px; margin-right: 6px; }
td:first-child, th:first-child { text-align: left; }
.note { color: #666; } .bad { color: #a11; }
svg { background: #fafafa; border: 1px solid #e4e4e4; }
@media (prefers-color-scheme: dark) {
  body { background: #161616; color: #ddd; } svg { background: #fff; }
  td, th { border-color: #333; }
}
"""


def page(result: Mapping[str, Any], source: str) -> str:
    found = tables.apart([result])
    parts = [
        "<!doctype html><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'>",
        f"<title>bench {_safe(result['at'])}</title><style>{STYLE}</style>",
        "<h1>Keepstep's benchmark</h1>",
        _facts(result, source),
    ]
    if result["short"]:
        parts.append("<p class='bad'>Short runs: a try-out, not a measurement.</p>")
    if why := result.get("ended"):
        parts.append(f"<p class='bad'>Ended before its time: {_safe(why)}.</p>")
    for case in result["cases"]:
        workload = tables.workload_name(result, case)
        mine = [g for g in found if (g.scenario, g.workload) == (case["scenario"], workload)]
        arms = dict.fromkeys(g.arm for g in mine)
        colours = dict(zip(arms, itertools.cycle(COLOURS), strict=False))
        parts.append(f"<h2>{_safe(case['title'])} <small>{_safe(workload)}</small></h2>")
        parts.append(f"<p class='note'>{_safe(case['why'])}</p>")
        parts += [_table(mine), progress(case, colours), bars(mine, colours), dots(mine, colours)]
    return "\n".join(parts) + "\n"


def _facts(result: Mapping[str, Any], source: str) -> str:
    machine, versions = result["machine"], result["versions"]
    commit, plus, changes = result["commit"].partition("+")
    told = [
        f"{result['at']}, commit {commit[:12]}{plus}{changes}, raw file {source}",
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory']}",
        f"kernel {machine['kernel']}, load at the end {machine['load'][0]:.1f}",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
    ]
    return "<p class='note'>" + "<br>".join(map(_safe, told)) + "</p>"


def _table(mine: Sequence[tables.Group]) -> str:
    heads = "".join(f"<th>{_safe(head)}</th>" for _, head in tables.COLUMNS)
    rows = []
    for row in (tables.cells(group) for group in mine if not group.refused):
        cells = "".join(f"<td>{_safe(row[name])}</td>" for name, _ in tables.COLUMNS)
        rows.append(f"<tr>{cells}</tr>")
    told = "".join(f"<p class='note'>{_safe(note)}</p>" for note in tables.told_beside(mine))
    return f"<div class='wide'><table><tr>{heads}</tr>{''.join(rows)}</table></div>{told}"


# ---------------------------------------------------------------- plots


def progress(case: Mapping[str, Any], colours: Mapping[str, str]) -> str:
    """Steps finished over time, first repetition; a tick below for each strike."""
    first = case["repetitions"][0] if case["repetitions"] else ()
    runs = [run for run in first if run["truth"]["finished"]]
    if not runs:
        return ""
    last = max(run["truth"]["finished"][-1] for run in runs) or 1.0
    steps = int(case["plan"]["steps"])
    shapes = []
    names = [(run["arm"], colours[run["arm"]]) for run in runs]
    for number, run in enumerate(runs):
        colour = colours[run["arm"]]
        points = _thinned(run["truth"]["finished"])
        path = " ".join(f"{_x(t, last):.1f},{_y(s, steps):.1f}" for s, t in points)
        shapes.append(
            f"<polyline fill='none' stroke='{colour}' stroke-width='1.6' points='{path}'/>"
        )
        for strike in run["strikes"]:
            x = _x(strike["at"] - run["truth"]["began"], last)
            if strike["pid"] and x <= WIDTH:
                y = HEIGHT - BOTTOM + 2 + 3 * (number % 4)
                shapes.append(f"<rect x='{x:.1f}' y='{y}' width='2' height='6' fill='{colour}'/>")
    marks = [(_x(t, last), f"{t:.0f} s") for t in _round_steps(last)]
    levels = [(_y(s, steps), f"{s:.0f}") for s in _round_steps(steps)]
    title = "Steps finished over time; ticks below are strikes"
    return _legend(names) + _frame(title, marks, levels, shapes)


def bars(mine: Sequence[tables.Group], colours: Mapping[str, str]) -> str:
    """Completion time by the bare engine's, with the range."""
    rows = [g for g in mine if g.to_bare is not None]
    if len(rows) < 2:
        return ""
    most = max(g.to_bare.high for g in rows if g.to_bare) * 1.05
    shapes, height = [], 26 * len(rows) + 40
    for number, group in enumerate(rows):
        spread = group.to_bare
        assert spread is not None, "filtered above"
        y, colour = 10 + 26 * number, colours[group.arm]
        length = (WIDTH - NAMES - 90) * spread.middle / most
        low, high = (NAMES + (WIDTH - NAMES - 90) * v / most for v in (spread.low, spread.high))
        shapes += [
            f"<text x='{NAMES - 6}' y='{y + 13}' text-anchor='end'>{_safe(group.label)}</text>",
            f"<rect x='{NAMES}' y='{y}' width='{length:.1f}' height='18' fill='{colour}'/>",
            f"<line x1='{low:.1f}' x2='{high:.1f}' y1='{y + 9}' y2='{y + 9}' stroke='#000'/>",
            f"<text x='{high + 6:.1f}' y='{y + 13}'>{spread.middle:.2f}</text>",
        ]
    return _svg("Time to complete, by the bare engine without faults", height, shapes)


def dots(mine: Sequence[tables.Group], colours: Mapping[str, str]) -> str:
    """Every pause, on a logarithmic axis."""
    rows = [g for g in mine if g.pauses]
    if not rows:
        return ""
    low, high = 0.01, max(10.0, *(max(g.pauses) for g in rows)) * 1.2
    shapes, height = [], 26 * len(rows) + 44

    def x(seconds: float) -> float:
        share = math.log(max(seconds, low) / low) / math.log(high / low)
        return NAMES + (WIDTH - NAMES - 40) * share

    shapes += [
        f"<line x1='{x(tick):.1f}' x2='{x(tick):.1f}' y1='4' y2='{height - 24}' stroke='#ddd'/>"
        f"<text x='{x(tick):.1f}' y='{height - 8}' text-anchor='middle'>{tick:g} s</text>"
        for tick in (0.01, 0.1, 1.0, 10.0, 100.0)
        if tick <= high
    ]
    for number, group in enumerate(rows):
        y, colour = 20 + 26 * number, colours[group.arm]
        shapes.append(
            f"<text x='{NAMES - 6}' y='{y + 4}' text-anchor='end'>{_safe(group.label)}</text>"
        )
        shapes += [
            f"<circle cx='{x(p):.1f}' cy='{y}' r='4' fill='{colour}' fill-opacity='0.6'/>"
            for p in group.pauses
        ]
    return _svg("Pauses, each one", height, shapes)


def _thinned(times: Sequence[float], most: int = 400) -> list[tuple[int, float]]:
    """Enough points for the eye; standstills keep both their ends."""
    stride = max(1, len(times) // most)
    kept = {0, len(times) - 1, *range(0, len(times), stride)}
    typical = times[-1] / max(1, len(times))
    for at in range(1, len(times)):
        if times[at] - times[at - 1] > 3 * typical:
            kept |= {at - 1, at}
    return [(at + 1, times[at]) for at in sorted(kept)]


def _x(seconds: float, last: float) -> float:
    return LEFT + (WIDTH - LEFT - 20) * seconds / last


def _y(step: float, steps: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * step / steps


def _round_steps(most: float) -> list[float]:
    """Up to six round numbers."""
    rough = most / 5
    power = 10 ** math.floor(math.log10(rough)) if rough > 0 else 1
    size = next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
    return [size * number for number in range(int(most / size) + 1)]


def _legend(names: Sequence[tuple[str, str]]) -> str:
    """Above the plot: within it, it would lie over the lines."""
    entries = (
        f"<span><b style='background:{colour}'></b>{_safe(name)}</span>" for name, colour in names
    )
    return f"<p class='legend'>{''.join(entries)}</p>"


def _frame(
    title: str,
    marks: Sequence[tuple[float, str]],
    levels: Sequence[tuple[float, str]],
    shapes: Sequence[str],
) -> str:
    floor = HEIGHT - BOTTOM
    grid = [
        f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{TOP}' y2='{floor}' stroke='#e2e2e2'/>"
        f"<text x='{x:.1f}' y='{HEIGHT - 6}' text-anchor='middle'>{label}</text>"
        for x, label in marks
    ]
    grid += [
        f"<line x1='{LEFT}' x2='{WIDTH - 20}' y1='{y:.1f}' y2='{y:.1f}' stroke='#e2e2e2'/>"
        f"<text x='{LEFT - 6}' y='{y + 4:.1f}' text-anchor='end'>{label}</text>"
        for y, label in levels
    ]
    return _svg(title, HEIGHT, [*grid, *shapes])


def _svg(title: str, height: int, shapes: Sequence[str]) -> str:
    return (
        f"<p class='note'>{_safe(title)}</p><svg viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' "
        f"height='{height}' font-size='12' font-family='sans-serif' role='img' "
        f"aria-label='{_safe(title)}'>{''.join(shapes)}</svg>"
    )


def _safe(text: object) -> str:
    return html.escape(str(text), quote=True)
