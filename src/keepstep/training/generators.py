"""All generators of a rank at one moment: those that nobody names, and those that were registered.

A step's batches are fetched between its boundary and its attempt, and fetching may draw: a dataset
without workers that augments, or a loader that begins a pass. An entry holds the generators from
before that. So whoever fetches draws, and whoever has its batches already must not go back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from keepstep.training.randomness import Randomness, read_randomness, restore_randomness
from keepstep.training.registry import Registry


@dataclass(frozen=True, slots=True)
class Generators:
    """The states of all of them."""

    unnamed: Randomness
    registered: dict[str, torch.Tensor]


def read_generators(registry: Registry) -> Generators:
    registered = {name: each.get_state() for name, each in registry.generators.items()}
    return Generators(read_randomness(), registered)


def put_back(registry: Registry, states: Generators) -> None:
    restore_randomness(states.unnamed)
    for name, state in states.registered.items():
        registry.generators[name].set_state(state)


@contextlib.contextmanager
def as_they_were(registry: Registry, states: Generators) -> Iterator[None]:
    """Other states for as long as one looks at them."""
    now = read_generators(registry)
    put_back(registry, states)
    try:
        yield
    finally:
        put_back(registry, now)
