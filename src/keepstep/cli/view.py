"""What people see of a cluster: plain dictionaries in, lines of text out. Pure.

One view for `status`, `watch`, `nodes`, `explain` and the demo, made from the orchestrator's own
picture (GET /v1/cluster). A painter colours words; without one the text is plain. Long clusters
are cut to what is wrong and a count of the rest: a screen has forty lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keepstep.cli.fit import COLUMNS, HANG, fit, glued, table
from keepstep.orchestrator import shown
from keepstep.orchestrator.state import natural

Plain = Mapping[str, Any]
Painter = Callable[[str, str], str]
"""paint(text, tone): tone is good, busy, bad, dim or strong."""

NODES_SHOWN_MAX = 24
_CODES = {"good": "32", "busy": "33", "bad": "31", "dim": "2", "strong": "1"}


def plain(text: str, tone: str) -> str:
    return text


def ansi(text: str, tone: str) -> str:
    return f"\x1b[{_CODES[tone]}m{text}\x1b[0m"


# ---------------------------------------------------------------- the whole cluster


def status_lines(picture: Plain, paint: Painter = plain, columns: int = COLUMNS) -> list[str]:
    """Jobs with their seats, then what is open, then the nodes in trouble."""
    nodes = picture["nodes"]
    up = sum(1 for node in nodes.values() if node["alive"])
    lines = [f"term {picture['term']}   nodes {up}/{len(nodes)} alive"]
    if frozen := picture["frozen"]:
        since = _clock(frozen["since"])
        lines.append(paint(f"FROZEN since {since}: {frozen['why']}", "bad"))
    if doubt := picture.get("self_doubt"):
        lines.append(paint(f"IN DOUBT since {_clock(doubt['since'])}: {doubt['why']}", "bad"))
    lines += [paint(line, "dim") for line in control_plane_lines(picture)]
    if not picture["jobs"]:
        lines.append("no jobs; start one with `keepstep run`")
    for job in picture["jobs"].values():
        lines += ["", *job_lines(job, picture, paint, columns)]
    lost = [name for name, node in nodes.items() if not node["alive"] and not node["left"]]
    if lost:
        lines += ["", paint(f"lost: {_some(lost)}", "bad")]
    if left := [name for name, node in nodes.items() if node["left"]]:
        lines += ["", paint(f"left in good order: {_some(left)}", "dim")]
    drained = [f"{name} ({n['drained']})" for name, n in nodes.items() if n["drained"]]
    if drained:
        lines += ["", paint(f"drained: {_some(drained)}", "busy")]
    return fit(lines, columns)


def control_plane_lines(picture: Plain) -> list[str]:
    """When nobody could decide, and what the journal has lost."""
    control = picture["control_plane"]
    lines = []
    if outages := control["outages"]:
        last = outages[-1]
        lines.append(
            f"control plane down {_duration(control['down_seconds'])} in all, last for "
            f"{_duration(last['seconds'])} until {_clock(last['at'])}: {last['why']}"
        )
    if gaps := control["gaps"]:
        first, last = min(g["first"] for g in gaps), max(g["last"] for g in gaps)
        lines.append(f"the journal lacks entries {first} to {last}, which nodes have obeyed")
    return lines


def job_lines(
    job: Plain, picture: Plain, paint: Painter = plain, columns: int = COLUMNS
) -> list[str]:
    """One job: how it fares, where its migration is, who sits where."""
    state = str(job["state"])
    parts = [
        paint(str(job["id"]), "strong"),
        paint(state.upper(), shown.STATE_TONES.get(state, "dim")),
        f"generation {job['generation']}",
        _pace(job, picture),
        f"spares {job['spares']['ready']}/{job['spares']['wanted']}",
        f"incidents {job['incidents']}",
    ]
    if job["mode"] != "act":
        parts.append(paint(f"mode {job['mode']}", "busy"))
    if job["fallbacks"]:
        parts.append(paint(f"fallbacks {job['fallbacks']}", "bad"))
    lines = ["  ".join(map(glued, parts))]
    if job["unsure"]:
        lines.append("  " + paint(str(job["unsure"]), "bad"))
    if job["migration"]:
        lines.append("  " + migration_line(job["migration"], picture["now"], paint))
    if job["loan"]:
        lines.append("  " + paint(_loan_line(job["loan"], picture["now"]), "busy"))
    elif state == "parked":
        lines.append(paint("  its boundary is saved; it goes on when there is room", "busy"))
    lines += [
        "  " + paint(f"rank {wish['rank']} shall move; {wish['waits']}", "busy")
        for wish in job["leaving"]
        if wish["waits"]
    ]
    if state == "waiting":
        wanted = f"{job['nodes']} nodes with {job['ranks_per_node']} free slots each"
        lines.append("  " + paint(f"waits for {wanted}", "busy"))
    if job["uncovered"] and not job["over"]:
        some = ", ".join(map(str, job["uncovered"][:8])) + (" …" if job["uncovered"][8:] else "")
        text = f"state of rank {some} has no second home: its loss would be a fallback"
        lines.append("  " + paint(text, "bad"))
    if job.get("contaminated"):
        lines += ["  " + paint(text, "bad") for text in _contamination(job)]
    lines += remedy_lines(job, paint)
    if job["over"]:
        if job["detail"]:
            lines.append(f"  {str(job['detail']).strip().splitlines()[-1][:200]}")
        return fit(lines, columns)
    seats = seat_lines(job, picture, paint, columns - 2)
    return fit(lines, columns) + [f"  {line}" for line in seats]


def _contamination(job: Plain) -> list[str]:
    (first, last), kept = job["contaminated"], job["published"]["step"]
    said = [f"steps {first} to {last} are contaminated: a rank with corrupt state took part"]
    if 0 <= kept <= first and not job["over"]:
        said.append(f"`keepstep rewind {job['id']}` goes back to the checkpoint of step {kept}")
    return said


def remedy_lines(job: Plain, paint: Painter = plain) -> list[str]:
    """What would make room, if ranks of the job wait for some."""
    if not job["remedies"]:
        return []
    return ["  " + paint("what would help:", "strong"), *(f"    - {r}" for r in job["remedies"])]


def _pace(job: Plain, picture: Plain) -> str:
    pace = picture["paces"][job["id"]]
    text = f"step {pace['step']}" if pace["step"] >= 0 else "no step yet"
    if pace["step_seconds"]:
        text += f" ({_seconds(pace['step_seconds'])}/step)"
    return text + (f" busy: {pace['busy']}" if pace["busy"] else "")


def migration_line(migration: Plain, now: float, paint: Painter = plain) -> str:
    """allocate>quiesce>[reform]>…, and for how long already."""
    phase = str(migration["phase"])
    seconds = _seconds(max(0.0, now - float(migration["began_at"])))
    phases = shown.phases_of(str(migration["kind"]))
    if phase not in phases:
        return f"{paint(phase.upper(), 'bad')} for {seconds}"
    at = phases.index(phase)
    words = [
        paint(name, "good") if i < at else paint(f"[{name}]", "busy") if i == at else name
        for i, name in enumerate(phases)
    ]
    return f"{migration['kind']} migration: {'>'.join(words)}  {seconds}"


# ---------------------------------------------------------------- ranks x nodes


def seat_lines(
    job: Plain, picture: Plain, paint: Painter = plain, columns: int = COLUMNS
) -> list[str]:
    """A line per node that holds a seat or a standby of the job, a cell per slot."""
    phases = {(seat["node"], seat["slot"]): seat for seat in _all_seats(job)}
    standbys = {(s["node"], s["slot"]): s for s in job["spares"]["standbys"]}
    names = sorted({node for node, _ in (*phases, *standbys)}, key=natural)
    rows: list[tuple[bool, str]] = []
    width = max((len(name) for name in names), default=0)
    for name in names:
        node = picture["nodes"].get(name)
        slots = range(node["slots"]) if node else sorted(s for n, s in phases if n == name)
        cells = [_cell(phases.get((name, s)), standbys.get((name, s)), paint) for s in slots]
        mark = _node_mark(node, name, picture)
        well = not mark and all(tone == "good" for _, tone in cells)
        tail = f"  {paint(mark, 'bad')}" if mark else ""
        told = " ".join(glued(text) for text, _ in cells)
        rows.append((well, f"{name.ljust(width)}  {HANG}{told}{tail}"))
    return fit(_cut(rows), columns)


def _all_seats(job: Plain) -> list[Plain]:
    """Those of the roster, and of a planned move: where ranks go to, or wait to leave."""
    moving = job["migration"] or {}
    waiting = [{**seat, "phase": "coming"} for seat in moving.get("coming", ())]
    waiting += [{**seat, "phase": "leaving"} for seat in moving.get("leavers", ())]
    return [*waiting, *job["seats"]]


def _cell(seat: Plain | None, standby: Plain | None, paint: Painter) -> tuple[str, str]:
    """One slot, ten characters wide, and its tone."""
    if seat is not None:
        phase = str(seat["phase"])
        tone = shown.seat_tone(phase)
        # A rank that has moved shows its incarnation: 3'2 is the third worker on rank 3.
        moved = f"'{seat['incarnation']}" if seat["incarnation"] else ""
        return paint(f"{seat['rank']}{moved} {_short(phase)}".ljust(12), tone), tone
    if standby is not None:
        ready = "spare" if standby["ready"] else "warming"
        return paint(f"+ {ready}".ljust(12), "good" if standby["ready"] else "busy"), "good"
    return paint("-".ljust(12), "dim"), "good"


def _node_mark(node: Plain | None, name: str, picture: Plain) -> str:
    if node is None:
        return "unknown"
    return shown.node_mark(
        alive=node["alive"],
        left=node["left"],
        connected=name in picture["connected"],
        drained=bool(node["drained"]),
        empty=node["empty"],
        tainted=bool(node["taint"]),
    )


def _cut(rows: Sequence[tuple[bool, str]]) -> list[str]:
    """All rows if they fit; otherwise those in trouble first, and a count of the rest."""
    if len(rows) <= NODES_SHOWN_MAX:
        return [text for _, text in rows]
    chosen = sorted(rows, key=lambda row: row[0])[:NODES_SHOWN_MAX]
    unwell = sum(1 for well, _ in rows if not well)
    rest = len(rows) - len(chosen)
    hidden = max(0, unwell - NODES_SHOWN_MAX)
    note = f"… and {rest} more nodes" + (
        f", {hidden} of them in trouble" if hidden else ", all well"
    )
    return [*(text for _, text in chosen), note]


# ---------------------------------------------------------------- nodes


def node_lines(picture: Plain, paint: Painter = plain, columns: int = COLUMNS) -> list[str]:
    """Every node: its state, its slots, who uses them."""
    rows = []
    for name, node in picture["nodes"].items():
        mark = _node_mark(node, name, picture)
        state = paint(mark or "ready", "bad" if mark else "good")
        labels = [f"{key}={value}" for key, value in sorted(node["labels"].items())]
        told = [_use(use) for use in node["uses"] if use["job"] or use["taint"]]
        if node["taint"]:
            told.append(f"tainted({node['taint']})")
        told += [f"[{','.join(labels)}]"] if labels else []
        numbers = [str(node["slots"]), str(node["free"]), str(node["faults"] or "-")]
        rows.append([name, state, str(node["address"]), *numbers, " ".join(told)])
    if not rows:
        return ["no nodes; a machine joins with `keepstep join` or `keepstep run`"]
    heads = ("node", "state", "address", "slots", "free", "faults", "uses [labels]")
    return fit(table(heads, rows), columns)


def taint_lines(picture: Plain, paint: Painter = plain, columns: int = COLUMNS) -> list[str]:
    """What is not to be used, how badly, until when, and why."""
    rows = []
    for taint in picture["taints"]:
        left = _duration(taint["until"] - picture["now"])
        severity = paint(taint["severity"], "bad" if taint["severity"] != "avoid" else "busy")
        rows.append([taint["place"], severity, left, taint["source"], taint["reason"]])
    if not rows:
        return ["no taints: every place may be used"]
    return fit(table(("place", "severity", "left", "source", "reason"), rows), columns)


def loan_lines(picture: Plain, paint: Painter = plain, columns: int = COLUMNS) -> list[str]:
    """Who lent what to whom, and for how long: newest last."""
    rows = []
    for loan in picture["loans"]:
        began, ended = loan["began_at"], loan["ended_at"]
        who = [loan["lender"], loan["borrower"], str(loan["devices"]), str(loan["needed"])]
        if began is None:
            rows.append([*who, "-", "-", paint("is being parked", "busy")])
            continue
        lasted = _duration((ended or picture["now"]) - began)
        tail = lasted if ended else paint(f"{lasted}, and still parked", "busy")
        rows.append([*who, str(loan["boundary"]), _clock(began), tail])
    if not rows:
        return ["no loans: no job was parked for another one"]
    heads = ("lender", "borrower", "devices", "needed", "boundary", "since", "for")
    return fit(table(heads, rows), columns)


def _loan_line(loan: Plain, now: float) -> str:
    what = f"{loan['devices']} devices to {loan['borrower']}"
    if loan["began_at"] is None:
        return f"is being parked, to lend {what}"
    return (
        f"parked at boundary {loan['boundary']} for {_duration(now - loan['began_at'])}, lends "
        f"{what}; goes on when there is room"
    )


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _use(use: Plain) -> str:
    if use["taint"] and not use["job"]:
        return f"{use['slot']}:tainted({use['taint']})"
    who = "standby" if use["standby"] else glued(f"rank {use['rank']}")
    taint = f"(tainted: {use['taint']})" if use["taint"] else ""
    return f"{use['slot']}:{use['job']}/{who}{taint}" + ("(fenced)" if use["fenced"] else "")


# ---------------------------------------------------------------- incidents


def incident_lines(incident: Plain, paint: Painter = plain, columns: int = COLUMNS) -> list[str]:
    """The story of one incident: what was seen, what was decided and why, what the pause was."""
    outcome = str(incident["outcome"])
    tone = shown.outcome_tone(outcome)
    pause = incident["pause_seconds"]
    lines = [
        f"{paint(str(incident['id']), 'strong')}  job {incident['job']}  {paint(outcome, tone)}"
        + (f"  after {_seconds(pause)}" if pause is not None else ""),
        f"opened {_clock(incident['opened_at'])}"
        + (f", generation {incident['generation']}" if incident["generation"] else "")
        + (f", boundary {incident['boundary']}" if incident["boundary"] >= 0 else ""),
        "",
        "what was seen",
        *(f"  {line}" for line in shown.cause_lines(incident)),
        "",
        "what was decided, and why",
    ]
    for at, phase, why in incident["story"]:
        offset = f"+{at - incident['opened_at']:.3f}s"
        lines.append(f"  {offset:>10}  {phase:<10} {HANG}{why}")
    lines += ["", "the pause by part", *(f"  {line}" for line in pause_lines(incident))]
    return fit(lines, columns)


def pause_lines(incident: Plain, width: int = 40) -> list[str]:
    """Seconds by phase, each with its bar."""
    parts = dict(incident["seconds"])
    total = sum(parts.values())
    if not parts:
        return ["nothing measured yet"]
    known = [name for name in (*shown.PHASES, "hold", "save", "fallback") if name in parts]
    order = known + sorted(parts.keys() - set(known))
    lines, wide = [], max(10, *map(len, order))
    for name in order:
        bar = "#" * round(width * parts[name] / total) if total else ""
        lines.append(f"{name:<{wide}} {_seconds(parts[name]):>9}  {bar}".rstrip())
    return [*lines, f"{'together':<{wide}} {_seconds(total):>9}"]


# ---------------------------------------------------------------- the live view


def frame_lines(
    picture: Plain,
    recent: Sequence[Plain],
    height: int,
    paint: Painter = plain,
    columns: int = COLUMNS,
) -> list[str]:
    """One screen of `watch`: the state above, the newest reasons below."""
    top = status_lines(picture, paint, columns)
    room = max(3, height - len(top) - 3)
    reasons = [record for record in recent if record["why"]]
    told = fit((record_line(record, paint) for record in reasons[-room:]), columns)
    head = [*top[: max(0, height - room - 2)], "", paint("decisions", "strong")]
    return [*head, *told[-room:]][:height]


def record_line(record: Plain, paint: Painter = plain) -> str:
    """One decision: when, which job, which phase, why."""
    jobs = " ".join(f"{job}[{phase}]" for job, phase in record.get("phases", {}).items())
    subject = jobs or record.get("node") or "cluster"
    return f"{paint(_clock(record['at']), 'dim')}  {subject}  {record['why']}"


def _some(names: Sequence[str], shown_max: int = 8) -> str:
    rest = len(names) - shown_max
    return ", ".join(names[:shown_max]) + (f" and {rest} more" if rest > 0 else "")


def _short(phase: str) -> str:
    return "ok" if phase == "running" else phase.partition(":")[0]


def _seconds(value: float) -> str:
    if value < 1.0:
        return f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
