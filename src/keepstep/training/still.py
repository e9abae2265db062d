"""Does what a rank holds lie still from one update to the next? Seen without reading it all.

    update | remember   …the program's own time…   moved? | record | update

No sign sees everything, so there are three. Tensors in their places: what was replaced. Versions,
of a DTensor and of its part: what torch's operations did. A few bytes of each, from all over it:
what whole tensors were given past any version, by `.data`, NumPy, torch._foreach_* on DTensors or a
checkpoint that is loaded in place. Plain counters are looked at where an optimizer has such. A
write to a few elements that raises no version is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from keepstep.training.optimizers import counters_of
from keepstep.training.raw import tensor_bytes
from keepstep.training.registry import Registry

SAMPLES = 16
"""Bytes of a tensor that are looked at. Each may be a miss of the cache, twice in each step."""

Look = tuple[tuple[int, ...], tuple[int, ...], bytes, str]


class Still:
    """Watches one portion of a registry, but buffers: only optimizers should change it."""

    def __init__(self, registry: Registry, portion: str) -> None:
        self._registry = registry
        self._portion = portion
        self._known: Look | None = None
        self._of: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._addresses: tuple[int, ...] = ()
        self._counters: list[torch.Tensor] = []
        self._samples: list[list[torch.Tensor]] = []

    def remember(self) -> None:
        """It is as it should be. From here on nothing may change it."""
        self._known = self._look()

    def forget(self) -> None:
        """Nobody asks for now."""
        self._known, self._of, self._addresses = None, [], ()
        self._counters, self._samples = [], []

    def moved(self) -> bool:
        """Has it changed since? Not before it was remembered."""
        return self._known is not None and self._known != self._look()

    def _look(self) -> Look:
        # What was replaced, or lies elsewhere now, makes another list.
        self._registry.look_again()
        of = self._registry.lasting(self._portion)
        if of is not self._of:
            self._of, self._addresses = of, tuple([part.data_ptr() for _, part in of])
            self._counters = [tensor for held, part in of for tensor in _counting(held, part)]
            self._samples = _alike([_sample(part) for _, part in of])
        return (
            self._addresses,
            tuple([tensor._version for tensor in self._counters]),
            b"".join([tensor_bytes(torch.cat(some)) for some in self._samples]),
            "".join(map(counters_of, self._registry.optimizers.values())),
        )


def versions(held: Any) -> tuple[int, ...]:
    """What torch's operations raise, where a tensor is the program's own; empty: it is gone."""
    counted = _counting(held, held) if isinstance(held, torch.Tensor) else ()
    return tuple([tensor._version for tensor in counted])


def _counting(held: torch.Tensor, part: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Where versions are counted: of a DTensor for it, for its part, and for what was taken from
    it before, each by itself. What is taken from any other tensor counts with it."""
    inner = getattr(held, "_local_tensor", None)
    return (held,) if inner is None else (held, inner, part)


def _sample(part: torch.Tensor) -> torch.Tensor | None:
    """Some bytes of the memory that a tensor lies in, in place, however it is laid out there."""
    storage = part.untyped_storage()
    first = part.storage_offset() * part.element_size()
    length = min(part.numel() * part.element_size(), storage.nbytes() - first)
    if length <= 0:
        return None
    # Odd, so that every byte of an element has its turn: small changes are in the low ones.
    stride = (length // SAMPLES) | 1
    whole = torch.empty(0, dtype=torch.uint8, device=part.device)
    return whole.set_(storage, first, (-(-length // stride),), (stride,))


def _alike(samples: Iterable[torch.Tensor | None]) -> list[list[torch.Tensor]]:
    """By their sizes and strides: torch joins those that are alike several times as fast."""
    found: dict[tuple[object, ...], list[torch.Tensor]] = {}
    for sample in samples:
        if sample is not None:
            found.setdefault((sample.device, sample.shape, sample.stride()), []).append(sample)
    return list(found.values())
