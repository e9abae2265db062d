"""How long each phase may take, and who is to blame when it takes longer. Pure.

Most of a job at once is never to blame: in a collective phase one rank holds up all, and killing
those that wait would kill the state with them.
"""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.model import Phase, Rank, Sign
from keepstep.orchestrator import policy
from keepstep.orchestrator.incidents import Fault
from keepstep.orchestrator.state import Cause, Job, Migration

AGREE_SECONDS_MAX = 10.0
"""Workers answer from a thread of their own, at once; the leavers' move does not wait for more."""


def allocate(job: Job) -> float:
    migration = job.migration
    assert migration is not None
    return max(migration.settle_until, migration.phase_at + policy.FENCE_SECONDS_MAX)


def agree(job: Job) -> float:
    migration = job.migration
    assert migration is not None
    return migration.phase_at + AGREE_SECONDS_MAX


def quiesce(job: Job) -> float:
    migration, now = job.migration, job.roster
    assert migration is not None
    assert now is not None
    limits = job.spec.policy
    waiting = len(now.seats) - len(migration.gone) - len(migration.reports)
    last = float("inf")
    if waiting > len(migration.fresh):
        last = max(migration.phase_at + limits.quiesce_seconds_max, latest_busy(migration))
    if migration.fresh:
        last = min(last, min(migration.fresh.values()) + limits.startup_seconds_max)
    if migration.phase is Phase.HOLD:
        last = min(last, migration.hold_since + limits.hold_seconds_max)
    return last


def reform(job: Job) -> float:
    migration = job.migration
    assert migration is not None
    plan, limits = migration.plan, job.spec.policy
    assert plan is not None
    waves = 1 + max((move.wave for move in plan.moves), default=0)
    moving = waves * plan.bytes_max / limits.transfer_bytes_per_second_min
    end = migration.phase_at + limits.reform_seconds_max + moving
    return max(end, latest_busy(migration))


def startup(job: Job) -> float:
    migration = job.migration
    assert migration is not None
    return migration.phase_at + job.spec.policy.startup_seconds_max


def hold(job: Job) -> float:
    migration = job.migration
    assert migration is not None
    return migration.hold_since + job.spec.policy.hold_seconds_max


def latest_busy(migration: Migration) -> float:
    """Until when budgets wait for ranks that said how long they would be busy."""
    waiting = (until for rank, until in migration.busy.items() if rank not in migration.reports)
    return max(waiting, default=0.0)


def silent_ranks(job: Job) -> list[Rank]:
    """Seats with a worker that has not reported the present phase."""
    migration, now = job.migration, job.roster
    assert migration is not None
    assert now is not None
    return [
        seat.rank
        for seat in now.seats
        if seat.rank not in migration.reports and seat.rank not in migration.gone
    ]


def slow_to_quiesce(job: Job, now: float) -> list[Rank]:
    """Survivors past their budget and joiners past theirs."""
    migration = job.migration
    assert migration is not None
    limits = job.spec.policy
    end = max(migration.phase_at + limits.quiesce_seconds_max, latest_busy(migration))
    survivors_late = now >= end
    return [
        rank
        for rank in silent_ranks(job)
        if (
            now >= migration.fresh[rank] + limits.startup_seconds_max
            if rank in migration.fresh
            else survivors_late
        )
    ]


def blame(job: Job, missing: Sequence[Rank]) -> Fault:
    """Ranks that did not report in time are killed and replaced, but never the state with them."""
    migration, now = job.migration, job.roster
    assert migration is not None
    assert now is not None
    most = len(now.seats) - len(migration.gone)
    suspects = list(missing)
    if 2 * len(suspects) > most:
        suspects = [rank for rank in missing if rank not in migration.progress]
    holders = set(migration.plan.winners) if migration.plan else set()
    too_many = 2 * len(suspects) > most or (bool(holders) and holders <= set(suspects))
    listed = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
    why = f"rank {listed} did not report {migration.phase} in time"
    causes = tuple(Cause(Sign.HANG, rank, now.seats[rank].node, detail=why) for rank in missing)
    if too_many or not suspects:
        return Fault(causes[:1], f"{why}; most ranks wait, so nobody is blamed")
    return Fault(causes, f"{why}: replaced", kill=tuple(suspects))
