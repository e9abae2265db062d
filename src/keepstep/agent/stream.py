"""The agent's one stream to the orchestrator, and the way back when it breaks.

    POST /v1/agent, Upgrade: keepstep-stream  ->  101  ->  frames both ways

Training does not need it: while there is no stream, workers train on and deaths are kept. A silent
orchestrator (no message for four seconds) is left, and the others tried, for ever; one that follows
says who leads (endpoints.py). Nothing is queued here: at each connect the agent tells again all
that stands, so a message lost in a broken stream is no loss.
"""

from __future__ import annotations

import asyncio
import math
import random
import socket
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from keepstep import tls, wire
from keepstep.agent import log
from keepstep.agent.endpoints import Endpoints, leader_of
from keepstep.agent.reports import joined
from keepstep.errors import ConfigError, Permanent, Unreachable, WireError
from keepstep.model import Endpoint

SILENT_SECONDS_MAX = 4.0
"""Three pulses may get lost."""
REFUSED_SECONDS_MAX = 6.0
"""Longer than a machine that lost power is taken for one that is there. Where a name may become
free, the orchestrator does not refuse: it closes the stream without a word, and we try on."""
BUFFER_BYTES_MAX = 32 * 1024 * 1024
_HEAD_BYTES_MAX = 16384


def parse_endpoints(text: str) -> tuple[Endpoint, ...]:
    """`http://host:port` or `https://host:port`, several of one kind separated by commas."""
    found, schemes = [], set()
    for part in text.split(","):
        url = urlsplit(part.strip())
        if url.scheme not in ("http", "https") or not url.hostname or not url.port:
            raise ConfigError(f"{part.strip()!r} is no orchestrator; write https://HOST:PORT")
        schemes.add(url.scheme)
        found.append(Endpoint(url.hostname, url.port))
    if len(schemes) > 1:
        # Else an agent would give its token to whoever cut it off from the ones with TLS.
        raise ConfigError("http:// beside https://; give all orchestrators with https://")
    return tuple(found)


def is_secure(text: str) -> bool:
    """Whether what `parse_endpoints` accepts is to be talked to with TLS."""
    return text.strip().startswith("https:")


def secured(directory: Path) -> ssl.SSLContext:
    """TLS with this node's certificate; renewed files serve from the next connect on."""
    return tls.client(directory, lambda why: log.warning("certificate.unusable", why=why))


