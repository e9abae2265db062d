"""The seeded simulator: the real brain, a virtual clock, and everything that can go wrong.

    python -m keepstep.chaos.simulate --seeds 500

One seed is one job on a small cluster under a handful of faults. Streams drop and come back (what
was in flight is lost, late or doubled), workers, agents, nodes and the orchestrator die, spares run
out, user code raises. After every step the invariants are checked; a restart of the orchestrator
replays snapshot and journal and must arrive at the very same state. A failure names its seed.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from keepstep.chaos.simulated import Agent, state_at
from keepstep.chaos.simulated_faults import JOB, Faults
from keepstep.chaos.simulated_group import Group
from keepstep.model import JobSpec, JobState, NodeId, Policy, Rank, Term
from keepstep.orchestrator import brain, events, nodes, policy, seating, state
from keepstep.orchestrator.liveness import Witness
from keepstep.wire import Hello, JobPulse, Message, Order, Published

SECONDS_MAX = 400.0
POLICY = Policy(
    hold_seconds_max=20.0,
    startup_seconds_max=40.0,
)


class Violation(AssertionError):
    """An invariant does not hold."""


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
    virtual_seconds: float


@dataclass(slots=True)
class Summary:
    """Many seeds."""

    results: list[Result] = field(default_factory=list)
    seconds: float = 0.0

    def lines(self) -> list[str]:
        ends = Counter(result.outcome for result in self.results)
        kinds = Counter(kind for result in self.results for kind in result.faults)
        outcomes = Counter(out for result in self.results for out in result.incidents)
        total = sum(result.events for result in self.results)
        restarts = sum(result.restarts for result in self.results)
        vouched = sum(result.vouched for result in self.results)
        moves = sum(result.moves for result in self.results)
        return [
            "jobs:      " + ", ".join(f"{n} {end}" for end, n in sorted(ends.items())),
            "incidents: " + ", ".join(f"{n} {out}" for out, n in sorted(outcomes.items())),
            "faults:    " + ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())),
            f"events:    {total}; {restarts} restarts replayed whole; {vouched} times vouched",
            f"planned:   {moves} moves made",
            f"{len(self.results)} seeds, all invariants held, {self.seconds:.1f} s of CPU",
        ]


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
        self.snapshot = state.to_plain(self.cluster)
        self.journal: list[tuple[events.Event, float]] = []
        self.term = 0
        self.serving = True
        self.restarts = 0
        self.stepped = 0
        self.faults: list[str] = []
        self.user_fault = False
        self._witness = Witness()
        self.vouched = 0
        self.silent_since: dict[NodeId, float] = {}
        self.story: list[str] = []
        self.fallbacks = 0
        self.cold_generation = 0
        self.calm = False
        self.calm_generation = 0
        draw = self.random
        active, ranks = draw.randint(2, 4), draw.randint(1, 3)
        self.spec = JobSpec(
            JOB,
            "train.py",
            nodes=active,
            ranks_per_node=ranks,
            spares=draw.randint(0, 3),
            policy=POLICY,
        )
        self._group = Group(self, self.spec.world_size, draw.randint(40, 250))
        extra = draw.choice((0, 1, 1, 2))
        for i in range(active + extra):
            slots = ranks + draw.choice((0, 0, 1, 2))
            self._agents[NodeId(f"n{i}")] = Agent(self, NodeId(f"n{i}"), slots)

    # ------------------------------------------------------------ the world's face

    def now(self) -> float:
        return self._now

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self._now + seconds, next(self._tie), act))

    def group(self) -> Group:
        return self._group

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
        checked = self.stepped % 997 == 0
        before = state.fingerprint(self.cluster) if checked else ""
        frozen = self._frozen_generation()
        decision = brain.step(self.cluster, event, self._now)
        self.cluster = decision.cluster
        self.stepped += 1
        if decision.changed:
            self.journal.append((event, self._now))
        elif checked and before != state.fingerprint(self.cluster):
            raise Violation(f"{event} changed the state and did not say so")
        if frozen >= 0 and frozen < self._frozen_generation():
            raise Violation("a new generation although the cluster is frozen")
        for note in decision.notes:
            self.story.append(f"{self._now:9.3f} {note.phase:9} {note.why}")
        self._check()
        for order in decision.orders:
            self._send(order)
        for node, answer in decision.answers:
            self._answer(node, answer)

    def _frozen_generation(self) -> int:
        """The job's generation if nothing may be decided about it now; -1 otherwise."""
        job = self.cluster.jobs.get(JOB)
        return job.generation if job and policy.stands_still(self.cluster, job) else -1

    def _send(self, order: Order) -> None:
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
        self.feed(events.Tick())
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
        for agent in self._agents.values():
            agent.linked = False
            agent.session += 1
        self.later(self.random.uniform(0.1, 1.5), self.restart_orchestrator)

    def restart_orchestrator(self) -> None:
        """A new leader reads snapshot and journal, and must know what the old one knew."""
        replayed = state.from_plain(self.snapshot)
        for event, moment in self.journal:
            again = events.from_plain(events.to_plain(event))
            replayed = brain.step(replayed, again, moment).cluster
        if state.fingerprint(replayed) != state.fingerprint(self.cluster):
            raise Violation("replaying the journal does not give the live state")
        self.cluster = replayed
        self.snapshot = state.to_plain(replayed)
        self.journal = []
        self._witness = Witness()
        self.term += 1
        self.restarts += 1
        self.serving = True
        self.feed(events.TermBegan(Term(self.term)))
        for agent in self._agents.values():
            self.connect(agent, self.random.uniform(0.05, 1.0))

    # ------------------------------------------------------------ invariants

    def _check(self) -> None:
        job = self.cluster.jobs.get(JOB)
        if job is None or job.roster is None:
            return
        moving = job.migration
        if job.fallbacks > self.fallbacks:
            self.fallbacks = job.fallbacks
            self._judge_fallback()
            self._group.committed = min(self._group.committed, max(job.published_step, 0))
        if moving is not None and moving.cold and job.generation != self.cold_generation:
            self.cold_generation = job.generation
            start = max(job.published_step, 0)
            if self._group.committed > start and moving.outcome != "fallback":
                raise Violation(f"{moving.outcome} loses {self._group.committed - start} steps")
            self._group.committed = min(self._group.committed, start)
        owners: Counter[tuple[NodeId, int]] = Counter()
        gone = job.migration.gone if job.migration else {}
        for seat in job.roster.seats:
            if seat.rank not in gone and seat.rank not in job.finished and not job.state.over:
                owners[(seat.node, seat.slot)] += 1
                user = self.cluster.nodes[seat.node].uses.get(seat.slot)
                if user is None or (user.rank, user.incarnation) != (seat.rank, seat.incarnation):
                    raise Violation(f"slot of {seat} belongs to {user}")
        for standby in job.standbys.values():
            owners[(standby.node, standby.slot)] += 1
        for seat in seating.waiting(job):
            owners[(seat.node, seat.slot)] += 1
            user = self.cluster.nodes[seat.node].uses.get(seat.slot)
            if user is None or (user.rank, user.incarnation) != (seat.rank, seat.incarnation):
                raise Violation(f"slot of {seat}, who waits, belongs to {user}")
        if owners and max(owners.values()) > 1:
            raise Violation(f"a slot is booked twice: {owners.most_common(1)}")

    def _judge_fallback(self) -> None:
        """A fallback is right only if some state has no reachable home left."""
        why = next(line for line in reversed(self.story) if "fallback: " in line)
        # A node whose Hello is still on its way is nobody that the brain could have asked.
        near = [
            agent
            for agent in self._agents.values()
            if agent.up and not agent.cut and agent.linked and self.cluster.nodes[agent.node].alive
        ]
        whole = [
            worker
            for agent in near
            for worker in agent.workers
            if worker.alive and not worker.stopped and worker.intact and not worker.lies
            if worker.state == state_at(worker.boundary) and worker.boundary > self._group.committed
        ]
        lost = re.search(r"no private state of rank (\d+) at boundary (\d+)", why)
        if lost is not None:
            rank, boundary = Rank(int(lost[1])), int(lost[2])
            homes = [a.node for a in near if boundary in a.rings.get(rank, {})]
            if homes:
                raise Violation(f"fallback, but {homes} hold the private state of rank {rank}")
        elif whole and "tie" not in why:
            raise Violation(f"fallback, but rank {whole[0].rank} holds whole state")

    def _over(self) -> bool:
        job = self.cluster.jobs.get(JOB)
        return job is not None and job.state.over

    # ------------------------------------------------------------ a run

    def run(self) -> Result:
        for agent in self._agents.values():
            self.connect(agent, self.random.uniform(0, 0.5))
        self.later(self.random.uniform(0, 0.5), lambda: self.feed(events.Submitted(self.spec)))
        self.later(0.1, self.tick)
        self.later(0.7, self.watch)
        moment = 1.0
        for _ in range(self.random.randint(1, 9)):
            # Sometimes far apart, sometimes into the middle of the last one's recovery.
            moment += self.random.choice((0.02, 0.3, 1.5, 6.0)) * self.random.uniform(0.5, 1.5)
            self.later(moment, self.inject)
        if self.planned_moves:
            for _ in range(self.random.randint(1, 4)):
                self.later(self.random.uniform(1.0, 12.0), self.plan)
        end = self._now + SECONDS_MAX
        while self._queue and self._now < end and not self._over():
            self._now, _, act = heapq.heappop(self._queue)
            act()
        self._check_end()
        return self._result(end - SECONDS_MAX)

    def _check_end(self) -> None:
        """A job that is over leaves nothing behind where its end could be told."""
        told = [a for a in self._agents.values() if a.up and a.runs and a.linked and not a.cut]
        sessions = {agent.node: agent.session for agent in told}
        end = self._now + 1.0
        while self._over() and self._queue and self._queue[0][0] < end:
            self._now, _, act = heapq.heappop(self._queue)
            act()
        for agent in told if self._over() else ():
            ghosts = [w for w in agent.workers if w.alive and w.mode != "finished"]
            if ghosts and agent.linked and agent.session == sessions[agent.node]:
                raise Violation(f"the job is over and {agent.node} still runs {ghosts[0].seat}")
            if self.cluster.nodes[agent.node].uses:
                raise Violation(f"the job is over and uses {agent.node}")

    def _result(self, began: float) -> Result:
        job = self.cluster.jobs.get(JOB)
        if job is None or not job.state.over:
            waits = job is not None and job.state in (JobState.WAITING, JobState.HELD)
            if job is None or not waits:
                raise Violation(f"the run did not end: {job.state if job else 'no job'}")
        if job.state is JobState.FAILED and not self.user_fault:
            raise Violation(f"failed without a fault of the user's: {job.detail}")
        if job.state is JobState.FINISHED and self._group.committed < self._group.steps - 1:
            raise Violation(f"finished after {self._group.committed} steps")
        return Result(
            self.seed,
            job.state.value,
            tuple(self.faults),
            tuple(incident.outcome for incident in self.cluster.closed),
            job.generation,
            self._group.committed,
            self.stepped,
            self.restarts,
            self.vouched,
            sum("released: " in line for line in self.story),
            self._now - began,
        )


def run_seed(seed: int, planned_moves: bool | None = None) -> Result:
    """One run; an AssertionError names the seed and tells the story so far."""
    simulation = Simulation(seed, planned_moves)
    try:
        return simulation.run()
    except AssertionError as error:
        story = "\n".join(simulation.story[-60:])
        raise Violation(f"seed {seed}: {error}\n{story}") from error


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
