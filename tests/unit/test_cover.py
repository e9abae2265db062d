"""A shard's second home: what a mirror keeps leads to the very same bytes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.errors import Permanent
from keepstep.training import patrol, replay
from keepstep.training.cover import PARTS, Capsule, Keeping, Owner, parts_of, read_record
from keepstep.training.covering import Covering, _goes_on, _Ward, make_again
from keepstep.training.digest import byte_view
from keepstep.training.exchange import Exchange, Frame
from keepstep.training.holders import agree, held_by
from keepstep.training.kept import CAPSULE_STEPS, RECORD, Kept, Sizes, kept_path
from keepstep.training.optimizers import Around
from keepstep.training.raw import tensor_bytes, tensor_view
from keepstep.training.registry import Registry
from keepstep.training.uncovered import Uncovered

ROOMY = Sizes(capsule_bytes=1 << 16, record_bytes=1 << 16, slots=17)


class Wire:
    """An exchange with oneself: what is sent is taken."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, bytes]] = []

    def send(self, step: int, *parts: bytes | memoryview) -> None:
        self.send_all([(step, parts)])

    def send_all(self, frames: Sequence[Frame]) -> None:
        self.frames += [(step, b"".join(parts)) for step, parts in frames]

    def take(self, room: Any = None) -> tuple[int, memoryview]:
        step, raw = self.frames.pop(0)
        view = memoryview(bytearray(len(raw))) if room is None else room(step, len(raw))
        view[:] = raw
        return step, view


def renew(keeping: Keeping, sizes: Sizes, capsule: memoryview, boundary: int = 1) -> str:
    """With what comes over the network: one whole capsule, and no more."""
    wire = Wire()
    wire.send_all([(boundary, [capsule])])
    why = keeping.renew(sizes, 1, wire)  # type: ignore[arg-type]
    assert not wire.frames, "what comes is taken, also where it cannot be kept"
    return why


def add_piece(kept: Kept, boundary: int, offset: int, piece: memoryview) -> None:
    kept.room_for_piece(boundary, offset, len(piece))[:] = piece
    kept.landed(boundary, len(piece))


