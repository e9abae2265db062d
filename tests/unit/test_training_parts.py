"""The parts of a session that need no peers: data place, private state, boundaries, step log."""

from __future__ import annotations

import json
import sys
from collections import Counter, OrderedDict, defaultdict
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from keepstep import wire
from keepstep.errors import ConfigError, Permanent, Transient
from keepstep.model import Generation, JobId, OrderId, Term
from keepstep.page import RING_SLOTS
from keepstep.training import carried, private, raw, recovery, steplog
from keepstep.training.boundary import Boundary
from keepstep.training.finding import _foresee, _short_turns
from keepstep.training.holders import Holders, View, agree, find_private, held_by
from keepstep.training.inbox import Inbox
from keepstep.training.keeper import Keeper
from keepstep.training.loader import Cursor, count_samples, warm_up
from keepstep.training.movement import SLICE_BYTES, SliceDigest
from keepstep.training.optimizers import Around
from keepstep.training.plain import decode, encode, shaped_like, uncarried
from keepstep.training.raw import fill_from_bytes
from keepstep.training.registry import Registry
from keepstep.training.session import Session
from keepstep.training.trouble import is_communication
from keepstep.training.uncovered import Uncovered


class Loaded(Dataset[torch.Tensor]):
    """Remembers what was loaded: a skip must not load."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.touched: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.touched.append(index)
        return torch.tensor([index])


def loader_of(size: int, batch: int) -> DataLoader[torch.Tensor]:
    data = Loaded(size)
    sampler: Any = DistributedSampler(data, 2, 1, shuffle=True, seed=3)
    return DataLoader(data, batch, sampler=sampler)


def drain(cursor: Cursor) -> list[list[int]]:
    seen = []
    while (group := cursor.peek()) is not None:
        seen.append([int(v) for batch in group for v in batch])
        cursor.advance()
    return seen


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.data())
@settings(max_examples=40)
def test_a_cursor_that_seeks_goes_on_where_the_other_stood(
    batch: int, accumulate: int, passes: int, data: st.DataObject
) -> None:
    whole = drain(Cursor(loader_of(24, batch), passes, accumulate))
    at = data.draw(st.integers(0, len(whole)))
    first = Cursor(loader_of(24, batch), passes, accumulate)
    for _ in range(at):
        first.peek()
        first.advance()
    second = Cursor(loader_of(24, batch), passes, accumulate)
    second.seek(first.position())
    assert drain(second) == whole[at:]


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.data())
@settings(max_examples=60)
def test_what_was_foreseen_changes_no_batch_wherever_the_boundary_is(
    batch: int, accumulate: int, passes: int, data: st.DataObject
) -> None:
    walker = Cursor(loader_of(96, batch), passes, accumulate)
    places = [walker.position()]
    while walker.peek() is not None:
        walker.advance()
        places.append(walker.position())
    whole = drain(Cursor(loader_of(96, batch), passes, accumulate))
    foreseen = data.draw(st.integers(0, len(places) - 1))
    # Earlier, later, in another pass: a guess may be wrong in any way.
    at = data.draw(st.integers(0, len(places) - 1))
    cursor = Cursor(loader_of(96, batch), passes, accumulate)
    before = torch.get_rng_state()
    _foresee(cursor, places[foreseen])
    assert torch.equal(torch.get_rng_state(), before)
    assert cursor.position() == {"pass": 0, "index": 0, "samples": 0}
    cursor.seek(places[at])
    assert drain(cursor) == whole[at:]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("warm", [False, True])
def test_a_pass_that_was_foreseen_is_not_put_in_order_again(workers: int, warm: bool) -> None:
    asked = []

    class Asked(DistributedSampler[torch.Tensor]):
        def __iter__(self) -> Any:
            for number in super().__iter__():
                asked.append(number)
                yield number

    data = Loaded(400)
    loader = DataLoader(
        data, 4, sampler=Asked(data, 2, 1, shuffle=True, seed=3), num_workers=workers
    )
    loader.sampler.set_epoch(1)  # type: ignore[attr-defined]
    expected = [batch.flatten().tolist() for batch in loader][30:]
    cursor = Cursor(loader, 2, None)
    cursor.warm = warm_up(loader) if warm else None
    cursor.foresee({"pass": 1, "index": 28, "samples": 200 + 112})
    asked.clear()
    cursor.seek({"pass": 1, "index": 30, "samples": 200 + 120})
    assert drain(cursor) == expected
    # From a little before the place that was foreseen, not from the top.
    assert len(asked) == 4 * (50 - 28 + RING_SLOTS) - 4


def test_turns_are_as_long_as_before_when_looking_ahead_and_finding_overlap() -> None:
    before = sys.getswitchinterval()
    first, second = ExitStack(), ExitStack()
    first.enter_context(_short_turns)
    second.enter_context(_short_turns)
    assert sys.getswitchinterval() < before
    first.close()
    assert sys.getswitchinterval() < before
    second.close()
    assert sys.getswitchinterval() == before


def test_a_sampler_that_is_not_told_the_pass_is_not_asked_ahead() -> None:
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(Loaded(24), 4, shuffle=True, generator=generator)
    before = generator.get_state()
    Cursor(loader, 1, None).foresee({"pass": 0, "index": 2, "samples": 8})
    assert torch.equal(generator.get_state(), before)


def test_a_seek_loads_nothing_that_it_skips() -> None:
    loader = loader_of(200, 4)
    cursor = Cursor(loader, 1, None)
    cursor.seek({"pass": 0, "index": 20, "samples": 80})
    cursor.peek()
    assert isinstance(loader.dataset, Loaded)
    assert len(loader.dataset.touched) == 4


def test_a_failed_step_gets_the_same_batches_again() -> None:
    cursor = Cursor(loader_of(24, 4), 1, None)
    first = cursor.peek()
    assert cursor.peek() is first
    cursor.advance()
    assert cursor.peek() is not first


def test_a_rehearsal_starts_no_worker_and_moves_nothing() -> None:
    loader = DataLoader(Loaded(24), 4, num_workers=2)
    cursor = Cursor(loader, 1, 2)
    assert len(cursor.rehearsal()) == 2
    assert cursor.position() == {"pass": 0, "index": 0, "samples": 0}


def test_samples_are_counted_in_nested_batches() -> None:
    x = torch.zeros(5, 2)
    assert count_samples((x, x)) == count_samples({"a": x}) == count_samples(x) == 5


def test_an_entry_survives_bytes_and_padding() -> None:
    tensors = [("bn", torch.randn(3)), ("count", torch.tensor(7)), ("none", torch.zeros(0))]
    writer = private.EntryWriter()
    for boundary in (4, 5):
        payload = writer.entry(boundary, {"pass": 1, "index": 2, "samples": 3}, tensors)
    entry = private.decode_entry(payload + bytes(100))
    assert (entry.boundary, entry.loader["index"]) == (5, 2)
    assert entry.names == ("bn", "count", "none")
    back = torch.empty(3)
    fill_from_bytes(back, entry.tensors[0] or b"")
    assert torch.equal(back, tensors[0][1])


def test_an_entry_with_other_tensors_says_so() -> None:
    writer = private.EntryWriter()
    position = {"pass": 0, "index": 0, "samples": 0}
    writer.entry(1, position, [("bn", torch.randn(3))])
    entry = private.decode_entry(writer.entry(2, position, [("bn", torch.ones(4))]))
    assert [len(raw or b"") for raw in entry.tensors] == [16]
    entry = private.decode_entry(writer.entry(3, position, [("mean", torch.ones(4))]))
    assert entry.names == ("mean",)


@given(st.integers(0, 200))
def test_an_entry_cut_short_is_refused(length: int) -> None:
    payload = private.EntryWriter().entry(5, {"pass": 0, "index": 0, "samples": 0}, [])
    with pytest.raises(Permanent):
        private.decode_entry(payload[:length])


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers() | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(PLAIN)
def test_plain_values_survive_json_exactly(value: Any) -> None:
    assert repr(decode(json.loads(json.dumps(encode(value))))) == repr(value)


def test_a_scheduler_keeps_its_container_types_when_it_moves() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def registry_at(epoch: int) -> tuple[Registry, Any]:
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
        scheduler.last_epoch = epoch
        registry = Registry()
        registry.add("scheduler", scheduler)
        return registry, scheduler

    source, _ = registry_at(3)
    target, scheduler = registry_at(0)
    target.load_plain(json.loads(json.dumps(source.plain())))
    assert scheduler.last_epoch == 3
    assert isinstance(scheduler.milestones, Counter)


def test_what_cannot_be_moved_exactly_is_refused_with_the_fix() -> None:
    registry = Registry()
    with pytest.raises(ConfigError, match="save, restore"):
        registry.add("thing", object())
    registry.add("odd", (lambda: {"x": object()}, lambda _: None))
    with pytest.raises(ConfigError, match="plain values"):
        registry.plain()


class Pair(NamedTuple):
    a: int
    b: int


class Undecided(dict[str, int]):
    """Nobody else can make one."""

    def clear(self) -> None:
        raise TypeError("not to be changed")


def kept_by(registry: Registry, *, observed: bool = False) -> Any:
    """As much of a keeper as looks at what can be carried."""
    place = SimpleNamespace(observed=observed, rank=0)
    return SimpleNamespace(registry=registry, place=place, uncovered=Uncovered())


UNCARRIED = [
    {1, 2},
    float,
    b"bytes",
    np.array([0.5]),
    np.zeros(3),
    np.longdouble(1),
    torch.empty(2, device="meta"),
    torch.eye(2).to_sparse(),
    [1, {"in": ({"deep": {3}},)}],
    Pair(1, 2),
    Undecided(),
    MappingProxyType({"a": 1}),
]


@pytest.mark.parametrize("value", UNCARRIED, ids=str)
@pytest.mark.parametrize("where", ["a group", "a part"])
def test_what_cannot_be_moved_exactly_is_refused_before_the_first_step(
    value: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    session = Session({}, None)
    registry = Registry()
    registry.add("sgd", optimizer)
    if where == "a group":
        optimizer.param_groups[0]["odd"] = value
    else:
        registry.add("part", (lambda: {"odd": value}, lambda _: None))
    started: list[Cursor] = []
    session._keeper = kept_by(registry)
    session._keeper.starts_at_the_top = True  # type: ignore[union-attr, misc]
    session._keeper.start = started.append  # type: ignore[union-attr, method-assign, assignment]
    monkeypatch.setattr("keepstep.training.session.checkpoint.agree", lambda keeper: None)
    name, fix = ("sgd", "param_groups") if where == "a group" else ("part", r"\(save, restore")
    with pytest.raises(ConfigError, match=rf"'{name}': state of .*{fix}"):
        next(session.steps(DataLoader([1, 2])))
    assert not started


@pytest.mark.parametrize("value", UNCARRIED, ids=str)
@pytest.mark.parametrize("where", ["a group", "a part"])
def test_in_mode_observe_what_cannot_be_moved_is_said_and_trains(
    value: Any, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    registry = Registry()
    registry.add("it", optimizer if where == "a group" else (lambda: {"odd": value}, print))
    if where == "a group":
        optimizer.param_groups[0]["odd"] = value
    keeper = kept_by(registry, observed=True)
    carried.check(keeper)
    carried.check(keeper)
    assert capsys.readouterr().err.count("state of 'it'") == 1


def test_what_an_optimizer_keeps_for_itself_is_said_and_a_fault_is_a_fallback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """LBFGS of FSDP2 keeps lists of DTensors, GaLore and Shampoo keep objects."""
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    registry = Registry()
    registry.add("sgd", optimizer)
    keeper = kept_by(registry)
    carried.check(keeper)
    optimizer.state[parameter]["odd"] = [object()]
    registry.compared([], first=True, settled=False)
    carried.check_made(keeper)
    carried.check_made(keeper)
    said = capsys.readouterr().err
    assert said.count("'sgd' is of type object") == 1
    assert not carried.by_optimizers(registry)
    told: list[wire.SeatReport] = []
    keeper.has_state = True
    keeper.boundary = SimpleNamespace(whole=True, unsynced=False, step=3)
    keeper.groups = SimpleNamespace(log_digest=lambda: "g", prepared=lambda _: None)
    keeper.report = lambda kinds, phase, seat, generation: told.append(seat)
    recovery.report_boundary(keeper, 1)
    assert told == [recovery.empty_seat(keeper, 1)]
    assert "nothing to give" in capsys.readouterr().err
    # What is compared while nothing fails must not end the run either.
    assert registry.shared_digests(late=False)
    with pytest.raises(ConfigError, match=r"type object .*optimizer"):
        registry.plain()


def test_what_is_looked_through_is_never_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def copies(tensor: torch.Tensor) -> bytes:
        raise AssertionError("a look is for types alone")

    monkeypatch.setattr("keepstep.training.plain.tensor_bytes", copies)
    registry = Registry()
    registry.add("average", (lambda: {"weights": [torch.zeros(9)]}, lambda _: None))
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.LBFGS([parameter])
    parameter.grad = torch.ones(2)
    optimizer.step(lambda: parameter.detach().sum())  # type: ignore[arg-type]
    registry.add("lbfgs", optimizer)
    carried.check(kept_by(registry))


def test_types_and_devices_of_torch_are_carried() -> None:
    """AnyPrecisionAdamW has such groups."""
    value = {"dtype": torch.bfloat16, "size": torch.Size([2, 3]), "device": torch.device("cpu")}
    assert uncarried(value) == ""
    found = decode(json.loads(json.dumps(encode(value))))
    assert found == value
    assert type(found["size"]) is torch.Size


def test_a_device_is_each_ranks_own() -> None:
    """Digests of plain values must be alike, and a joiner computes on its own."""
    one, other = torch.device("cuda", 1), torch.device("cuda", 0)
    assert encode(one) == encode(other)
    assert shaped_like({"d": other}, decode(encode({"d": one}))) == {"d": other}


def test_containers_are_made_again_as_the_receiver_has_them() -> None:
    own: dict[str, Any] = {"d": defaultdict(int, a=1), "l": [Counter("x")], "o": OrderedDict()}
    value = {"d": defaultdict(int, b=2), "l": [Counter("y"), Counter("z")], "o": OrderedDict(c=3)}
    assert uncarried(value) == ""
    found = shaped_like(own, decode(json.loads(json.dumps(encode(value)))))
    assert found == value
    assert [type(found[k]) for k in "do"] == [defaultdict, OrderedDict]
    assert type(found["l"][0]) is Counter
    assert found["d"]["new"] == 0
    assert own["d"] == {"a": 1}


def test_numbers_of_numpy_are_numbers() -> None:
    assert encode([np.float64(0.5), np.int64(3), np.bool_(True), np.float32(0.5)]) == [
        0.5,
        3,
        1,
        0.5,
    ]


def test_a_joiner_gets_just_the_optimizer_state_that_its_sources_have() -> None:
    def made(steps: int) -> tuple[Registry, torch.optim.Optimizer]:
        net = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(steps):
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        registry = Registry()
        registry.add("model", net)
        registry.add("optimizer", optimizer)
        return registry, optimizer

    fresh, warm = made(0)[0], made(2)[0]
    joiner, optimizer = made(2)
    joiner.conform(fresh.layout())
    assert not optimizer.state
    joiner.conform(warm.layout())
    assert joiner.layout() == warm.layout()


def test_state_of_another_shape_is_refused() -> None:
    one, two = Registry(), Registry()
    one.add("model", nn.Linear(2, 2))
    two.add("model", nn.Linear(2, 3))
    with pytest.raises(Permanent, match="same model"):
        one.conform(two.layout())


def test_state_of_an_optimizer_with_other_groups_is_refused() -> None:
    def made() -> tuple[Registry, nn.Module, torch.optim.Optimizer]:
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = torch.optim.AdamW(net[1].parameters())
        registry = Registry(0, 2)
        registry.add("m", net)
        registry.add("o", optimizer)
        registry.holders = agree([registry.view(), Registry(1, 2).view()])
        return registry, net[0], optimizer

    (source, late, optimizer), (joiner, _, _) = made(), made()
    assert not source.regrouped()
    optimizer.add_param_group({"params": list(late.parameters())})
    assert source.regrouped()
    assert not joiner.regrouped()
    for take in (
        lambda: joiner.load_plain(source.plain()),
        lambda: joiner.load_settings(source.settings()),
        lambda: joiner.load_hidden(source.hidden()),
    ):
        with pytest.raises(Permanent, match="add_param_group"):
            take()


class Table(nn.Module):
    """Makes what it needs in its forward pass."""

    table: torch.Tensor
    mask: torch.Tensor

    def __init__(self, length: int = 2) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(length, 2), persistent=False)

    def forward(self, length: int, mask: bool = False) -> None:
        if length > self.table.shape[0]:
            self.register_buffer("table", torch.ones(length, 2), persistent=False)
        if mask and not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(3))


def registered(table: Table) -> Registry:
    registry = Registry()
    registry.add("m", table)
    registry.tensors()
    return registry


def test_a_joiner_gives_its_buffers_the_shapes_of_its_sources() -> None:
    grown, fresh = Table(), Table()
    source, joiner = registered(grown), registered(fresh)
    grown.forward(5)
    joiner.conform(source.layout())
    assert joiner.layout() == source.layout()
    assert fresh.table.shape == (5, 2)
    assert dict(joiner.shared())["m.table"].data_ptr() == fresh.table.data_ptr(), "it lands there"


def test_a_buffer_that_a_forward_pass_registers_is_state_on_all_ranks_alike() -> None:
    early, late = Table(), Table()
    # A joiner rehearses before it looks at its state, others look before their first step.
    late.forward(2, mask=True)
    source, joiner = registered(early), registered(late)
    with pytest.raises(Permanent, match="same model"):
        joiner.conform(source.layout())
    early.forward(2, mask=True)
    joiner.conform(source.layout())
    assert [name for name, *_ in source.layout()] == ["m.table", "m.mask"]


def test_a_buffer_that_is_deleted_is_gone() -> None:
    table = Table()
    registry = registered(table)
    del table.table
    assert registry.tensors() == []
    assert registry.layout() == []


def parted(table: Table, **more: nn.Module) -> Registry:
    """Of a job of two ranks, whose holders were agreed on before the first step."""
    registry = Registry(0, 2)
    for name, module in {"m": table, **more}.items():
        registry.add(name, module)
    registry.holders = agree([registry.view(), Registry(1, 2).view()])
    return registry


def test_buffers_that_came_late_are_private_unless_all_have_them_and_are_no_flip() -> None:
    table = Table()
    registry = parted(table)
    known = registry.shared_digests(late=False)
    table.forward(2, mask=True)
    assert registry.shared_digests(late=False) == known
    assert registry.shared_digests() != known
    both, one = [("m.table", "a"), ("m.mask", "b")], [("m.table", "a")]
    assert find_private([both, both], registry.holders) == set()
    assert find_private([both, one], registry.holders) == {"m.mask"}


def test_a_buffer_that_comes_where_all_is_cut_is_its_ranks_own() -> None:
    table, alone = Table(), nn.Linear(2, 2)
    del table.table
    held_by(alone, [0])
    registry = parted(table, alone=alone)
    assert registry.portions() == ("0",)
    before = registry.shared_digests()
    known = registry.view()
    table.register_buffer("mask", torch.ones(3))
    assert registry.shared_digests() == before
    assert [name for name, _ in registry.private_tensors()] == ["m.mask"]
    assert registry.view() == known, "a rerun rehearses before ranks agree, and finds the same"


@pytest.mark.parametrize(
    ("starts", "rehearsal", "portions"),
    [
        (None, torch.ones(3), ("1",)),
        (torch.ones(3), None, ("0-1", "1")),
        (torch.ones(3), torch.ones(4), ("0-1", "1")),
    ],
    ids=["made", "dropped", "replaced"],
)
def test_a_rerun_that_rehearses_first_sees_the_portions_of_the_first_start(
    starts: torch.Tensor | None, rehearsal: torch.Tensor | None, portions: tuple[str, ...]
) -> None:
    """It refused the checkpoint of the first start: "a job cut in another way"."""

    def started(rehearsed: bool) -> tuple[View, tuple[str, ...]]:
        layer = nn.Linear(2, 2)
        held_by(layer, [1])
        layer.register_buffer("cache", None if starts is None else starts.clone())
        registry = Registry(1, 2)
        registry.add("m", layer)
        if rehearsed:
            layer.cache = rehearsal
        view = registry.view()
        other = View.make([(n, "0" if s == "1" else s) for n, s in pairs(view)])
        registry.holders = agree([other, view])
        return view, registry.portions()

    def pairs(view: View) -> list[tuple[str, str]]:
        return [(key, view.sets[of]) for key, of in zip(view.keys, view.of, strict=True)]

    assert started(rehearsed=True) == started(rehearsed=False)
    assert started(rehearsed=False)[1] == portions


def test_a_declared_buffer_that_a_rehearsed_step_replaces_is_seen_as_it_was_declared() -> None:
    norm = nn.BatchNorm1d(2)
    held_by(norm, [1])
    registry = Registry(1, 2)
    registry.add("m", norm)
    before = registry.view()
    norm.running_mean = torch.ones(2)
    assert registry.view() == before


def test_a_part_may_be_declared_after_it_was_registered() -> None:
    norm = nn.BatchNorm1d(2)
    registry = Registry(1, 2)
    registry.add("m", norm)
    held_by(norm, [1])
    registry.holders = agree([View.make([("m.weight", "0")]), registry.view()])
    assert registry.portion_of("m.running_mean") == "1"


def test_tensors_that_differ_between_ranks_are_private() -> None:
    rows = [[("w", "a"), ("bn", "x")], [("w", "a"), ("bn", "y")], [("w", "a"), ("bn", "x")]]
    assert find_private(rows, Holders.alike(len(rows))) == {"bn"}


class Forward(nn.Module):
    """BatchNorm, dropout, and a buffer of its own."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        out: torch.Tensor = nn.functional.dropout(self.norm(x), 0.5)
        return out


