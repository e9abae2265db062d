"""The orchestrator's end of one agent's stream: bounded bytes out, messages in.

An agent that does not keep up is dropped rather than waited for: it reconnects, says what lives on
its node, and is told again what it needs. One that says too much is read more slowly. Nothing here
decides anything.

Thousands of agents send a heartbeat each second or so, and little else. So a stream has no task of
its own for either direction: frames are read as their bytes arrive, a heartbeat is handed over at
once, and only the rest waits for whoever asks for messages().
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from time import monotonic
from typing import Any

from keepstep import tls, wire
from keepstep.errors import WireError
from keepstep.model import NodeId

WRITE_SECONDS_MAX = 10.0
"""An agent that does not take all we have for it in this time is gone, whatever TCP believes."""
MESSAGES_MAX = 64
"""Messages that may wait to be heard; beyond it the agent's stream is not read for a while."""
MESSAGES_PER_SECOND_MAX = 400.0
MESSAGE_BYTES = 16 * 1024
"""A longer message counts as several."""
HELLO_MESSAGES = 50
"""And so does a hello, because it is written down and answered."""
AHEAD_SECONDS_MAX = 5.0
"""So much of its rate an agent may say at once: after its hello it tells of the ends of all ranks
of all jobs that it still has in its room, of which there may be a thousand."""
ALLOWANCES_MIN = 1000
"""So many, or twice as many as were needed the last time, before those that have rested go."""
REST_SECONDS_MAX = 1.0
"""Before we read on. A node that rested for longer would be taken for silent."""

NEWS = (
    wire.Observed,
    wire.Stalled,
    wire.PhaseReport,
    wire.StandbyReport,
    wire.Publish,
    wire.Health,
)
"""What an agent tells the brain, beside its Hello."""


