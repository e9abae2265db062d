"""Random numbers of loader workers: a function of seed, sample and pass, or reported.

A worker of a loader draws from generators of its own, and a replaced rank has other workers, which
are elsewhere in their streams. `seeded` makes what is drawn for a sample independent of who loads
it and of what was loaded before. Workers without it are watched in their first fetches: whether
they draw is seen, not guessed.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from keepstep.errors import ConfigError
from keepstep.training.randomness import read_randomness, restore_randomness

_FETCHES_WATCHED = 32
"""By each worker. A dataset that draws does so for most samples."""


def seeded(dataset: Dataset[Any], seed: int) -> Dataset[Any]:
    """The dataset, with its random numbers a function of seed, sample and pass over the data.

    Python's, NumPy's and torch's global generators are seeded around each `dataset[index]` and put
    back after it. The pass is told by `session.steps`, or by `set_epoch` where there is none.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            "keepstep.seeded needs a dataset with indices: an iterable one has to draw its random "
            "numbers from a generator that it seeds itself"
        )
    return Seeded(dataset, seed)


class Seeded(Dataset[Any]):
    """See `seeded`."""

    def __init__(self, inner: Dataset[Any], seed: int) -> None:
        self._inner: Any = inner
        self._seed = int(seed)
        # In shared memory: workers that outlive a pass must hear of the next one.
        self._pass = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, number: int) -> None:
        self._pass.fill_(number)

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, index: Any) -> Any:
        before = read_randomness()
        _seed_all(f"{self._seed}/{_name_of(index)}/{int(self._pass)}")
        try:
            return self._inner[index]
        finally:
            restore_randomness(before)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_inner":
            # While it is unpickled in a worker, there is no inner one yet.
            raise AttributeError(name)
        return getattr(self._inner, name)


def _name_of(index: Any) -> str:
    try:
        return str(operator.index(index))
    except TypeError:
        return repr(index)


def _seed_all(text: str) -> None:
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    random.seed(number)
    torch.default_generator.manual_seed(number & (2**63 - 1))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number & 0xFFFFFFFF)


def tell_pass(loader: Iterable[Any], number: int) -> None:
    """Tell the seeded datasets of a loader which pass over the data begins."""
    asked: list[Any] = [getattr(loader, "dataset", None)]
    while asked:
        dataset = asked.pop()
        if isinstance(dataset, Seeded):
            dataset.set_epoch(number)
        elif isinstance(dataset, Dataset):
            # A subset, or several in a row, of which some are seeded.
            several = getattr(dataset, "datasets", None) or ()
            several = several.values() if isinstance(several, dict) else several
            asked += [getattr(dataset, "dataset", None), *several]


# ---------------------------------------------------------------- watching workers


class Watched:
    """Sees whether the workers that a loader starts draw random numbers."""

    def __init__(self) -> None:
        self._drawn: torch.Tensor | None = None

    @property
    def drawn(self) -> bool:
        return self._drawn is not None and bool(self._drawn)

    @contextlib.contextmanager
    def starting(self, loader: Iterable[Any]) -> Iterator[None]:
        """Workers that are started inside are watched. Only those of the first pass."""
        if self._drawn is not None or not isinstance(loader, DataLoader) or not loader.num_workers:
            yield
            return
        self._drawn = torch.zeros((), dtype=torch.bool).share_memory_()
        before = loader.worker_init_fn
        loader.worker_init_fn = _Watch(before, self._drawn)
        try:
            yield
        finally:
            loader.worker_init_fn = before


class _Watch:
    """Runs in each worker before its first fetch, after what the user wants run there."""

    def __init__(self, inner: Callable[[int], None] | None, drawn: torch.Tensor) -> None:
        self._inner = inner
        self._drawn = drawn

    def __call__(self, worker: int) -> None:
        if self._inner is not None:
            self._inner(worker)
        from torch.utils.data._utils import fetch

        # In this process alone, which does nothing but fetch.
        _watch(fetch._MapDatasetFetcher, self._drawn)
        _watch(fetch._IterableDatasetFetcher, self._drawn)


def _watch(kind: Any, drawn: torch.Tensor) -> None:
    original = kind.fetch
    left = _FETCHES_WATCHED

    def fetch(self: Any, index: Any) -> Any:
        nonlocal left
        left -= 1
        if left <= 0 or bool(drawn):
            kind.fetch = original
        before = read_randomness()
        found = original(self, index)
        if read_randomness() != before:
            drawn.fill_(True)
        return found

    kind.fetch = fetch
