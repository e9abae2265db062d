"""One node in numbers, for Prometheus: GET /metrics on a port of the operator's choice.

The families are made purely from what the agent knows at that moment; jobs and ranks are counted
and not named, so an agent has at most SERIES_MAX series whatever it runs. The server answers this
one question to a few clients at a time, within a time limit. It asks for no token and listens
nowhere unless it is told to.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keepstep import __version__, exposition, logs
from keepstep.agent import log
from keepstep.errors import ConfigError
from keepstep.exposition import Family, counters, gauge, gauges, info
from keepstep.model import Severity
from keepstep.page import TRAINING, Mark, Progress

if TYPE_CHECKING:
    from keepstep.agent.run import AgentConfig
    from keepstep.agent.workers import Worker

SERIES_MAX = 50
CLIENTS_MAX = 8
REQUEST_SECONDS_MAX = 5.0
HEAD_BYTES_MAX = 8192
EVENTS = ("worker.ended", "job.stalled", "probe.late", "stream.lost", "agent.refused")
"""Lines of the log that are worth a number."""
WORKERS = ("training", "recovering", "starting", "finished", "standby ready", "standby warming")


@dataclass(frozen=True, slots=True)
class Facts:
    """What an agent knows at one moment."""

    config: AgentConfig
    connected: bool
    term: int
    workers: tuple[Worker, ...]
    health: Severity | None
    """What the health program says of this node; None: it is well, or there is none."""


def families(facts: Facts) -> list[Family]:
    """Everything that the agent tells, but for its own process."""
    readings = list(_readings(facts.workers))
    used = {worker.record.slot for worker in facts.workers if worker.is_alive}
    steps = [reading.step_ns / 1e9 for reading in readings if reading.mark in TRAINING]
    worst = list(Severity).index(facts.health) + 1 if facts.health else 0
    told = {event: float(logs.events_told[event]) for event in EVENTS}
    levels = {level: float(count) for level, count in logs.lines_told.items()}
    return [
        info("keepstep_build_info", "Which Keepstep this is.", version=__version__),
        info("keepstep_agent_info", "Whose agent this is.", node=str(facts.config.node)),
        gauge(
            "keepstep_agent_connected",
            "1 while there is a stream to an orchestrator. Ranks train on without one.",
            float(facts.connected),
        ),
        gauge("keepstep_agent_term", "The newest term that was seen.", float(facts.term)),
        gauge("keepstep_agent_slots", "Devices of this node.", float(facts.config.slots)),
        gauge("keepstep_agent_slots_used", "Devices with a worker or standby.", float(len(used))),
        gauges(
            "keepstep_agent_workers",
            "Living workers and standbys, by what they do.",
            "state",
            _by_state(facts.workers),
        ),
        gauge(
            "keepstep_agent_step_seconds",
            "Median time of a step, of the slowest rank here; 0 without one.",
            max(steps, default=0.0),
        ),
        gauge(
            "keepstep_agent_busy_ranks",
            "Ranks that declared themselves busy.",
            float(sum(1 for reading in readings if reading.busy)),
        ),
        gauge(
            "keepstep_agent_health_severity",
            "What the health program says: 0 well, 1 avoid, 2 leave, 3 imminent.",
            float(worst),
        ),
        counters("keepstep_log_events_total", "Lines that tell of trouble.", "event", told),
        counters("keepstep_log_lines_total", "Lines of the log, by level.", "level", levels),
    ]


def _readings(workers: Iterable[Worker]) -> Iterable[Progress]:
    for worker in workers:
        if worker.page is not None and worker.is_alive:
            # A page that is no page: whoever wrote it is not counted.
            with contextlib.suppress(ValueError):
                yield worker.page.read()


def _by_state(workers: Iterable[Worker]) -> dict[str, float]:
    found = Counter(dict.fromkeys(WORKERS, 0))
    for worker in workers:
        if not worker.is_alive:
            continue
        if worker.is_standby:
            found["standby ready" if worker.record.ready else "standby warming"] += 1
            continue
        reading = next(iter(_readings([worker])), None)
        mark = Mark.STARTING if reading is None else reading.mark
        names = {Mark.RECOVERING: "recovering", Mark.STARTING: "starting"}
        found[names.get(mark, "finished" if mark is Mark.FINISHED else "training")] += 1
    return {state: float(count) for state, count in found.items()}


# ---------------------------------------------------------------- the server


def host_and_port(listen: str) -> tuple[str, int]:
    """`HOST:PORT`, or a port alone for this machine only."""
    host, _, port = listen.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"metrics_listen is {listen!r}; give HOST:PORT, or a port alone")
    return host.strip("[]") or "127.0.0.1", int(port)


async def serve(listen: str, facts: Callable[[], Facts]) -> None:
    """Answer until cancelled. A port that is taken is the user's mistake."""
    host, port = host_and_port(listen)
    clients = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal clients
        clients += 1
        try:
            if clients <= CLIENTS_MAX:
                async with asyncio.timeout(REQUEST_SECONDS_MAX):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(reply(head, facts))
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # It left, or did not speak HTTP: nobody to tell.
        finally:
            clients -= 1
            writer.close()

    try:
        server = await asyncio.start_server(answer, host, port, limit=HEAD_BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"cannot listen on {listen} for metrics: {error.strerror}") from error
    found = server.sockets[0].getsockname()[1]
    log.info("metrics.listening", host=host, port=found)
    async with server:
        await server.serve_forever()


def reply(head: bytes, facts: Callable[[], Facts]) -> bytes:
    """The whole answer to one request."""
    words = head.split(b"\r\n", 1)[0].split(b" ")
    if words[:1] != [b"GET"] or len(words) != 3:
        return _response("405 Method Not Allowed", "GET /metrics\n")
    if words[1].partition(b"?")[0] != b"/metrics":
        return _response("404 Not Found", "GET /metrics\n")
    told = [*families(facts()), *exposition.of_process()]
    return _response("200 OK", exposition.text(told), exposition.CONTENT_TYPE)


def _response(status: str, body: str, kind: str = "text/plain; charset=utf-8") -> bytes:
    data = body.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + data
