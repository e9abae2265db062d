"""Which samples belong to which step and rank. Pure; the evaluation does the same without torch.

Samples are windows of the text, shuffled anew in each pass. A sample's id is unique in the whole
run: `pass * windows + window`. Step s of rank r uses the ids at the places

    (s * world + r) * batch  …  + batch

of the passes laid end to end. A mark is a small number made of a batch's ids: it fits into a
float32 without rounding, so it can travel with the gradients (see model.py).
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

MARK_MAX = 65521


@dataclass(frozen=True, slots=True)
class Order:
    """The order of one run."""

    windows: int
    """In a pass: a multiple of world * batch, so that no step spans two passes."""
    world: int
    batch: int
    seed: int

    @property
    def steps_per_pass(self) -> int:
        return self.windows // (self.world * self.batch)

    def ids(self, step: int, rank: int) -> tuple[int, ...]:
        number, within = divmod(step, self.steps_per_pass)
        first = (within * self.world + rank) * self.batch
        order = pass_order(self.seed, number, self.windows)
        return tuple(number * self.windows + w for w in order[first : first + self.batch])

    def mark(self, step: int, rank: int) -> int:
        return mark_of(self.ids(step, rank))


def whole_windows(characters: int, context: int, world: int, batch: int) -> int:
    """How many windows a pass has."""
    windows = (characters - 1) // context
    return windows - windows % (world * batch)


@lru_cache(maxsize=4)
def pass_order(seed: int, number: int, windows: int) -> tuple[int, ...]:
    order = list(range(windows))
    random.Random(f"{seed}/{number}").shuffle(order)
    return tuple(order)


def mark_of(ids: Sequence[int]) -> int:
    """Between 1 and MARK_MAX: nothing is 0, which stands for samples that were left out."""
    return zlib.crc32(",".join(map(str, ids)).encode()) % MARK_MAX + 1
