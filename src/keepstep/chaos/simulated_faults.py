"""What can go wrong in the simulator: one method per kind of fault, drawn by seed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from keepstep.chaos.simulated import Agent, Worker
from keepstep.chaos.simulated_group import Group
from keepstep.model import JobId, JobSpec, NodeId, Rank, Severity, Sign
from keepstep.orchestrator import events, state

JOB = JobId("train")


class Faults:
    """The part of a simulation that breaks things. Each method says whether it could."""

    random: Random
    spec: JobSpec
    cluster: state.Cluster
    serving: bool
    user_fault: bool
    calm: bool
    calm_generation: int
    faults: list[str]
    story: list[str]
    _now: float
    _agents: dict[NodeId, Agent]
    _group: Group

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        raise NotImplementedError

    def feed(self, event: events.Event) -> None:
        raise NotImplementedError

    def connect(self, agent: Agent, seconds: float) -> None:
        raise NotImplementedError

    def disconnect(self, agent: Agent) -> None:
        raise NotImplementedError

    def crash_orchestrator(self) -> None:
        raise NotImplementedError

    def _over(self) -> bool:
        raise NotImplementedError

    def workers(self) -> list[Worker]:
        return [w for a in self._agents.values() if a.up for w in a.workers if w.alive]

    def inject(self) -> None:
        kinds: dict[str, Callable[[], bool]] = {
            "kill": self._kill,
            "kill two": lambda: self._kill() and self._kill(),
            "stop": self._stop,
            "node loss": lambda: self._lose_node(cut=False),
            "silent node": lambda: self._lose_node(cut=True),
            "agent crash": self._agent_crash,
            "link drop": self._link_drop,
            "orchestrator crash": self._orchestrator_crash,
            "standby dies at assign": self._doom_standbys,
            "standby dies": self._kill_standby,
            "store lost": self._store_lost,
            "spurious break": self._spurious,
            "exception once": lambda: self._raise(1),
            "exception twice": lambda: self._raise(2),
            "exception everywhere": self._raise_everywhere,
            "corrupt state": self._corrupt,
            "lying source": self._lie,
            "sigterm": self._sigterm,
        }
        weights = [6, 3, 3, 4, 4, 3, 4, 4, 2, 2, 1, 1, 1, 0.4, 0.4, 1, 1, 0.3]
        kind = self.random.choices(list(kinds), weights)[0]
        job = self.cluster.jobs.get(JOB)
        if job is not None and job.migration is None and job.generation > self.calm_generation:
            self.calm = False
        if not self._over() and not self.calm and kinds[kind]():
            self.faults.append(kind)
            self.story.append(f"{self._now:9.3f} FAULT     {kind}")

    def plan(self) -> None:
        """What an operator may ask for, at any moment."""
        job = self.cluster.jobs.get(JOB)
        if job is None or job.roster is None or self._over() or not self.serving:
            return
        draw = self.random.random()
        if draw < 0.25:
            self._taint()
            return
        if draw > 0.85:
            self._freeze()
            return
        if draw < 0.6:
            ranks = self.random.sample(range(self.spec.world_size), self.random.randint(1, 2))
            event = events.MigrateAsked(JOB, tuple(Rank(r) for r in sorted(ranks)), "asked")
            self.feed(event)
            self.faults.append("migrate")
            self.story.append(f"{self._now:9.3f} PLAN      migrate {ranks}")
            return
        node = self.random.choice(list(self._agents))
        self.feed(events.DrainAsked(node, "patches"))
        self.faults.append("drain")
        self.story.append(f"{self._now:9.3f} PLAN      drain {node}")
        self.later(self.random.uniform(2.0, 15.0), lambda: self.feed(events.UndrainAsked(node)))

    def _freeze(self) -> None:
        self.feed(events.FreezeAsked("a switch is replaced"))
        self.faults.append("freeze")
        self.story.append(f"{self._now:9.3f} PLAN      freeze")
        self.later(self.random.uniform(0.2, 15.0), self._unfreeze)

    def _unfreeze(self) -> None:
        if self.serving:
            self.feed(events.UnfreezeAsked())
        else:
            self.later(0.3, self._unfreeze)

    def _taint(self) -> None:
        node = self.random.choice(list(self._agents))
        slot = self.random.randrange(-1, self._agents[node].slots)
        severity = self.random.choice(list(Severity))
        seconds = self.random.uniform(1.0, 15.0)
        event = events.TaintAsked(node, "flaky", severity, slot, "simulator", seconds)
        self.feed(event)
        if self.random.random() < 0.3:
            undo = events.UntaintAsked(node, slot)
            self.later(self.random.uniform(0.1, 5.0), lambda: self.feed(undo))
        self.faults.append(f"taint {severity}")
        self.story.append(f"{self._now:9.3f} PLAN      taint {node}/{slot} {severity}")

    def _pick(self) -> Worker | None:
        living = [w for w in self.workers() if w.mode != "finished"]
        return self.random.choice(living) if living else None

    def _kill(self) -> bool:
        worker = self._pick()
        if worker is not None:
            self._group.die(worker, Sign.EXIT, -9)
        return worker is not None

    def _stop(self) -> bool:
        worker = self._pick()
        if worker is not None:
            worker.stopped = True
        return worker is not None

    def _lose_node(self, *, cut: bool) -> bool:
        """Loud: everything on it dies at once. Silent: nobody hears of it, and it lives on."""
        up = [agent for agent in self._agents.values() if agent.up and not agent.cut]
        if len(up) < 2:
            return False
        agent = self.random.choice(up)
        agent.cut = cut
        back = self.random.uniform(2, 12)
        if cut:
            agent.linked = False
            agent.session += 1
            self.later(back, lambda: self._heal(agent))
            return True
        generations = {worker.generation for worker in agent.workers if worker.alive}
        agent.up = False
        for worker in agent.workers:
            worker.alive = False
        agent.standbys, agent.rings, agent.ended = {}, {}, []
        self.disconnect(agent)
        for generation in generations:
            self._group.notice(generation)
        if self.random.random() < 0.75:
            self.later(back, lambda: self._reboot(agent))
        return True

    def _heal(self, agent: Agent) -> None:
        agent.cut = False
        if agent.up:
            self.connect(agent, 0.1)

    def _reboot(self, agent: Agent) -> None:
        agent.boots += 1
        agent.up = agent.runs = True
        agent.cut = False
        agent.workers = []
        agent.store_port += 1
        self.connect(agent, 0.1)

    def _agent_crash(self) -> bool:
        up = [agent for agent in self._agents.values() if agent.up and agent.runs]
        if not up:
            return False
        agent = self.random.choice(up)
        agent.runs = False
        self.disconnect(agent)

        def again() -> None:
            agent.runs = True
            self.connect(agent, 0.05)

        # Sometimes longer than silence is borne: only the job's steps speak for the node then.
        self.later(self.random.choice((2.0, 2.0, 8.0)) * self.random.uniform(0.1, 1.0), again)
        return True

    def _link_drop(self) -> bool:
        linked = [agent for agent in self._agents.values() if agent.linked]
        if not linked:
            return False
        agent = self.random.choice(linked)
        self.disconnect(agent)
        self.connect(agent, self.random.uniform(0.05, 1.0))
        return True

    def _orchestrator_crash(self) -> bool:
        if self.serving:
            self.crash_orchestrator()
            return True
        return False

    def _doom_standbys(self) -> bool:
        for agent in self._agents.values():
            agent.doomed_standby = True
        return self._kill()

    def _kill_standby(self) -> bool:
        parked = [(a, slot) for a in self._agents.values() for slot in a.standbys]
        if not parked:
            return False
        agent, slot = self.random.choice(parked)
        agent.drop_standby(slot)
        return True

    def _store_lost(self) -> bool:
        job = self.cluster.jobs.get(JOB)
        if job is None or job.roster is None:
            return False
        agent = self._agents[job.roster.store_node]
        agent.store_lost(JOB)
        return True

    def _spurious(self) -> bool:
        worker = self._pick()
        if worker is not None:
            self._group.notice(worker.generation)
        return worker is not None

    def _raise(self, times: int) -> bool:
        worker = self._pick()
        if worker is None or worker.boundary < 0:
            return False
        step = worker.boundary + 1
        together = any(at == step for _, at in self._group.raise_at)
        self._group.raise_at[(worker.rank, step)] = times
        self.user_fault = self.user_fault or times > 1 or together
        return True

    def _raise_everywhere(self) -> bool:
        worker = self._pick()
        if worker is None or worker.boundary < 0:
            return False
        for other in self.workers():
            self._group.raise_at[(other.rank, worker.boundary + 2)] = 99
        self.user_fault = True
        return True

    def _corrupt(self) -> bool:
        worker = self._pick()
        job = self.cluster.jobs.get(JOB)
        busy = job is None or job.migration is not None
        if worker is None or busy or worker.mode != "training" or self.spec.world_size < 3:
            return False
        if worker.boundary > self._group.steps - 3:
            # The others may make their last step without it, and then nobody would ever look.
            return False
        well = [w for w in self.workers() if w.mode == "training" and not w.stopped]
        if len(well) < self.spec.world_size or any(
            a.cut or not a.up for a in self._agents.values()
        ):
            return False
        # Found at the next quiesce, before the step that would spread it. No other fault until
        # then: of a rank that is corrupt and alone nobody could tell.
        self.calm = True
        self.calm_generation = worker.generation
        worker.state = -7
        worker.mode = "broken"
        self._group.waiting.get(worker.generation, {}).pop(worker.rank, None)
        self._group.notice(worker.generation)
        return True

    def _lie(self) -> bool:
        worker = self._pick()
        if worker is None or any(other.lies for other in self.workers()):
            return False
        worker.lies = True
        return self._kill()

    def _sigterm(self) -> bool:
        self.feed(events.StopAsked(JOB, "SIGTERM", save=True))
        return True
