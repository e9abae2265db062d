"""Corruption is found where nobody changed anything, and nobody is guessed at."""

from __future__ import annotations

import ctypes

import torch
from torch import nn

from keepstep.training.registry import Registry
from keepstep.training.rot import Rest, listed, minority


def flip(tensor: torch.Tensor) -> None:
    ctypes.c_uint8.from_address(tensor.data_ptr() + 2).value ^= 8


def registered() -> tuple[Registry, nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
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


def test_what_the_program_does_is_no_flip() -> None:
    registry, model, optimizer = registered()
    rest = Rest(1)
    rest.remember(registry)
    model(torch.rand(5, 4)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model[0].bias.zero_()
    changed = rest.changed(registry)
    # BatchNorm alone writes without raising a version: only a step may do that.
    assert set(changed) <= {"model.1.running_mean", "model.1.running_var"}


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
