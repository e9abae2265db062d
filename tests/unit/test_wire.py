"""The wire: what was said arrives, what does not fit is refused and crashes nobody."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import typing
from enum import Enum

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keepstep import codec, wire
from keepstep.errors import WireError
from keepstep.model import Generation, JobId, JobSpec, NodeId, OrderId, Policy, Term

SCALARS: dict[object, st.SearchStrategy[object]] = {
    str: st.text(max_size=8),
    int: st.integers(-(2**40), 2**40),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    type(None): st.none(),
}


def anything(kind: object) -> st.SearchStrategy[object]:
    """Values of a wire type, built from its annotations."""
    if isinstance(kind, typing.NewType):
        return anything(kind.__supertype__)
    if kind in SCALARS:
        return SCALARS[kind]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(kind)
    arguments = typing.get_args(kind)
    match typing.get_origin(kind):
        case origin if origin is tuple:
            return st.lists(anything(arguments[0]), max_size=3).map(tuple)
        case origin if origin is dict:
            return st.dictionaries(st.text(max_size=4), anything(arguments[1]), max_size=3)
        case None:
            assert isinstance(kind, type)
            hints = typing.get_type_hints(kind)
            return st.fixed_dictionaries({n: anything(h) for n, h in hints.items()}).map(
                lambda fields: kind(**fields)
            )
        case _:
            return st.one_of(*(anything(option) for option in arguments))


MESSAGES = [kind for name, kind in sorted(wire._KINDS.items())]


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_survives_the_wire(kind: type) -> None:
    @given(anything(kind))
    def survives(message: object) -> None:
        assert wire.Decoder().feed(wire.encode(message)) == [message]

    survives()


def test_every_action_of_an_order_is_known_to_the_wire() -> None:
    assert set(typing.get_args(wire.Action)) == set(wire._ACTIONS.values())


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_decoder(data: bytes) -> None:
    try:
        wire.Decoder().feed(data)
        wire.decode(data)
    except WireError:
        return


@example({"action": {"kind": [], "body": None}})
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from(["v", "kind", "body", "action", "x"]), inner)
        ),
    )
)
def test_no_json_crashes_the_decoder(plain: object) -> None:
    for candidate in (plain, {"v": 1, "kind": "Order", "body": plain}):
        try:
            wire.from_plain(candidate)
        except WireError:
            continue


def test_frames_may_arrive_in_any_pieces() -> None:
    message = wire.Refused("no")
    frame = wire.encode(message) * 3
    decoder = wire.Decoder()
    got = [m for i in range(len(frame)) for m in decoder.feed(frame[i : i + 1])]
    assert got == [message] * 3


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"why": "x", "extra": 1}, "unknown key 'extra'"),
        ({}, "missing key 'why'"),
        ({"why": 3}, "expected str"),
        ([], "expected an object"),
    ],
)
def test_a_refusal_names_what_does_not_fit(body: object, word: str) -> None:
    with pytest.raises(WireError, match=word):
        wire.from_plain({"v": 1, "kind": "Refused", "body": body})


def test_another_version_is_refused_by_name() -> None:
    with pytest.raises(WireError, match="version 9"):
        wire.from_plain({"v": 9, "kind": "Refused", "body": {"why": ""}})


def test_a_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(WireError, match="over the limit"):
        wire.Decoder().feed((wire.FRAME_BYTES_MAX + 1).to_bytes(4, "big"))


def test_equal_records_have_equal_bytes() -> None:
    first = codec.dumps({"b": 1, "a": [1.5, None]})
    assert first == codec.dumps(json.loads('{"a": [1.5, null], "b": 1}'))


def test_a_flag_is_no_number_on_the_wire() -> None:
    with pytest.raises(WireError, match="expected int"):
        codec.from_plain(JobSpec, {"job": "j", "script": "s", "nodes": True})
    assert codec.from_plain(Policy, {"hold_seconds_max": 5}).hold_seconds_max == 5.0


def test_each_node_gets_an_order_addressed_to_it_alone():
    spec = JobSpec(JobId("j"), "train.py", arguments=('"nodes":[]',))
    nodes = tuple(NodeId(f'n"{i}') for i in range(3))
    order = wire.Order(
        Term(1), Generation(2), OrderId("o"), JobId("j"), nodes, wire.StartStandby(spec, 1)
    )
    told = {node: wire.decode(frame[4:]) for node, frame in wire.frames(order)}
    assert told == {node: dataclasses.replace(order, nodes=(node,)) for node in nodes}


@given(st.lists(st.sampled_from(["", "a", "b" * 300]), max_size=6), st.data())
def test_frames_are_found_however_the_bytes_are_cut(whys: list[str], data: st.DataObject):
    messages = [wire.Refused(why) for why in whys]
    stream = b"".join(map(wire.encode, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder, found = wire.Decoder(), []
    for begin, end in itertools.pairwise([0, *cuts, len(stream)]):
        found += decoder.feed(stream[begin:end])
    assert found == messages


def a_stall(seconds: str) -> bytes:
    facts = '"node":"a","job":"b","generation":1,"ranks":[],"seconds":'
    return f'{{"v":1,"kind":"Stalled","body":{{{facts}{seconds}}}}}'.encode()


@pytest.mark.parametrize(
    "data",
    [
        a_stall("1e999"),
        a_stall("-1e999"),
        a_stall("NaN"),
        a_stall("Infinity"),
        a_stall("1" + "0" * 400),
        a_stall("9" * 5000),
        a_stall("true"),
        b'{"v":1,"kind":"Heartbeat","body":{"node":"\\ud800"}}',
        b'{"v":1,"kind":"Heartbeat","body":{"node":"\xed\xa0\x80"}}',
        '{"v":1,"kind":"Heartbeat","body":{"node":"a"}}'.encode("utf-16"),
        b'{"v":true,"kind":"Heartbeat","body":{"node":"a"}}',
        b'{"v":1,"kind":"Heartbeat","body":{"node":' + b"[" * 100_000,
        b'{"v":1,"kind":"Health","body":{"node":"a","severity":' + b"[" * 900 + b"]" * 900 + b"}}",
        b'{"v":%s,"kind":[],"body":1}' % (b"[" * 900 + b"]" * 900),
    ],
    ids=range(14),
)
def test_what_could_not_be_passed_on_is_not_taken_in(data: bytes):
    with pytest.raises(WireError) as refused:
        wire.decode(data)
    assert len(str(refused.value)) < 400, "an error does not repeat all that a stranger sent"
    assert isinstance(wire.decode(a_stall("3")).seconds, float)


def test_a_stranger_may_not_announce_what_a_friend_may():
    async def read(bytes_max: int) -> object:
        stream = asyncio.StreamReader()
        stream.feed_data(wire.encode(wire.Refused("x" * 2000)))
        return await wire.read(stream, bytes_max)

    assert isinstance(asyncio.run(read(wire.STRANGER_BYTES_MAX)), wire.Refused)
    with pytest.raises(WireError, match="over the limit of 1000"):
        asyncio.run(read(1000))
