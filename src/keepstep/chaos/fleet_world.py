"""The simulated fleet obeys: orders of the real brain in, what becomes of jobs and machines out."""

from __future__ import annotations

from keepstep.chaos.fleet_jobs import Machine, Trainee
from keepstep.chaos.fleet_setting import (
    EXIT_SEEN_SECONDS,
    JOIN_SECONDS,
    QUIESCE_SECONDS,
    REFORM_SECONDS,
    RESUME_SECONDS,
    SAVE_SECONDS,
    STALL_SEEN_SECONDS,
    STARTUP_SECONDS,
    TRANSFER_SECONDS,
)
from keepstep.chaos.fleet_tree import Tree
from keepstep.chaos.simulated_checks import Violation
from keepstep.model import Generation, NodeId, Phase, Rank, Sign, Term
from keepstep.wire import (
    Agree,
    Apply,
    Assign,
    DropStandby,
    Fence,
    Observed,
    Order,
    PhaseReport,
    Publish,
    Quiesce,
    Reform,
    Resume,
    Save,
    SeatReport,
    StandbyReport,
    StartStandby,
    StartWorkers,
    Stop,
)

COMPLAINT_SECONDS = 5.0
"""Between two complaints of ranks that stand still and hear nothing."""
SMALL_ORDER_NODES = 4


