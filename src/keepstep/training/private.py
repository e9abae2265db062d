"""A rank's private state: what no other rank can give back.

Random-number states, the place in the data, and every registered tensor whose bytes differ between
ranks (BatchNorm statistics, for one). It is small, so it is kept in the ring in shared memory at
every boundary, with a copy on another node (mirror.py). An entry is bytes: a length, a JSON header,
then raw tensors; nothing in it is executed when it is read.
"""

from __future__ import annotations

import array
import ctypes
import json
import random
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from keepstep.errors import Permanent

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Randomness:
    """Every generator that training code draws from without naming it."""

    torch_cpu: bytes
    python: bytes
    numpy: bytes
    cuda: tuple[bytes, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Generators:
    """The same, as the generators themselves say it: for going back within one process."""

    torch_cpu: torch.Tensor
    python: tuple[Any, ...]
    numpy: Any
    cuda: list[torch.Tensor]

    @classmethod
    def now(cls) -> Generators:
        numpy = sys.modules.get("numpy")
        return cls(
            torch.get_rng_state(),
            random.getstate(),
            numpy.random.get_state() if numpy is not None else None,
            torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        )

    def restore(self) -> None:
        torch.set_rng_state(self.torch_cpu)
        random.setstate(self.python)
        if self.numpy is not None:
            import numpy

            numpy.random.set_state(self.numpy)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


def read_randomness() -> Randomness:
    now = Generators.now()
    return Randomness(
        tensor_bytes(now.torch_cpu),
        _python_bytes(now.python),
        _numpy_bytes(now.numpy),
        tuple(tensor_bytes(state) for state in now.cuda),
    )


def restore_randomness(state: Randomness) -> None:
    Generators(
        _bytes_tensor(state.torch_cpu),
        _python_state(state.python),
        _numpy_state(state.numpy),
        [_bytes_tensor(raw) for raw in state.cuda],
    ).restore()


@dataclass(frozen=True, slots=True)
class PrivateEntry:
    """What a rank needs, beside the shared state, to stand at a boundary."""

    boundary: int
    randomness: Randomness
    loader: dict[str, int]
    names: tuple[str, ...]
    tensors: tuple[bytes, ...]


def encode_entry(
    boundary: int, loader: dict[str, int], named: Sequence[tuple[str, torch.Tensor]]
) -> bytes:
    """The entry for this moment. Called once a step, so it copies each byte once."""
    randomness = read_randomness()
    parts = [randomness.torch_cpu, randomness.python, randomness.numpy, *randomness.cuda]
    parts += [tensor_bytes(tensor) for _, tensor in named]
    header = json.dumps(
        {
            "boundary": boundary,
            "loader": loader,
            "cuda": len(randomness.cuda),
            "names": [name for name, _ in named],
            "sizes": [len(part) for part in parts],
        }
    ).encode()
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


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """A copy of a tensor's bytes. By address, because torch's own way needs numpy installed."""
    # Asked first, because a step comes here for each private tensor.
    plain = tensor.is_cpu and tensor.is_contiguous()
    flat = tensor if plain else tensor.detach().cpu().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size())


def fill_from_bytes(tensor: torch.Tensor, raw: bytes) -> None:
    """Write raw bytes back into a tensor in place."""
    if len(raw) != tensor.numel() * tensor.element_size():
        raise Permanent(f"{len(raw)} bytes do not fit a tensor of shape {tuple(tensor.shape)}")
    if raw:
        with torch.no_grad():
            tensor.copy_(_bytes_tensor(raw).view(tensor.dtype).reshape(tensor.shape))


def _bytes_tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _python_bytes(state: tuple[Any, ...]) -> bytes:
    version, words, gauss = state
    tail = struct.pack("<q?d", version, gauss is not None, gauss or 0.0)
    return array.array("I", words).tobytes() + tail


def _python_state(raw: bytes) -> tuple[Any, ...]:
    tail = struct.calcsize("<q?d")
    words = array.array("I")
    words.frombytes(raw[:-tail])
    version, has_gauss, gauss = struct.unpack("<q?d", raw[-tail:])
    return version, tuple(words), gauss if has_gauss else None


def _numpy_bytes(state: Any) -> bytes:
    if state is None:
        return b""
    _, keys, position, has_gauss, gauss = state
    return bytes(keys.tobytes()) + struct.pack("<qqd", position, has_gauss, gauss)


def _numpy_state(raw: bytes) -> Any:
    if not raw:
        return None
    import numpy

    tail = struct.calcsize("<qqd")
    keys = numpy.frombuffer(raw[:-tail], dtype=numpy.uint32)
    position, has_gauss, gauss = struct.unpack("<qqd", raw[-tail:])
    return "MT19937", keys, position, has_gauss, gauss
