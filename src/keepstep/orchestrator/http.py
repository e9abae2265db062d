"""A small HTTP/1.1 server on asyncio streams: one request per connection, everything bounded.

It answers JSON, streams server-sent events, and hands a connection over to the agents' framed
stream (an upgrade). It is no web framework: no routing, no cookies, no chunked requests. Parsing
is pure, so that the hostile cases are unit tests.

It must never let a slow or hostile client hold memory or a task without end: the head, the body
and the time to send them are bounded, and so is the number of open connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import ssl
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from keepstep import codec, tls
from keepstep.errors import KeepstepError
from keepstep.orchestrator.streams import Line

HEAD_BYTES_MAX = 16 * 1024
BODY_BYTES_MAX = 1024 * 1024
REQUEST_SECONDS_MAX = 10.0
"""From the first byte awaited to the last byte of the body."""
WRITE_SECONDS_MAX = 10.0
"""A reader that takes nothing for this long is gone."""
ACCEPTED_AT_ONCE = 50
"""Connections that are let in before everybody else is served again: asyncio's `backlog`."""
WAITING_MAX = 4096
"""Connections that the kernel keeps for us (at most net.core.somaxconn)."""
ACCEPTED_STEPS = 4
"""Turns of the loop from the kernel's list of connections to a task."""
LINGER_SECONDS_MAX = 0.5
"""How long a refused client may take to read why."""
PIECE_BYTES = 64 * 1024
"""Of a long answer, what is given to the connection at once: a slow reader of it costs no more."""


