from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from keepstep import wire
from keepstep.agent.stream import Stream
from keepstep.clock import RealClock
from keepstep.config import OrchestratorConfig
from keepstep.errors import WireError
from keepstep.model import Endpoint, Generation, JobId, NodeId, OrderId, Term
from keepstep.orchestrator.pulses import SLICE, Frames, spread
from keepstep.orchestrator.stepping_down import ALONE_SECONDS
from keepstep.orchestrator.streams import (
    MESSAGE_BYTES,
    MESSAGES_MAX,
    REST_SECONDS_MAX,
    AgentStream,
    Allowance,
    Allowances,
    Line,
    addressed,
    listen,
)

NODE = NodeId("n")


class Scene:
    """Our end of an agent's stream, and the agent's end."""

    def __init__(self) -> None:
        self.beats: list[wire.Heartbeat] = []

    async def connect(self, outbox_bytes_max: int = 10_000, early: bytes = b"") -> AgentStream:
        """`early` has arrived before anybody listens."""
        loop = asyncio.get_running_loop()
        ours: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
        ours = loop.create_future()

        def line() -> Line:
            reader = asyncio.StreamReader(limit=1024, loop=loop)
            return Line(reader, lambda *both: ours.set_result(both), loop)

        self.server = await loop.create_server(line, "127.0.0.1", 0)
        port = self.server.sockets[0].getsockname()[1]
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port)
        # Something is always read before: the Hello.
        self.writer.write(b"hello" + early)
        reader, writer = await ours
        assert await reader.readexactly(5) == b"hello"
        stream = AgentStream(
            NODE,
            writer,
            lambda _, beat: self.beats.append(beat),
            outbox_bytes_max=outbox_bytes_max,
        )
        await listen(stream, reader, writer)
        return stream

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()
        self.server.close()
        await self.server.wait_closed()


def frame(why: str) -> bytes:
    return wire.encode(wire.Refused(why))


def test_an_agent_that_does_not_read_is_dropped_at_the_bound():
    async def scene() -> None:
        here = Scene()
        stream = await here.connect(outbox_bytes_max=10_000)
        for _ in range(50):
            stream.send(b"x" * (4 * 1024 * 1024))
            if stream.dropped:
                break
        assert stream.dropped.endswith("bytes behind")
        stream.send(b"x")  # Harmless on a dropped stream.
        assert [message async for message in stream.messages()] == []
        await here.close()

    run(scene())


def test_an_agent_that_takes_nothing_for_long_is_dropped(monkeypatch):
    async def scene() -> None:
        here = Scene()
        stream = await here.connect(outbox_bytes_max=2**40)
        now = 100.0
        monkeypatch.setattr("keepstep.orchestrator.streams.monotonic", lambda: now)
        stream.send(b"x" * (64 * 1024 * 1024))
        now += 9.0
        stream.send(b"x")
        assert stream.dropped == ""
        now += 2.0
        stream.send(b"x")
        assert stream.dropped == "took not all of it for 10 s"
        await here.close()

    run(scene())


def test_messages_arrive_in_order_and_the_end_of_the_stream_ends_them():
    async def scene() -> None:
        here = Scene()
        stream = await here.connect()
        for term in (1, 2, 3):
            stream.send(frame(str(term)))
        assert [(await wire.read(here.reader)).why for _ in range(3)] == ["1", "2", "3"]
        here.writer.write(wire.encode(wire.Heartbeat(NODE)) + frame("4") + frame("5"))
        here.writer.close()
        assert [m.why async for m in stream.messages()] == ["4", "5"]
        assert here.beats == [wire.Heartbeat(NODE)]
        assert stream.dropped == ""
        await here.close()

    run(scene())


def test_what_arrived_before_anybody_listened_is_heard_first():
    async def scene() -> None:
        here = Scene()
        early, late = frame("early"), frame("cut in two")
        stream = await here.connect(early=early + late[:7])
        here.writer.write(late[7:] + frame("late"))
        here.writer.write_eof()
        assert [m.why async for m in stream.messages()] == ["early", "cut in two", "late"]
        await here.close()

    run(scene())


