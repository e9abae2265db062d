"""Who sends what to whom, carried out: the transfer part of a re-form, on this rank.

A source first tells its target what cannot be read off tensors: the layout of the state, plain
values, which tensors are private, and the last step records. Then the tensors move in place.
Waves are separated by a barrier, so that the last home of a tensor is never overwritten.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from keepstep import sabotage, wire
from keepstep.model import Move
from keepstep.training import covering, sealed_side, transport
from keepstep.training.digest import digest
from keepstep.training.groups import Groups, GroupsBroken, decode_log, encode_log, merge_logs
from keepstep.training.holders import Holders, View, agree
from keepstep.training.listing import Place
from keepstep.training.raw import size_bytes, tensor_bytes
from keepstep.training.registry import Registry
from keepstep.training.side import exchange_rows, receive_json, send_json

if TYPE_CHECKING:
    from keepstep.training.keeper import Keeper

SLICE_BYTES = 8 * 1024
"""A step's share of the rotating digest: little enough to vanish in a step."""
_AGREE_SECONDS_MAX = 10.0
_AGREE_PATIENCE = timedelta(milliseconds=100)


Check = Callable[[Mapping[str, str]], bool]
"""Is what this rank holds right in every portion, given the digests of what it received? See
recovery."""


@dataclass(slots=True)
class _Landed:
    """One portion that arrived, beside the state that it is to replace or already in its place."""

    move: Move
    names: list[str]
    tensors: list[torch.Tensor]
    landing: list[torch.Tensor]
    digests: list[str]
    header: dict[str, Any]

    @property
    def received(self) -> dict[str, str]:
        return dict(zip(self.names, self.digests, strict=True))


def move_state(keeper: Keeper, reform: wire.Reform, check: Check) -> dict[str, str]:
    """This rank's part in all moves. Returns the digests of what it received, by name."""
    received: dict[str, str] = {}
    keeper.moved = (0, 0.0)
    sealed_side.begin(keeper, reform.membership.secret)
    waves = sorted({move.wave for move in reform.moves})
    for wave in waves:
        beside: list[_Landed] = []
        began = len(received)
        for move in reform.moves:
            if move.wave != wave:
                continue
            if move.target == keeper.place.rank:
                if move.rebuilt:
                    received |= _rebuild(keeper, move)
                    continue
                landed = _receive(keeper, move)
                if move.staged:
                    beside.append(landed)
                else:
                    received |= landed.received
            elif keeper.place.rank in move.sources:
                _send(keeper, move, reform.boundary)
        received |= _take_in(keeper, reform, beside)
        if wave != waves[-1]:
            fine = len(received) == began or check(received)
            if not all(row["fine"] for row in exchange_rows(keeper.groups, {"fine": fine})):
                # The next wave would overwrite older state that may be the last that is whole.
                break
    return received


def _header(keeper: Keeper) -> dict[str, Any]:
    """What cannot be read off tensors."""
    registry = keeper.registry
    return {
        "holders": registry.holders.to_plain(),
        "private": sorted(registry.private),
        "syncs": registry.syncs(),
        "late": keeper.recorder.late,
        "plain": registry.plain(),
        "records": keeper.log.records(),
        "committed": keeper.commits.newest,
    }


def _rebuild(keeper: Keeper, move: Move) -> dict[str, str]:
    """A portion that nobody holds, from its mirror; digested here, since nobody else can."""
    began = time.monotonic()
    header = covering.rebuild(keeper, move)
    shared = keeper.registry.shared(move.portion)
    tensors = [tensor for _, tensor in shared]
    digests = [digest(tensor) for tensor in tensors]
    _account(keeper, tensors, began)
    landed = _Landed(move, [name for name, _ in shared], tensors, tensors, digests, header)
    _put(keeper, landed)
    # What was made again on the way counts as it is now, also where others hold it too.
    beside = {name: digest(tensor) for name, tensor in keeper.registry.companions(move.portion)}
    return landed.received | beside


def _send(keeper: Keeper, move: Move, boundary: int) -> None:
    registry, side = keeper.registry, sealed_side.side_of(keeper)
    if move.rebuilt:
        assert keeper.covering is not None, "who says that it covers a portion has a cover"
        keeper.covering.send(move, boundary, _header(keeper))
        return
    if keeper.place.rank == move.sources[0]:
        header = {**_header(keeper), "layout": registry.layout(move.portion)}
        send_json(side, header, int(move.target))
    tensors = [t for _, t in registry.shared(move.portion)]
    transport.send(side, tensors, move, keeper.place.rank)