@pytest.mark.parametrize("steps_before", [0, 1, 2, 3, 5])
def test_an_unwound_step_leaves_no_trace(steps_before: int) -> None:
    torch.manual_seed(0)
    net = Forward()
    registry = Registry()
    registry.add("model", net)
    boundary = Boundary(registry)
    for _ in range(steps_before):
        boundary.begin()
        net(torch.randn(4, 3))
        boundary.grads_ready()
        boundary.applied()
    boundary.begin()
    before = ({n: b.clone() for n, b in net.named_buffers()}, torch.get_rng_state())
    net(torch.randn(4, 3))
    assert boundary.unwind() is False
    assert boundary.step == steps_before
    assert all(torch.equal(b, before[0][n]) for n, b in net.named_buffers())
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_registered_generator_goes_back_with_a_broken_attempt() -> None:
    registry, noise = Registry(), torch.Generator().manual_seed(3)
    registry.add("noise", noise)
    boundary = Boundary(registry)
    boundary.begin()
    first = torch.rand(4, generator=noise)
    boundary.unwind()
    assert torch.equal(torch.rand(4, generator=noise), first)


def test_a_step_broken_after_its_update_is_whole_only_with_its_tail_done() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    registry = Registry()
    for name, part in (("m", net), ("o", optimizer), ("s", scheduler)):
        registry.add(name, part)
    boundary = Boundary(registry)
    for tail_done in (True, False):
        boundary.begin()
        boundary.grads_ready()
        optimizer.step()
        boundary.update_done()
        if tail_done:
            scheduler.step()
        assert boundary.whole is tail_done
        assert boundary.unwind() is tail_done
    assert boundary.torn


