"""The hostile and the ordinary cases of request parsing, and a real socket for the rest."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from keepstep.orchestrator import http
from keepstep.orchestrator.http import (
    BadRequest,
    HttpServer,
    Reply,
    Request,
    Response,
    Streamed,
    Upgraded,
    body_bytes,
    json_response,
    parse_head,
)


def test_a_request_is_read_with_its_query_and_headers():
    request = parse_head(b"GET /v1/jobs/a%20b?after=3 HTTP/1.1\r\nHost: x\r\nX-Thing:  y ")
    assert (request.method, request.path, request.query) == ("GET", "/v1/jobs/a b", {"after": "3"})
    assert request.headers == {"host": "x", "x-thing": "y"}


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"", 400),
        (b"GET /", 400),
        (b"GET / HTTP/1.1 extra", 400),
        (b"GET / HTTP/2", 505),
        (b"GET //[ HTTP/1.1", 400),
        (b"GET / HTTP/1.1\r\nno colon", 400),
        (b"GET / HTTP/1.1\r\n: nameless", 400),
        (b"GET / HTTP/1.1\r\nHost : spaced", 400),
        (b"GET / HTTP/1.1\r\n folded: line", 400),
        (b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2", 400),
        (b"GET / HTTP/1.1\r\nAuthorization: a\r\nAuthorization: b", 400),
    ],
)
def test_a_malformed_head_is_refused(head: bytes, status: int):
    with pytest.raises(BadRequest) as refused:
        parse_head(head)
    assert refused.value.status == status
    assert refused.value.fix


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-length": "-1"}, 400),
        ({"content-length": "1e3"}, 400),
        ({"content-length": "١"}, 400),
        ({"content-length": str(http.BODY_BYTES_MAX + 1)}, 413),
        ({"content-length": "9" * 5000}, 413),
        ({"transfer-encoding": "chunked"}, 411),
        ({"transfer-encoding": "chunked", "content-length": "3"}, 411),
    ],
)
def test_a_body_of_unclear_or_too_great_length_is_refused(headers: dict[str, str], status: int):
    with pytest.raises(BadRequest) as refused:
        body_bytes(Request("POST", "/", {}, headers))
    assert refused.value.status == status


def test_a_body_that_is_no_json_is_the_clients_mistake():
    with pytest.raises(BadRequest, match="not JSON"):
        Request("POST", "/", {}, {}, b"{").json()
    assert Request("POST", "/", {}, {}).json() == {}


# --- on a real socket -----------------------------------------------------------------------------


async def echo(request: Request) -> Reply:
    return json_response({"path": request.path, "body": request.body.decode()})


def served(
    handler: http.Handler, client: Callable[[int], Awaitable[None]], connections_max: int = 10
) -> None:
    async def both() -> None:
        server = HttpServer(handler, connections_max=connections_max)
        port = await server.listen("127.0.0.1", 0)
        try:
            async with asyncio.timeout(10):
                await client(port)
        finally:
            await server.close()

    asyncio.run(both())


async def exchange(port: int, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        return await reader.read()
    finally:
        await closed_for_good(writer)


async def closed_for_good(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def test_one_request_is_answered_and_the_connection_closed():
    async def client(port: int) -> None:
        answer = await exchange(port, b"POST /x HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi")
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert answer.endswith(b'{"body":"hi","path":"/x"}\n')

    served(echo, client)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\nX: " + b"y" * (2 * http.HEAD_BYTES_MAX) + b"\r\n\r\n", b"431"),
        (b"POST / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", b"413"),
        (b"\x16\x03\x01 not http\r\n\r\n", b"505"),
    ],
)
def test_what_is_out_of_bounds_gets_an_answer_with_a_fix(sent: bytes, status: bytes):
    async def client(port: int) -> None:
        answer = await exchange(port, sent)
        assert answer.split(b" ")[1] == status
        assert b'"fix":' in answer

    served(echo, client)


def test_a_client_that_never_finishes_is_let_go(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "REQUEST_SECONDS_MAX", 0.05)

    async def client(port: int) -> None:
        assert (await exchange(port, b"GET / HTTP/1.1\r\n")).split(b" ")[1] == b"408"

    served(echo, client)


def test_too_many_connections_are_told_to_wait():
    async def client(port: int) -> None:
        _, idle = await asyncio.open_connection("127.0.0.1", port)
        answer = await exchange(port, b"GET / HTTP/1.1\r\n\r\n")
        await closed_for_good(idle)
        assert answer.split(b" ")[1] == b"503"

    served(echo, client, connections_max=1)


def endless(closed: asyncio.Event, seconds: float) -> Callable[[Request], Awaitable[Reply]]:
    """A stream of events, so many seconds apart; `closed` tells that nobody makes them any more."""

    async def parts():
        try:
            while True:
                yield b"data: 1\n\n"
                await asyncio.sleep(seconds)
        finally:
            closed.set()

    async def stream(_: Request) -> Reply:
        return Streamed(parts(), "text/event-stream")

    return stream


def test_a_stream_ends_with_its_parts_and_its_source_is_closed_when_the_client_leaves():
    closed = asyncio.Event()

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await reader.readuntil(b"data: 1\n\n")
        await closed_for_good(writer)
        await closed.wait()

    served(endless(closed, 0.01), client)


def test_a_client_that_talks_on_while_it_listens_is_let_go():
    closed = asyncio.Event()

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await reader.readuntil(b"data: 1\n\n")
        writer.write(b"y" * http.HEAD_BYTES_MAX)
        await closed.wait()
        with contextlib.suppress(OSError):
            assert await reader.read() == b""
        await closed_for_good(writer)

    served(endless(closed, 3600.0), client)


class Keen:
    """A connection whose reader takes everything at once."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(bytes(data))

    async def drain(self) -> None:
        return


