"""Move tensors between ranks, in place, over Keepstep's own side group.

For: filling a joiner's memory from one or several holders of the same state. Large tensors travel
in chunks straight into their final memory, a few in flight at a time, chunk i from source i mod k;
small ones travel together. The receiver digests each chunk while the next ones arrive, so the
check costs little time of its own.

    senders: for each chunk that is mine: isend          (a window of them outstanding)
    target:  for each chunk: irecv ahead, wait, digest   -> digests of what really arrived

Must never: trust a digest that the sender claims (the caller compares it with the ones returned
here); leave a tensor half-written without raising: the caller marks itself torn beforehand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from keepstep.model import Move, Rank
from keepstep.training.capsule import CHUNK_BYTES, Chunk, Digester, byte_view, digest, plan_chunks

# Tensors below this travel packed: a message costs more than copying so few bytes.
SMALL_BYTES = 64 * 1024
PACK_BYTES_MAX = 1024 * 1024
WINDOW = 4
# Tags of the side group. One move at a time per pair of ranks, in one order, needs no more.
_TAG = 71
_TAG_PACK = 72


def send(side: Any, tensors: Sequence[torch.Tensor], move: Move, rank: int) -> None:
    """Give this rank's share of `tensors` to the target. Blocks until it has left."""
    share = move.sources.index(Rank(rank))
    plan = _Plan.of(tensors)
    outstanding: deque[tuple[Any, torch.Tensor]] = deque()
    for number, pack in enumerate(plan.packs):
        if number % len(move.sources) == share:
            packed = torch.cat([byte_view(tensors[i]) for i in pack])
            _keep(outstanding, side.send([packed], move.target, _TAG_PACK), packed)
    views = {i: byte_view(tensors[i]) for i in plan.large}
    for number, chunk in enumerate(plan.chunks):
        if number % len(move.sources) == share:
            piece = _cut(views[chunk.tensor], chunk)
            _keep(outstanding, side.send([piece], move.target, _TAG), piece)
    while outstanding:
        outstanding.popleft()[0].wait()


def receive(
    side: Any,
    tensors: Sequence[torch.Tensor],
    move: Move,
    staged: bool | None = None,
    verify: Callable[[list[str]], bool] | None = None,
) -> list[str]:
    """Fill `tensors` from the sources; returns the digest of each, computed from what arrived.

    In place by default: the caller's state is torn from the first byte until it has compared the
    digests. With `staged` (the move's own wish, unless given), the bytes land in fresh buffers and
    are copied in only after `verify` agreed to the digests; if it does not, the tensors are
    untouched and the digests are returned.
    """
    assert move.sources, "a move needs a source"
    staged = move.staged if staged is None else staged
    assert verify is None or staged, "verify decides about staged bytes; in place it is too late"
    landing, digests = land(side, tensors, move, staged)
    if staged and verify is not None and not verify(digests):
        return digests
    put(tensors, landing)
    return digests


def land(
    side: Any, tensors: Sequence[torch.Tensor], move: Move, staged: bool
) -> tuple[list[torch.Tensor], list[str]]:
    """The first half of receiving: bytes beside the tensors, or in them where that is allowed."""
    landing = [_landing(tensor, staged) for tensor in tensors]
    return landing, _receive_into(side, move, landing)


def put(tensors: Sequence[torch.Tensor], landing: Sequence[torch.Tensor]) -> None:
    """The second half: what landed beside its tensor goes in."""
    for tensor, landed in zip(tensors, landing, strict=True):
        if not _shares_memory(tensor, landed):
            _put(tensor, landed)


# ---------------------------------------------------------------- receiving


