"""Make a lost rank's steps again: its capsule, then its records, with the same kernels.

The optimizer's own arithmetic runs, below its hooks: the gradients in a record are as they were
when the update began, so whatever hooks did to them is in them already.

Must never: run a collective; leave a gradient behind; go on after a slice of the shard that is not
what its owner said it was.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from keepstep.errors import Permanent
from keepstep.training import zero
from keepstep.training.cover import (
    PARTS,
    Record,
    landed,
    read_capsule,
    read_record,
    views_of,
)
from keepstep.training.holders import is_distributed, local_of
from keepstep.training.optimizers import BY_ELEMENT, as_many
from keepstep.training.raw import dtype_of

_State = dict[torch.Tensor, dict[str, Any]]


def strange(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """An optimizer whose steps cannot be made again on one rank alone; empty: there is none.

    With what it holds in parts it might talk to other ranks, or look at more than a part. The one
    inside ZeRO's has whole parameters. A class of one's own may do anything, also if it is derived.
    """
    return next(
        (
            type(optimizer).__name__
            for optimizer in optimizers
            if not zero.is_zero(optimizer) and type(optimizer) not in BY_ELEMENT
        ),
        "",
    )


def load_capsule(
    raw: memoryview, conform: Callable[[Any], Sequence[torch.Tensor]]
) -> dict[str, Any]:
    """Fill the shard; `conform` gets the capsule's layout and returns the tensors to fill.

    Returns what its owner said beside it.
    """
    meta, body = read_capsule(raw)
    tensors = conform(meta["layout"])
    if len(tensors) != len(meta["sizes"]):
        raise Permanent(f"a capsule of {len(meta['sizes'])} tensors came for {len(tensors)}")
    pieces = itertools.chain.from_iterable(landed(meta, body, part) for part in range(PARTS))
    with torch.no_grad():
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.copy_(_shaped(piece, tensor.dtype, tensor))
    return meta


def read(
    raws: Iterable[memoryview], parameters: Sequence[torch.Tensor]
) -> Iterator[tuple[dict[str, Any], Sequence[torch.Tensor | None]]]:
    """What each record says of its step, and its gradients; none where there was no update."""
    for raw in raws:
        record = read_record(raw)
        skipped = record.meta["settings"] is None
        yield record.meta, [] if skipped else gradients_of(record, parameters)


def gradients_of(record: Record, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The record's gradients, in the shapes of the local parameters."""
    sizes, dtypes = record.meta["sizes"], record.meta["dtypes"]
    as_many(len(parameters), len(sizes), "parameters")
    left = iter(views_of(record))
    return [
        None if size < 0 else _shaped(next(left), dtype_of(dtype), parameter)
        for size, dtype, parameter in zip(sizes, dtypes, parameters, strict=True)
    ]


def _shaped(raw: torch.Tensor, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    # A copy of its own: a view as wider numbers needs a start on a whole one.
    return raw.clone().view(dtype).reshape(like.shape)


class Shard:
    """The parameters of one portion and their optimizers, in the parts that this rank holds.

    Operations on a DTensor cost many times the arithmetic of a small shard, in every step that is
    made again while all wait. On its local part the same kernels run.
    """

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        parameters: Sequence[torch.Tensor],
    ) -> None:
        self._parameters, given = list(parameters), list(optimizers)
        self.parts = [local_of(parameter) for parameter in parameters]
        alone = all(type(zero.inside(optimizer)) in BY_ELEMENT for optimizer in given)
        self._cut = {
            parameter: part
            for parameter, part in zip(parameters, self.parts, strict=True)
            if alone and is_distributed(parameter)
        }
        self._whole = {part: parameter for parameter, part in self._cut.items()}
        self._optimizers = [(optimizer, self._parts_of(optimizer)) for optimizer in given]
        self._known = {
            id(value)
            for _, state in self._optimizers
            for entries in state.values()
            for value in entries.values()
        }

    def update(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """One step of every optimizer, with these gradients. False: no new state came to be.

        No other parameter may have a gradient: its optimizer would update it as well.
        """
        pairs = [
            (parameter, part) if parameter in self._cut else (parameter, parameter)
            for parameter, part in zip(self._parameters, self.parts, strict=True)
        ]
        for (parameter, stepped), gradient in zip(pairs, gradients, strict=True):
            if gradient is not None and is_distributed(stepped):
                gradient = _like(parameter, gradient)
            stepped.grad = gradient
        made = not self._cut
        for optimizer, state in self._optimizers:
            with self._in_parts(zero.inside(optimizer), state):
                plain_step(optimizer)
            made |= self._hand_back(zero.inside(optimizer), state)
        for _, stepped in pairs:
            stepped.grad = None
        return made

    def _parts_of(self, optimizer: torch.optim.Optimizer) -> _State:
        found: _State = defaultdict(dict)
        for parameter, entries in zero.inside(optimizer).state.items():
            found[self._cut.get(parameter, parameter)] = {
                key: local_of(value) if isinstance(value, torch.Tensor) else value
                for key, value in entries.items()
            }
        return found

    @contextlib.contextmanager
    def _in_parts(self, optimizer: Any, state: _State) -> Iterator[None]:
        """Meanwhile the optimizer knows nothing but local parts."""
        if not self._cut:
            yield
            return
        whole, before = optimizer.state, [dict(group) for group in optimizer.param_groups]
        optimizer.state = state
        for group in optimizer.param_groups:
            cut = any(parameter in self._cut for parameter in group["params"])
            if cut and group.get("foreach", False) is None:
                # What torch decides for a DTensor. For a plain tensor it might decide otherwise.
                group["foreach"] = False
            group["params"] = [self._cut.get(p, p) for p in group["params"]]
        try:
            yield
        finally:
            optimizer.state = whole
            for group, then in zip(optimizer.param_groups, before, strict=True):
                group.update({k: then[k] for k in ("params", "foreach") if k in then})

    def _hand_back(self, optimizer: torch.optim.Optimizer, state: _State) -> bool:
        """What a step did not change in place, to where everybody looks for it."""
        made = False
        for part, entries in state.items() if self._cut else ():
            parameter = self._whole.get(part, part)
            for key, value in entries.items():
                tensor = isinstance(value, torch.Tensor)
                if tensor and id(value) in self._known:
                    continue
                cut = tensor and part in self._whole and value.shape == part.shape
                optimizer.state[parameter][key] = _like(parameter, value) if cut else value
                if tensor:
                    self._known.add(id(value))
                    made = True
        return made


def _like(parameter: Any, part: torch.Tensor) -> torch.Tensor:
    """A DTensor that is cut as the parameter is."""
    from torch.distributed.tensor import DTensor

    made: torch.Tensor = DTensor.from_local(
        part,
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