class Shard:
    """A rank's own part of a model, trained with gradients that nobody else sees."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        # The last rank of an uneven cut may be left with nothing.
        shapes = [(8, 3), (5,), (4, 4), (0, 3)]
        self.parameters = [torch.randn(s, generator=generator, requires_grad=True) for s in shapes]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.1)

    def tensors(self) -> list[torch.Tensor]:
        moments = [
            state[key]
            for parameter in self.parameters
            if (state := self.optimizer.state.get(parameter))
            for key in sorted(state)
        ]
        return [p.detach() for p in self.parameters] + moments

    def content(self) -> list[bytes]:
        return [tensor_bytes(tensor) for tensor in self.tensors()]

    def gradients(self, step: int) -> list[torch.Tensor | None]:
        generator = torch.Generator().manual_seed(1000 + step)
        made: list[torch.Tensor | None] = [
            torch.randn(p.shape, generator=generator) for p in self.parameters
        ]
        # Not every parameter takes part in every step.
        made[step % 3] = None if step % 2 else made[step % 3]
        return made

    def update(self, gradients: list[torch.Tensor | None], step: int) -> None:
        self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        replay.plain_step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)

    def conform(self, layout: object) -> list[torch.Tensor]:
        if layout:
            for parameter in self.parameters:
                self.optimizer.state[parameter] = {
                    "exp_avg": torch.empty_like(parameter),
                    "exp_avg_sq": torch.empty_like(parameter),
                    "step": torch.zeros(()),
                }
        return self.tensors()


def capsule_of(shard: Shard, boundary: int) -> Capsule:
    return Capsule(boundary, {"layout": bool(shard.optimizer.state)}, shard.tensors())


def train(room: Path, steps: int, capsule_steps: int) -> tuple[list[list[bytes]], Keeping]:
    """Some steps of a covered shard; its content at each boundary, and what its mirror has."""
    shard, owner, keeping, wire = Shard(3), Owner(capsule_steps), Keeping(room, 5), Wire()
    # The first step makes the optimizer's moments.
    shard.update(shard.gradients(0), 0)
    first = capsule_of(shard, 1)
    sizes = Sizes(first.size + 1000, 1 << 14, 2 * capsule_steps + 1)
    assert renew(keeping, sizes, tensor_view(first.raw)) == ""
    owner.covered(1)
    contents: list[list[bytes]] = [[], shard.content()]
    for step in range(1, steps):
        gradients = shard.gradients(step)
        capsule = capsule_of(shard, step) if owner.capsule_due(step) else None
        wire.send_all(owner.record(step, {"lr": 0.1 / (1 + step)}, gradients, capsule))
        keeping.take(wire)  # type: ignore[arg-type]
        owner.sent()
        shard.update(gradients, step)
        contents.append(shard.content())
    return contents, keeping


def rebuild(kept: Kept, boundary: int) -> list[bytes]:
    fresh = Shard(99)
    low, raw = kept.capsule()
    replay.load_capsule(raw, fresh.conform)
    for step in range(low, boundary):
        found = kept.record(step)
        assert found is not None, f"the record of step {step} is missing"
        record = read_record(found)
        fresh.update(replay.gradients_of(record, fresh.parameters), step)
    return fresh.content()


@settings(max_examples=30)
@given(steps=st.integers(2, 40), capsule_steps=st.integers(1, 8))
def test_every_boundary_in_reach_is_rebuilt_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, steps: int, capsule_steps: int
) -> None:
    contents, keeping = train(tmp_path_factory.mktemp("room"), steps, capsule_steps)
    kept = Kept(keeping.path)
    reach = kept.reach()
    assert reach is not None
    low, high = reach
    assert high == steps, "the newest record is in reach"
    assert steps - low <= 2 * capsule_steps, "and capsules are renewed"
    for boundary in range(low, high + 1):
        assert rebuild(kept, boundary) == contents[boundary]


def test_a_flipped_bit_in_a_mirror_is_found(tmp_path: Path) -> None:
    _, keeping = train(tmp_path, 6, 4)
    kept = Kept(keeping.path)
    low, raw = kept.capsule()
    raw[-3] ^= 4
    with pytest.raises(Permanent, match="capsule is not what"):
        rebuild(kept, low)
    raw[-3] ^= 4
    found = kept.record(low)
    assert found is not None
    record = read_record(found)
    record.gradients[7] ^= 1
    with pytest.raises(Permanent, match="record is not what"):
        rebuild(kept, low + 1)


def test_a_copy_that_is_none_of_the_shard_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, copy = Shard(3), torch.cat

    def flipping(tensors: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        made = copy(tensors, out=out)
        if out is not None:
            out[0] ^= 1
        return made

    monkeypatch.setattr(torch, "cat", flipping)
    capsule = capsule_of(shard, 1)
    monkeypatch.undo()
    keeping = Keeping(tmp_path, 3)
    sizes = Sizes(capsule.size, 1 << 10, 3)
    assert renew(keeping, sizes, tensor_view(capsule.raw)) == ""
    assert looked_after(keeping)
    with pytest.raises(Permanent, match="capsule is not what"):
        rebuild(Kept(keeping.path), 1)


@given(sizes=st.lists(st.integers(0, 50)))
def test_each_tensor_of_a_capsule_is_in_one_of_its_parts(sizes: list[int]) -> None:
    parts = parts_of(sizes)
    assert len(parts) == PARTS
    assert [at for part in parts for at in part] == list(range(len(sizes)))
    for number, part in enumerate(parts):
        begins = [sum(sizes[:at]) for at in part if sizes[at]]
        assert all(sum(sizes) * number <= PARTS * b < sum(sizes) * (number + 1) for b in begins)


def looked_after(keeping: Keeping) -> list[str]:
    """What a mirror finds while it looks at each part once."""
    steps = range(100, 100 + PARTS)
    found = (patrol.spoilt(keeping, patrol.due(step, 1)) for step in steps)
    return list(filter(None, found))


@pytest.mark.parametrize("every", [1, 2, 3, 7, 8, 20, 100])
def test_a_mirror_looks_at_each_eighth_once_in_so_many_steps(every: int) -> None:
    steps = range(1000, 1000 + max(every, PARTS))
    seen = [eighth for step in steps for eighth in patrol.due(step, every)]
    assert sorted(seen) == list(range(PARTS))
    assert patrol.due(1000, 0) == (), "nobody asked for it"


def test_a_mirror_finds_each_flip_in_what_it_would_be_asked_for(tmp_path: Path) -> None:
    _, keeping = train(tmp_path, 14, CAPSULE_STEPS)
    kept = keeping.kept
    assert kept is not None
    low, high = kept.reach() or (-1, -1)
    assert high - low > CAPSULE_STEPS / 2
    assert not looked_after(keeping)
    places = {f"boundary {low}": kept.capsule()[1]}
    for step in range(low, high):
        record = kept.record(step)
        assert record is not None
        places[f"step {step}"] = record
    for name, raw in places.items():
        # Of numbers, meta and payload; the last byte is the payload's.
        for at in (*range(0, len(raw) - 1, max(1, len(raw) // 25)), len(raw) - 1):
            if name.startswith("step") and 16 <= at < 48:
                continue  # Where the piece was to go: of no use once it is there.
            raw[at] ^= 1 << at % 8
            found = looked_after(keeping)
            assert len(found) >= 1, (name, at)
            assert found[0].startswith(name), found
            raw[at] ^= 1 << at % 8
    assert not looked_after(keeping)


def test_a_mirror_finds_a_flip_in_the_numbers_of_its_file(tmp_path: Path) -> None:
    _, keeping = train(tmp_path, 14, CAPSULE_STEPS)
    kept = keeping.kept
    assert kept is not None
    low, high = kept.reach() or (-1, -1)
    for step in range(low, high):
        at = kept._slot_at(step)
        kept._memory[at] ^= 64
        assert "should lead to" in patrol.spoilt(keeping, (0,))
        kept._memory[at] ^= 64
    index = kept._newest_whole()
    assert index is not None
    kept._memory[kept._capsule_at(index)] ^= 1
    assert any("capsule of boundary" in found or "lead" in found for found in looked_after(keeping))
    kept._memory[kept._capsule_at(index)] ^= 1
    # A piece that does not fit on: the step goes on, and the cover is given up.
    wire, owner = Wire(), Owner()
    shard = Shard(3)
    capsule = capsule_of(shard, 99)
    capsule.sent = 7
    wire.send_all(owner.record(14, {}, shard.gradients(14), capsule))
    keeping.take(wire)  # type: ignore[arg-type]
    assert keeping.kept is None
    assert not wire.frames, "the piece was taken from the network all the same"
    assert "was not begun" in patrol.spoilt(keeping, (0,))


def test_a_step_that_is_made_again_and_cut_off_is_no_flip(tmp_path: Path) -> None:
    _, keeping = train(tmp_path, 6, 4)
    assert not looked_after(keeping)
    # Its record's place is taken by the new one, of which nothing more comes.
    keeping._room_for_record(5, 100)
    assert not looked_after(keeping)
    assert keeping.kept is not None
    assert (keeping.kept.reach() or (0, 0))[1] == 5


@pytest.mark.parametrize("written", range(1, 4))
def test_a_capsule_whose_place_is_being_taken_is_never_whole(tmp_path: Path, written: int) -> None:
    """The writer may die between any two numbers."""
    kept = Kept(kept_path(tmp_path, 0), ROOMY)
    for boundary in (4, 8):
        kept.begin_capsule(boundary, 10)
        add_piece(kept, boundary, 0, memoryview(b"0123456789"))
    numbers: list[tuple[int, ...]] = []
    kept._set_capsule = lambda _, fields: numbers.append(fields)  # type: ignore[method-assign]
    kept.begin_capsule(12, 10)
    del kept._set_capsule  # type: ignore[method-assign]
    before: tuple[int, ...] = (4, 10, 10)
    for after in numbers:
        first, second, third = (*after[:written], *before[written:])
        kept._set_capsule(0, (first, second, third))
        assert kept.capsule()[0] == 8
        before = after


def test_a_record_that_was_not_sealed_ends_the_reach(tmp_path: Path) -> None:
    contents, keeping = train(tmp_path, 6, 4)
    kept = Kept(keeping.path)
    kept.room_for(4, 100)
    _low, high = kept.reach() or (-1, -1)
    assert high == 4
    assert rebuild(kept, 4) == contents[4]


def test_a_capsule_that_grows_does_not_take_the_whole_ones_place(tmp_path: Path) -> None:
    kept = Kept(kept_path(tmp_path, 0), ROOMY)
    assert kept.reach() is None
    for boundary in (4, 8, 12):
        kept.begin_capsule(boundary, 10)
        add_piece(kept, boundary, 0, memoryview(b"01234"))
        assert kept.reach() == ((boundary - 4,) * 2 if boundary > 4 else None)
        add_piece(kept, boundary, 5, memoryview(b"56789"))
        assert kept.reach() == (boundary, boundary)
    # Given up half-way, and begun again: twice.
    for boundary in (16, 17):
        kept.begin_capsule(boundary, 10)
        assert kept.capsule()[0] == 12
    with pytest.raises(Permanent, match="bytes here"):
        add_piece(kept, 17, 3, memoryview(b"x"))


def test_a_file_cut_short_is_no_cover(tmp_path: Path) -> None:
    path = kept_path(tmp_path, 0)
    Kept(path, ROOMY)
    with path.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(Permanent):
        Kept(path)


def test_hooks_do_not_run_when_a_step_is_made_again() -> None:
    parameter = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    parameter.grad = torch.ones(3)
    replay.plain_step(optimizer)
    assert not calls
    assert torch.equal(parameter.detach(), torch.zeros(3))
    optimizer.step()
    scheduler.step()
    assert calls == ["before", "after"]


def test_frames_of_many_parts_cross_a_socket_into_their_room() -> None:
    def hello(text: str) -> bytes:
        return text.encode().ljust(32, b"\0")

    near, far = (Exchange("127.0.0.1", hello(a), hello(b)) for a, b in (("a", "b"), ("b", "a")))
    other = threading.Thread(target=lambda: far.connect(near.endpoint, 5.0))
    other.start()
    near.connect(far.endpoint, 5.0)
    other.join(5.0)
    tensor = torch.arange(3_000_000, dtype=torch.int32)
    room = bytearray(tensor.numel() * 4 + 5)
    taken: list[tuple[int, memoryview]] = []

    def take() -> None:
        taken.append(far.take(lambda step, length: memoryview(room)[:length]))

    taker = threading.Thread(target=take)
    taker.start()
    near.send(7, b"hello", *[memoryview(tensor_bytes(p)) for p in byte_view(tensor).split(9000)])
    near.flush()
    taker.join(5.0)
    assert taken[0][0] == 7
    assert bytes(taken[0][1][:5]) == b"hello"
    assert bytes(room[5:]) == tensor_bytes(tensor)
    near.close()
    far.close()


def test_a_view_keeps_its_tensor_alive() -> None:
    tensor = torch.arange(1000)
    seen = weakref.ref(tensor)
    view = tensor_view(tensor)[8:16]
    del tensor
    assert seen() is not None
    assert int.from_bytes(view, "little") == 1
    del view
    assert seen() is None


def test_a_capsule_of_another_boundary_or_a_broken_wire_leaves_the_old_cover(tmp_path: Path):
    shard, keeping = Shard(3), Keeping(tmp_path, 3)
    first = capsule_of(shard, 1)
    sizes = Sizes(first.size, 1 << 10, 3)
    assert renew(keeping, sizes, tensor_view(first.raw)) == ""
    kept = keeping.kept
    with pytest.raises(Permanent, match="boundary 2 came for 1"):
        renew(keeping, sizes, tensor_view(first.raw), boundary=2)
    broken = Wire()
    with pytest.raises(IndexError):
        keeping.renew(sizes, 1, broken)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["cover-3.kept"]
    assert keeping.kept is kept
    assert Kept(keeping.path).reach() == (1, 1)


def test_where_an_earlier_capsule_lay_the_next_one_is_whole(tmp_path: Path) -> None:
    shard = Shard(3)
    first = capsule_of(shard, 99)
    shard.update(shard.gradients(0), 0)
    # It has become larger, and then says one digit more.
    alone = [capsule_of(shard, boundary) for boundary in (99, 100)]
    room = first.room
    for boundary, expected in zip((99, 100), alone, strict=True):
        tensors = shard.tensors()
        again = Capsule(boundary, {"layout": True}, tensors, room)
        assert tensor_bytes(again.raw) == tensor_bytes(expected.raw)
        room = again.room
    assert again.room is first.room, "nobody was given other memory"
    assert again.size == alone[0].size + 1


def test_a_mirror_without_room_says_so_and_takes_what_comes(tmp_path: Path) -> None:
    keeping, wire = Keeping(tmp_path, 3), Wire()
    capsule = memoryview(bytes(100))
    too_small = Sizes(capsule_bytes=50, record_bytes=1 << 10, slots=3)
    assert "does not fit" in renew(keeping, too_small, capsule)
    assert keeping.kept is None
    assert not list(tmp_path.iterdir())
    shard, owner = Shard(3), Owner()
    for step in (1, 2):
        given = capsule_of(shard, step) if owner.capsule_due(step) else None
        wire.send_all(owner.record(step, {}, shard.gradients(step), given))
        assert len(wire.frames) == 2, "a record, and a piece behind it"
        keeping.take(wire)  # type: ignore[arg-type]
        assert not wire.frames


def test_a_step_that_its_owner_could_not_record_is_a_hole(tmp_path: Path) -> None:
    _, keeping = train(tmp_path, 6, 4)
    wire = Wire()
    wire.send(6)
    keeping.take(wire)  # type: ignore[arg-type]
    assert keeping.kept is not None
    reach = keeping.kept.reach()
    assert reach is not None
    assert reach[1] == 6
    # What comes behind it leads nowhere, and that is no flip.
    wire.send_all(Owner().record(7, {}, Shard(3).gradients(7)))
    keeping.take(wire)  # type: ignore[arg-type]
    assert keeping.newest == -1
    assert not looked_after(keeping)


def test_a_hole_takes_the_place_of_a_record_of_the_same_step(tmp_path: Path) -> None:
    """The step was left, and is made again otherwise."""
    contents, keeping = train(tmp_path, 6, 4)
    wire = Wire()
    wire.send(5)
    keeping.take(wire)  # type: ignore[arg-type]
    assert keeping.kept is not None
    assert (keeping.kept.reach() or (0, 0))[1] == 5
    assert rebuild(keeping.kept, 5) == contents[5]


def keeper_of(optimizer: torch.optim.Optimizer, **models: torch.nn.Module) -> Any:
    """Of a rank that holds all of it alone."""
    registry = Registry(0, 2)
    for name, model in models.items():
        held_by(model, [0])
        registry.add(name, model)
    registry.add("optimizer", optimizer)
    registry.holders = agree([registry.view(), registry.view()])
    place = SimpleNamespace(rank=0)
    return SimpleNamespace(registry=registry, place=place, uncovered=Uncovered())


def test_room_for_a_cover_does_not_hang_on_what_the_settings_say_today() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    covering = Covering(keeper_of(optimizer, model=model))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = covering._need()
    assert before is not None
    optimizer.param_groups[0]["lr"] = 0.009043820750088045
    optimizer.zero_grad(set_to_none=True)
    assert covering._need() == before, "or each new generation would send the whole shard again"
    optimizer.param_groups[0]["amsgrad"] = True
    grown = covering._need()
    assert grown is not None
    assert grown.capsule_bytes > before.capsule_bytes


def test_a_capsule_that_outgrew_its_room_is_told_and_its_records_are_holes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    covering = Covering(keeper_of(optimizer, model=model))
    narrow = Sizes(capsule_bytes=20, record_bytes=1 << 16, slots=17)
    assert covering._record(narrow, 1, updates=True) == [(1, ())]
    assert "outgrown" in capsys.readouterr().err


def test_a_cover_that_leads_elsewhere_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    keeper = keeper_of(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
    raw = tensor_view(Covering(keeper)._capsule(8).raw)
    make_again(keeper, "0", [raw], 8)
    with pytest.raises(Permanent, match="leads to boundary 8, not 12"):
        make_again(keeper, "0", [raw], 12)


def covering_of(keeper: Any) -> Covering:
    """In the middle of a generation."""
    covering = Covering(keeper)
    covering._sizes = ROOMY
    covering.updated()
    return covering


def recorded(covering: Covering, step: int) -> list[Frame]:
    """As write_ahead does it, with nobody at the other end."""
    frames = covering._record(ROOMY, step, updates=True)
    covering._recorded = bool(frames[0][1])
    if covering._changed and covering._recorded:
        covering._still.remember()
    return frames


def trained(covering: Covering, model: torch.nn.Linear, step: int) -> list[Frame]:
    """One step's record, the vote, and the update that follows it."""
    frames = recorded(covering, step)
    covering.voted()
    with torch.no_grad():
        model.weight.mul_(0.5)
    covering.updated()
    return frames