def _receive(keeper: Keeper, move: Move) -> _Landed:
    registry, side = keeper.registry, sealed_side.side_of(keeper)
    header = receive_json(side, int(move.sources[0]))
    keeper.adopt_header(header)
    layout = [(n, d, s, c) for n, d, s, c in header["layout"]]
    if registry.layout(move.portion) != layout:
        # Making room for what comes changes what is here, also where it is to land beside it.
        keeper.tear()
    registry.conform(layout, move.portion)
    shared = registry.shared(move.portion)
    tensors = [tensor for _, tensor in shared]
    if not move.staged:
        keeper.tear()
    began = time.monotonic()
    landing, digests = transport.land(side, tensors, move, move.staged)
    _account(keeper, tensors, began)
    landed = _Landed(move, [name for name, _ in shared], tensors, landing, digests, header)
    if not move.staged:
        _put(keeper, landed)
    return landed


def _account(keeper: Keeper, tensors: list[torch.Tensor], began: float) -> None:
    """One portion more that this rank received."""
    moved_bytes, seconds = keeper.moved
    size = sum(size_bytes(tensor) for tensor in tensors)
    keeper.moved = (moved_bytes + size, seconds + time.monotonic() - began)


def _take_in(keeper: Keeper, reform: wire.Reform, beside: list[_Landed]) -> dict[str, str]:
    """Staged portions replace an older whole state, all of them, only if all are the right ones."""
    received: dict[str, str] = {}
    for landed in beside:
        portion = landed.move.portion
        named = zip(landed.names, landed.digests, strict=True)
        found = keeper.registry.digest_of(portion, named, landed.header["plain"])
        if found != reform.digests.get(portion) and not sabotage.off("digest"):
            return {}  # The older state stands.
        received |= landed.received
    if beside:
        keeper.tear()
    for landed in beside:
        _put(keeper, landed)
    return received


def _put(keeper: Keeper, landed: _Landed) -> None:
    registry, header = keeper.registry, landed.header
    transport.put(landed.tensors, landed.landing)
    registry.digests_received(landed.received)
    if landed.move.portion == registry.holders.narrowest(keeper.place.rank):
        registry.load_plain(header["plain"], hidden=not landed.move.rebuilt)
        keeper.log.adopt(header["records"])
        keeper.commits.elsewhere(int(header["committed"]))


def agree_on_holders(groups: Groups, view: View) -> Holders:
    """Every rank's view of who holds what, closed over the world. A world collective."""
    rows = exchange_rows(groups, view.row(whole=False))
    if len({row["digest"] for row in rows}) > 1:
        rows = exchange_rows(groups, view.row(whole=True))
    return agree([View.from_row(row, view.keys) for row in rows])


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
        self._places: list[Place] = []
        self._kinds: list[tuple[int, torch.dtype]] = []
        self._ends: list[int] = []
        """How many slices there are up to the end of each tensor."""

    def next(self, registry: Registry, step: int) -> str:
        key = (*registry.layout_key(), len(registry.private))
        if key != self._key:
            self._key = key
            self._count(registry)
        if not self._places:
            return ""
        # Counted, not listed: of a gigabyte there are a hundred thousand, and a joiner meets them
        # for the first time in the step that everybody waits for.
        number = step % self._ends[-1]
        index = bisect.bisect_right(self._ends, number)
        # Looked up at each step: the program may have put another one in its place.
        tensor = self._places[index].now()
        if tensor is None or _kind(tensor) != self._kinds[index]:
            registry.look_anew()
            return self.next(registry, step)
        flat = tensor.detach().reshape(-1)
        per = _per_slice(self._kinds[index])
        first = (number - (self._ends[index - 1] if index else 0)) * per
        raw = tensor_bytes(flat[first : first + per])
        return hashlib.blake2b(raw, digest_size=16).hexdigest()

    def _count(self, registry: Registry) -> None:
        listed = [
            (place, _kind(tensor))
            for place, (name, tensor) in zip(registry.places(), registry.fixed(), strict=True)
            if name not in registry.private
        ]
        self._places = [place for place, _ in listed]
        self._kinds = [kind for _, kind in listed]
        counts = (-(-max(1, kind[0]) // _per_slice(kind)) for kind in self._kinds)
        self._ends = list(itertools.accumulate(counts))


def _kind(tensor: torch.Tensor) -> tuple[int, torch.dtype]:
    return tensor.numel(), tensor.dtype


def _per_slice(kind: tuple[int, torch.dtype]) -> int:
    return max(1, SLICE_BYTES // kind[1].itemsize)
