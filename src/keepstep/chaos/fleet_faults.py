"""What befalls the simulated fleet: machines by the published mix, and the control plane besides.

Machines fail at the rate that is asked for. Leaders are killed, or stopped and woken when another
one leads; the database goes away; the control network loses a few machines, or many, while they
train on. Clocks of two leaders are apart by up to a minute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from keepstep.chaos.fleet_jobs import Machine, Trainee
from keepstep.chaos.fleet_journal import MemoryJournal
from keepstep.chaos.fleet_leader import Leader, same_state
from keepstep.chaos.fleet_setting import (
    DAY,
    MIX,
    NODES_PER_RACK,
    RACKS_PER_SWITCH,
    REPAIR_SECONDS,
    SILENCE_SEEN_SECONDS,
    STALL_SEEN_SECONDS,
    Kind,
    Plan,
)
from keepstep.chaos.fleet_tree import AGAIN_SECONDS
from keepstep.chaos.fleet_world import World
from keepstep.chaos.simulated_checks import Violation
from keepstep.errors import Deposed
from keepstep.model import JobId, Rank, Severity, Sign, Term
from keepstep.orchestrator import events
from keepstep.orchestrator.liveness import VOUCH_STEPS
from keepstep.orchestrator.run import JOURNAL_AWAY
from keepstep.orchestrator.state import place_key
from keepstep.orchestrator.stepped import Stepped
from keepstep.wire import Health, Observed, Stalled, StallFact

CONTROL = {
    "leader killed": 15 * DAY,
    "leader stopped": 15 * DAY,
    "database away": 3 * DAY,
    "database away for minutes": 30 * DAY,
    "few machines deaf": 5 * DAY,
    "many machines deaf": 15 * DAY,
}
"""Mean time between two of each, whatever the size of the fleet."""
SKEW_SECONDS_MAX = 60.0
LEASE_SECONDS = 10.0
RECONNECT_SECONDS = 4.0
"""Within which agents find a new leader."""
HELLOS_AT_ONCE = 500
_LINKED = attrgetter("linked")


@dataclass(frozen=True, slots=True)
class Strike:
    """One failure, and whom it interrupts."""

    at: float
    kind: str
    effect: str
    jobs: tuple[JobId, ...]


@dataclass(slots=True)
class Tally:
    """What was done to the fleet."""

    strikes: list[Strike] = field(default_factory=list)
    control: Counter[str] = field(default_factory=Counter)
    replayed: int = 0
    """Entries that new leaders read, and arrived at the same state."""
    deposed: int = 0
    """Writes of stopped leaders that were refused."""


class Faults(World):
    """A world in which things go wrong."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.seed)
        self.plan = plan
        self.tally = Tally()
        self.journal = MemoryJournal(forgets=True)
        self.calm = False
        """Nothing more happens: what is open has time to end."""
        self._fleet: list[Machine] = []

    def decided(self, steps: Sequence[Stepped]) -> None:
        """What becomes of decisions; see fleet.py."""
        raise NotImplementedError

    # ------------------------------------------------------------ when

    def arm(self) -> None:
        """From here on things happen."""
        self._fleet = list(self.machines.values())
        self._next(1 / self.plan.faults_per_second, self._strike)
        acts: dict[str, Callable[[], None]] = {
            "leader killed": self._kill_leader,
            "leader stopped": self._stop_leader,
            "database away": lambda: self._lose_journal(self.random.uniform(2.0, 9.0)),
            "database away for minutes": lambda: self._lose_journal(
                self.random.uniform(30.0, 300.0)
            ),
            "few machines deaf": lambda: self._deafen(self.random.randint(1, 24), vouched=True),
            "many machines deaf": lambda: self._deafen(
                int(len(self._fleet) * self.random.uniform(0.11, 0.3)), vouched=False
            ),
        }
        for name, mean in CONTROL.items():
            self._next(mean, lambda name=name: self._control(name, acts[name]))  # type: ignore[misc]

    def _next(self, mean: float, act: Callable[[], None]) -> None:
        """Again and again, at random moments."""

        def happen() -> None:
            if not self.calm:
                act()
                self._next(mean, act)

        self.later(self.random.expovariate(1 / mean), happen)

    def _control(self, name: str, act: Callable[[], None]) -> None:
        if self.leader is None or self.journal.away or self.leader.stopped:
            return
        self.tally.control[name] += 1
        act()

    # ------------------------------------------------------------ machines

    def _strike(self) -> None:
        machine = self.random.choice(self._fleet)
        kind = self.random.choices(MIX, [kind.count for kind in MIX])[0]
        if not machine.up or machine.cut or machine.sick:
            return
        hit = [machine]
        if kind.effect == "network":
            hit = self._share_a_cable(machine)
        jobs = sorted({m.worker[0].spec.job for m in hit if m.worker is not None})
        self.tally.strikes.append(Strike(self.now, kind.name, kind.effect, tuple(jobs)))
        self._befall(kind, machine, hit)

    def _befall(self, kind: Kind, machine: Machine, hit: list[Machine]) -> None:
        use = machine.worker
        match kind.effect:
            case "device":
                self._sicken(machine, Severity.AVOID, kind.name)
                if use is not None:
                    self.kill(machine, use, 1, kind.name)
            case "process" if use is not None:
                self.kill(machine, use, -6, kind.name)
            case "hang" if use is not None:
                self._hang(machine, use)
            case "node":
                self._lose(machine)
            case "network":
                for one in hit:
                    self._cut(one)
                seconds = max(60.0, self.random.lognormvariate(6.5, 0.8))
                self.later(seconds, lambda: self._mend(hit))
            case "drain":
                name, asked = machine.node, f"{kind.name} {self.now:.0f}"
                self.feed(events.DrainAsked(name, kind.name, asked))
                self.later(2 * 3600.0, lambda: self.feed(events.UndrainAsked(name)))
            case "taint":
                self._sicken(machine, Severity.IMMINENT, kind.name)
            case "corrupt" if use is not None:
                self._corrupt(machine, use)
            case _:
                """It hit a machine on which nothing runs."""

    def _share_a_cable(self, machine: Machine) -> list[Machine]:
        chance = self.random.random()
        if chance < 0.6:
            return [machine]
        width = NODES_PER_RACK * (1 if chance < 0.9 else RACKS_PER_SWITCH)
        first = machine.number // width * width
        return [m for m in self._fleet[first : first + width] if m.up and not m.cut]

    def _repair_seconds(self) -> float:
        return REPAIR_SECONDS * self.random.lognormvariate(0.0, 0.5)

    def _sicken(self, machine: Machine, severity: Severity, reason: str) -> None:
        """Its health program says so, until somebody has repaired it."""
        machine.sick = True
        self.say(machine, Health(machine.node, severity, reason))

        def well() -> None:
            machine.sick = False
            self.say(machine, Health(machine.node, None))

        self.later(self._repair_seconds(), well)

    def _lose(self, machine: Machine) -> None:
        """Gone without a word; it comes back as a machine that remembers nothing."""
        use, machine.worker = machine.worker, None
        machine.standby, machine.ready, machine.outbox = None, False, []
        machine.up = False
        self.away.add(machine)
        if use is not None and use[0].seats[use[1]][0] is machine and use[0].refresh(use[1]):
            self.broke(use[0])
        self._fall_silent(machine)

        def back() -> None:
            if machine.linked and self.leader is not None:
                # Its old stream looks open until its silence is noticed.
                self.later(AGAIN_SECONDS, back)
                return
            machine.up, machine.linked = True, False
            machine.boot += 1
            self._come_back([machine])

        self.later(self._repair_seconds(), back)

    def _cut(self, machine: Machine) -> None:
        machine.cut = True
        self.away.add(machine)
        use = machine.worker
        if use is not None and use[0].seats[use[1]][0] is machine and use[0].refresh(use[1]):
            self.broke(use[0])
        self._fall_silent(machine)

    def _mend(self, hit: list[Machine]) -> None:
        for machine in hit:
            machine.cut = False
            use = machine.worker
            if machine.up and use is not None:
                use[0].refresh(use[1])
        self._come_back(hit)

    def _come_back(self, some: Iterable[Machine]) -> None:
        for machine in some:
            if machine.reachable:
                self.away.discard(machine)
            else:
                delay = self.random.uniform(0.5, 3.0)
                self.later(delay, lambda m=machine: self.come_again(m))  # type: ignore[misc]

    def come_again(self, machine: Machine) -> None:
        """An agent tries until somebody serves."""
        if machine.linked or not machine.up or machine.cut or machine.deaf:
            return
        if self.leader is None or self.journal.away or self.leader.stopped:
            self.later(AGAIN_SECONDS, lambda: self.come_again(machine))
        else:
            self.connect([machine])

    def _fall_silent(self, machine: Machine) -> None:
        """If it is still out of reach when its heartbeats are missed, the loop says so."""
        boot = machine.boot

        def missed() -> None:
            if machine.boot != boot or machine.reachable or not machine.linked:
                return
            if self.leader is None or self.journal.away or self.leader.stopped:
                self.later(2.0, missed)
                return
            # As the loop counts them: linked until now, and out of reach.
            crowd = sum(map(_LINKED, self.away)) - 1
            machine.linked = False
            self.feed(events.NodeSilent(machine.node, crowd))

        self.later(SILENCE_SEEN_SECONDS + self.random.uniform(0.0, 0.4), missed)

    def _hang(self, machine: Machine, use: tuple[Trainee, Rank, int]) -> None:
        """A worker stands still; the kernel says that it is stopped."""
        job, rank, incarnation = use
        if job.stage != "training" or job.seats[rank] != (machine, incarnation):
            return
        self.broke(job)

        def seen() -> None:
            if job.stage == "broken" and machine.worker == use:
                fact = StallFact(rank, incarnation, job.committed, 1, True)
                told = Stalled(machine.node, job.spec.job, job.generation, (fact,), 4.0)
                self.say(machine, told)

        self.later(STALL_SEEN_SECONDS, seen)

    def _corrupt(self, machine: Machine, use: tuple[Trainee, Rank, int]) -> None:
        job, rank, incarnation = use
        if job.stage != "training" or job.seats[rank] != (machine, incarnation):
            return
        job.corrupt.add(rank)
        self.broke(job)
        told = Observed(
            machine.node,
            job.spec.job,
            Sign.CORRUPT,
            rank,
            incarnation,
            job.generation,
            job.committed,
            detail="digests differ",
        )
        self.say(machine, told)

    # ------------------------------------------------------------ the control plane

    def lead(self, skew: float = 0.0) -> Leader:
        """A new leader takes over, and has to know what the one before it knew."""
        self.leader = Leader(self.journal, self.now, skew, self.decided)
        self.leader.lead(self.now)
        return self.leader

    def _take_over(self, before: Leader, vacant_seconds: float) -> None:
        skew = self.random.uniform(-SKEW_SECONDS_MAX, SKEW_SECONDS_MAX)
        after = Leader(self.journal, self.now, skew, self.decided)
        same_state(before, after)
        self.tally.replayed += after.replayed
        self.leader = after
        after.lead(self.now, vacant_seconds)
        self._all_come_back()

    def _all_come_back(self) -> None:
        some = [machine for machine in self._fleet if not machine.linked and machine.up]
        self.random.shuffle(some)
        for first in range(0, len(some), HELLOS_AT_ONCE):
            batch = some[first : first + HELLOS_AT_ONCE]
            seconds = 0.2 + RECONNECT_SECONDS * first / max(len(some), 1)
            self.later(seconds, lambda batch=batch: self._connect_all(batch))  # type: ignore[misc]

    def _connect_all(self, batch: list[Machine]) -> None:
        if self.leader is None or self.journal.away or self.leader.stopped:
            self.later(2.0, lambda: self._connect_all(batch))
        else:
            self.connect(batch)

    def _unlink_all(self) -> None:
        for machine in self._fleet:
            machine.linked = False
        self.away = set(self._fleet)

    def _kill_leader(self) -> None:
        before, self.leader = self.leader, None
        assert before is not None
        self._unlink_all()
        seconds = self.random.uniform(1.0, LEASE_SECONDS)
        self.later(seconds, lambda: self._take_over(before, seconds))

    def _stop_leader(self) -> None:
        """It stands still between a write and its orders. Another one takes over; it wakes."""
        before = self.leader
        assert before is not None
        before.stopped = True
        seconds = LEASE_SECONDS + 1.0

        def over() -> None:
            self.leader = None
            self._unlink_all()
            self._take_over(before, seconds)

        self.later(seconds, over)
        self.later(20.0, lambda: self._wake(before))

    def _wake(self, before: Leader) -> None:
        """What it had journaled goes out, and nobody obeys; what it wants to write is refused."""
        newest = self.leader.term if self.leader is not None else Term(before.term + 1)
        for decision in before.unsent:
            for order in decision.orders:
                self.obey(order, newest)
        before.stopped = False
        try:
            before.feed((events.StopAsked(JobId("job0"), "a stale wish"),), self.now)
        except Deposed:
            self.tally.deposed += 1
        else:
            if not self.journal.away:
                raise Violation(f"term {before.term} is over, and its leader wrote")

    def _lose_journal(self, seconds: float) -> None:
        self.journal.away = True
        lost = seconds > LEASE_SECONDS
        if lost:
            # Agents are better off elsewhere: the lease may be somebody's.
            self.later(LEASE_SECONDS, self._unlink_all)
        self.later(seconds, lambda: self._find_journal(seconds, lost))

    def _find_journal(self, seconds: float, lost: bool) -> None:
        self.journal.away = False
        if self.leader is not None:
            self.leader.go_on(self.now)
            self.feed(events.ControlPlaneBack(seconds, JOURNAL_AWAY, lost))
        if lost:
            self._all_come_back()
            wait = RECONNECT_SECONDS + SILENCE_SEEN_SECONDS
            self.later(wait, self._miss_the_others)

    def _miss_the_others(self) -> None:
        """Who died while we heard nobody is silent now."""
        known = self.leader.cluster.nodes if self.leader is not None else {}
        gone = [m for m in self.away if not m.linked]
        for machine in sorted(gone, key=lambda m: m.number):
            if machine.node in known and known[machine.node].alive and not self.journal.away:
                self.feed(events.NodeSilent(machine.node))

    def _deafen(self, count: int, *, vouched: bool) -> None:
        """The control network loses machines; they train on."""
        some = [m for m in self.random.sample(self._fleet, count) if m.reachable]
        for machine in some:
            machine.deaf = True
            self.away.add(machine)
            self._fall_silent(machine)
            if vouched:
                self._vouch(machine)

        training = [(m, m.boot) for m in some if m.worker and m.worker[0].stage == "training"]

        def hears_again() -> None:
            if not vouched:
                self._check_nobody_given_up(training)
            for machine in some:
                machine.deaf = False
            self._come_back(some)

        self.later(self.random.uniform(5.0, 50.0), hears_again)

    def _check_nobody_given_up(self, training: list[tuple[Machine, int]]) -> None:
        """They were silent with many others, and trained: that is put down to ourselves."""
        if self.leader is None:
            return
        cluster = self.leader.cluster
        for machine, boot in training:
            tainted = place_key(machine.node) in cluster.taints
            same = machine.up and machine.boot == boot and not tainted
            if same and machine.node in cluster.given_up:
                raise Violation(f"{machine.node} was given up, deaf with many, for its silence")

    def _vouch(self, machine: Machine) -> None:
        """Three steps of its job prove its ranks well. Where steps are long, that is too late."""
        use = machine.worker
        if use is None:
            return
        seconds = VOUCH_STEPS * use[0].step_seconds

        def stepped() -> None:
            if not machine.deaf or machine.worker != use or use[0].stage != "training":
                return
            if self.leader is not None and machine.node in self.leader.cluster.doubtful:
                self.feed(events.NodeVouched(machine.node))
            self.later(seconds, stepped)

        self.later(seconds, stepped)
