"""The Unix socket to which local workers and standbys connect.

A worker is known by what the kernel says about the other end (SO_PEERCRED), not by what it claims.
Training never waits for the agent: a worker that finds no agent trains on and tries again, and a
connection that does not drain is cut rather than waited for.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from keepstep import wire
from keepstep.agent import log
from keepstep.errors import WireError
from keepstep.model import OrderId

BUFFER_BYTES_MAX = 16 * 1024 * 1024
_CREDENTIALS = struct.Struct("3i")


@dataclass(slots=True, eq=False)
class Link:
    """One connection of one local process."""

    pid: int
    writer: asyncio.StreamWriter
    hello: wire.WorkerHello | None = None
    version: int = wire.VERSION
    """Of the wire, as the process speaks it: it may be older than this agent."""
    sent: set[OrderId] = field(default_factory=set)
    """Orders that went down this connection: none goes twice."""

    def send(self, message: wire.Message) -> None:
        if self.writer.is_closing():
            return
        if isinstance(message, wire.Order):
            if message.order_id in self.sent:
                return
            self.sent.add(message.order_id)
        try:
            self.writer.write(wire.encode(message, self.version))
        except WireError as error:
            log.warning("link.untold", pid=self.pid, kind=type(message).__name__, why=error)
        if self.writer.transport.get_write_buffer_size() > BUFFER_BYTES_MAX:
            # A stopped worker. It gets everything again when it comes back.
            self.writer.transport.abort()


class Links:
    """All local connections, newest per process."""

    def __init__(self, path: Path, on_message: Callable[[Link, wire.Message], None]) -> None:
        self._path = path
        self._on_message = on_message
        self._by_pid: dict[int, Link] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        # Bound beside and renamed: a worker never finds a socket on which nobody listens.
        fresh = self._path.with_name(self._path.name + ".new")
        fresh.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, str(fresh))
        fresh.replace(self._path)

    def find(self, pid: int) -> Link | None:
        """The process's connection, if it has said who it is."""
        return self._by_pid.get(pid)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(_peer_pid(writer), writer)
        try:
            while True:
                message = await wire.read(reader)
                if isinstance(message, wire.WorkerHello):
                    link.hello, link.version = message, wire.agreed(message.speaks)
                    self._by_pid[link.pid] = link
                self._on_message(link, message)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except WireError as error:
            log.warning("link.refused", pid=link.pid, why=error)
        finally:
            if self._by_pid.get(link.pid) is link:
                del self._by_pid[link.pid]
            writer.close()


def _peer_pid(writer: asyncio.StreamWriter) -> int:
    peer = writer.get_extra_info("socket")
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    if uid not in (0, os.getuid()):
        raise ConnectionError(f"user {uid} may not talk to this agent")
    return int(pid)