def capsule_at(frames: list[Frame]) -> int:
    """The boundary of a capsule that comes whole with a record; -1: none does."""
    *_, boundary, size, _, length, _ = RECORD.unpack_from(frames[0][1][0])
    return boundary if length and length == size else -1


def test_a_shard_that_something_else_than_the_optimizer_moves_has_no_cover() -> None:
    model, average = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    covering = covering_of(keeper_of(optimizer, model=model, average=average))
    for step in range(2):
        assert trained(covering, model, step) != [(step, ())]
    for step in (2, 3):
        torch._foreach_lerp_([average.weight.data], [model.weight.data], 0.1)
        frames = trained(covering, model, step)
    # And never again: who knows when it moves next.
    assert [frames, trained(covering, model, 4)] == [[(3, ())], [(4, ())]]


@pytest.mark.parametrize("step", [3, 40])
@pytest.mark.parametrize("how", ["in place", "replaced", "stepped by hand"])
def test_what_the_program_changes_once_goes_to_the_mirror_whole(
    step: int, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    covering = covering_of(keeper_of(optimizer, model=model))
    covering._owner.covered(step - 2)
    trained(covering, model, step - 2)
    before = trained(covering, model, step - 1)
    assert capsule_at(before) == -1
    momentum = optimizer.state[model.weight]
    match how:
        case "in place":
            momentum["momentum_buffer"].zero_()
        case "replaced":
            momentum["momentum_buffer"] = torch.zeros(2, 2)
        case _:
            optimizer.step()
    assert covering.reach() == (), "neither here nor on other ranks do records lead there"
    frames = trained(covering, model, step)
    assert capsule_at(frames) == step
    assert frames[1][0] == step
    assert "other than an optimizer changed" in capsys.readouterr().err
    assert [len(trained(covering, model, step + n)) for n in (1, 2)] == [2, 2], "and it goes on"
    assert not covering._still.moved()


def row_of(covering: Covering, keeper: Any) -> Any:
    """What the others are told of it in a new generation."""
    keeper.has_state, keeper.boundary = True, SimpleNamespace(step=9)
    return covering._row(SimpleNamespace(endpoint=SimpleNamespace(host="", port=0)), 9)  # type: ignore[arg-type]


def test_a_cover_goes_on_only_when_its_mirror_is_known_to_have_the_change() -> None:
    """That it left this rank says nothing: only a vote does, which the mirror had withheld."""
    model = torch.nn.Linear(2, 2)
    keeper = keeper_of(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    covering = covering_of(keeper)
    assert not row_of(covering, keeper)["moved"]
    with torch.no_grad():
        model.weight.add_(1)
    recorded(covering, 9)
    assert not covering._still.moved(), "so what this rank has taken of others is whole"
    row = row_of(covering, keeper)
    assert row["moved"]
    reaches = {**row, "reach": (2, 9), "room": row["need"]}
    assert not _goes_on(9, reaches, reaches), "the whole shard is sent"
    assert _goes_on(9, reaches, {**reaches, "moved": False})
    covering.voted()
    assert not row_of(covering, keeper)["moved"]


def test_behind_a_hole_a_mirror_is_not_known_to_have_the_change() -> None:
    model = torch.nn.Linear(2, 2)
    keeper = keeper_of(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    covering = covering_of(keeper)
    with torch.no_grad():
        model.weight.add_(1)
    narrow = Sizes(capsule_bytes=20, record_bytes=1 << 16, slots=17)
    assert covering._record(narrow, 9, updates=True) == [(9, ())]
    covering._recorded = False
    covering.voted()
    covering.updated()
    assert row_of(covering, keeper)["moved"]
    assert capsule_at(trained(covering, model, 10)) == 10
    assert not row_of(covering, keeper)["moved"]


def test_a_step_that_is_made_again_with_its_change_is_one_change() -> None:
    model = torch.nn.Linear(2, 2)
    covering = covering_of(keeper_of(torch.optim.SGD(model.parameters(), lr=0.1), model=model))
    for _ in range(3):
        with torch.no_grad():
            model.weight.zero_()
        # Its vote breaks each time.
        assert capsule_at(recorded(covering, 5)) == 5
    assert capsule_at(trained(covering, model, 5)) == -1
    assert not covering._strange


def test_a_mirror_that_got_a_whole_capsule_at_once_leads_on_from_it(tmp_path: Path) -> None:
    shard, owner, keeping, wire = Shard(3), Owner(8), Keeping(tmp_path, 5), Wire()
    shard.update(shard.gradients(0), 0)
    first = capsule_of(shard, 1)
    sizes = Sizes(first.size + 1000, 1 << 14, 17)
    assert renew(keeping, sizes, tensor_view(first.raw)) == ""
    owner.covered(1)
    for step in range(1, 8):
        if step == 4:
            shard.optimizer.state[shard.parameters[0]]["exp_avg"].zero_()
            owner.begin_anew()
        capsule = capsule_of(shard, step) if owner.capsule_due(step) else None
        gradients = shard.gradients(step)
        wire.send_all(owner.record(step, {}, gradients, capsule))
        keeping.take(wire)  # type: ignore[arg-type]
        owner.sent()
        assert keeping.kept is not None
        assert keeping.kept.reach() == (1 if step < 4 else 4, step + 1)
        shard.update(gradients, step)
    assert rebuild(Kept(keeping.path), 8) == shard.content()


def around(covering: Covering, optimizer: torch.optim.Optimizer) -> list[list[Frame]]:
    """As a session does it. What comes to be written ahead, step by step."""
    told: list[list[Frame]] = []

    def before(beyond: str) -> None:
        covering.update_begins(beyond)
        told.append(recorded(covering, len(told)))
        covering.voted()

    Around(optimizer, before, covering.updated)
    return told


def trains(model: torch.nn.Linear, optimizer: torch.optim.Optimizer, how: str) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).pow(2).sum()
        scaler.scale(loss).backward()
        return loss

    scaler = torch.amp.GradScaler("cpu", 1024.0, enabled=how == "scaled")
    if how == "closure":
        optimizer.step(closure)
        return
    closure()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize(
    ("how", "fused", "says"),
    [("closure", False, "closure"), ("closure", True, "closure"), ("scaled", True, "unscales")],
)
def test_an_update_that_gradients_do_not_lead_to_is_a_hole_and_said_once(
    how: str, fused: bool, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    covering = covering_of(keeper_of(optimizer, model=model))
    covering._owner.covered(0)
    told = around(covering, optimizer)
    for kind in ("plain", how, how, "plain", "plain"):
        trains(model, optimizer, kind)
    assert [frames == [(step, ())] for step, frames in enumerate(told)] == [0, 1, 1, 0, 0]
    assert capsule_at(told[3]) == 3, "from there on it leads again"
    assert capsule_at(told[4]) == -1
    said = capsys.readouterr().err
    assert said.count("keepstep: ") == said.count(says) == 1


@pytest.mark.parametrize(("how", "fused"), [("plain", True), ("scaled", False)])
def test_gradients_that_are_unscaled_before_the_update_lead_to_it(how: str, fused: bool) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    covering = covering_of(keeper_of(optimizer, model=model))
    told = around(covering, optimizer)
    capsule = tensor_view(covering._capsule(0).raw)
    trains(model, optimizer, how)
    weights = tensor_bytes(model.weight)
    record = memoryview(b"".join(bytes(part) for part in told[0][0][1]))
    keeper = covering._keeper
    keeper.reach = lambda point: None  # type: ignore[method-assign]
    make_again(keeper, "0", [capsule, record], 1)
    assert tensor_bytes(model.weight) == weights


def test_a_closure_that_is_heard_of_after_the_record_is_a_change() -> None:
    """Whoever calls grads_ready by hand calls it before optimizer.step()."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    covering = covering_of(keeper_of(optimizer, model=model))
    Around(optimizer, covering.update_begins, covering.updated)
    recorded(covering, 0)
    covering.voted()
    trains(model, optimizer, "closure")
    assert covering._still.moved()
    assert covering.reach() == ()
    assert capsule_at(recorded(covering, 1)) == 1


class Derived(torch.optim.AdamW):
    """May do anything."""


@pytest.mark.parametrize("kind", [Derived, torch.optim.Adafactor, torch.optim.Muon])
def test_an_optimizer_that_may_look_at_more_than_an_element_has_no_cover(
    kind: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    covering = Covering(keeper_of(kind(model.parameters(), lr=0.1), model=model))
    assert covering._need() is None
    assert covering._need() is None
    assert capsys.readouterr().err.count(f"{kind.__name__} is not known") == 1


def test_nobody_waits_for_a_rank_whose_cover_ended(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    covering = Covering(keeper_of(torch.optim.SGD(model.parameters(), lr=0.1), model=model))
    covering._exchange = SimpleNamespace()  # type: ignore[assignment]
    covering._ward = _Ward(1, Keeping(tmp_path, 1))
    row = {"whole": True, "need": None, "reach": None, "room": None}
    covering._take_over(4, 1, row, row)
    assert covering._ward is None
    assert covering._former is not None, "until this generation trains it may be all there is"


def test_what_is_kept_of_a_rank_again_outlives_what_was_kept_of_it_before(tmp_path: Path) -> None:
    model, shard = torch.nn.Linear(2, 2), Shard(3)
    covering = Covering(keeper_of(torch.optim.SGD(model.parameters(), lr=0.1), model=model))
    capsule = capsule_of(shard, 1)
    for name in ("_former", "_ward"):
        keeping = Keeping(tmp_path, 1)
        sizes = Sizes(capsule.size, 1 << 10, 3)
        assert renew(keeping, sizes, tensor_view(capsule.raw)) == ""
        setattr(covering, name, _Ward(1, keeping))
    covering.settled()
    assert Kept(tmp_path / "cover-1.kept").reach() == (1, 1)
    covering._former, covering._ward = covering._ward, None
    covering.settled()
    assert not list(tmp_path.iterdir())


def test_sparse_gradients_are_a_hole_and_the_step_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    covering = covering_of(keeper_of(optimizer, model=model))
    told = around(covering, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    assert told == [[(0, ())], [(1, ())]]
    assert not covering._still.moved()
    assert capsys.readouterr().err.count("gradients are sparse") == 1


def test_parameters_that_come_later_end_a_cover(capsys: pytest.CaptureFixture[str]) -> None:
    model, more = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    keeper = keeper_of(optimizer, model=model, more=more)
    covering = covering_of(keeper)
    before, record = tensor_view(covering._capsule(0).raw), recorded(covering, 0)
    assert record[0][1]
    assert covering._need() is not None
    raw = memoryview(b"".join(bytes(part) for part in record[0][1]))
    optimizer.add_param_group({"params": list(more.parameters())})
    for step in (1, 2):
        assert recorded(covering, step) == [(step, ())]
    assert covering._need() is None
    assert capsys.readouterr().err.count("add_param_group before keepstep.session") == 1
    # And one that was taken into a record by somebody else is refused.
    keeper.reach = lambda point: None
    with pytest.raises(Permanent, match="add_param_group"):
        make_again(keeper, "0", [before, raw], 1)
