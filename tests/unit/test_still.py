"""What is changed past an optimizer is seen, however it is done; and nothing else is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from keepstep.training.optimizers import BY_ELEMENT, Around
from keepstep.training.registry import Registry
from keepstep.training.still import Still

Part = tuple[nn.Module, torch.optim.Optimizer]


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(*, cut: bool, **options: Any) -> Part:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 7))
    if cut:
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 40)).sum().backward()
    optimizer.step()


def still_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Still:
    registry = Registry(0, 1)
    registry.add("model", model)
    registry.add("optimizer", optimizer)
    return Still(registry, registry.portions()[0])


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [state["exp_avg"] for state in optimizer.state.values()]


def part_of(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def exchange(optimizer: torch.optim.Optimizer) -> None:
    state = next(iter(optimizer.state.values()))
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]


CHANGES: dict[str, Callable[[nn.Module, Any], object]] = {
    "one element in place": lambda m, o: moments(o)[0][0, 0].zero_(),
    "foreach": lambda m, o: torch._foreach_zero_(moments(o)),
    "data": lambda m, o: part_of(next(m.parameters())).data.mul_(0.9),
    "its own part": lambda m, o: part_of(moments(o)[1]).zero_(),
    "numpy": lambda m, o: part_of(moments(o)[0]).detach().numpy().fill(1.0),
    "exchanged": lambda m, o: exchange(o),
    "loaded": lambda m, o: o.load_state_dict(copy.deepcopy(o.state_dict())),
    "made anew": lambda m, o: o.state.clear(),
    "an update of its own": lambda m, o: o.step(),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("how", CHANGES)
@torch.no_grad()
def test_a_change_is_seen(how: str, cut: bool) -> None:
    model, optimizer = made(cut=cut)
    with torch.enable_grad():
        train(model, optimizer)
    still = still_of(model, optimizer)
    assert not still.moved(), "nothing was remembered"
    still.remember()
    assert not still.moved()
    CHANGES[how](model, optimizer)
    assert still.moved()
    still.remember()
    assert not still.moved()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"amsgrad": True}])
def test_training_evaluating_and_saving_change_nothing(cut: bool, options: dict[str, Any]) -> None:
    model, optimizer = made(cut=cut, **options)
    still = still_of(model, optimizer)
    seen: list[bool] = []
    Around(optimizer, lambda _: seen.append(still.moved()), still.remember)
    still.remember()
    for _ in range(3):
        train(model, optimizer)
        model.eval()
        with torch.no_grad():
            model(torch.randn(2, 40))
        model.train()
        model.state_dict()
        optimizer.state_dict()
    assert seen == [False] * 3


def test_a_tensor_laid_out_otherwise_is_seen_in_place() -> None:
    weight = nn.Parameter(torch.randn(6, 8).t())
    model = nn.Module()
    model.register_parameter("weight", weight)
    still = still_of(model, torch.optim.SGD([weight], lr=0.1))
    still.remember()
    weight.data.mul_(0.5)
    assert still.moved()


def test_hooks_lie_next_to_the_update_whoever_registers_when() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    told: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: told.append("clip"))
    optimizer.register_step_post_hook(lambda *_: told.append("shrink"))
    around = Around(
        optimizer, lambda _: told.append("["), lambda: told.append("]"), lambda: told.append(".")
    )
    optimizer.register_step_pre_hook(lambda *_: told.append("clip late"))
    optimizer.register_step_post_hook(lambda *_: told.append("shrink late"))
    around.close_in()
    optimizer.step()
    assert told == ["clip", "clip late", "[", "]", "shrink", "shrink late", "."]


class Counting(torch.optim.SGD):
    """Counts its steps in a plain number, as some optimizers do inside ZeRO's."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1


def test_a_counter_that_is_no_tensor_is_seen_when_it_is_reset() -> None:
    model = nn.Linear(3, 2)
    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    train_once(model, optimizer)
    still = still_of(model, optimizer)
    still.remember()
    assert not still.moved()
    optimizer.state[model.bias]["step"] = 0
    assert still.moved()


@pytest.mark.parametrize("kind", sorted(BY_ELEMENT, key=lambda each: each.__name__))
def test_optimizers_that_go_by_element_keep_what_they_go_by_in_tensors(kind: Any) -> None:
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    for _ in range(2):
        train_once(model, optimizer)
    kept = [value for state in optimizer.state.values() for value in state.values()]
    assert all(isinstance(value, torch.Tensor) or value is None for value in kept)


def train_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
