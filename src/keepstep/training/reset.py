"""Make DDP and FSDP2 forget a broken pass, so that the same step can be tried again.

Both keep state from a half-run forward or backward pass: DDP's reducer waits for gradients that
will not come, FSDP2 holds gathered parameters and unreduced gradients. Without this a retry hangs,
or, with FSDP2, silently gives wrong weights.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from keepstep import sabotage


def reset(module: nn.Module) -> None:
    """Bring whatever parallelism is inside back to the start of a step."""
    if not sabotage.off("reset"):
        reset_ddp(module)
    if not sabotage.off("fsdp-reset"):
        reset_fsdp(module)


def reset_ddp(module: nn.Module) -> None:
    """Make the DDP modules inside forget the broken backward, so that the step can be retried."""
    for ddp in ddp_modules(module):
        # Resets the reducer; the group is the same object with another backend under it.
        ddp._update_process_group(ddp.process_group)
        ddp.zero_grad(set_to_none=True)


def reset_fsdp(module: nn.Module) -> None:
    """The same for FSDP2, HSDP and `replicate`, which are made of the same parts."""
    for root in _fsdp_roots(module):
        for state in root._get_fsdp_state()._state_ctx.all_states:
            for group in state._fsdp_param_groups:
                _drop(group)
        root.reset_iter_state()
        root.zero_grad(set_to_none=True)


def _drop(group: Any) -> None:
    """What torch's own reset would wait for, or would leave: a broken gather, old gradients."""
    result = group._all_gather_result
    if result is not None and isinstance(result.all_gather_work, dist.Work):
        try:
            result.all_gather_work.wait()
        except RuntimeError:
            pass  # It broke with its generation; what it gathered is thrown away.
    group._all_gather_result = None
    for parameter in group.fsdp_params:
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def _fsdp_roots(module: nn.Module) -> Iterator[Any]:
    """Roots that have run at least once; the others have nothing to forget."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for inner in module.modules():
        if isinstance(inner, fsdp.FSDPModule) and inner._get_fsdp_state()._is_root:
            yield inner


def forget_meshes() -> None:
    """Before a standby builds for its real rank: nothing may be answered from the tentative one.

    DTensor remembers plans with the mesh that they were made for, and takes two meshes of the same
    ranks for the same. The plans hold the coordinates and the groups of the rank that made them:
    a process that took another rank's seat would wait for the wrong peers, for ever.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    gc.collect()
    for mesh in [held for held in gc.get_objects() if type(held) is DeviceMesh]:
        # A mark that no new mesh has, in the one field that only serves to tell meshes apart: what
        # some other memory still holds is never taken for a new one.
        mesh._thread_id = -1


def settles_at(module: nn.Module) -> int:
    """The first step in which the DDP modules inside use the buckets that they keep.

    DDP lays them out anew after its first backward pass, with static_graph after its second. The
    layout decides the order in which gradients are summed.
    """
    return max((2 if ddp.static_graph else 1 for ddp in ddp_modules(module)), default=0)


def ddp_modules(module: nn.Module) -> list[DistributedDataParallel]:
    return [m for m in module.modules() if isinstance(m, DistributedDataParallel)]