class Line(asyncio.StreamReaderProtocol):
    """A connection that begins as a stream to be read and may go on as one that is listened to."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        connected: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None] | None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(reader, connected, loop=loop)
        self._listener: AgentStream | None = None
        self._other_side_ended = False
        self._made: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._made = transport
        super().connection_made(transport)

    def hang_up(self) -> None:
        """End the connection, whoever serves it, or if nobody has begun to."""
        if isinstance(self._made, asyncio.WriteTransport):
            self._made.abort()

    async def listen(self, listener: AgentStream, reader: asyncio.StreamReader) -> None:
        """From now on each piece goes to `listener`, and first what the reader has not given out.

        Nobody may read from the reader any more.
        """
        self._listener = listener
        # Its way to hand over all it has: nothing more will be fed to it.
        reader.feed_eof()
        if early := await reader.read():
            listener.feed(early)
        if self._other_side_ended or listener.transport.is_closing():
            listener.end()
        else:
            listener.read_on()

    def data_received(self, data: bytes) -> None:
        if self._listener is None:
            super().data_received(data)
        else:
            self._listener.feed(data)

    def eof_received(self) -> bool:
        self._other_side_ended = True
        if self._listener is None:
            return bool(super().eof_received())
        self._listener.end()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._listener is not None:
            self._listener.end()
        super().connection_lost(exc)


class Allowance:
    """How much a node may say. A node that is broken, or broken into, must not take the time of all
    others: what it says beyond this is read later, and what it would say after that is not read
    before."""

    def __init__(self) -> None:
        self._until = 0.0
        """When all that was said would have been said, at the highest rate."""
        self.exceeded = 0
        """How often there was a rest."""

    def take(self, messages: float, now: float) -> float:
        """So much was said. Returns the seconds before more may be."""
        earliest = max(self._until, now - AHEAD_SECONDS_MAX)
        later = earliest + messages / MESSAGES_PER_SECOND_MAX
        self._until = min(later, now + REST_SECONDS_MAX)
        self.exceeded += self._until > now
        return max(0.0, self._until - now)

    def rested(self, since: float) -> bool:
        """Whether it has nothing left to make up for: then a new one allows as much."""
        return self._until <= since


class AgentStream:
    """One connection of one agent, from its Hello to its end."""

    def __init__(
        self,
        node: NodeId,
        writer: asyncio.StreamWriter,
        on_beat: Callable[[AgentStream, wire.Heartbeat], None],
        outbox_bytes_max: int,
        version: int = wire.VERSION,
    ) -> None:
        self.node = node
        assert isinstance(writer.transport, asyncio.Transport), "a connection goes both ways"
        self.transport = writer.transport
        self.version = version
        """Of the wire, as both sides speak it."""
        self.about: dict[str, Any] = {"wire": version}
        """What is installed on the node, for people, and how often it said too much."""
        if shown := writer.get_extra_info("peercert"):
            # As it was shown: what is renewed meanwhile comes with the next connection.
            self.about["certificate_until"] = ssl.cert_time_to_seconds(shown["notAfter"])
        self._context = writer.get_extra_info("sslcontext")
        self._connection = writer.get_extra_info("ssl_object")
        self.dropped = ""
        """Why we closed it ourselves; empty if the other side did."""
        self._on_beat = on_beat
        self._outbox_bytes_max = outbox_bytes_max
        self._taken_at = monotonic()
        """When the agent had last taken everything."""
        self.allowance = Allowance()
        self._resting: asyncio.TimerHandle | None = None
        self._decoder = wire.Decoder()
        self._messages: deque[wire.Message] = deque()
        self._ended = False
        self._news = asyncio.Event()

    def send(self, frame: bytes) -> None:
        """Send one frame; never waits. An agent that is too far behind loses the stream."""
        if self.dropped or self._ended:
            return
        if self._connection is not None and tls.forgotten(self._context, self._connection):
            # It may come back at once, with a certificate that holds today. We send something to
            # everybody all the time, so none of them stays.
            self.drop("an authority is trusted no more: show a certificate again")
            return
        waiting = self.transport.get_write_buffer_size()
        now = monotonic()
        if not waiting:
            self._taken_at = now
        elif now - self._taken_at > WRITE_SECONDS_MAX:
            self.drop(f"took not all of it for {WRITE_SECONDS_MAX:.0f} s")
            return
        elif waiting > self._outbox_bytes_max:
            self.drop(f"{waiting} bytes behind")
            return
        self.transport.write(frame)

    def say(self, message: wire.Message) -> None:
        """Send one message, if there is a word for it in what this agent speaks."""
        with contextlib.suppress(WireError):
            self.send(wire.encode(message, self.version))

    def drop(self, why: str) -> None:
        self.dropped = self.dropped or why
        self._messages.clear()
        self.end()
        self.transport.abort()

    # ------------------------------------------------------------ what the connection calls

    def feed(self, data: bytes) -> None:
        """Bytes have arrived. A message that does not fit ends the stream: the two sides no longer
        mean the same thing."""
        if self.dropped:
            return
        count = len(data) / MESSAGE_BYTES
        try:
            for message in self._decoder.feed(data):
                count += 1
                if isinstance(message, wire.Heartbeat):
                    self._on_beat(self, message)
                    if self.transport.is_closing():
                        return
                else:
                    self._messages.append(message)
        except WireError as error:
            self.drop(str(error))
            return
        if self._messages:
            self._news.set()
            if len(self._messages) > MESSAGES_MAX:
                self.transport.pause_reading()
        self._rest(count)

    def _rest(self, count: float) -> None:
        """After so many messages: read no more for a while, if they were too many."""
        seconds = self.allowance.take(count, monotonic())
        if seconds and self._resting is None and not self._ended:
            self.about["slowed"] = self.allowance.exceeded
            self.transport.pause_reading()
            self._resting = asyncio.get_running_loop().call_later(seconds, self._rested)

    def _rested(self) -> None:
        self._resting = None
        self.read_on()

    def read_on(self) -> None:
        """Listen again, unless it says too much or too many of its messages wait."""
        waits = self._resting is not None or len(self._messages) > MESSAGES_MAX
        if not (self._ended or waits or self.transport.is_closing()):
            self.transport.resume_reading()

    def end(self) -> None:
        """The other side has ended, or we have."""
        self._ended = True
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
        self._news.set()

    # ------------------------------------------------------------ what the loop asks for

    async def messages(self) -> AsyncIterator[wire.Message]:
        """What the agent says besides its heartbeats, until the stream ends."""
        while True:
            while self._messages:
                yield self._messages.popleft()
                if len(self._messages) == MESSAGES_MAX // 2:
                    self.read_on()
            if self._ended:
                return
            self._news.clear()
            await self._news.wait()


class Allowances:
    """Those of all nodes. They outlive connections: a new one is no way to say more."""

    def __init__(self) -> None:
        self._known: dict[NodeId, Allowance] = {}
        self._many = ALLOWANCES_MIN

    def greet(self, stream: AgentStream) -> bool:
        """A node has said hello on this stream. False: as it does all the time; close it."""
        if len(self._known) > self._many:
            # Nodes of names that are used once come and go. Who has rested is as good as new.
            since = monotonic() - AHEAD_SECONDS_MAX
            self._known = {n: a for n, a in self._known.items() if not a.rested(since)}
            self._many = 2 * len(self._known) + ALLOWANCES_MIN
        stream.allowance = self._known.setdefault(stream.node, stream.allowance)
        return stream.allowance.take(HELLO_MESSAGES, monotonic()) < REST_SECONDS_MAX


async def listen(
    stream: AgentStream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """From now on what arrives goes to the stream; so does what had arrived before."""
    line = writer.transport.get_protocol()
    assert isinstance(line, Line), "the server makes no other connections"
    await line.listen(stream, reader)


def addressed(
    order: wire.Order, streams: Mapping[NodeId, AgentStream]
) -> Iterator[tuple[AgentStream, bytes]]:
    """An order for each of its nodes that has a stream, as that one reads it.

    A node that has none is told when it says Hello. One whose version has no word for the order is
    not told at all: the phase's budget finds it.
    """
    there = [streams[node] for node in order.nodes if node in streams]
    for version in {stream.version for stream in there}:
        nodes = tuple(stream.node for stream in there if stream.version == version)
        try:
            for node, frame in wire.frames(replace(order, nodes=nodes), version):
                yield streams[node], frame
        except WireError:
            if version == wire.VERSION:
                raise


async def refuse(writer: asyncio.StreamWriter, why: str) -> None:
    # Whoever it is, it reads the oldest version, or nothing.
    writer.write(wire.encode(wire.Refused(why), wire.OLDEST))
    async with asyncio.timeout(1.0):
        await writer.drain()
