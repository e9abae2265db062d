"""ZeRO-1's optimizer seen from outside, and a step whose sync breaks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from keepstep.errors import ConfigError
from keepstep.page import Mark
from keepstep.training import halfway, replay
from keepstep.training.holders import agree
from keepstep.training.inner import GroupsBroken
from keepstep.training.registry import Registry
from keepstep.training.steplog import StepLog, StepRecord
from keepstep.training.uncovered import Uncovered


@pytest.fixture(autouse=True)
def world_of_one() -> Iterator[None]:
    # One without threads: were it collected in a forked loader worker, it would wait for its own.
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    gc.collect()


def made(**more: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = nn.Linear(3, 2)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, lr=0.1, weight_decay=0.1, **more
    )
    return model, optimizer


def registered(model: nn.Module, optimizer: Any) -> Registry:
    """As rank 0 of two sees it, that owns every parameter."""
    registry = Registry(0, 2)
    registry.add("model", model)
    registry.add("optimizer", optimizer)
    registry.holders = agree([registry.view(), registry.view()])
    return registry


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 3)).pow(2).sum().backward()
    optimizer.step()


def test_the_state_inside_is_this_ranks_alone_and_the_model_everybodys() -> None:
    model, optimizer = made()
    step(model, optimizer)
    registry = registered(model, optimizer)
    assert registry.portions() == ("0", "0-1")
    assert {name for name, _ in registry.shared("0-1")} == {"model.weight", "model.bias"}
    own = [name for name, _ in registry.shared("0")]
    assert "optimizer.0.exp_avg" in own
    assert "optimizer.1.step" in own
    # A step that is made again needs the parameters as they were.
    assert [name for name, _ in registry.companions("0")] == ["model.weight", "model.bias"]
    assert registry.companions("0-1") == []
    assert registry.synced() == ("0-1",)


def test_any_optimizer_inside_has_whole_parameters() -> None:
    _, optimizer = made()
    assert replay.strange([optimizer]) == ""
    optimizer.optim.__class__ = type("Derived", (torch.optim.Adam,), {})
    assert replay.strange([optimizer]) == ""
    assert replay.strange([optimizer.optim]) == "Derived"


def test_a_step_made_again_is_the_owners_own_with_the_settings_of_then() -> None:
    model, optimizer = made()
    other, again = made()
    for rate in (0.1, 0.03):
        optimizer.param_groups[0]["lr"] = again.param_groups[0]["lr"] = rate
        step(model, optimizer)
        gradients = [parameter.grad for parameter in model.parameters()]
        replay.Shard([again], list(other.parameters())).update(gradients)
    assert torch.equal(model.weight, other.weight)  # type: ignore[arg-type]
    assert again.optim.param_groups[0]["lr"] == 0.03


def test_an_update_inside_the_backward_pass_is_refused() -> None:
    _, optimizer = made(overlap_with_ddp=True)
    with pytest.raises(ConfigError, match="overlap_with_ddp"):
        Registry().add("optimizer", optimizer)


class Standing:
    """A rank in step 5, past its vote."""

    def __init__(self) -> None:
        self.boundary = SimpleNamespace(in_attempt=True, unsynced=False, step=5)
        self.marks: list[Mark] = []
        self.page = SimpleNamespace(mark=lambda mark, _: self.marks.append(mark))
        self.applies_in = -1
        self.uncovered = Uncovered()
        self.registry = Registry()
        self.flying: list[Any] = []
        self.told: list[BaseException] = []

    def reach(self, point: str) -> None: ...

    def launched(self) -> tuple[int, int]:
        return 0, 0

    def is_fault(self, error: BaseException) -> bool:
        return isinstance(error, GroupsBroken)

    def tell_broken(self, error: BaseException) -> None:
        self.told.append(error)


def watched(error: Exception | None = None) -> tuple[Any, nn.Module, Any]:
    keeper: Any = Standing()
    model, optimizer = made()
    halfway.watch(keeper, optimizer)
    if error is not None:

        def broken(rank: int) -> Any:
            raise error

        optimizer._broadcast_params_from_rank = broken
    return keeper, model, optimizer


def test_a_sync_that_ends_leaves_a_whole_step() -> None:
    keeper, model, optimizer = watched()
    step(model, optimizer)
    assert not keeper.boundary.unsynced
    assert keeper.marks == [Mark.UPDATED]
    assert keeper.flying == []


def test_a_sync_that_breaks_lets_the_attempt_end_with_its_own_update_made_once() -> None:
    keeper, model, optimizer = watched(GroupsBroken("aborted"))
    other, plain = made()
    step(model, optimizer)
    step(other, plain)
    assert keeper.boundary.unsynced
    assert len(keeper.told) == 1
    assert torch.equal(model.weight, other.weight)  # type: ignore[arg-type]


def test_who_is_told_to_make_the_update_does_not_sync_in_broken_groups() -> None:
    keeper, model, optimizer = watched(AssertionError("it was launched"))
    keeper.applies_in = 2
    step(model, optimizer)
    assert keeper.boundary.unsynced
    assert not keeper.told


def test_an_error_that_is_no_fault_and_a_tail_that_moves_tensors_are_not_swallowed() -> None:
    _, model, optimizer = watched(ValueError("a mistake"))
    with pytest.raises(ValueError, match="a mistake"):
        step(model, optimizer)
    keeper, model, optimizer = watched(GroupsBroken("aborted"))
    keeper.uncovered.tail_moves = True
    with pytest.raises(GroupsBroken):
        step(model, optimizer)
    keeper, model, optimizer = watched(GroupsBroken("aborted"))
    keeper.registry.add("average", Averaged())
    with pytest.raises(GroupsBroken):
        step(model, optimizer)


class Averaged:
    """Weights that follow the model's, in a part that is no module."""

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": [torch.zeros(2)]}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_a_second_good_sync_does_not_hide_a_first_broken_one() -> None:
    keeper, model, optimizer = watched()
    keeper.boundary.unsynced = True
    step(model, optimizer)
    assert keeper.boundary.unsynced


