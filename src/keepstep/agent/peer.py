"""The peer port: private state for a joiner or a writer, out of this node's room.

It serves from shared memory, so it does not need the worker whose state it is. Whoever asks must
know one of the job's secrets, and a secret is known only to the members of its generation.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
from collections.abc import Callable, Iterable

from keepstep import wire
from keepstep.agent import log
from keepstep.agent.room import Room
from keepstep.errors import WireError
from keepstep.page import find_entry
from keepstep.sealed import NotSealed, Seal, secret_id

IDLE_SECONDS_MAX = 30.0
QUESTION_BYTES_MAX = 16 * 1024
CONNECTIONS_MAX = 1024
"""Ranks that ask at a time: all of a large job may have lost their neighbours at once."""
PAYLOAD_BYTES_MAX = wire.FRAME_BYTES_MAX // 4 * 3 - 4096
"""Base64 grows by a third, and the frame has a bound."""


class Peer:
    """A server on the node's own address."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._server: asyncio.Server | None = None
        self._open = 0
        self.port = 0

    async def start(self) -> None:
        """Listen, on the port of the agent's earlier life if it is free."""
        try:
            self._server = await asyncio.start_server(
                self._serve, self._room.address, self._room.peer_port
            )
        except OSError as error:
            if self._room.peer_port == 0:
                raise
            log.warning("peer.port_taken", port=self._room.peer_port, why=error)
            self._server = await asyncio.start_server(self._serve, self._room.address, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self._room.peer_port = self.port
        # Term and entry in it are those that were read from it: without it no order is obeyed that
        # was refused before.
        self._room.save_if_possible()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        sealed = _Sealed(self._room, self._answer)
        try:
            while self._open <= CONNECTIONS_MAX:
                # Who asks has proved nothing yet: a question is short.
                async with asyncio.timeout(IDLE_SECONDS_MAX):
                    message = await wire.read(reader, QUESTION_BYTES_MAX)
                if isinstance(message, wire.Greet | wire.Word):
                    writer.write(wire.encode(sealed.answer(message)))
                else:
                    # Nobody says here what they speak, and this has not changed since the oldest.
                    writer.write(wire.encode(self._answer(message), wire.OLDEST))
                async with asyncio.timeout(IDLE_SECONDS_MAX):
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            pass
        except (WireError, NotSealed) as error:
            log.warning("peer.refused", why=error)
        finally:
            self._open -= 1
            writer.close()

    def _answer(self, message: wire.Message) -> wire.Entry | wire.Refused:
        if not isinstance(message, wire.FetchEntry):
            return wire.Refused(f"the peer port does not serve {type(message).__name__}")
        job = self._room.jobs.get(message.job)
        if job is None or not _knows(message.secret, job.secrets):
            log.warning("peer.refused", job=message.job, rank=message.rank, why="unknown secret")
            return wire.Entry(found=False, why="this node does not know that secret")
        payload = find_entry(self._room.job_room(message.job), message.rank, message.boundary)
        if payload is None:
            why = f"no entry of rank {message.rank} for boundary {message.boundary}"
            return wire.Entry(found=False, why=why)
        # A sealed answer is Base64 in Base64.
        if len(payload) > PAYLOAD_BYTES_MAX // 4 * 3 - 4096:
            return wire.Entry(found=False, why=f"{len(payload)} bytes do not fit one frame")
        return wire.Entry(found=True, payload=base64.b64encode(payload).decode())


class _Sealed:
    """One peer's sealed conversation: a handshake, then questions inside."""

    def __init__(self, room: Room, answer: Callable[[wire.Message], wire.Message]) -> None:
        self._room, self._answer = room, answer
        self._seal: Seal | None = None

    def answer(self, message: wire.Greet | wire.Word) -> wire.Message:
        try:
            word = base64.b64decode(message.word, validate=True)
        except ValueError:
            raise WireError("a word that is no base64") from None
        if isinstance(message, wire.Greet):
            self._seal = self._new(message)
        if self._seal is None:
            raise WireError("a word before any greeting")
        if not self._seal.ready:
            said = self._seal.shake(word)
        else:
            inner = self._answer(wire.decode(self._seal.opened(word)))
            said = self._seal.seal(wire.encode(inner)[4:])
        return wire.Word(base64.b64encode(said).decode())

    def _new(self, greet: wire.Greet) -> Seal:
        job = self._room.jobs.get(greet.job)
        known = [one for one in job.secrets if one] if job is not None else []
        found = [one for one in known if secret_id(one) == greet.secret_id]
        if not found:
            raise WireError("this node does not know that secret")
        log.info("peer.sealed", job=greet.job)
        return Seal(found[0], "entry", opens=False)


def _knows(secret: str, known: Iterable[str]) -> bool:
    # Every comparison is made, so that time tells nothing.
    found = [hmac.compare_digest(secret.encode(), one.encode()) for one in known if one]
    return any(found)
