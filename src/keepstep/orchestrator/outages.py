"""Time in which nobody decided anything, and what it is put down to. Pure.

    no leader            the last one died, or let go, and the next one had to wait for its lease
    no journal           the leader was there, and its database was not

Training goes on meanwhile. A fault that comes then finds nobody who could answer: the survivors
stand at their boundary and wait. That time is no phase of the migration that follows, and counts
against no budget and no hold; it is booked as control_plane_down, in the incident and in all.
"""

from __future__ import annotations

from keepstep.orchestrator import budgets, clocks, nodes, suspicion
from keepstep.orchestrator.events import ControlPlaneBack, TermBegan
from keepstep.orchestrator.state import OUTAGES_MAX, TERMS_MAX, Job, Outage
from keepstep.orchestrator.turn import Turn

PART = "control_plane_down"
"""The name of this time among the parts of a pause."""
SECONDS_MIN = 0.5
"""Shorter ones are what a write may take on a loaded machine."""


def term_began(turn: Turn, event: TermBegan) -> None:
    """The time since the last leader's last write, and where its entries end."""
    known = turn.cluster.terms
    if event.seq >= 0:
        known[event.term] = event.seq
        for old in sorted(known)[:-TERMS_MAX]:
            del known[old]
    _all_come_anew(turn)
    if event.down_seconds >= SECONDS_MIN:
        book(turn, event.down_seconds, f"nobody led before term {event.term}")


def back(turn: Turn, event: ControlPlaneBack) -> None:
    """The journal is there again. Who was sent away has to find us as if we had just taken over:
    until then nobody's silence is held against it, and no phase waits for it in vain."""
    book(turn, event.seconds, event.why)
    cluster = turn.cluster
    believed = [node for node, state in cluster.nodes.items() if state.alive]
    if not (event.sent_away and believed):
        return
    cluster.led_at = turn.now
    nodes.give_grace(turn, believed)
    _all_come_anew(turn)
    for name in cluster.open_jobs:
        budgets.spare(cluster.jobs[name], turn.now + suspicion.TERM_GRACE_SECONDS)


def _all_come_anew(turn: Turn) -> None:
    """The next generation of each job waits for those who have something of it to come."""
    jobs = turn.cluster.jobs
    turn.cluster.begun_with = {name: jobs[name].promised for name in turn.cluster.open_jobs}


def book(turn: Turn, seconds: float, why: str) -> None:
    """An outage of so many seconds ends now."""
    cluster = turn.cluster
    cluster.outages = (*cluster.outages, Outage(turn.now, seconds, why))[-OUTAGES_MAX:]
    cluster.down_seconds += seconds
    clocks.late(turn, seconds, PART)
    text = f"nothing could be decided for {seconds:.1f} s ({PART}): {why}"
    concerned = [job for job in map(cluster.jobs.__getitem__, cluster.open_jobs) if job.incident]
    for job in concerned or (None,):
        turn.note(text, job)


def told_late(turn: Turn, job: Job, age_seconds: float) -> None:
    """A fault that was there for so long before its incident could be opened."""
    incident, since = job.incident, turn.now - age_seconds
    if incident is None or age_seconds <= 0:
        return
    spans = [(max(since, out.at - out.seconds), out.at) for out in turn.cluster.outages]
    down = sum(end - begin for begin, end in spans if end > begin)
    if down > 0:
        incident.late_seconds += down
        incident.seconds[PART] = incident.seconds.get(PART, 0.0) + down
        text = f"this was seen {age_seconds:.1f} s ago, and for {down:.1f} s nobody could decide"
        turn.note(f"{text} ({PART})", job)
