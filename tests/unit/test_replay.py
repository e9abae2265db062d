from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from keepstep.training import replay
from keepstep.training.holders import local_of
from keepstep.training.raw import tensor_bytes


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


class Unknown(torch.optim.SGD):
    """Whether it looks at whole tensors, nobody knows."""


OPTIMIZERS = {
    "unknown": lambda parameters: Unknown(parameters, lr=0.1, momentum=0.9),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def parameters_on(mesh: Any, seed: int, kind: str) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    whole = [torch.randn(6, 3), torch.randn(5), torch.randn(1, 4)]
    cut = [distribute_tensor(each, mesh, [Shard(0)], src_data_rank=None) for each in whole]
    # One that is declared to be of the same portion, and is no DTensor.
    # torch's multi-tensor kernels take no mixture.
    plain = [] if kind == "foreach" else [torch.randn(4)]
    return [nn.Parameter(each) for each in (*cut, *plain)]


def gradients(parameters: list[nn.Parameter], step: int) -> list[torch.Tensor | None]:
    torch.manual_seed(100 + step)
    made: list[torch.Tensor | None] = [torch.randn_like(local_of(p)) for p in parameters]
    # One takes part for the first time after a while: its state is made in the middle.
    made[1] = made[1] if step >= 2 else None
    return made


def content(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    found = {str(i): tensor_bytes(local_of(p)) for i, p in enumerate(parameters)}
    for i, parameter in enumerate(parameters):
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{i}.{key}"] = tensor_bytes(local_of(value))
    return found


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_on_local_parts_are_those_on_the_whole_bit_for_bit(mesh: Any, kind: str) -> None:
    owner, target = parameters_on(mesh, 1, kind), parameters_on(mesh, 1, kind)
    first, second = OPTIMIZERS[kind](owner), OPTIMIZERS[kind](target)
    settings = [{k: v for k, v in g.items() if k != "params"} for g in second.param_groups]
    shard = replay.Shard([second], target)
    for step in range(5):
        for parameter, gradient in zip(owner, gradients(owner, step), strict=True):
            whole = gradient is not None and isinstance(parameter, DTensor)
            parameter.grad = replay._like(parameter, gradient) if whole else gradient
        first.step()
        made = shard.update(gradients(target, step))
        assert made == (step in (0, 2) or kind == "unknown"), "moments that are new are told of"
        assert content(target, second) == content(owner, first)
    # What everybody else looks at is as if nothing had been put in its place meanwhile.
    assert all(a is b for a, b in zip(second.param_groups[0]["params"], target, strict=True))
    assert settings == [{k: v for k, v in g.items() if k != "params"} for g in second.param_groups]
    assert all(p.grad is None and local_of(p).grad is None for p in target)
    moments = [v for p in target[:3] for v in second.state[p].values() if v.dim()]
    assert moments
    assert all(isinstance(value, DTensor) for value in moments)
