"""Half-way steps: the update is in on this rank, and has yet to reach the others.

An optimizer that syncs parameters inside its step (ZeRO-1) has a moment at which nothing can be
retried: every rank has updated what it owns, so going back is impossible, and some have not got
what others updated. Its phases:

    grads_complete --vote--> local_update_applied --sync--> params_synced
                                      |
                                      broken: the rest of the attempt is run (a scheduler's count),
                                      then the rank reports `unsynced`; whoever takes a lost seat is
                                      rebuilt with its update made, and only the sync is repeated

The phase is on the worker's page, outside the process. Must never: make an update twice, or let a
step count as whole whose parameters were not synced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from keepstep import sabotage
from keepstep.errors import Permanent
from keepstep.page import Mark
from keepstep.training import zero
from keepstep.training.side import exchange_rows

if TYPE_CHECKING:
    from keepstep.training.keeper import Keeper

SETTLE_SECONDS_MAX = 2.0
"""An abort breaks what is received at once; this is a backstop."""
SETTLE_LOOK_SECONDS = 0.001


def watch(keeper: Keeper, optimizer: Any) -> None:
    """Stand by when this optimizer syncs; nothing, if it does not."""
    if zero.is_zero(optimizer):
        zero.around_sync(
            optimizer, lambda sync: _sync(keeper, sync), lambda works: _launched(keeper, works)
        )


def _launched(keeper: Keeper, works: list[dist.Work]) -> None:
    keeper.flying += works
    if keeper.boundary.in_attempt:
        keeper.reach("sync")


def settle(keeper: Keeper) -> None:
    """After an abort: wait until no broken sync writes to the parameters any more."""
    deadline = time.monotonic() + SETTLE_SECONDS_MAX
    while not all(work.is_completed() for work in keeper.flying):
        if time.monotonic() > deadline:
            # What it may still write to is nobody's source.
            keeper.boundary.torn = True
            break
        time.sleep(SETTLE_LOOK_SECONDS)
    keeper.flying = []


def _sync(keeper: Keeper, sync: Callable[[], None]) -> None:
    """The sync of a step. Returns though it broke, if the step can be brought to its end."""
    if not keeper.boundary.in_attempt:
        sync()
        return
    broken_before = keeper.boundary.unsynced
    keeper.boundary.unsynced = True
    keeper.page.mark(Mark.UPDATED, keeper.boundary.step)
    keeper.reach("halfway")
    try:
        if keeper.applies_in < 0:
            sync()
            # Another optimizer's sync may have broken before.
            keeper.flying, keeper.boundary.unsynced = [], broken_before
    except RuntimeError as error:
        # A tail that moves tensors would move them by parameters that are not in yet.
        moves = keeper.uncovered.tail_moves or keeper.registry.others_hold_tensors()
        if moves or not keeper.is_fault(error):
            raise
        keeper.tell_broken(error)
    # The optimizer's own collectives are no stranger's, whatever became of them.
    keeper.uncovered.update_begins(keeper.launched())
    if sabotage.off("phase"):
        keeper.boundary.unsynced = False


def finish(keeper: Keeper) -> None:
    """In a new generation, with every owner there: repeat the sync. All ranks come here."""
    keeper.reach("resync")
    for optimizer in keeper.registry.optimizers.values():
        if zero.is_zero(optimizer):
            zero.sync(optimizer)
    keeper.flying, keeper.boundary.unsynced = [], False
    keeper.registry.forget_digests()
    keeper.rest.forget()
    keeper.log.amend(keeper.slice_digest)


def complete(
    keeper: Keeper, portions: Collection[str], received: Mapping[str, str]
) -> dict[str, str]:
    """Finish the step that these portions were left in; what was received of them is past now."""
    finish(keeper)
    of = keeper.registry.portion_of
    return {name: known for name, known in received.items() if of(name) not in portions}


def finish_loaded(keeper: Keeper, portions: Collection[str]) -> None:
    """The same for a checkpoint that was written half-way; nobody agreed on its digests before."""
    finish(keeper)
    known = keeper.registry.shared_digests()
    rows = exchange_rows(keeper.groups, {name: known[name] for name in portions if name in known})
    if any(row[name] != known[name] for row in rows for name in row.keys() & known.keys()):
        raise Permanent("ranks that loaded one checkpoint do not hold the same parameters")
