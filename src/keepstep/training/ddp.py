"""DistributedDataParallel modules inside a model: how a retry resets them, when they settle."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def reset_ddp(module: nn.Module) -> None:
    """Make the DDP modules inside forget the broken backward, so that the step can be retried."""
    for ddp in ddp_modules(module):
        # Resets the reducer; the group is the same object with another backend under it.
        ddp._update_process_group(ddp.process_group)
        ddp.zero_grad(set_to_none=True)


def settles_at(module: nn.Module) -> int:
    """The first step in which the DDP modules inside use the buckets that they keep.

    DDP lays them out anew after its first backward pass, with static_graph after its second. The
    layout decides the order in which gradients are summed.
    """
    return max((2 if ddp.static_graph else 1 for ddp in ddp_modules(module)), default=0)


def ddp_modules(module: nn.Module) -> list[DistributedDataParallel]:
    return [m for m in module.modules() if isinstance(m, DistributedDataParallel)]
