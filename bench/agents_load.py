"""Many agents in one process, each with a connection of its own: the load for bench.agents.

    python -m bench.agents_load --endpoints https://127.0.0.1:4000,https://127.0.0.1:4001
        --agents 12500 --token-file FILE --certificates DIRECTORY

Each shows the certificate of its own node. They speak the agents' protocol, send heartbeats at the
pace that the orchestrator asks for, and carry out orders as far as an orchestrator can tell:
workers start, unwind and resume within milliseconds, form their groups anew in REFORM_SECONDS, and
every report has the size of a real one. Nothing is trained.

Commands come by standard input, one JSON object per line; news leave by standard output likewise:

    {"do": "kill", "job": "j3"}        a worker of that job dies
    {"do": "hush", "job": "j3"}        a node of that job falls silent, with its connection open
    {"do": "count"}                    how many are connected

Times are those of this machine's monotonic clock, read in this process alone.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import random
import resource
import ssl
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from keepstep import portion, tls, wire
from keepstep.agent.reports import joined
from keepstep.model import Generation, JobId, NodeId, Phase, Rank, Seat, Sign, Term

SLOTS = 8
WHEEL_SECONDS = 0.02
BACKOFF_SECONDS = (0.05, 2.0)
SILENT_SECONDS_MAX = 4.0
CONNECTS_AT_ONCE = 100
"""All the agents share one processor core here, which their machines would not: more handshakes at
once take longer than an agent waits for a welcome, and none of them is ever through."""
REFORM_SECONDS = 0.5
"""What workers take to form groups and compare digests. Were it nothing, the orders that have come
would lie unread while this process writes the answers to others: 2,048 nodes would not do that."""
DIGEST = "0123456789abcdef" * 2


@dataclass
class JobStory:
    """What all nodes of a job know together: a real job's ranks agree by their collectives."""

    world: int = 0
    boundary: int = 0
    struck_at: float = 0.0
    struck: str = ""
    generation: int = 0
    ordered: list[float] = field(default_factory=list)
    """Seconds from the strike to the first order of the next generation, once per strike."""
    last_quiesced_at: float = 0.0
    reform_at: list[float] = field(default_factory=list)
    nodes: set[int] = field(default_factory=set)
    resumed: set[int] = field(default_factory=set)


class Connection(asyncio.Protocol):
    """One connection of one agent, and never another's: an attempt that was given up may still
    come to life."""

    def __init__(self, agent: FakeAgent) -> None:
        self.agent = agent
        self.lost, self.welcome = asyncio.Event(), asyncio.Event()
        self.transport: asyncio.Transport | None = None
        self._upgraded = False
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if self.agent.connection is not self:
            transport.abort()
            return
        self.transport = transport
        self.agent.heard_at = time.monotonic()
        transport.write(self.agent.fleet.upgrade)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.lost.set()
        self.welcome.set()

    def data_received(self, data: bytes) -> None:
        if self.transport is None:
            return
        self.agent.heard_at = time.monotonic()
        self._buffer += data
        if not self._upgraded:
            head, end, rest = bytes(self._buffer).partition(b"\r\n\r\n")
            if not end:
                return
            if b" 101 " not in head[:20]:
                self.transport.abort()
                return
            self._upgraded, self._buffer = True, bytearray(rest)
            self.agent.greet()
        while len(self._buffer) >= 4:
            end_at = 4 + int.from_bytes(self._buffer[:4], "big")
            if len(self._buffer) < end_at:
                return
            frame = bytes(self._buffer[4:end_at])
            del self._buffer[:end_at]
            self.welcome.set()
            self.agent.fleet.take(self.agent, frame)

    @property
    def open(self) -> bool:
        return self.transport is not None and self._upgraded

    def write(self, frame: bytes) -> None:
        if self.transport is not None:
            self.transport.write(frame)


