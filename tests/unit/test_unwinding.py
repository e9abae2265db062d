"""What a broken attempt leaves behind: nothing, also where a script changes its ways in mid-run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from keepstep.training.boundary import Boundary
from keepstep.training.registry import Registry
from keepstep.training.uncovered import Uncovered


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


class Growing(nn.Module):
    """Buffers that a forward pass makes, drops, replaces and gives other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0).reshape(1, 4))
        self.register_buffer("none", None)
        self.does: Callable[[], object] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.does()
        return x


def after_a_broken_attempt(
    does: Callable[[Growing], Callable[[], object]], steps_before: int
) -> tuple[Growing, Boundary]:
    net = Growing()
    boundary = bounded(net)
    for _ in range(steps_before):
        step(boundary, net)
    net.does = does(net)
    boundary.begin()
    net(torch.zeros(1))
    boundary.unwind()
    return net, boundary


def set_to(net: Growing, name: str, value: torch.Tensor | None) -> Callable[[], object]:
    return lambda: setattr(net, name, value)


@pytest.mark.parametrize("steps_before", [0, 1, 5])
@pytest.mark.parametrize(
    "does",
    [
        lambda net: set_to(net, "table", torch.ones(6, 4)),
        lambda net: set_to(net, "table", torch.ones(3, 2)),
        lambda net: set_to(net, "table", torch.ones(1, 4, dtype=torch.float64)),
        lambda net: set_to(net, "none", torch.ones(2)),
        lambda net: lambda: net.table.resize_(9).fill_(1),
        lambda net: lambda: net.__delattr__("table"),
        lambda net: set_to(net, "table", None),
    ],
)
def test_a_buffer_that_another_was_made_of_is_what_it_was(
    does: Callable[[Growing], Callable[[], object]], steps_before: int
) -> None:
    net, boundary = after_a_broken_attempt(does, steps_before)
    assert not boundary.torn
    assert net.table.equal(torch.arange(4.0).reshape(1, 4))
    assert net.table.shape == (1, 4)
    assert net.none is None
    # And it may do it for good.
    step(boundary, net)
    net.does = lambda: None
    step(boundary, net)


def drop_first(net: Net) -> None:
    del net.mean


def drop_and_make(net: Net) -> None:
    del net.mean
    net.register_buffer("mean", torch.ones(3))
    net.register_buffer("mask", torch.ones(3))


@pytest.mark.parametrize("does", [drop_first, drop_and_make])
def test_a_buffer_that_was_dropped_comes_back_to_its_place_among_the_others(
    does: Callable[[Net], None],
) -> None:
    """Digests go by the order: two survivors with the same state were a tie."""
    ahead, behind = Net(), Net()
    boundary, other = bounded(ahead), bounded(behind)
    boundary.begin()
    other.begin()
    does(ahead)
    with boundary.rewound():
        pass
    boundary.unwind()
    other.unwind()
    assert list(ahead._buffers)[:3] == list(behind._buffers)
    if does is drop_first:
        assert boundary.registry.shared_digests() == other.registry.shared_digests()


def test_what_lay_in_a_buffers_place_is_not_written_to() -> None:
    """A batch that a forward pass remembers is needed for the second try."""
    net, batch = Growing(), torch.full((1, 4), 5.0)
    boundary = bounded(net)
    net.does = set_to(net, "table", batch)
    boundary.begin()
    net(batch)
    boundary.unwind()
    assert batch.tolist() == [[5.0] * 4]
    assert net.table.tolist() == [[0.0, 1.0, 2.0, 3.0]]


def test_a_rank_that_waits_before_its_update_gets_back_what_its_forward_pass_made() -> None:
    net, batch = Growing(), torch.full((6, 4), 5.0)
    boundary = bounded(net)
    net.does = set_to(net, "table", batch)
    boundary.begin()
    net(batch)
    with boundary.rewound():
        assert net.table.shape == (1, 4)
    assert net.table is batch
    assert not boundary.torn


def test_a_buffer_that_came_in_a_broken_attempt_makes_its_rank_receive() -> None:
    """Nothing says what it was before, and a module may not make it twice."""
    net = Growing()
    boundary = bounded(net)
    net.does = lambda: net.register_buffer("made", torch.ones(2))
    boundary.begin()
    net(torch.zeros(1))
    boundary.unwind()
    assert boundary.doubtful == "model.made"
    assert boundary.torn
    assert net.made is not None


@pytest.mark.parametrize("steps_before", [0, 5])
@pytest.mark.parametrize(
    ("does", "told"),
    [
        (lambda net: set_to(net, "table", torch.ones(6, 4)), "model.table"),
        (lambda net: lambda: net.table.resize_(9).fill_(1), "model.table"),
        (lambda net: set_to(net, "none", torch.ones(2)), "model.none"),
        (lambda net: set_to(net, "table", torch.ones(1, 4)), ""),
        (lambda net: set_to(net, "table", None), ""),
        (lambda net: lambda: None, ""),
    ],
)
def test_a_buffer_that_grew_is_told_of_when_it_is_put_back(
    does: Callable[[Growing], Callable[[], object]], told: str, steps_before: int
) -> None:
    """The program may have noted its size in an attribute, which nobody puts back."""
    net, boundary = after_a_broken_attempt(does, steps_before)
    assert boundary.shrunk == told
    net.does = lambda: None
    boundary.begin()
    boundary.unwind()
    assert boundary.shrunk == ""


def test_a_buffer_that_came_for_another_one_makes_its_rank_receive() -> None:
    net = Growing()
    boundary = bounded(net)
    boundary.begin()
    del net.none
    net.register_buffer("made", torch.ones(2))
    boundary.unwind()
    assert boundary.doubtful == "model.made"
    assert boundary.torn
    assert list(net._buffers) == ["table", "none", "made"]


def test_a_buffer_that_comes_goes_or_grows_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    net = Growing()
    boundary = bounded(net)
    told: list[str] = []
    boundary.tell = told.append
    step(boundary, net)
    net.table = torch.ones(5, 4)
    step(boundary, net)
    net.none = torch.ones(1)
    step(boundary, net)
    del net.table
    for _ in range(4):
        step(boundary, net)
    assert told == ["model.table", "model.none", "model.table"]
    uncovered = Uncovered()
    for name in told:
        uncovered.buffer_comes_or_goes(name)
    assert capsys.readouterr().err.count("keepstep: buffer model.table was") == 1


def test_a_group_that_a_broken_attempt_added_makes_its_rank_receive() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    boundary = bounded(net)
    boundary.registry.add("o", optimizer)
    boundary.begin()
    optimizer.add_param_group({"params": list(net[1].parameters())})
    with boundary.rewound():
        pass
    boundary.unwind()
    assert boundary.torn
