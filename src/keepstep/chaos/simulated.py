"""Simulated nodes, agents and workers: a plain model of the worker protocol, for the simulator.

A worker has a boundary, state in portions (of each one number, that all its holders agree on) and
private entries that live in two nodes' memory. Training is one synchronous collective per step, and
where the state is sharded a vote before the update; what they cannot do with a dead, stopped or
cut-off member is the whole point. Nothing here decides anything: agents carry out orders and tell
what they see.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Protocol

from keepstep.agent.reports import joined
from keepstep.belonging import word
from keepstep.model import (
    EXIT_REQUEUE,
    Generation,
    JobId,
    JobSpec,
    NodeId,
    Phase,
    Rank,
    Seat,
    Sign,
    Term,
)
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
    Published,
    Quiesce,
    Reform,
    Resume,
    Save,
    SeatReport,
    Stalled,
    StallFact,
    StandbyFact,
    StandbyReport,
    StartStandby,
    StartWorkers,
    Stop,
    WorkerFact,
)

STALL_SECONDS = 4.0
STEP_SECONDS = 0.06
RING_ENTRIES = 4

Rings = dict[Rank, dict[int, int]]
"""The private entries of a job's ranks that one node's memory holds, by boundary."""


class Collectives(Protocol):
    """What the ranks of a job do together, as far as an agent is concerned."""

    base: int

    def held(self, rank: Rank) -> tuple[str, ...]: ...
    def launch(self, worker: Worker) -> None: ...
    def catch_up(self, worker: Worker, action: Apply) -> None: ...
    def reform(self, worker: Worker, action: Reform) -> None: ...
    def save(self, worker: Worker, action: Save) -> str: ...
    def die(self, worker: Worker, sign: Sign, exit_code: int, detail: str = "") -> None: ...


class World(Protocol):
    """What the simulated parts need of their world."""

    random: Random

    def now(self) -> float: ...
    def later(self, seconds: float, act: Callable[[], None]) -> None: ...
    def say(self, node: NodeId, message: Message) -> None: ...
    def group(self, job: JobId) -> Collectives: ...
    def agent(self, node: NodeId) -> Agent | None: ...
    def agents(self) -> list[Agent]: ...


@dataclass(slots=True, eq=False)
class Worker:
    """One training process."""

    job: JobId
    seat: Seat
    generation: Generation
    mode: str = "starting"
    """starting | training | broken | quiesced | reforming | ready | saved | leaving | finished"""
    joiner: bool = False
    alive: bool = True
    stopped: bool = False
    boundary: int = -1
    state: dict[str, int] = field(default_factory=dict)
    """By portion: a function of the boundary, unless something went wrong."""
    ready: bool = False
    """It has voted for the update of its step, and not made it."""
    intact: bool = False
    launched: int = 0
    moved_at: float = 0.0
    first_step: int = -1
    last: PhaseReport | None = None
    stride: int = 1
    broken: bool = False
    """Told so by a collective, not by an order."""
    lies: bool = False
    """Sends other bytes than it holds."""
    stop_at: tuple[int, Generation] | None = None
    """Trains on to this boundary, then follows that generation's Quiesce."""
    leaves_in: Generation = Generation(0)
    """In this generation its rank is with another worker."""

    @property
    def rank(self) -> Rank:
        return self.seat.rank


@dataclass(slots=True)
class StandbySlot:
    job: JobId
    ready: bool = False
    serial: int = 0


def state_at(portions: tuple[str, ...], boundary: int) -> dict[str, int]:
    """What every holder of these portions must hold at a boundary."""
    return {name: boundary * 1_000_003 + zlib.crc32(name.encode()) for name in portions}


def digest_of(state: int) -> str:
    return hashlib.sha256(str(state).encode()).hexdigest()[:16]


