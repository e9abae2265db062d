"""Covers at work: when they are opened, what a step writes ahead, and how a target is rebuilt.

cover.py and kept.py know bytes; this file knows the session: which tensors of the registry live on
one rank only, when the vote comes, and which rank is whose mirror. A cover goes on through a new
generation where owner and mirror still have each other and the boundary is in reach; otherwise the
whole shard is sent once, before anybody resumes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import torch

from keepstep import portion, sabotage, wire
from keepstep.errors import Permanent
from keepstep.model import Endpoint, Move
from keepstep.training import carried, patrol, replay
from keepstep.training.cover import Capsule, Keeping, Owner, slice_digest
from keepstep.training.exchange import Exchange, Frame
from keepstep.training.holders import local_of
from keepstep.training.kept import CAPSULE_STEPS, Kept, Sizes
from keepstep.training.mirror import CONNECT_SECONDS_MAX, hello
from keepstep.training.raw import bytes_tensor, size_bytes, tensor_view
from keepstep.training.readahead import Readahead
from keepstep.training.sealed_side import side_of
from keepstep.training.side import exchange_rows, receive_json, send_json
from keepstep.training.still import Still

if TYPE_CHECKING:
    from keepstep.training.keeper import Keeper

_TAG = 31
CHUNK_BYTES = 8 * 1024 * 1024
LOG_SLOTS = 2 * CAPSULE_STEPS + 1
META_BYTES = 64 * 1024
DESCRIBED_BYTES = 512
"""Of a description, for each tensor: its name, its digest, its size."""
COUNTER_BYTES = 64
VALUE_BYTES = 64
"""Of a plain value with its name, as text."""


class Covering:
    """One per process of a job that has portions with a single holder."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._owner = Owner()
        self._ward: _Ward | None = None
        """Whom this rank keeps a cover of."""
        self._former: _Ward | None = None
        """The same before this generation: until it trains, that cover may be all there is."""
        self._sizes: Sizes | None = None
        """Room that the mirror has for my capsules and records; None: nothing is sent."""
        self._exchange: Exchange | None = None
        self.generation = -1
        self._still = Still(keeper.registry, self._mine)
        """Does only the optimizer change what this rank alone holds? Gradients lead nowhere else,
        and better no cover than a stale one."""
        self._changed = self._changed_before = False
        """Something else did, before the last record; and before the last one that was voted on."""
        self._unproven = False
        """And it is not known that the mirror has it as it is now."""
        self._strange = False
        """That happens all the time: there is no cover any more."""
        self._recorded = False
        """The last record was one, and no hole."""
        self._copied: torch.Tensor | None = None
        """Where the newest capsule lies, which is on its way: memory that each step would have to
        be given anew costs more than to fill it."""
        self._beyond = ""
        """What the update that comes next goes by beside its record; empty: nothing."""

    # ------------------------------------------------------------ a generation begins

    def open(self, boundary: int, generation: int) -> None:
        """Find the neighbours, and give every lonely portion its second home. All ranks come."""
        keeper = self._keeper
        place, stride = keeper.place, keeper.mirror_stride
        self.close()
        self.generation, self._sizes = generation, None
        mirror = (place.rank + stride) % place.world_size
        ward = (place.rank - stride) % place.world_size
        if self._ward is not None and self._ward.rank != ward:
            self._former, self._ward = self._former or self._ward, None
        if mirror == place.rank:
            return
        said = hello(keeper.secret, generation, place.rank, mirror, "cover")
        expected = hello(keeper.secret, generation, ward, place.rank, "cover")
        exchange = self._exchange = Exchange(place.address, said, expected, sealed=place.encrypt)
        rows = exchange_rows(keeper.groups, self._row(exchange, boundary))
        exchange.connect(Endpoint(*rows[mirror]["at"]), CONNECT_SECONDS_MAX)
        self._hand_over(boundary, rows[mirror], rows[place.rank])
        self._take_over(boundary, ward, rows[ward], rows[place.rank])
        exchange.flush()
        self.updated()

    def _row(self, exchange: Exchange, boundary: int) -> dict[str, Any]:
        """What the others have to know of me: as an owner, and as a mirror."""
        keeper = self._keeper
        need = self._need()
        self._unproven = self._unproven or self._still.moved()
        kept = self._ward.keeping.kept if self._ward is not None else None
        at = exchange.endpoint
        return {
            "at": [at.host, at.port],
            # Who is not verified at the boundary has nothing to hand over; nobody resumes then.
            "whole": keeper.has_state and keeper.boundary.step == boundary,
            "need": list(astuple(need)) if need else None,
            "moved": self._unproven,
            "reach": kept.reach() if kept is not None else None,
            "room": list(astuple(kept.sizes)) if kept else None,
        }

    def _need(self) -> Sizes | None:
        """Room for what this rank alone holds; None if it holds nothing alone."""
        tensors, parameters = self._tensors(), self._parameters()
        registry = self._keeper.registry
        if self._mine not in registry.portions() or len(registry.optimizers) > 1:
            return None
        if registry.regrouped():
            self._keeper.uncovered.regrouped()
            return None
        if strange := replay.strange(registry.optimizers.values()):
            self._keeper.uncovered.strange_optimizer(strange)
            return None
        if not carried.by_optimizers(registry):
            return None
        of_optimizer = tuple(f"{name}." for name in registry.optimizers)
        plain = sum(size_bytes(t) for n, t in tensors if not n.startswith(of_optimizer))
        made = sum(size_bytes(t) for n, t in tensors if n.startswith(of_optimizer))
        gradients = sum(_gradient_bytes(parameter) for _, parameter in parameters)
        held = sum(size_bytes(local_of(parameter)) for _, parameter in parameters)
        # Moments may be made later, with a parameter's first gradient: and a counter each.
        groups = [g for optimizer in registry.optimizers.values() for g in optimizer.param_groups]
        moments = 3 if any(g.get("amsgrad") or g.get("centered") for g in groups) else 2
        coming = moments * held + COUNTER_BYTES * len(parameters)
        described = META_BYTES + DESCRIBED_BYTES * (len(tensors) + (moments + 1) * len(parameters))
        # What is said of all groups and parameters, whoever holds them. By their number and not by
        # what it says now: with room for another learning rate the cover goes on.
        settings = VALUE_BYTES * (1 + json.dumps(registry.settings()).count(","))
        hidden = VALUE_BYTES * sum(len(group["params"]) for group in groups)
        capsule = plain + max(made, coming) + described + hidden
        return Sizes(capsule, gradients + described + settings, LOG_SLOTS)

    def _hand_over(self, boundary: int, theirs: dict[str, Any], mine: dict[str, Any]) -> None:
        """My shard to my mirror, unless it has what it needs."""
        assert self._exchange is not None, "opened above"
        if mine["need"] is None:
            self._copied = None
            return
        if not mine["whole"]:
            return
        self._sizes = Sizes(*mine["need"])
        if _goes_on(boundary, theirs, mine):
            self._owner.covered(theirs["reach"][0])
            return
        self._exchange.send(boundary, tensor_view(self._capsule(boundary).raw))
        self._owner.covered(boundary)

    def _take_over(
        self, boundary: int, ward: int, theirs: dict[str, Any], mine: dict[str, Any]
    ) -> None:
        assert self._exchange is not None, "opened above"
        if theirs["need"] is None:
            # It sends nothing from now on, and nobody may wait for it.
            self._former, self._ward = self._former or self._ward, None
        if not theirs["whole"] or theirs["need"] is None or _goes_on(boundary, mine, theirs):
            return
        keeping = Keeping(self._keeper.place.room, ward, self._keeper.reach)
        if why := keeping.renew(Sizes(*theirs["need"]), boundary, self._exchange):
            self._keeper.uncovered.no_room(ward, why)
        self._ward = _Ward(ward, keeping)

    def settled(self) -> None:
        """The generation trains: what was kept before it is of no more use."""
        former, self._former = self._former, None
        # Whom it had kept before, and keeps again after rounds without an end, has one file.
        if former is not None and (self._ward is None or self._ward.rank != former.rank):
            former.keeping.drop()
        if self._ward is not None and self._ward.keeping.kept is None:
            # There was no room for a new one. Without the old one there may be, the next time.
            self._ward.keeping.drop()

    def cancel(self) -> None:
        """Free the training thread if it waits here. Any thread."""
        exchange = self._exchange
        if exchange is not None:
            exchange.cancel()

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    # ------------------------------------------------------------ a step

    def write_ahead(self, step: int, *, updates: bool) -> None:
        """Before the vote: my record to my mirror, my ward's into this node's memory."""
        exchange = self._exchange
        if exchange is None or sabotage.off("mirror"):
            return
        self._recorded = True
        if self._sizes is not None:
            frames = self._record(self._sizes, step, updates=updates)
            exchange.send_all(frames)
            self._recorded = bool(frames[0][1])
        if (ward := self._ward) is not None:
            covered = ward.keeping.newest >= 0
            ward.keeping.take(exchange)
            if covered and ward.keeping.newest < 0:
                # Nobody stops for it; but whoever asks shall hear that a second home is missing.
                text = f"rank {ward.rank} could not write step {step} ahead"
                name = portion.name_of([ward.rank])
                self._keeper.report_broken(self._keeper.generation, text, cover=name)
        exchange.flush()
        if self._changed and self._recorded:
            # My ward's change is here, as mine is on its way: a script does the same on all ranks.
            self._still.remember()

    def _record(self, room: Sizes, step: int, *, updates: bool) -> list[Frame]:
        registry = self._keeper.registry
        hole: list[Frame] = [(step, ())]
        if registry.regrouped():
            # Nobody agreed on who holds what was added, and a record would miss it.
            self._keeper.uncovered.regrouped()
            self._changed = False
            return hole
        gradients = [
            local_of(parameter.grad) if updates and parameter.grad is not None else None
            for _, parameter in self._parameters()
        ]
        if any(g is not None and g.layout is not torch.strided for g in gradients):
            self.update_begins("gradients are sparse")
        if self._beyond:
            # After this step only a whole capsule is what it says.
            self._beyond, self._changed = "", False
            self._owner.begin_anew()
            return hole
        self._changed = not self._strange and self._still.moved()
        if self._changed:
            self._unproven, self._strange = True, self._changed_before
            self._keeper.uncovered.lonely_moves(always=self._strange)
            self._owner.begin_anew()
        if self._strange:
            self._copied = None
            return hole
        tensors = self._tensors()
        meta = {
            "step": step,
            "slice": slice_digest(tensors, step),
            "settings": registry.settings() if updates else None,
        }
        capsule = None
        if self._owner.capsule_due(step):
            # Counted before it is copied: what does not fit would be copied anew at each step.
            size = sum(size_bytes(tensor) for _, tensor in tensors)
            capsule = self._capsule(step) if size < room.capsule_bytes else None
            if capsule is not None and capsule.size > room.capsule_bytes:
                capsule = None
            if capsule is None:
                # Records without a capsule would lead from nowhere before long.
                self._keeper.uncovered.grown()
                return hole
        frames = self._owner.record(step, meta, gradients, capsule)
        _, record = frames[0]
        if sum(map(len, record)) <= room.record_bytes:
            return frames
        # A hole in the log is better than no step: the mirror then says that it covers no more.
        self._owner.give_up()
        return hole

    def spoilt(self, eighths: tuple[int, ...]) -> tuple[str, str]:
        """A portion whose cover here is wrong, and how; empty: none. It is kept no longer then.

        No `eighths` to look at: only what was stumbled over.
        """
        ward = self._ward
        found = ""
        if ward is not None:
            found = patrol.spoilt(ward.keeping, eighths) if eighths else ward.keeping.spoilt
        if ward is None or not found:
            return "", ""
        # Its row in the next generation says that it has nothing: so its owner sends all.
        ward.keeping.kept, ward.keeping.spoilt = None, ""
        return portion.name_of([ward.rank]), f"cover of rank {ward.rank}: {found}"

    def update_begins(self, beyond: str) -> None:
        """An update comes next. `beyond`: what it goes by, beside its gradients and settings."""
        self._beyond = beyond
        if beyond:
            self._keeper.uncovered.beyond_gradients(beyond)

    def updated(self) -> None:
        """What this rank alone holds is what a cover leads to. From here on to the next record
        nothing may change it."""
        if self._strange or (self._sizes is None and self._ward is None):
            self._still.forget()
        elif self._beyond:
            # It was recorded before anybody knew (grads_ready was called by hand): then it is a
            # change like any other that no record tells of.
            self._beyond = ""
        else:
            self._still.remember()

    def voted(self) -> None:
        """The mirror has this step's record: it would not have voted without it."""
        self._owner.sent()
        self._changed_before = self._changed
        # Behind a hole it has not, whatever it says.
        self._unproven = self._unproven and not self._recorded

    def _capsule(self, boundary: int) -> Capsule:
        registry = self._keeper.registry
        meta = {"layout": registry.layout(self._mine), "hidden": registry.hidden()}
        tensors = [tensor for _, tensor in self._tensors()]
        # The one before it has left: nobody begins another earlier, or while a socket is in use.
        capsule = Capsule(boundary, meta, tensors, self._copied)
        self._copied = capsule.room
        return capsule

    @property
    def _mine(self) -> str:
        return portion.name_of([self._keeper.place.rank])

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        return self._keeper.registry.kept(self._mine)

    def _parameters(self) -> list[tuple[str, torch.Tensor]]:
        return self._keeper.registry.optimized(self._mine)

    # ------------------------------------------------------------ after a fault

    def reach(self) -> tuple[wire.Cover, ...]:
        """What this rank can rebuild of others."""
        if self._still.moved():
            # A script does the same on all ranks: no record has told of what it did on this one.
            return ()
        return tuple(wire.Cover(name, *reach) for name, _, reach in self._kept())

    def _kept(self) -> Iterator[tuple[str, Kept, tuple[int, int]]]:
        """Per portion that is kept here: what is kept, and how far it leads."""
        for ward in (self._ward, self._former):
            kept = ward.keeping.kept if ward is not None else None
            reach = kept.reach() if kept is not None else None
            if ward is not None and kept is not None and reach is not None:
                yield portion.name_of([ward.rank]), kept, reach

    def send(self, move: Move, boundary: int, header: dict[str, Any]) -> None:
        """Capsule and records to the rank that takes the seat."""
        pieces = self.pieces(move.portion, boundary)
        side, target = side_of(self._keeper), int(move.target)
        sizes = [len(piece) for piece in pieces]
        send_json(side, {**header, "sizes": sizes, "boundary": boundary}, target)
        for piece in pieces:
            _send_bytes(side, piece, target)

    def pieces(self, name: str, boundary: int) -> list[memoryview]:
        """What leads to the boundary: the capsule, then the records of the steps since."""
        for of, kept, reach in self._kept():
            if of == name and reach[0] <= boundary <= reach[1]:
                first, raw = kept.capsule()
                return [raw, *(_recorded(kept, step) for step in range(first, boundary))]
        raise Permanent(f"no cover of portion {name} at {boundary} is kept here")


