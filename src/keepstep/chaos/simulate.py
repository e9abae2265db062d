"""The seeded simulator: the real brain, a virtual clock, and everything that can go wrong.

    python -m keepstep.chaos.simulate --seeds 500

One seed is one job on a small cluster under a handful of faults; every third seed is several jobs
that compete for it, and in every fifth the first job's state is sharded. Streams drop and come back
(what was in flight is lost, late or doubled), workers, agents, nodes, racks and the orchestrator
die, spares run out, disks are full, user code raises. After every step the invariants are checked;
a restart of the orchestrator replays snapshot and journal and must arrive at the very same state. A
failure names its seed.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from keepstep.chaos.simulated import Agent, Worker
from keepstep.chaos.simulated_checks import Referee, Violation, ghosts
from keepstep.chaos.simulated_faults import Faults
from keepstep.chaos.simulated_group import Group
from keepstep.chaos.simulated_setting import (
    POLICY,
    TRAIN,
    Setting,
    one_job,
    several_jobs,
    sharded,
)
from keepstep.model import JobId, JobSpec, JobState, NodeId, Severity, Term
from keepstep.orchestrator import brain, events, nodes, policy, reconcile, rules, state
from keepstep.orchestrator.liveness import Witness
from keepstep.orchestrator.stepped import Waiting, kept_of, next_of
from keepstep.orchestrator.turn import Note
from keepstep.wire import Hello, JobPulse, Message, Order, PhaseReport, Published

__all__ = ["Result", "Simulation", "Summary", "Violation", "run_seed", "run_seeds"]


MONITOR_SECONDS = 20.0
"""So long after it fell silent a monitor speaks of a node, if the brain still doubts itself."""
BUSY_CHANCE = 0.5
"""That the loop has not yet come to a report when the next message is there."""
QUIET_SECONDS = 80.0
"""More than any budget and any number of steps: after it nothing happens any more."""


@dataclass(frozen=True, slots=True)
class Result:
    """How one seed ended."""

    seed: int
    outcome: str
    faults: tuple[str, ...]
    incidents: tuple[str, ...]
    generations: int
    steps: int
    events: int
    restarts: int
    vouched: int
    moves: int
    """Planned migrations that released their leavers."""
    others: tuple[str, ...] = ()
    """How the other jobs ended."""
    loans: int = 0
    """Times that a job was parked for another one, and went on."""
    reclaimed: int = 0
    """Times that a borrower was parked in turn."""
    homecomings: int = 0
    sharded: bool = False
    caught_up: int = 0
    """Times that ranks made an update after others, because they were told to."""


@dataclass(slots=True)
class Summary:
    """Many seeds."""

    results: list[Result] = field(default_factory=list)
    seconds: float = 0.0

    def lines(self) -> list[str]:
        ends = Counter(result.outcome for result in self.results)
        others = Counter(end for result in self.results for end in result.others)
        kinds = Counter(kind for result in self.results for kind in result.faults)
        outcomes = Counter(out for result in self.results for out in result.incidents)
        return [
            "jobs:      " + ", ".join(f"{n} {end}" for end, n in sorted(ends.items())),
            "others:    " + ", ".join(f"{n} {end}" for end, n in sorted(others.items())),
            "incidents: " + ", ".join(f"{n} {out}" for out, n in sorted(outcomes.items())),
            "faults:    " + ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())),
            f"events:    {self._sum('events')}, {self._sum('restarts')} restarts replayed whole",
            f"silence:   {self._sum('vouched')} times vouched for",
            f"planned:   {self._sum('moves')} moves made, {self._sum('homecomings')} went home",
            f"lending:   {self._sum('loans')} loans, {self._sum('reclaimed')} reclaimed",
            f"sharded:   {self._sum('sharded')} seeds, {self._sum('caught_up')} times caught up",
            f"{len(self.results)} seeds, all invariants held, {self.seconds:.1f} s of CPU",
        ]

    def _sum(self, name: str) -> int:
        return sum(getattr(result, name) for result in self.results)


class Simulation(Faults):
    """One seed: the world around the brain."""

    def __init__(self, seed: int, planned_moves: bool | None = None) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.planned_moves = seed % 2 == 1 if planned_moves is None else planned_moves
        """Every other seed also has operators, who drain nodes and move ranks."""
        self._now = 1000.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._tie = itertools.count()
        self._agents: dict[NodeId, Agent] = {}
        self.cluster = state.new_cluster(f"seed-{seed}")
        self.cluster.rules = rules.NEWEST
        self.snapshot = state.to_plain(self.cluster)
        self.journal: list[tuple[events.Event, float]] = []
        self.snapshot_seq = 0
        self.term = 0
        self.serving = True
        self.restarts = 0
        self.stepped = 0
        self.faults: list[str] = []
        self.user_faults: set[JobId] = set()
        self._witness = Witness()
        self.vouched = 0
        self.silent_since: dict[NodeId, float] = {}
        self.story: list[str] = []
        self.calm: Worker | None = None
        self.calm_generation = 0
        self.pending: list[JobId] = []
        """Jobs that are to be submitted, for the first time or again."""
        self._inbox: deque[Waiting] = deque()
        """What the loop has read and not stepped: reports pile up there, as at a busy leader."""
        self._busy = Random(f"busy {seed}")
        self._done = False
        self._changed_at = self._now
        self.setting = _setting(seed, self.random)
        shards = {self.setting.specs[0].job: self.setting.shards}
        self._groups = {
            spec.job: Group(self, spec.job, spec.world_size, steps, shards.get(spec.job, ()))
            for spec, steps in zip(self.setting.specs, self.setting.steps, strict=True)
        }
        for i, plan in enumerate(self.setting.nodes):
            node = NodeId(f"n{i}")
            agent = self._agents[node] = Agent(self, node, plan.slots, plan.labels)
            agent.slow_to_leave = self.setting.compete
        self._referee = Referee(self, self.planned_moves)

    # ------------------------------------------------------------ the world's face

    def now(self) -> float:
        return self._now

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self._now + seconds, next(self._tie), act))

    def group(self, job: JobId) -> Group:
        return self._groups[job]

    def agent(self, node: NodeId) -> Agent | None:
        return self._agents.get(node)

    def agents(self) -> list[Agent]:
        return list(self._agents.values())

    def say(self, node: NodeId, message: Message) -> None:
        """An agent's message: in order within its stream, lost with it, sometimes doubled."""
        agent = self._agents[node]
        session = agent.session
        delay = 0.002 + (0.2 if self.random.random() < 0.02 else 0.0)

        def arrive() -> None:
            # What was read before the stream broke may still be in the loop's inbox. A stream's
            # hello is never among it: the loop serves a node's newest stream only.
            late = not isinstance(message, Hello) and self.random.random() < 0.3
            if agent.session == session or late:
                self.feed(message)

        self.later(delay, arrive)
        if self.random.random() < 0.02 and not isinstance(message, Hello):
            self.later(delay + self.random.uniform(0, 3), arrive)

    # ------------------------------------------------------------ the orchestrator's loop

    def feed(self, event: events.Event) -> None:
        if not self.serving:
            return
        if isinstance(event, Hello) and (gap := self._gap(event)):
            self._inbox.append(Waiting(gap))
        self._inbox.append(Waiting(event))
        if isinstance(event, PhaseReport) and self._busy.random() < BUSY_CHANCE:
            self.later(0.002, self._work)
        else:
            self._work()

    @property
    def seq(self) -> int:
        return self.snapshot_seq + len(self.journal)

    def _gap(self, hello: Hello) -> events.JournalBehind | None:
        """Nobody has obeyed what the journal does not have."""
        if gap := reconcile.gap(self.cluster, Term(self.term), self.seq, hello):
            raise Violation(f"the journal is whole, and yet: {gap}")
        return None

    def _work(self) -> None:
        while self._inbox and self.serving:
            self._step(next_of(self._inbox).event)

    def _step(self, event: events.Event) -> None:
        checked = self.stepped % 997 == 0
        before = state.fingerprint(self.cluster) if checked else ""
        frozen = self._frozen_generation()
        decision = brain.step(self.cluster, event, self._now)
        self.cluster = decision.cluster
        self.stepped += 1
        if decision.changed:
            self._changed_at = self._now
            self.journal.append((kept_of(event, decision), self._now))
        elif checked and before != state.fingerprint(self.cluster):
            raise Violation(f"{event} changed the state and did not say so")
        if frozen >= 0 and frozen < self._frozen_generation():
            raise Violation("a new generation although the cluster is frozen")
        for note in decision.notes:
            self.story.append(f"{self._now:9.3f} {note.phase:9} {self._told(note)}")
        if decision.changed:
            self._check(decision.notes)
            self._referee.check_orders(decision.orders)
        for order in decision.orders:
            self._send(order)
        for node, answer in decision.answers:
            self._answer(node, answer)

    def _frozen_generation(self) -> int:
        """The jobs' generations together, if nothing may be decided about them now; else -1."""
        jobs = self.cluster.jobs.values()
        still = [job.generation for job in jobs if policy.stands_still(self.cluster, job)]
        return sum(still) if still and len(still) == len(self.cluster.jobs) else -1

    def _told(self, note: Note) -> str:
        return f"{note.job:5} {note.why}" if self.setting.compete else note.why

    def _send(self, order: Order) -> None:
        order = replace(order, seq=self.seq)
        for node in order.nodes:
            agent = self._agents[node]
            session = agent.session
            if agent.linked:
                self.later(
                    0.002,
                    lambda a=agent, s=session: a.obey(order) if a.session == s else None,  # type: ignore[misc]
                )

    def _answer(self, node: NodeId, answer: Published) -> None:
        self._agents[node].answered(answer)

    def tick(self) -> None:
        for agent in self._agents.values():
            mute = not agent.up or agent.cut
            since = self.silent_since.setdefault(agent.node, self._now) if mute else None
            if since is None:
                self.silent_since.pop(agent.node, None)
            elif self.serving and self._now - since > POLICY.silent_seconds_max:
                self.feed(events.NodeSilent(agent.node))
        self._hear_witnesses()
        self._hear_monitor()
        self.feed(events.Tick())
        if self.serving:
            self._referee.tick()
        if not self._over():
            self.later(0.1, self.tick)

    def _hear_witnesses(self) -> None:
        """The steps that linked agents tell of vouch for nodes whose agents say nothing."""
        for agent in self._agents.values():
            for worker in agent.workers if agent.linked else ():
                step = worker.boundary
                self._witness.hear(JobPulse(worker.job, worker.generation, step, step, 0.05))
        for node in self._witness.vouches(nodes.jobs_on(self.cluster, self.cluster.doubtful)):
            self.vouched += 1
            self.feed(events.NodeVouched(node))

    def _hear_monitor(self) -> None:
        """Where the brain suspects itself, the site's own monitor tells it who is really gone."""
        for node, since in self.silent_since.items() if self.cluster.self_doubt else ():
            told = self.cluster.taints.get(node)
            if self._now - since > MONITOR_SECONDS and node in self.cluster.doubtful and not told:
                gone = events.TaintAsked(
                    node, "it does not answer", Severity.IMMINENT, source="monitor", seconds=1.0
                )
                self.feed(gone)

    def watch(self) -> None:
        for agent in self._agents.values():
            if agent.up and agent.runs:
                agent.watch()
        if not self._over():
            self.later(0.7, self.watch)

    def connect(self, agent: Agent, seconds: float) -> None:
        """An agent tries until somebody serves."""

        def attempt() -> None:
            if agent.linked or not (agent.up and agent.runs):
                return
            if not self.serving or agent.cut:
                self.later(0.3, attempt)
                return
            agent.linked = True
            agent.session += 1
            agent.introduce()

        self.later(seconds, attempt)

    def disconnect(self, agent: Agent) -> None:
        """The stream ends: what is in flight is lost."""
        if not agent.linked:
            return
        agent.linked = False
        agent.session += 1
        if self.serving and not agent.cut:
            self.later(0.001, lambda: self.feed(events.LinkLost(agent.node)))

    def crash_orchestrator(self) -> None:
        self.serving = False
        self._inbox.clear()
        self._referee.pause()
        for agent in self._agents.values():
            agent.linked = False
            agent.session += 1
        self.later(self.random.uniform(0.1, 1.5), self.restart_orchestrator)

    def restart_orchestrator(self) -> None:
        """A new leader reads snapshot and journal, and must know what the old one knew."""
        replayed = self.replayed(len(self.journal))
        if state.fingerprint(replayed) != state.fingerprint(self.cluster):
            raise Violation("replaying the journal does not give the live state")
        self.lead(replayed)

    def replayed(self, entries: int) -> state.Cluster:
        """The state after so many entries of the journal."""
        found = state.from_plain(self.snapshot)
        for event, moment in self.journal[:entries]:
            again = events.from_plain(events.to_plain(event))
            found = brain.step(found, again, moment).cluster
        return found

    def lead(self, replayed: state.Cluster) -> None:
        self.cluster = replayed
        self.snapshot = state.to_plain(replayed)
        self.snapshot_seq, self.journal = self.seq, []
        self._witness = Witness()
        self.term += 1
        self.restarts += 1
        self.serving = True
        self.feed(events.TermBegan(Term(self.term), seq=self.seq, rules=rules.NEWEST))
        for agent in self._agents.values():
            self.connect(agent, self.random.uniform(0.05, 1.0))

    # ------------------------------------------------------------ jobs

    def submit(self, spec: JobSpec) -> None:
        """Somebody tries until somebody serves."""
        if not self.serving:
            self.later(0.3, lambda: self.submit(spec))
            return
        self.pending.remove(spec.job)
        self.feed(events.Submitted(spec))

    def _resubmit(self) -> None:
        """Where jobs compete, one that left in good order is run again."""
        for spec in self.setting.specs if self.setting.compete else ():
            job = self.cluster.jobs.get(spec.job)
            left = job is not None and job.state in (JobState.SAVED, JobState.STOPPED)
            if left and spec.job not in self.pending:
                self.pending.append(spec.job)
                self.later(self.random.uniform(0.5, 3.0), lambda s=spec: self.submit(s))  # type: ignore[misc]

    def _check(self, notes: Sequence[Note] = ()) -> None:
        self._referee.check(notes)
        self._resubmit()
        self._done = not self.pending and not self.cluster.open_jobs

    def _over(self) -> bool:
        return self._done

    # ------------------------------------------------------------ a run

    def run(self) -> Result:
        for agent in self._agents.values():
            self.connect(agent, self.random.uniform(0, 0.5))
        for spec in self.setting.specs:
            self.pending.append(spec.job)
            self.later(self.random.uniform(0, 0.5), lambda s=spec: self.submit(s))  # type: ignore[misc]
        self.later(0.1, self.tick)
        self.later(0.7, self.watch)
        moment = 1.0
        for _ in range(self.random.randint(1, self.setting.faults_max)):
            # Sometimes far apart, sometimes into the middle of the last one's recovery.
            moment += self.random.choice((0.02, 0.3, 1.5, 6.0)) * self.random.uniform(0.5, 1.5)
            self.later(moment, self.inject)
        if self.planned_moves:
            for _ in range(self.random.randint(1, 4)):
                self.later(self.random.uniform(1.0, 12.0), self.plan)
        end = self._now + self.setting.seconds_max
        while self._queue and self._now < min(end, self._changed_at + QUIET_SECONDS):
            if self._over():
                break
            self._now, _, act = heapq.heappop(self._queue)
            act()
        self._check_end()
        return self._result()

    def _check_end(self) -> None:
        """A job that is over leaves nothing behind where its end could be told."""
        told = [a for a in self._agents.values() if a.up and a.runs and a.linked and not a.cut]
        sessions = {agent.node: agent.session for agent in told}
        end = self._now + 1.0
        while self._over() and self._queue and self._queue[0][0] < end:
            self._now, _, act = heapq.heappop(self._queue)
            act()
        for agent in told if self._over() else ():
            left = ghosts((agent,))
            if left and agent.linked and agent.session == sessions[agent.node]:
                raise Violation(f"all is over and {agent.node} still runs {left[0]}")
            if any(not user.fenced for user in self.cluster.nodes[agent.node].uses.values()):
                raise Violation(f"all is over and {agent.node} is used")

    def _result(self) -> Result:
        ends = []
        for spec in self.setting.specs:
            job = self.cluster.jobs.get(spec.job)
            if job is None:
                raise Violation(f"nobody knows {spec.job}")
            self._referee.check_end(job, spec.job in self.user_faults)
            ends.append(job.state.value)
        return Result(
            self.seed,
            ends[0],
            tuple(self.faults),
            tuple(incident.outcome for incident in self.cluster.closed),
            self.cluster.jobs[TRAIN].generation,
            self.group(TRAIN).committed,
            self.stepped,
            self.restarts,
            self.vouched,
            self._count("released: "),
            tuple(ends[1:]),
            len(self.cluster.loans),
            self._count("has lent it devices"),
            self._count("go home): warming"),
            bool(self.setting.shards),
            self._count("others have made the update"),
        )

    def _count(self, words: str) -> int:
        return sum(words in line for line in self.story)


