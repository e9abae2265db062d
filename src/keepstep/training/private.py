"""A rank's private state: what no other rank can give back.

Random-number states, the place in the data, and every registered tensor whose bytes differ between
ranks (BatchNorm statistics, for one). It is small, so it is kept in the ring in shared memory at
every boundary, with a copy on another node (mirror.py). An entry is bytes: a length, a JSON header,
then raw tensors; nothing in it is executed when it is read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from keepstep.errors import NoHome, Permanent
from keepstep.training.randomness import Randomness, read_randomness
from keepstep.training.raw import tensor_bytes

_LENGTH = struct.Struct("<I")
_NOT_HERE = -1
"""In place of the size of a tensor that was left out. An empty one has none, and is whole."""
LATER = torch.empty(0, dtype=torch.uint8)
"""In place of a tensor that the coming update changes."""
NO_ROOM = torch.empty(0, dtype=torch.uint8)
"""In place of one that there is no room for."""


@dataclass(frozen=True, slots=True)
class PrivateEntry:
    """What a rank needs, beside the shared state, to stand at a boundary."""

    boundary: int
    randomness: Randomness
    loader: dict[str, int]
    names: tuple[str, ...]
    tensors: tuple[bytes | None, ...]

    @property
    def lacks(self) -> list[str]:
        """What an update changed after the entry was written: its values are nowhere else."""
        return [name for name, raw in zip(self.names, self.tensors, strict=True) if raw is None]


def not_carried(names: Sequence[str]) -> str:
    return (
        f"{names[0]} is one rank's own and has no second home, since optimizers update it or it "
        "has outgrown the room for it; if others hold it, declare that with keepstep.held_by"
    )


def check_whole(payload: bytes) -> None:
    """Refuse an entry that a rank cannot be made of."""
    if lacks := decode_entry(payload).lacks:
        raise NoHome(not_carried(lacks))


class EntryWriter:
    """Writes a rank's entries, once a step: each byte is copied once, and the part of the header
    that is the same at every step is not written again."""

    def __init__(self) -> None:
        self._layout: tuple[int, list[str], list[int]] = (0, [], [])
        self._text = ""

    def entry(
        self, boundary: int, loader: dict[str, int], named: Sequence[tuple[str, torch.Tensor]]
    ) -> bytes:
        """The entry for this moment."""
        now = read_randomness()
        parts = _parts(
            now, [None if t is LATER or t is NO_ROOM else tensor_bytes(t) for _, t in named]
        )
        layout = len(now.cuda), [name for name, _ in named], _sizes(parts)
        if layout != self._layout or not self._text:
            cuda, names, sizes = self._layout = layout
            self._text = json.dumps({"cuda": cuda, "names": names, "sizes": sizes})
        return _joined(json.dumps({"boundary": boundary, "loader": loader}), self._text, parts)


def completed(entry: PrivateEntry, named: Mapping[str, torch.Tensor]) -> bytes:
    """The same entry with what it lacks, as it is after the update."""
    pairs = zip(entry.names, entry.tensors, strict=True)
    parts = _parts(
        entry.randomness, [tensor_bytes(named[name]) if raw is None else raw for name, raw in pairs]
    )
    sizes = _sizes(parts)
    cuda = len(entry.randomness.cuda)
    return _joined(
        json.dumps({"boundary": entry.boundary, "loader": entry.loader}),
        json.dumps({"cuda": cuda, "names": entry.names, "sizes": sizes}),
        parts,
    )


def _parts(randomness: Randomness, tensors: Sequence[bytes | None]) -> list[bytes | None]:
    now = randomness
    return [now.torch_cpu, now.python, now.numpy, *now.cuda, *tensors]


def _sizes(parts: Sequence[bytes | None]) -> list[int]:
    return [_NOT_HERE if part is None else len(part) for part in parts]


def _joined(where: str, text: str, parts: Sequence[bytes | None]) -> bytes:
    header = f"{where[:-1]}, {text[1:]}".encode()
    return b"".join((_LENGTH.pack(len(header)), header, *(part or b"" for part in parts)))


def decode_entry(payload: bytes) -> PrivateEntry:
    """Read an entry; trailing padding is allowed, because a ring's slots have a fixed size."""
    try:
        (length,) = _LENGTH.unpack_from(payload, 0)
        start = _LENGTH.size + length
        header: dict[str, Any] = json.loads(payload[_LENGTH.size : start])
        parts: list[bytes | None] = []
        for size in header["sizes"]:
            here = max(0, size)
            parts.append(payload[start : start + here] if size != _NOT_HERE else None)
            start += here
        if start > len(payload):
            raise ValueError("cut short")
    except (struct.error, ValueError, KeyError) as error:
        raise Permanent(f"a private entry cannot be read: {error}") from error
    cuda = int(header["cuda"])
    states = [part or b"" for part in parts[: 3 + cuda]]
    return PrivateEntry(
        boundary=int(header["boundary"]),
        randomness=Randomness(states[0], states[1], states[2], tuple(states[3:])),
        loader={str(k): int(v) for k, v in header["loader"].items()},
        names=tuple(header["names"]),
        tensors=tuple(parts[3 + cuda :]),
    )
