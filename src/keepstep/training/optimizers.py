"""What an optimizer holds: its state by parameter, its settings, and both taken back in place; and
the hooks that lie around its update.

Of ZeRO's optimizer the one inside is meant, which has the state of this rank's own parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from keepstep.errors import Permanent
from keepstep.training import zero
from keepstep.training.holders import is_distributed, local_of
from keepstep.training.plain import shaped_like
from keepstep.training.raw import dtype_of

_ATOMS = frozenset({bool, float, int, str, type(None)})
BY_ELEMENT = frozenset(
    {
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.Adamax,
        torch.optim.AdamW,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Optimizers that treat each element by itself: a part is updated as the whole would be."""
CLOSURE = "optimizer.step is called with a closure or other arguments"


def holds_tensors(state: Any) -> bool:
    if isinstance(state, Mapping):
        return any(map(holds_tensors, state.values()))
    if isinstance(state, list | tuple | set):
        return any(map(holds_tensors, state))
    return isinstance(state, torch.Tensor)


def state_of(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    found: dict[torch.Tensor, dict[str, Any]] = zero.inside(optimizer).state
    return found


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def plain_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"groups": groups_of(optimizer), "state": hidden_of(optimizer)}


def hidden_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What it remembers of each parameter beside tensors."""
    states = state_of(optimizer)
    return [_beside_tensors(states.get(parameter, {})) for parameter in parameters_of(optimizer)]


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def counters_of(optimizer: torch.optim.Optimizer) -> str:
    """What its state holds beside tensors. Those that go by element have no such thing, or do not
    read it; another one inside ZeRO's may."""
    if type(zero.inside(optimizer)) in BY_ELEMENT:
        return ""
    return repr([_beside_tensors(entries) for entries in state_of(optimizer).values()])


def _beside_tensors(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in entries.items() if not isinstance(v, torch.Tensor)}


def as_many(own: int, theirs: int, what: str) -> None:
    """Refuse what is of an optimizer with more, or with fewer."""
    if own != theirs:
        raise Permanent(
            f"an optimizer has {own} {what} here, and {theirs} where its state comes from: "
            "optimizer.add_param_group has to be called before keepstep.session, on every rank"
        )


def load_hidden(optimizer: torch.optim.Optimizer, state: Sequence[Mapping[str, Any]]) -> None:
    parameters = parameters_of(optimizer)
    as_many(len(parameters), len(state), "parameters")
    for parameter, values in zip(parameters, state, strict=True):
        if values:
            own = state_of(optimizer)[parameter]
            own.update({key: shaped_like(own.get(key), value) for key, value in values.items()})


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """A copy of what its groups are set to: a learning rate that is a tensor changes in place."""
    return [
        {k: v if type(v) in _ATOMS else _copied(v) for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, tuple) and any(isinstance(item, torch.Tensor) for item in value):
        return tuple(map(_copied, value))
    return value


@torch.no_grad()
def load_groups(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    as_many(len(optimizer.param_groups), len(groups), "parameter groups")
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        for key, value in values.items():
            # A tensor learning rate (capturable optimizers) must stay the same object.
            if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = shaped_like(group.get(key), value)


def conform_state(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    wanted: dict[str, tuple[str, list[int], bool]],
) -> None:
    states = state_of(optimizer)
    state = states.get(parameter, {})
    for key in [k for k, v in state.items() if isinstance(v, torch.Tensor) and k not in wanted]:
        del state[key]
    if not wanted:
        if not state:
            states.pop(parameter, None)
        return
    state = states[parameter]
    for key, (dtype_name, shape, cut) in wanted.items():
        dtype = dtype_of(dtype_name)
        held = state.get(key)
        if isinstance(held, torch.Tensor) and is_distributed(held) == cut:
            local = local_of(held)
            if (local.dtype, list(local.shape)) == (dtype, shape):
                continue
        if cut:
            state[key] = torch.zeros_like(parameter, dtype=dtype)
        else:
            # Step counters live on the CPU in torch's optimizers; moments live with the parameter.
            like = shape == list(parameter.shape)
            device = parameter.device if like else torch.device("cpu")
            state[key] = torch.zeros(shape, dtype=dtype, device=device)


def beyond_gradients(optimizer: Any, given: Iterable[Any]) -> str:
    """What an update goes by that is neither a gradient, nor a setting, nor state; empty: nothing.

    `given`: what its step was called with. An update that is made again is called with nothing.
    """
    if any(value is not None for value in given):
        return CLOSURE
    # Fused kernels unscale by themselves: a scaler leaves its scale, and what it found, here.
    for each in (optimizer, zero.inside(optimizer)):
        if any(getattr(each, name, None) is not None for name in ("grad_scale", "found_inf")):
            return "a fused optimizer unscales gradients inside its step (leave out fused=True)"
    return ""


class Around:
    """Hooks right before an optimizer's update and right after it, and one behind all others.

    A program has hooks of its own. One that changes gradients belongs before what is recorded of
    them, and one that changes weights behind what is remembered, whoever registered first. An
    update is through when they are.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        before: Callable[[str], None],
        after: Callable[[], None],
        left: Callable[[], None] = lambda: None,
    ) -> None:
        """`before` hears why gradients as they are then say too little; empty: they say all."""
        self._before = optimizer.register_step_pre_hook(
            lambda of, args, kwargs: before(beyond_gradients(of, (*args[1:], *kwargs.values())))
        ).id
        self._after = optimizer.register_step_post_hook(lambda *_: after()).id
        self._left = optimizer.register_step_post_hook(lambda *_: left()).id
        self._all_before: Any = optimizer._optimizer_step_pre_hooks
        self._all_after: Any = optimizer._optimizer_step_post_hooks
        self.close_in()

    def close_in(self) -> None:
        """Others may have been registered since; not while an update runs."""
        if next(reversed(self._all_before)) != self._before:
            self._all_before.move_to_end(self._before)
        if next(iter(self._all_after)) != self._after:
            self._all_after.move_to_end(self._after, last=False)
        if next(reversed(self._all_after)) != self._left:
            self._all_after.move_to_end(self._left)
