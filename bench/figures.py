"""The arithmetic of the benches: percentiles, ratios of sums and how far they can be trusted. Pure.

A ratio of two sums over blocks is bounded by resampling whole rounds, because blocks of one round
share the machine's mood of that moment and are not independent of each other.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of sums and its bounds."""

    value: float
    upper: float
    """The one-sided 95% bound: in 95 of 100 such runs the true ratio lies below it."""
    low: float
    high: float
    """The two-sided 95% interval, for reading."""

    def listed(self) -> list[float]:
        """As it stands in raw results."""
        return [self.value, self.upper, self.low, self.high]


def ratio_of_sums(
    above: Sequence[float], below: Sequence[float], seed: int, resamples: int = RESAMPLES
) -> Ratio:
    """sum(above) / sum(below), with bounds by bootstrap over pairs (one pair per round)."""
    assert above, "no rounds"
    assert len(above) == len(below), "one value per round and arm"
    chance = random.Random(seed)
    rounds = range(len(above))
    found = []
    for _ in range(resamples):
        drawn = chance.choices(rounds, k=len(rounds))
        # A report draws millions: this is half the time of a comprehension.
        found.append(sum(map(above.__getitem__, drawn)) / sum(map(below.__getitem__, drawn)))
    return Ratio(
        sum(above) / sum(below),
        percentile(found, 95.0),
        percentile(found, 2.5),
        percentile(found, 97.5),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation between the two nearest values."""
    assert values, "a percentile of nothing"
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100.0
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    return percentile(values, 50.0)
