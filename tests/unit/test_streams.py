from __future__ import annotations

import asyncio
import contextlib

from keepstep import wire
from keepstep.model import NodeId
from keepstep.orchestrator.streams import AgentStream


async def connected(
    outbox_messages_max: int,
) -> tuple[AgentStream, asyncio.StreamReader, asyncio.StreamWriter, asyncio.Server]:
    """Our end of an agent's stream, and the agent's end."""
    ours: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
    ours = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(
        lambda reader, writer: ours.set_result((reader, writer)), "127.0.0.1", 0
    )
    port = server.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    stream = AgentStream(NodeId("n"), *await ours, outbox_messages_max=outbox_messages_max)
    return stream, reader, writer, server


def test_an_agent_that_does_not_read_is_dropped_at_the_bound():
    async def scene() -> None:
        stream, _, writer, server = await connected(5)
        frame = b"x" * (4 * 1024 * 1024)
        for _ in range(50):
            stream.send(frame)
            await asyncio.sleep(0)
            if stream.dropped:
                break
        assert stream.dropped == "5 messages behind"
        stream.send(frame)  # Harmless on a dropped stream.
        assert [message async for message in stream.messages()] == []
        await close(writer, server)

    run(scene())


def test_messages_arrive_in_order_and_the_end_of_the_stream_ends_them():
    async def scene() -> None:
        stream, reader, writer, server = await connected(10)
        for term in (1, 2, 3):
            stream.send(wire.encode(wire.Refused(str(term))))
        assert [(await wire.read(reader)).why for _ in range(3)] == ["1", "2", "3"]
        writer.write(wire.encode(wire.Heartbeat(NodeId("n"))))
        writer.close()
        assert [type(m).__name__ async for m in stream.messages()] == ["Heartbeat"]
        assert stream.dropped == ""
        stream.drop("the end")
        await close(writer, server)

    run(scene())


def test_a_message_that_cannot_be_read_ends_the_stream_with_its_reason():
    async def scene() -> None:
        stream, _, writer, server = await connected(10)
        writer.write(b"\x00\x00\x00\x02{}")
        assert [message async for message in stream.messages()] == []
        assert "v, kind and body" in stream.dropped
        await close(writer, server)

    run(scene())


def run(scene) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scene

    asyncio.run(bounded())


async def close(writer: asyncio.StreamWriter, server: asyncio.Server) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    server.close()
    await server.wait_closed()
