"""What a step leaves with this rank alone, recorded as soon as it is known.

    early   after the forward pass: it travels to its second home while gradients are computed
    late    after the backward pass, before the update; all ranks vote once more in each step

Early is the rule. Where a backward pass changes such state (activation checkpointing runs a block
of the forward pass again, its BatchNorm and its draws of Python's generator with it), or random
numbers are drawn before the update, the two moments differ. That is found by comparison in the
first steps and told to all ranks, which record late from then on, together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from keepstep.training.generators import Generators, as_they_were, read_generators
from keepstep.training.private import LATER, NO_ROOM, EntryWriter, completed, decode_entry
from keepstep.training.raw import size_bytes
from keepstep.training.uncovered import is_watched

if TYPE_CHECKING:
    from keepstep.training.keeper import Keeper

Named = tuple[str, torch.Tensor]


class Recorder:
    """One per protected process."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._writer = EntryWriter()
        self.late = False
        """All ranks have agreed to record after the backward pass."""
        self.changed = False
        """Here a backward pass changed what had been recorded before it."""
        self._recorded = -1
        """The boundary whose entry this attempt has recorded."""
        self._early = b""
        self.outgrown = False
        """The last entry of a step left out what it had no room for: homes are too small."""
        self._beside_bytes = 0
        """Of the last entry, all that is no tensor."""
        self._unfetched: tuple[int, Generators] | None = None
        """A boundary, and its generators before its batches were fetched."""

    def begin(self) -> None:
        self._recorded, self._early = -1, b""

    @property
    def missing(self) -> bool:
        """Has this attempt recorded nothing yet?"""
        return self._recorded != self._keeper.boundary.step + 1

    def before_fetch(self, boundary: int) -> None:
        """The batches of this boundary come next, and fetching them may draw."""
        self._unfetched = boundary, read_generators(self._keeper.registry)

    def entry(self) -> bytes:
        """This boundary's entry, between two steps: whoever takes it has yet to fetch."""
        keeper = self._keeper
        assert keeper.cursor is not None, "a step has a cursor"
        step, position = keeper.boundary.step, keeper.cursor.position()
        if not keeper.cursor.has_batches:
            return self._write(step, position)
        known = self._unfetched
        assert known is not None and known[0] == step, "told before the batches came"
        with as_they_were(keeper.registry, known[1]):
            return self._write(step, position)

    def record(self, *, early: bool) -> None:
        """The coming boundary's entry, on its way to both of its homes."""
        keeper = self._keeper
        payload = self._coming()
        self._recorded = keeper.boundary.step + 1
        if early and not self.changed and is_watched(keeper.boundary.step):
            self._early = payload
        keeper.homes.put(self._recorded, payload)

    def compare(self) -> bool:
        """After the backward pass: True if it has changed what was recorded before it."""
        early, self._early = self._early, b""
        if not early or early == self._coming():
            return False
        self.changed = True
        return True

    def wishes(self) -> tuple[bool, bool, bool]:
        """For all ranks to see: should everybody record late, does this rank already, and are its
        entry's homes too small?"""
        return self.changed or self.late, self.late, self.outgrown

    def agree(self, wishes: Sequence[Sequence[Any]]) -> bool:
        """What all ranks said leads all to the same. True: from here on they record late."""
        newly = any(row[0] for row in wishes) and not all(row[1] for row in wishes)
        self.late = self.late or newly
        return newly

    def _coming(self) -> bytes:
        keeper = self._keeper
        assert keeper.cursor is not None, "a step has a cursor"
        return self._write(keeper.boundary.step + 1, keeper.cursor.position_after(), coming=True)

    def _write(self, boundary: int, position: dict[str, int], *, coming: bool = False) -> bytes:
        keeper = self._keeper
        named = keeper.registry.private_tensors(coming=coming)
        if left_out := [name for name, tensor in named if tensor is LATER]:
            keeper.uncovered.private_moves(left_out[0], len(left_out))
            keeper.homes.complete = self._complete
        if not coming:
            return self._writer.entry(boundary, position, named)
        room = keeper.homes.room
        # Summed before it is written: what has outgrown its room is copied at no step.
        named = self._fitting(named, _sum_bytes(named) + self._beside_bytes - room)
        payload = self._writer.entry(boundary, position, named)
        self._beside_bytes = len(payload) - _sum_bytes(named)
        if len(payload) > room:
            named = self._fitting(named, len(payload) - room)
            payload = self._writer.entry(boundary, position, named)
        self.outgrown = any(tensor is NO_ROOM for _, tensor in named)
        return payload

    def _fitting(self, named: list[Named], excess: int) -> list[Named]:
        """A step goes on without this home rather than not at all."""
        if excess <= 0:
            return named
        named, name = _without_largest(named, excess)
        self._keeper.uncovered.entry_outgrown(name)
        self._keeper.homes.complete = self._complete
        return named

    def _complete(self, payload: bytes) -> bytes:
        """This rank's own entry, to be saved: with what the update has made since."""
        keeper, entry = self._keeper, decode_entry(payload)
        here = keeper.boundary.step == entry.boundary and not keeper.boundary.in_attempt
        if not entry.lacks or not here or not keeper.boundary.whole:
            return payload
        return completed(entry, dict(keeper.registry.private_tensors()))


def _without_largest(named: Sequence[Named], excess: int) -> tuple[list[Named], str]:
    """What is left when so many bytes have to go, and the name of the first that goes."""
    out: list[str] = []
    for name, tensor in sorted(named, key=lambda each: -size_bytes(each[1])):
        if excess <= 0:
            break
        out.append(name)
        excess -= size_bytes(tensor)
    left = [(name, NO_ROOM if name in out else tensor) for name, tensor in named]
    return left, [*out, "a generator"][0]


def _sum_bytes(named: Sequence[Named]) -> int:
    return sum(size_bytes(tensor) for _, tensor in named)
