"""The groups of one generation on their way, perhaps while the one before still trains.

All ranks that are told of a generation begin at once, each for itself, under the same prefix. Who
comes later just makes the others wait. So nobody has to agree that it was begun early: what a rank
has begun when its order to re-form comes is what it would begin then, if only the groups are alike.

    begun ──> all are here ──> connected ── taken by the reform
                  └────────────────┴─────── given up: a newer generation, or other groups

Ranks meet at the store first. A constructor of Gloo cannot be interrupted, and which sockets are
its own is found by looking before and after: it must not wait long for a peer, least of all while
the user's threads go on.

Must never: touch the groups that are in use; outlive an abort for a newer generation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from keepstep.training.errand import Errand
from keepstep.training.inner import Formation, GroupsBroken, InnerSpec

_PATIENCE = timedelta(seconds=10)
"""So much later a thread that waits for peers sees that it was given up. Nobody waits for it, and
torch writes two lines into the user's log for each wait that ends in vain."""


class Ahead:
    """Connects every group of a generation on a thread of its own."""

    def __init__(self, prefix: str, generation: int, log: str, members: Sequence[Any]) -> None:
        self.prefix = prefix
        self.generation = generation
        self.log = log
        """The digest of the group log that they are made from."""
        self.members = members
        self._open_store: Callable[[], Store] | None = None
        self._specs: Sequence[InnerSpec] = ()
        self._formation: Formation | None = None
        self._given_up = False
        self._errand = Errand("keepstep-ahead", self._connect)

    def serves(self, prefix: str, generation: int) -> bool:
        return (self.prefix, self.generation) == (prefix, generation)

    def start(self, open_store: Callable[[], Store], specs: Sequence[InnerSpec]) -> None:
        """The last spec is of the whole world."""
        self._open_store, self._specs = open_store, specs
        self._errand.start()

    def give_up(self) -> None:
        """Free whoever waits, and let the connections go. Any thread, any number of times."""
        self._given_up = True
        if self._formation is not None:
            self._formation.cancel()
        self._errand.leave()

    def finish(self, seconds_max: float) -> tuple[Formation, list[Any]]:
        """The connected backends. Raises GroupsBroken if they did not come to be."""
        in_time = self._errand.wait(seconds_max)
        if not in_time or self._given_up:
            why = "aborted meanwhile" if in_time else f"a peer did not come within {seconds_max} s"
            raise GroupsBroken(f"the groups were not connected: {why}")
        try:
            backends = self._errand.result()
        except (RuntimeError, OSError) as error:
            raise GroupsBroken(f"a group could not be connected: {error}") from error
        assert self._formation is not None, "it was built"
        return self._formation, backends

    def _connect(self) -> list[Any]:
        assert self._open_store is not None, "start comes first"
        store = self._open_store()
        self._meet(dist.PrefixStore(f"{self.prefix}/{self.generation}/here", store))
        formation = self._formation = Formation(store, self.prefix, self.generation)
        if self._given_up:
            # Whoever gave it up may not have seen the formation.
            formation.cancel()
        # Bounded by the groups' own timeouts, and by the reform that waits for it.
        return formation.build(self._specs)

    def _meet(self, store: Any) -> None:
        """Until every rank is here. Ends with the reform that waits for it, or with an abort."""
        if store.add("count", 1) >= self._specs[-1].size:
            store.set("all", "1")
            return
        while not self._given_up:
            with contextlib.suppress(dist.DistStoreError):
                store.wait(["all"], _PATIENCE)
                return
        raise GroupsBroken("the groups were aborted before all ranks were here")