class World(Tree):
    """Obeys. Knows nothing of faults: see fleet_faults.py."""

    # ------------------------------------------------------------ obeying

    def obey(self, order: Order, term: Term) -> None:
        """An order reaches those of its nodes that can be reached and have seen no newer term."""
        job = self.jobs.get(order.job)
        if job is None:
            return
        nodes = order.nodes
        if order.term < term:
            old = [n for n in nodes if self.machines[n].term_seen <= order.term]
            self.refused += len(nodes) - len(old)
            nodes = tuple(n for n in old if self.machines[n].reachable)
            if nodes:
                raise Violation(f"{nodes[:3]} obey {order.order_id} of term {order.term}")
            return
        action = order.action
        match action:
            case Quiesce() | Reform() | Resume() | Save() | Agree():
                if all(self.machines[n] in self.away for n in nodes):
                    return
                if isinstance(action, Quiesce):
                    self._quiesce(job, order, action)
                else:
                    self._collective(job, order, action)
            case StartWorkers():
                self._start(job, order, action)
            case Assign():
                self._assign(job, order, action)
            case Fence():
                self._fence(job, action)
            case StartStandby():
                self._standby(job, self.machines[nodes[0]])
            case DropStandby():
                machine = self.machines[nodes[0]]
                if machine.reachable:
                    machine.standby, machine.ready = None, False
            case Stop():
                self._stop(job, nodes)
            case Apply():
                raise Violation(f"{order.order_id}: nobody stands before an update here")

    def _named(self, job: Trainee, nodes: tuple[NodeId, ...]) -> set[Rank] | None:
        """The ranks that an order to few nodes is for; None: for all."""
        if len(nodes) > SMALL_ORDER_NODES or len(nodes) >= job.size:
            return None
        uses = (self.machines[n].worker for n in nodes)
        return {use[1] for use in uses if use is not None and use[0] is job}

    def _quiesce(self, job: Trainee, order: Order, action: Quiesce) -> None:
        generation, ranks = order.generation, self._named(job, order.nodes)
        if generation < job.generation:
            return
        again = generation == job.generation
        if again and job.stage != "training":
            self.answer(job, Phase.QUIESCE, generation, ranks)
            return
        if again:
            return
        job.generation = generation
        self._change_seats(job, action)
        wait = QUIESCE_SECONDS
        if action.at >= 0 and job.stage == "training":
            wait += max(0.0, job.since + (action.at - job.base) * job.step_seconds - self.now)
        else:
            job.stop(self.now, "broken")
            self.staged(job)

        def there() -> None:
            if job.generation == generation:
                job.stop(self.now, "stopped")
                self.staged(job)
                self.answer(job, Phase.QUIESCE, generation)

        self.later(wait, there)

    def _change_seats(self, job: Trainee, action: Quiesce) -> None:
        """Targets take the seats of those who leave; where one failed, its leaver goes on."""
        for seat in action.leaving:
            if seat.rank in job.targets:
                job.leavers[seat.rank] = job.seats[seat.rank]
                self._seat(job, seat.rank, *job.targets.pop(seat.rank))
                job.empty.add(seat.rank)
        roster = self.leader.cluster.jobs[job.spec.job].roster if self.leader else None
        for rank, (machine, incarnation) in tuple(job.leavers.items()):
            back = roster.seats[rank] if roster else None
            if back and machine and (back.node, back.incarnation) == (machine.node, incarnation):
                self._seat(job, rank, machine, incarnation)
                job.empty.discard(rank)
                del job.leavers[rank]

    def _collective(
        self, job: Trainee, order: Order, action: Reform | Resume | Save | Agree
    ) -> None:
        """What all ranks do together, or say together."""
        generation, ranks = order.generation, self._named(job, order.nodes)
        match action:
            case Agree():
                self.answer(job, Phase.AGREE, generation, ranks)
            case _ if generation != job.generation:
                return
            case Reform() if job.stage == "whole":
                self.answer(job, Phase.VERIFY, generation, ranks)
            case Reform():
                self._check_boundary(job, action.boundary)
                seconds = REFORM_SECONDS + job.groups_seconds
                seconds += TRANSFER_SECONDS if action.moves else 0.0
                self.later(seconds, lambda: self._whole(job, generation))
            case Resume() if job.stage == "training":
                self.answer(job, Phase.RESUME, generation, ranks)
            case Resume():
                seconds = RESUME_SECONDS + job.step_seconds
                self.later(seconds, lambda: self._resumed(job, generation, action.boundary))
            case Save() if job.stage == "saved":
                self.answer(job, Phase.SAVE, generation, ranks)
            case Save():
                self.later(SAVE_SECONDS, lambda: self._saved(job, generation, action))

    def _check_boundary(self, job: Trainee, boundary: int) -> None:
        if boundary != job.committed:
            raise Violation(f"{job.spec.job} is at {job.committed} and shall resume at {boundary}")

    def _whole(self, job: Trainee, generation: Generation) -> None:
        if job.generation != generation or job.bad or job.stage != "stopped":
            return
        job.stage = "whole"
        job.empty.clear()
        job.corrupt.clear()
        self.answer(job, Phase.VERIFY, generation)

    def _resumed(self, job: Trainee, generation: Generation, boundary: int) -> None:
        if job.generation != generation or job.bad or job.stage != "whole":
            return
        self._check_seats(job)
        job.train(self.now, boundary)
        self.staged(job)
        self.answer(job, Phase.RESUME, generation)

    def _check_seats(self, job: Trainee) -> None:
        """One living worker per rank trains, and it sits where the roster says."""
        roster = self.leader.cluster.jobs[job.spec.job].roster if self.leader else None
        if roster is None or roster.generation != job.generation:
            return
        for seat, (machine, incarnation) in zip(roster.seats, job.seats, strict=True):
            if machine is None or (machine.node, incarnation) != (seat.node, seat.incarnation):
                there = machine.node if machine else None
                raise Violation(f"{job.spec.job}: {seat} trains at {there} as {incarnation}")

    def _saved(self, job: Trainee, generation: Generation, action: Save) -> None:
        if job.generation != generation or job.stage != "stopped":
            return
        self._check_boundary(job, action.boundary)
        job.stage = "saved"
        writer = action.writers[min(action.writers)]
        machine = job.seated(writer)
        if machine is not None and writer not in job.bad:
            name, at, path = job.spec.job, action.boundary, action.path
            told = Publish(machine.node, name, generation, writer, at, path, f"save-{generation}")
            self.say(machine, told)
        self.answer(job, Phase.SAVE, generation)

    # ------------------------------------------------------------ workers

    def _seat(self, job: Trainee, rank: Rank, machine: Machine, incarnation: int) -> None:
        job.seats[rank] = (machine, incarnation)
        job.refresh(rank)

    def _start(self, job: Trainee, order: Order, action: StartWorkers) -> None:
        machine = self.machines[order.nodes[0]]
        generation = order.generation
        if not machine.reachable or generation < job.generation:
            return
        (seat,) = action.seats
        if job.generation != generation:
            job.stop(self.now, "starting")
            job.generation, job.unborn = generation, True
            self.staged(job)
            for some in (job.empty, job.corrupt, job.targets, job.leavers):
                some.clear()
        if machine.worker != (job, seat.rank, seat.incarnation):
            machine.worker, machine.generation = (job, seat.rank, seat.incarnation), generation
            machine.standby, machine.ready = None, False
        self._seat(job, seat.rank, machine, seat.incarnation)
        if job.stage == "training":
            self.answer(job, Phase.RESUME, generation, {seat.rank})
        elif job.starting != generation:
            job.starting = generation
            seconds = STARTUP_SECONDS * (2 if action.resume_from else 1)
            self.later(seconds, lambda: self._started(job, generation))

    def _started(self, job: Trainee, generation: Generation) -> None:
        if job.generation != generation or job.stage != "starting":
            return
        if job.bad or self.leader is None:
            # Some never started: all wait for them, as a rendezvous does.
            self.later(1.0, lambda: self._started(job, generation))
            return
        known = self.leader.cluster.jobs[job.spec.job]
        start = max(known.published_step, 0)
        if start < job.committed:
            if not known.fallbacks and not self.declared(job):
                raise Violation(f"{job.spec.job} starts at {start}, {job.committed} is committed")
            job.lost_steps += job.committed - start
        self._check_seats(job)
        job.train(self.now, start)
        self.staged(job)
        self.answer(job, Phase.RESUME, generation)

    def _assign(self, job: Trainee, order: Order, action: Assign) -> None:
        seat, machine = action.seat, self.machines[action.seat.node]
        if not machine.reachable or self.leader is None:
            return
        mine: tuple[Trainee, Rank, int] = (job, seat.rank, seat.incarnation)
        warm = machine.standby is job and machine.ready
        if machine.worker != mine:
            if machine.worker is not None and machine.worker[0].seats[machine.worker[1]] == (
                machine,
                machine.worker[2],
            ):
                raise Violation(f"{machine.node} gets {seat}, and {machine.worker[1:]} is there")
            machine.worker, machine.standby, machine.ready = mine, None, False
        machine.generation = order.generation
        moving = self.leader.cluster.jobs[job.spec.job].migration
        if moving is not None and moving.phase is Phase.WARM:
            job.targets[seat.rank] = (machine, seat.incarnation)
        else:
            job.targets.pop(seat.rank, None)
            self._seat(job, seat.rank, machine, seat.incarnation)
            job.empty.add(seat.rank)
        generation = order.generation

        def ready() -> None:
            if machine.worker == mine and machine.generation == generation:
                told = (SeatReport(seat.rank),)
                name = job.spec.job
                self.say(machine, PhaseReport(machine.node, name, generation, Phase.QUIESCE, told))

        self.later(JOIN_SECONDS if warm else STARTUP_SECONDS / 5, ready)

    def _fence(self, job: Trainee, action: Fence) -> None:
        for seat in action.seats:
            machine = self.machines[seat.node]
            if machine.reachable:
                self.kill(machine, (job, seat.rank, seat.incarnation), -9, "fenced")

    def kill(
        self, machine: Machine, use: tuple[Trainee, Rank, int], code: int, detail: str
    ) -> None:
        """A worker dies, or is not there any more; its agent says so."""
        job, rank, incarnation = use
        step = job.step_at(self.now)
        if machine.worker == use:
            machine.worker = None
        if job.seats[rank] == (machine, incarnation) and job.refresh(rank):
            self.broke(job)
        if job.targets.get(rank) == (machine, incarnation):
            del job.targets[rank]
        told = Observed(
            machine.node,
            job.spec.job,
            Sign.EXIT,
            rank,
            incarnation,
            job.generation,
            step,
            code,
            detail,
        )
        self.later(EXIT_SEEN_SECONDS, lambda: self.say(machine, told))

    def broke(self, job: Trainee) -> None:
        """A collective cannot go on. Until they are told what to do, ranks complain."""
        if job.stage == "training":
            job.stop(self.now, "broken")
            self.staged(job)
            number = job.breaks
            self.later(STALL_SEEN_SECONDS, lambda: self._complain(job, number))
        elif job.stage in ("stopped", "whole"):
            job.stage = "stopped"

    def _complain(self, job: Trainee, number: int) -> None:
        if job.stage != "broken" or job.breaks != number:
            return
        able = (r for r in range(job.size) if r not in job.bad)
        for rank in map(Rank, able):
            machine, incarnation = job.seats[rank]
            if machine is not None and machine not in self.away:
                told = Observed(
                    machine.node,
                    job.spec.job,
                    Sign.BROKEN,
                    rank,
                    incarnation,
                    job.generation,
                    job.committed,
                    detail="a peer does not answer",
                )
                self.say(machine, told)
                break
        self.later(COMPLAINT_SECONDS, lambda: self._complain(job, number))

    def _standby(self, job: Trainee, machine: Machine) -> None:
        if not machine.reachable:
            return
        if machine.standby is not job:
            machine.standby, machine.ready = job, False

        def warm() -> None:
            if machine.standby is job and machine.up:
                machine.ready = True
                self.say(machine, StandbyReport(machine.node, job.spec.job, 0, 1, True))

        self.later(STARTUP_SECONDS / 5, warm)

    def _stop(self, job: Trainee, nodes: tuple[NodeId, ...]) -> None:
        job.stop(self.now, "off")
        self.staged(job)
        for node in nodes:
            machine = self.machines[node]
            if machine.reachable:
                if machine.worker is not None and machine.worker[0] is job:
                    machine.worker = None
                if machine.standby is job:
                    machine.standby, machine.ready = None, False
        job.bad = set(map(Rank, range(job.size)))
        job.targets.clear()
        job.leavers.clear()
