"""ZeRO-1: torch's ZeroRedundancyOptimizer, seen from outside.

It cuts the optimizer's state, not the model: each parameter is updated by one rank, its owner, in
an optimizer inside, and then broadcast by it. So every rank holds all parameters, and the state of
its own alone.

    step:  own update (the optimizer inside)  ->  sync: every rank broadcasts what it updated

What torch keeps to itself is used in this file only. For any other optimizer the functions here
answer as if it were its own inside.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from keepstep.errors import ConfigError

_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"


def is_zero(optimizer: object) -> bool:
    """Without an import: a job that has none must not pay for it."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def check(name: str, optimizer: Any) -> None:
    """Refuse what cannot be covered."""
    if is_zero(optimizer) and optimizer._overlap_with_ddp:
        raise ConfigError(
            f"{name!r} updates inside the backward pass (overlap_with_ddp=True), where no vote can "
            "be held before the update; make the ZeroRedundancyOptimizer without it"
        )


def inside(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that holds the state and does the arithmetic."""
    found: torch.optim.Optimizer = optimizer.optim if is_zero(optimizer) else optimizer
    return found


def owner(optimizer: Any, parameter: torch.Tensor) -> int | None:
    """The rank that alone updates a parameter; None: all who have it do."""
    if not is_zero(optimizer):
        return None
    number = optimizer._param_to_rank[parameter]
    return dist.get_global_rank(optimizer.process_group, number)


def layout(optimizer: Any) -> int:
    """Changes when parameters are put into other memory: their buckets are laid out anew."""
    if not is_zero(optimizer) or not optimizer._buckets or not optimizer._buckets[0]:
        return 0
    address: int = optimizer._buckets[0][0].data_ptr()
    return address


def hand_in_settings(optimizer: Any) -> None:
    """What the script set (a learning rate) is for the optimizer inside: its step does the same."""
    if is_zero(optimizer):
        optimizer._sync_param_groups(optimizer.param_groups, optimizer.optim.param_groups)


def sync(optimizer: Any) -> None:
    """Every rank gives what it updated, and takes the rest."""
    type(optimizer)._sync_params(optimizer)


def around_sync(
    optimizer: Any,
    run: Callable[[Callable[[], None]], None],
    launched: Callable[[list[dist.Work]], None],
) -> None:
    """From now on its step hands the sync to `run`; `launched` is told what will be written to."""
    launch = optimizer._broadcast_params_from_rank

    def launch_and_tell(rank: int) -> Any:
        handles = launch(rank)
        # This rank's own part is only read here.
        launched(handles if rank != optimizer.rank else [])
        return handles

    optimizer._sync_params = lambda: run(lambda: sync(optimizer))
    optimizer._broadcast_params_from_rank = launch_and_tell
