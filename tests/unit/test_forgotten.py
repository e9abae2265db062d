"""An authority that is trusted no more ends the streams of those whom it let in. Real TLS."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from keepstep import tls, wire
from keepstep.cli import certs
from keepstep.model import NodeId
from keepstep.orchestrator.streams import AgentStream, Line

NODE = NodeId("n1")
FRAME = wire.encode(wire.Refused("anything"))


class Door:
    """An orchestrator's port, and agents that come to it."""

    def __init__(self, directory: Path) -> None:
        def complain(why: str) -> None:
            raise AssertionError(why)

        self.secure = tls.server(directory, everybody=False, problem=complain)
        self._writers: list[asyncio.StreamWriter] = []

    async def meet(self, agent: ssl.SSLContext) -> tuple[AgentStream, asyncio.StreamReader]:
        loop = asyncio.get_running_loop()
        ours: asyncio.Future[asyncio.StreamWriter] = loop.create_future()

        def line() -> Line:
            reader = asyncio.StreamReader(loop=loop)
            return Line(reader, lambda _, writer: ours.set_result(writer), loop)

        server = await loop.create_server(line, "127.0.0.1", 0, ssl=self.secure)
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=agent)
        server.close()
        self._writers.append(writer)
        # One that is refused learns it only now: its own side of the handshake was done.
        refused = asyncio.ensure_future(reader.read(1))
        await asyncio.wait([ours, refused], return_when=asyncio.FIRST_COMPLETED)
        if refused.done():
            raise EOFError(refused.result())
        refused.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await refused
        self._writers.append(ours.result())
        return AgentStream(NODE, ours.result(), print, outbox_bytes_max=10_000), reader

    def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


@pytest.fixture
def pki(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tls, "LOOK_SECONDS", 0.0)
    for name in ("old", "new"):
        certs.make(tmp_path / name, hosts=["127.0.0.1"], nodes=[NODE])
    return tmp_path


def put(path: Path, *parts: Path) -> None:
    """As a whole, as renewals do."""
    fresh = path.with_suffix(".fresh")
    fresh.write_bytes(b"".join(part.read_bytes() for part in parts))
    fresh.replace(path)


def run(pki: Path, scene: Callable[[Door], Awaitable[None]]) -> None:
    async def bounded() -> None:
        door = Door(pki / "old" / "orchestrator")
        try:
            async with asyncio.timeout(20):
                await scene(door)
        finally:
            door.close()
            await asyncio.sleep(0)

    asyncio.run(bounded())


async def heard(stream: AgentStream, reader: asyncio.StreamReader) -> bool:
    """Whether what is sent arrives. If not, the agent finds its stream at an end."""
    stream.send(FRAME)
    try:
        assert await reader.readexactly(len(FRAME)) == FRAME
    except (asyncio.IncompleteReadError, OSError):
        return False
    return True


def test_ordinary_renewals_and_further_authorities_leave_streams_alone(pki: Path):
    here = pki / "old" / "orchestrator"

    async def scene(door: Door) -> None:
        stream, reader = await door.meet(tls.client(pki / "old" / "node-n1"))
        first = door.secure.current()
        certs.make(pki / "old", renew=True)
        assert await heard(stream, reader)
        put(here / "ca.crt", pki / "old/ca/ca.crt", pki / "new/ca/ca.crt")
        assert await heard(stream, reader)
        assert door.secure.current() is not first, "the files were taken"
        # Not whole: it is as if nothing had changed.
        door.secure._problem = lambda why: None
        put(here / "ca.crt")
        assert await heard(stream, reader)
        assert stream.dropped == ""

    run(pki, scene)


def test_who_has_the_certificate_of_an_authority_that_was_taken_away_is_shut_out(pki: Path):
    here, agent = pki / "old" / "orchestrator", pki / "old" / "node-n1"
    leaked = pki / "leaked"
    shutil.copytree(agent, leaked)

    async def scene(door: Door) -> None:
        ours, theirs = tls.client(agent), tls.client(leaked)
        for path in (here / "ca.crt", agent / "ca.crt"):
            put(path, pki / "old/ca/ca.crt", pki / "new/ca/ca.crt")
        streams = [await door.meet(ours), await door.meet(theirs)]
        for name in ("tls.key", "tls.crt"):
            put(agent / name, pki / "new" / "node-n1" / name)
        assert all([await heard(*each) for each in streams])
        put(here / "ca.crt", pki / "new/ca/ca.crt")
        # Both are asked to show a certificate again.
        assert not any([await heard(*each) for each in streams])
        assert {stream.dropped for stream, _ in streams} == {
            "an authority is trusted no more: show a certificate again"
        }
        assert await heard(*await door.meet(ours)), "who has another is back"
        with pytest.raises((OSError, EOFError)):
            await door.meet(theirs)

    run(pki, scene)