class FakeAgent:
    """One agent: its connection and the workers that it claims to have."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.fleet = fleet
        self.number = number
        self.node = NodeId(f"n{number:05d}")
        self.workers: dict[tuple[JobId, Rank], tuple[Seat, Generation]] = {}
        self.standbys: dict[tuple[JobId, int], bool] = {}
        self.connection = Connection(self)
        self.hushed = False
        self.term = Term(0)
        """The latest that this one was told: nobody knows that of a leader who never greeted it."""
        self.heard_at = 0.0
        self._beat = b""

    async def stay_connected(self) -> None:
        failures = 0
        while True:
            url = self.fleet.endpoints[failures % len(self.fleet.endpoints)]
            self.connection = here = Connection(self)
            began = time.monotonic()
            try:
                async with self.fleet.connecting, asyncio.timeout(SILENT_SECONDS_MAX):
                    await self.fleet.connect(here, url)
                    await here.welcome.wait()
                await here.lost.wait()
            except (OSError, TimeoutError):
                pass
            finally:
                self.fleet.gone(self)
                if here.transport is not None:
                    here.transport.abort()
            failures = 1 if time.monotonic() - began > SILENT_SECONDS_MAX else failures + 1
            least, most = BACKOFF_SECONDS
            longest = min(most, least * 2.0 ** min(failures // len(self.fleet.endpoints), 10))
            await asyncio.sleep(longest * (0.5 + 0.5 * random.random()))

    def send(self, message: wire.Message) -> None:
        if not self.hushed:
            self.connection.write(wire.encode(message))

    def leave_if_silent(self, now: float) -> None:
        transport = self.connection.transport
        if transport is not None and now - self.heard_at > SILENT_SECONDS_MAX:
            transport.abort()

    def beat(self) -> None:
        if self.connection.open and not self.hushed:
            self.connection.write(self._beat)

    def greet(self) -> None:
        self.fleet.here(self)
        facts = tuple(
            wire.WorkerFact(job, rank, seat.slot, seat.incarnation, generation)
            for (job, rank), (seat, generation) in self.workers.items()
        )
        standbys = tuple(
            wire.StandbyFact(job, slot, 1, ready) for (job, slot), ready in self.standbys.items()
        )
        self.send(
            wire.Hello(
                node=self.node,
                address=f"10.{self.number >> 16}.{self.number >> 8 & 255}.{self.number & 255}",
                slots=SLOTS,
                peer_port=4001,
                store_port=4002,
                boot="boot",
                workers=facts,
                standbys=standbys,
                term_seen=self.term,
                token=self.fleet.token,
                labels={"rack": f"r{self.number // 16}"},
                speaks=wire.VERSION,
            )
        )
        self.changed()

    def changed(self) -> None:
        """What the next heartbeats say."""
        jobs: dict[JobId, Generation] = {}
        for (job, _), (_, generation) in self.workers.items():
            jobs[job] = generation
        pulses = tuple(
            wire.JobPulse(job, generation, 1000, 999, 1.25) for job, generation in jobs.items()
        )
        self._beat = wire.encode(wire.Heartbeat(self.node, pulses))


class Fleet:
    """All the agents, what they share, and what is measured."""

    def __init__(self, asked: argparse.Namespace, connect: Callable[..., Any]) -> None:
        self.endpoints = asked.endpoints.split(",")
        self.token = Path(asked.token_file).read_text(encoding="utf-8").strip()
        self.upgrade = (
            f"POST /v1/agent HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.token}\r\n"
            "Connection: Upgrade\r\nUpgrade: keepstep-stream\r\nContent-Length: 0\r\n\r\n"
        ).encode()
        self.agents = [FakeAgent(self, number) for number in range(asked.agents)]
        self.connecting = asyncio.Semaphore(CONNECTS_AT_ONCE)
        self.connected: set[int] = set()
        self.jobs: dict[JobId, JobStory] = {}
        self.beat_seconds = 0.5
        self.fences = 0
        """Ranks that we were told to end."""
        self.late_seconds = 0.0
        """The worst delay of our own loop: what we measure is not better than that."""
        self._connect = connect
        self._certificates = Path(asked.certificates)
        self._decoded: dict[bytes, wire.Message] = {}

    async def connect(self, connection: Connection, url: str) -> None:
        await self._connect(connection, url, self._secured(connection.agent.node))

    @functools.cache  # noqa: B019  The fleet lives as long as its process.
    def _secured(self, node: NodeId) -> ssl.SSLContext:
        """An agent makes it once. To make it takes as long as a handshake."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        there = self._certificates
        context.load_verify_locations(there / tls.AUTHORITY)
        context.load_cert_chain(there / f"{node}.crt", there / tls.KEY)
        return context

    def here(self, agent: FakeAgent) -> None:
        self.connected.add(agent.number)
        if len(self.connected) == len(self.agents):
            tell(event="all_connected")

    def gone(self, agent: FakeAgent) -> None:
        if agent.number in self.connected:
            self.connected.discard(agent.number)
            if agent.hushed:
                tell(event="hushed_dropped", node=agent.node)

    # ------------------------------------------------------------ heartbeats

    async def wheel(self) -> None:
        """Heartbeats, each agent at its own moment of the period."""
        at, due = 0.0, time.monotonic()
        while True:
            now = time.monotonic()
            self.late_seconds = max(self.late_seconds, now - due)
            number = len(self.agents)
            upto = at + number * min(1.0, (now - due + WHEEL_SECONDS) / (0.9 * self.beat_seconds))
            for index in range(int(at), int(upto)):
                agent = self.agents[index % number]
                agent.beat()
                agent.leave_if_silent(now)
            at, due = upto % number, now + WHEEL_SECONDS
            await asyncio.sleep(WHEEL_SECONDS)

    # ------------------------------------------------------------ orders

    def take(self, agent: FakeAgent, frame: bytes) -> None:
        message = self._decoded.get(frame)
        if message is None:
            message = wire.decode(frame)
            if len(self._decoded) > 10_000:
                self._decoded.clear()
            if isinstance(message, wire.Pulse):
                self._decoded[frame] = message
        match message:
            case wire.Pulse():
                agent.term = max(agent.term, message.term)
                self.beat_seconds = message.beat_seconds
            case wire.Order():
                if message.term >= agent.term and not agent.hushed:
                    self.obey(agent, message)
            case wire.Refused():
                tell(event="refused", node=agent.node, why=message.why)

    def obey(self, agent: FakeAgent, order: wire.Order) -> None:
        now = time.monotonic()
        job = self.jobs.setdefault(order.job, JobStory())
        if job.struck and order.generation > job.generation:
            tell(event="ordered", job=order.job, seconds=now - job.struck_at, by=job.struck)
            job.struck = ""
        job.generation = max(job.generation, order.generation)
        mine = [rank for of_job, rank in agent.workers if of_job == order.job]
        match order.action:
            case wire.StartWorkers(spec=spec, seats=seats):
                job.world = spec.world_size
                job.nodes.add(agent.number)
                for seat in seats:
                    agent.workers[order.job, seat.rank] = (seat, order.generation)
                agent.changed()
                self.report(agent, order, Phase.RESUME, [seat.rank for seat in seats])
            case wire.StartStandby(slot=slot):
                agent.standbys[order.job, slot] = True
                agent.send(wire.StandbyReport(agent.node, order.job, slot, 1, True))
            case wire.DropStandby(slot=slot):
                agent.standbys.pop((order.job, slot), None)
            case wire.Assign(seat=seat):
                agent.standbys.pop((order.job, seat.slot), None)
                agent.workers[order.job, seat.rank] = (seat, order.generation)
                agent.changed()
                agent.send(
                    wire.PhaseReport(
                        agent.node,
                        order.job,
                        order.generation,
                        Phase.QUIESCE,
                        (wire.SeatReport(seat.rank),),
                    )
                )
            case wire.Quiesce():
                fresh = [r for r in mine if agent.workers[order.job, r][1] < order.generation]
                if fresh:
                    job.last_quiesced_at = now
                    self.report(agent, order, Phase.QUIESCE, fresh)
            case wire.Reform():
                job.reform_at.append(now - job.last_quiesced_at)
                verified = functools.partial(self.report, agent, order, Phase.VERIFY, mine)
                asyncio.get_running_loop().call_later(REFORM_SECONDS, verified)
            case wire.Resume():
                self.report(agent, order, Phase.RESUME, mine)
                self._resumed(agent, order, job)
            case wire.Fence(seats=seats):
                for seat in seats:
                    if seat.node == agent.node:
                        self.fences += 1
                        agent.workers.pop((order.job, seat.rank), None)
                agent.changed()
            case _:
                return

    def _resumed(self, agent: FakeAgent, order: wire.Order, job: JobStory) -> None:
        for key in [key for key in agent.workers if key[0] == order.job]:
            seat, _ = agent.workers[key]
            agent.workers[key] = (seat, order.generation)
        agent.changed()
        if job.reform_at:
            times = sorted(job.reform_at)
            job.reform_at = []
            p99 = times[min(len(times) - 1, int(0.99 * len(times)))]
            tell(event="reformed", job=order.job, nodes=len(times), p99=p99, most=times[-1])

    def report(self, agent: FakeAgent, order: wire.Order, phase: Phase, ranks: list[Rank]) -> None:
        job = self.jobs[order.job]
        everybody = _everybody(job.world)
        seats = tuple(
            wire.SeatReport(
                rank,
                job.boundary,
                True,
                {everybody: DIGEST},
                portions=(everybody,) if phase is Phase.RESUME else (),
                entries=(job.boundary,),
                step=job.boundary,
                step_seconds=1.25,
            )
            for rank in ranks
        )
        told = wire.PhaseReport(agent.node, order.job, order.generation, phase, seats)
        agent.send(joined(told))

    # ------------------------------------------------------------ commands

    def do(self, command: dict[str, Any]) -> None:
        match command["do"]:
            case "count":
                self._count()
            case "kill":
                self._kill(JobId(command["job"]))
            case "hush":
                self._hush(JobId(command["job"]))

    def _count(self) -> None:
        times = resource.getrusage(resource.RUSAGE_SELF)
        tell(
            event="counted",
            connected=len(self.connected),
            fences=self.fences,
            processor=times.ru_utime + times.ru_stime,
            late_seconds=self.late_seconds,
            beat_seconds=self.beat_seconds,
        )
        self.late_seconds = 0.0

    def _victim(self, name: JobId) -> FakeAgent:
        here = [a for a in self.agents if not a.hushed and any(j == name for j, _ in a.workers)]
        return random.choice(here)

    def _strike(self, name: JobId, how: str) -> JobStory:
        job = self.jobs[name]
        job.struck, job.struck_at = how, time.monotonic()
        job.boundary += 1
        job.reform_at = []
        return job

    def _kill(self, name: JobId) -> None:
        agent = self._victim(name)
        job = self._strike(name, "kill")
        rank = random.choice([rank for of_job, rank in agent.workers if of_job == name])
        seat, generation = agent.workers.pop((name, rank))
        agent.changed()
        agent.send(
            wire.Observed(
                agent.node,
                name,
                Sign.EXIT,
                rank,
                seat.incarnation,
                generation,
                job.boundary,
                -9,
                "killed by SIGKILL",
            )
        )

    def _hush(self, name: JobId) -> None:
        agent = self._victim(name)
        agent.hushed = True
        self._strike(name, "hush")
        tell(event="hushed", node=agent.node, job=name)


