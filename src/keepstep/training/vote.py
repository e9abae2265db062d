"""The vote before an update, in jobs where some state is not held by all ranks.

In plain DDP a rank that lags behind can receive everything from any other. Where a shard lives on
few ranks, those may all lag, so nobody may make an update before everybody can. One barrier over
the world says so: who passes it knows that all ranks stand before the same update.

    gradients in hand -- vote --passed--> update
                           |
                           broken: the answer is not known. Wait here, with the gradients kept:
                           Quiesce -> report the boundary, `ready`;   Apply -> make the update
                           anything else -> leave the step for its boundary, as after any fault

Must never: let an update be made that not all ranks voted for, or leave the optimizer's hook with
an update half made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepstep import sabotage, wire
from keepstep.page import Mark
from keepstep.training import recovery
from keepstep.training.inner import GroupsBroken
from keepstep.training.side import side_barrier

if TYPE_CHECKING:
    from keepstep.training.keeper import Keeper

ORDER_SECONDS_MAX = 7 * 24 * 3600.0


def cast(keeper: Keeper, *, updates: bool) -> None:
    """Return when this rank may make its update; raise when the step is to be left."""
    if keeper.covering is None:
        _vote(keeper)
        return
    keeper.reach("mirror")
    keeper.covering.write_ahead(keeper.boundary.step, updates=updates)
    _vote(keeper)
    keeper.covering.voted()


def _vote(keeper: Keeper) -> None:
    keeper.reach("vote")
    keeper.page.count_vote()
    try:
        if not sabotage.off("vote"):
            side_barrier(keeper.groups)
    except RuntimeError as error:
        if not keeper.is_fault(error):
            raise
        keeper.tell_broken(error)
        _wait_before_update(keeper)
        return
    keeper.reach("voted")


def _wait_before_update(keeper: Keeper) -> None:
    """Follow the orders that can be followed here, with the gradients kept."""
    keeper.page.mark(Mark.RECOVERING, keeper.boundary.step)
    while True:
        order = keeper.inbox.take(ORDER_SECONDS_MAX)
        generation, action = int(order.generation), order.action
        if isinstance(action, wire.Quiesce):
            if not keeper.is_leaving(action):
                keeper.prepare(generation, action)
                _report_ready(keeper, generation)
                continue
            keeper.leaves_in = generation
        elif isinstance(action, wire.Apply):
            if keeper.place.rank not in action.ranks:
                continue
            if action.boundary == keeper.boundary.step + 1:
                keeper.applies_in = generation
                return
        keeper.inbox.put_back(order)
        raise GroupsBroken(f"the vote on step {keeper.boundary.step} was broken")


def _report_ready(keeper: Keeper, generation: int) -> None:
    keeper.abort(generation)
    keeper.reach("quiesce")
    # The forward pass has changed buffers and generators; what is reported is the boundary.
    with keeper.boundary.rewound():
        recovery.report_boundary(keeper, generation, ready=True)


def report_applied(keeper: Keeper) -> None:
    """The update that others had made is in here too: this rank stands where they do."""
    generation, keeper.applies_in = keeper.applies_in, -1
    recovery.unwind(keeper)
    recovery.report_boundary(keeper, generation, "Quiesce Apply")
