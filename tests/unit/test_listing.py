"""What is compared, sent and saved is what the program trains, as it is after its last update.

A program may put other tensors in the places of its state; ranks may differ in what they train.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from keepstep import wire
from keepstep.errors import NoHome
from keepstep.model import Rank
from keepstep.page import NEWEST, Ring
from keepstep.training import mirror
from keepstep.training.boundary import Boundary
from keepstep.training.digest import digest
from keepstep.training.homes import EntryHomes
from keepstep.training.keeper import Keeper
from keepstep.training.movement import SliceDigest
from keepstep.training.private import LATER, EntryWriter, check_whole, decode_entry
from keepstep.training.raw import tensor_bytes
from keepstep.training.recorder import Recorder
from keepstep.training.registry import Registry
from keepstep.training.rot import Rest
from keepstep.training.uncovered import Uncovered

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


class AtWork:
    """As much of a keeper as a recorder needs."""

    def __init__(self, registry: Registry) -> None:
        self.registry, self.boundary = registry, Boundary(registry)
        self.homes = EntryHomes(SimpleNamespace(rank=0))  # type: ignore[arg-type]
        self.homes.find = lambda boundary: self.entry  # type: ignore[method-assign]
        self.homes.put = lambda boundary, entry: setattr(self, "entry", entry)  # type: ignore[method-assign]
        self.uncovered, self.entry = Uncovered(), b""
        position = {"pass": 0, "index": 0, "samples": 0}
        self.cursor = SimpleNamespace(
            position=lambda: position, position_after=lambda: position, has_batches=False
        )
        self.recorder = Recorder(self)  # type: ignore[arg-type]


def test_private_state_that_an_update_changes_is_refused_rather_than_taken_one_update_old(
    capsys: pytest.CaptureFixture[str],
) -> None:
    net, optimizer, registry = built()
    net.bias.requires_grad_(False)
    step(net, optimizer)
    registry.private = {"m.weight", "m.bias", "o.0.exp_avg"}
    keeper = AtWork(registry)
    for _ in range(2):
        keeper.boundary.begin()
        keeper.recorder.begin()
        keeper.recorder.record(early=True)
        keeper.boundary.grads_ready()
        step(net, optimizer)
        keeper.boundary.update_done()
        keeper.boundary.applied()
    entry = decode_entry(keeper.entry)
    assert entry.boundary == keeper.boundary.step == 2
    assert entry.lacks == ["m.weight", "o.0.exp_avg"]
    assert capsys.readouterr().err.count("keepstep.held_by") == 1, "said once"
    with pytest.raises(NoHome, match=r"m\.weight is one .* keepstep\.held_by"):
        check_whole(keeper.entry)
    with pytest.raises(NoHome, match=r"m\.weight"):
        registry.restore_private("m.weight", None)
    with pytest.raises(NoHome, match=r"m\.weight"):
        registry.restore_private("m.weight", b"")  # As an earlier release says it.
    # What no optimizer updates is in it, and whoever saves this boundary saves all of it.
    carried = dict(zip(entry.names, entry.tensors, strict=True))
    assert carried["m.bias"] == tensor_bytes(net.bias)
    saved = decode_entry(keeper.homes.get(2))
    assert saved.lacks == []
    assert (saved.randomness, saved.loader) == (entry.randomness, entry.loader)
    held = dict(zip(saved.names, saved.tensors, strict=True))
    assert held["m.weight"] == tensor_bytes(net.weight.detach())
    assert held["o.0.exp_avg"] == tensor_bytes(optimizer.state[net.weight]["exp_avg"])


def test_an_entry_of_another_boundary_is_not_completed_with_what_is_here_now() -> None:
    _, _, registry = built()
    registry.private = {"m.weight"}
    keeper = AtWork(registry)
    keeper.boundary.begin()
    keeper.recorder.begin()
    keeper.recorder.record(early=True)
    assert decode_entry(keeper.homes.get(1)).lacks == ["m.weight"], "the update is not in yet"
    keeper.boundary.unwind()
    assert decode_entry(keeper.homes.get(1)).lacks == ["m.weight"], "nor will it be"
    entry = decode_entry(keeper.recorder.entry())
    assert (entry.boundary, entry.lacks) == (0, []), "between two steps nothing is left out"


def test_an_entry_that_lacks_something_is_nobodys_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payloads = [
        EntryWriter().entry(3, {"pass": 0}, [("m.weight", tensor)])
        for tensor in (torch.ones(2), LATER)
    ]
    place = SimpleNamespace(job="j", room=tmp_path, encrypt=False)
    home = wire.Home(Rank(0), ())
    found = []
    for payload in payloads:
        monkeypatch.setattr(mirror, "find_entry", lambda *_, p=payload: p)
        found.append(mirror.fetch_from(place, home, 3, "secret"))  # type: ignore[arg-type]
        assert mirror.fetch_from(place, home, NEWEST, "secret")[0] == payload  # type: ignore[arg-type]
    assert found[0] == (payloads[0], "this node")
    assert found[1][0] is None
    assert "m.weight" in found[1][1]


def test_a_private_buffer_that_outgrows_its_home_does_not_end_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net, _, registry = built()
    net.register_buffer("cache", torch.zeros(3))
    registry.private = {"m.cache"}
    keeper = AtWork(registry)
    ring = Ring(tmp_path / "ring", payload_bytes_max=20_000, first=(0, b""))
    keeper.homes._ring = ring
    keeper.homes.put = ring.put  # type: ignore[method-assign]
    for count in (3, 100_000, 100_000):
        net.cache = torch.ones(count)
        keeper.boundary.begin()
        keeper.recorder.begin()
        keeper.recorder.record(early=True)
        keeper.boundary.grads_ready()
        keeper.boundary.applied()
        found = ring.get(keeper.boundary.step)
        assert found is not None
        assert decode_entry(found).lacks == (["m.cache"] if count > 3 else [])
    assert (
        capsys.readouterr().err.count("m.cache, which no other rank gives back, has outgrown") == 1
    )
    assert decode_entry(keeper.recorder.entry()).lacks == [], "homes that are made anew have room"


def test_what_has_outgrown_its_home_is_copied_at_no_step_and_asks_for_a_larger_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all is cut it may be alike on all ranks: no comparison finds it."""
    net, _, registry = built()
    net.register_buffer("cache", torch.zeros(3))
    registry.private = {"m.cache"}
    keeper = AtWork(registry)
    keeper.homes._ring = Ring(tmp_path / "ring", payload_bytes_max=20_000, first=(0, b""))
    copied: list[int] = []

    def copy(tensor: torch.Tensor) -> bytes:
        copied.append(tensor.numel())
        return tensor_bytes(tensor)

    monkeypatch.setattr("keepstep.training.private.tensor_bytes", copy)
    for count, outgrown in ((3, False), (100_000, True), (4, False), (100_000, True)):
        net.cache = torch.ones(count)
        keeper.boundary.begin()
        keeper.recorder.begin()
        keeper.recorder.record(early=True)
        keeper.boundary.grads_ready()
        keeper.boundary.applied()
        assert keeper.recorder.wishes()[-1] is outgrown
    assert set(copied) == {3, 4}
    opened: list[int] = []
    rows = [[*keeper.recorder.wishes(), []], [False, False, False, []]]
    monkeypatch.setattr("keepstep.training.keeper.exchange_rows", lambda *_: rows)
    monkeypatch.setattr("keepstep.training.keeper.side_barrier", lambda _: None)
    at_compare: Any = SimpleNamespace(
        groups=None, registry=registry, recorder=keeper.recorder, boundary=keeper.boundary,
        rest=Rest(1), generation=0, open_mirror=lambda at, *_: opened.append(at),
    )  # fmt: skip
    Keeper._compare(at_compare)
    rows[0][2] = False
    Keeper._compare(at_compare)
    assert opened == [4]


def test_a_private_tensor_without_elements_is_carried() -> None:
    """An uneven cut leaves some rank with nothing."""
    net, _, registry = built()
    net.register_buffer("nothing", torch.empty(0))
    registry.private = {"m.nothing"}
    payload = EntryWriter().entry(3, {"pass": 0}, registry.private_tensors())
    check_whole(payload)
    (raw,) = decode_entry(payload).tensors
    assert registry.restore_private("m.nothing", raw)
    both = EntryWriter().entry(3, {}, [("m.nothing", net.nothing), ("m.weight", LATER)])  # type: ignore[list-item]
    assert decode_entry(both).lacks == ["m.weight"]
