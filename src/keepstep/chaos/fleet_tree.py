"""How the simulated fleet speaks: streams of agents, and the tree through which ranks report.

The root of a job's tree, the node where the generation meets, sends one message for all ranks that
are in the same state. If the root is out of reach, each speaks for itself. What cannot be said
waits in a machine's outbox until it has said hello again.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Iterable
from random import Random

from keepstep.chaos.fleet_jobs import Machine, Trainee, all_but
from keepstep.chaos.fleet_leader import Leader
from keepstep.chaos.fleet_setting import labels_of
from keepstep.config import OrchestratorConfig
from keepstep.model import Generation, JobId, NodeId, Phase, Rank
from keepstep.orchestrator import admission, events
from keepstep.orchestrator.patience import Patience
from keepstep.wire import Hello, Message, PhaseReport, SeatReport, StandbyFact, WorkerFact

GATHER_SECONDS = 0.05
"""How long the tree gathers what its leaves say."""
AGAIN_SECONDS = 2.0
"""Between two tries of an agent that nobody lets in."""
SILENT_SECONDS_MAX = OrchestratorConfig().silent_seconds_max


class Tree:
    """Machines, jobs, a clock, and who hears whom."""

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
        self.sent_away = 0
        """Agents whose name was not free yet."""
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
            self.feed(message)
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
        able = self._let_in([m for m in some if m.up and not (m.cut or m.deaf or m.linked)])
        for machine in able:
            self.link(machine, well=True)
            machine.term_seen = max(machine.term_seen, self.leader.term)
        if able:
            self.feed(*map(self.hello, able))
        for machine in able:
            waiting, machine.outbox = machine.outbox, []
            if waiting and machine.reachable:
                self.feed(*waiting)

    def _let_in(self, some: Iterable[Machine]) -> list[Machine]:
        """As at the edge: the name of one who may come back is not given to another boot yet."""
        assert self.leader is not None
        cluster, now = self.leader.cluster, self.leader.now(self.now)
        patience, able = Patience(SILENT_SECONDS_MAX, cluster), []
        for machine in some:
            holder = admission.Holder(cluster.nodes.get(machine.node))
            seconds = patience.of(machine.node)
            if admission.why_not_name(self.hello(machine), holder, now, seconds) is None:
                able.append(machine)
            else:
                self.sent_away += 1
                self.later(AGAIN_SECONDS, functools.partial(self.come_again, machine))
        return able

    def come_again(self, machine: Machine) -> None:
        """An agent tries until somebody serves; see fleet_faults.py."""

    # ------------------------------------------------------------ the tree

    def answer(
        self,
        job: Trainee,
        phase: Phase,
        generation: Generation,
        ranks: set[Rank] | None = None,
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
        self.later(GATHER_SECONDS, lambda: self._flush(job, phase, generation))

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
