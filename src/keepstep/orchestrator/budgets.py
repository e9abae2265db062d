"""How long each phase may take, and who is to blame when it takes longer. Pure.

One budget, derived from what the job itself reported, in place of a ladder of timeouts:

    max(budget_seconds_min, budget_steps x the median step) + bytes / (half the bandwidth)

The median step is the slowest rank's, the bytes are those through the busiest rank (none but in
REFORM), the bandwidth is what the slowest receiver of the last transfer got. Before the first step
of a start there is no pace to go by, and the start-up time counts.

Most of a job at once is never to blame: in a collective phase one rank holds up all, and killing
those that wait would kill the state with them.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from keepstep.model import NodeId, Phase, Rank, Sign
from keepstep.orchestrator import alike, policy, portions
from keepstep.orchestrator.incidents import Fault
from keepstep.orchestrator.state import Cause, Job, Migration, in_migration
from keepstep.wire import SeatReport

AGREE_SECONDS_MAX = 10.0
"""Workers answer from a thread of their own, at once; the leavers' move does not wait for more."""
WAITS = (Phase.QUIESCE, Phase.HOLD, Phase.REFORM, Phase.RESUME, Phase.SAVE)
"""Phases in which nobody trains before all ranks have reported."""
BYTES_PER_SECOND_ASSUMED = 100e6
"""Until a transfer has been measured: a gigabit link that does what it should."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds, and what they are made of."""

    seconds: float
    why: str


def pace(job: Job) -> Budget:
    """What ranks get that have to come to a boundary."""
    limits, step = job.spec.policy, job.step_seconds
    if not step:
        seconds = limits.startup_seconds_max
        return Budget(seconds, f"startup_seconds_max {seconds:g} s: no step is known yet")
    seconds = _steps(job)
    steps = f"{limits.budget_steps:g} x {step:.3g} s a step"
    return Budget(seconds, f"max({limits.budget_seconds_min:g} s, {steps})")


def _steps(job: Job) -> float:
    limits = job.spec.policy
    return max(limits.budget_seconds_min, limits.budget_steps * job.step_seconds)


def spare(job: Job, until: float) -> None:
    """Agents come back by then at the latest: from there on ranks have one budget to report."""
    if job.migration is not None:
        job.migration.spared_until = until + _steps(job)


def came_back(job: Job, ranks: Iterable[Rank], now: float) -> bool:
    """The agent of these ranks is back in the middle of a phase: those of them that are waited for
    have yet to hear what it is, and get one budget from here on. False: none is.

    Not for ever: an agent may come and go, and somebody else may be the one who hangs.
    """
    moving = job.migration
    if moving is None or moving.phase not in WAITS:
        return False
    if now >= moving.phase_at + job.spec.policy.hold_seconds_max:
        return False
    if all(rank in moving.reports or rank in moving.gone for rank in ranks):
        return False
    moving.spared_until = max(moving.spared_until, now + _steps(job))
    return True


def moving(job: Job, bytes_moved: int) -> Budget:
    """What ranks get that re-form, move so many bytes through the busiest of them, and verify."""
    base = pace(job)
    rate = job.bytes_per_second or BYTES_PER_SECOND_ASSUMED
    source = "measured" if job.bytes_per_second else "assumed"
    seconds = base.seconds + 2 * bytes_moved / rate
    link = f"half of the {source} {_megabytes(rate)} MB/s"
    return Budget(seconds, f"{base.why} + {_megabytes(bytes_moved)} MB at {link}")


def _megabytes(number: float) -> str:
    return f"{number / 1e6:,.0f}" if number >= 1e7 else f"{number / 1e6:.3g}"


def phases(job: Job) -> dict[Phase, Budget]:
    """What each phase would get now, for one rank's state to move."""
    limits = job.spec.policy
    startup = Budget(limits.startup_seconds_max, "startup_seconds_max")
    return {
        Phase.WARM: startup,
        Phase.AGREE: Budget(AGREE_SECONDS_MAX, "workers answer at once, from a thread"),
        Phase.ALLOCATE: Budget(policy.FENCE_SECONDS_MAX, "for kills to be confirmed"),
        Phase.QUIESCE: pace(job),
        Phase.REFORM: moving(job, job.state_bytes),
        Phase.RESUME: startup,
        Phase.HOLD: Budget(limits.hold_seconds_max, "hold_seconds_max"),
        Phase.SAVE: startup,
    }


