"""Who holds what: views of single ranks, closed over the world."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from keepstep import portion
from keepstep.errors import ConfigError
from keepstep.training.boundary import Boundary
from keepstep.training.holders import Holders, View, Views, agree, close, find_private, held_by
from keepstep.training.registry import Registry


def views(*rows: dict[str, list[int]]) -> list[View]:
    return [View.make([(k, portion.name_of(ranks)) for k, ranks in row.items()]) for row in rows]


def test_views_that_share_a_rank_are_one_portion() -> None:
    """A bias replicated by DTensor along one mesh dimension and by DDP along the other."""
    found = agree(
        views(
            {"weight": [0, 2], "bias": [0, 1, 2]},
            {"weight": [1, 3], "bias": [0, 1, 3]},
            {"weight": [0, 2], "bias": [0, 2, 3]},
            {"weight": [1, 3], "bias": [1, 2, 3]},
        )
    )
    assert [found.portion("weight", rank) for rank in range(4)] == ["0-2/2", "1-3/2"] * 2
    assert {found.portion("bias", rank) for rank in range(4)} == {"0-3"}
    assert found.parted
    assert found.portions(1) == ("0-3", "1-3/2")
    assert found.narrowest(1) == "1-3/2"
    assert found.all() == ("0-2/2", "0-3", "1-3/2")
    assert Holders.from_plain(found.to_plain()).portions(2) == found.portions(2)


def test_plain_ddp_is_one_portion() -> None:
    found = agree(views(*[{"weight": [0, 1, 2]}] * 3))
    assert not found.parted
    assert found.portions(2) == ("0-2",) == Holders.alike(3).portions(2)


def test_a_full_shard_has_no_second_home() -> None:
    found = agree(views({"w": [0], "b": [0, 1]}, {"w": [1], "b": [0, 1]}))
    assert found.lonely() == ("0", "1")
    assert Holders.alike(1).lonely() == ()


def test_ranks_with_other_names_hold_what_they_have() -> None:
    """Stages of a pipeline."""
    found = agree(views({"a": [0, 1]}, {"a": [0, 1]}, {"b": [2, 3]}, {"b": [2, 3]}))
    assert found.portions(0) == ("0-1",)
    assert found.portions(3) == ("2-3",)


@given(st.lists(st.sets(st.integers(0, 20), min_size=1), min_size=1))
def test_closed_sets_part_their_ranks(sets: list[set[int]]) -> None:
    parts = [portion.holders_of(p) for p in close(portion.name_of(ranks) for ranks in sets)]
    assert sorted(rank for part in parts for rank in part) == sorted(set().union(*sets))
    for ranks in sets:
        assert sum(not ranks.isdisjoint(part) for part in parts) == 1


class Mesh:
    """What a DTensor's description looks at."""

    mesh = torch.arange(4).reshape(2, 2)

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def get_coordinate(self) -> list[int]:
        return [self.rank // 2, self.rank % 2]


class Placement:
    def __init__(self, replicated: bool) -> None:
        self.replicated = replicated

    def is_replicate(self) -> bool:
        return self.replicated


class Spec:
    def __init__(self, rank: int, *replicated: bool) -> None:
        self.mesh = Mesh(rank)
        self.placements = [Placement(each) for each in replicated]


@pytest.mark.parametrize(
    ("replicated", "expected"),
    [((True, False), "1-3/2"), ((False, True), "0-1"), ((True, True), "0-3"), ((False,) * 2, "1")],
)
def test_a_mesh_tells_who_holds_the_same(replicated: tuple[bool, ...], expected: str) -> None:
    weight: Any = nn.Parameter(torch.zeros(2))
    weight._st_info = Spec(1, *replicated)
    assert Views(1, 4).of(weight) == expected


def test_declared_holders_count_and_must_name_this_rank() -> None:
    layer = nn.Linear(2, 2)
    held_by(layer, [1, 3])
    assert Views(1, 4).of(layer.weight) == "1-3/2"
    with pytest.raises(ConfigError, match="rank 0"):
        Views(0, 4).of(layer.weight)
    with pytest.raises(ConfigError, match="needs the ranks"):
        held_by(layer, [])


def test_state_is_declared_by_its_name_as_well() -> None:
    registry = Registry(1, 4)
    registry.add("model", nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert len(registry.under("model.0")) == 2
    assert len(registry.under("model.1")) == 5
    assert registry.under("model.1.bias")[0].shape == (2,)
    assert registry.under("mode") == []


def test_parameters_that_no_module_shows_are_named() -> None:
    registry = Registry()
    layer, hidden = nn.Linear(2, 2), nn.Parameter(torch.zeros(1))
    registry.add("model", layer)
    registry.add("optimizer", torch.optim.SGD([*layer.parameters(), hidden], lr=0.1))
    assert registry.strays() == ["optimizer.2"]


def cut_registry(rank: int, seed: int = 0) -> Registry:
    """A cut layer with a twin two ranks away, and one that all hold."""
    torch.manual_seed(seed)
    layers = nn.ModuleDict({"cut": nn.Linear(2, 2), "whole": nn.Linear(2, 2)})
    held_by(layers["cut"], [rank % 2, rank % 2 + 2])
    registry = Registry(rank, 4)
    registry.add("model", layers)
    optimizer = torch.optim.AdamW(layers.parameters())
    layers["whole"](layers["cut"](torch.ones(1, 2))).sum().backward()
    optimizer.step()
    registry.add("optimizer", optimizer)
    registry.holders = agree([View.make(list(zip(*names(rank), strict=True))) for rank in range(4)])
    return registry


def names(rank: int) -> tuple[list[str], list[str]]:
    cut = portion.name_of([rank % 2, rank % 2 + 2])
    keys = ["model.cut.weight", "model.cut.bias", "model.whole.weight", "model.whole.bias"]
    keys += [f"optimizer.{index}" for index in range(4)]
    return keys, [cut, cut, "0-3", "0-3"] * 2


def test_state_falls_into_portions_and_optimizer_state_follows_its_parameter() -> None:
    registry = cut_registry(1)
    assert registry.portions() == ("0-3", "1-3/2")
    held = [name for name, _ in registry.shared("1-3/2")]
    assert "model.cut.weight" in held
    assert "optimizer.0.exp_avg" in held
    assert "optimizer.2.exp_avg" not in held
    both = registry.shared("0-3") + registry.shared("1-3/2")
    assert sorted(n for n, _ in both) == sorted(n for n, _ in registry.shared())


def test_what_a_rank_holds_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step asks for each buffer that came late: 64 ms of it at 1,024 ranks."""
    registry = cut_registry(1)
    asked: list[int] = []
    holds = portion.holds
    monkeypatch.setattr(
        "keepstep.training.holders.portion.holds",
        lambda name, rank: (asked.append(rank), holds(name, rank))[1],
    )
    registry.holders = Holders.from_plain(registry.holders.to_plain())
    before = registry.portions()
    count = len(asked)
    assert count
    assert registry.portions() == before == ("0-3", "1-3/2")
    assert len(asked) == count
    assert registry.holders.portions(2) == ("0-2/2", "0-3"), "of another rank"
    registry.holders = Holders.alike(4)
    assert registry.portions() == ("0-3",), "and what is agreed on anew is another one"


def test_each_portion_has_its_digest_and_plain_values_go_with_the_narrowest() -> None:
    one, twin = cut_registry(1), cut_registry(3)
    assert one.shared_digests() == twin.shared_digests()
    before = one.shared_digests()
    one.optimizers["optimizer"].param_groups[0]["lr"] = 0.5
    after = one.shared_digests()
    assert after["0-3"] == before["0-3"]
    assert after["1-3/2"] != before["1-3/2"]
    with torch.no_grad():
        one.modules["model"]["whole"].weight.add_(1)  # type: ignore[index, union-attr]
    assert one.shared_digests()["0-3"] != before["0-3"]
    assert one.shared_digests()["1-3/2"] == after["1-3/2"]


def test_conforming_to_one_portion_leaves_the_others_alone() -> None:
    warm, joiner = cut_registry(1), cut_registry(1)
    joiner.optimizers["optimizer"].state.clear()
    joiner.conform(warm.layout("1-3/2"), "1-3/2")
    assert joiner.layout("1-3/2") == warm.layout("1-3/2")
    assert joiner.layout("0-3") != warm.layout("0-3")
    joiner.conform(warm.layout("0-3"), "0-3")
    assert joiner.layout() == warm.layout()


def test_only_ranks_that_should_hold_the_same_are_compared() -> None:
    holders = agree([View.make([("w", p), ("b", "0-3")]) for p in ["0-2/2", "1-3/2"] * 2])
    rows = [[("w", str(rank % 2)), ("b", "same")] for rank in range(4)]
    assert find_private(rows, holders) == set()
    rows[3] = [("w", "other"), ("b", "same")]
    assert find_private(rows, holders) == {"w"}


def test_a_look_back_at_the_boundary_leaves_the_step_as_it_is() -> None:
    registry = Registry()
    norm = nn.BatchNorm1d(2)
    registry.add("norm", norm)
    boundary = Boundary(registry)
    boundary.begin()
    at_boundary = norm.running_mean.clone()  # type: ignore[union-attr]
    norm(torch.rand(4, 2))
    moved, rng = norm.running_mean.clone(), torch.get_rng_state()  # type: ignore[union-attr]
    with boundary.rewound():
        assert torch.equal(norm.running_mean, at_boundary)  # type: ignore[arg-type]
        assert not torch.equal(torch.get_rng_state(), rng)
    assert torch.equal(norm.running_mean, moved)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), rng)
    assert boundary.in_attempt
