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
        self._made = [(o, _by_parameter(o, self.places, held)) for o in self._optimizers]
        self._whole = [tensor for tensor in held if not is_distributed(tensor)]
        self._cut = [tensor for tensor in held if is_distributed(tensor)]
        self._addresses = self._look()
        self._entries = self._count()

    def still_true(self) -> bool:
        """Is every tensor still in its place, and none beside them? Reads no bytes."""
        if self._entries != self._count():
            return False
        for optimizer, made in self._made:
            states = state_of(optimizer)
            for parameter, entries in made:
                state = states.get(parameter, {})
                if any(state.get(key) is not held for key, held in entries):
                    return False
        return self._addresses == self._look()

    def _look(self) -> list[int]:
        """Where each of them lies; of a DTensor the part that this rank has."""
        # Asked in each step: whoever asks every tensor whether it is a DTensor pays for that.
        whole = [held.data_ptr() for held in self._whole]
        return whole + [held._local_tensor.data_ptr() for held in self._cut]

    def _count(self) -> list[int]:
        return [sum(map(len, state_of(optimizer).values())) for optimizer in self._optimizers]


def _of_optimizer(name: str, optimizer: torch.optim.Optimizer) -> Iterator[Place]:
    for index, parameter in enumerate(parameters_of(optimizer)):
        state = state_of(optimizer).get(parameter, {})
        for key in sorted(state):
            if isinstance(state[key], torch.Tensor):
                yield Place(f"{name}.{index}.{key}", parameter, optimizer, key)


def _by_parameter(
    optimizer: torch.optim.Optimizer, places: Iterable[Place], held: Iterable[Any]
) -> list[tuple[torch.Tensor, list[tuple[str, Any]]]]:
    """An optimizer's state as it is kept: a parameter is looked up once, not once per tensor."""
    found: dict[torch.Tensor, list[tuple[str, Any]]] = {}
    for place, tensor in zip(places, held, strict=True):
        if place.optimizer is optimizer:
            found.setdefault(place.parameter, []).append((place.key, tensor))
    return list(found.items())
