"""Devices from jobs of lower priority: a standby that gives way, or a job that is parked meanwhile.

    a job finds no spare -> lower standbys give way -> the lender that strands the fewest devices
    is parked: a boundary is saved, its devices are free -> the borrower goes on
    there is room again (a node came back, the borrower ended) -> the lender goes on, bit for bit

The lender loses no step. What the borrower does not need joins the pool. After `lend_seconds_max`
the borrower is parked in turn, and the lender goes on.
"""

from __future__ import annotations

from collections.abc import Iterable

from keepstep.model import JobState, Seat
from keepstep.orchestrator import launch, placing, planned, policy, rules, saving, seating, spares
from keepstep.orchestrator.state import Job, Loan
from keepstep.orchestrator.turn import Turn


def seek(turn: Turn, job: Job) -> bool:
    """Make room for a job that waits for some. True: there is room at once."""
    wanted = seating.wanting(job)
    if not wanted or not job.spec.policy.borrow or launch.lenders_to_come(turn, job):
        return False
    standbys = spares.lower_standbys(turn.cluster, job)
    if _fits(turn, job, wanted, standbys):
        return _take_standbys(turn, job, wanted, standbys)
    for lender in _lenders(turn, job, wanted, standbys):
        devices = len(_devices(lender))
        loan = Loan(lender.spec.job, job.spec.job, devices, len(wanted), turn.now)
        why = (
            f"{job.spec.job} (priority {job.spec.priority}) finds no spare for {len(wanted)} "
            f"ranks, and this job (priority {lender.spec.priority}) has {devices} devices"
        )
        saving.park(turn, lender, why, loan)
    return False


def tick(turn: Turn) -> None:
    """Loans that have lasted long enough: the borrower is parked, and the lender goes on."""
    for name in turn.cluster.open_jobs:
        job = turn.cluster.jobs[name]
        over = job.state is JobState.PARKED and launch.lending_is_over(job, turn.now)
        if not over or job.loan is None or job.unsure is not None:
            continue
        if rules.lenders_are_sure(turn.cluster) and launch.may_run(turn, job):
            continue  # It could not be started yet, and its borrower would wait with it.
        borrower = turn.cluster.jobs.get(job.loan.borrower)
        if borrower is None or not _can_park(borrower) or launch.place(turn, job):
            continue
        # Only if it helps: with too few nodes the borrower would be parked again and again.
        if launch.place(turn, job, _devices(borrower)):
            hours = (turn.now - job.loan.began_at) / 3600
            saving.park(turn, borrower, f"{name} has lent it devices for {hours:.1f} h")


def _fits(turn: Turn, job: Job, wanted: list[Seat], also: Iterable[placing.Place]) -> bool:
    search = placing.Search(turn.cluster, job, turn.now, frozenset(also))
    return len(placing.place(search, wanted)) == len(wanted)


def _take_standbys(
    turn: Turn, job: Job, wanted: list[Seat], standbys: dict[placing.Place, Job]
) -> bool:
    search = placing.Search(turn.cluster, job, turn.now, frozenset(standbys))
    taken = False
    for choice in placing.place(search, wanted).values():
        owner = standbys.get((choice.node, choice.slot))
        if owner is not None:
            spares.drop_standby(turn, owner, choice.node, choice.slot)
            turn.note(f"the standby of {owner.spec.job} gives way to {job.spec.job}", owner)
            taken = True
    return taken


def _lenders(
    turn: Turn, job: Job, wanted: list[Seat], standbys: Iterable[placing.Place]
) -> list[Job]:
    """Whom to park: one that strands the fewest devices; several only if one is not enough."""
    willing = [
        other
        for other in map(turn.cluster.jobs.__getitem__, turn.cluster.open_jobs)
        if other.spec.priority < job.spec.priority
        and other.spec.policy.lend
        and turn.now >= other.lend_at
        and _can_park(other)
    ]
    lower = frozenset(standbys)
    enough = [o for o in willing if _fits(turn, job, wanted, lower | _devices(o))]
    if enough:
        return [min(enough, key=lambda o: (len(_devices(o)), o.spec.priority, o.spec.job))]
    together = lower
    chosen: list[Job] = []
    for other in sorted(willing, key=lambda o: (o.spec.priority, o.spec.job)):
        together |= _devices(other)
        chosen.append(other)
        if _fits(turn, job, wanted, together):
            return chosen
    return []


def _can_park(job: Job) -> bool:
    return planned.steady(job) and job.begun and policy.acts(job)


def _devices(job: Job) -> frozenset[placing.Place]:
    seats = job.roster.seats if job.roster else ()
    standbys = ((standby.node, standby.slot) for standby in job.standbys.values())
    return frozenset({*((seat.node, seat.slot) for seat in seats), *standbys})
