"""The place in the data: which batches the current step uses, and how to get there again.

Survivors keep their batches and replay them: a loader is never rewound. A joiner opens the pass
anew and skips to its place by index, without loading what it skips.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from keepstep.errors import ConfigError
from keepstep.page import RING_SLOTS
from keepstep.training.randomness import read_randomness, restore_randomness
from keepstep.training.seeded import Watched, tell_pass


class Cursor:
    """Yields the same batches until the step that uses them is applied."""

    def __init__(self, loader: Iterable[Any], passes: int, accumulate: int | None) -> None:
        if passes < 1 or (accumulate is not None and accumulate < 1):
            raise ConfigError("passes and accumulate must be at least 1")
        self.loader = loader
        self.passes = passes
        self.accumulate = accumulate
        self.pass_number = 0
        self.index = 0
        """Batches consumed in this pass."""
        self.samples = 0
        """Samples consumed by this rank in all passes."""
        self.warm: WarmLoader | None = None
        """Loader workers that a standby started ahead of time, for the first pass it enters."""
        self.watched = Watched()
        self._foreseen: _Foreseen | None = None
        self._iterator: Iterator[Any] | None = None
        self._current: list[Any] | None = None
        self._fetched_at: dict[str, int] = {}
        """Where the current batches were asked for: perhaps at the end of the pass before."""
        self._samples_after = 0

    def peek(self) -> list[Any] | None:
        """The batches of the current step; None at the end of the data."""
        if self._current is None:
            self._fetched_at = self.position()
        while self._current is None and self.pass_number < self.passes:
            if self._iterator is None:
                self._iterator = self._open(self.index)
            group = list(itertools.islice(self._iterator, self.accumulate or 1))
            if group:
                self._current = group
                self._samples_after = self.samples + sum(count_samples(batch) for batch in group)
            else:
                self.pass_number, self.index, self._iterator = self.pass_number + 1, 0, None
        return self._current

    @property
    def has_batches(self) -> bool:
        """Whether the current step's batches were fetched."""
        return self._current is not None

    def advance(self) -> None:
        """The step that used the current batches is in; go on to the next ones."""
        assert self._current is not None, "there is no step to leave"
        after = self.position_after()
        self.index, self.samples = after["index"], after["samples"]
        self._current = None

    def position(self) -> dict[str, int]:
        return {"pass": self.pass_number, "index": self.index, "samples": self.samples}

    def sample_range(self, world: int) -> tuple[int, int]:
        """Of the present step, in the job's global order: [first, past the last)."""
        return self.samples * world, self.position_after()["samples"] * world

    def position_after(self) -> dict[str, int]:
        """Where the cursor stands once the current step is in."""
        if self._current is None:
            return self.position()
        index = self.index + len(self._current)
        return {"pass": self.pass_number, "index": index, "samples": self._samples_after}

    def seek(self, position: dict[str, int]) -> None:
        """Go to a recorded place. Nothing is loaded before the next peek."""
        if position == self.position() and self._iterator is not None:
            return
        if self._current is not None and position == self._fetched_at:
            return
        if self._current is not None and position == self.position_after():
            # A survivor that received the step it was in: its loader stands there already.
            self.advance()
            return
        self.pass_number, self.index = position["pass"], position["index"]
        self.samples = position["samples"]
        self._current = None
        self._iterator = None

    def foresee(self, position: dict[str, int]) -> None:
        """Put a pass in order ahead of time, up to a little before this place.

        Only the sampler is asked, and only one that is told the pass: its order then depends on
        nothing else. The cursor stays where it is, and the next seek goes wherever it is told.
        """
        loader = self.loader
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return
        told = [sampler for sampler in _samplers(loader) if hasattr(sampler, "set_epoch")]
        if not told or self._iterator is not None:
            return
        for sampler in told:
            sampler.set_epoch(position["pass"])
        # The boundary may turn out to be an earlier one than that of the newest entry.
        index = max(0, position["index"] - RING_SLOTS * (self.accumulate or 1))
        rest = iter(_sampler_of(loader))
        # One more, because many a sampler does nothing before it is asked for its first.
        first = list(itertools.islice(rest, index, index + 1))
        self._foreseen = _Foreseen(position["pass"], index, itertools.chain(first, rest))

    def rehearsal(self) -> list[Any]:
        """Some batches of the right shape, for a joiner that warms up. No worker is started."""
        wanted = self.accumulate or 1
        loader = self.loader
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            calm: Any = _reopened(loader, 0)
            calm.__dict__.update(num_workers=0, prefetch_factor=None, timeout=0)
            calm.__dict__["persistent_workers"] = False
            calm.__dict__["multiprocessing_context"] = None
            loader = calm
        group = list(itertools.islice(iter(loader), wanted))
        return group or []

    def reseat(self, rank: int, world_size: int) -> None:
        """A standby built for a tentative rank learns its real one."""
        for sampler in _samplers(self.loader):
            if hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"):
                sampler.rank, sampler.num_replicas = rank, world_size
            elif hasattr(sampler, "set_seat"):
                sampler.set_seat(rank, world_size)

    def _open(self, skip: int) -> Iterator[Any]:
        for sampler in _samplers(self.loader):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.pass_number)
        tell_pass(self.loader, self.pass_number)
        foreseen, self._foreseen = self._foreseen, None
        if not skip:
            # Workers that outlive a pass got their seed in the first one. Where they are started
            # later, by a joiner or in a rerun, that draw was made long ago.
            late = self.pass_number > 0 and _starts_lasting_workers(self.loader)
            undrawn = _undrawn(self.loader) if late else contextlib.nullcontext()
            with undrawn, self.watched.starting(self.loader):
                return iter(self.loader)
        if foreseen is not None and not foreseen.serves(self.pass_number, skip):
            foreseen = None
        # A loader draws its workers' seed when it is opened, from its own generator or the global
        # one. That draw belongs to the start of a pass, where every rank made it; here it would be
        # one too many.
        with _undrawn(self.loader):
            return self._open_at(skip, foreseen)

    def _open_at(self, skip: int, foreseen: _Foreseen | None) -> Iterator[Any]:
        warm, self.warm = self.warm, None
        if warm is not None:
            return warm.open(skip, foreseen)
        loader = self.loader
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            return iter(_reopened(loader, skip, foreseen))
        iterator = iter(loader)
        next(itertools.islice(iterator, skip, skip), None)
        return iterator


