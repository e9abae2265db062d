"""Where parameters and optimizer state are found, and whether they are still what was found there.

Most programs train the same tensors from the first step to the last, so they are listed once. Some
put others in their places: an optimizer loads an older state, moments are made anew, a parameter
gets other data. Whoever went on with what was listed would compare, send and save tensors that
nobody trains any more, and all ranks would agree on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from keepstep.training.holders import is_distributed, local_of
from keepstep.training.optimizers import parameters_of, state_of


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter's, or that of one tensor of its optimizer's state."""

    name: str
    parameter: torch.Tensor
    optimizer: torch.optim.Optimizer | None = None
    key: str = ""

    def now(self) -> torch.Tensor | None:
        """What this rank has there; None: there is no tensor any more."""
        found = self.held()
        return local_of(found.detach()) if isinstance(found, torch.Tensor) else None

    def held(self) -> Any:
        """The object itself."""
        if self.optimizer is None:
            return self.parameter
        return state_of(self.optimizer).get(self.parameter, {}).get(self.key)


class Listing:
    """All of them in canonical order, as they were at one moment."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.Tensor]] = (),
        optimizers: Mapping[str, torch.optim.Optimizer] | None = None,
    ) -> None:
        self._optimizers = list((optimizers or {}).values())
        self.places = [Place(name, parameter) for name, parameter in parameters]
        for name, optimizer in (optimizers or {}).items():
            self.places += _of_optimizer(name, optimizer)
        held = [place.held() for place in self.places]
        self.tensors = [
            (place.name, local_of(tensor.detach() if place.optimizer is None else tensor))
            for place, tensor in zip(self.places, held, strict=True)
        ]
        self.cut = {
            place.name
            for place, tensor in zip(self.places, held, strict=True)
            if place.optimizer is not None and is_distributed(tensor)
        }
        """Names of optimizer state that is DTensors: a receiver has to make the same."""
        moving = {id(p) for o in self._optimizers for p in parameters_of(o) if p.requires_grad}
        self.updated = {
            place.name
            for place in self.places
            if place.optimizer is not None or id(place.parameter) in moving
        }
        """Names of what an update changes."""
        self._held = [
            (place, tensor, _address(tensor))
            for place, tensor in zip(self.places, held, strict=True)
        ]
        self._entries = self._count()

    def still_true(self) -> bool:
        """Is every tensor still in its place, and none beside them? Reads no bytes."""
        if self._entries != self._count():
            return False
        states = {id(optimizer): state_of(optimizer) for optimizer in self._optimizers}
        for place, held, address in self._held:
            if place.optimizer is not None:
                state = states[id(place.optimizer)].get(place.parameter, {})
                if state.get(place.key) is not held:
                    return False
            if _address(held) != address:
                return False
        return True

    def _count(self) -> list[int]:
        return [sum(map(len, state_of(optimizer).values())) for optimizer in self._optimizers]


def _of_optimizer(name: str, optimizer: torch.optim.Optimizer) -> Iterator[Place]:
    for index, parameter in enumerate(parameters_of(optimizer)):
        state = state_of(optimizer).get(parameter, {})
        for key in sorted(state):
            if isinstance(state[key], torch.Tensor):
                yield Place(f"{name}.{index}.{key}", parameter, optimizer, key)


def _address(held: torch.Tensor) -> int:
    """Of the part that this rank has."""
    part: torch.Tensor = getattr(held, "_local_tensor", held)
    return part.data_ptr()
