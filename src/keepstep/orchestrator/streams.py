"""The orchestrator's end of one agent's stream: frames out of a bounded outbox, messages in.

An agent that does not keep up is dropped rather than waited for: it reconnects, says what lives on
its node, and is told again what it needs. Nothing here decides anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from keepstep import wire
from keepstep.errors import WireError
from keepstep.model import NodeId

WRITE_SECONDS_MAX = 10.0
"""An agent that takes nothing for this long is gone, whatever TCP still believes."""


class AgentStream:
    """One connection of one agent, from its Hello to its end."""

    def __init__(
        self,
        node: NodeId,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        outbox_messages_max: int,
    ) -> None:
        self.node = node
        self.dropped = ""
        """Why we closed it ourselves; empty if the other side did."""
        self._reader = reader
        self._writer = writer
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue(outbox_messages_max)
        self._sender = asyncio.create_task(self._send_all())

    def send(self, frame: bytes) -> None:
        """Queue one frame; never waits. A full outbox ends the stream."""
        if self.dropped:
            return
        try:
            self._outbox.put_nowait(frame)
        except asyncio.QueueFull:
            self.drop(f"{self._outbox.maxsize} messages behind")

    def drop(self, why: str) -> None:
        self.dropped = self.dropped or why
        self._sender.cancel()
        self._writer.transport.abort()

    async def messages(self) -> AsyncIterator[wire.Message]:
        """What the agent says, until the stream ends. A message that does not fit ends it too:
        the two sides no longer mean the same thing."""
        try:
            while True:
                yield await wire.read(self._reader)
        except (asyncio.IncompleteReadError, OSError):
            return
        except WireError as error:
            self.drop(str(error))
        finally:
            self._sender.cancel()

    async def _send_all(self) -> None:
        try:
            while True:
                self._writer.write(await self._outbox.get())
                async with asyncio.timeout(WRITE_SECONDS_MAX):
                    await self._writer.drain()
        except TimeoutError:
            self.drop(f"took nothing for {WRITE_SECONDS_MAX:.0f} s")
        except OSError as error:
            self.drop(str(error))


async def refuse(writer: asyncio.StreamWriter, why: str) -> None:
    writer.write(wire.encode(wire.Refused(why)))
    async with asyncio.timeout(1.0):
        await writer.drain()