def _receive_into(side: Any, move: Move, landing: Sequence[torch.Tensor]) -> list[str]:
    plan = _Plan.of(landing)
    digests = [""] * len(landing)
    _receive_packs(side, move, plan, landing, digests)
    running = {i: Digester(landing[i].numel(), landing[i].device) for i in plan.large}
    arriving: deque[tuple[Any, Chunk, torch.Tensor]] = deque()
    for chunk, work, piece in _posted(side, move, plan, landing):
        arriving.append((work, chunk, piece))
        if len(arriving) > WINDOW * len(move.sources):
            _digest_next(arriving, running)
    while arriving:
        _digest_next(arriving, running)
    for i, digester in running.items():
        digests[i] = digester.finish()
    return digests


def _receive_packs(
    side: Any,
    move: Move,
    plan: _Plan,
    landing: Sequence[torch.Tensor],
    digests: list[str],
) -> None:
    posted = []
    for number, pack in enumerate(plan.packs):
        device = landing[pack[0]].device
        size = sum(landing[i].numel() for i in pack)
        packed = torch.empty(size, dtype=torch.uint8, device=device)
        source = move.sources[number % len(move.sources)]
        posted.append((side.recv([packed], source, _TAG_PACK), pack, packed))
    for work, pack, packed in posted:
        work.wait()
        for i, piece in zip(pack, packed.split([landing[i].numel() for i in pack]), strict=True):
            landing[i].copy_(piece)
            digests[i] = digest(landing[i])


def _posted(
    side: Any, move: Move, plan: _Plan, landing: Sequence[torch.Tensor]
) -> Iterator[tuple[Chunk, Any, torch.Tensor]]:
    for number, chunk in enumerate(plan.chunks):
        piece = _cut(landing[chunk.tensor], chunk)
        source = move.sources[number % len(move.sources)]
        yield chunk, side.recv([piece], source, _TAG), piece


def _digest_next(
    arriving: deque[tuple[Any, Chunk, torch.Tensor]], running: dict[int, Digester]
) -> None:
    work, chunk, piece = arriving.popleft()
    work.wait()
    running[chunk.tensor].update(piece)


# ---------------------------------------------------------------- the plan both sides compute


@dataclass(frozen=True)
class _Plan:
    """Which tensors travel packed, and the chunks of the others: a function of the sizes only."""

    packs: tuple[tuple[int, ...], ...]
    large: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> _Plan:
        sizes = [t.numel() * t.element_size() for t in tensors]
        large = tuple(i for i, size in enumerate(sizes) if size >= SMALL_BYTES)
        chunks = plan_chunks([sizes[i] for i in large], CHUNK_BYTES)
        named = tuple(Chunk(large[c.tensor], c.offset_bytes, c.bytes) for c in chunks)
        return cls(_packs(sizes), large, named)


def _packs(sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    packs: list[list[int]] = []
    room = 0
    for i, size in enumerate(sizes):
        if size >= SMALL_BYTES:
            continue
        if size > room or not packs:
            packs.append([])
            room = PACK_BYTES_MAX
        packs[-1].append(i)
        room -= size
    return tuple(tuple(pack) for pack in packs)


# ---------------------------------------------------------------- memory


def _landing(tensor: torch.Tensor, staged: bool) -> torch.Tensor:
    """Where the bytes of `tensor` arrive: its own memory, or a buffer to copy from afterwards."""
    size = tensor.numel() * tensor.element_size()
    if staged or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return torch.empty(size, dtype=torch.uint8, device=tensor.device)
    return byte_view(tensor)


def _shares_memory(tensor: torch.Tensor, landed: torch.Tensor) -> bool:
    return tensor.numel() == 0 or tensor.data_ptr() == landed.data_ptr()


def _put(tensor: torch.Tensor, landed: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.detach().copy_(landed.view(tensor.dtype).view(tensor.shape))


def _cut(view: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    return view.narrow(0, chunk.offset_bytes, chunk.bytes)


def _keep(outstanding: deque[tuple[Any, torch.Tensor]], work: Any, piece: torch.Tensor) -> None:
    """Hold the piece until it has left, and the window to its size."""
    outstanding.append((work, piece))
    if len(outstanding) > WINDOW:
        outstanding.popleft()[0].wait()
