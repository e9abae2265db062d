"""Who holds the same state: for each registered tensor the ranks whose bytes should be alike.

Each rank reads its own view off the objects that say it: a DTensor's mesh and placements, DDP's
process group, or `held_by`. Views are exchanged once and closed over the world, so that a tensor
replicated along one mesh by DTensor and along another by DDP is known to be held by both. What no
object speaks of is held by all, as in plain DDP; digests confirm all of it later (registry.py).

    local view of rank 0: {0, 2}     of rank 1: {1, 3}     …     =>  portions 0-2/2 and 1-3/2

Must never: take two ranks for alike that no object relates, or differ between ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from keepstep import portion
from keepstep.errors import ConfigError

_TAG = "_keepstep_held_by"
_PLAIN = (torch.Tensor, nn.Parameter)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor that this rank holds: of a DTensor its own part, in place."""
    if type(tensor) in _PLAIN or not is_distributed(tensor):
        return tensor
    with torch.no_grad():
        part: Any = tensor.detach()
        held: torch.Tensor = part.to_local()
    return held


def is_distributed(tensor: Any) -> bool:
    """Is it a DTensor? By its looks: a job without any must not pay for the import."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "placements")


def held_by(what: nn.Module | torch.Tensor, ranks: Iterable[int]) -> None:
    """Declare which ranks hold the same values, where no DTensor and no DDP says it.

    For layers that are cut by hand, as Megatron does. Call it on every rank before the first step.
    """
    holders = tuple(sorted(set(ranks)))
    if not holders:
        raise ConfigError("held_by needs the ranks that hold this state, this rank among them")
    tensors = [what] if isinstance(what, torch.Tensor) else [*what.parameters(), *what.buffers()]
    for tensor in tensors:
        setattr(tensor, _TAG, holders)


def is_cut(module: nn.Module) -> bool:
    """Does any tensor of the module live in parts, as far as this rank can see?"""
    tensors = [*module.parameters(), *module.buffers()]
    return any(_spec(tensor) is not None or hasattr(tensor, _TAG) for tensor in tensors)


class Views:
    """This rank's own view of who holds its modules' tensors."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, frozenset(range(world))
        self._ddp: dict[int, frozenset[int]] = {}

    def note(self, module: nn.Module) -> None:
        """Look at a module's DDP before it runs: over a mesh, DDP hides parameters as it does."""
        for ddp in module.modules():
            if isinstance(ddp, DistributedDataParallel):
                ranks = frozenset(dist.get_process_group_ranks(ddp.process_group))
                for tensor in (*ddp.module.parameters(), *ddp.module.buffers()):
                    self._ddp[id(tensor)] = ranks

    def of(self, tensor: torch.Tensor) -> str:
        """The portion that this rank sees for a tensor."""
        return portion.name_of(self._ranks(tensor))

    def knows(self, tensor: torch.Tensor) -> bool:
        """Does any object speak of this very tensor?"""
        said = hasattr(tensor, _TAG) or _spec(tensor) is not None
        return said or id(tensor) in self._ddp

    def _ranks(self, tensor: torch.Tensor) -> frozenset[int]:
        declared = getattr(tensor, _TAG, None)
        if declared is not None:
            if self._rank not in declared:
                raise ConfigError(f"held_by names {declared} for state of rank {self._rank}")
            return frozenset(declared)
        spec, replicas = _spec(tensor), self._ddp.get(id(tensor))
        if spec is None:
            return self._world if replicas is None else replicas
        return _alike(spec, self._rank) | (replicas or frozenset())


def _spec(tensor: Any) -> Any:
    """A DTensor's mesh and placements. DDP over a mesh makes plain parameters of DTensors, and
    leaves the description with them."""
    if is_distributed(tensor):
        return tensor._spec
    return getattr(tensor, "_st_info", None)


def _alike(spec: Any, rank: int) -> frozenset[int]:
    """The ranks of the mesh that differ from this one along replicated dimensions only."""
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:
        return frozenset((rank,))
    at = tuple(
        slice(None) if placement.is_replicate() else place
        for placement, place in zip(spec.placements, coordinate, strict=True)
    )
    found: list[int] = spec.mesh.mesh[at].reshape(-1).tolist()
    return frozenset(found)


# ---------------------------------------------------------------- what the world agreed on