def test_parameters_that_are_put_into_other_buckets_are_found_there() -> None:
    model, optimizer = made(parameters_as_bucket_view=True)
    step(model, optimizer)
    registry = registered(model, optimizer)
    before = dict(registry.fixed())["model.weight"].data_ptr()
    optimizer._build_param_buckets()
    assert model.weight.data_ptr() != before  # type: ignore[operator]
    assert dict(registry.fixed())["model.weight"].data_ptr() == model.weight.data_ptr()  # type: ignore[operator]


def test_who_owns_no_parameter_says_the_same_of_what_all_hold() -> None:
    model, optimizer = made()
    views = []
    for rank in range(3):
        seen = Registry(rank, 3)
        seen.add("model", model)
        seen.add("optimizer", optimizer)
        views.append(seen.view())
    digests = []
    for rank in range(3):
        registry = Registry(rank, 3)
        registry.add("model", model)
        registry.add("optimizer", optimizer)
        registry.holders = agree(views)
        assert registry.holders.narrowest(rank) == str(rank)
        digests.append(registry.shared_digests()["0-2"])
    assert len(set(digests)) == 1


class Late:
    """A broadcast that is still under way when its group was aborted."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_nobody_is_a_source_while_something_may_still_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(halfway, "SETTLE_SECONDS_MAX", 0.05)
    keeper: Any = Standing()
    keeper.boundary.torn = False
    keeper.flying = [Late(3)]
    halfway.settle(keeper)
    assert not keeper.boundary.torn
    keeper.flying = [Late(10**6)]
    halfway.settle(keeper)
    assert keeper.boundary.torn


def test_a_tail_that_moves_a_registered_tensor_is_seen() -> None:
    model, optimizer = made()
    registry, uncovered = registered(model, optimizer), Uncovered()
    uncovered.update_done((0, 0), registry.versions())
    uncovered.attempt_done((0, 0), updated=True, versions=registry.versions())
    assert not uncovered.tail_moves
    with torch.no_grad():
        model.weight.mul_(0.5)  # type: ignore[operator]
    uncovered.attempt_done((0, 0), updated=True, versions=registry.versions())
    assert uncovered.tail_moves


def test_a_step_that_was_remembered_half_way_gets_its_digest_later(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    log.remember(StepRecord(4, 1, (0, 8), "known"))
    log.remember(StepRecord(5, 1, (8, 16), ""))
    log.amend(lambda number: f"of-{number}")
    assert [record["digest"] for record in log.records()] == ["known", "of-5"]
