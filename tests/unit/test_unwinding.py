"""What a broken attempt leaves behind: nothing, also where a script changes its ways in mid-run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from keepstep.training.boundary import Boundary
from keepstep.training.registry import Registry


class Net(nn.Module):
    """BatchNorm, a norm of its own that torch does not know, and a table that hardly moves."""

    mean: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))
        self.register_buffer("table", torch.arange(4.0))
        self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.skips:
            x = self.norm(x)
        return nn.functional.batch_norm(x, self.mean, self.var, training=self.training)  # type: ignore[arg-type]


def bounded(net: nn.Module) -> Boundary:
    torch.manual_seed(0)
    registry = Registry()
    registry.add("model", net)
    return Boundary(registry)


def step(boundary: Boundary, net: nn.Module) -> None:
    boundary.begin()
    net(torch.randn(4, 3))
    boundary.grads_ready()
    boundary.applied()


def left_behind(boundary: Boundary, net: nn.Module) -> list[str]:
    """Buffers that are others after an attempt that broke in its forward pass."""
    boundary.begin()
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    net(torch.randn(4, 3))
    boundary.unwind()
    return [name for name, buffer in net.named_buffers() if not torch.equal(buffer, before[name])]


def freeze(net: Net) -> None:
    net.eval()


def skip(net: Net) -> None:
    net.skips = True


@pytest.mark.parametrize("first", [freeze, skip])
@pytest.mark.parametrize("steps_after", range(7))
def test_statistics_that_begin_to_move_in_mid_run_are_put_back(
    first: Callable[[Net], None], steps_after: int
) -> None:
    net = Net()
    boundary = bounded(net)
    first(net)
    for _ in range(6):
        step(boundary, net)
    net.train()
    net.skips = False
    for _ in range(steps_after):
        step(boundary, net)
    assert left_behind(boundary, net) == []
    assert not boundary.torn


def replace(net: Net) -> None:
    net.table = torch.full((4,), 7.0)


def point_elsewhere(net: Net) -> None:
    net.table.data = torch.full((4,), 7.0)


def write(net: Net) -> None:
    net.table.fill_(7.0)


@pytest.mark.parametrize("change", [replace, point_elsewhere, write])
def test_a_buffer_that_is_another_since_a_later_step_stays_what_it_is(
    change: Callable[[Net], None],
) -> None:
    net = Net()
    boundary = bounded(net)
    for _ in range(5):
        step(boundary, net)
    change(net)
    step(boundary, net)
    assert left_behind(boundary, net) == []
    assert net.table.tolist() == [7.0] * 4
    assert not boundary.torn
    assert not boundary.doubtful


def test_a_rank_whose_buffer_moved_unseen_is_torn_rather_than_put_back_to_an_older_step() -> None:
    net = Net()
    boundary = bounded(net)
    for _ in range(5):
        step(boundary, net)
    net.table.data.fill_(7.0)
    step(boundary, net)
    assert boundary.whole
    boundary.begin()
    assert boundary.unwind() is False
    assert boundary.doubtful == "model.table"
    assert boundary.torn
    assert not boundary.whole
    # What it received is what counts from here on.
    net.table.data.fill_(9.0)
    boundary.arrive(boundary.step)
    for _ in range(5):
        assert left_behind(boundary, net) == []
        step(boundary, net)
    assert net.table.tolist() == [9.0] * 4
    assert not boundary.torn
    assert not boundary.doubtful


def test_a_buffer_that_hardly_moves_is_not_copied_at_each_step() -> None:
    net = Net()
    boundary = bounded(net)
    for _ in range(5):
        step(boundary, net)
    assert boundary._moving is not None
    assert "model.table" not in boundary._moving
    net.eval()
    step(boundary, net)
    net.train()
    step(boundary, net)
    assert boundary._moving is not None, "a mode that was seen before is no reason to learn anew"


def test_a_learning_rate_that_is_a_tensor_goes_back_with_a_broken_attempt() -> None:
    net = nn.Linear(2, 2)
    rate = torch.tensor(0.1)
    betas = (torch.tensor(0.9), torch.tensor(0.99))
    optimizer = torch.optim.Adam(net.parameters(), lr=rate, betas=betas, foreach=False)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    registry = Registry()
    for name, part in (("m", net), ("o", optimizer), ("s", scheduler)):
        registry.add(name, part)
    boundary = Boundary(registry)
    optimizer.step()
    for _ in range(2):
        boundary.begin()
        scheduler.step()
        betas[0].fill_(0.5)
        boundary.unwind()
        (group,) = optimizer.param_groups
        assert group["lr"] is rate, "a compiled or captured step has this very tensor"
        assert rate == torch.tensor(0.1)
        assert group["betas"][0] == torch.tensor(0.9)
        assert scheduler.last_epoch == 0


def test_a_joiner_gets_the_value_of_a_learning_rate_that_is_a_tensor() -> None:
    def built(rate: float) -> tuple[Registry, torch.Tensor]:
        net, held = nn.Linear(2, 2), torch.tensor(rate)
        registry = Registry()
        registry.add("o", torch.optim.SGD(net.parameters(), lr=held))
        return registry, held

    (source, _), (joiner, held) = built(0.025), built(0.1)
    joiner.load_plain(source.plain())
    assert joiner.optimizers["o"].param_groups[0]["lr"] is held
    assert held == torch.tensor(0.025)