def test_an_end_that_came_before_anybody_listened_ends_the_stream():
    async def scene() -> None:
        loop = asyncio.get_running_loop()
        ours = loop.create_future()
        line = Line(asyncio.StreamReader(), lambda *both: ours.set_result(both), loop)
        server = await loop.create_server(lambda: line, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"hello" + frame("last words"))
        writer.write_eof()
        reader, ours_writer = await ours
        await reader.readexactly(5)
        # The end has arrived, and words before it are still unread.
        await until(lambda: reader._eof)
        stream = AgentStream(NODE, ours_writer, print, outbox_bytes_max=1)
        await listen(stream, reader, ours_writer)
        assert [m.why async for m in stream.messages()] == ["last words"]
        writer.close()
        ours_writer.close()
        server.close()
        await server.wait_closed()

    run(scene())


def test_an_agent_that_talks_faster_than_it_is_heard_has_to_wait(monkeypatch):
    monkeypatch.setattr("keepstep.orchestrator.streams.MESSAGES_PER_SECOND_MAX", 1e9)

    async def scene() -> None:
        here = Scene()
        stream = await here.connect()
        number = 40 * MESSAGES_MAX
        pad = "x" * 20_000
        sending = asyncio.create_task(send_all(here.writer, [frame(pad)] * number))
        await until(lambda: not stream.transport.is_reading())
        assert len(stream._messages) < number
        heard = 0
        async for _ in stream.messages():
            heard += 1
            if heard == number:
                break
        await sending
        await here.close()

    run(scene())


@pytest.mark.parametrize("what", ["heartbeats", "news", "long news"])
def test_an_agent_that_says_too_much_is_read_more_slowly_and_loses_nothing(monkeypatch, what):
    monkeypatch.setattr("keepstep.orchestrator.streams.MESSAGES_PER_SECOND_MAX", 2000.0)
    monkeypatch.setattr("keepstep.orchestrator.streams.AHEAD_SECONDS_MAX", 0.1)
    many = {"heartbeats": 1200, "news": 1200, "long news": 100}[what]
    one = {
        "heartbeats": wire.encode(wire.Heartbeat(NODE)),
        "news": frame("x"),
        "long news": frame("x" * 11 * MESSAGE_BYTES),
    }[what]

    async def scene() -> None:
        here = Scene()
        began = time.monotonic()
        stream = await here.connect()
        stream.feed(one * many)
        assert not stream.transport.is_reading()
        heard = asyncio.create_task(count(stream))
        here.writer.write_eof()
        await until(lambda: stream._ended)
        # 1,200 at 2,000 in a second, of which the first 200 at once: half a second.
        assert time.monotonic() - began > 0.4
        assert await heard + len(here.beats) == many
        assert stream.about["slowed"] > 0
        assert stream.dropped == ""
        await here.close()

    run(scene())


def test_an_agent_that_tells_of_many_ended_jobs_is_not_slowed():
    async def scene() -> None:
        here = Scene()
        stream = await here.connect()
        assert Allowances().greet(stream)
        # Sixty-four jobs in its room, with sixteen ranks each.
        many = 64 * 16
        await send_all(here.writer, [frame("x" * 200)] * many)
        here.writer.write_eof()
        assert await count(stream) == many
        assert "slowed" not in stream.about
        await here.close()

    run(scene())


def test_nobody_rests_for_so_long_that_its_node_would_be_taken_for_silent():
    allowance = Allowance()
    assert allowance.take(100_000, now=50.0) == REST_SECONDS_MAX
    assert allowance.take(100_000, now=51.0) == REST_SECONDS_MAX
    assert min(ALONE_SECONDS, OrchestratorConfig().silent_seconds_max) / 2 > REST_SECONDS_MAX
    assert allowance.take(1, now=60.0) == 0.0, "silence is made good"


