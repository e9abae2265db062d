"""Observations into one fault: who is dead, who must be killed first, or that nobody is to blame.

`fold` and its kin keep the evidence of a job (broken collectives, stalls) and say when it adds up.
They never order anything; they return a Fault, or None while there is nothing to act upon.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from keepstep.model import CHECK_STEPS, NodeId, Rank, Sign
from keepstep.orchestrator import policy, rules
from keepstep.orchestrator.state import DETAIL_CHARS_MAX, Cause, Cluster, Job, Stall
from keepstep.wire import Observed, Stalled, StallFact


@dataclass(frozen=True, slots=True)
class Fault:
    """What a migration has to deal with. Nobody dead and nobody to kill: form the groups anew."""

    causes: tuple[Cause, ...]
    why: str
    dead: tuple[Rank, ...] = ()
    kill: tuple[Rank, ...] = ()
    settle_seconds: float = 0.0


def cause_of(event: Observed) -> Cause:
    return Cause(
        event.sign,
        event.rank,
        event.node,
        event.incarnation,
        event.step,
        event.exit_code,
        event.detail[-DETAIL_CHARS_MAX:],
    )


def stale(job: Job, event: Observed) -> str:
    """Why an observation about a rank is not about its present worker; empty if it is."""
    assert job.roster is not None
    if not 0 <= event.rank < len(job.roster.seats):
        return f"rank {event.rank} is no seat of {job.spec.job}"
    seat = job.roster.seats[event.rank]
    if event.incarnation != seat.incarnation:
        return (
            f"{event.sign} of incarnation {event.incarnation} of rank {event.rank} ignored: "
            f"incarnation {seat.incarnation} has the seat"
        )
    if event.node != seat.node:
        return f"{event.sign} of rank {event.rank} from {event.node} ignored: it is on {seat.node}"
    if job.migration is not None and event.rank in job.migration.gone:
        return f"{event.sign} of rank {event.rank} ignored: it is known to be gone"
    return ""


def died(cause: Cause) -> Fault:
    """A worker ended on its own."""
    if policy.ran_out_of_memory(cause):
        what = f"was killed for lack of memory at step {cause.step}"
    elif cause.sign is Sign.EXCEPTION:
        what = f"raised an exception at step {cause.step}"
    else:
        what = f"exited with {policy.ending(cause.exit_code)} at step {cause.step}"
    why = f"rank {cause.rank} on {cause.node} {what}"
    return Fault((cause,), why, dead=(cause.rank,))


def contaminated(job: Job, step: int) -> tuple[int, ...]:
    """The steps that corrupt state, found at this boundary, may have spoilt for all ranks.

    State is compared every so many steps, and was right the last time. With a look before every
    step it was found before anybody used it.
    """
    every = job.spec.environment.get(CHECK_STEPS, "")
    if not (every.isascii() and every.isdigit()) or int(every[:9]) < 2 or step < 1:
        return job.contaminated
    found = (*job.contaminated, max(0, step - int(every[:9])), step - 1)
    return min(found), max(found)


def nodes_lost(job: Job, lost: Mapping[NodeId, str]) -> Fault:
    """All seats of a job on these nodes are dead at once: one fault."""
    assert job.roster is not None
    gone = job.migration.gone if job.migration else {}
    seats = [
        seat
        for seat in job.roster.seats
        if seat.node in lost and seat.rank not in gone and seat.rank not in job.finished
    ]
    causes = tuple(
        Cause(Sign.EXIT, seat.rank, seat.node, seat.incarnation, job.step, detail=lost[seat.node])
        for seat in seats
    )
    ranks = tuple(seat.rank for seat in seats)
    listed = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    nodes = list(lost)
    named = ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")
    are = f"nodes {named} are" if len(nodes) > 1 else f"node {named} is"
    return Fault(causes, f"{are} lost with ranks {listed} ({lost[nodes[0]]})", dead=ranks)


def note_broken(job: Job, why: str, now: float) -> bool:
    """Keep the first word of this generation that nobody trains; True if it was the first."""
    if job.broken_at >= 0:
        return False
    job.broken_at, job.broken_why = now, why
    return True


def broken_due(job: Job, now: float) -> Fault | None:
    """Broken collectives for which nobody turned out to be dead."""
    if job.broken_at < 0 or now < job.broken_at + policy.BROKEN_SECONDS_MAX:
        return None
    cause = Cause(Sign.BROKEN, detail=job.broken_why)
    return Fault((cause,), f"{job.broken_why}; no culprit within {policy.BROKEN_SECONDS_MAX:g} s")


def last_ones_stopped(cluster: Cluster, job: Job, facts: Iterable[StallFact]) -> bool:
    """Others have finished. Who stands still may be busy with what follows the last step, unless it
    or somebody for whom it may wait is stopped."""
    stopped = any(fact.stopped for fact in facts if fact.rank not in job.finished)
    stopped = stopped or any(stall.stopped for stall in job.stalls.values())
    return stopped and rules.last_ones_count(cluster)


def note_stalled(job: Job, event: Stalled, now: float) -> None:
    """Collect who stands still. Other numbers than before: that rank moved, and its record is new.

    When a rank has moved, the job was not standing still: all older records go.
    """
    for fact in event.ranks:
        known = job.stalls.get(fact.rank)
        if known is not None and (known.step, known.launched) != (fact.step, fact.launched):
            job.stalls = {}
            job.stalls_at = -1.0
        job.stalls[fact.rank] = Stall(fact.incarnation, fact.step, fact.launched, fact.stopped, now)
    if job.stalls and job.stalls_at < 0:
        job.stalls_at = now


def stall_due(job: Job, now: float, *, ticking: bool) -> Fault | None:
    """The laggards, once every rank is known to stand still or one is known to be stopped.

    While ranks are missing only a tick looks further, or each of many reports would look at all.
    """
    if not job.stalls or job.roster is None:
        return None
    expected = len(job.roster.seats) - len(job.finished)
    settled = now >= job.stalls_at + job.spec.policy.hang_settle_seconds
    if len(job.stalls) < expected and not (ticking and settled):
        return None
    fresh = {
        rank: stall
        for rank, stall in job.stalls.items()
        if now - stall.at <= policy.STALL_FRESH_SECONDS
        and stall.incarnation == job.roster.seats[rank].incarnation
    }
    if len(fresh) < len(job.stalls):
        job.stalls = fresh
        job.stalls_at = min((s.at for s in fresh.values()), default=-1.0)
    stopped = sorted(rank for rank, stall in fresh.items() if stall.stopped)
    # Of the last ones somebody may still be at work on what follows the last step.
    early = job.finished or not (stopped and settled)
    if (len(fresh) < expected and early) or (job.finished and not stopped):
        return None
    return _laggards(job, fresh, stopped)


def _laggards(job: Job, stalls: dict[Rank, Stall], stopped: list[Rank]) -> Fault:
    assert job.roster is not None
    least = min(stall.launched for stall in stalls.values())
    # Only who has come least far: those between it and the front wait for it as well.
    behind = sorted(rank for rank, stall in stalls.items() if stall.launched == least)
    culprits = stopped or (behind if len(behind) < len(stalls) else [])
    # Who has finished took its state along: it is not among the many that the few hold up.
    too_many = 2 * len(culprits) > len(job.roster.seats) - len(job.finished)
    if culprits and too_many and job.finished:
        return _last_ones(job, culprits)
    if not culprits or too_many:
        # Most ranks behind a few: killing the many would kill the state. Nobody is named.
        cause = Cause(Sign.HANG, step=job.step, detail="no laggard among the ranks")
        return Fault((cause,), f"all {len(stalls)} ranks stand still and no few of them lag behind")
    seats = job.roster.seats
    causes = tuple(
        Cause(Sign.HANG, rank, seats[rank].node, seats[rank].incarnation, stalls[rank].step)
        for rank in culprits
    )
    named = ", ".join(f"{rank} on {seats[rank].node}" for rank in culprits[:8])
    how = "is stopped" if stopped else "lags behind the others"
    step = stalls[culprits[0]].step
    return Fault(causes, f"rank {named} {how} at step {step}", kill=tuple(culprits))


def _last_ones(job: Job, stopped: list[Rank]) -> Fault:
    """Only they are left, and their state is the last: nobody is killed before they had time."""
    assert job.roster is not None
    seats = job.roster.seats
    named = ", ".join(f"{rank} on {seats[rank].node}" for rank in stopped[:8])
    why = f"rank {named} is stopped, and all others have finished"
    causes = tuple(
        Cause(Sign.HANG, rank, seats[rank].node, seats[rank].incarnation, job.stalls[rank].step)
        for rank in stopped
    )
    return Fault(causes, why)