def record(step: int) -> steplog.StepRecord:
    return steplog.StepRecord(step, 1, (step * 8, step * 8 + 8), f"d{step}")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_says_when_it_was_made_what_was_declared_and_what_a_step_does(
    tmp_path: Path,
) -> None:
    path, moments = tmp_path / "steps.jsonl", iter((10.0, 20.5))
    first, other = steplog.StepLog(path, now=lambda: next(moments)), steplog.StepLog(path)
    first.start_at(0)
    first.remember(record(0))
    first.spend("eval", 1.5)
    first.spend("eval", 0.25)
    first.work = {"tokens": 4096.0}
    first.remember(record(1))
    other.adopt(first.records())
    other.commit(1, "")
    one, two = lines(path)
    assert (one["at"], two["at"]) == (10.0, 20.5)
    assert two["busy"] == {"eval": 1.75}
    assert two["work"] == {"tokens": 4096.0}
    assert not {"busy", "work"} & one.keys()


def test_each_committed_step_has_one_line_across_a_change_of_writer(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    first = steplog.StepLog(path)
    first.start_at(0)
    other = steplog.StepLog(None)
    for step in range(4):
        first.remember(record(step))
        other.remember(record(step))
    first.commit(1, "head")
    second = steplog.StepLog(path)
    second.adopt(json.loads(json.dumps(other.records())))
    second.commit(3, "")
    assert [line["step"] for line in lines(path)] == [0, 1, 2, 3]
    assert lines(path)[1]["head"] == "head"


def test_a_line_cut_short_by_a_death_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    log = steplog.StepLog(path)
    log.start_at(0)
    for step in range(2):
        log.remember(record(step))
    log.commit(0, "")
    with path.open("a") as file:
        file.write('{"step": 1, "gen')
    heir = steplog.StepLog(path)
    heir.adopt(log.records())
    heir.commit(1, "")
    assert [line["step"] for line in lines(path)] == [0, 1]


def test_a_retried_step_is_not_logged_twice(tmp_path: Path) -> None:
    log = steplog.StepLog(tmp_path / "steps.jsonl")
    log.start_at(0)
    log.remember(record(0))
    log.remember(record(1))
    log.forget_after(1)
    log.remember(record(1))
    log.commit(1, "")
    assert [line["step"] for line in lines(tmp_path / "steps.jsonl")] == [0, 1]


def test_a_fallback_is_told_in_the_log(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    log = steplog.StepLog(path)
    log.start_at(0)
    for step in range(3):
        log.remember(record(step))
    log.commit(2, "")
    again = steplog.StepLog(path)
    again.start_at(1)
    again.remember(record(1))
    again.commit(1, "")
    assert [line.get("step", line.get("fallback_to")) for line in lines(path)] == [0, 1, 2, 1, 1]


def test_the_bytes_of_a_tensor_may_be_more_than_a_c_int_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Memory that nobody touches costs nothing; a copy of it would.
    large = torch.empty(2**31 + 1, dtype=torch.uint8)
    large[-2:] = 7
    view = raw.tensor_view(large)
    assert len(view) == 2**31 + 1
    assert view[-2:] == b"\7\7"
    small = torch.arange(6, dtype=torch.int16)
    known = raw.tensor_bytes(small)

    def refuse(*_: object) -> bytes:
        raise AssertionError("counts in C's int")

    monkeypatch.setattr(raw.ctypes, "string_at", refuse)
    monkeypatch.setattr(raw, "_C_INT_MAX", len(known) - 1)
    assert raw.tensor_bytes(small) == known


def test_a_survivor_that_receives_its_own_step_does_not_rewind_its_loader() -> None:
    loader = loader_of(24, 4)
    cursor = Cursor(loader, 1, None)
    cursor.peek()
    assert isinstance(loader.dataset, Loaded)
    loaded = len(loader.dataset.touched)
    cursor.seek(cursor.position_after())
    assert cursor.index == 1
    assert len(loader.dataset.touched) == loaded


def test_opening_a_loader_in_mid_pass_draws_nothing_from_the_global_generator() -> None:
    cursor = Cursor(loader_of(24, 4), 1, None)
    cursor.seek({"pass": 0, "index": 2, "samples": 8})
    before = torch.get_rng_state()
    cursor.peek()
    assert torch.equal(torch.get_rng_state(), before)


def test_warm_loader_workers_begin_at_any_place() -> None:
    loader = DataLoader(Loaded(40), 4, num_workers=2)
    expected = [batch.tolist() for batch in loader][3:]
    cursor = Cursor(loader, 1, None)
    cursor.warm = warm_up(loader)
    cursor.seek({"pass": 0, "index": 3, "samples": 12})
    got = []
    while (group := cursor.peek()) is not None:
        got.append(group[0].tolist())
        cursor.advance()
    assert got == expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[/x/gloo/transport/tcp/pair.cc:537] Connection closed by peer"), True),
        (torch.distributed.DistNetworkError("gone"), True),
        (RuntimeError("shape mismatch"), False),
        (KeyError("gloo"), False),
    ],
)
def test_a_peers_death_is_nobodys_bug(error: BaseException, expected: bool) -> None:
    assert is_communication(error) is expected


