"""What a cluster's facts are called when they are shown: reckoned once, for all who show them.

The terminal (cli/view.py), the live page (board.py) and the metrics ask here which phases a
migration goes through, how fast a job steps, what is wrong with a node in a word, and how bad that
is. Pure.

A tone is good, busy, bad, dim or strong; a painter turns it into a colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from keepstep.model import JobId, Phase
from keepstep.orchestrator.state import Job
from keepstep.wire import Heartbeat, JobPulse

PHASES = ("allocate", "quiesce", "reform", "transfer", "verify", "resume")
"""The happy path of a migration."""
PLANNED_PHASES = ("warm", "agree", *PHASES[1:])

STATE_TONES: Mapping[str, str] = {
    "running": "good",
    "finished": "good",
    "waiting": "busy",
    "starting": "busy",
    "migrating": "busy",
    "saved": "busy",
    "held": "bad",
    "parked": "busy",
    "failed": "bad",
    "stopped": "dim",
}
_OUTCOME_TONES: Mapping[str, str] = {
    "resumed": "good",
    "moved": "good",
    "parked": "good",
    "open": "busy",
    "abandoned": "busy",
}


def outcome_tone(outcome: str) -> str:
    return _OUTCOME_TONES.get(outcome, "bad")


def seat_tone(phase: str) -> str:
    """How bad it is what view.py says of a seat."""
    if phase in ("running", "finished"):
        return "good"
    return "bad" if phase in ("empty", "fencing", "held") else "busy"


def phases_of(kind: str) -> tuple[str, ...]:
    """The happy path of a migration of this kind."""
    return PLANNED_PHASES if kind == "planned" else PHASES


def node_mark(
    *, alive: bool, left: bool, connected: bool, drained: bool, empty: bool, tainted: bool
) -> str:
    """What is wrong with a node, in a word or two; empty: nothing."""
    if not alive:
        return "left" if left else "lost"
    if not connected:
        return "agent away"
    if drained:
        return "empty" if empty else "draining"
    return "tainted" if tainted else ""


# ---------------------------------------------------------------- how fast


@dataclass(frozen=True, slots=True)
class Pace:
    """How far a job is, and how fast: heartbeats are ahead of the brain."""

    step: int
    """The newest committed step that anybody knows of; -1: none yet."""
    step_seconds: float
    """Of the slowest node; 0: nothing is known."""
    busy: str
    """What the job has declared itself busy with."""


def pulses_by_job(heartbeats: Iterable[Heartbeat]) -> dict[JobId, list[JobPulse]]:
    """What the heartbeats say of each job, one pulse per node."""
    found: dict[JobId, list[JobPulse]] = {}
    for beat in heartbeats:
        for pulse in beat.jobs:
            found.setdefault(pulse.job, []).append(pulse)
    return found


def pace(job: Job, pulses: Iterable[JobPulse]) -> Pace:
    """Of one job, by its own pulses."""
    moving = job.migration
    # While ranks move, what the old generation has committed stays true; after a restart not.
    older = moving is not None and moving.kind != "start" and moving.phase is not Phase.FALLBACK
    own = [p for p in pulses if p.generation == job.generation or (older and p.generation > 0)]
    return Pace(
        step=max([job.step, job.published_step, *(pulse.committed for pulse in own)]),
        step_seconds=max((pulse.step_seconds for pulse in own), default=0.0),
        busy=next((pulse.busy for pulse in own if pulse.busy), ""),
    )


# ---------------------------------------------------------------- what was seen


def cause_lines(incident: Mapping[str, Any]) -> Iterator[str]:
    """What was seen, a line each; an indented one has more of the line above."""
    for cause in incident["causes"]:
        who = f"rank {cause['rank']}" if cause["rank"] >= 0 else "node"
        where = f" on {cause['node']}" if cause["node"] else ""
        code = f", exit code {cause['exit_code']}" if cause["exit_code"] else ""
        step = f", step {cause['step']}" if cause["step"] >= 0 else ""
        yield f"{cause['sign']}: {who}{where}{step}{code}"
        if cause["detail"]:
            yield f"    {str(cause['detail']).strip().splitlines()[-1][:160]}"
    if not incident["causes"]:
        yield "nothing wrong: somebody asked for it"
    more = incident["causes_count"] - len(incident["causes"])
    if more > 0:
        yield f"and {more} more"
