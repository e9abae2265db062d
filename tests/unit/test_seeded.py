"""Random numbers of loader workers: seeded per sample and pass, or seen."""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

import keepstep
from keepstep.errors import ConfigError
from keepstep.training.forking import leave_garbage_alone
from keepstep.training.loader import Cursor
from keepstep.training.randomness import read_randomness, restore_randomness
from keepstep.training.registry import Registry

# torchdata calls it while torch deprecates it.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

leave_garbage_alone()


@pytest.fixture(autouse=True, scope="module")
def without_groups_of_other_tests() -> None:
    """Here workers are forked, and groups that wait for their collection have threads."""
    gc.collect()


class Drawing(Dataset[Any]):
    """Samples that are nothing but what is drawn for them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()), random.random(), numpy.random.rand()])


class Calm(Drawing):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield 1


def rows(cursor: Cursor) -> list[list[float]]:
    found = []
    while (group := cursor.peek()) is not None:
        found += group[0].tolist()
        cursor.advance()
    return found


def test_what_is_drawn_depends_on_seed_sample_and_pass_alone() -> None:
    data: Any = keepstep.seeded(Drawing(), 7)
    first = [data[i].tolist() for i in range(8)]
    torch.manual_seed(3)
    assert [data[i].tolist() for i in reversed(range(8))] == first[::-1]
    assert len({row[1] for row in first} | {row[2] for row in first}) == 16
    assert keepstep.seeded(Drawing(), 8)[0].tolist() != first[0]
    data.set_epoch(1)
    assert data[0].tolist() != first[0]


def test_the_callers_generators_are_not_touched() -> None:
    data = keepstep.seeded(Drawing(), 7)
    before = read_randomness()
    data[3]
    assert read_randomness() == before


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_joiner_gets_what_the_replaced_rank_would_have(kind: Any, persistent: bool) -> None:
    def loader(workers: int) -> Any:
        alive = persistent and workers > 0
        data = keepstep.seeded(Drawing(), 7)
        return kind(data, 2, num_workers=workers, persistent_workers=alive)

    whole = rows(Cursor(loader(2), 2, None))
    assert whole[:8] != whole[8:], "another pass, other numbers"
    # The number of workers does not matter, nor where one begins.
    joiner = Cursor(loader(1), 2, None)
    joiner.seek({"pass": 0, "index": 3, "samples": 6})
    assert rows(joiner) == whole[6:]
    assert rows(Cursor(loader(0), 2, None)) == whole


def walk(cursor: Cursor, own: torch.Generator) -> list[tuple[Any, ...]]:
    """Of each step: the place and the generators before the fetch, and the batch."""
    seen = []
    while True:
        here = cursor.position(), read_randomness(), own.get_state().tolist()
        group = cursor.peek()
        if group is None:
            return seen
        seen.append((*here, group[0].tolist()))
        torch.rand(1)
        cursor.advance()


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("owns", [False, True], ids=["global", "own"])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("at", [1, 4, 6])
def test_a_joiners_loader_draws_its_workers_seed_when_the_replaced_ranks_did(
    kind: Any, owns: bool, persistent: bool, at: int
) -> None:
    # Within the first pass, where the next one begins, and within that one.
    def cursor(own: torch.Generator) -> Cursor:
        data = keepstep.seeded(Drawing(), 7)
        return Cursor(
            kind(
                data,
                2,
                num_workers=1,
                persistent_workers=persistent,
                generator=own if owns else None,
            ),
            3,
            None,
        )

    torch.manual_seed(5)
    own = torch.Generator().manual_seed(6)
    whole = walk(cursor(own), own)
    assert len(whole) == 12
    place, randomness, state, _ = whole[at]
    joiner = cursor(own)
    joiner.seek(place)
    restore_randomness(randomness)
    own.set_state(torch.tensor(state, dtype=torch.uint8))
    assert walk(joiner, own) == whole[at:]


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize(
    ("data", "draws"), [(Drawing(), True), (Calm(), False), (keepstep.seeded(Drawing(), 1), False)]
)
def test_workers_that_draw_are_seen(kind: Any, data: Any, draws: bool) -> None:
    started: list[int] = []
    loader = kind(data, 2, num_workers=1, worker_init_fn=started.append)
    cursor = Cursor(loader, 1, None)
    rows(cursor)
    assert cursor.watched.drawn is draws
    assert loader.worker_init_fn == started.append, "the loader is the user's again"


def test_a_seeded_part_of_a_dataset_hears_of_the_pass() -> None:
    data: Any = keepstep.seeded(Drawing(), 7)
    mixed: Any = ConcatDataset([Subset(data, [1, 2]), Calm()])
    cursor = Cursor(DataLoader(mixed, collate_fn=lambda batch: batch), 2, None)
    while cursor.peek() is not None:
        last = cursor.pass_number
        cursor.advance()
    assert (last, int(data._pass)) == (1, 1)


def test_an_iterable_dataset_is_refused() -> None:
    with pytest.raises(ConfigError, match="with indices"):
        keepstep.seeded(Stream(), 1)


def test_a_loader_is_no_state() -> None:
    with pytest.raises(ConfigError, match=r"session\.steps"):
        Registry().add("data", StatefulDataLoader(Calm()))