def _setting(seed: int, draw: Random) -> Setting:
    wide = seed % 5 == 1
    setting = (several_jobs if seed % 3 == 2 else one_job)(draw, wide=wide)
    return sharded(draw, setting) if wide else setting


def run_seed(seed: int, planned_moves: bool | None = None) -> Result:
    return told(Simulation(seed, planned_moves))


def told(simulation: Simulation) -> Result:
    """One run; an AssertionError names the seed and tells the story so far."""
    try:
        return simulation.run()
    except AssertionError as error:
        story = "\n".join(simulation.story[-60:])
        raise Violation(f"seed {simulation.seed}: {error}\n{story}") from error


def run_seeds(first: int, count: int) -> Summary:
    """Seeds first to first+count-1; stops at the first violation."""
    began = time.process_time()
    summary = Summary()
    for seed in range(first, first + count):
        summary.results.append(run_seed(seed))
    summary.seconds = time.process_time() - began
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--story", action="store_true", help="print what happened (one seed)")
    options = parser.parse_args()
    if options.story:
        simulation = Simulation(options.first)
        try:
            print(simulation.run())
        finally:
            print("\n".join(simulation.story))
        return
    print("\n".join(run_seeds(options.first, options.seeds).lines()))


if __name__ == "__main__":
    main()
