"""A program that puts other tensors in the places of its state: what is compared, sent and saved is
what it trains."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from keepstep.training.digest import digest
from keepstep.training.movement import SliceDigest
from keepstep.training.registry import Registry
from keepstep.training.rot import Rest

Parts = tuple[nn.Linear, torch.optim.Optimizer]
Change = Callable[[nn.Linear, torch.optim.Optimizer], None]


def built() -> tuple[nn.Linear, torch.optim.Optimizer, Registry]:
    torch.manual_seed(0)
    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    registry = Registry()
    registry.add("m", net)
    registry.add("o", optimizer)
    return net, optimizer, registry


def step(net: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def load_older(net: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def clear(net: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def reset_moments(net: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[net.weight]["exp_avg"] = torch.zeros_like(net.weight)


def other_data(net: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    net.weight.data = net.weight.data.clone()


def from_a_vector(net: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    vector = nn.utils.parameters_to_vector(net.parameters())
    nn.utils.vector_to_parameters(2 * vector.detach(), net.parameters())


def other_type(net: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    net.to(torch.float64).to(torch.float32)


def one_more(net: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[net.weight]["extra"] = torch.ones(3)


CHANGES = [load_older, clear, reset_moments, other_data, from_a_vector, other_type, one_more]


def truth(net: nn.Linear, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {f"m.{name}": parameter.detach() for name, parameter in net.named_parameters()}
    for index, parameter in enumerate(net.parameters()):
        for key, value in optimizer.state[parameter].items():
            found[f"o.{index}.{key}"] = value
    return found


def assert_live(shared: list[tuple[str, torch.Tensor]], expected: dict[str, torch.Tensor]) -> None:
    assert {name: t.data_ptr() for name, t in shared} == {
        name: t.data_ptr() for name, t in expected.items()
    }


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_digested_and_sent_is_what_the_program_trains(change: Change) -> None:
    net, optimizer, registry = built()
    (portion,) = registry.portions()
    for _ in range(2):
        step(net, optimizer)
        registry.shared_digests()
        registry.shared(portion)
    change(net, optimizer)
    step(net, optimizer)
    live = truth(net, optimizer)
    assert dict(registry.digests()) == {name: digest(tensor) for name, tensor in live.items()}
    assert_live(registry.shared(), live)
    assert_live(registry.shared(portion), live)
    assert [name for name, *_ in registry.layout(portion)] == [n for n, _ in registry.shared()]


@pytest.mark.parametrize("change", CHANGES)
def test_a_saved_portion_is_what_the_program_trains(change: Change) -> None:
    net, optimizer, registry = built()
    (portion,) = registry.portions()
    for _ in range(2):
        step(net, optimizer)
        registry.shared(portion)
    change(net, optimizer)
    step(net, optimizer)
    # As whoever writes a checkpoint begins.
    registry.forget_digests()
    assert_live(registry.shared(portion), truth(net, optimizer))


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_that_goes_over_all_tensors_sees_that_one_is_another(change: Change) -> None:
    net, optimizer, registry = built()
    (portion,) = registry.portions()
    step(net, optimizer)
    registry.shared(portion)
    key = registry.layout_key()
    step(net, optimizer)
    registry.look_again()
    assert registry.layout_key() == key, "nothing was put in a place"
    change(net, optimizer)
    step(net, optimizer)
    registry.look_again()
    assert_live(registry.shared(portion), truth(net, optimizer))


@pytest.mark.parametrize("change", CHANGES)
def test_the_rotating_digest_is_of_what_the_program_trains(change: Change) -> None:
    net, optimizer, registry = built()
    slices = SliceDigest()
    for number in range(2):
        step(net, optimizer)
        slices.next(registry, number)
    change(net, optimizer)
    step(net, optimizer)
    if change is one_more:
        registry.look_anew()
    known = registry.fixed() if change is one_more else truth(net, optimizer).items()
    assert [slices.next(registry, number) for number in range(len(known))] == [
        SliceDigest().next(fresh(registry), number) for number in range(len(known))
    ]


def fresh(registry: Registry) -> Registry:
    """Another look at the same parts, by somebody who has seen nothing before."""
    other = Registry()
    other.add("m", registry.modules["m"])
    other.add("o", registry.optimizers["o"])
    return other


def test_a_flip_in_a_tensor_that_was_put_in_another_ones_place_is_found() -> None:
    net, optimizer, registry = built()
    rest = Rest(1)
    step(net, optimizer)
    rest.remember(registry)
    load_older(net, optimizer)
    step(net, optimizer)
    rest.remember(registry)
    optimizer.state[net.weight]["exp_avg"].data[0, 0] += 1
    assert rest.changed(registry) == ["o.0.exp_avg"]
