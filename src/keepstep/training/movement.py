"""Who sends what to whom, carried out: the transfer part of a re-form, on this rank.

A source first tells its target what cannot be read off tensors: the layout of the state, plain
values, which tensors are private, and the last step records. Then the tensors move in place.
Waves are separated by a barrier, so that the last home of a tensor is never overwritten.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from keepstep import sabotage, wire
from keepstep.model import Move
from keepstep.training import transport
from keepstep.training.groups import Groups, GroupsBroken, decode_log, encode_log, merge_logs
from keepstep.training.raw import tensor_bytes
from keepstep.training.registry import Registry

if TYPE_CHECKING:
    from keepstep.training.keeper import Keeper

_TAG_LENGTH, _TAG_HEADER = 21, 22
SLICE_BYTES = 8 * 1024
"""A step's share of the rotating digest: little enough to vanish in a step."""
_AGREE_SECONDS_MAX = 10.0
_AGREE_PATIENCE = timedelta(milliseconds=100)


Check = Callable[[Mapping[str, str]], str]
"""Digests what this rank holds, given the digests of what it received; see recovery."""


def move_state(keeper: Keeper, reform: wire.Reform, check: Check) -> dict[str, str]:
    """This rank's part in all moves. Returns the digests of what it received, by name."""
    received: dict[str, str] = {}
    keeper.moved = (0, 0.0)
    waves = sorted({move.wave for move in reform.moves})
    for wave in waves:
        landed: dict[str, str] = {}
        for move in reform.moves:
            if move.wave != wave:
                continue
            if move.target == keeper.place.rank:
                landed = received = _receive(keeper, move, reform.digest)
            elif keeper.place.rank in move.sources:
                _send(keeper, move)
        if wave != waves[-1]:
            fine = not landed or check(landed) == reform.digest
            if not all(row["fine"] for row in exchange_rows(keeper.groups, {"fine": fine})):
                # The next wave would overwrite older state that may be the last that is whole.
                break
    return received


def _send(keeper: Keeper, move: Move) -> None:
    registry, side = keeper.registry, keeper.groups.side
    if keeper.place.rank == move.sources[0]:
        header = {
            "layout": registry.layout(),
            "plain": registry.plain(),
            "private": sorted(registry.private),
            "records": keeper.log.records(),
            "committed": keeper.committed,
        }
        _send_json(side, header, int(move.target))
    tensors = [t for _, t in registry.shared()]
    transport.send(side, tensors, move, keeper.place.rank)


def _receive(keeper: Keeper, move: Move, wanted: str) -> dict[str, str]:
    registry, side = keeper.registry, keeper.groups.side
    header = _receive_json(side, int(move.sources[0]))
    registry.private = set(header["private"])
    registry.conform([(n, d, s) for n, d, s in header["layout"]])
    shared = registry.shared()
    names = [name for name, _ in shared]
    tensors = [tensor for _, tensor in shared]

    def agreed(digests: list[str]) -> bool:
        """Staged bytes replace an older whole state only if they are the right ones."""
        found = registry.digest_of(zip(names, digests, strict=True), header["plain"])
        right = found == wanted or sabotage.off("digest")
        if right:
            keeper.tear()
        return right

    if not move.staged:
        keeper.tear()
    began = time.monotonic()
    digests = transport.receive(side, tensors, move, verify=agreed if move.staged else None)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    keeper.moved = (size, time.monotonic() - began)
    received = dict(zip(names, digests, strict=True))
    if keeper.has_state:
        return received  # Staged bytes that were refused: the older state stands.
    registry.load_plain(header["plain"])
    keeper.log.adopt(header["records"])
    keeper.committed = int(header["committed"])
    registry.digests_received(received)
    return received


def _send_json(side: Any, value: object, target: int) -> None:
    raw = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    side.send([torch.tensor([raw.numel()])], target, _TAG_LENGTH).wait()
    side.send([raw], target, _TAG_HEADER).wait()


def _receive_json(side: Any, source: int) -> dict[str, Any]:
    length = torch.zeros(1, dtype=torch.int64)
    side.recv([length], source, _TAG_LENGTH).wait()
    raw = torch.empty(int(length), dtype=torch.uint8)
    side.recv([raw], source, _TAG_HEADER).wait()
    decoded: dict[str, Any] = json.loads(tensor_bytes(raw))
    return decoded


def exchange_rows(groups: Groups, row: object) -> list[Any]:
    """Every rank's row, on every rank. For rare moments: two small collectives."""
    world = torch.distributed.get_world_size()
    raw = json.dumps(row).encode()
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    groups.side.allgather([lengths], [torch.tensor([len(raw)])]).wait()
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    rows = [torch.zeros(longest, dtype=torch.uint8) for _ in range(world)]
    groups.side.allgather([rows], [padded]).wait()
    return [json.loads(tensor_bytes(r[: int(n)])) for r, n in zip(rows, lengths, strict=True)]


def largest(groups: Groups, number: int) -> int:
    """The largest of the ranks' numbers, on every rank."""
    agreed = torch.tensor([number])
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    groups.side.allreduce([agreed], options).wait()
    return int(agreed)


def side_barrier(groups: Groups) -> None:
    """Every rank has come to this point. Keepstep's own traffic, unseen by the user's groups."""
    groups.side.barrier().wait()


def agree_on_groups(groups: Groups, store: Any, overtaken: Callable[[], bool]) -> None:
    """Make the groups that any rank has made, so that all ranks re-form the same ones.

    Logs are stored by their content, so a large world stores few of them: ranks whose logs are
    alike, which is nearly always all of them, write the same key.
    """
    text = encode_log(groups.log())
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    if store.add(f"have/{name}", 1) == 1:
        store.set(f"log/{name}", text)
        store.append("names", name + ",")
    if store.add("posted", 1) == dist.get_world_size():
        store.set("complete", "1")
    deadline = time.monotonic() + _AGREE_SECONDS_MAX
    while not store.check(["complete"]):
        if overtaken() or time.monotonic() > deadline:
            raise GroupsBroken("not every rank came to agree on the groups")
        with contextlib.suppress(dist.DistStoreError):
            store.wait(["complete"], _AGREE_PATIENCE)
    names = {n for n in store.get("names").decode().split(",") if n}
    groups.replay(merge_logs(decode_log(store.get(f"log/{n}").decode()) for n in sorted(names)))


class SliceDigest:
    """A digest per step at a bounded cost: of one slice of the state, another one each time."""

    def __init__(self) -> None:
        self._key: tuple[int, ...] = ()
        self._slices: list[tuple[torch.Tensor, int]] = []

    def next(self, registry: Registry, step: int) -> str:
        key = (*registry.layout_key(), len(registry.private))
        if key != self._key:
            self._key = key
            self._slices = [
                (tensor.detach().reshape(-1), first)
                for name, tensor in registry.fixed()
                if name not in registry.private
                for first in range(0, max(1, tensor.numel()), _per_slice(tensor))
            ]
        if not self._slices:
            return ""
        flat, first = self._slices[step % len(self._slices)]
        raw = tensor_bytes(flat[first : first + _per_slice(flat)])
        return hashlib.blake2b(raw, digest_size=16).hexdigest()


def _per_slice(tensor: torch.Tensor) -> int:
    return max(1, SLICE_BYTES // tensor.element_size())
