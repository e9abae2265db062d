"""A rank's private state: what no other rank can give back.

Random-number states, the place in the data, and every registered tensor whose bytes differ between
ranks (BatchNorm statistics, for one). It is small, so it is kept in the ring in shared memory at
every boundary, with a copy on another node (mirror.py). An entry is bytes: a length, a JSON header,
then raw tensors; nothing in it is executed when it is read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from keepstep.errors import Permanent
from keepstep.training.randomness import Randomness, read_randomness
from keepstep.training.raw import tensor_bytes

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class PrivateEntry:
    """What a rank needs, beside the shared state, to stand at a boundary."""

    boundary: int
    randomness: Randomness
    loader: dict[str, int]
    names: tuple[str, ...]
    tensors: tuple[bytes, ...]


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
        parts = [now.torch_cpu, now.python, now.numpy, *now.cuda]
        parts += [tensor_bytes(tensor) for _, tensor in named]
        layout = len(now.cuda), [name for name, _ in named], [len(part) for part in parts]
        if layout != self._layout or not self._text:
            cuda, names, sizes = self._layout = layout
            self._text = json.dumps({"cuda": cuda, "names": names, "sizes": sizes})
        where = json.dumps({"boundary": boundary, "loader": loader})
        header = f"{where[:-1]}, {self._text[1:]}".encode()
        return b"".join((_LENGTH.pack(len(header)), header, *parts))


def decode_entry(payload: bytes) -> PrivateEntry:
    """Read an entry; trailing padding is allowed, because a ring's slots have a fixed size."""
    try:
        (length,) = _LENGTH.unpack_from(payload, 0)
        start = _LENGTH.size + length
        header: dict[str, Any] = json.loads(payload[_LENGTH.size : start])
        parts = []
        for size in header["sizes"]:
            parts.append(payload[start : start + size])
            start += size
        if start > len(payload):
            raise ValueError("cut short")
    except (struct.error, ValueError, KeyError) as error:
        raise Permanent(f"a private entry cannot be read: {error}") from error
    cuda = int(header["cuda"])
    return PrivateEntry(
        boundary=int(header["boundary"]),
        randomness=Randomness(parts[0], parts[1], parts[2], tuple(parts[3 : 3 + cuda])),
        loader={str(k): int(v) for k, v in header["loader"].items()},
        names=tuple(header["names"]),
        tensors=tuple(parts[3 + cuda :]),
    )
