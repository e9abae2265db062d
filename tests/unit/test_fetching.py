"""Fetching may draw: whoever takes a boundary's entry draws once, also if it has its batches."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from keepstep.training import keeper as keeping
from keepstep.training.boundary import Boundary
from keepstep.training.finding import take_private
from keepstep.training.keeper import Keeper
from keepstep.training.loader import Cursor
from keepstep.training.randomness import Randomness, read_randomness
from keepstep.training.recorder import Recorder
from keepstep.training.registry import Registry

BATCHES = 4


class Augmented(Dataset[torch.Tensor]):
    """Draws for each sample, in the training process, from every kind of generator."""

    def __init__(self, own: torch.Generator) -> None:
        self.own = own
        self.touched = 0

    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.touched += 1
        own = torch.rand((), generator=self.own)
        drawn = [torch.rand(()), random.random(), numpy.random.rand(), own]
        return torch.tensor([float(index), *drawn])


class Rank:
    """As much of a rank as records entries, fetches and draws."""

    def __init__(self) -> None:
        self.own = torch.Generator()
        self.registry = Registry()
        self.registry.add("own", self.own)
        self.data = Augmented(self.own)
        sampler: Any = DistributedSampler(self.data, 1, 0)
        self.cursor = Cursor(DataLoader(self.data, 2, sampler=sampler), 3, None)
        self.boundary = Boundary(self.registry)
        self.recorder = Recorder(self)  # type: ignore[arg-type]
        self.inbox = SimpleNamespace(due=lambda _: False)
        self.opened: list[bytes] = []
        self._here = 0
        # For a comparison, which finds nothing.
        self.groups: Any = None
        self.rest = SimpleNamespace(every=0)
        self.generation = 0

    def start(self) -> Rank:
        for generator in (torch.default_generator, self.own):
            generator.manual_seed(5)
        random.seed(5)
        numpy.random.seed(5)
        return self

    def step(self) -> None:
        """A step that draws in its forward pass, too."""
        self.cursor.peek()
        self.boundary.begin()
        torch.rand(3)
        torch.rand(3, generator=self.own)
        self.cursor.advance()
        self.boundary.applied()

    def take(self, payload: bytes, boundary: int) -> None:
        take_private(self, payload, boundary)  # type: ignore[arg-type]

    def open_mirror(self, boundary: int, payload: bytes, generation: int) -> None:
        self.opened.append(payload)

    def is_after_fetch(self) -> tuple[list[list[float]], Randomness, list[int]]:
        group = self.cursor.peek()
        assert group is not None
        return group[0].tolist(), read_randomness(), self.own.get_state().tolist()


def run_to(boundary: int) -> tuple[Rank, bytes]:
    """A rank without faults, and its entry of a boundary."""
    rank = Rank().start()
    for _ in range(boundary):
        rank.step()
    return rank, rank.recorder.entry()


@pytest.mark.parametrize("boundary", [BATCHES - 1, BATCHES, 0])
def test_a_joiner_that_takes_its_entry_twice_draws_once(boundary: int) -> None:
    # In the middle of a pass, where one turns, and at the very beginning.
    rank, entry = run_to(boundary)
    expected = rank.is_after_fetch()
    joiner = Rank()
    for _ in range(2):
        joiner.take(entry, boundary)
        assert joiner.is_after_fetch() == expected
    assert joiner.data.touched == 2, "what was fetched is not fetched again"


@pytest.mark.parametrize("boundary", [BATCHES - 1, BATCHES])
def test_a_survivor_that_receives_at_its_own_boundary_keeps_what_it_drew(boundary: int) -> None:
    rank, entry = run_to(boundary)
    expected = rank.is_after_fetch()
    touched = rank.data.touched
    rank.take(entry, boundary)
    assert rank.is_after_fetch() == expected
    assert rank.data.touched == touched


def test_a_survivor_that_an_update_tore_is_where_its_attempt_began() -> None:
    rank, entry = run_to(2)
    expected = rank.is_after_fetch()
    rank.boundary.begin()
    torch.rand(3)
    torch.rand(3, generator=rank.own)
    rank.boundary.grads_ready()
    assert not rank.boundary.unwind()
    assert rank.boundary.torn
    rank.take(entry, 2)
    assert rank.is_after_fetch() == expected


def test_a_survivor_that_receives_its_own_step_has_the_next_ones_batches_before_it() -> None:
    ahead, entry = run_to(3)
    expected = ahead.is_after_fetch()
    behind, _ = run_to(2)
    behind.cursor.peek()
    behind.take(entry, 3)
    assert behind.is_after_fetch() == expected


@pytest.mark.parametrize("again", [False, True])
def test_an_entry_that_is_made_after_the_fetch_is_from_before_it(
    monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    monkeypatch.setattr(keeping, "exchange_rows", lambda _, row: [row, row])
    monkeypatch.setattr(keeping, "side_barrier", lambda _: None)
    rank: Any = run_to(1)[0]
    rank.registry.add("model", nn.BatchNorm1d(2))
    Keeper.follow_orders(rank)
    expected = rank.is_after_fetch()
    Keeper._compare(rank)
    assert rank.is_after_fetch() == expected, "looking leaves no trace"
    if again:
        # A fault in this step, which this rank survives or not: all come here once more.
        other: Any = Rank()
        other.registry.add("model", nn.BatchNorm1d(2))
        for each in (rank, other):
            each.take(rank.opened[-1], 1)
            each.boundary.arrive(1)
            assert each.is_after_fetch() == expected
            Keeper.follow_orders(each)
            Keeper._compare(each)
        rank = other
    joiner = Rank()
    joiner.registry.add("model", nn.BatchNorm1d(2))
    joiner.take(rank.opened[-1], 1)
    assert joiner.is_after_fetch() == expected