async def turns_during(sending: Awaitable[None]) -> int:
    """How often somebody else had a turn meanwhile."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await sending
    task.cancel()
    return turns


def test_a_reader_that_keeps_up_does_not_keep_the_loop():
    async def parts():
        for _ in range(100):
            yield b"x"

    writer: Any = Keen()
    assert asyncio.run(turns_during(http._send_parts(writer, parts()))) >= 99
    assert writer.written == [b"x"] * 100


def test_a_long_answer_is_sent_piece_by_piece():
    body = bytes(range(256)) * 2048
    writer: Any = Keen()
    turns = asyncio.run(turns_during(http._send(writer, Response(200, body))))
    assert turns >= len(body) // http.PIECE_BYTES - 1
    assert max(map(len, writer.written)) < http.PIECE_BYTES + 1000
    head, _, sent = b"".join(writer.written).partition(b"\r\n\r\n")
    assert (f"Content-Length: {len(body)}".encode() in head, sent) == (True, body)


def test_an_upgrade_hands_the_connection_over():
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.readexactly(3)).upper())
        await writer.drain()

    async def upgrade(_: Request) -> Reply:
        return Upgraded("thing", serve)

    async def client(port: int) -> None:
        answer = await exchange(port, b"POST / HTTP/1.1\r\nUpgrade: thing\r\n\r\nabc")
        assert answer.startswith(b"HTTP/1.1 101 ")
        assert answer.endswith(b"\r\n\r\nABC")

    served(upgrade, client)


@pytest.mark.parametrize("turns", range(8))
def test_a_connection_that_comes_while_the_server_closes_is_ended_with_the_others(turns: int):
    async def scene() -> None:
        server = HttpServer(echo, connections_max=8)
        port = await server.listen("127.0.0.1", 0)
        with socket.create_connection(("127.0.0.1", port)) as client:
            for _ in range(turns):
                await asyncio.sleep(0)
            await server.close()
            await asyncio.sleep(0)
            client.settimeout(1.0)
            with contextlib.suppress(ConnectionError):
                assert client.recv(1) == b""

    asyncio.run(scene())