def test_the_largest_frames_are_charged_piece_by_piece_as_they_are_read():
    allowance, now = Allowance(), 50.0
    read = 256 * 1024
    for _ in range(2 * wire.FRAME_BYTES_MAX // read):
        now += allowance.take(read / MESSAGE_BYTES, now)
    assert now > 50.0 + 15.0, "two of them take longer than that"


def test_a_new_connection_is_no_way_to_say_more(monkeypatch):
    now = 100.0
    monkeypatch.setattr("keepstep.orchestrator.streams.monotonic", lambda: now)

    async def scene() -> None:
        here, there, node = Scene(), Scene(), Allowances()
        greeted = 0
        stream = await here.connect()
        while node.greet(stream):
            greeted += 1
        assert 20 < greeted < 60, "an agent that flaps is let in"
        other = await there.connect()
        other.node = NodeId("m")
        assert node.greet(other), "and so are all others"
        await here.close()
        await there.close()

    run(scene())


def test_a_stream_that_ends_while_it_rests_is_left_alone(monkeypatch):
    monkeypatch.setattr("keepstep.orchestrator.streams.AHEAD_SECONDS_MAX", 0.0)

    async def scene() -> None:
        here = Scene()
        stream = await here.connect()
        stream.feed(frame("x") * 10)
        resting = stream._resting
        stream.drop("enough")
        assert resting.cancelled()
        assert [message async for message in stream.messages()] == []
        await here.close()

    run(scene())


async def count(stream: AgentStream) -> int:
    return len([message async for message in stream.messages()])


async def until(is_so: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if is_so():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came")


async def send_all(writer: asyncio.StreamWriter, frames: list[bytes]) -> None:
    for each in frames:
        writer.write(each)
        await writer.drain()


def test_a_message_that_cannot_be_read_ends_the_stream_with_its_reason():
    async def scene() -> None:
        here = Scene()
        stream = await here.connect()
        here.writer.write(b"\x00\x00\x00\x02{}")
        assert [message async for message in stream.messages()] == []
        assert "v, kind and body" in stream.dropped
        await here.close()

    run(scene())


# ---------------------------------------------------------------- pulses


class FakeStream:
    dropped = ""
    version = wire.VERSION

    def __init__(self, node: str) -> None:
        self.node = NodeId(node)
        self.sent: list[bytes] = []

    def send(self, frame: bytes) -> None:
        self.sent.append(frame)


def test_an_agent_is_told_the_heads_of_its_own_jobs_only():
    node, frames = NodeId("n0"), Frames(Term(3), {"a": "7f", "b": "01"}, lambda _: 1.5)
    of_a = wire.decode(frames.of(node, [JobId("a"), JobId("a"), JobId("unknown")])[4:])
    assert of_a == wire.Pulse(Term(3), {"a": "7f"}, 1.5)
    assert wire.decode(frames.of(node, [])[4:]) == wire.Pulse(Term(3), {}, 1.5)
    other = NodeId("n1")
    assert frames.of(node, [JobId("a"), JobId("b")]) is frames.of(other, [JobId("b"), JobId("a")])


def test_an_older_agent_gets_a_pulse_that_it_can_read():
    node, frames = NodeId("n0"), Frames(Term(3), {"a": "7f"}, lambda _: 1.5)
    body = json.loads(frames.of(node, [JobId("a")], 1)[4:])
    assert body == {"v": 1, "kind": "Pulse", "body": {"term": 3, "heads": {"a": "7f"}}}
    assert json.loads(frames.of(node, [JobId("a")])[4:])["body"]["beat_seconds"] == 1.5


def test_each_node_gets_an_order_in_the_version_that_it_speaks():
    streams = {NodeId(name): FakeStream(name) for name in ("old", "new", "other")}
    streams[NodeId("old")].version = 1
    nodes = (NodeId("old"), NodeId("new"), NodeId("gone"))
    order = wire.Order(Term(1), Generation(1), OrderId("o"), JobId("j"), nodes, wire.Agree())
    for stream, frame in addressed(order, streams):
        stream.send(frame)
    said = {name: [json.loads(sent[4:]) for sent in s.sent] for name, s in streams.items()}
    assert {name: [plain["v"] for plain in told] for name, told in said.items()} == {
        "old": [1],
        "new": [2],
        "other": [],
    }
    assert all(told[0]["body"]["nodes"] == [name] for name, told in said.items() if told)


def test_an_order_that_an_older_node_has_no_word_for_goes_to_the_others():
    @dataclass(frozen=True)
    class Novelty:
        """An action of this version."""

    streams = {NodeId(name): FakeStream(name) for name in ("old", "new")}
    streams[NodeId("old")].version = 1
    nodes = (NodeId("old"), NodeId("new"))
    order = wire.Order(Term(1), Generation(1), OrderId("o"), JobId("j"), nodes, Novelty())
    told = [stream.node for stream, _ in addressed(order, streams)]
    assert told == ["new"]


def talk(offer: str, messages: list[wire.Message]) -> tuple[list[dict], str]:
    """What an agent's stream says to an orchestrator that offers this, and why it left."""

    async def scene() -> tuple[list[dict], str]:
        heard: list[dict] = []
        done = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 101 Switching Protocols\r\n" + offer.encode() + b"\r\n")
            with contextlib.suppress(asyncio.IncompleteReadError):
                for _ in messages:
                    size = int.from_bytes(await reader.readexactly(4), "big")
                    heard.append(json.loads(await reader.readexactly(size)))
            done.set()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        endpoint = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
        stream = Stream([endpoint], "token", lambda: messages, lambda message: None)
        why = ""
        try:
            await stream._talk(endpoint)
        except (WireError, OSError, asyncio.IncompleteReadError) as error:
            why = str(error)
        await done.wait()
        server.close()
        return heard, why

    async def bounded() -> tuple[list[dict], str]:
        async with asyncio.timeout(20):
            return await scene()

    return asyncio.run(bounded())


HELLO = wire.Hello(NODE, "10.0.0.1", 4, 1, 2, "boot", speaks=wire.VERSION, release="0.1.0")


def test_an_agent_speaks_as_its_orchestrator_does():
    (old,), _ = talk("", [HELLO])
    assert old["v"] == 1
    assert not old["body"].keys() & {"speaks", "release", "torch"}
    (new,), _ = talk("Keepstep-Wire: 1-2\r\n", [HELLO])
    assert new["v"] == 2
    assert (new["body"]["speaks"], new["body"]["release"]) == (2, "0.1.0")


def test_an_agent_leaves_an_orchestrator_with_which_it_has_no_version_in_common():
    heard, why = talk("Keepstep-Wire: 3-4\r\n", [HELLO])
    assert heard == []
    assert "upgrade this side first" in why


@pytest.mark.parametrize("turns", range(6))
def test_an_agent_that_is_told_to_leave_while_a_message_comes_in_leaves(monkeypatch, turns: int):
    """Whatever turn of the loop the two are apart: the one does not hide the other."""
    arrived: list[asyncio.Future[wire.Message]] = []
    left = asyncio.Event()

    async def read(reader: asyncio.StreamReader) -> wire.Message:
        arrived.append(asyncio.get_running_loop().create_future())
        return await arrived[-1]

    async def orchestrator(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()
        left.set()

    async def scene() -> None:
        server = await asyncio.start_server(orchestrator, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        stream = Stream([Endpoint("127.0.0.1", port)], "", list, lambda message: None)
        talking = asyncio.create_task(stream.run())
        await until(lambda: arrived)
        arrived[0].set_result(wire.Refused("a message"))
        for _ in range(turns):
            await asyncio.sleep(0)
        talking.cancel()
        done, _ = await asyncio.wait([talking], timeout=5.0)
        assert done, "it goes on"
        await left.wait()
        server.close()

    monkeypatch.setattr("keepstep.agent.stream.wire.read", read)
    run(scene())


def test_pulses_are_spread_and_each_stream_gets_one():
    streams = {NodeId(f"n{i}"): FakeStream(f"n{i}") for i in range(3 * SLICE + 1)}

    async def scene() -> None:
        frames = Frames(Term(1), {}, lambda node: 0.5)
        sending = asyncio.create_task(
            spread(streams, lambda: frames, lambda node: (), 0.2, RealClock())
        )
        await asyncio.sleep(0)
        assert sum(bool(stream.sent) for stream in streams.values()) == SLICE, "not all at once"
        await sending
        assert all(len(stream.sent) == 1 for stream in streams.values())

    run(scene())


def run(scene) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scene

    asyncio.run(bounded())