@pytest.mark.parametrize(
    ("observed", "ordered", "expected"),
    [(False, False, True), (False, True, True), (True, False, False), (True, True, True)],
)
def test_a_broken_collective_is_the_scripts_own_error_where_nobody_comes_to_help(
    observed: bool, ordered: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepstep.training.keeper.SAVE_SECONDS_MAX", 0.0)
    inbox = Inbox(lambda: None, lambda message: None)
    keeper: Any = SimpleNamespace(place=SimpleNamespace(observed=observed), inbox=inbox, _here=3)
    if ordered:
        save = wire.Quiesce("save")
        inbox.receive(wire.Order(Term(1), Generation(2), OrderId("o"), JobId("j"), (), save))
    error = RuntimeError("Connection reset by peer")
    assert Keeper.is_fault(keeper, error) is expected
    assert not Keeper.is_fault(keeper, ValueError("a mistake"))


def test_a_step_that_is_left_half_way_leaves_no_trace_in_ddp() -> None:
    """After a batch under no_sync DDP skips its next broadcast of buffers; a joiner would not."""
    registry = Registry()
    wrapped = SimpleNamespace(require_forward_param_sync=True)
    registry._replicated.append(wrapped)  # type: ignore[arg-type]
    boundary = Boundary(registry)
    boundary.begin()
    wrapped.require_forward_param_sync = False
    boundary.unwind()
    assert wrapped.require_forward_param_sync


def test_the_rotating_digest_comes_to_every_slice_of_every_tensor() -> None:
    per = SLICE_BYTES // 4
    sizes = (5, per, per + 1, 3 * per, 1)
    model = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in sizes])
    registry = Registry()
    registry.add("model", model)
    slices = SliceDigest()
    count = 1 + 1 + 2 + 3 + 1
    seen = [slices.next(registry, step) for step in range(count)]
    assert len(set(seen)) == count
    assert [slices.next(registry, count + step) for step in range(count)] == seen
    for number, parameter in enumerate(model):
        with torch.no_grad():
            parameter[-1] += 1
        now = [slices.next(registry, step) for step in range(count)]
        assert sum(a != b for a, b in zip(seen, now, strict=True)) == 1, number
        seen = now


