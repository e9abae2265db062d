"""Where the buffers of registered modules are found: looked up each time.

A forward pass may change a buffer, put another in its place, make one or drop one. Places are
listed anew when there are more or fewer of them than there were; modules that are added later are
found when somebody looks at everything anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from keepstep.training.holders import is_distributed, local_of


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """One buffer's place in its module."""

    name: str
    module: nn.Module
    key: str

    def held(self) -> torch.Tensor | None:
        """What lies there now, as the program has it."""
        return self.module._buffers.get(self.key)

    def put(self, held: torch.Tensor | None, value: torch.Tensor | None = None) -> None:
        """What lay there before, as it was then."""
        if held is not None and value is not None:
            part = local_of(held)
            if (part.shape, part.dtype) != (value.shape, value.dtype):
                # It was given another size in place, and nothing is copied into that.
                held = value.clone()
            elif not same_bytes(value, part):
                with torch.no_grad():
                    part.copy_(value)
        self.module._buffers[self.key] = held

    def conform(self, dtype: str, shape: list[int]) -> None:
        """Make room for what a source has, if it differs from what is here in its shape alone."""
        held = self.held()
        if held is None or is_distributed(held):
            return
        if str(held.dtype) == dtype and list(held.shape) != shape:
            self.module._buffers[self.key] = held.new_empty(shape)


class Buffers:
    """Of all registered modules, in canonical order."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._places: list[BufferPlace] = []
        self._rooms: list[dict[str, torch.Tensor | None]] = []
        self._count = -1

    def look_anew(self) -> None:
        """Modules may have been added, or a buffer's place taken by one of another name."""
        self._count = -1

    def places(self) -> list[BufferPlace]:
        # Counted at each step: to walk through all modules takes a hundred times as long.
        if self._count != sum(map(len, self._rooms)):
            self._places = list(self.find())
            self._rooms = [inner._buffers for m in self._modules.values() for inner in m.modules()]
            self._count = sum(map(len, self._rooms))
        return self._places

    def held(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Name, the buffer as the program has it, and the part of it that this rank has."""
        found = []
        for place in self.places():
            buffer = place.held()
            if buffer is not None:
                found.append((place.name, buffer, local_of(buffer)))
        return found

    def untrained(self) -> list[nn.Module]:
        """Modules with buffers that are not in training mode."""
        return [place.module for place in self.places() if not place.module.training]

    def statistics(self) -> set[str]:
        """Names of buffers that torch's own norms write to without raising a version."""
        return {p.name for p in self.places() if hasattr(p.module, "track_running_stats")}

    def conform(self, kinds: Mapping[str, tuple[str, list[int]]]) -> None:
        """Of those that are named."""
        for place in self.places():
            if place.name in kinds:
                place.conform(*kinds[place.name])

    def find(self) -> Iterator[BufferPlace]:
        """Through all modules."""
        for name, module in self._modules.items():
            for path, inner in module.named_modules():
                for key in inner._buffers:
                    yield BufferPlace(".".join(p for p in (name, path, key) if p), inner, key)


def put_in_order(places: Iterable[BufferPlace]) -> None:
    """One that was dropped came back as its module's last, and digests go by the order."""
    wanted: dict[int, tuple[dict[str, torch.Tensor | None], list[str]]] = {}
    for place in places:
        held = place.module._buffers
        wanted.setdefault(id(held), (held, []))[1].append(place.key)
    for held, keys in wanted.values():
        if list(held)[: len(keys)] != keys:
            # What is not among them came later: to the end with it, as where it was made.
            for key in [*keys, *(key for key in list(held) if key not in keys)]:
                held[key] = held.pop(key)


def same_bytes(left: torch.Tensor | None, right: torch.Tensor) -> bool:
    if left is None or left.shape != right.shape or left.dtype != right.dtype:
        return False
    # Compared as bytes: a NaN equals itself here.
    return torch.equal(
        left.reshape(-1).view(torch.uint8),
        right.detach().contiguous().reshape(-1).view(torch.uint8),
    )
