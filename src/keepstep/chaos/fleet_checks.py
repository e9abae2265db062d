"""What must hold in the simulated fleet, and the account of its time.

Cheap checks follow every decision; those that look at all machines come every few hundred. A broken
one raises Violation, and the run says its seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from keepstep.chaos.fleet_jobs import Trainee
from keepstep.chaos.fleet_setting import MIGRATIONS_MAX
from keepstep.chaos.simulated_checks import Violation
from keepstep.model import Generation, JobId, JobState, NodeId, Phase
from keepstep.orchestrator import seating
from keepstep.orchestrator.state import Cluster, Incident, Job, Occupant, slot_key

OUTCOMES = frozenset(
    ("resumed", "moved", "abandoned", "parked", "fallback", "restart", "saved", "failed", "stopped")
)
LOOK_AT_ALL_STEPS = 2000
"""Decisions between two looks at all machines."""


@dataclass(slots=True)
class Account:
    """One job: where its time went, and what was seen of it."""

    began_at: float
    since: float
    kind: str = "waiting"
    seconds: dict[str, float] = field(default_factory=dict)
    generation: Generation = Generation(0)
    turn_at: float = -1.0
    committed: int = 0


@dataclass(slots=True)
class Referee:
    """Judges one month."""

    accounts: dict[JobId, Account] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    pauses: list[float] = field(default_factory=list)
    """Seconds, of incidents that ended live."""
    fell_back: set[JobId] = field(default_factory=set)
    waited: int = 0
    """Times that a job had to wait for its turn."""
    doubts: int = 0
    _closed: tuple[Incident, ...] = ()
    _in_line: set[JobId] = field(default_factory=set)
    _doubt: bool = False
    _looked: int = 0

    # ------------------------------------------------------------ after every decision

    def check(
        self, cluster: Cluster, jobs: dict[JobId, Trainee], touched: Collection[JobId]
    ) -> None:
        if touched:
            self._check_turns(cluster, {*touched, *self._in_line})
        for name in touched:
            known = cluster.jobs.get(name)
            if known is not None and name in jobs:
                self._check_job(known, jobs[name])
        self._count_closed(cluster)
        if bool(cluster.self_doubt) and not self._doubt:
            self.doubts += 1
        self._doubt = bool(cluster.self_doubt)
        self._looked += 1
        if self._looked % LOOK_AT_ALL_STEPS == 0:
            check_slots(cluster)

    def _check_job(self, known: Job, job: Trainee) -> None:
        account = self.accounts[job.spec.job]
        if known.generation < account.generation:
            raise Violation(f"{job.spec.job}: generation {known.generation} after a higher one")
        account.generation = known.generation
        if known.state is JobState.FAILED:
            raise Violation(f"{job.spec.job} failed: {known.detail}")

    def _check_turns(self, cluster: Cluster, names: Iterable[JobId]) -> None:
        """Nobody takes the place of one who came first and waits, and not too many go at once."""
        ready = []
        for name in names:
            job, account = cluster.jobs.get(name), self.accounts.get(name)
            if account is None or job is None:
                continue
            if job.turn_at >= 0 and account.turn_at < 0:
                self.waited += 1
            elif job.turn_at < 0 <= account.turn_at and _under_way(job):
                ready.append((account.turn_at, job))
            account.turn_at = job.turn_at
            (self._in_line.add if job.turn_at >= 0 else self._in_line.discard)(name)
        for came_at, job in ready:
            planned = job.migration is not None and job.migration.purpose == "move"
            others = [(n, cluster.jobs[n]) for n in cluster.open_jobs]
            first = [n for n, o in others if 0 <= o.turn_at < came_at and _waits(o, planned)]
            busy = [n for n, o in others if _counts(o, planned)]
            room = MIGRATIONS_MAX + _held_ones(cluster) - len(busy)
            if room < 0:
                raise Violation(f"{len(busy)} jobs migrate at once: {busy}")
            if room < len(first):
                # With room for all of them their turn comes with the next tick.
                raise Violation(f"{job.spec.job} goes before {first[0]}, which came first")

    def _count_closed(self, cluster: Cluster) -> None:
        if cluster.closed is self._closed:
            return
        # All that were known, and not the newest alone: it may be gone with its job's name.
        before, self._closed = {one.incident for one in self._closed}, cluster.closed
        for incident in cluster.closed:
            if incident.incident in before:
                continue
            if incident.outcome not in OUTCOMES:
                raise Violation(f"{incident.incident} ended as {incident.outcome!r}")
            self.outcomes[incident.outcome] += 1
            if incident.outcome == "fallback":
                self.fell_back.add(incident.job)
            if incident.outcome == "resumed":
                self.pauses.append(_pause(incident))

    # ------------------------------------------------------------ time

    def book(self, job: Trainee, known: Job | None, now: float, *, led: bool) -> None:
        """Since the last look this job's time belongs to what it did then."""
        account = self.accounts[job.spec.job]
        spent = now - account.since
        account.seconds[account.kind] = account.seconds.get(account.kind, 0.0) + spent
        account.since, account.kind = now, _kind(job, known, led)
        step = job.step_at(now)
        if step < account.committed and job.lost_steps == 0:
            raise Violation(f"{job.spec.job} was at step {account.committed} and is at {step}")
        account.committed = step

    def settle(self, jobs: dict[JobId, Trainee], now: float) -> None:
        """At the end: the parts make up the whole, and the steps make up the training."""
        for name, job in jobs.items():
            account = self.accounts[name]
            total, parts = now - account.began_at, sum(account.seconds.values())
            if abs(total - parts) > 1e-3:
                raise Violation(f"{name}: {parts:.3f} s are booked of {total:.3f} s")
            trained = account.seconds.get("training", 0.0)
            useful = (job.step_at(now) + job.lost_steps - job.resumes) * job.step_seconds
            rest = trained - useful
            if not -1.0 <= rest <= (job.breaks + 1) * job.step_seconds + 1.0:
                raise Violation(f"{name} trained for {trained:.1f} s and {useful:.1f} s show")


