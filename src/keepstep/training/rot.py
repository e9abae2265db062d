"""Corruption: state that changed though nobody changed it, found before it spreads.

    K = 1   applied(s): digest | at rest | begin(s+1): digest again, on this rank alone
            and each mirror looks after an eighth of what it keeps (patrol.py)
    K > 1   every K steps the holders of each portion compare; who is not with the majority is wrong

With K = 1 a flip at rest is found before the next forward pass, so nobody has used it: the rank
says that its state is torn, receives it anew, and the run stays bit-exact. With K > 1 the corrupt
rank's gradients are in everybody's average by then: replicas are made equal again, and the steps
in between are named as contaminated.

Must never: guess which of two is right; take a change that the program itself made for a flip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from keepstep.training import patrol
from keepstep.training.digest import digest
from keepstep.training.registry import Registry
from keepstep.training.side import exchange_rows
from keepstep.training.still import versions

if TYPE_CHECKING:
    from keepstep.training.keeper import Keeper

NAMED_MAX = 3


class Rest:
    """What this rank's tensors were when its last step was applied, and when to look again."""

    def __init__(self, every: int) -> None:
        self.every = every
        """Steps between two looks; 0: none."""
        self._known: dict[str, tuple[int, tuple[int, ...], str]] = {}
        self.looks = 0
        """How often this rank looked; 1 each time, however many tensors."""

    def is_corrupt(self, keeper: Keeper) -> bool:
        """Look at the state before it is used again. True: it was told, and orders come."""
        step = keeper.boundary.step
        if self.every == 1:
            self.looks += 1
            if changed := self.changed(keeper.registry):
                return _tell(keeper, f"{listed(changed)} changed between two steps", torn=True)
        if keeper.covering is not None:
            name, text = keeper.covering.spoilt(patrol.due(step, self.every))
            if name and _tell(keeper, text, cover=name):
                return True
        # At every begin of such a step, a second one after a fault too: a replacement comes here
        # for the first time, and all ranks have to.
        if self.every < 2 or step % self.every:
            return False
        self.looks += 1
        # Buffers that came later may be each rank's own, and no flip.
        rows = exchange_rows(keeper.groups, keeper.registry.shared_digests(late=False))
        name, decided = minority(rows, keeper.place.rank)
        if not name:
            return False
        since = f"steps {max(0, step - self.every)} to {step - 1} are contaminated"
        # In a tie nobody is to blame: all stop, and the vote over whose state counts says so.
        text = f"portion {name} is not what its other holders have; {since}"
        return _tell(keeper, text, torn=decided, corrupt=decided)

    def remember(self, registry: Registry) -> None:
        registry.look_again()
        self._known = {
            name: (tensor.data_ptr(), versions(held), digest(tensor))
            for name, held, tensor in registry.placed()
        }

    def forget(self) -> None:
        """State is about to be received: there is nothing to compare with."""
        self._known = {}

    def changed(self, registry: Registry) -> list[str]:
        """Names of tensors whose bytes are others, though no operation touched them."""
        return [
            name
            for name, held, tensor in registry.placed()
            if name in self._known and self._flipped(held, tensor, *self._known[name])
        ]

    @staticmethod
    def _flipped(
        held: Any, tensor: torch.Tensor, address: int, before: tuple[int, ...], known: str
    ) -> bool:
        # Whatever the program does to a tensor raises its version, or puts another in its place.
        untouched = (tensor.data_ptr(), versions(held)) == (address, before)
        return untouched and digest(tensor) != known


def _tell(
    keeper: Keeper, text: str, *, torn: bool = False, corrupt: bool = True, cover: str = ""
) -> bool:
    """Say what was found. True if orders come: in mode observe nobody sends any."""
    acts = not keeper.place.observed
    if torn and acts:
        keeper.tear()
    keeper.report_broken(keeper.generation, text, corrupt=corrupt, cover=cover)
    return acts


def minority(rows: Sequence[Mapping[str, str]], rank: int) -> tuple[str, bool]:
    """A portion in which this rank differs from most holders, and whether most of them agree. Pure.

    `rows` holds each rank's digests by portion. An empty name: this rank is with the majority
    everywhere. Without a majority nobody can tell who is right.
    """
    for name, mine in sorted(rows[rank].items()):
        votes = [row[name] for row in rows if name in row]
        if 2 * votes.count(mine) > len(votes):
            continue
        most = max(votes.count(value) for value in votes)
        return name, 2 * most > len(votes)
    return "", True


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(names[:NAMED_MAX]) + more