@dataclass(slots=True)
class Holders:
    """Into which portions the world is parted, for each registered tensor. The same on all ranks.

    Optimizer state goes by the name of its parameter's place in the optimizer: "optimizer.3".
    """

    everybody: str
    classes: tuple[tuple[str, ...], ...] = ()
    of: dict[str, int] = field(default_factory=dict)
    _found: dict[tuple[int, int], str] = field(default_factory=dict, repr=False)
    _held: dict[int, tuple[str, ...]] = field(default_factory=dict, repr=False, compare=False)
    """By rank. Never stale: what the world agrees on anew is another object."""

    @classmethod
    def alike(cls, world: int) -> Holders:
        """Plain DDP: everybody holds everything."""
        return cls(portion.name_of(range(world)))

    @property
    def parted(self) -> bool:
        """Is some state not held by all?"""
        return any(parts != (self.everybody,) for parts in self.classes)

    def portion(self, key: str, rank: int) -> str:
        number = self.of.get(key)
        if number is None:
            return self.everybody
        found = self._found.get((number, rank))
        if found is None:
            parts = self.classes[number]
            found = next((p for p in parts if portion.holds(p, rank)), self.everybody)
            self._found[number, rank] = found
        return found

    def portions(self, rank: int) -> tuple[str, ...]:
        """What a rank holds, by name."""
        known = self._held.get(rank)
        if known is None:
            found = {p for parts in self.classes for p in parts if portion.holds(p, rank)}
            known = self._held[rank] = tuple(sorted(found or {self.everybody}))
        return known

    def narrowest(self, rank: int) -> str:
        """The portion that the fewest others hold: plain values, which may go with it, and the
        step records come from one of those."""
        return min(self.portions(rank), key=lambda p: (_count(p), p))

    def all(self) -> tuple[str, ...]:
        """Every portion of the job."""
        found = {p for parts in self.classes for p in parts}
        return tuple(sorted(found or {self.everybody}))

    def is_lonely(self, key: str) -> bool:
        number = self.of.get(key)
        return number is not None and any(_count(p) == 1 for p in self.classes[number])

    def lonely(self) -> tuple[str, ...]:
        """Portions with one holder: nobody can give them back."""
        return tuple(p for p in self.all() if _count(p) == 1 and self.everybody != p)

    def to_plain(self) -> dict[str, Any]:
        return {"everybody": self.everybody, "classes": self.classes, "of": self.of}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Holders:
        classes = tuple(tuple(str(p) for p in parts) for parts in plain["classes"])
        return cls(plain["everybody"], classes, {str(k): int(n) for k, n in plain["of"].items()})


def _count(name: str) -> int:
    return sum(len(run) for run in portion.runs_of(name))


@dataclass(frozen=True, slots=True)
class View:
    """One rank's view, as it is exchanged: for each key, which of its sets holds it."""

    keys: tuple[str, ...]
    sets: tuple[str, ...]
    of: tuple[int, ...]

    @classmethod
    def make(cls, named: Sequence[tuple[str, str]]) -> View:
        sets = tuple(dict.fromkeys(seen for _, seen in named))
        numbers = {seen: number for number, seen in enumerate(sets)}
        return cls(tuple(k for k, _ in named), sets, tuple(numbers[seen] for _, seen in named))

    def row(self, *, whole: bool) -> dict[str, Any]:
        """Keys in full only if the ranks' differ: they are long and nearly always alike."""
        digest = hashlib.sha256(json.dumps(self.keys).encode()).hexdigest()
        return {"digest": digest, "sets": self.sets, "of": self.of} | (
            {"keys": self.keys} if whole else {}
        )

    @classmethod
    def from_row(cls, row: Mapping[str, Any], keys: Sequence[str]) -> View:
        return cls(tuple(row.get("keys", keys)), tuple(row["sets"]), tuple(row["of"]))


def agree(views: Sequence[View]) -> Holders:
    """What all views together say; `views` holds each rank's. Pure."""
    everybody = portion.name_of(range(len(views)))
    patterns: dict[tuple[tuple[str, ...], tuple[int, ...]], list[int]] = {}
    for rank, view in enumerate(views):
        patterns.setdefault((view.keys, view.of), []).append(rank)
    # Nearly all ranks have the same pattern, so the keys fall into few classes, and each class
    # is looked at once, not once per key and rank.
    signatures: dict[str, list[tuple[int, int]]] = {}
    for number, (keys, of) in enumerate(patterns):
        for key, seen in zip(keys, of, strict=True):
            signatures.setdefault(key, []).append((number, seen))
    ranks_of = list(patterns.values())
    classes: dict[tuple[tuple[int, int], ...], int] = {}
    parted: list[tuple[str, ...]] = []
    found: dict[str, int] = {}
    for key, signature in signatures.items():
        known = classes.get(tuple(signature))
        if known is None:
            seen_sets = {
                views[rank].sets[seen] for number, seen in signature for rank in ranks_of[number]
            }
            known = classes[tuple(signature)] = len(parted)
            parted.append(close(seen_sets))
        found[key] = known
    return Holders(everybody, tuple(parted), found)


def close(sets: Iterable[str]) -> tuple[str, ...]:
    """Sets that share a rank are one. Pure."""
    parent: dict[int, int] = {}

    def root(rank: int) -> int:
        while parent.setdefault(rank, rank) != rank:
            parent[rank] = parent[parent[rank]]
            rank = parent[rank]
        return rank

    for name in sets:
        first, *others = portion.holders_of(name)
        for other in others:
            parent[root(other)] = root(first)
        root(first)
    members: dict[int, list[int]] = {}
    for rank in sorted(parent):
        members.setdefault(root(rank), []).append(rank)
    return tuple(sorted(portion.name_of(ranks) for ranks in members.values()))


def find_private(rows: list[list[tuple[str, str]]], holders: Holders) -> set[str]:
    """Names whose digests differ between ranks that should hold them alike. Pure.

    `rows` holds each rank's digests. A name is private on all ranks or on none, so that everybody
    means the same by what is shared. What came after all had agreed on holders (a buffer that a
    forward pass registers), and is not on every rank, is private, too.
    """
    first: dict[tuple[str, str], str] = {}
    late: dict[str, int] = {}
    found = set()
    for rank, row in enumerate(rows):
        for name, value in row:
            key = name if name in holders.of else name.rpartition(".")[0]
            if first.setdefault((name, holders.portion(key, rank)), value) != value:
                found.add(name)
            if holders.of and key not in holders.of:
                late[name] = late.get(name, 0) + 1
    return found | {name for name, count in late.items() if count < len(rows)}
