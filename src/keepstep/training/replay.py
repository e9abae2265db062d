"""Make a lost rank's steps again: its capsule, then its records, with the same kernels.

The optimizer's own arithmetic runs, below its hooks: the gradients in a record are as they were
when the update began, so whatever hooks did to them is in them already.

Must never: run a collective; leave a gradient behind; go on after a slice of the shard that is not
what its owner said it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from keepstep.errors import Permanent
from keepstep.training import zero
from keepstep.training.cover import Record, landed, read_capsule, views_of
from keepstep.training.holders import is_distributed


def load_capsule(
    raw: memoryview, conform: Callable[[Any], Sequence[torch.Tensor]]
) -> dict[str, Any]:
    """Fill the shard; `conform` gets the capsule's layout and returns the tensors to fill.

    Returns what its owner said beside it.
    """
    meta, pieces = read_capsule(raw)
    tensors = conform(meta["layout"])
    if len(tensors) != len(pieces):
        raise Permanent(f"a capsule of {len(pieces)} tensors came for {len(tensors)}")
    with torch.no_grad():
        for tensor, piece, known in zip(tensors, pieces, meta["digests"], strict=True):
            tensor.copy_(landed(piece, known).view(tensor.dtype).reshape(tensor.shape))
    return meta


def gradients_of(record: Record, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The record's gradients, in the shapes of the local parameters."""
    sizes, dtypes = record.meta["sizes"], record.meta["dtypes"]
    left = iter(views_of(record))
    return [
        None if size < 0 else _shaped(next(left), dtype, parameter)
        for size, dtype, parameter in zip(sizes, dtypes, parameters, strict=True)
    ]


def _shaped(raw: torch.Tensor, dtype: str, like: torch.Tensor) -> torch.Tensor:
    # A copy of its own: a view as wider numbers needs a start on a whole one.
    return raw.clone().view(getattr(torch, dtype.removeprefix("torch."))).reshape(like.shape)


def update(
    optimizers: Iterable[torch.optim.Optimizer],
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
) -> None:
    """One step of every optimizer, with these gradients of the local parameters.

    No other parameter may have a gradient: its optimizer would update it as well.
    """
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else _like(parameter, gradient)
    for optimizer in optimizers:
        plain_step(optimizer)
    for parameter in parameters:
        parameter.grad = None


def _like(parameter: Any, gradient: torch.Tensor) -> torch.Tensor:
    """Of a DTensor the gradient is one too, cut in the same way."""
    if not is_distributed(parameter):
        return gradient
    from torch.distributed.tensor import DTensor

    made: torch.Tensor = DTensor.from_local(
        gradient,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return made


def plain_step(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's step without anybody's hooks, and without a scheduler's count of calls."""
    zero.hand_in_settings(optimizer)
    computing = zero.inside(optimizer)
    step: Any = type(computing).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    step(computing)
