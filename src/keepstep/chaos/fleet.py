"""A month of a whole fleet: the real brain and journal, 12,500 machines, and everything that fails.

    keepstep lab simulate --gpus 100000 --days 30 --mttf 7.9h@1024 --seed 7

One seed is one month: several jobs with priorities and spares, failures by the published mix, racks
and switches that are lost together, leaders that die or stop, a database that goes away, machines
that only the control plane cannot hear. It prints what became of the time beside what checkpoint-
restart would have made of the same failures, and any invariant that broke, with its seed.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence

from keepstep.chaos import fleet_report
from keepstep.chaos.fleet_checks import Account, Referee, check_slots
from keepstep.chaos.fleet_faults import Faults
from keepstep.chaos.fleet_jobs import Machine, Trainee
from keepstep.chaos.fleet_report import Month
from keepstep.chaos.fleet_setting import PUBLISH_SECONDS, Plan, jobs_of, node_name
from keepstep.chaos.simulated_checks import Violation
from keepstep.model import JobId, JobSpec, JobState, Rank
from keepstep.orchestrator import brain, events
from keepstep.orchestrator.stepped import Stepped
from keepstep.wire import Publish

CALM_SECONDS = 3 * 3600.0
"""At the end nothing more happens, and what is open has to end."""
TICK_SECONDS_MIN = 0.1
TICK_WAITING_SECONDS = 5.0
"""Between two ticks while somebody waits for something that has no moment of its own."""
TICK_LEAVING_SECONDS = 60.0
"""The same for room, which mostly comes with an event."""
TICK_SECONDS_MAX = 1800.0
AGAIN_SECONDS = 60.0
"""After which a job that left with a checkpoint is run again."""


class Fleet(Faults):
    """One month."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.referee = Referee()
        self._specs = jobs_of(plan, self.random)
        self._tick_at = float("inf")
        self.useful: dict[JobId, float] = {}
        self.spent: dict[JobId, dict[str, float]] = {}
        for number in range(plan.nodes):
            machine = Machine(node_name(number), number)
            self.machines[machine.node] = machine
            self.away.add(machine)
        for spec, step_seconds in self._specs:
            self.jobs[spec.job] = Trainee(spec, step_seconds)

    def run(self) -> None:
        """The month, and then some calm hours in which everything has to end."""
        self.lead()
        self.connect(self.machines.values())
        for spec, _ in self._specs:
            self._submit(spec)
            self.later(PUBLISH_SECONDS, lambda name=spec.job: self._publish(name))  # type: ignore[misc]
        self.arm()
        self.run_until(self.plan.seconds)
        self.calm = True
        self._book_all()
        self.end_of_month()
        self.run_until(self.plan.seconds + CALM_SECONDS)
        self._check_end()

    def end_of_month(self) -> None:
        """What is reported is the month; the calm hours after it only let things end."""
        for name, job in self.jobs.items():
            self.useful[name] = job.step_at(self.now) * job.step_seconds
            if name in self.referee.accounts:
                self.spent[name] = dict(self.referee.accounts[name].seconds)

    # ------------------------------------------------------------ the brain's side

    def decided(self, steps: Sequence[Stepped]) -> None:
        leader = self.leader
        assert leader is not None
        for done in steps:
            for order in done.decision.orders:
                self.obey(order, leader.term)
            if done.decision.changed:
                self.referee.check(leader.cluster, self.jobs, done.jobs)
                for name in done.jobs:
                    self._look_after(name, ended=bool(done.decision.orders))
        self._arm_tick()

    def _look_after(self, name: JobId, *, ended: bool) -> None:
        """Book what a job does now; one that left with a checkpoint is run again."""
        job = self.jobs.get(name)
        if job is None or self.leader is None:
            return
        self._book(job)
        known = self.leader.cluster.jobs.get(name)
        if known is not None and known.state is JobState.SAVED and ended:
            self.later(AGAIN_SECONDS, lambda: self._submit(job.spec))

    def _submit(self, spec: JobSpec) -> None:
        if self.leader is None or self.leader.stopped or self.journal.away:
            self.later(5.0, lambda: self._submit(spec))
            return
        known = self.leader.cluster.jobs.get(spec.job)
        if known is None:
            self.referee.accounts[spec.job] = Account(self.now, self.now)
        if known is None or known.state.over:
            self.feed(events.Submitted(spec))

    def _publish(self, name: JobId) -> None:
        """A job writes a checkpoint of its own from time to time."""
        job = self.jobs[name]
        machine = job.seated(Rank(0))
        if job.stage == "training" and machine is not None and machine.reachable:
            at = job.step_at(self.now)
            path = f"checkpoint-{at}"
            told = Publish(machine.node, name, job.generation, Rank(0), at, path, path)
            self.say(machine, told)
        if not self.calm:
            self.later(PUBLISH_SECONDS, lambda: self._publish(name))

    def _arm_tick(self) -> None:
        leader = self.leader
        if leader is None or leader.stopped:
            return
        due = brain.due(leader.cluster)
        seconds = TICK_SECONDS_MAX
        if due is not None:
            left = due - leader.now(self.now)
            seconds = left + 0.001 if left > 0 else TICK_SECONDS_MIN
        else:
            seconds = self._patience()
        moment = self.now + max(seconds, 0.02)
        if moment < self._tick_at - 1e-6:
            self._tick_at = moment
            self.later(moment - self.now, lambda: self._tick(moment))

    def _patience(self) -> float:
        """Until the next tick, if nothing has a moment of its own."""
        assert self.leader is not None
        cluster = self.leader.cluster
        jobs = [cluster.jobs[name] for name in cluster.open_jobs]
        if cluster.self_doubt or cluster.doubtful or any(job.turn_at >= 0 for job in jobs):
            return TICK_WAITING_SECONDS
        return TICK_LEAVING_SECONDS if any(job.leaving for job in jobs) else TICK_SECONDS_MAX

    def _tick(self, moment: float) -> None:
        if moment != self._tick_at:
            return
        self._tick_at = float("inf")
        leader = self.leader
        if leader is None or leader.stopped or self.journal.away:
            return
        self.feed(events.Tick())

    # ------------------------------------------------------------ the account

    def _book(self, job: Trainee) -> None:
        leader = self.leader
        led = leader is not None and not leader.stopped and not self.journal.away
        known = leader.cluster.jobs.get(job.spec.job) if leader is not None else None
        if job.spec.job in self.referee.accounts:
            self.referee.book(job, known, self.now, led=led)

    def _book_all(self) -> None:
        for job in self.jobs.values():
            self._book(job)

    def declared(self, job: Trainee) -> bool:
        return job.spec.job in self.referee.fell_back

    def staged(self, job: Trainee) -> None:
        self._book(job)

    def _check_end(self) -> None:
        self._book_all()
        assert self.leader is not None
        cluster = self.leader.cluster
        check_slots(cluster)
        self.referee.settle(self.jobs, self.now)
        for name in cluster.open_jobs:
            job = cluster.jobs[name]
            if job.incident is not None and job.state is not JobState.HELD:
                open_for = self.leader.now(self.now) - job.incident.opened_at
                if open_for > CALM_SECONDS / 2:
                    last = job.incident.story[-1].why if job.incident.story else ""
                    raise Violation(f"{name}: an incident is open for {open_for:.0f} s: {last}")
            if job.state is JobState.RUNNING and self.jobs[name].stage != "training":
                raise Violation(f"{name} is taken for running and is {self.jobs[name].stage}")
        if cluster.self_doubt:
            raise Violation(f"we still suspect ourselves: {cluster.self_doubt}")


def run_month(plan: Plan, *, interval_seconds: float = 0.0) -> Month:
    """One seed, from the first hello to the account of its time."""
    began = time.process_time()
    fleet = Fleet(plan)
    broken = ""
    try:
        fleet.run()
    except Exception as error:
        # Whatever it is, of the world or of the brain: the seed has to be told.
        broken = f"{type(error).__name__}: {error}"
        if not isinstance(error, Violation):
            broken += "\n" + traceback.format_exc(limit=-4)
    if not fleet.useful:
        fleet.end_of_month()
    month = fleet_report.summary(fleet, interval_seconds)
    month.broken = broken
    month.cpu_seconds = time.process_time() - began
    return month
