"""The loop: receive -> step -> journal -> order.

    agents' streams --+                                      +--> agents' streams
    operators (api) --+--> inbox --> brain.step --> journal --+--> operators
    our own ticks  ---+              (pure)       (on disk)   +--> /v1/events

An order leaves only after the step that issued it is on disk. Events that wait together share one
write, reports of one job an entry; one alone is handled at once. Steps that change nothing are not
journaled; heartbeats never reach the brain: who is alive is in memory, and judged in liveness.py.

A restart loads the newest snapshot, replays what came after it, begins a higher term and tells the
brain so; the agents reconnect by themselves and are told again what they need. If somebody else
has begun a term since, the journal says Deposed, and this process must act no more: it ends.

A journal in a database may be away for a while. What was stepped waits and is written again in the
same order, and its orders with it; agents are heard and operators answered meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from keepstep import codec, failpoint, wire
from keepstep.clock import Clock
from keepstep.config import OrchestratorConfig
from keepstep.errors import Deposed, Permanent, Transient, WireError
from keepstep.model import NodeId, Term
from keepstep.orchestrator import (
    admission,
    bounds,
    brain,
    events,
    nodes,
    reconcile,
    replica,
    state,
    suspicion,
    ticking,
    view,
)
from keepstep.orchestrator.copies import copy_of
from keepstep.orchestrator.intake import Intake
from keepstep.orchestrator.journal import Journal, Standing, keeping
from keepstep.orchestrator.liveness import Liveness, look_seconds, own_lateness
from keepstep.orchestrator.patience import Patience
from keepstep.orchestrator.pulses import Frames, spread
from keepstep.orchestrator.snapshot_writer import SnapshotWriter
from keepstep.orchestrator.stepped import (
    Stepped,
    Told,
    Waiting,
    apart,
    come,
    entry_of,
    next_of,
    records_of,
    stepped_of,
    to_be_kept,
    with_its_age,
)
from keepstep.orchestrator.stepping_down import Leaving, of_another, why_not_term
from keepstep.orchestrator.streams import AgentStream, Allowances, addressed, listen, refuse
from keepstep.orchestrator.together import until_one_ends

REREADS_MAX = 100
"""Steps that may fail in one term, each answered by reading the journal again, before we leave."""
SLICE_SECONDS_MAX = 0.1
JOURNAL_AWAY = "the journal was away"

Log = Callable[..., None]
"""log("order.sent", job=…, why=…): events, not prose."""


class Orchestrator:
    """One leader, from the start of its term to its end."""

    def __init__(
        self,
        journal: Journal,
        config: OrchestratorConfig,
        clock: Clock,
        token: str,
        log: Log,
        begun: replica.Begun | None = None,
    ) -> None:
        self._journal, self._config, self._clock = journal, config, clock
        self._token, self._log = token, log
        self._inbox: asyncio.Queue[Waiting] = asyncio.Queue(config.inbox_events_max)
        self._streams: dict[NodeId, AgentStream] = {}
        self._boots: dict[NodeId, str] = {}
        """What agents call themselves besides their nodes' names: all whom this term greeted. Also
        nodes that are forgotten: one that comes back knows this term from us (of_another)."""
        self._allowances = Allowances()
        self.intake = Intake(config.project_open_jobs_max, config.open_jobs_max)
        self._alive, self._patience = Liveness(), Patience(config.silent_seconds_max)
        # For whoever shows them: who is here, and what they said last.
        self.connected, self.heartbeats = self._streams.keys(), self._alive.heartbeats.values()
        self._batch: deque[Waiting] = deque()  # Taken from the inbox and not stepped yet.
        self._steps: list[Stepped] = []  # Not on disk yet.
        self._torn = False
        """A step failed half-way: the state has to be read from the journal before the next."""
        self.leaving = Leaving(clock.monotonic())
        self._written_at, self._away = 0.0, False  # The journal, when we last tried to write.
        self._sent_away = False  # All agents, since it is away: none of them is connected.
        self._snapshots = SnapshotWriter(journal, config.snapshot_entries, log)
        self._tick_waiting, self._tick_due, self._rereads = False, clock.monotonic(), 0
        self._hurried = asyncio.Event()
        """Set by each step that changed something: the next tick may be due earlier now."""
        self._told = Told(config.history_entries_max)
        self.history, self.hearers = self._told.records, self._told.hearers
        self._heads: dict[str, str] = {}
        begun = begun or replica.begin(journal)
        self.endpoint = begun.endpoint
        self._wrote(begun.standing)
        self.cluster, moment = self._restored(begun.replica)
        self._started_now = max(moment, clock.now())
        self._started_monotonic = clock.monotonic()
        self._begin_term()

    # ---------------------------------------------------------------- the life of a leader

    async def run(self) -> None:
        """Lead until cancelled, or until deposed or broken (which raises)."""
        try:
            await until_one_ends(self._log, self._work(), self._beat(), self._pulse())
        finally:
            for stream in tuple(self._streams.values()):
                stream.drop("the orchestrator is leaving")

    @property
    def term(self) -> Term:
        return self._standing.term

    @property
    def cut_off(self) -> str:
        """Why agents are better off elsewhere, if they are: they stay with whoever pulses, and who
        has taken the lease meanwhile would give up every node without them."""
        lease = self._standing.lease_seconds
        if not (self._away and lease and self._clock.monotonic() - self._written_at > lease):
            return ""
        return f"the journal is away, and the lease of {lease:g} s is over: another may lead"

    def now(self) -> float:
        """Wall-clock time that never goes back and never jumps: anchored once, then monotonic."""
        return self._started_now + (self._clock.monotonic() - self._started_monotonic)

    async def decide(self, event: events.Event) -> brain.Decision:
        """Hand an operator's event to the brain and wait until its decision is on disk."""
        decided: asyncio.Future[brain.Decision] = asyncio.get_running_loop().create_future()
        await self._inbox.put(Waiting(event, decided))
        return await decided

    def consider(self, event: events.Event) -> brain.Decision:
        """What an event would lead to now, on a copy: nothing is changed and nobody is told."""
        return brain.step(copy_of(self.cluster), event, self.now())

    def picture(self) -> dict[str, Any]:
        """The cluster for people: the brain's own view, and what only heartbeats know."""
        now = self.now()
        plain = view.describe(self.cluster, now, self._alive.heartbeats.values())
        plain |= {"term": self.term, "now": now, "connected": sorted(self._streams)}
        plain["agents"] = {node: self._streams[node].about for node in plain["connected"]}
        plain["pulses"] = [codec.to_plain(beat) for beat in self._alive.heartbeats.values()]
        return plain

    def keeping(self) -> dict[str, Any]:
        """How the journal fares, as its writer sees it."""
        silent = self._clock.monotonic() - self._written_at
        return {"away": self._away, **keeping(self._standing, silent, self._snapshots.due.seq)}

    # ---------------------------------------------------------------- restore

    def _restore(self) -> tuple[state.Cluster, float]:
        """The state that the journal implies, and the moment of its newest entry."""
        return self._restored(replica.read(self._journal))

    def _restored(self, found: replica.Replica | None) -> tuple[state.Cluster, float]:
        if found is None:
            # The secret of a cluster is made once and never derived again: it is in the journal.
            cluster, moment = state.new_cluster(secrets.token_hex(16)), 0.0
            self._wrote(self._snapshots.write(cluster, self._standing, moment))
            return cluster, moment
        self._snapshots.due.wrote(found.snapshot_seq, found.replayed)
        self._log("journal.replayed", snapshot_seq=found.snapshot_seq, events=found.replayed)
        return found.cluster, found.moment

    def _begin_term(self) -> None:
        standing = self._standing
        self._log("term.began", term=self.term, after_seconds=round(standing.vacant_seconds, 3))
        self._handle([Waiting(ticking.term_began(standing, self._config))])
        self._expect_all()

    # ---------------------------------------------------------------- receive -> step -> journal

    async def _work(self) -> None:
        while True:
            waiting = [await self._inbox.get()]
            waiting += come(self._inbox, self._config.batch_events_max - 1)
            try:
                await self._until_written(waiting)
                if self.leaving.why is not None:
                    # What proves it may have come since; and do we still lead? Else it is that.
                    await self._until_written(come(self._inbox, self._inbox.qsize()))
                    # Away just now, it knows of nobody: why we leave must not be lost for that.
                    with contextlib.suppress(Transient):
                        self._journal.append(self.term, self._standing.head, ())
                    raise self.leaving.why
            except Deposed as error:
                self._log("term.deposed", term=self.term, why=str(error))
                for item in waiting:
                    item.fail(error)
                raise
            # A long queue must not starve the streams' readers: let them run between batches.
            await asyncio.sleep(0)

    async def _until_written(self, waiting: list[Waiting]) -> None:
        """Handle events, for as long as it takes the journal to be there."""
        self._batch.extend(waiting)
        told, began = "", self._clock.monotonic()
        while True:
            try:
                self._handle(())
                self._renew_if_due()
                if told:
                    began, told = self._came_back(began), ""
                    continue
                self._away = False
                if not self._batch:
                    break
                began, seconds = self._clock.monotonic(), 0.0
            except Transient as error:
                self._away = True
                if str(error) != told:
                    told = str(error)
                    self._log("journal.away", why=told)
                seconds = error.retry_after_seconds
            await asyncio.sleep(seconds)
        self._snapshot_if_due()

    def _came_back(self, began: float) -> float:
        """The journal is there again. What nobody could decide meanwhile is nobody's fault."""
        now = self._clock.monotonic()
        self._log("journal.back", seconds=round(now - began, 3))
        sent_away, self._sent_away = self._sent_away, False
        if sent_away or now - began >= self._config.late_seconds_max:
            # All owners of jobs read this: the driver's words (a host, a user) are in our log only.
            # It comes before what has waited, and moves the clocks by which that is judged.
            back = events.ControlPlaneBack(now - began, JOURNAL_AWAY, sent_away)
            self._batch.appendleft(Waiting(back))
            self._tick_due = now  # One that has waited since is late by the same time: once only.
        if sent_away:
            self._expect_all()
        return now

    def _expect_all(self) -> None:
        """Nobody is connected, and all have to find us: as if they were heard a little later."""
        believed = [node.node for node in self.cluster.nodes.values() if node.alive]
        self._alive.expect(believed, self._clock.monotonic() + suspicion.TERM_GRACE_SECONDS)

    def _handle(self, waiting: Iterable[Waiting]) -> None:
        """Step events, write the steps together, let their orders out. As many as fit into a slice
        of time: neither the lease nor the streams' readers can wait for all."""
        self._batch.extend(waiting)
        if self._steps:  # A write in doubt: the very same again, before anything is added.
            self._commit()
            return
        until = self._clock.monotonic() + SLICE_SECONDS_MAX
        while self._torn or (self._batch and not (self._steps and self._clock.monotonic() > until)):
            if self._torn:
                self._commit()
                self.cluster, _ = self._restore()
                self._torn = False
                continue
            item = next_of(self._batch)
            if isinstance(item.event, events.Tick):
                item.event = self._tick_now()
            elif (aged := with_its_age(item, self._clock.monotonic())) is None:
                continue
            else:
                item.event = aged
            now = self.now()
            try:
                decision = brain.step(self.cluster, item.event, now)
            except Exception as error:
                self._torn = True
                self._leave_out(item, error)
                continue
            self.cluster = decision.cluster
            self._steps.append(stepped_of(item, decision, now, self._steps))
        self._commit()

    def _tick_now(self) -> events.Tick:
        """A tick that says by how much our own loop, not the cluster, was late for it."""
        self._tick_waiting = False
        limit = self._config.late_seconds_max
        return events.Tick(own_lateness(self._tick_due, self._clock.monotonic(), limit))

    def _leave_out(self, item: Waiting, error: Exception) -> None:
        """A bug of ours may have left the state half changed: leave the event out (of reports that
        came together, one); the state is taken from the journal, where every step is whole."""
        self._batch.extendleft(reversed(apart(item)))
        trace = traceback.format_exc()
        self._log("step.failed", kind=type(item.event).__name__, why=repr(error), trace=trace)
        item.fail(Permanent(f"a bug of the orchestrator's: {error!r}"))
        self._rereads += 1
        if self._rereads > REREADS_MAX:
            raise Permanent(f"{REREADS_MAX} steps failed in this term: {error!r}") from error

    def _commit(self) -> None:
        """Write what changed, then let the orders out. Repeated as it is if the journal is away."""
        steps = self._steps
        entries = [entry_of(done) for done in steps if to_be_kept(done.decision)]
        if entries:
            self._wrote(self._journal.append(self.term, self._standing.head, entries))
            self._hurried.set()
            self._snapshots.due.grown += sum(done.weight for done in steps)
        self._steps = []
        for done in steps:
            for phase in view.phases(self.cluster, done.jobs).values():
                # On disk, and not told to anybody: the worst moment for a leader to die.
                failpoint.reach(f"orchestrator-{phase}")
            self._send(done.decision)
            done.waiting.settle(done.decision)
        self._tell([done for done in steps if to_be_kept(done.decision)])

    def _wrote(self, standing: Standing) -> None:
        self._standing = standing
        self._heads |= standing.jobs
        self._written_at = self._clock.monotonic()

    def _renew_if_due(self) -> None:
        """Who has nothing to write says so in time: others may begin a term when a lease ends. Our
        clock says only when to speak; the store's own says whether it was in time. A file has no
        lease, and is asked all the same: a second leader may have begun on it, and decides."""
        # Half: a tick that comes a moment early would leave the look to the next one.
        pause = self._standing.lease_seconds / 4 or ticking.LOOK_SECONDS / 2
        if self._clock.monotonic() - self._written_at >= pause:
            self._wrote(self._journal.append(self.term, self._standing.head, ()))

    def _send(self, decision: brain.Decision) -> None:
        for order in decision.orders:
            numbered = dataclasses.replace(order, seq=self._standing.seq)
            for stream, frame in addressed(numbered, self._streams):
                stream.send(frame)
        for node, answer in decision.answers:
            if found := self._streams.get(node):
                found.say(answer)

    def _tell(self, steps: list[Stepped]) -> None:
        records = records_of(self._standing.seq, steps)
        for record in records:
            self._log("decided", **record)
        self._told.tell(records)

    def _snapshot_if_due(self) -> None:
        moment = self._clock.monotonic()
        grown = self._snapshots.go_on(self.cluster, self._standing, self.now(), moment)
        if grown is not None:
            self._wrote(grown)

    # ---------------------------------------------------------------- our own clock

    async def _beat(self) -> None:
        """Ticks and the judgement of silence."""
        pulse_due = tick_due = woken_due = self._clock.monotonic()
        while True:
            now = self._clock.monotonic()
            late = own_lateness(woken_due, now, self._config.late_seconds_max)
            if late:
                self._log("loop.late", seconds=round(late, 3), why="deadlines pushed back")
                self._alive.forgive(late, now)
            quiet = self._alive.quiet(now, self._patient())
            await self._hear_witnesses(quiet, now)
            if self._standing.lease_seconds:
                excused = self._away or late > 0
                self.leaving.listen(self._alive.last_heard, self._streams, now, excused=excused)
            await self._judge_silence(now)
            if now >= pulse_due:
                pulse_due = now + self._config.pulse_seconds
            if now >= tick_due:
                if not (self._tick_waiting or self._inbox.full()):
                    self._tick_waiting, self._tick_due = True, tick_due
                    await self._inbox.put(Waiting(events.Tick()))
                tick_due = now + self._until_tick()
            look_due = min(pulse_due, now + look_seconds(quiet)) if quiet else pulse_due
            tick_due = await ticking.doze(
                self._clock, self._hurried, self._until_tick, tick_due, look_due
            )
            woken_due = min(tick_due, look_due)

    def _until_tick(self) -> float:
        due, lease = brain.due(self.cluster), self._standing.lease_seconds
        return ticking.until_tick(due, self.now(), self._config, lease, len(self.cluster.doubtful))

    async def _hear_witnesses(self, silent: set[NodeId], now: float) -> None:
        """Ask the jobs' steps about the nodes that say nothing."""
        cluster, quiet = self.cluster, silent | self.cluster.doubtful.keys()
        if not self._alive.asks_jobs(cluster.open_jobs, quiet, now):
            return
        for node in self._alive.vouch(nodes.jobs_on(cluster, quiet), now):
            if node in cluster.doubtful:
                await self._inbox.put(Waiting(events.NodeVouched(node)))

    async def _judge_silence(self, now: float) -> None:
        if self._inbox.full() or self.cut_off:
            # Heartbeats lie unread behind what finds no room there, or we sent everybody away.
            self._alive.last_heard = dict.fromkeys(self._alive.last_heard, now)
            return
        for node, seconds, quiet in self._alive.fall_silent(now, self._patient()):
            self._log("node.silent", node=node, seconds=round(seconds, 3))
            # The stream may look open for minutes: whoever comes back must say Hello again.
            if stream := self._streams.pop(node, None):
                stream.drop("silent")
            await self._inbox.put(Waiting(events.NodeSilent(node, quiet)))

    def _patient(self) -> Patience:
        self._patience = self._patience.at(self.cluster)
        return self._patience

    async def _pulse(self) -> None:
        seconds = self._config.pulse_seconds
        while True:
            self._send_away_if_cut_off()
            await spread(self._streams, self._frames, self._alive.jobs_on, seconds, self._clock)

    def _send_away_if_cut_off(self) -> None:
        if why := self.cut_off:
            self._sent_away = True
            for stream in tuple(self._streams.values()):
                stream.drop(why)

    def _frames(self) -> Frames:
        paces = self._alive.paces(self._patient(), self._clock.monotonic())
        return Frames(self.term, self._heads, paces)

    # ---------------------------------------------------------------- agents

    async def serve_agent(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        hello_bytes_max: int = wire.HELLO_BYTES_MAX,
    ) -> None:
        """One agent's stream, from its Hello to its end."""
        try:
            async with asyncio.timeout(self._config.hello_seconds_max):
                hello = await wire.read(reader, hello_bytes_max)
        except (TimeoutError, asyncio.IncompleteReadError, WireError) as error:
            await refuse(writer, f"no Hello that could be read: {error}")
            return
        if away := self._why_not(hello, writer):
            self._log("agent.refused" if away.for_good else "agent.sent_away", why=away.why)
            if away.for_good:
                await refuse(writer, away.why)
            return
        if of_another(hello, self.term, self._boots):
            # Either we are deposed and do not know it yet, or the journal has forgotten a term.
            seq, now = self._standing.seq, self._clock.monotonic()
            if word := self.leaving.heed(hello, self.cluster, seq, now):
                await self._inbox.put(Waiting(word))
            return
        # The token is checked and forgotten: it must not reach the journal.
        hello = dataclasses.replace(hello, token="")
        limit, version = self._config.outbox_bytes_max, wire.agreed(hello.speaks)
        stream = AgentStream(hello.node, writer, self._beats, limit, version)
        stream.about |= {"release": hello.release, "torch": hello.torch}
        if not self._allowances.greet(stream):
            return  # One hello after the other: it tries again, and later each time.
        if old := self._streams.get(hello.node):
            old.drop("replaced by a newer connection")
        self._streams[hello.node], self._boots[hello.node] = stream, hello.boot
        self._heard(hello.node)
        self._log("agent.connected", node=hello.node, workers=len(hello.workers))
        jobs = {fact.job for fact in hello.workers}
        stream.send(self._frames().of(hello.node, jobs, stream.version))
        if gap := reconcile.gap(self.cluster, self.term, self._standing.seq, hello):
            await self._inbox.put(Waiting(gap))
        await self._inbox.put(Waiting(hello))
        try:
            await listen(stream, reader, writer)
            async for message in stream.messages():
                await self._receive(stream, message)
        finally:
            await self._link_ended(stream)

    def _why_not(self, hello: wire.Message, writer: asyncio.StreamWriter) -> admission.Away | None:
        if why := self.cut_off:
            # Without a word: one that is refused takes itself for wrongly started.
            return admission.Away(why, for_good=False)
        shown, secure = writer.get_extra_info("peercert"), bool(writer.get_extra_info("sslcontext"))
        why = admission.why_not_agent(hello, self._token, shown, secure=secure)
        if why := why or why_not_term(hello, self.term):
            return admission.Away(why)
        known, now = self.cluster.nodes.get(hello.node), self._clock.monotonic()
        boot = self._boots[hello.node] if hello.node in self._streams else ""
        holder = admission.Holder(known, boot, now - self._alive.last_heard.get(hello.node, now))
        return admission.why_not_name(hello, holder, self.now(), self._patient().of(hello.node))

    async def _receive(self, stream: AgentStream, message: wire.Message) -> None:
        if self._streams.get(stream.node) is not stream:
            return  # Bytes of a connection that has been replaced or given up.
        if isinstance(message, wire.Refused):
            # It names no node. An order that failed, or came too late, is told again if it counts.
            self._log("agent.refuses", node=stream.node, why=message.why[: state.DETAIL_CHARS_MAX])
            return
        if why := bounds.why_not(message, stream.node):
            stream.drop(why)
            return
        self._heard(stream.node)
        if answer := bounds.refused(message):
            stream.say(answer)
            return
        await self._inbox.put(Waiting(bounds.cut(message), heard_at=self._clock.monotonic()))

    def _beats(self, stream: AgentStream, beat: wire.Heartbeat) -> None:
        """By far the most frequent message: heard where it arrives, and kept by nobody."""
        if self._streams.get(stream.node) is not stream:
            return
        if beat.node != stream.node:
            stream.drop("a Heartbeat of another node, or of none")
            return
        own = nodes.own_pulses(self.cluster, bounds.cut_beat(beat))
        self._alive.hear(own, self._clock.monotonic())

    def _heard(self, node: NodeId) -> None:
        self._alive.last_heard[node] = self._clock.monotonic()

    async def _link_ended(self, stream: AgentStream) -> None:
        if self._streams.get(stream.node) is not stream:
            return
        del self._streams[stream.node]
        self._log("agent.disconnected", node=stream.node, why=stream.dropped or "stream ended")
        if self.cut_off:
            return  # It left because we sent it away.
        # Without waiting: this runs while the connection's task may be being cancelled.
        try:
            self._inbox.put_nowait(Waiting(events.LinkLost(stream.node)))
        except asyncio.QueueFull:
            return  # Silence will say the same within seconds.
