"""Slots that somebody else got while a job was in doubt. Pure.

A rank of such a job is said to live where the journal has another job's seat by now. One of the two
is not there, and which one is told soon: its worker ends, or is in no list of its agent any more.
Until then the doubt goes on. To seat both would be two jobs on one device, and to take either for
dead may be to end the last one who has some state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from keepstep.model import Rank, Seat
from keepstep.orchestrator import rules
from keepstep.orchestrator.state import Cluster, Job, Occupant


def why_not(cluster: Cluster, job: Job, seats: Mapping[Rank, Seat], dead: Collection[Rank]) -> str:
    """Why a job cannot sit where its ranks were found; empty: it can."""
    if not rules.doubts_stand_aside(cluster):
        return ""
    for rank, seat in sorted(seats.items()):
        state = cluster.nodes.get(seat.node)
        user = state.uses.get(seat.slot) if state is not None and rank not in dead else None
        if user is not None and user.job != job.spec.job and _sits(cluster, seat, user):
            return f"slot {seat.slot} of {seat.node}, where rank {rank} was, is another job's seat"
    return ""


def _sits(cluster: Cluster, at: Seat, user: Occupant) -> bool:
    """Whether whom the books have in a slot is somebody that a job counts on."""
    job = cluster.jobs.get(user.job)
    if job is None or job.state.over or job.unsure is not None or job.roster is None:
        return False
    if user.rank < 0 or user.fenced or user.rank in job.missing:
        return False
    seats, moving = list(job.roster.seats), job.migration
    if moving is not None:
        seats = [seat for seat in seats if seat.rank not in moving.gone]
        seats += [*moving.coming.values(), *moving.leavers.values()]
    here = (user.rank, at.node, at.slot, user.incarnation)
    return any((s.rank, s.node, s.slot, s.incarnation) == here for s in seats)
