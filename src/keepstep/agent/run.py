"""The agent of one node: wires its parts together and keeps them running.

    orchestrator <-- stream --> agent <-- Unix socket --> workers, standbys
                                  |---- preload server (forks, reaps) ---- store process
                                  '---- peer port (private state for joiners)

An agent may die at any moment: workers, preload server and store live on, and the next agent finds
them through the room. So nothing that a worker must not lose lives here.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from keepstep import __version__, wire
from keepstep.agent import log, metrics
from keepstep.agent.ages import Ages
from keepstep.agent.environment import installed, interface_of
from keepstep.agent.forks import Forks, preload_modules
from keepstep.agent.health import Health
from keepstep.agent.links import Link, Links
from keepstep.agent.orders import Hands, Orders
from keepstep.agent.peer import Peer
from keepstep.agent.probes import Probes
from keepstep.agent.reports import Reports
from keepstep.agent.room import Room, WorkerRecord, kill_group
from keepstep.agent.store import Store
from keepstep.agent.stream import Stream, secured
from keepstep.agent.tee import Tee
from keepstep.agent.workers import Worker, Workers
from keepstep.config import AgentSettings
from keepstep.detect import process
from keepstep.errors import ConfigError
from keepstep.model import Endpoint, Generation, JobId, NodeId, Phase, Rank, Sign, Term

STORE_SECONDS_MAX = 300.0
"""How long the first Hello waits for the store: the preload server's imports come first."""
LINGER_SECONDS_MAX = 20.0
"""From a worker's last words to its end: exit handlers that upload and flush fit in."""


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """One node's agent, settled."""

    node: NodeId
    slots: int
    """How many workers fit: the node's devices."""
    orchestrators: tuple[Endpoint, ...]
    address: str
    """Where other nodes reach this one: the peer port and the store listen there."""
    room: Path
    """On tmpfs, so that it is memory, and gone when the node is."""
    token: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    host_store: bool = True
    """False only where no job needs a rendezvous: tests without torch."""
    settings: AgentSettings = AgentSettings()
    tls_directory: Path | None = None
    """This node's certificate, where the orchestrators are https://."""

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ConfigError("--slots must be at least 1")


async def run(config: AgentConfig) -> None:
    """Serve the node until cancelled. Raises only for the user's mistakes and our bugs."""
    await Agent(config).run()


