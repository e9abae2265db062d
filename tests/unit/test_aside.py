"""What an evaluation leaves, what a loss scaler remembers, and how a step's tail is judged."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from keepstep.training.aside import Aside
from keepstep.training.boundary import Boundary
from keepstep.training.randomness import read_randomness
from keepstep.training.recorder import Recorder
from keepstep.training.registry import Registry
from keepstep.training.session import Session


def session(**parts: Any) -> Session:
    """One without Keepstep: it must do the same, or results would differ from those with it."""
    return Session(parts, None)


def test_an_evaluation_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].eval()
    own = torch.Generator().manual_seed(1)
    before = read_randomness(), own.get_state(), [b.clone() for b in model.buffers()]
    with session(model=model, own=own).evaluation(seconds_max=1):
        model.eval().train()
        model(torch.randn(4, 2))
        random.random()
        torch.rand(1, generator=own)
    assert read_randomness() == before[0]
    assert torch.equal(own.get_state(), before[1])
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before[2], strict=True))
    assert [module.training for module in model.modules()] == [True, False, True]


def test_a_buffer_that_an_evaluation_gave_another_size_stays() -> None:
    """The program may have noted its size somewhere else."""
    model = nn.BatchNorm1d(2)
    for name in ("table", "replaced", "dropped"):
        model.register_buffer(name, torch.zeros(2))
    with session(model=model).evaluation(seconds_max=1):
        model.table.resize_(9).fill_(1)  # type: ignore[operator, union-attr]
        model.replaced = torch.ones(5)
        del model.dropped
        model(torch.randn(4, 2))
    assert model.table.tolist() == [1.0] * 9  # type: ignore[operator, union-attr]
    assert model.replaced.tolist() == [1.0] * 5
    assert not hasattr(model, "dropped")
    assert model.running_mean.tolist() == [0.0, 0.0]  # type: ignore[operator, union-attr]


def test_an_error_in_an_evaluation_is_the_users() -> None:
    model = nn.Linear(2, 2)

    def evaluate() -> None:
        with session(model=model).evaluation(seconds_max=1):
            model.eval()
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        evaluate()
    assert model.training


def test_something_is_due_only_after_a_step_that_went_through() -> None:
    loop = session(model=nn.Linear(1, 1))
    found = []
    for _ in loop.steps([torch.zeros(1)] * 5):
        found.append(loop.due(2))
        with loop.attempt():
            assert not loop.due(2)
        found.append(loop.due(2))
    # Before and after each of the steps 0 … 4.
    assert found == [False, False, False, True, True, False, False, True, True, False]


def scaled() -> tuple[Boundary, torch.amp.GradScaler, torch.optim.Optimizer]:
    registry = Registry()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    for name, part in {"model": model, "optimizer": optimizer, "scaler": scaler}.items():
        registry.add(name, part)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    return Boundary(registry), scaler, optimizer


@pytest.mark.parametrize("updating", [False, True])
def test_a_step_that_is_left_can_be_unscaled_again(updating: bool) -> None:
    boundary, scaler, optimizer = scaled()
    boundary.begin()
    scaler.unscale_(optimizer)
    if updating:
        boundary.grads_ready()
    assert not boundary.unwind()
    assert boundary.torn is updating
    scaler.unscale_(optimizer)


def test_a_scaler_keeps_what_it_knows_while_its_boundary_is_looked_at() -> None:
    boundary, scaler, optimizer = scaled()
    boundary.begin()
    scaler.unscale_(optimizer)
    with boundary.rewound():
        pass
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize(
    ("changes", "whole"), [({"a"}, False), ({"a", "b"}, True), ({"b"}, False), (set(), False)]
)
def test_a_tail_is_done_when_all_that_has_state_has_changed(changes: set[str], whole: bool) -> None:
    states: dict[str, dict[str, int]] = {"a": {"n": 0}, "b": {"n": 0}}
    registry = Registry()
    for name in states:
        registry.add(name, (lambda n=name: dict(states[n]), lambda state: None))
    registry.add("off", torch.amp.GradScaler("cpu", enabled=False))
    boundary = Boundary(registry)
    boundary.begin()
    boundary.grads_ready()
    boundary.update_done()
    for name in changes:
        states[name]["n"] += 1
    assert boundary.whole is whole
    assert boundary.unwind() is whole


def test_parameters_that_an_evaluation_changed_are_seen() -> None:
    model = nn.Linear(2, 2)
    aside = Aside([model])
    assert not aside.moved
    with torch.no_grad():
        model.weight.mul_(2)
    assert aside.moved


def test_all_record_late_from_where_one_asks_and_not_all_do() -> None:
    recorder = Recorder(SimpleNamespace())  # type: ignore[arg-type]
    assert not recorder.agree([(False, False, []), (False, False, [])])
    # One that is late already asks as well: it may be the only one left that knows.
    assert recorder.agree([(True, True, []), (False, False, [])])
    assert recorder.late
    assert not recorder.agree([(True, True, []), (True, True, [])])
