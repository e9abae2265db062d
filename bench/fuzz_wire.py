"""Hostile bytes for all that reads before it trusts: messages, frames and HTTP heads. Seeded.

Each input is a valid message that was bent (bytes flipped, cut, repeated; values replaced by what
programmers forget; keys added, removed, doubled), or a splice of two, or noise. A reader may accept
an input, and then must be able to write it again; or refuse it by its own kind of error. Anything
else is a crash, named by seed and number: `Inputs(seed).make(number)` gives it again.
"""

from __future__ import annotations

import json
import random
import struct
import time
import typing
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Any

from keepstep import codec, wire
from keepstep.errors import WireError
from keepstep.orchestrator import events, http

SLOW_SECONDS = 1.0
"""Of CPU time: no input of a few kilobytes may keep a reader busy for so long."""
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 0.5, -0.0, 1e308),
    *("", " ", "\0", "n1", "\n", "../../etc/passwd", "%s%n", "x" * 5000, "\u202e", "𝕏", "'; --"),
    *([], {}, [[]], [None] * 50, {"": 0}, {"v": 1}, ["a"] * 3, {"__class__": "os"}),
)
TOKENS: tuple[bytes, ...] = (
    *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"1" * 5000, b"0x1", b"01", b"1."),
    *(b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\u0000"', b'"\xed\xa0\x80"', b'"\xff"', b'"\\x41"'),
    *(
        b"[" * 200 + b"]" * 200,
        b"[" * 100_000,
        b'{"a":' * 500,
        b"\xef\xbb\xbf{}",
        b"//",
        b"undefined",
    ),
)
HEADS: tuple[bytes, ...] = (
    b"GET /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer t",
    b"POST /v1/jobs/a%20b/stop?x=1&y HTTP/1.1\r\nContent-Length: 2\r\nIdempotency-Key: k",
    b"GET //[::1]/ HTTP/1.1\r\nLast-Event-ID: 7",
    b"POST /v1/agent HTTP/1.1\r\nUpgrade: keepstep-stream\r\nContent-Length: 0",
)
PIECES: tuple[bytes, ...] = (
    *(b"\r\n", b":", b" ", b"\0", b"%", b"%zz", b"//[", b"?", b"&&=", b"\xb2", b"Content-Length: "),
    *(b"9" * 5000, b"Transfer-Encoding: chunked", b"HTTP/9.9", b"\xff" * 8, b"A" * 3000),
)


