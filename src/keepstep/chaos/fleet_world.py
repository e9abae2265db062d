"""The simulated fleet obeys: orders of the real brain in, what agents would say out.

Agents report through a tree: its root, the node where the generation meets, sends one message for
all ranks that are in the same state. If the root is out of reach, each speaks for itself. What
cannot be said waits in a machine's outbox until it has said hello again.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from random import Random

from keepstep.chaos.fleet_jobs import Machine, Trainee, all_but
from keepstep.chaos.fleet_leader import Leader
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
    labels_of,
)
from keepstep.chaos.simulated_checks import Violation
from keepstep.model import Generation, JobId, NodeId, Phase, Rank, Sign, Term
from keepstep.orchestrator import events
from keepstep.wire import (
    Agree,
    Apply,
    Assign,
    DropStandby,
    Fence,
    Hello,
    Message,
    Observed,
    Order,
    PhaseReport,
    Publish,
    Quiesce,
    Reform,
    Resume,
    Save,
    SeatReport,
    StandbyFact,
    StandbyReport,
    StartStandby,
    StartWorkers,
    Stop,
    WorkerFact,
)

GATHER_SECONDS = 0.05
"""How long the tree gathers what its leaves say."""
COMPLAINT_SECONDS = 5.0
"""Between two complaints of ranks that stand still and hear nothing."""
SMALL_ORDER_NODES = 4


class World:
    """Machines, jobs and a clock. Knows nothing of faults: see fleet_faults.py."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._tie = itertools.count()
        self.machines: dict[NodeId, Machine] = {}
        self.away: set[Machine] = set()
        """Machines that the orchestrator does not reach."""
        self.jobs: dict[JobId, Trainee] = {}
        self.leader: Leader | None = None
        self.refused = 0
        """Orders of a term that is over."""
        self.messages = 0

    # ------------------------------------------------------------ time

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._tie), act))

    def run_until(self, moment: float) -> None:
        while self._queue and self._queue[0][0] <= moment:
            self.now, _, act = heapq.heappop(self._queue)
            act()
        self.now = moment

    def declared(self, job: Trainee) -> bool:
        """Whether a run of this job ended in a fallback that was recorded as one; see fleet.py."""
        return False

    def staged(self, job: Trainee) -> None:
        """A job has begun to do something else; see fleet.py."""

    # ------------------------------------------------------------ speaking

    def feed(self, *happened: events.Event) -> None:
        """To whoever leads; without a leader nobody hears it."""
        if self.leader is not None and not self.leader.mute:
            self.messages += len(happened)
            self.leader.feed(happened, self.now)

    def say(self, machine: Machine, message: Message) -> None:
        """An agent's word, now or after its next hello."""
        if machine.reachable and self.leader is not None and not self.leader.mute:
            self.feed(message)  # type: ignore[arg-type]
        elif machine.up:
            machine.outbox.append(message)

    def link(self, machine: Machine, *, well: bool) -> None:
        """Keep the set of machines out of reach up to date."""
        machine.linked = well
        if machine.reachable:
            self.away.discard(machine)
        else:
            self.away.add(machine)

    def hello(self, machine: Machine) -> Hello:
        workers: tuple[WorkerFact, ...] = ()
        if machine.worker is not None:
            job, rank, incarnation = machine.worker
            fact = WorkerFact(job.spec.job, rank, 0, incarnation, machine.generation)
            workers = (fact,)
        standbys: tuple[StandbyFact, ...] = ()
        if machine.standby is not None:
            standbys = (StandbyFact(machine.standby.spec.job, 0, 1, machine.ready),)
        return Hello(
            machine.node,
            machine.node,
            1,
            1,
            2,
            f"b{machine.boot}",
            workers,
            standbys,
            machine.term_seen,
            labels=labels_of(machine.number),
        )

    def connect(self, some: Iterable[Machine]) -> None:
        """These agents' streams begin: hello first, then what waited."""
        if self.leader is None:
            return
        able = [m for m in some if m.up and not (m.cut or m.deaf or m.linked)]
        for machine in able:
            self.link(machine, well=True)
            machine.term_seen = max(machine.term_seen, self.leader.term)
        if able:
            self.feed(*map(self.hello, able))
        for machine in able:
            waiting, machine.outbox = machine.outbox, []
            if waiting and machine.reachable:
                self.feed(*waiting)  # type: ignore[arg-type]

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
            self._answer(job, Phase.QUIESCE, generation, ranks, GATHER_SECONDS)
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
                self._answer(job, Phase.QUIESCE, generation, None, GATHER_SECONDS)

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
                self._answer(job, Phase.AGREE, generation, ranks, GATHER_SECONDS)
            case _ if generation != job.generation:
                return
            case Reform() if job.stage == "whole":
                self._answer(job, Phase.VERIFY, generation, ranks, GATHER_SECONDS)
            case Reform():
                self._check_boundary(job, action.boundary)
                seconds = REFORM_SECONDS + job.groups_seconds
                seconds += TRANSFER_SECONDS if action.moves else 0.0
                self.later(seconds, lambda: self._whole(job, generation))
            case Resume() if job.stage == "training":
                self._answer(job, Phase.RESUME, generation, ranks, GATHER_SECONDS)
            case Resume():
                seconds = RESUME_SECONDS + job.step_seconds
                self.later(seconds, lambda: self._resumed(job, generation, action.boundary))
            case Save() if job.stage == "saved":
                self._answer(job, Phase.SAVE, generation, ranks, GATHER_SECONDS)
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
        self._answer(job, Phase.VERIFY, generation, None, GATHER_SECONDS)

    def _resumed(self, job: Trainee, generation: Generation, boundary: int) -> None:
        if job.generation != generation or job.bad or job.stage != "whole":
            return
        self._check_seats(job)
        job.train(self.now, boundary)
        self.staged(job)
        self._answer(job, Phase.RESUME, generation, None, GATHER_SECONDS)

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
        self._answer(job, Phase.SAVE, generation, None, GATHER_SECONDS)

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
            self._answer(job, Phase.RESUME, generation, {seat.rank}, GATHER_SECONDS)
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
        self._answer(job, Phase.RESUME, generation, None, GATHER_SECONDS)

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

    # ------------------------------------------------------------ the tree

    def _answer(
        self,
        job: Trainee,
        phase: Phase,
        generation: Generation,
        ranks: set[Rank] | None,
        seconds: float,
    ) -> None:
        """These ranks, or all, report a phase once the tree has gathered them."""
        key = (phase, generation)
        known = job.answering.get(key, ())
        if known != ():
            assert not isinstance(known, tuple)
            merged = None if known is None or ranks is None else known | ranks
            job.answering[key] = merged
            return
        job.answering[key] = ranks
        self.later(seconds, lambda: self._flush(job, phase, generation))

    def _flush(self, job: Trainee, phase: Phase, generation: Generation) -> None:
        ranks = job.answering.pop((phase, generation))
        if self.leader is None or (phase is not Phase.AGREE and generation != job.generation):
            return
        known = self.leader.cluster.jobs[job.spec.job]
        if known.roster is None or not _fits(job, phase):
            return
        hidden = self._hidden(job)
        excluded = {*job.bad, *job.corrupt, *hidden}
        if phase is Phase.QUIESCE:
            excluded |= job.empty
        wrong = [
            SeatReport(r, job.committed, False) for r in sorted(job.corrupt - job.bad - hidden)
        ]
        root = self.machines[known.roster.store_node]
        if ranks is not None or not root.reachable:
            named = range(job.size) if ranks is None else sorted(ranks)
            for rank in (Rank(r) for r in named if r not in excluded):
                machine = job.seated(rank)
                if machine is not None:
                    told = job.report(phase, rank, "", self.now)
                    self._tell(machine, job, generation, phase, (told,))
            return
        alike = all_but(job.size, excluded)
        if alike:
            first = next(r for r in range(job.size) if r not in excluded)
            told = job.report(phase, Rank(first), alike, self.now)
            self._tell(root, job, generation, phase, (told, *wrong))

    def _hidden(self, job: Trainee) -> set[Rank]:
        """Ranks whose agents nobody hears. Who only used to have the seat is none of them."""
        uses = ((machine, machine.worker) for machine in self.away)
        return {
            use[1]
            for machine, use in uses
            if use is not None and use[0] is job and job.seats[use[1]] == (machine, use[2])
        }

    def _tell(
        self,
        machine: Machine,
        job: Trainee,
        generation: Generation,
        phase: Phase,
        seats: tuple[SeatReport, ...],
    ) -> None:
        name = job.spec.job
        self.say(machine, PhaseReport(machine.node, name, generation, phase, seats))


def _fits(job: Trainee, phase: Phase) -> bool:
    """Whether a job can still say this of itself."""
    stages = {
        Phase.AGREE: ("training",),
        Phase.QUIESCE: ("stopped",),
        Phase.VERIFY: ("whole",),
        Phase.RESUME: ("training",),
        Phase.SAVE: ("saved",),
    }
    return job.stage in stages[phase]
