"""What can go wrong in the simulator: one method per kind of fault, drawn by seed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from keepstep import wire
from keepstep.chaos.simulated import Agent, Worker
from keepstep.chaos.simulated_group import Group
from keepstep.chaos.simulated_setting import Setting
from keepstep.model import JobId, JobSpec, NodeId, Rank, Severity, Sign
from keepstep.orchestrator import events, state
from keepstep.orchestrator.placing import RACK


class Faults:
    """The part of a simulation that breaks things. Each method says whether it could."""

    random: Random
    setting: Setting
    cluster: state.Cluster
    serving: bool
    user_faults: set[JobId]
    calm: Worker | None
    """Whose corrupt state is still to be found: no other fault until then."""
    calm_generation: int
    faults: list[str]
    story: list[str]
    _now: float
    _agents: dict[NodeId, Agent]

    def group(self, job: JobId) -> Group:
        raise NotImplementedError

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

    def workers(self, job: JobId | None = None) -> list[Worker]:
        living = (w for a in self._agents.values() if a.up for w in a.workers if w.alive)
        return [worker for worker in living if job in (None, worker.job)]

    def _some_spec(self) -> JobSpec:
        specs = self.setting.specs
        return self.random.choice(specs) if len(specs) > 1 else specs[0]

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
            "rewind": self._rewind,
        }
        weights = [6, 3, 3, 4, 4, 3, 4, 4, 2, 2, 1, 1, 1, 0.4, 0.4, 1, 1, 0.3, 0.6]
        if self.setting.compete:
            kinds |= {
                "rack loss": self._lose_rack,
                "power loss": lambda: self._lose_node(cut=False),
                "save fails": self._fail_saves,
            }
            weights += [6, 10, 4]
        kind = self.random.choices(list(kinds), weights)[0]
        self._end_calm()
        if not self._over() and self.calm is None and kinds[kind]():
            self.faults.append(kind)
            self.story.append(f"{self._now:9.3f} FAULT     {kind}")

    def _end_calm(self) -> None:
        job = self.cluster.jobs.get(self.calm.job) if self.calm else None
        if job is not None and job.migration is None and job.generation > self.calm_generation:
            self.calm = None

    def plan(self) -> None:
        """What an operator may ask for, at any moment."""
        spec = self._some_spec()
        job = self.cluster.jobs.get(spec.job)
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
            self._migrate(spec, home=self.setting.compete and draw > 0.45)
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

    def _migrate(self, spec: JobSpec, *, home: bool) -> None:
        ranks: list[int] = []
        if not home:
            count = min(self.random.randint(1, 2), spec.world_size)
            ranks = sorted(self.random.sample(range(spec.world_size), count))
        which = tuple(Rank(rank) for rank in ranks)
        self.feed(events.MigrateAsked(spec.job, which, "asked", home=home))
        self.faults.append("migrate home" if home else "migrate")
        self.story.append(f"{self._now:9.3f} PLAN      migrate {spec.job} {ranks or 'home'}")

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
            self.group(worker.job).die(worker, Sign.EXIT, -9)
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
        if not cut:
            self._power_off(agent)
            return True
        agent.cut = True
        agent.linked = False
        agent.session += 1
        self.later(self.random.uniform(2, 12), lambda: self._heal(agent))
        return True

    def _power_off(self, agent: Agent) -> None:
        if not agent.up:
            return
        back = self.random.uniform(2, 12)
        generations = {(w.job, w.generation) for w in agent.workers if w.alive}
        agent.up = False
        for worker in agent.workers:
            worker.alive = False
        agent.standbys, agent.rings, agent.ended = {}, {}, []
        self.disconnect(agent)
        for job, generation in sorted(generations):
            self.group(job).notice(generation)
        if self.random.random() < self.setting.return_chance:
            self.later(back, lambda: self._reboot(agent))

    def _lose_rack(self) -> bool:
        """All its nodes lose their power, one after another."""
        racks = sorted({agent.labels.get(RACK, "") for agent in self._agents.values()} - {""})
        if not racks:
            return False
        rack = self.random.choice(racks)
        there = [a for a in self._agents.values() if a.labels.get(RACK) == rack]
        rest = [a for a in self._agents.values() if a.up and not a.cut and a not in there]
        for agent in there if rest else ():
            self.later(self.random.uniform(0, 0.3), lambda a=agent: self._power_off(a))  # type: ignore[misc]
        return bool(rest)

    def _fail_saves(self) -> bool:
        """The next parts of a job's checkpoint cannot be written."""
        self.group(self._some_spec().job).bad_saves = self.random.randint(1, 5)
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
        job = self.cluster.jobs.get(self._some_spec().job)
        if job is None or job.roster is None:
            return False
        agent = self._agents[job.roster.store_node]
        if self.setting.compete:
            agent.store_moved()
        else:
            agent.store_lost(job.spec.job)
        return True

    def _spurious(self) -> bool:
        worker = self._pick()
        if worker is not None:
            self.group(worker.job).notice(worker.generation)
        return worker is not None

    def _raise(self, times: int) -> bool:
        worker = self._pick()
        if worker is None or worker.boundary < 0:
            return False
        step, group = worker.boundary + 1, self.group(worker.job)
        together = any(at == step for _, at in group.raise_at)
        group.raise_at[(worker.rank, step)] = times
        if times > 1 or together:
            self.user_faults.add(worker.job)
        return True

    def _raise_everywhere(self) -> bool:
        worker = self._pick()
        if worker is None or worker.boundary < 0:
            return False
        for other in self.workers(worker.job):
            self.group(worker.job).raise_at[(other.rank, worker.boundary + 2)] = 99
        self.user_faults.add(worker.job)
        return True

    def _corrupt(self) -> bool:
        worker = self._pick()
        job = self.cluster.jobs.get(worker.job) if worker else None
        busy = job is None or job.migration is not None
        if worker is None or job is None or busy or worker.mode != "training":
            return False
        size, group = job.spec.world_size, self.group(worker.job)
        if size < 3 or worker.boundary > group.steps - 3:
            # The others may make their last step without it, and then nobody would ever look.
            return False
        well = [w for w in self.workers(worker.job) if w.mode == "training" and not w.stopped]
        if len(well) < size or any(a.cut or not a.up for a in self._agents.values()):
            return False
        # Found at the next quiesce, before the step that would spread it. No other fault until
        # then: of a rank that is corrupt and alone nobody could tell.
        self.calm = worker
        self.calm_generation = worker.generation
        held = group.held(worker.rank)
        # Of a shard's two holders one may be about to raise: then nobody could tell.
        portion = self.random.choice(held) if len(held) > 1 and not group.raise_at else held[-1]
        worker.state = {**worker.state, portion: -7}
        worker.mode = "broken"
        group.waiting.get(worker.generation, {}).pop(worker.rank, None)
        group.notice(worker.generation)
        return True

    def _lie(self) -> bool:
        worker = self._pick()
        if worker is None or any(other.lies for other in self.workers()):
            return False
        worker.lies = True
        return self._kill()

    def _sigterm(self) -> bool:
        self.feed(events.StopAsked(self._some_spec().job, "SIGTERM", save=True))
        return True

    def _rewind(self) -> bool:
        worker = self._pick()
        if worker is None:
            return False
        group = self.group(worker.job)
        node, step = group.agent(worker).node, max(0, group.committed - 3)
        self.feed(
            wire.Publish(
                node,
                worker.job,
                worker.generation,
                worker.rank,
                step,
                f"boundary-{step}-0",
                "rewind",
            )
        )
        self.feed(events.StopAsked(worker.job, "somebody wants it", rewind=True))
        return True
