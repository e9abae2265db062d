"""The account in words: for a terminal and as Markdown. Pure; webpage.py draws it.

Both say the same sentences, in the order in which a reader asks: was the promise kept, how much of
the time was useful, where did the rest go, what happened in each incident.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from keepstep.ledger.account import Account, IncidentAccount, Saved, Spread

LABELS: Mapping[str, str] = {
    "useful": "useful: new committed steps",
    "retried": "attempts that a fault broke off",
    "detection": "until a fault was noticed",
    "allocate": "choosing a spare",
    "quiesce": "coming to a boundary",
    "reform": "re-forming groups",
    "transfer": "moving and verifying state",
    "resume": "back to the first step",
    "held": "held for a spare",
    "control_plane_down": "control plane down",
    "fallback": "starting anew from a checkpoint",
    "recompute": "committed steps made again",
    "stalled": "gaps that nobody explains",
    "checkpoint_save": "checkpoint saves",
    "declared_busy": "declared busy",
    "startup": "start-up",
    "ending": "after the last step",
    "waiting": "waiting for nodes (not paid)",
    "parked": "parked for another job (not paid)",
    "idle_spare": "spares that stood by",
}
_SECOND = 1_000_000_000


def plain(text: str) -> str:
    """Names come from users: nothing in them may steer a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _escaped(text: str) -> str:
    """The same for Markdown, whose readers also render HTML."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|" else c for c in plain(text))


def title(found: Account) -> str:
    state = "over" if found.over else "running"
    length = duration(found.ended_at - found.began_at)
    return (
        f"job {plain(found.job)}: {found.world} ranks, {found.steps:,} steps in {length}, {state}"
    )


def sentences(found: Account, saved: Saved | None = None) -> Iterator[str]:
    """What a manager reads."""
    yield promise(found)
    yield (
        f"Goodput {found.goodput:.1%}: so much of the time in which the job had its devices went "
        f"into new steps ({found.goodput_with_spares:.1%} if idle spares are counted; ETTR "
        f"{found.ettr:.1%})."
    )
    if found.mttf_seconds is not None:
        yield (
            f"A failure came every {duration(found.mttf_seconds)}. Training stood still for "
            f"{duration(found.rto.p50)} at the median, {duration(found.rto.max)} at most; "
            f"{_steps(found)}."
        )
    else:
        yield "No failure came."
    if saved is not None and saved.faults:
        yield (
            f"Against checkpoint and restart: {saved.device_hours:,.1f} device-hours kept, "
            f"${saved.money:,.0f} ({saved.formula})."
        )
    if found.work is not None:
        mfu = f", MFU {found.work.mfu:.1%}" if found.work.mfu else ""
        pace = f"{found.work.tokens_per_second_per_device:,.0f} tokens/s per device"
        yield f"{pace}{mfu}, pauses included."


def promise(found: Account) -> str:
    """The guarantee in one sentence."""
    kept = found.guarantee
    if not kept.counted:
        return f"Nothing failed that counts; {found.terms.promised:.0%} were promised live."
    end = "kept" if kept.rate >= found.terms.promised else "MISSED"
    end += "" if kept.finished else " so far"
    owed = f"; {kept.credit:.0%} of the fees are owed" if kept.credit else ""
    return (
        f"{kept.resolved} of {kept.counted} failures resolved live with no lost progress: "
        f"{kept.rate:.1%} ({found.terms.confidence:.0%} interval {kept.low:.1%} to {kept.high:.1%}"
        f"), promised {found.terms.promised:.0%}: {end}{owed}."
    )


def _steps(found: Account) -> str:
    lost = sum(each.rpo_steps for each in found.incidents)
    return "no committed step was made twice" if not lost else f"{lost} steps were made twice"


def class_rows(found: Account) -> list[tuple[str, float, float]]:
    """Label, rank-seconds, share of the whole; the largest first."""
    rows = sorted(found.classes.items(), key=lambda item: -item[1])
    whole = max(1, found.total)
    return [(LABELS.get(name, name), value / _SECOND, value / whole) for name, value in rows]


def incident_row(each: IncidentAccount) -> list[str]:
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in each.parts.items())
    return [
        each.incident,
        each.standing,
        duration(each.rto_seconds),
        str(each.rpo_steps),
        f"{each.what}: {parts or each.why}",
    ]


INCIDENT_HEADS = ("INCIDENT", "COUNTS AS", "PAUSE", "LOST", "WHAT, AND SECONDS BY PHASE")


def spread_row(name: str, found: Spread, unit: str) -> list[str]:
    numbers = (found.p50, found.p95, found.mean, found.max)
    return [name, *(f"{value:.2f} {unit}" if unit else f"{value:g}" for value in numbers)]


def markdown(found: Account, saved: Saved | None = None) -> str:
    """The same as a document."""
    out = [f"# {_escaped(title(found))}", ""]
    out += [f"- {sentence}" for sentence in sentences(found, saved)]
    out += [f"- Note: {note}." for note in found.notes]
    out += ["", "## Where the time went", ""]
    rows = [[name, f"{seconds:,.1f}", f"{share:.1%}"] for name, seconds, share in class_rows(found)]
    rows.append(["sum", f"{found.total / _SECOND:,.1f}", "100.0%"])
    out += _table(["class", "rank-seconds", "share"], rows)
    out += ["", "## Pauses", ""]
    out += _table(
        ["", "p50", "p95", "mean", "max"],
        [spread_row("RTO", found.rto, "s"), spread_row("RPO (steps)", found.rpo, "")],
    )
    out += ["", "## Incidents", ""]
    out += _table([head.lower() for head in INCIDENT_HEADS], map(incident_row, found.incidents))
    declared = found.guarantee.declared
    listed = ", ".join(f"{_escaped(name)} {seconds:.1f} s" for name, seconds in declared.items())
    out += ["", f"Declared pauses: {listed or 'none'}.", ""]
    return "\n".join(out)


def _table(heads: Sequence[str], rows: object) -> list[str]:
    assert hasattr(rows, "__iter__")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def duration(seconds: float) -> str:
    """As people say it."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours / 24:.1f} days"


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