def test_a_checkpoint_that_nobody_can_publish_now_is_published_later() -> None:
    """While no orchestrator decides, training goes on: the user's loop must not see an error."""

    def nobody(*_: object) -> tuple[bool, str]:
        raise Transient("nobody answered within 10 s")

    kept: list[Any] = []
    keeper = SimpleNamespace(publish=nobody, saves=SimpleNamespace(add=kept.append))
    Session.publish(SimpleNamespace(_keeper=keeper, step=7), "path")  # type: ignore[arg-type]
    (save,) = kept
    assert (save.done, save.step, save.path) == (True, 7, "path")
    for tell in (Session.publish, lambda session, path: Session.saving(session, None, path)):
        with pytest.raises(ConfigError, match="give at most 4096"):
            tell(SimpleNamespace(_keeper=keeper, step=8), "p" * 5000)
    assert kept == [save]


def test_a_joiner_that_cannot_take_private_state_says_so_and_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def payload() -> bytes:
        raise Permanent("40 bytes do not fit a tensor of shape (2,)")

    monkeypatch.setattr(recovery, "Finding", lambda *_: SimpleNamespace(payload=payload))
    monkeypatch.setattr(recovery, "_form_groups", lambda *_: None)
    told: list[Any] = []
    keeper = SimpleNamespace(
        place=SimpleNamespace(rank=1),
        registry=Registry(),
        boundary=SimpleNamespace(unwind=lambda: False, doubtful="", shrunk=""),
        has_state=False,
        uncovered=None,
        reach=lambda point: None,
        report=lambda kind, phase, seat, generation: told.append((kind, seat.problem)),
    )
    reform: Any = SimpleNamespace(moves=[SimpleNamespace(target=1)])
    recovery._reform(keeper, 2, reform)  # type: ignore[arg-type]
    assert told == [("Reformed", ""), ("Reform", "40 bytes do not fit a tensor of shape (2,)")]