@dataclass(frozen=True, slots=True)
class _Ward:
    rank: int
    keeping: Keeping


def rebuild(keeper: Keeper, move: Move) -> dict[str, Any]:
    """The target's side. Returns what the source told beside it."""
    side, source = side_of(keeper), int(move.sources[0])
    header = receive_json(side, source)
    keeper.adopt_header(header)
    keeper.tear()
    try:
        pieces = (_receive_bytes(side, source, size) for size in header["sizes"])
        make_again(keeper, move.portion, pieces, int(header["boundary"]))
    except Permanent as error:
        raise Permanent(f"source {source}: {error}") from error
    return header


def make_again(keeper: Keeper, name: str, pieces: Iterable[memoryview], wanted: int) -> None:
    """The capsule in place, then every step since, up to the boundary that is wanted."""
    registry, left = keeper.registry, iter(pieces)

    def conform(layout: Any) -> list[torch.Tensor]:
        registry.conform([(n, d, s, c) for n, d, s, c in layout], name)
        return [tensor for _, tensor in registry.kept(name)]

    # The optimizers step over all that has a gradient: a rehearsal may have left some.
    registry.drop_gradients()
    capsule = replay.load_capsule(next(left), conform)
    registry.load_hidden(capsule["hidden"])
    boundary = int(capsule["boundary"])
    parameters = [parameter for _, parameter in registry.optimized(name)]
    shard = replay.Shard(registry.optimizers.values(), parameters)
    tensors = registry.kept(name)
    with Readahead(replay.read(left, shard.parts)) as steps:
        for meta, gradients in steps:
            keeper.reach("replay")
            step = int(meta["step"])
            if step != boundary:
                raise Permanent(f"the record of step {step} came for boundary {boundary}")
            boundary += 1
            if slice_digest(tensors, step) != meta["slice"]:
                raise Permanent(f"what was made again is not what its owner had before step {step}")
            if meta["settings"] is None:
                continue  # A step without an update: the loss scaler skipped it.
            registry.load_settings(meta["settings"])
            if shard.update(gradients):
                tensors = registry.kept(name)
    if boundary != wanted:
        raise Permanent(f"what is kept leads to boundary {boundary}, not {wanted}")


