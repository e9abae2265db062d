"""The report's pictures as SVG, drawn by hand: no library, no script, nothing to fetch. Pure.

Colours are classes of the page's style sheet, so that one picture serves light and dark. Each shape
carries a <title>: a pointer resting on it, and a screen reader, get the same words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from keepstep.ledger.account import Account, IncidentAccount
from keepstep.ledger.goodput import Spent
from keepstep.ledger.report import LABELS, class_rows, duration

WIDTH = 960
"""Units of the drawings; the page scales them."""
LEFT = 250
"""Where bars begin: labels are to the left."""
TINY = 0.4
"""Narrower shapes than this are drawn so wide, or nobody would see an incident of a long run."""
ROWS_MAX = 80
"""Bars of incidents; the longest pauses are drawn if there are more."""

GROUPS: Mapping[str, str] = {
    "useful": "useful",
    "retried": "lost",
    "detection": "lost",
    "allocate": "move1",
    "quiesce": "move2",
    "reform": "move3",
    "transfer": "move4",
    "resume": "move5",
    "held": "held",
    "control_plane_down": "held",
    "fallback": "bad",
    "recompute": "bad",
    "stalled": "bad",
    "checkpoint_save": "declared",
    "declared_busy": "declared",
    "startup": "quiet",
    "ending": "quiet",
    "waiting": "unpaid",
    "parked": "unpaid",
    "idle_spare": "unpaid",
}
LEGEND: Sequence[tuple[str, str]] = (
    ("useful", "new steps"),
    ("lost", "broken attempt, detection"),
    ("move1", "choosing a spare"),
    ("move2", "to a boundary"),
    ("move3", "re-forming"),
    ("move4", "moving state"),
    ("move5", "first step"),
    ("held", "held, or nobody to decide"),
    ("bad", "fallback, made again, gaps"),
    ("declared", "saves, declared"),
    ("quiet", "start-up, ending"),
    ("unpaid", "idle, not paid"),
)
_SECOND = 1_000_000_000


def legend(found: Account) -> str:
    """Only what occurs."""
    there = {GROUPS.get(name, "quiet") for name in found.classes}
    drawn = [(group, text) for group, text in LEGEND if group in there]
    items = (f'<li><i class="{group}"></i>{escape(text)}</li>' for group, text in drawn)
    return f'<ul class="legend">{"".join(items)}</ul>'


def timeline(found: Account) -> str:
    """The run from left to right; each incident that counts has a mark above it."""
    begin, end = found.began_at, max(found.ended_at, found.began_at + 1e-9)
    scale = WIDTH / (end - begin)
    shapes = []
    for segment in found.timeline:
        x = (segment.begin / _SECOND - begin) * scale
        width = max(TINY, segment.nanoseconds / _SECOND * scale)
        words = f"{LABELS[segment.spent]}: {duration(segment.nanoseconds / _SECOND)}"
        if segment.spent is not Spent.USEFUL:
            words += f" ({segment.incident})" if segment.incident else ""
        shapes.append(_rect(x, 26, width, 44, GROUPS[segment.spent], words))
    for each in found.incidents:
        x = (each.opened_at - begin) * scale
        kind = {"resolved": "useful", "planned": "declared", "excluded": "quiet"}
        colour = kind.get(each.standing, "bad")
        words = f"{each.incident}: {each.what}, {each.standing}, pause {duration(each.rto_seconds)}"
        shapes.append(
            f'<path class="{colour}" d="M{x:.1f} 24l-4 -9h8z"><title>{escape(words)}</title></path>'
        )
    ticks = _ticks(end - begin)
    shapes += [_text(t * scale, 88, _mark(t), _anchor(t, end - begin)) for t in ticks]
    return _svg(96, shapes, f"timeline of job {found.job}, {len(found.incidents)} incidents")


def waterfall(found: Account) -> str:
    """Each pause, phase by phase, all on one scale."""
    rows = [each for each in found.incidents if each.parts]
    if not rows:
        return "<p>No pause.</p>"
    drawn = rows
    if len(rows) > ROWS_MAX:
        longest = sorted(rows, key=lambda each: -each.rto_seconds)[:ROWS_MAX]
        drawn = [each for each in rows if each in longest]
    scale = (WIDTH - LEFT - 70) / max(0.001, *(each.rto_seconds for each in drawn))
    shapes = []
    for at, each in enumerate(drawn):
        y = 4 + at * 20
        shapes.append(_text(LEFT - 10, y + 13, _short(each), "end"))
        x = float(LEFT)
        for name, seconds in each.parts.items():
            words = f"{each.incident}, {LABELS[name]}: {duration(seconds)}"
            shapes.append(_rect(x, y, seconds * scale, 16, GROUPS[name], words))
            x += seconds * scale
        shapes.append(_text(x + 6, y + 13, duration(each.rto_seconds), "start"))
    more = f"<p>The {len(drawn)} longest of {len(rows)}.</p>" if len(drawn) < len(rows) else ""
    return _svg(10 + 20 * len(drawn), shapes, "each pause by phase") + more


def _short(each: IncidentAccount) -> str:
    text = f"{each.incident} {each.what}"
    return text if len(text) <= 36 else text[:35] + "…"


def over_time(found: Account) -> str:
    """Goodput along the run, from 0 to 100 %."""
    if not found.over_time:
        return ""
    begin, length = found.began_at, max(found.ended_at - found.began_at, 1e-9)
    left, right, top, bottom = 44.0, WIDTH - 6.0, 8.0, 168.0
    shapes = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = bottom - share * (bottom - top)
        shapes.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        shapes.append(_text(left - 6, y + 4, f"{share:.0%}", "end"))
    points = [
        (left + (at - begin) / length * (right - left), bottom - share * (bottom - top))
        for at, share in found.over_time
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    area = f"{points[0][0]:.1f},{bottom} {path} {points[-1][0]:.1f},{bottom}"
    shapes.append(
        f'<polygon class="area" points="{area}"/><polyline class="line" points="{path}"/>'
    )
    for (x, y), (_, share) in zip(points, found.over_time, strict=True):
        words = f"<title>{share:.1%}</title>"
        shapes.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="6">{words}</circle>')
    for t in _ticks(length):
        x = left + t / length * (right - left)
        shapes.append(_text(x, bottom + 18, _mark(t), _anchor(t, length)))
    return _svg(192, shapes, f"goodput over time; {found.goodput:.1%} over all")


def classes(found: Account) -> str:
    """Where the time went, the largest first."""
    names = sorted(found.classes, key=lambda name: -found.classes[name])
    rows = class_rows(found)
    most = max((share for _, _, share in rows), default=1.0) or 1.0
    shapes = []
    for at, (name, (label, seconds, share)) in enumerate(zip(names, rows, strict=True)):
        y, width = 4 + at * 24, share / most * (WIDTH - LEFT - 190)
        words = f"{label}: {seconds:,.1f} rank-seconds, {share:.2%}"
        shapes.append(_text(LEFT - 10, y + 14, label, "end"))
        shapes.append(_rect(LEFT, y, max(width, 1.0), 18, GROUPS[name], words))
        shapes.append(_text(LEFT + width + 8, y + 14, f"{share:.1%}, {_rounded(seconds)}", "start"))
    return _svg(10 + 24 * len(rows), shapes, "rank-seconds by class")


def _rect(x: float, y: float, width: float, height: float, colour: str, words: str) -> str:
    return (
        f'<rect class="{colour}" x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height}">'
        f"<title>{escape(words)}</title></rect>"
    )


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _mark(seconds: float) -> str:
    """Along an axis: ticks are whole seconds."""
    return f"{seconds:.0f} s" if seconds < 60 else duration(seconds).removesuffix(" 0 s")


def _rounded(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _anchor(at: float, length: float) -> str:
    if at <= 0:
        return "start"
    return "end" if at >= length * 0.97 else "middle"


def _ticks(length: float) -> list[float]:
    """Five round moments, or so, with the start."""
    units = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 43_200, 86_400)
    step = next((unit for unit in units if length / unit <= 6), max(1.0, length / 5))
    return [step * n for n in range(int(length // step) + 1)]


def _svg(height: float, shapes: Iterable[str], words: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(words)}">'
        f"{''.join(shapes)}</svg>"
    )