@pytest.mark.parametrize("closure", [True, False])
def test_a_collective_in_a_closure_is_not_told_as_one_between_two_optimizers(
    closure: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    parameter, uncovered = nn.Parameter(torch.ones(1)), Uncovered()
    session = Session({}, None)
    keeper: Any = SimpleNamespace(uncovered=uncovered, covering=None)
    keeper.boundary = SimpleNamespace(in_attempt=True)
    keeper.grads_ready = lambda: uncovered.update_begins((3, 0))
    session._keeper = keeper
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    Around(optimizer, session._update_begins, lambda: uncovered.update_done((5, 0)))
    optimizer.step(lambda: 0.0) if closure else optimizer.step()  # type: ignore[call-overload]
    said = capsys.readouterr().err
    assert ("optimizer.step(closure)" in said) is closure
    assert ("two optimizers" in said) is not closure


def test_a_fault_in_the_programs_hook_behind_the_update_leaves_it_half_done() -> None:
    """One that averages weights over ranks, say: nobody knows how far it came."""
    session, registry = Session({}, None), Registry()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    breaks = [False, True]

    def average(*_: object) -> None:
        if breaks.pop(0):
            raise RuntimeError("a peer is gone")

    optimizer.register_step_post_hook(average)
    session.parts = {"o": optimizer}
    boundary = Boundary(registry)
    keeper = SimpleNamespace(
        registry=registry,
        boundary=boundary,
        covering=None,
        uncovered=Uncovered(),
        grads_ready=boundary.grads_ready,
        update_done=boundary.update_done,
    )
    session._keeper = keeper  # type: ignore[assignment]
    session._register(keeper)  # type: ignore[arg-type]
    boundary.begin()
    optimizer.step()
    assert boundary.whole, "the tail may have changed nothing"
    boundary.applied()
    boundary.begin()
    with pytest.raises(RuntimeError, match="peer is gone"):
        optimizer.step()
    assert not boundary.whole
    assert boundary.unwind() is False
    assert boundary.torn