def hear(job: Job, taken: Sequence[SeatReport]) -> None:
    """Steps have become longer: the others get their time at once, not after the phase.

    After a start the first one who made a step sets the pace: so all are past their start-up.
    """
    migration = job.migration
    assert migration is not None
    started = migration.phase is Phase.RESUME and migration.cold
    if started or (job.step_seconds and migration.phase is not Phase.RESUME):
        job.step_seconds = max(job.step_seconds, *(seat.step_seconds for seat in taken))


def learn(job: Job) -> None:
    """All have reported: this is the job's pace now, and this is what its links carry."""
    migration = job.migration
    assert migration is not None
    reports = alike.distinct(migration.reports.values())
    slowest = max((report.step_seconds for report in reports), default=0.0)
    # After a live migration the joiner's first step, which may compile, says nothing new.
    if slowest and (migration.phase is not Phase.RESUME or migration.cold):
        job.step_seconds = slowest
    job.state_bytes = max((r.state_bytes for r in reports), default=0) or job.state_bytes
    rates = [r.moved_bytes / r.moved_seconds for r in reports if r.moved_seconds > 0]
    job.bytes_per_second = min(filter(None, rates), default=job.bytes_per_second)


LAST_HOLDERS_ROUNDS = 3
"""If all who hold state are late, they get so many rounds before they are given up with it."""


def allocate(job: Job) -> float:
    migration = job.migration
    assert migration is not None
    return max(migration.settle_until, migration.phase_at + policy.FENCE_SECONDS_MAX)


def agree(job: Job) -> float:
    migration = job.migration
    assert migration is not None
    return migration.phase_at + AGREE_SECONDS_MAX


def quiesce(job: Job) -> float:
    migration, now = in_migration(job)
    limits = job.spec.policy
    waiting = len(now.seats) - len(migration.gone) - len(migration.reports)
    last = float("inf")
    if waiting > len(migration.fresh):
        last = max(migration.phase_at + pace(job).seconds, latest_busy(migration))
    if migration.fresh:
        last = min(last, min(migration.fresh.values()) + limits.startup_seconds_max)
    if migration.phase is Phase.HOLD:
        last = min(last, migration.hold_since + limits.hold_seconds_max)
    return last


def reform(job: Job) -> float:
    migration = job.migration
    assert migration is not None
    assert migration.plan is not None
    end = migration.phase_at + moving(job, migration.plan.bytes_max).seconds
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
    migration, now = in_migration(job)
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
    end = max(migration.phase_at + pace(job).seconds, latest_busy(migration))
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


def _holders(job: Job) -> Mapping[str, Collection[Rank]]:
    """Who holds each portion: by the vote, or before it whoever is no joiner."""
    migration, now = in_migration(job)
    if migration.plan is not None and migration.plan.winners:
        return migration.plan.winners
    if migration.recoveries >= LAST_HOLDERS_ROUNDS:
        return {}
    size, empty = len(now.seats), {*migration.gone, *migration.joined}
    return {
        name: {*portions.holders(name, size), *portions.mirror(job, name)} - empty
        for name in portions.known(job)
    }


def _last_home(job: Job, suspects: Collection[Rank], doubtful: Container[NodeId]) -> str:
    """A portion that, for sure, nobody but these ranks holds; empty: there is none."""
    _, now = in_migration(job)
    for name, held in _holders(job).items():
        others = (rank for rank in held if rank not in suspects)
        sure = any(now.seats[rank].node not in doubtful for rank in others)
        if not sure and any(rank in suspects for rank in held):
            return portions.called(name, len(now.seats))
    return ""


def blame(job: Job, missing: Sequence[Rank], doubtful: Container[NodeId] = ()) -> Fault:
    """Ranks that did not report in time are killed and replaced, but never the state with them."""
    migration, now = in_migration(job)
    most = len(now.seats) - len(migration.gone)
    suspects = list(missing)
    if 2 * len(suspects) > most:
        suspects = [rank for rank in missing if rank not in migration.progress]
    too_many = 2 * len(suspects) > most or not suspects
    listed = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
    why = f"rank {listed} did not report {migration.phase} in time"
    causes = tuple(Cause(Sign.HANG, rank, now.seats[rank].node, detail=why) for rank in missing)
    if too_many:
        return Fault(causes[:1], f"{why}; most ranks wait, so nobody is blamed")
    if last := _last_home(job, set(suspects), doubtful):
        return Fault(causes[:1], f"{why}; nobody else holds {last} for sure, so nobody is blamed")
    return Fault(causes, f"{why}: replaced", kill=tuple(suspects))
