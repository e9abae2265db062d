"""Every generator that training code draws from without naming it: read as bytes, put back.

A step reads them twice: at its beginning, to go back there, and after the forward pass, for the
rank's entry. Python and NumPy turn their 624 words into objects when they are asked, which costs
more than all the rest of an entry. So the words are read where they lie. Where they lie is not
assumed: it is tried out against what the generator itself says, once per process, and a generator
that keeps its words elsewhere is asked, each time.

Must never: write by address. Whatever is put back goes through the generators' own doors.
"""

from __future__ import annotations

import array
import ctypes
import random
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from keepstep.training.raw import bytes_tensor, tensor_bytes

_WORDS_BYTES = 624 * 4
_PYTHON_TAIL = struct.Struct("<q?d")
_NUMPY_TAIL = struct.Struct("<qqd")
_INT = struct.Struct("<i")
_GAUSS = struct.Struct("<iid")
"""As the compiler lays it out: has_gauss, four bytes of nothing, gauss."""

Reader = Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class Randomness:
    """The states of all of them at one moment."""

    torch_cpu: bytes
    python: bytes
    numpy: bytes
    cuda: tuple[bytes, ...]


def read_randomness() -> Randomness:
    return Randomness(
        tensor_bytes(torch.get_rng_state()),
        _read_python(),
        _read_numpy(),
        tuple(tensor_bytes(state) for state in torch.cuda.get_rng_state_all())
        if torch.cuda.is_initialized()
        else (),
    )


def restore_randomness(state: Randomness) -> None:
    torch.set_rng_state(bytes_tensor(state.torch_cpu))
    random.setstate(_python_state(state.python))
    if state.numpy:
        import numpy

        numpy.random.set_state(_numpy_state(state.numpy))
    if state.cuda:
        torch.cuda.set_rng_state_all([bytes_tensor(raw) for raw in state.cuda])


class _Known:
    """How to read one generator, found out when it is first met."""

    def __init__(self) -> None:
        self.generator: object = None
        self.reader: Reader | None = None


_python, _numpy = _Known(), _Known()

# ---------------------------------------------------------------- Python's


def _read_python() -> bytes:
    generator = random._inst
    if _python.generator is not generator:
        _python.generator, _python.reader = generator, _python_reader(generator)
    return _python.reader() if _python.reader is not None else _ask_python()


def _python_reader(generator: random.Random) -> Reader | None:
    """From memory: an int (where it is), then its words; None if this Python has it otherwise."""
    address = id(generator) + object.__basicsize__
    if type(generator).__basicsize__ < object.__basicsize__ + _INT.size + _WORDS_BYTES:
        return None

    def read() -> bytes:
        held = ctypes.string_at(address, _INT.size + _WORDS_BYTES)
        gauss: float | None = generator.gauss_next  # type: ignore[attr-defined]
        tail = _PYTHON_TAIL.pack(generator.VERSION, gauss is not None, gauss or 0.0)
        return held[_INT.size :] + held[: _INT.size] + tail

    return read if read() == _ask_python() else None


def _ask_python() -> bytes:
    version, words, gauss = random.getstate()
    tail = _PYTHON_TAIL.pack(version, gauss is not None, gauss or 0.0)
    return array.array("I", words).tobytes() + tail


def _python_state(raw: bytes) -> tuple[Any, ...]:
    words = array.array("I")
    words.frombytes(raw[: -_PYTHON_TAIL.size])
    version, has_gauss, gauss = _PYTHON_TAIL.unpack(raw[-_PYTHON_TAIL.size :])
    return version, tuple(words), gauss if has_gauss else None


# ---------------------------------------------------------------- NumPy's


def _read_numpy() -> bytes:
    """Empty where nobody has imported NumPy: then nobody has drawn from it either."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return b""
    generator = numpy.random.mtrand._rand
    # Its words belong to the bit generator, which can be exchanged under it.
    if _numpy.generator is not generator._bit_generator:
        _numpy.generator = generator._bit_generator
        _numpy.reader = _numpy_reader(numpy, generator)
    return _numpy.reader() if _numpy.reader is not None else _ask_numpy(generator)


def _numpy_reader(numpy: Any, generator: Any) -> Reader | None:
    """From memory: the words and where it is by an address that NumPy tells; the half pair of
    normal numbers lies in the object itself, where a generator made for this shows it."""
    probe = numpy.random.RandomState(1)
    probe.standard_normal()
    gauss = probe.get_state()[4]
    held = ctypes.string_at(id(probe), type(probe).__basicsize__)
    offset = held.find(_GAUSS.pack(1, 0, gauss))
    if offset < 0 or type(generator) is not type(probe):
        return None

    def reader(of: Any) -> Reader:
        words, half = of._bit_generator.ctypes.state_address, id(of) + offset

        def read() -> bytes:
            held = ctypes.string_at(words, _WORDS_BYTES + _INT.size)
            has_gauss, _, gauss = _GAUSS.unpack(ctypes.string_at(half, _GAUSS.size))
            (position,) = _INT.unpack(held[_WORDS_BYTES:])
            return held[:_WORDS_BYTES] + _NUMPY_TAIL.pack(position, has_gauss, gauss)

        return read

    read_probe, read = reader(probe), reader(generator)
    for _ in range(2):
        if read_probe() != _ask_numpy(probe):
            return None
        probe.standard_normal()
    return read if read() == _ask_numpy(generator) else None


def _ask_numpy(generator: Any) -> bytes:
    _, keys, position, has_gauss, gauss = generator.get_state()
    return bytes(keys.tobytes()) + _NUMPY_TAIL.pack(position, has_gauss, gauss)


def _numpy_state(raw: bytes) -> Any:
    import numpy

    keys = numpy.frombuffer(raw[: -_NUMPY_TAIL.size], dtype=numpy.uint32)
    return "MT19937", keys, *_NUMPY_TAIL.unpack(raw[-_NUMPY_TAIL.size :])