class Agent:
    """One node: its agent, its memory, its workers. `up` is the machine, `runs` is the agent."""

    def __init__(
        self, world: World, node: NodeId, slots: int, labels: dict[str, str] | None = None
    ) -> None:
        self.world = world
        self.node = node
        self.slots = slots
        self.labels = labels or {}
        self.boots = 1
        self.up = True
        self.runs = True
        self.cut = False
        self.linked = False
        self.session = 0
        self.store_port = 1
        self.term = Term(0)
        self.seq = 0
        """Of the journal, as the last order that was obeyed here knew it."""
        self.generations: dict[JobId, Generation] = {}
        self.words: dict[JobId, str] = {}
        self.workers: list[Worker] = []
        self.standbys: dict[int, StandbySlot] = {}
        self.rings: dict[JobId, Rings] = {}
        self.ended: list[Observed] = []
        self.doomed_standby = False
        self.slow_to_leave = False
        """Its workers do not end at once when they are told to leave."""

    # ------------------------------------------------------------ telling

    def hello(self) -> Hello:
        return Hello(
            self.node,
            f"addr-{self.node}",
            self.slots,
            peer_port=7000,
            store_port=self.store_port,
            boot=f"b{self.boots}",
            workers=tuple(
                WorkerFact(w.job, w.rank, w.seat.slot, w.seat.incarnation, w.generation)
                for w in self.workers
                if w.alive
            ),
            standbys=tuple(
                StandbyFact(s.job, slot, 1, s.ready) for slot, s in sorted(self.standbys.items())
            ),
            term_seen=self.term,
            seq_seen=self.seq,
            obeyed={str(job): generation for job, generation in self.generations.items()},
            belongs={str(job): word for job, word in self.words.items()},
            labels=self.labels,
        )

    def introduce(self) -> None:
        """Hello, then what may have been lost: how workers ended, and the last reports."""
        self.tell(self.hello())
        for observed in self.ended[-20:]:
            self.tell(observed)
        for worker in self.workers:
            if worker.alive and worker.last is not None:
                self.tell(worker.last)
            if worker.alive and worker.broken and worker.mode == "broken":
                self.observe(worker, Sign.BROKEN, detail="still broken")

    def tell(self, message: Message) -> None:
        if self.up and self.runs and self.linked and not self.cut:
            self.world.say(self.node, message)

    def ring(self, job: JobId, rank: Rank) -> dict[int, int]:
        """The private entries of a rank that this node's memory holds."""
        return self.rings.get(job, {}).get(rank, {})

    def report(self, worker: Worker, phase: Phase, problem: str = "") -> None:
        seat = SeatReport(
            worker.rank,
            worker.boundary,
            worker.intact,
            {name: digest_of(value) for name, value in worker.state.items()},
            worker.ready and phase is Phase.QUIESCE,
            self.world.group(worker.job).held(worker.rank) if phase is Phase.RESUME else (),
            tuple(sorted(self.ring(worker.job, worker.rank))),
            state_bytes=1000,
            step=worker.boundary,
            step_seconds=STEP_SECONDS if worker.intact else 0.0,
            moved_bytes=1000 if phase is Phase.VERIFY and worker.joiner else 0,
            moved_seconds=0.1 if phase is Phase.VERIFY and worker.joiner else 0.0,
            problem=problem,
        )
        report = PhaseReport(self.node, worker.job, worker.generation, phase, (seat,))
        worker.last = report
        self.tell(self._gathered(report))

    def _gathered(self, report: PhaseReport) -> PhaseReport:
        """With what the neighbours have said of the same phase: as an agent sends it."""
        told = (w.last for w in self.workers if w.alive and w.last is not None)
        same = [each for each in told if replace(each, seats=()) == replace(report, seats=())]
        seats = sorted((seat for each in same for seat in each.seats), key=lambda seat: seat.rank)
        return joined(replace(report, seats=tuple(seats)))

    def observe(self, worker: Worker, sign: Sign, exit_code: int = 0, detail: str = "") -> None:
        observed = Observed(
            self.node,
            worker.job,
            sign,
            worker.rank,
            worker.seat.incarnation,
            worker.generation,
            worker.boundary,
            exit_code,
            detail,
        )
        if sign is not Sign.BROKEN:
            self.ended.append(observed)
        self.tell(observed)

    # ------------------------------------------------------------ obeying

    def obey(self, order: Order) -> None:
        if not (self.up and self.runs) or self.cut or order.term < self.term:
            return
        self.term, self.seq = order.term, order.seq
        known = self.generations.get(order.job, Generation(0))
        # Those that name their victim or their slot exactly are followed in any case.
        exact = isinstance(order.action, Fence | StartStandby | DropStandby)
        if order.generation < known and not exact:
            return
        self.generations[order.job] = max(known, order.generation)
        if isinstance(order.action, StartWorkers | Assign | Reform):
            secret = order.action.membership.secret
            self.words[order.job] = word(secret, order.job, order.generation, self.node)
        match order.action:
            case StartWorkers(seats=seats, membership=membership, resume_from=origin):
                if order.generation > known and not self._of(order.job):
                    # From the top of the script: entries of an earlier run would be lies.
                    self.rings.pop(order.job, None)
                for seat in seats:
                    self._start(order, seat, membership.mirror_stride, origin)
            case StartStandby(spec=spec, slot=slot):
                self._start_standby(spec, slot)
            case DropStandby(slot=slot):
                if slot in self.standbys and self.standbys[slot].job == order.job:
                    del self.standbys[slot]
            case Assign(seat=seat):
                self._assign(order, seat)
            case Fence(seats=seats):
                self._fence(order.job, seats)
            case Agree():
                for worker in self._of(order.job):
                    self._agree(worker, order.generation)
            case Quiesce(at=at, leaving=leaving):
                for worker in self._of(order.job):
                    if worker.seat in leaving:
                        worker.leaves_in = order.generation
                    if worker.mode == "training" and not worker.stopped and worker.boundary < at:
                        worker.stop_at = (at, order.generation)
                    else:
                        self.quiesce(worker, order.generation)
            case Apply(ranks=ranks):
                for worker in self._of(order.job):
                    here = worker.generation == order.generation and worker.mode == "quiesced"
                    stays = worker.leaves_in != order.generation
                    if here and stays and worker.rank in ranks:
                        self.world.group(worker.job).catch_up(worker, order.action)
            case Reform(membership=membership):
                for worker in self._of(order.job):
                    worker.stride = membership.mirror_stride
                    stays = worker.leaves_in != order.generation
                    here = worker.generation == order.generation and worker.mode == "quiesced"
                    if here and stays:
                        self.world.group(worker.job).reform(worker, order.action)
            case Resume(boundary=boundary):
                for worker in self._of(order.job):
                    if worker.generation == order.generation and worker.mode == "ready":
                        self._resume(worker, boundary)
            case Save():
                self._save(order, order.action)
            case Stop(exit_code=exit_code):
                self._stop(order.job, exit_code)

    def _of(self, job: JobId) -> list[Worker]:
        """Those who can follow an order."""
        mine = (worker for worker in self.workers if worker.alive and worker.job == job)
        return [worker for worker in mine if worker.mode != "leaving"]

    def _known(self, job: JobId, seat: Seat) -> Worker | None:
        for worker in self.workers:
            if worker.job == job and worker.seat == seat:
                return worker
        return None

    def _vacate(self, slot: int) -> None:
        """Whoever is still on the slot ends before somebody else begins there."""
        for worker in self.workers:
            if worker.alive and worker.seat.slot == slot:
                self.world.group(worker.job).die(worker, Sign.EXIT, -9)

    def _start(self, order: Order, seat: Seat, stride: int, origin: str) -> None:
        if self._known(order.job, seat) is not None:
            return
        self._vacate(seat.slot)
        self.standbys.pop(seat.slot, None)
        worker = Worker(order.job, seat, order.generation, stride=stride)
        self.workers.append(worker)
        # As planning.save names it: boundary-<step>-g<generation>.
        start = int(origin.rsplit("-", 2)[1]) if origin else 0

        def begin() -> None:
            if worker.alive and worker.mode == "starting" and self.up:
                held = self.world.group(worker.job).held(worker.rank)
                worker.boundary, worker.state, worker.intact = start, state_at(held, start), True
                worker.first_step = start
                self.world.group(worker.job).base = start
                worker.mode = "training"
                self.world.group(worker.job).launch(worker)

        self.world.later(self.world.random.uniform(0.2, 1.0), begin)

    def _start_standby(self, spec: JobSpec, slot: int) -> None:
        there = self.standbys.get(slot)
        if there is not None and there.job == spec.job:
            if there.ready:
                self.tell(StandbyReport(self.node, spec.job, slot, 1, True))
            return
        if any(worker.alive and worker.seat.slot == slot for worker in self.workers):
            self.tell(StandbyReport(self.node, spec.job, slot, 1, False, "the slot has a rank"))
            return
        parked = StandbySlot(spec.job)
        self.standbys[slot] = parked

        def ready() -> None:
            if self.standbys.get(slot) is parked and self.up:
                parked.ready = True
                self.tell(StandbyReport(self.node, spec.job, slot, 1, True))

        self.world.later(self.world.random.uniform(0.3, 2.0), ready)

    def _assign(self, order: Order, seat: Seat) -> None:
        known = self._known(order.job, seat)
        if known is not None:
            if known.alive and known.generation < order.generation:
                self.quiesce(known, order.generation)
            return
        self._vacate(seat.slot)
        warm = self.standbys.pop(seat.slot, None)
        worker = Worker(order.job, seat, order.generation, joiner=True)
        self.workers.append(worker)
        if self.doomed_standby:
            self.doomed_standby = False
            self.world.later(0.05, lambda: self.world.group(worker.job).die(worker, Sign.EXIT, -9))

        def joined() -> None:
            if worker.alive and self.up and worker.mode == "starting" and not worker.stopped:
                worker.mode = "quiesced"
                self.report(worker, Phase.QUIESCE)

        delay = 0.5 if warm is not None and warm.ready and warm.job == order.job else 2.0
        self.world.later(self.world.random.uniform(0.1, delay), joined)

    def _fence(self, job: JobId, seats: tuple[Seat, ...]) -> None:
        for seat in seats:
            worker = self._known(job, seat)
            if worker is not None and worker.alive:
                self.world.group(worker.job).die(worker, Sign.EXIT, -9)
            elif seat.node == self.node:
                # Not here, or not any more: that is an answer too.
                gone = Observed(self.node, job, Sign.EXIT, seat.rank, seat.incarnation)
                self.tell(gone)

    def _agree(self, worker: Worker, generation: Generation) -> None:
        if worker.mode == "training" and not worker.stopped and worker.generation < generation:
            seat = SeatReport(worker.rank, worker.boundary, step_seconds=STEP_SECONDS)
            report = PhaseReport(self.node, worker.job, generation, Phase.AGREE, (seat,))
            self.tell(report)

    def quiesce(self, worker: Worker, generation: Generation) -> None:
        worker.stop_at = None
        if generation <= worker.generation:
            if worker.generation == generation and worker.mode == "quiesced" and worker.last:
                self.tell(worker.last)
            return
        worker.generation = generation
        worker.last = None
        if worker.stopped:
            return
        if worker.mode == "starting":
            if not worker.joiner:
                self.report(worker, Phase.QUIESCE)
            return

        def quiet() -> None:
            fit = worker.alive and self.up and not worker.stopped
            if fit and worker.generation == generation and worker.mode != "finished":
                worker.mode = "quiesced"
                if worker.leaves_in != generation:
                    # Else whoever has its rank speaks for it.
                    self.report(worker, Phase.QUIESCE)

        worker.mode, worker.broken = "broken", False
        self.world.later(self.world.random.uniform(0.005, 0.1), quiet)

    def _resume(self, worker: Worker, boundary: int) -> None:
        held = self.world.group(worker.job).held(worker.rank)
        assert worker.boundary == boundary, f"{worker.seat} resumes at another boundary"
        assert worker.state == state_at(held, boundary), f"{worker.seat} resumes with wrong state"
        worker.mode = "training"
        worker.first_step = worker.boundary
        worker.launched = 0
        self.world.group(worker.job).launch(worker)

    def _save(self, order: Order, action: Save) -> None:
        for worker in self._of(order.job):
            if worker.generation != order.generation or worker.leaves_in == order.generation:
                continue
            if worker.mode == "saved" and worker.last is not None:
                self.tell(worker.last)
            elif worker.mode == "quiesced":
                problem = self.world.group(worker.job).save(worker, action)
                if worker.rank == action.writers[min(action.writers)] and not problem:
                    self._publish(worker, action)
                worker.mode = "saved"
                self.report(worker, Phase.SAVE, problem)

    def _publish(self, worker: Worker, action: Save) -> None:
        assert worker.boundary == action.boundary, "the writer is not at the boundary"
        name = f"save-{worker.generation}"
        at, path = action.boundary, action.path
        self.tell(Publish(self.node, worker.job, worker.generation, worker.rank, at, path, name))

    def _stop(self, job: JobId, exit_code: int) -> None:
        for worker in self._of(job):
            if exit_code == EXIT_REQUEUE and self.slow_to_leave:
                self._leave_slowly(worker)
            else:
                worker.alive = False
        self.rings.pop(job, None)
        self.standbys = {s: p for s, p in self.standbys.items() if p.job != job}

    def _leave_slowly(self, worker: Worker) -> None:
        """A process that saved its part takes its time to end; its slot may be used by then."""
        worker.mode = "leaving"

        def end() -> None:
            if worker.alive and self.up:
                worker.alive = False
                self.observe(worker, Sign.EXIT, EXIT_REQUEUE)

        self.world.later(self.world.random.uniform(0.0, 2.0), end)

    def drop_standby(self, slot: int) -> None:
        """A parked worker dies."""
        parked = self.standbys.pop(slot)
        self.tell(StandbyReport(self.node, parked.job, slot, 1, False, "killed"))

    def store_lost(self, job: JobId) -> None:
        """The store process dies; its successor listens elsewhere."""
        self.store_port += 1
        self.tell(Observed(self.node, job, Sign.STORE_LOST))

    def store_moved(self) -> None:
        """The same, told by a new Hello."""
        self.store_port += 1
        self.tell(self.hello())

    def answered(self, answer: Published) -> None:
        """The model's publishers do not retry."""

    # ------------------------------------------------------------ watching

    def watch(self) -> None:
        """The hang detector: ranks without progress, told again while they stand still."""
        facts: dict[tuple[JobId, Generation], list[StallFact]] = {}
        for worker in self.workers:
            still = self.world.now() - worker.moved_at > STALL_SECONDS
            if worker.alive and still and worker.mode == "training":
                fact = StallFact(
                    worker.rank,
                    worker.seat.incarnation,
                    worker.boundary,
                    worker.launched,
                    worker.stopped,
                )
                facts.setdefault((worker.job, worker.generation), []).append(fact)
        for (job, generation), ranks in facts.items():
            self.tell(Stalled(self.node, job, generation, tuple(ranks), STALL_SECONDS))
