"""State at a boundary: what it consists of, how it is cut for moving, and its digests.

For: saying exactly which bytes make up a rank's state (`Manifest`), cutting them into chunks that
several sources can send at once (`plan_chunks`), and comparing holders (`digest`, `combine`).

Must never: copy the state; remember the digest of a tensor that an optimizer or a forward pass
changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from keepstep.training.digest import NAME, ROW_BYTES, Digester, byte_view, combine, digest

__all__ = [
    "CHUNK_BYTES",
    "NAME",
    "Chunk",
    "DigestCache",
    "Digester",
    "Entry",
    "Manifest",
    "byte_view",
    "combine",
    "digest",
    "plan_chunks",
]

# Large enough to hide a round trip, small enough to digest one while the next is in flight.
CHUNK_BYTES = 4 * 1024 * 1024
assert CHUNK_BYTES % ROW_BYTES == 0, "a running digest takes whole rows"
SAMPLE_BYTES = 4096
"""Of a remembered tensor, looked at before its digest is believed."""


@dataclass(frozen=True)
class Chunk:
    """A piece of one tensor."""

    tensor: int
    offset_bytes: int
    bytes: int


def plan_chunks(sizes_bytes: Sequence[int], chunk_bytes: int = CHUNK_BYTES) -> tuple[Chunk, ...]:
    """Cut tensors of these sizes, in order, so that no chunk spans two of them."""
    assert chunk_bytes > 0
    return tuple(
        Chunk(tensor, offset, min(chunk_bytes, size - offset))
        for tensor, size in enumerate(sizes_bytes)
        for offset in range(0, size, chunk_bytes)
    )


@dataclass(frozen=True)
class Entry:
    """One tensor of a capsule."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """The ordered tensors of a capsule. Two equal manifests mean equal state."""

    entries: tuple[Entry, ...]
    digest_name: str = NAME

    @classmethod
    def of(
        cls, tensors: Iterable[tuple[str, torch.Tensor]], cache: DigestCache | None = None
    ) -> Manifest:
        """Describe and digest these tensors, in this order."""
        look = digest if cache is None else cache.digest
        return cls(
            tuple(
                Entry(name, _dtype_name(t), tuple(t.shape), t.numel() * t.element_size(), look(t))
                for name, t in tensors
            )
        )

    @property
    def digest(self) -> str:
        """One digest of the whole, over names and tensor digests."""
        return combine((entry.name, entry.digest) for entry in self.entries)

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)


class DigestCache:
    """Remembers the digests of frozen parameters: those that no optimizer touches.

    Only parameters with requires_grad False are remembered, under their address and version.
    Buffers never: BatchNorm writes its running statistics without raising the version. Writes
    through `.data`, the common way to move an averaged teacher, do not raise it either, so a
    sample of the bytes must still be the same. A sample may miss a write to a few elements: the
    receiver's own digest finds that, and the next round trusts nothing remembered.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], _Known] = {}

    def digest(self, tensor: torch.Tensor) -> str:
        if not isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad:
            return digest(tensor)
        key = (id(tensor), tensor.data_ptr())
        known = self._known.get(key)
        # The weak reference guards against another tensor born at the same address.
        if known is not None and known.tensor() is tensor and known.still_true(tensor):
            return known.value
        value = digest(tensor)
        self.remember(tensor, value)
        return value

    def remember(self, tensor: torch.Tensor, value: str) -> None:
        """Take a digest that was just computed elsewhere, over the bytes that arrived."""
        if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad:
            key = (id(tensor), tensor.data_ptr())
            sample = _sample(tensor).clone()
            self._known[key] = _Known(weakref.ref(tensor), tensor._version, sample, value)

    def forget(self) -> None:
        """After state was received in place: those writes do not raise any version."""
        self._known.clear()


@dataclass(frozen=True, eq=False, slots=True)
class _Known:
    tensor: weakref.ref[torch.Tensor]
    version: int
    sample: torch.Tensor
    value: str

    def still_true(self, tensor: torch.Tensor) -> bool:
        return self.version == tensor._version and torch.equal(self.sample, _sample(tensor))


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes from all over the tensor; a view where that is possible."""
    raw = byte_view(tensor)
    # Odd, so that every byte of an element has its turn: small updates change the low ones.
    return raw[:: (raw.numel() // SAMPLE_BYTES) | 1]


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