class Agent:
    """The parts, and the news between them."""

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self.room = Room(config.room, config.address)
        self.tee = Tee()
        self.reports = Reports(config.node)
        self.workers = Workers(config.node, self.room, self._on_end)
        self.forks = Forks(self.room, preload_modules(dict(os.environ)), self.workers.heard_exit)
        self.links = Links(self.room.agent_socket, self._on_link)
        self.peer = Peer(self.room)
        self.store = Store(self.room, self._on_store_replaced)
        secure = secured(config.tls_directory) if config.tls_directory else None
        self.stream = Stream(
            config.orchestrators,
            config.token,
            self._greeting,
            self._on_stream,
            secure,
            self._urgent,
        )
        self.probes = Probes(self.room, self.workers, self.tee, self.stream.send)
        self.health: Health | None = None
        if config.settings.health_command():
            self.health = Health(
                config.node, config.slots, config.settings, self.room, self.stream.send
            )
        self.orders = Orders(
            Hands(
                room=self.room,
                forks=self.forks,
                workers=self.workers,
                links=self.links,
                reports=self.reports,
                tee=self.tee,
                send=self.stream.send,
                spawn=self._spawn,
            )
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: dict[tuple[JobId, Rank], wire.Observed] = {}
        self._publishing: dict[str, wire.Publish] = {}
        self._ages = Ages()
        self._untold = False
        """A worker has ended, or the store is another one, and nobody was there to be told."""
        self._report_timer: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        self.room.open()
        # Else Gloo goes by the host's name, which many a hosts file gives to the loopback.
        interface = interface_of(self.config.address)
        if interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        self.workers.adopt()
        for worker in self.workers:
            job = self.room.jobs.get(worker.record.job)
            if job is not None and job.spec.tee and not worker.is_standby:
                self.tee.follow(Path(worker.record.log), worker.record.rank)
        await self.links.start()
        await self.peer.start()
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self.forks.run())
            if self.config.host_store:
                loops.create_task(self.store.run(self.forks))
                # Without a store the orchestrator could place no rendezvous here.
                async with asyncio.timeout(STORE_SECONDS_MAX):
                    await self.store.ready.wait()
            loops.create_task(self.probes.run())
            if self.health is not None:
                loops.create_task(self.health.run())
            if self.config.settings.metrics_listen:
                loops.create_task(metrics.serve(self.config.settings.metrics_listen, self._facts))
            loops.create_task(self.stream.run())

    def _facts(self) -> metrics.Facts:
        standing = self.health.standing(asyncio.get_running_loop().time()) if self.health else []
        said = [word.severity for word in standing if isinstance(word, wire.Health)]
        return metrics.Facts(
            self.config,
            self.stream.connected,
            self.room.term,
            tuple(self.workers),
            (*said, None)[0],
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("agent.task_failed", why=repr(error))

    # ------------------------------------------------------------ to and from the orchestrator

    def _hello(self) -> wire.Hello:
        living = [worker for worker in self.workers if worker.is_alive]
        return wire.Hello(
            node=self.config.node,
            address=self.config.address,
            slots=self.config.slots,
            peer_port=self.peer.port,
            store_port=self.store.port,
            boot=self.room.boot,
            workers=tuple(_fact(w) for w in living if not w.is_standby),
            standbys=tuple(
                wire.StandbyFact(w.record.job, w.record.slot, w.record.level, w.record.ready)
                for w in living
                if w.is_standby
            ),
            term_seen=self.room.term,
            token=self.config.token,
            labels=self.config.labels,
            seq_seen=self.room.seq,
            obeyed={str(name): job.generation for name, job in self.room.jobs.items()},
            belongs={str(name): job.belongs for name, job in self.room.jobs.items() if job.belongs},
            speaks=wire.VERSION,
            release=__version__,
            torch=installed("torch"),
            keeps=self.room.kept_jobs(),
        )

    def _urgent(self) -> bool:
        """Others wait for what this node has to tell: it comes before those with nothing to say."""
        waits = any(report.phase is not Phase.RESUME for report in self.reports.standing())
        return self._untold or waits or any(not self._is_old(n) for n in self._broken.values())

    def _greeting(self) -> list[wire.Message]:
        """All that stands, at each connect: what the last stream may have lost is in it."""
        told: list[wire.Message] = [self._hello()]
        news: list[wire.Observed] = []
        for job in self.room.jobs.values():
            news += {ending.rank: ending for ending in job.endings}.values()
        news += [broken for broken in self._broken.values() if not self._is_old(broken)]
        now = asyncio.get_running_loop().time()
        told += [self._ages.aged(observed, now) for observed in news]
        told += self.reports.standing()
        told += self._publishing.values()
        if self.health is not None:
            told += self.health.standing(asyncio.get_running_loop().time())
        return told

    def _on_stream(self, message: wire.Message) -> None:
        """The outermost frame of what an orchestrator asks for: one bad order is one refusal."""
        try:
            self._hear(message)
        except ConfigError:
            raise
        except Exception as error:
            name = message.order_id if isinstance(message, wire.Order) else ""
            log.error("agent.failed", kind=type(message).__name__, order=name, why=repr(error))
            self._refuse(wire.Refused(f"{type(message).__name__} {name} failed: {error!r}"))

    def _hear(self, message: wire.Message) -> None:
        match message:
            case wire.Pulse():
                if self._current(message.term, "pulse"):
                    # Who pulses has heard all that stands: it was told at the connect.
                    self._untold = False
                    self.stream.accepted()
                    self.probes.set_heads(message.heads)
                    self.probes.set_pace(message.beat_seconds)
                else:
                    # A deposed leader has nothing to say; another endpoint has.
                    self.stream.drop()
            case wire.Order():
                if self._current(message.term, f"order {message.order_id}", message.seq):
                    # Without the place in the journal: told again, it is the same order.
                    refused = self.orders.obey(replace(message, seq=0))
                    if refused is not None:
                        self._refuse(refused)
            case wire.Published():
                self._publishing.pop(message.request, None)
                for worker in self.workers.seated(message.job):
                    if (link := self.links.find(worker.record.pid)) is not None:
                        link.send(message)
            case wire.Refused():
                log.error("orchestrator.refused", why=message.why)
                self.stream.refused(message.why, hopeless=not any(self.workers))
            case _:
                log.warning("stream.unexpected", kind=type(message).__name__)

    def _current(self, term: Term, what: str, seq: int = 0) -> bool:
        if term < self.room.term:
            self._refuse(wire.Refused(f"{what} has term {term}; {self.room.term} has been seen"))
            return False
        if term > self.room.term or (seq and seq != self.room.seq):
            # Before anything is done: a leader that does not have this entry must hear of it. One
            # that only pulses takes nothing back: its journal may be the one that lacks it.
            before = self.room.term, self.room.seq
            self.room.term, self.room.seq = term, seq or self.room.seq
            try:
                self.room.save()
            except OSError:
                # A room that is full: the next order of this entry must not pass unwritten.
                self.room.term, self.room.seq = before
                raise
        return True

    def _refuse(self, refused: wire.Refused) -> None:
        log.warning("agent.refused", why=refused.why)
        self.stream.send(refused)

    # ------------------------------------------------------------ to and from the workers

    def _on_link(self, link: Link, message: wire.Message) -> None:
        match message:
            case wire.WorkerHello():
                self._on_hello(link, message)
            case wire.StandbyReady():
                self._on_standby_ready(link, message)
            case wire.WorkerReport():
                self._on_report(link, message)
            case wire.WorkerBroken():
                self._on_broken(message)
            case wire.WorkerEnding():
                worker = self.workers.on_seat(message.job, message.rank, message.incarnation)
                if worker is not None:
                    worker.words = message
                    # Its script is over. Who cannot leave now holds up the others for nothing.
                    self._spawn(self.workers.end(worker, LINGER_SECONDS_MAX, ask=False))
            case wire.Publish():
                publish = replace(message, node=self.config.node)
                self._publishing[publish.request] = publish
                self.stream.send(publish)
            case _:
                log.warning("link.unexpected", kind=type(message).__name__, pid=link.pid)

    def _on_hello(self, link: Link, hello: wire.WorkerHello) -> None:
        worker = self.workers.by_pid(link.pid)
        if worker is None:
            worker = self._meet_stranger(link, hello)
        if worker is None:
            return
        record = worker.record
        claimed = (hello.job, hello.rank, hello.incarnation)
        if hello.rank >= 0 and claimed != (record.job, record.rank, record.incarnation):
            why = f"process {link.pid} has rank {record.rank}, not {hello.rank}"
            link.send(wire.Refused(why))
            return
        if hello.generation > record.generation:
            self.workers.heard(worker, replace(record, generation=hello.generation))
        self.orders.welcome(worker, link, hello)

    def _meet_stranger(self, link: Link, hello: wire.WorkerHello) -> Worker | None:
        """A worker whose record was lost is adopted if its slot is free, and ended if it is not."""
        try:
            reading = process.look(link.pid)
        except OSError as error:
            # It comes again, and so does its chance to be looked at.
            log.warning("link.stranger", job=hello.job, why=f"process {link.pid}: {error}")
            link.writer.close()
            return None
        if reading is None:
            return None
        if self.workers.on_slot(hello.slot):
            why = f"slot {hello.slot} has another worker; process {link.pid} is ended"
            log.warning("link.stranger", job=hello.job, why=why)
            link.send(wire.Refused(why))
            if not kill_group(link.pid, reading.start, signal.SIGKILL):
                link.writer.close()
            return None
        log.warning("link.stranger", job=hello.job, why=f"process {link.pid} adopted")
        return self.workers.watch(
            WorkerRecord(
                job=hello.job,
                slot=hello.slot,
                pid=link.pid,
                start=reading.start,
                rank=hello.rank,
                incarnation=hello.incarnation,
                generation=hello.generation,
                level=hello.level,
            )
        )

    def _on_standby_ready(self, link: Link, message: wire.StandbyReady) -> None:
        worker = self.workers.by_pid(link.pid)
        if worker is None or not worker.is_standby:
            return
        self.workers.heard(worker, replace(worker.record, ready=True, level=message.level))
        self._tell_standby(worker, ready=True, detail=message.detail)

    def _on_report(self, link: Link, report: wire.WorkerReport) -> None:
        worker = self.workers.by_pid(link.pid)
        if worker is None or (worker.record.job, worker.record.rank) != (
            report.job,
            report.seat.rank,
        ):
            log.warning("report.refused", pid=link.pid, rank=report.seat.rank)
            return
        now = asyncio.get_running_loop().time()
        became = self.reports.heard(report, now)
        if became != "gathered":
            log.info("report.ignored", job=report.job, rank=report.seat.rank, why=became)
        self._send_reports()

    def _send_reports(self) -> None:
        loop = asyncio.get_running_loop()
        local: dict[JobId, set[Rank]] = {}
        for worker in self.workers:
            waits = self.orders.leaves(worker)
            if worker.is_alive and not worker.is_standby and not waits:
                local.setdefault(worker.record.job, set()).add(worker.record.rank)
        for report in self.reports.due(local, loop.time()):
            self.stream.send(report)
        if self._report_timer is not None:
            self._report_timer.cancel()
            self._report_timer = None
        if (due := self.reports.next_due()) is not None:
            self._report_timer = loop.call_at(due, self._send_reports)

    def _is_old(self, news: wire.WorkerBroken | wire.Observed) -> bool:
        """Of a generation that is over: what broke then was mended, or is being mended.

        The worker's own page says which one it trains in: this node may have heard of a later one
        that never came.
        """
        worker = self.workers.on_seat(news.job, int(news.rank), news.incarnation)
        if worker is not None and worker.page is not None:
            return news.generation < worker.page.read().generation
        job = self.room.jobs.get(news.job)
        return job is not None and news.generation < job.generation

    def _on_broken(self, broken: wire.WorkerBroken) -> None:
        if self._is_old(broken):
            log.info("broken.ignored", job=broken.job, rank=broken.rank, why="older generation")
            return
        # A word of its own: an older orchestrator would take it for a broken collective.
        without = Sign.UNCOVERED if broken.cover else Sign.BROKEN
        observed = wire.Observed(
            node=self.config.node,
            job=broken.job,
            sign=Sign.CORRUPT if broken.corrupt else without,
            rank=broken.rank,
            incarnation=broken.incarnation,
            generation=broken.generation,
            step=broken.step,
            detail=broken.detail,
            cover=broken.cover,
        )
        self._broken[broken.job, broken.rank] = observed
        self.stream.send(self._ages.aged(observed, asyncio.get_running_loop().time()))

    def _on_end(self, worker: Worker, observed: wire.Observed) -> None:
        record = worker.record
        if worker.is_standby:
            self._tell_standby(worker, ready=False, detail=observed.detail)
            return
        told = self._ages.aged(observed, asyncio.get_running_loop().time())
        self._untold = not self.stream.send(told) or self._untold
        if any(w.record.rank == record.rank for w in self.workers.seated(record.job)):
            # Its rank lives on here, with another worker: what that one said stands.
            return
        self._broken.pop((record.job, record.rank), None)
        for request, publish in list(self._publishing.items()):
            if (publish.job, publish.rank) == (record.job, record.rank):
                del self._publishing[request]
        self.reports.forget_rank(record.job, record.rank)
        self.tee.leave(Path(record.log))
        # The ranks that are left may now be all of them.
        self._send_reports()

    def _tell_standby(self, worker: Worker, *, ready: bool, detail: str) -> None:
        record = worker.record
        self.stream.send(
            wire.StandbyReport(
                node=self.config.node,
                job=record.job,
                slot=record.slot,
                level=record.level,
                ready=ready,
                detail=detail,
            )
        )

    def _on_store_replaced(self) -> None:
        """A node tells of its ports in the Hello of a stream, and nowhere else."""
        self._untold = True
        self.stream.drop()


def _fact(worker: Worker) -> wire.WorkerFact:
    record = worker.record
    seen = worker.page.read().generation if worker.page is not None else 0
    return wire.WorkerFact(
        job=record.job,
        rank=record.rank,
        slot=record.slot,
        incarnation=record.incarnation,
        generation=Generation(max(seen, record.generation)),
    )