@functools.cache
def _everybody(world: int) -> str:
    """All agents share this loop: what takes a millisecond would take seconds of it."""
    return portion.name_of(range(world))


def tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


async def serve(asked: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()

    async def connect(connection: Connection, url: str, secure: ssl.SSLContext) -> None:
        place = urlsplit(url)
        host, port = place.hostname, place.port
        assert host is not None, "the endpoints are https://HOST:PORT"
        assert port is not None, "the endpoints are https://HOST:PORT"
        await loop.create_connection(
            lambda: connection, host, port, ssl=secure, ssl_shutdown_timeout=1.0
        )

    fleet = Fleet(asked, connect)
    # Together: if one of them ends, there is no load any more, and everybody has to hear of it.
    async with asyncio.TaskGroup() as group:
        for agent in fleet.agents:
            group.create_task(agent.stay_connected())
        group.create_task(fleet.wheel())
        await obey_commands(fleet)
        raise SystemExit


async def obey_commands(fleet: Fleet) -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        fleet.do(json.loads(line))


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.agents_load", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--endpoints", required=True, metavar="URL,URL")
    parser.add_argument("--agents", type=int, required=True)
    parser.add_argument("--token-file", required=True, metavar="FILE")
    parser.add_argument("--certificates", required=True, metavar="DIRECTORY")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    random.seed(asked.seed)
    tls.small_buffers()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, asked.agents + 200), hard))
    asyncio.run(serve(asked))
    return 0


if __name__ == "__main__":
    sys.exit(main())
