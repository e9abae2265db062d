"""An orchestrator of the simulated fleet: the real brain, the real journal's rules, one leader.

    event -> brain.step -> journal.append -> orders

as in orchestrator/run.py, without sockets. Its clock is anchored when it takes over and never goes
back, however far the machines' clocks are apart. While the journal is away, events wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from keepstep.chaos.fleet_journal import MemoryJournal
from keepstep.chaos.fleet_setting import MIGRATIONS_MAX
from keepstep.chaos.simulated_checks import Violation
from keepstep.model import NodeId, Term
from keepstep.orchestrator import brain, events, replica, rules, state
from keepstep.orchestrator.journal import write_snapshot
from keepstep.orchestrator.snapshots import Texts
from keepstep.orchestrator.stepped import (
    Stepped,
    Waiting,
    entry_of,
    jobs_touched,
    next_of,
    to_be_kept,
)

SNAPSHOT_ENTRIES_MIN = 2_000
"""Between two snapshots; of a large fleet as many as it has nodes. Of 12,500 nodes each snapshot
takes some tenths of a second, and a month has a dozen."""

Done = Callable[[Sequence[Stepped]], None]
"""What the world does with decisions that are on disk."""


class Leader:
    """One leader, from taking over to its end."""

    def __init__(self, journal: MemoryJournal, world_now: float, skew: float, done: Done) -> None:
        self._journal = journal
        self._done = done
        self.waiting: deque[events.Event] = deque()
        """Events that came while the journal was away."""
        self.stopped = False
        """The process stands still, between a write and its orders."""
        self.unsent: list[brain.Decision] = []
        self.steps = 0
        self.texts = Texts()
        self._standing = journal.begin_term()
        found = replica.read(journal)
        if found is None:
            self.cluster = state.new_cluster("fleet")
            self._snapshot(0.0)
            found = replica.Replica(self.cluster, 0.0, 0, 0)
        self.cluster = found.cluster
        self.replayed = found.replayed
        self._snapshot_seq = found.snapshot_seq
        self._offset = max(found.moment, world_now + skew) - world_now

    @property
    def mute(self) -> bool:
        """It stands still, with orders that it has written and not sent."""
        return self.stopped and bool(self.unsent)

    @property
    def term(self) -> Term:
        return self._standing.term

    def now(self, world_now: float) -> float:
        return world_now + self._offset

    def lead(self, world_now: float, vacant_seconds: float = 0.0) -> None:
        """From here on it speaks. For so long nobody did."""
        seq = self._standing.seq
        began = events.TermBegan(
            self.term, MIGRATIONS_MAX, vacant_seconds, seq, tree=True, rules=rules.NEWEST
        )
        self.feed((began,), world_now)

    def feed(self, happened: Sequence[events.Event], world_now: float) -> None:
        """Step these events, write them together, and let their orders out."""
        if self._journal.away:
            self.waiting.extend(happened)
            return
        now = self.now(world_now)
        steps, batch = [], deque(Waiting(event) for event in happened)
        while batch:
            waiting = next_of(batch)
            event = waiting.event
            decision = brain.step(self.cluster, event, now)
            self.cluster = decision.cluster
            self.steps += 1
            jobs = jobs_touched(event, decision)
            steps.append(Stepped(waiting, decision, jobs, {}, now))
        entries = [entry_of(done) for done in steps if to_be_kept(done.decision)]
        if entries:
            head = self._standing.head
            self._standing = self._journal.append(self.term, head, entries)
        if self.stopped:
            self.unsent += [done.decision for done in steps]
            return
        self._done(steps)
        rare = max(SNAPSHOT_ENTRIES_MIN, len(self.cluster.nodes))
        if self._standing.seq - self._snapshot_seq >= rare and not self._busy():
            self._snapshot(now)

    def go_on(self, world_now: float) -> None:
        """The journal is back: what waited is handled now."""
        while self.waiting and not self._journal.away:
            batch = [self.waiting.popleft() for _ in range(min(len(self.waiting), 256))]
            self.feed(batch, world_now)

    def _busy(self) -> bool:
        return any(self.cluster.jobs[name].migration for name in self.cluster.open_jobs)

    def _snapshot(self, now: float) -> None:
        body, seq = self.texts.body(self.cluster, now), self._standing.seq
        self._standing = write_snapshot(self._journal, self._standing, body, seq)
        self._snapshot_seq = seq


def same_state(before: Leader, after: Leader) -> None:
    """Who takes over has to know what the one before it knew."""
    anew = Texts().of(before.cluster)
    if anew != before.texts.of(before.cluster):
        raise Violation("texts that a leader kept are not what its state is")
    if anew != after.texts.of(after.cluster):
        names = [
            name
            for name in before.cluster.jobs
            if before.cluster.jobs[name] != after.cluster.jobs.get(name)
        ]
        nodes = [
            name
            for name in before.cluster.nodes
            if before.cluster.nodes[name] != after.cluster.nodes.get(NodeId(name))
        ]
        raise Violation(f"the replay differs from the live state: {names[:4]} {nodes[:4]}")
