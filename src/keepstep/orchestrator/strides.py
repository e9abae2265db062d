"""How far from its rank a mirror sits: never on the same node, if it can be helped. Pure.

A new generation asks for each of its ranks and dozens of strides. So where ranks are is one large
number with a lane of bits for each: to turn it by a stride and to compare all lanes are a few
operations on it, whatever the number of ranks.
"""

from __future__ import annotations

import itertools
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from keepstep.model import NodeId

TRIED_MAX = 64
_LANE = 8 * array("I").itemsize


@dataclass(frozen=True, slots=True)
class _Ring:
    """The places of all ranks, and who has the same."""

    lanes: int
    below: int
    """All bits of each lane but its top."""
    size: int
    block: int
    """The longest run of the same place."""

    @classmethod
    def of(cls, places: Sequence[str]) -> Self:
        number = {place: at for at, place in enumerate(dict.fromkeys(places))}
        packed = array("I", map(number.__getitem__, places)).tobytes()
        block = 1
        if len(number) < len(places):
            block = max(len(list(run)) for _, run in itertools.groupby(places))
        ones = (1 << len(places) * _LANE) // ((1 << _LANE) - 1)
        below = ones * ((1 << _LANE - 1) - 1)
        return cls(int.from_bytes(packed, sys.byteorder), below, len(places), block)

    def collisions(self, stride: int) -> int:
        """How many ranks are where the one a stride on is."""
        below, bits = self.below, stride * _LANE
        turned = self.lanes >> bits | (self.lanes & (1 << bits) - 1) << self.size * _LANE - bits
        differ = self.lanes ^ turned
        # The top bit of a lane gets set if any of it is: from below by carrying, or by itself.
        top = ((differ & below) + below | differ) & ~below
        return self.size - top.bit_count()


def best(nodes: Sequence[NodeId], *domains: Sequence[str]) -> int:
    """The smallest k that puts rank r and rank (r + k) mod N on different nodes, for all r.

    And in different racks, on different switches and so on, if that can be had. Where nothing does
    (a node with most of the ranks), the k with fewest collisions, of nodes first, then of the wider
    domains; on one node none at all: a copy there would go with the original.
    """
    size = len(nodes)
    if len(set(nodes)) <= 1:
        return 0
    # What all of them share cannot be avoided.
    rings = [_Ring.of(nodes), *(_Ring.of(each) for each in domains if len(set(each)) > 1)]
    # Ranks lie in blocks: a stride that is shorter than a block leaves two ranks of it together,
    # and so does one that is nearly the whole way round.
    first = max(ring.block for ring in rings)
    for stride in range(first, min(size - first, first + TRIED_MAX - 1) + 1):
        if not any(ring.collisions(stride) for ring in reversed(rings)):
            return stride
    found, fewest = 1, [size + 1]
    blocks = (ring.block for ring in rings if ring.block < size)
    for stride in (*range(1, min(size, TRIED_MAX + 1)), *blocks):
        collisions = [ring.collisions(stride) for ring in rings]
        if collisions < fewest:
            found, fewest = stride, collisions
    return found