def _goes_on(boundary: int, mirror: dict[str, Any], owner: dict[str, Any]) -> bool:
    """Has the mirror what it takes, and room for what comes? Both sides judge by the same rows."""
    reach, room, need = mirror["reach"], mirror["room"], owner["need"]
    if reach is None or need is None:
        return False
    # A worker of an earlier release does not say.
    if owner.get("moved", False):
        return False
    # With room in the log for a whole new capsule, should there be another fault.
    recent = reach[0] <= boundary <= min(reach[1], reach[0] + CAPSULE_STEPS)
    return bool(recent and room == need)


def _gradient_bytes(parameter: torch.Tensor) -> int:
    """As large as the parameter, or larger where it is declared to be of wider numbers: also before
    there is one, because rooms are compared."""
    part = local_of(parameter)
    dtype = getattr(parameter, "grad_dtype", None) or torch.float32
    return int(part.numel() * max(part.element_size(), dtype.itemsize))


def _recorded(kept: Kept, step: int) -> memoryview:
    found = kept.record(step)
    if found is None:
        raise Permanent(f"the record of step {step} is missing in {kept.path}")
    return found


def _send_bytes(side: Any, raw: memoryview, target: int) -> None:
    for start in range(0, len(raw), CHUNK_BYTES):
        side.send([bytes_tensor(raw[start : start + CHUNK_BYTES])], target, _TAG).wait()


def _receive_bytes(side: Any, source: int, size: int) -> memoryview:
    whole = torch.empty(size, dtype=torch.uint8)
    for piece in whole.split(CHUNK_BYTES):
        side.recv([piece], source, _TAG).wait()
    return tensor_view(whole)