class Inputs:
    """The inputs of one seed, by number."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        chance = random.Random(f"corpus/{seed}")
        kinds = sorted(wire._KINDS.items())
        self.corpus = [
            codec.dumps(wire.to_plain(example(kind, chance))) for _, kind in kinds for _ in range(8)
        ]

    def make(self, number: int) -> bytes:
        chance = random.Random(f"{self._seed}/{number}")
        text = chance.choice(self.corpus)
        way = chance.random()
        if way < 0.45:
            return bent(text, chance)
        if way < 0.75:
            return codec.dumps(warped(json.loads(text), chance))
        if way < 0.88:
            return with_token(text, chance)
        if way < 0.94:
            other = chance.choice(self.corpus)
            return text[: chance.randrange(len(text))] + other[chance.randrange(len(other)) :]
        return chance.randbytes(chance.randrange(200))

    def head(self, number: int) -> bytes:
        chance = random.Random(f"{self._seed}/head/{number}")
        head = bent(chance.choice(HEADS), chance)
        for _ in range(chance.randrange(3)):
            at = chance.randrange(len(head) + 1)
            head = head[:at] + chance.choice(PIECES) + head[at:]
        return head


def example(kind: Any, chance: random.Random) -> Any:
    """A valid value of a wire type, from its annotations."""
    if isinstance(kind, typing.NewType):
        return example(kind.__supertype__, chance)
    scalars: dict[Any, Callable[[], Any]] = {
        str: lambda: chance.choice(("", "n1", "job", "a b", "ü")),
        int: lambda: chance.randrange(-2, 9),
        float: lambda: chance.choice((0.0, 0.25, 3.5)),
        bool: lambda: chance.random() < 0.5,
        type(None): lambda: None,
    }
    if kind in scalars:
        return scalars[kind]()
    arguments = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if origin is tuple:
        return tuple(example(arguments[0], chance) for _ in range(chance.randrange(3)))
    if origin is dict:
        return {str(n): example(arguments[1], chance) for n in range(chance.randrange(3))}
    if arguments:
        return example(chance.choice(arguments), chance)
    if issubclass(kind, Enum):
        return chance.choice(list(kind))
    return kind(**{n: example(h, chance) for n, h in typing.get_type_hints(kind).items()})


def bent(data: bytes, chance: random.Random) -> bytes:
    """A few bytes of it changed, lost, doubled or put in."""
    raw = bytearray(data)
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(len(raw) + 1)
        match chance.randrange(5):
            case 0 if at < len(raw):
                raw[at] ^= 1 << chance.randrange(8)
            case 1:
                del raw[at : at + chance.randrange(1, 9)]
            case 2:
                raw[at:at] = raw[at : at + chance.randrange(1, 40)]
            case 3:
                raw[at:at] = chance.randbytes(chance.randrange(1, 5))
            case _:
                del raw[at:]
    return bytes(raw)


def with_token(text: bytes, chance: random.Random) -> bytes:
    """One value of it replaced by text that no JSON writer would write."""
    places = [at for at in range(1, len(text)) if text[at - 1 : at] in (b":", b",", b"[")]
    at = chance.choice(places)
    end = at
    while end < len(text) and text[end : end + 1] not in b",]}":
        end += 1
    return text[:at] + chance.choice(TOKENS) + text[end:]


def warped(plain: Any, chance: random.Random) -> Any:
    """One place somewhere in it changed."""
    if isinstance(plain, dict) and plain and chance.random() < 0.85:
        key = chance.choice(sorted(plain))
        match chance.randrange(10):
            case 0:
                return {k: v for k, v in plain.items() if k != key}
            case 1:
                return {**plain, chance.choice(("other", "", "v", "body")): chance.choice(VALUES)}
            case 2:
                return {(f"{k}\0" if k == key else k): v for k, v in plain.items()}
            case _:
                return {**plain, key: warped(plain[key], chance)}
    if isinstance(plain, list) and plain and chance.random() < 0.6:
        at = chance.randrange(len(plain))
        return [*plain[:at], warped(plain[at], chance), *plain[at + 1 :]] * chance.choice((1, 1, 2))
    return chance.choice(VALUES)


# ---------------------------------------------------------------- readers


def read_message(data: bytes) -> str:
    try:
        message = wire.decode(data)
    except WireError:
        return "refused"
    # What was believed can be passed on, and means the same there.
    again = wire.decode(wire.encode(message)[4:])
    assert again == message, "it changed on the way"
    return f"accepted {type(message).__name__}"


def read_frames(data: bytes) -> str:
    """The same bytes as a stream, in two pieces, behind a length that is right, wrong or theirs."""
    lie = sum(data) % 4
    if lie < 3:
        data = struct.pack(">I", max(0, len(data) + lie - 1)) + data
    decoder, cut = wire.Decoder(), len(data) // 2
    try:
        found = decoder.feed(data[:cut]) + decoder.feed(data[cut:])
    except WireError:
        return "refused"
    return "accepted" if found else "waits for more"


def read_event(data: bytes) -> str:
    try:
        plain = codec.loads(data)
        body = plain["body"] if isinstance(plain, dict) and "body" in plain else plain
        kind = plain["kind"] if isinstance(plain, dict) and "kind" in plain else None
        events.to_plain(events.from_plain({"kind": kind, "body": body}))
    except WireError:
        return "refused"
    return "accepted"


def read_head(data: bytes) -> str:
    try:
        http.body_bytes(http.parse_head(data))
    except http.BadRequest:
        return "refused"
    return "accepted"


READERS: dict[str, Callable[[bytes], str]] = {
    "messages": read_message,
    "frames": read_frames,
    "events": read_event,
    "heads": read_head,
}
SHARES = {"messages": 0.7, "frames": 0.1, "events": 0.1, "heads": 0.1}


def attack(seed: int, first: int, count: int) -> dict[str, Any]:
    """Feed inputs `first` to `first + count`; what became of them."""
    inputs = Inputs(seed)
    outcomes = {name: Counter[str]() for name in READERS}
    crashes: list[dict[str, Any]] = []
    slowest = 0.0
    names = [name for name, share in SHARES.items() for _ in range(round(10 * share))]
    for number in range(first, first + count):
        name = names[number % len(names)]
        data = inputs.head(number) if name == "heads" else inputs.make(number)
        began = time.thread_time()
        try:
            outcome = READERS[name](data)
        except Exception as error:
            outcome = "crash"
            told = {"reader": name, "number": number, "why": repr(error)[:300]}
            crashes.append(told | {"input": repr(data[:300])})
        seconds = time.thread_time() - began
        if seconds > SLOW_SECONDS:
            crashes.append({"reader": name, "number": number, "why": f"took {seconds:.1f} s"})
        slowest = max(slowest, seconds)
        outcomes[name][outcome] += 1
    return {
        "outcomes": {name: dict(sorted(found.items())) for name, found in outcomes.items()},
        "crashes": crashes,
        "slowest_seconds": slowest,
    }
