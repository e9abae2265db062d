"""Corruption is found where nobody changed anything, and nobody is guessed at."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from keepstep.training.digest import combine, digest
from keepstep.training.registry import Registry
from keepstep.training.rot import Rest, listed, minority


def flip(tensor: torch.Tensor) -> None:
    ctypes.c_uint8.from_address(tensor.data_ptr() + 2).value ^= 8


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def registered(*, cut: bool = False) -> tuple[Registry, nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    if cut:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(5, 4)).sum().backward()
    optimizer.step()
    registry = Registry()
    registry.add("model", model)
    registry.add("optimizer", optimizer)
    return registry, model, optimizer


def test_each_kind_of_tensor_is_looked_at() -> None:
    registry, _, _ = registered()
    rest = Rest(1)
    for name, tensor in registry.tensors():
        rest.remember(registry)
        assert rest.changed(registry) == []
        flip(tensor)
        assert rest.changed(registry) == [name]
        flip(tensor)


DOES: dict[str, Callable[[Any, Any], object]] = {
    "steps": lambda m, o: (m(torch.rand(5, 4)).sum().backward(), o.step()),
    "zeroes": lambda m, o: m[0].bias.zero_(),
    "shrinks": lambda m, o: next(m.parameters()).mul_(0.5),
    "resets a moment": lambda m, o: next(iter(o.state.values()))["exp_avg"].zero_(),
    "loads a model": lambda m, o: m.load_state_dict(
        {key: value.detach().clone() * 2 for key, value in m.state_dict().items()}
    ),
    "loads an optimizer": lambda m, o: o.load_state_dict(copy.deepcopy(o.state_dict())),
    "makes moments anew": lambda m, o: o.state.clear(),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("does", DOES)
def test_what_the_program_does_is_no_flip(does: str, cut: bool) -> None:
    registry, model, optimizer = registered(cut=cut)
    rest = Rest(1)
    rest.remember(registry)
    assert rest.changed(registry) == []
    with torch.set_grad_enabled(does == "steps"):
        DOES[does](model, optimizer)
    changed = rest.changed(registry)
    # BatchNorm alone writes without raising a version: only a step may do that.
    assert set(changed) <= {"model.1.running_mean", "model.1.running_var"}


@pytest.mark.usefixtures("group")
def test_each_kind_of_part_is_looked_at() -> None:
    registry, _, _ = registered(cut=True)
    rest = Rest(1)
    for name, part in registry.tensors():
        rest.remember(registry)
        registry.look_anew()
        assert rest.changed(registry) == []
        flip(part)
        assert rest.changed(registry) == [name]
        flip(part)


def test_nothing_is_compared_with_state_that_is_being_received() -> None:
    registry, model, _ = registered()
    rest = Rest(1)
    rest.remember(registry)
    rest.forget()
    flip(model[0].weight)
    assert rest.changed(registry) == []


def test_the_minority_is_named_and_a_tie_names_nobody() -> None:
    good, bad = {"0-2": "a", "0": "x"}, {"0-2": "b"}
    assert minority([good, {"0-2": "a"}, bad], 2) == ("0-2", True)
    assert minority([good, {"0-2": "a"}, bad], 0) == ("", True)
    assert minority([{"0-1": "a"}, {"0-1": "b"}], 0) == ("0-1", False)
    assert minority([{"0-2": "a"}, {"0-2": "b"}, {"0-2": "c"}], 1) == ("0-2", False)


def test_long_lists_are_cut() -> None:
    assert listed(["a", "b"]) == "a, b"
    assert listed(list("abcde")) == "a, b, c and 2 more"


def test_not_a_number_in_one_replica_only_is_a_difference_like_any_other() -> None:
    replicas = [registered() for _ in range(3)]
    for _, model, optimizer in replicas[1:]:
        model.load_state_dict(replicas[0][1].state_dict())
        optimizer.load_state_dict(replicas[0][2].state_dict())
    rows = [{"0-2": combine((n, digest(t)) for n, t in r.tensors())} for r, _, _ in replicas]
    assert [minority(rows, rank) for rank in range(3)] == [("", True)] * 3
    for wrong in ("nan", "inf"):
        for name, tensor in replicas[1][0].tensors():
            if not tensor.is_floating_point():
                continue
            rest, before = Rest(1), tensor.clone()
            rest.remember(replicas[1][0])
            ctypes.c_float.from_address(tensor.data_ptr()).value = float(wrong)
            assert rest.changed(replicas[1][0]) == [name], "before it is used"
            rows[1] = {"0-2": combine((n, digest(t)) for n, t in replicas[1][0].tensors())}
            assert [minority(rows, rank)[0] for rank in range(3)] == ["", "0-2", ""]
            # In all replicas alike it is the user's, and no corruption.
            assert minority([rows[1]] * 3, 1) == ("", True)
            with torch.no_grad():
                tensor.copy_(before)


def keeper_of(rest: Rest, *, observed: bool) -> Any:
    """As much of a keeper as a look needs."""
    registry, model, _ = registered()
    told: list[tuple[str, bool]] = []
    keeper = SimpleNamespace(
        registry=registry,
        generation=1,
        covering=None,
        boundary=SimpleNamespace(step=7),
        place=SimpleNamespace(observed=observed),
        model=model,
        told=told,
        tear=rest.forget,
        report_broken=lambda _, text, *, corrupt, cover: told.append((text, corrupt)),
    )
    rest.remember(registry)
    return keeper


def test_in_mode_observe_it_is_told_and_training_goes_on() -> None:
    for observed in (False, True):
        rest = Rest(1)
        keeper = keeper_of(rest, observed=observed)
        assert not rest.is_corrupt(keeper)
        flip(keeper.model[0].weight)
        assert rest.is_corrupt(keeper) is not observed, "orders come only where somebody acts"
        assert keeper.told == [("model.0.weight changed between two steps", True)]
        assert rest.looks == 2