@contextlib.contextmanager
def _undrawn(loader: Iterable[Any]) -> Iterator[None]:
    """What is drawn inside was drawn before: afterwards all generators are where they were."""
    own = getattr(loader, "generator", None)
    named = [(own, own.get_state())] if isinstance(own, torch.Generator) else []
    before = read_randomness()
    try:
        yield
    finally:
        restore_randomness(before)
        for generator, state in named:
            generator.set_state(state)


def _starts_lasting_workers(loader: Iterable[Any]) -> bool:
    """Would opening this loader start workers that stay for all later passes?"""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return False
    return loader.persistent_workers and loader._iterator is None


class WarmLoader:
    """A loader whose workers run already, idle, and can begin at any place of a pass.

    Starting workers costs a fork each, most of a pause. They are the same for every place in the
    data: indices come from the sampler, which stays with the training process.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._source: Any = _sampler_of(loader)
        # One batch, so that what a first batch costs is paid here.
        self._order = _Skipping(list(itertools.islice(self._source, 1)), 0)
        self._loader = _reopened(loader, 0)
        self._loader.__dict__[_sampler_name(loader)] = self._order
        self._loader.__dict__["persistent_workers"] = True
        for _ in self._loader:
            continue

    def open(self, skip: int, foreseen: _Foreseen | None = None) -> Iterator[Any]:
        self._order.inner, self._order.skip = self._source, skip
        self._order.foreseen = foreseen
        return iter(self._loader)


def warm_up(loader: object) -> WarmLoader | None:
    """Start a loader's workers ahead of time, where it has any."""
    if not isinstance(loader, DataLoader) or loader.num_workers == 0:
        return None
    if isinstance(loader.dataset, IterableDataset) or loader.persistent_workers:
        return None
    return WarmLoader(loader)


@dataclass(frozen=True, slots=True)
class _Foreseen:
    """A pass that is in order already, from an index on."""

    pass_number: int
    index: int
    rest: Iterator[Any]

    def serves(self, pass_number: int, index: int) -> bool:
        return pass_number == self.pass_number and index >= self.index


class _Skipping:
    """A sampler's order without its first entries: skipped by index, never loaded."""

    def __init__(self, inner: Iterable[Any], skip: int, foreseen: _Foreseen | None = None) -> None:
        self.inner = inner
        self.skip = skip
        self.foreseen = foreseen

    def __iter__(self) -> Iterator[Any]:
        if self.foreseen is not None:
            return self._from_foreseen()
        return itertools.islice(iter(self.inner), self.skip, None)

    def _from_foreseen(self) -> Iterator[Any]:
        # Whoever asks first uses it up. torch makes two iterators and asks only the second.
        foreseen, self.foreseen = self.foreseen, None
        if foreseen is None:
            yield from self
        else:
            yield from itertools.islice(foreseen.rest, self.skip - foreseen.index, None)

    def __len__(self) -> int:
        return max(0, len(self.inner) - self.skip)  # type: ignore[arg-type]


def _reopened(
    loader: DataLoader[Any], skip: int, foreseen: _Foreseen | None = None
) -> DataLoader[Any]:
    """A copy that begins `skip` batches later. DataLoader refuses assignment, its dict does not."""
    reopened = copy.copy(loader)
    reopened.__dict__[_sampler_name(loader)] = _Skipping(_sampler_of(loader), skip, foreseen)
    reopened.__dict__["_iterator"] = None
    return reopened


def _sampler_name(loader: DataLoader[Any]) -> str:
    return "batch_sampler" if loader.batch_sampler is not None else "sampler"


def _sampler_of(loader: DataLoader[Any]) -> Any:
    return getattr(loader, _sampler_name(loader))


def _samplers(loader: Iterable[Any]) -> list[Any]:
    found = [getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    found.append(getattr(found[1], "sampler", None))
    distinct: list[Any] = []
    for sampler in found:
        if sampler is not None and not any(sampler is other for other in distinct):
            distinct.append(sampler)
    return distinct


def count_samples(batch: Any) -> int:
    """Samples in a batch: the length of the first tensor found in it."""
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.dim() else 1
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes) and batch:
        return count_samples(batch[0])
    return 1