def _kind(job: Trainee, known: Job | None, led: bool) -> str:
    if job.stage == "training":
        return "training"
    if not led:
        return "control plane down"
    if known is None or known.state.over:
        return "waiting"
    names = {
        JobState.HELD: "held",
        JobState.PARKED: "parked",
        JobState.WAITING: "waiting",
        JobState.STARTING: "starting",
    }
    return names.get(known.state, "migrating" if known.migration else "unnoticed")


def _pause(incident: Incident) -> float:
    training = sum(incident.seconds.get(phase, 0.0) for phase in (Phase.WARM, Phase.AGREE))
    return incident.closed_at - incident.opened_at - training


def _under_way(job: Job) -> bool:
    moving = job.migration
    return moving is not None and moving.phase is not Phase.ALLOCATE and not moving.saves


def _counts(job: Job, planned: bool) -> bool:
    moving = job.migration
    idle = (Phase.ALLOCATE, Phase.HOLD, Phase.FALLBACK)
    if moving is None or moving.phase in idle or moving.purpose not in ("move", "recover"):
        return False
    return (moving.purpose == "move") is planned


def _held_ones(cluster: Cluster) -> int:
    """Who held for lack of room and goes on had its turn before."""
    jobs = (cluster.jobs[name] for name in cluster.open_jobs)
    return sum(1 for job in jobs if job.incident and "hold" in job.incident.seconds)


def _waits(job: Job, planned: bool) -> bool:
    moving = job.migration
    if planned:
        return moving is None and bool(job.leaving) and job.state is JobState.RUNNING
    return (
        moving is not None
        and moving.phase is Phase.ALLOCATE
        and not (moving.saves or moving.fences)
    )


def check_slots(cluster: Cluster) -> None:
    """Each machine has one owner, who knows of it; spares are neither lost nor made."""
    owners: dict[tuple[NodeId, int], Occupant] = {}

    def own(node: NodeId, slot: int, user: Occupant) -> None:
        if (node, slot) in owners:
            raise Violation(f"slot {slot} of {node} is owned by {owners[node, slot]} and {user}")
        owners[node, slot] = user

    for name in cluster.open_jobs:
        job = cluster.jobs[name]
        gone = job.migration.gone if job.migration else {}
        for seat in job.roster.seats if job.roster else ():
            if seat.rank not in gone and seat.rank not in job.finished:
                own(seat.node, seat.slot, Occupant(name, seat.rank, seat.incarnation))
        for seat in seating.waiting(job):
            if cluster.nodes[seat.node].uses.get(seat.slot) is not None:
                own(seat.node, seat.slot, Occupant(name, seat.rank, seat.incarnation))
        for standby in job.standbys.values():
            own(standby.node, standby.slot, Occupant(name))
            if slot_key(standby.node, standby.slot) not in job.standbys:
                raise Violation(f"{standby} is kept under another name")
    listed = set(cluster.free)
    for node, state in cluster.nodes.items():
        for slot, user in state.uses.items():
            if not user.fenced and owners.pop((node, slot), None) != user:
                raise Violation(f"slot {slot} of {node} is kept for {user}, whom nobody knows")
        roomy = state.alive and len(state.uses) < state.slots
        if roomy and node not in listed:
            raise Violation(f"{node} has room and is not listed")
    fenced = []
    for node, slot in owners:
        there = cluster.nodes[node].uses.get(slot)
        if there is None or not there.fenced:
            fenced.append((node, slot))
    if fenced:
        raise Violation(f"{len(fenced)} seats have no slot: {fenced[:3]}")
