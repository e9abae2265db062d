"""What must hold in the simulator after every step of the brain, at every tick, and at the end.

The referee knows what the brain cannot know (which state really exists, which steps were really
made) and judges with it; where it has to know about room, it counts slots by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from keepstep.chaos.simulated import Agent, Worker, digest_of, state_at
from keepstep.chaos.simulated_group import Group
from keepstep.model import Generation, JobId, JobState, NodeId, Phase, Rank, SameDomain, Seat, Unit
from keepstep.orchestrator import seating, slots, suspicion
from keepstep.orchestrator.budgets import LAST_HOLDERS_ROUNDS
from keepstep.orchestrator.placing import DOMAIN
from keepstep.orchestrator.state import Cluster, Job, Loan, NodeState, Occupant
from keepstep.orchestrator.turn import Note
from keepstep.wire import Fence, Order

ROOM_SECONDS_MAX = 2.0
"""So long a job may wait though there is room for it: the next tick should have seen it."""
BORROWER_SECONDS_MAX = 45.0
"""So long a parked job may leave room to a borrower that still waits for more."""
PARKS_MAX = 6
"""More than the faults of one run can ask for: somebody is parked again and again."""

Place = tuple[NodeId, int]


class Violation(AssertionError):
    """An invariant does not hold."""


class Arena(Protocol):
    """What the referee sees of a simulation."""

    cluster: Cluster

    def now(self) -> float: ...
    def agents(self) -> list[Agent]: ...
    def group(self, job: JobId) -> Group: ...


@dataclass(slots=True)
class Account:
    """What was seen of one job so far."""

    fallbacks: int = 0
    cold_generation: Generation = Generation(0)
    parks: int = 0
    loan: Loan | None = None
    over: bool = False
    room_since: float = -1.0


@dataclass(slots=True)
class Referee:
    """Judges one run."""

    arena: Arena
    operators: bool = False
    """Somebody sends ranks elsewhere, and may part what belongs together."""
    accounts: dict[JobId, Account] = field(default_factory=dict)

    # ------------------------------------------------------------ after every step

    def check(self, notes: Sequence[Note] = ()) -> None:
        cluster = self.arena.cluster
        owners: dict[Place, Occupant] = {}
        for name, job in cluster.jobs.items():
            account = self.accounts.setdefault(name, Account())
            said = [note.why for note in notes if note.job == name]
            self._check_steps(job, account, said)
            self._check_loan(job, account)
            if said:
                self._check_plan(job)
                self._check_words(job, account, said)
            if not job.state.over and job.unsure is None:
                _check_owners(cluster, job, owners)
            if job.state is JobState.RUNNING and not (self.operators or job.spec.policy.move_home):
                _check_together(cluster, job)
        for node, state in cluster.nodes.items():
            for slot, user in state.uses.items():
                owner = cluster.jobs.get(user.job)
                if owner is not None and owner.unsure is not None:
                    continue  # As agents list it: nobody has decided yet.
                if not user.fenced and owners.get((node, slot)) != user:
                    raise Violation(f"slot {slot} of {node} is kept for {user}, whom nobody knows")

    def _check_steps(self, job: Job, account: Account, said: Sequence[str]) -> None:
        """Committed steps are lost in a fallback only, and each of those is counted."""
        group, moving = self.arena.group(job.spec.job), job.migration
        if job.fallbacks < account.fallbacks or (account.over and not job.state.over):
            # Submitted again: the count begins anew, the steps do not.
            account.fallbacks = 0
        if job.fallbacks > account.fallbacks:
            account.fallbacks = job.fallbacks
            why = next((line for line in reversed(said) if "fallback: " in line), "")
            if "rewound to step" not in why:
                self._judge_fallback(job, why)
            left = re.search(r"steps after boundary (\d+) are lost", why)
            start = int(left[1]) if left else max(job.published_step, 0)
            group.committed = min(group.committed, start)
            if moving is not None and moving.phase is Phase.FALLBACK:
                # There is no room to start anew yet, and all are told to end.
                group.outdate(Generation(job.generation + 1))
        if job.state.over and not account.over:
            last = self.arena.cluster.closed[-1:]
            if job.state is JobState.SAVED and last and last[0].outcome == "fallback":
                group.committed = min(group.committed, max(job.published_step, 0))
        account.over = job.state.over
        if moving is not None and moving.cold and job.generation != account.cold_generation:
            account.cold_generation = job.generation
            start = max(job.published_step, 0)
            if group.committed > start and moving.outcome != "fallback":
                raise Violation(f"{moving.outcome} loses {group.committed - start} steps")
            group.committed = min(group.committed, start)
            group.outdate(job.generation)

    def _judge_fallback(self, job: Job, why: str) -> None:
        """A fallback is right only if some state has no reachable home left."""
        name, group = job.spec.job, self.arena.group(job.spec.job)
        known = self.arena.cluster.nodes
        # A node whose Hello is still on its way is nobody that the brain could have asked.
        near = [
            agent
            for agent in self.arena.agents()
            if agent.up and not agent.cut and agent.linked and known[agent.node].alive
        ]
        whole = [
            worker
            for agent in near
            for worker in agent.workers
            if worker.job == name and worker.alive and not worker.stopped and worker.intact
            if worker.mode != "leaving" and not worker.lies
            if group.right(worker) and worker.boundary + worker.ready > group.committed
        ]
        lost = re.search(r"no private state of rank (\d+) at boundary (\d+)", why)
        if lost is not None:
            rank, boundary = Rank(int(lost[1])), int(lost[2])
            homes = [agent.node for agent in near if boundary in agent.ring(name, rank)]
            if homes:
                raise Violation(f"fallback, but {homes} hold the private state of rank {rank}")
        elif whole and "tie" not in why and "lost with those who made them" not in why:
            self._judge_loss(group, whole)

    def _judge_loss(self, group: Group, whole: Sequence[Worker]) -> None:
        """Some portion is with nobody at the newest boundary, nor with one who can come to it."""
        newest = max(worker.boundary for worker in whole)
        there = {
            name
            for worker in whole
            if worker.boundary == newest or (worker.ready and worker.boundary == newest - 1)
            for name in group.held(worker.rank)
        }
        if there.issuperset(group.portions()):
            raise Violation(f"fallback, but {sorted(w.rank for w in whole)} hold all state")

    def _check_plan(self, job: Job) -> None:
        """Who resumes does so with all portions, and each is what it should be at the boundary."""
        moving, group = job.migration, self.arena.group(job.spec.job)
        if moving is None or moving.phase is not Phase.RESUME or moving.plan is None:
            return
        right = state_at(tuple(group.portions()), moving.plan.boundary)
        if moving.plan.digests != {name: digest_of(value) for name, value in right.items()}:
            raise Violation(f"{job.spec.job} resumes with {moving.plan.digests}")

    def _check_loan(self, job: Job, account: Account) -> None:
        """Who is parked holds nothing; whoever goes on has its loan closed."""
        loan, before = job.loan, account.loan
        parked = job.state is JobState.PARKED
        if parked and (job.roster is not None or job.standbys or job.migration is not None):
            raise Violation(f"{job.spec.job} is parked and yet something of it runs")
        if loan is not None:
            coming = job.migration is not None and job.migration.purpose == "park"
            if not (parked if loan.began_at >= 0 else coming):
                raise Violation(f"{job.spec.job} is {job.state} with an open loan: {loan}")
            borrower = self.arena.cluster.jobs.get(loan.borrower)
            if borrower is not None and borrower.spec.priority <= job.spec.priority:
                raise Violation(f"{job.spec.job} lends to {loan.borrower}, which is not above it")
            if not job.spec.policy.lend:
                raise Violation(f"{job.spec.job} lends and was told not to")
        if parked and loan is not None and loan.boundary != job.published_step:
            raise Violation(f"parked at {loan.boundary}, but {job.published_step} is published")
        if before is not None and before.began_at >= 0 and loan is None and not job.state.over:
            mine = [old for old in self.arena.cluster.loans if old.lender == job.spec.job]
            if not mine or mine[-1].ended_at < self.arena.now():
                raise Violation(f"{job.spec.job} goes on and its loan is not closed")
        account.loan = loan

    def _check_words(self, job: Job, account: Account, said: Sequence[str]) -> None:
        """What the brain gives as its reason is true."""
        for line in said:
            if " is to be parked: " in line:
                account.parks += 1
                if account.parks > PARKS_MAX:
                    raise Violation(f"{job.spec.job} is parked again and again")
                self._check_need(job)
                if "has lent it devices" in line:
                    self._check_reclaim(job)
            if " moves too: " in line:
                self._check_companions(job, line)

    def _check_companions(self, job: Job, line: str) -> None:
        """Nobody who holds the last whole state is killed to keep a unit together."""
        if job.migration is None or job.roster is None:
            return
        doomed = {*job.migration.fences, *job.migration.gone}
        seats = {job.roster.seats[rank] for rank in doomed}
        for name, held in self._holders(job).items():
            if held and not held - seats:
                raise Violation(f"nobody who holds {name} is left: {line}")

    def _check_need(self, lender: Job) -> None:
        """Nobody is parked while the borrower has room without it."""
        loan = lender.loan
        borrower = self.arena.cluster.jobs.get(loan.borrower) if loan else None
        if loan is None or borrower is None or not _anywhere(borrower):
            return
        free = sum(self._room({borrower.spec.job} | self._below(borrower)).values())
        if free >= loan.needed:
            raise Violation(f"{lender.spec.job} is parked for {loan.needed} slots: {free} are free")

    def check_orders(self, orders: Sequence[Order]) -> None:
        """No order kills the last who hold whole state, while somebody is to go on with it."""
        for order in orders:
            job = self.arena.cluster.jobs.get(order.job)
            if not isinstance(order.action, Fence) or job is None or job.state.over:
                continue
            moving = job.migration
            if moving is None or moving.cold or moving.phase is Phase.FALLBACK:
                continue
            if "/stray/" in order.order_id or moving.recoveries > LAST_HOLDERS_ROUNDS:
                # Who comes back is not trusted; and who never answers is given up in the end.
                continue
            doomed = {*order.action.seats}
            if job.roster is not None:
                doomed |= {job.roster.seats[rank] for rank in (*moving.fences, *moving.gone)}
            for name, held in self._holders(job).items():
                if not held.isdisjoint(order.action.seats) and not held - doomed:
                    raise Violation(f"{order.order_id} kills the last who hold {name}: {held}")

    def _holders(self, job: Job) -> dict[str, set[Seat]]:
        """By portion: seats with a worker whose state is whole, as far as anybody could know."""
        mine = {*(job.roster.seats if job.roster else ()), *seating.waiting(job)}
        group = self.arena.group(job.spec.job)
        found: dict[str, set[Seat]] = {}
        for agent in self.arena.agents():
            for worker in agent.workers if agent.up else ():
                whole = worker.alive and worker.intact and worker.boundary >= 0
                if worker.job != job.spec.job or not whole or worker.stopped:
                    continue
                # Before anybody said what it holds there is no step yet that could be lost.
                names = group.held(worker.rank) if job.begun else group.held(worker.rank)[-1:]
                for name in names if worker.seat in mine else ():
                    found.setdefault(name, set()).add(worker.seat)
        return found

    def _check_reclaim(self, borrower: Job) -> None:
        """A borrower is parked only if a lender fits then."""
        for job in self.arena.cluster.jobs.values():
            mine = job.loan is not None and job.loan.borrower == borrower.spec.job
            if mine and self._fits(job, self._below(job), {borrower.spec.job}):
                return
        raise Violation(f"{borrower.spec.job} is parked, and that helps nobody")

    # ------------------------------------------------------------ at every tick

    def tick(self) -> None:
        """Nobody waits for ever where there is room, unless nothing may be decided."""
        if self.arena.cluster.frozen:
            self.pause()
            return
        now = self.arena.now()
        for name, job in self.arena.cluster.jobs.items():
            account = self.accounts.setdefault(name, Account())
            limit = self._patience(job)
            if limit is None or not self._has_room(job):
                account.room_since = -1.0
            elif account.room_since < 0:
                account.room_since = now
            elif now - account.room_since > limit:
                raise Violation(f"{name} is {job.state}, and there is room, or somebody to lend it")

    def pause(self) -> None:
        """Nobody decides at the moment."""
        for account in self.accounts.values():
            account.room_since = -1.0

    def _patience(self, job: Job) -> float | None:
        """How long a job may wait beside enough room; None if it does not wait."""
        if job.unsure is not None:
            return None
        if suspicion.knows_more(self.arena.cluster, job, self.arena.now()):
            return None
        if job.state is JobState.PARKED and job.loan is not None:
            borrower = self.arena.cluster.jobs.get(job.loan.borrower)
            if borrower is not None and borrower.unsure is not None:
                return ROOM_SECONDS_MAX if borrower.unsure.told else None
            wanted = len(seating.wanting(borrower)) if borrower is not None else 0
            if borrower is not None and wanted:
                room = self._room({borrower.spec.job} | self._below(borrower))
                useless = _anywhere(borrower) and sum(room.values()) < wanted
                return ROOM_SECONDS_MAX if useless else BORROWER_SECONDS_MAX
        if job.state in (JobState.WAITING, JobState.PARKED):
            return ROOM_SECONDS_MAX
        moving = job.migration
        held = moving is not None and moving.phase is Phase.HOLD and not moving.saves
        return ROOM_SECONDS_MAX if held and _anywhere(job) else None

    def _has_room(self, job: Job) -> bool:
        below = self._below(job)
        if job.state in (JobState.WAITING, JobState.PARKED):
            return self._fits(job, below)
        mine = {job.spec.job}
        if sum(self._room(mine).values()) > 0:
            return True
        loans = [self.arena.cluster.jobs[name].loan for name in below]
        if any(loan is not None and loan.borrower == job.spec.job for loan in loans):
            # Somebody is about to be parked for it: nobody else is asked meanwhile.
            return False
        # What lower jobs have is taken only if that is enough.
        lent = self._room(mine | below, {name for name in below if self._lends(name)})
        return job.spec.policy.borrow and sum(lent.values()) >= len(seating.wanting(job))

    def _fits(self, job: Job, standbys: Set[JobId], whole: Set[JobId] = frozenset()) -> bool:
        """Whether a job could start."""
        each, nodes = job.spec.ranks_per_node, self.arena.cluster.nodes
        room = self._room(standbys, whole)
        fit = [node for node, free in room.items() if free >= each and nodes[node].store_good]
        return len(fit) >= job.spec.nodes

    def _below(self, job: Job) -> set[JobId]:
        known = (other for other in self.arena.cluster.jobs.values() if other.unsure is None)
        return {other.spec.job for other in known if other.spec.priority < job.spec.priority}

    def _lends(self, name: JobId) -> bool:
        """Whether a job can be parked for another one at this moment."""
        job = self.arena.cluster.jobs[name]
        trains = job.state is JobState.RUNNING and job.migration is None and job.begun
        willing = job.spec.policy.lend and self.arena.now() >= job.lend_at
        return trains and willing and not job.finished

    def _room(self, standbys: Set[JobId], whole: Set[JobId] = frozenset()) -> dict[NodeId, int]:
        """Slots to be had, by node: free, with a standby of these jobs, or with anything of those.

        Counted anew here: the brain's own functions are what is judged.
        """
        return {
            node: sum(self._open(state, slot, standbys, whole) for slot in range(state.slots))
            for node, state in self.arena.cluster.nodes.items()
            if state.alive and state.linked and state.silent_at < 0 and not state.drained
        }

    def _open(self, state: NodeState, slot: int, standbys: Set[JobId], whole: Set[JobId]) -> bool:
        if slots.tainted(self.arena.cluster, state.node, slot, self.arena.now()):
            return False
        user = state.uses.get(slot)
        if user is None:
            return True
        given = user.job in whole or (user.job in standbys and user.rank < 0)
        return given and not user.fenced

    # ------------------------------------------------------------ at the end

    def check_end(self, job: Job, user_fault: bool) -> None:
        """A job ended as it should have, or waits for what is not there."""
        name, group = job.spec.job, self.arena.group(job.spec.job)
        if job.state is JobState.FAILED and not user_fault:
            raise Violation(f"{name} failed without a fault of the user's: {job.detail}")
        if job.state is JobState.FINISHED and group.committed < group.steps - 1:
            raise Violation(f"{name} finished after {group.committed} steps")
        if job.state.over:
            return
        if job.unsure is not None:
            self._judge_doubt(job)
            return
        waits = job.state in (JobState.WAITING, JobState.HELD, JobState.PARKED)
        if not waits:
            raise Violation(f"the run did not end: {name} is {job.state}")
        if self._all_well(job):
            raise Violation(f"all nodes are well and have room, and yet {name} is {job.state}")

    def _judge_doubt(self, job: Job) -> None:
        """Nothing is decided about a job while a rank of it is nowhere: but is one?"""
        found = {
            worker.rank
            for agent in self.arena.agents()
            if agent.up and agent.runs and agent.linked and not agent.cut
            for worker in agent.workers
            if worker.alive and worker.job == job.spec.job
        }
        if len(found) == job.spec.world_size:
            raise Violation(f"all ranks of {job.spec.job} are there: {job.unsure}")

    def forget(self, cluster: Cluster) -> None:
        """The journal has lost its end: what was counted in it is counted again."""
        for name, account in self.accounts.items():
            if (job := cluster.jobs.get(name)) is not None:
                account.fallbacks, account.cold_generation = job.fallbacks, job.generation
                account.over, account.loan = job.state.over, job.loan
                self.arena.group(name).reinstate(job.generation)

    def _all_well(self, job: Job) -> bool:
        """Whether the cluster as it is could hold the job, if nobody else were there."""
        cluster = self.arena.cluster
        well = [
            state
            for agent in self.arena.agents()
            if agent.up and agent.linked and (state := cluster.nodes.get(agent.node))
            if state.alive and state.store_good and not state.drained
            if state.slots >= job.spec.ranks_per_node
        ]
        return not cluster.taints and len(well) >= job.spec.nodes


def _check_owners(cluster: Cluster, job: Job, owners: dict[Place, Occupant]) -> None:
    """Who should have which slot does have it, and nobody else does."""
    gone = job.migration.gone if job.migration else {}
    seats = job.roster.seats if job.roster else ()
    sit = [seat for seat in seats if seat.rank not in gone and seat.rank not in job.finished]
    name = job.spec.job
    for seat in (*sit, *seating.waiting(job)):
        _book(owners, (seat.node, seat.slot), Occupant(name, seat.rank, seat.incarnation))
        _check_user(cluster, name, seat)
    for standby in job.standbys.values():
        _book(owners, (standby.node, standby.slot), Occupant(name))


def _check_together(cluster: Cluster, job: Job) -> None:
    """Ranks that started in one unit are in one unit, and where they have to stay they are."""
    policy = job.spec.policy
    label = {node: state.labels.get(DOMAIN, "") for node, state in cluster.nodes.items()}
    whole = policy.unit is Unit.DOMAIN or policy.same_domain is SameDomain.SWAP_WHOLE
    unit = {node: node for node in label} if policy.unit is Unit.NODE else label if whole else {}
    now: dict[str, set[str]] = {}
    for seat in job.roster.seats if job.roster else ():
        home = job.homes[seat.rank]
        if unit.get(home):
            now.setdefault(unit[home], set()).add(unit[seat.node])
        required = policy.same_domain is SameDomain.REQUIRE and policy.unit is not Unit.DOMAIN
        if required and label[home] and label[home] != label[seat.node]:
            raise Violation(f"rank {seat.rank} had to stay in {label[home]}: it is on {seat.node}")
    for name, places in now.items():
        if len(places) > 1:
            raise Violation(f"the ranks of {name} are parted: they are in {sorted(places)}")


def _check_user(cluster: Cluster, job: JobId, seat: Seat) -> None:
    user = cluster.nodes[seat.node].uses.get(seat.slot)
    mine = (job, seat.rank, seat.incarnation)
    if user is None or (user.job, user.rank, user.incarnation) != mine:
        raise Violation(f"slot of {seat} of {job} belongs to {user}")


def _book(owners: dict[Place, Occupant], place: Place, user: Occupant) -> None:
    if place in owners:
        raise Violation(f"slot {place[1]} of {place[0]} is booked for {owners[place]} and {user}")
    owners[place] = user


def _anywhere(job: Job) -> bool:
    """Its ranks may go to any slot, each by itself."""
    policy = job.spec.policy
    return policy.unit is Unit.DEVICE and policy.same_domain is SameDomain.PREFER


def ghosts(agents: Iterable[Agent]) -> list[Seat]:
    """Workers that live though all jobs are over."""
    return [
        worker.seat
        for agent in agents
        for worker in agent.workers
        if worker.alive and worker.mode not in ("finished", "leaving")
    ]