class BadRequest(KeepstepError):
    """What the client sent cannot be served; carries the status and the fix."""

    def __init__(self, status: int, message: str, fix: str, *, passes: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.fix = fix
        self.passes = passes
        """The very same may be sent again: soon it is served."""

    @property
    def response(self) -> Response:
        told = error_response(self.status, str(self), self.fix)
        return dataclasses.replace(told, headers={"Retry-After": "1"}) if self.passes else told


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes = b""
    certificate: Mapping[str, Any] = field(default_factory=dict)
    """Of the client, verified; empty without TLS, or if it showed none."""

    def json(self) -> Any:
        """The body as an object; an empty one reads as {}."""
        if not self.body:
            return {}
        try:
            return codec.loads(self.body)
        except KeepstepError as error:
            raise BadRequest(400, str(error), "send the body as JSON") from error


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    body: bytes
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Streamed:
    """A response without a known end: server-sent events, or a long export."""

    parts: AsyncIterator[bytes]
    content_type: str


@dataclass(frozen=True, slots=True)
class Upgraded:
    """The connection stops being HTTP and belongs to `serve` until that returns."""

    protocol: str
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
    headers: dict[str, str] = field(default_factory=dict)


Reply = Response | Streamed | Upgraded
Handler = Callable[[Request], Awaitable[Reply]]


def json_response(plain: object, status: int = 200) -> Response:
    return Response(status, codec.dumps(plain) + b"\n")


def error_response(status: int, message: str, fix: str) -> Response:
    return json_response({"error": message, "fix": fix}, status)


def parse_head(head: bytes) -> Request:
    """The request line and the headers, without the blank line at the end."""
    try:
        lines = head.decode("latin-1").split("\r\n")
        method, target, version = lines[0].split(" ")
    except ValueError:
        raise BadRequest(400, "the request line is malformed", "speak HTTP/1.1") from None
    if version not in ("HTTP/1.1", "HTTP/1.0"):
        raise BadRequest(505, f"{version[:20]!r} is not spoken here", "speak HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise BadRequest(400, "a header line is malformed", "speak HTTP/1.1")
        name = name.lower()
        if name in headers and name in ("content-length", "host", "authorization"):
            raise BadRequest(400, f"{name} is there twice", "send it once")
        headers[name] = value.strip()
    try:
        parts = urlsplit(target)
        return Request(method, unquote(parts.path), dict(parse_qsl(parts.query)), headers)
    except ValueError:
        # urlsplit takes //[ for the beginning of an address.
        raise BadRequest(400, "the request's target is malformed", "ask for a path") from None


def body_bytes(request: Request) -> int:
    """How long the body is by its own word, within the bounds."""
    if "transfer-encoding" in request.headers:
        raise BadRequest(411, "a chunked body is not accepted", "send Content-Length")
    said = request.headers.get("content-length", "0")
    if not (said.isascii() and said.isdigit()):
        raise BadRequest(400, "Content-Length is no number", "send the body's length in bytes")
    # By its length first: a number of 4,301 digits is more than int() reads.
    if len(said) > 18 or int(said) > BODY_BYTES_MAX:
        raise BadRequest(413, f"a body of {said[:18]} bytes", f"send at most {BODY_BYTES_MAX}")
    return int(said)


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """The one request of a connection; None when the client closed it without a word."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return None
        raise BadRequest(400, "the request ends in its head", "send it whole") from error
    except asyncio.LimitOverrunError as error:
        fix = f"send at most {HEAD_BYTES_MAX} bytes of headers"
        raise BadRequest(431, "the head of the request is too long", fix) from error
    request = parse_head(head[:-4])
    length = body_bytes(request)
    try:
        body = await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        raise BadRequest(400, "the request ends in its body", "send it whole") from error
    return Request(request.method, request.path, request.query, request.headers, body)


class HttpServer:
    """Listens until it is closed; each connection is a task of its own."""

    def __init__(self, handler: Handler, *, connections_max: int) -> None:
        self._handler = handler
        self._connections_max = connections_max
        self._tasks: set[asyncio.Task[None]] = set()
        self._lines: weakref.WeakSet[Line] = weakref.WeakSet()
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int, secure: ssl.SSLContext | None = None) -> int:
        """Start to listen, and return the port. Without a context in plain text."""
        # A client that leaves without a word, or never shakes hands, must not be waited for.
        bounds: dict[str, Any] = {}
        if secure is not None:
            bounds["ssl_handshake_timeout"] = tls.HANDSHAKE_SECONDS_MAX
            bounds["ssl_shutdown_timeout"] = LINGER_SECONDS_MAX
        # The reader's limit bounds the head; an agent's frames are read past it in pieces.
        loop = asyncio.get_running_loop()

        def line() -> Line:
            reader = asyncio.StreamReader(limit=HEAD_BYTES_MAX, loop=loop)
            made = Line(reader, self._connected, loop)
            self._lines.add(made)
            return made

        self._server = await loop.create_server(
            line, host, port, backlog=ACCEPTED_AT_ONCE, ssl=secure, **bounds
        )
        for listening in self._server.sockets:
            # After a change of leaders thousands come back at once: they wait in the kernel, not
            # here, where those who were let in want to be heard.
            with socket.socket(fileno=os.dup(listening.fileno())) as same:
                same.listen(WAITING_MAX)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            # Those that were accepted in this very moment first become connections of ours: one
            # that is half-way when the server closes is forgotten by asyncio, and stays open.
            for listening in self._server.sockets:
                asyncio.get_running_loop().remove_reader(listening.fileno())
            for _ in range(ACCEPTED_STEPS):
                await asyncio.sleep(0)
            self._server.close()
        await self.cut()
        for line in tuple(self._lines):
            line.hang_up()  # Its task was ended before it ran.
        await asyncio.sleep(0)

    async def cut(self) -> None:
        """End every connection; new ones are still taken."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, TimeoutError, asyncio.CancelledError, KeepstepError):
            # The client went away, took nothing, or we are closing: nobody is left to tell. Or a
            # stream could not be finished: it must not look as if it were whole.
            writer.transport.abort()
        finally:
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()
            self._tasks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) > self._connections_max:
            await _send(writer, error_response(503, "too many connections", "try again later"))
            await _linger(reader, writer)
            return
        refused = False
        try:
            async with asyncio.timeout(REQUEST_SECONDS_MAX):
                request = await read_request(reader)
            if request is None:
                return
            shown = writer.get_extra_info("peercert") or {}
            reply = await self._handler(dataclasses.replace(request, certificate=shown))
        except TimeoutError:
            refused, reply = True, error_response(408, "the request took too long", "send it whole")
        except BadRequest as error:
            refused, reply = True, error.response
        match reply:
            case Response():
                await _send(writer, reply)
                if refused:
                    await _linger(reader, writer)
            case Streamed():
                await _stream(reader, writer, reply)
            case Upgraded():
                said = {"Upgrade": reply.protocol, "Connection": "Upgrade", **reply.headers}
                writer.write(_head(101, said))
                await reply.serve(reader, writer)


def _head(status: int, headers: dict[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def _send(writer: asyncio.StreamWriter, response: Response) -> None:
    headers = {
        "Content-Type": response.content_type,
        "Content-Length": str(len(response.body)),
        "Connection": "close",
        **response.headers,
    }
    body = memoryview(response.body)
    await _put(writer, _head(response.status, headers) + body[:PIECE_BYTES])
    for at in range(PIECE_BYTES, len(body), PIECE_BYTES):
        await _put(writer, body[at : at + PIECE_BYTES])


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Take in what a refused client still sends, for a moment: closing over unread bytes would
    reset the connection, and the client would never read why."""
    if writer.can_write_eof():
        writer.write_eof()
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(LINGER_SECONDS_MAX):
            while await reader.read(HEAD_BYTES_MAX):
                pass


async def _stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reply: Streamed
) -> None:
    """Send parts until they end or the client leaves; its leaving is seen even while we wait."""
    headers = {"Content-Type": reply.content_type, "Connection": "close"}
    writer.write(_head(200, {**headers, "Cache-Control": "no-store"}))
    sending = asyncio.ensure_future(_send_parts(writer, reply.parts))
    leaving = asyncio.ensure_future(_left(reader))
    try:
        await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (sending, leaving):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError, TimeoutError):
                await task


async def _left(reader: asyncio.StreamReader) -> None:
    """Until the client leaves. It has nothing more to say, so one that says much is taken for gone:
    what nobody reads must not pile up here."""
    with contextlib.suppress(asyncio.IncompleteReadError):
        await reader.readexactly(HEAD_BYTES_MAX)


async def _send_parts(writer: asyncio.StreamWriter, parts: AsyncIterator[bytes]) -> None:
    async for part in parts:
        await _put(writer, part)


async def _put(writer: asyncio.StreamWriter, part: bytes | memoryview) -> None:
    writer.write(part)
    async with asyncio.timeout(WRITE_SECONDS_MAX):
        await writer.drain()
    # While the reader keeps up, drain() lets nobody else run.
    await asyncio.sleep(0)
