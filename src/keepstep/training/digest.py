"""The digest `lane-poly-1`: one fixed function over the raw bytes of a tensor, on any device.

For: comparing state between holders at memory speed. It is a check against faults, not against
an enemy. Changing any constant here changes the name, because holders compare across processes.

    bytes -> rows of 16,384 64-bit lanes -> chained -> rows of 1,024 lanes -> chained -> SHA-256

The chain eats one row per step. Even rows: state = row + K64 * state in 64-bit lanes. Odd rows:
state = row + K32 * (state turned by one 32-bit lane) in 32-bit lanes. Why not one polynomial in
64-bit lanes: multiplication and addition carry bits upwards only, so two words that differ in
their top bits alone (0.0 and 1.0, or x and -x) could be exchanged between rows unseen. The turn
brings top bits down and couples the lanes. Each step is a bijection of the state, so that a
change inside one row can never be forgotten later.

Must never: depend on strides, dtype, device, thread count, or anything but the bytes.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Sequence

import torch

NAME = "lane-poly-1"
LANES = 16_384
LANES_SMALL = 1_024
ROW_BYTES = LANES * 8
_SMALL_ROW_BYTES = LANES_SMALL * 8
_K64 = 0x2545F4914F6CDD1B  # odd, and 3 modulo 8
_K32 = 0x2C1B3C6D  # odd
_SEED = 0x1B873593


def digest(tensor: torch.Tensor) -> str:
    """32 hex digits over the bytes of `tensor` in row-major order."""
    raw = byte_view(tensor)
    running = Digester(raw.numel(), raw.device)
    running.update(raw)
    return running.finish()


def digest_joined(views: Sequence[torch.Tensor]) -> str:
    """One digest of many flat uint8 tensors, for those who know where each of them ends.

    As of their whole rows, one tensor behind the other, and then of what is left of each. A digest
    costs as much to begin and to end as half a megabyte of bytes does: not once per tensor.
    """
    device = views[0].device if views else "cpu"
    running, left = Digester(sum(view.numel() for view in views), device), []
    for view in views:
        whole = view.numel() // ROW_BYTES * ROW_BYTES
        if whole:
            running.update(view[:whole].to(device))
        if whole < view.numel():
            left.append(view[whole:].to(device))
    if left:
        running.update(torch.cat(left))
    return running.finish()


def combine(parts: Iterable[tuple[str, str]]) -> str:
    """One digest of many named ones; their order counts."""
    whole = hashlib.sha256(NAME.encode())
    for name, each in parts:
        # Lengths first, so that no name can run over into its digest.
        whole.update(f"{len(name.encode())}:{name}{len(each)}:{each}".encode())
    return whole.hexdigest()[:32]


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as one flat uint8 tensor: its own memory where that is possible."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8)


class Digester:
    """A digest that grows while bytes arrive. All pieces but the last are whole rows."""

    def __init__(self, total_bytes: int, device: torch.device | str = "cpu") -> None:
        self._total_bytes = total_bytes
        self._seen_bytes = 0
        self._small = total_bytes < 2 * ROW_BYTES
        lanes = LANES_SMALL if self._small else LANES
        self._chain = (
            _Chain(lanes, torch.device(device)) if total_bytes > _SMALL_ROW_BYTES else None
        )
        self._short = b""

    def update(self, piece: torch.Tensor) -> None:
        """Eat the next bytes: a flat uint8 tensor."""
        assert self._seen_bytes % ROW_BYTES == 0, "only the last piece may end inside a row"
        self._seen_bytes += piece.numel()
        if self._chain is None:
            self._short += _to_bytes(piece)
        else:
            self._chain.eat(_aligned(piece))

    def finish(self) -> str:
        assert self._seen_bytes == self._total_bytes, "bytes are missing"
        head = f"{NAME}:{self._total_bytes}:".encode()
        return hashlib.sha256(head + self._state()).hexdigest()[:32]

    def _state(self) -> bytes:
        if self._chain is None:
            return self._short
        if self._small:
            return self._chain.state_bytes()
        small = _Chain(LANES_SMALL, self._chain.device)
        small.eat(self._chain.state().view(torch.uint8))
        return small.state_bytes()


class _Chain:
    """The state of one chain: two buffers with a spare lane at the end for the turn."""

    def __init__(self, lanes: int, device: torch.device) -> None:
        self.device = device
        self._lanes = lanes
        self._a = torch.full((lanes + 1,), _SEED, dtype=torch.int64, device=device)
        self._b = torch.full((lanes + 1,), _SEED, dtype=torch.int64, device=device)
        self._a64, self._b64 = self._a[:lanes], self._b[:lanes]
        a32 = self._a.view(torch.int32)
        b32 = self._b.view(torch.int32)
        self._b_first, self._b_spare = b32[:1], b32[2 * lanes : 2 * lanes + 1]
        self._b_turned, self._a_whole = b32[1 : 2 * lanes + 1], a32[: 2 * lanes]
        self._even = True

    def eat(self, piece: torch.Tensor) -> None:
        row_bytes = self._lanes * 8
        whole = piece.numel() // row_bytes * row_bytes
        body = piece[:whole]
        rows64 = body.view(torch.int64).view(-1, self._lanes)
        rows32 = body.view(torch.int32).view(-1, 2 * self._lanes)
        for row64, row32 in zip(rows64.unbind(), rows32.unbind(), strict=True):
            self._step(row64, row32)
        rest = piece.numel() - whole
        if rest:
            last = torch.zeros(row_bytes, dtype=torch.uint8, device=self.device)
            last[:rest] = piece[whole:]
            self._step(last.view(torch.int64), last.view(torch.int32))

    def _step(self, row64: torch.Tensor, row32: torch.Tensor) -> None:
        if self._even:
            torch.add(row64, self._a64, alpha=_K64, out=self._b64)
        else:
            self._b_spare.copy_(self._b_first)
            torch.add(row32, self._b_turned, alpha=_K32, out=self._a_whole)
        self._even = not self._even

    def state(self) -> torch.Tensor:
        return self._a64 if self._even else self._b64

    def state_bytes(self) -> bytes:
        return _to_bytes(self.state())


def _aligned(piece: torch.Tensor) -> torch.Tensor:
    """A view as wider lanes needs a start on a whole lane; copy the rare one that has none."""
    return piece if piece.storage_offset() % 8 == 0 else piece.clone()


def _to_bytes(tensor: torch.Tensor) -> bytes:
    held = tensor.cpu().contiguous()
    return ctypes.string_at(held.data_ptr(), held.numel() * held.element_size())