class Stream:
    """One connection at a time, to whichever endpoint answers."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        token: str,
        greeting: Callable[[], list[wire.Message]],
        on_message: Callable[[wire.Message], None],
        secure: ssl.SSLContext | None = None,
        urgent: Callable[[], bool] = lambda: False,
    ) -> None:
        self._endpoints = Endpoints(endpoints)
        self._urgent = urgent
        """Whether others wait for what this node has to tell."""
        self._token = token
        self._greeting = greeting
        self._on_message = on_message
        self._secure = secure
        self._writer: asyncio.StreamWriter | None = None
        self._version = wire.VERSION
        self._refused_since = -1.0
        self._begun_at = math.inf
        """When the present stream began; never, while there is none."""

    @property
    def connected(self) -> bool:
        return self._writer is not None

    def send(self, message: wire.Message) -> bool:
        """Send now or not at all; what matters is told again at the next connect."""
        writer = self._writer
        if writer is None or writer.is_closing():
            return False
        self._write(writer, message)
        if writer.transport.get_write_buffer_size() > BUFFER_BYTES_MAX:
            log.warning("stream.clogged")
            writer.transport.abort()
        return True

    def _write(self, writer: asyncio.StreamWriter, message: wire.Message) -> None:
        if isinstance(message, wire.PhaseReport) and self._version == wire.VERSION:
            # One of an older version knows ranks one by one only.
            message = joined(message)
        try:
            writer.write(wire.encode(message, self._version))
        except WireError as error:
            # An older orchestrator has no word for it, and would have nothing to do about it.
            log.warning("stream.untold", kind=type(message).__name__, why=error)

    def refused(self, why: str, *, hopeless: bool) -> None:
        """This orchestrator will not talk to us. `hopeless`: nothing here depends on its doing so;
        then, after a while, the user is told instead."""
        now = asyncio.get_running_loop().time()
        if self._refused_since < 0:
            self._refused_since = now
        if hopeless and now > self._refused_since + REFUSED_SECONDS_MAX:
            raise ConfigError(why)
        self.drop()

    def accepted(self) -> None:
        """It has talked to us: whatever it says later, we are not there by mistake."""
        self._refused_since = math.inf

    def drop(self) -> None:
        """Leave this orchestrator and look for another."""
        if self._writer is not None:
            self._writer.transport.abort()

    async def run(self) -> None:
        """Connect, talk, and connect again, for ever."""
        clock, known = asyncio.get_running_loop().time, self._endpoints
        while True:
            endpoint, self._begun_at = known.next(), math.inf
            try:
                await self._talk(endpoint)
            except Elsewhere as error:
                if known.named(error.leader, clock()):
                    log.info("stream.sent_on", port=endpoint.port, leader=error.leader)
                    continue
            except (OSError, asyncio.IncompleteReadError, TimeoutError, Unreachable) as error:
                why = str(error) or type(error).__name__
                log.warning("stream.lost", host=endpoint.host, port=endpoint.port, why=why)
                # A stream that held for a while was a good one: begin the count anew.
                held = clock() - self._begun_at > SILENT_SECONDS_MAX
                known.failed(endpoint, clock(), held=held)
            except Permanent as error:
                log.error("stream.refused", host=endpoint.host, port=endpoint.port, why=error)
                known.failed(endpoint, clock(), held=False)
            await asyncio.sleep(known.pause(random.random(), urgent=self._urgent()))

    async def _talk(self, endpoint: Endpoint) -> None:
        async with asyncio.timeout(SILENT_SECONDS_MAX):
            reader, writer = await asyncio.open_connection(
                endpoint.host, endpoint.port, ssl=self._secure
            )
        try:
            _notice_silence(writer)
            async with asyncio.timeout(SILENT_SECONDS_MAX):
                await self._upgrade(endpoint, reader, writer)
            for message in self._greeting():
                self._write(writer, message)
            self._writer, self._begun_at = writer, asyncio.get_running_loop().time()
            log.info("stream.connected", host=endpoint.host, port=endpoint.port)
            while True:
                async with asyncio.timeout(SILENT_SECONDS_MAX):
                    message = await wire.read(reader)
                self._on_message(message)
        finally:
            self._writer = None
            writer.transport.abort()

    async def _upgrade(
        self, endpoint: Endpoint, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        # With TLS the certificate says who we are: a node has no use for a token there.
        authorization = f"Authorization: Bearer {self._token}\r\n" if self._token else ""
        writer.write(
            (
                "POST /v1/agent HTTP/1.1\r\n"
                f"Host: {endpoint.host}:{endpoint.port}\r\n"
                f"{authorization}"
                "Connection: Upgrade\r\n"
                "Upgrade: keepstep-stream\r\n"
                "Content-Length: 0\r\n\r\n"
            ).encode()
        )
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise WireError(f"an answer with more than {_HEAD_BYTES_MAX} bytes of head") from None
        status = head.decode(errors="replace").partition("\r\n")[0].split(" ", 2)
        if len(status) >= 2 and status[1] in ("307", "503"):
            raise Elsewhere(leader_of(header(head, "Location")))
        if len(status) < 2 or status[1] != "101":
            raise Unreachable(f"the orchestrator answered {' '.join(status[1:])!r}")
        self._version = wire.offered(header(head, wire.OFFER))


def header(head: bytes, name: str) -> str:
    """What an answer says under this name; empty: nothing."""
    for line in head.decode(errors="replace").split("\r\n")[1:]:
        key, _, value = line.partition(":")
        if key.strip().lower() == name.lower():
            return value.strip()
    return ""


class Elsewhere(Unreachable):
    """An orchestrator that does not lead; it says who does, if it knows."""

    def __init__(self, leader: Endpoint | None) -> None:
        super().__init__("the orchestrator follows another")
        self.leader = leader


def _notice_silence(writer: asyncio.StreamWriter) -> None:
    peer = writer.get_extra_info("socket")
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT_SECONDS_MAX * 1000))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
