"""Covers at work: when they are opened, what a step writes ahead, and how a target is rebuilt.

cover.py and kept.py know bytes; this file knows the session: which tensors of the registry live on
one rank only, when the vote comes, and which rank is whose mirror. A cover goes on through a new
generation where owner and mirror still have each other and the boundary is in reach; otherwise the
whole shard is sent once, before anybody resumes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from keepstep import portion, sabotage, wire
from keepstep.errors import Permanent
from keepstep.model import Endpoint, Move
from keepstep.training import replay
from keepstep.training.cover import (
    CAPSULE_STEPS,
    META_BYTES_MAX,
    Capsule,
    Keeping,
    Owner,
    read_record,
)
from keepstep.training.exchange import Exchange
from keepstep.training.holders import local_of
from keepstep.training.kept import Kept, Sizes
from keepstep.training.mirror import CONNECT_SECONDS_MAX, hello
from keepstep.training.raw import bytes_tensor, tensor_view
from keepstep.training.side import exchange_rows, receive_json, send_json

if TYPE_CHECKING:
    from keepstep.training.keeper import Keeper

_TAG = 31
CHUNK_BYTES = 8 * 1024 * 1024
LOG_SLOTS = 2 * CAPSULE_STEPS + 1


class Covering:
    """One per process of a job that has portions with a single holder."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._owner = Owner()
        self._keeping: Keeping | None = None
        self._ward = -1
        """The rank that this one keeps a cover of; -1 for none."""
        self._sizes: Sizes | None = None
        """Room that the mirror has for my capsules and records."""
        self._exchange: Exchange | None = None
        self.generation = -1

    # ------------------------------------------------------------ a generation begins

    def open(self, boundary: int, generation: int) -> None:
        """Find the neighbours, and give every lonely portion its second home. All ranks come."""
        keeper = self._keeper
        place, stride = keeper.place, keeper.mirror_stride
        self.close()
        self.generation = generation
        if stride % place.world_size == 0:
            self._forget_ward()
            return
        mirror = (place.rank + stride) % place.world_size
        ward = (place.rank - stride) % place.world_size
        said = hello(keeper.secret, generation, place.rank, mirror, "cover")
        expected = hello(keeper.secret, generation, ward, place.rank, "cover")
        exchange = self._exchange = Exchange(place.address, said, expected)
        if ward != self._ward:
            self._forget_ward()
        rows = exchange_rows(keeper.groups, self._row(exchange))
        exchange.connect(Endpoint(*rows[mirror]["at"]), CONNECT_SECONDS_MAX)
        self._hand_over(boundary, rows[mirror], rows[place.rank])
        self._take_over(boundary, ward, rows[ward], rows[place.rank])
        exchange.flush()

    def _row(self, exchange: Exchange) -> dict[str, Any]:
        """What the others have to know of me: as an owner, and as a mirror."""
        need = self._need()
        kept = self._keeping.kept if self._keeping is not None else None
        reach = kept.reach() if kept is not None else None
        at = exchange.endpoint
        return {
            "at": [at.host, at.port],
            "need": [need.capsule_bytes, need.record_bytes, need.slots] if need else None,
            "reach": reach,
            "room": [kept.sizes.capsule_bytes, kept.sizes.record_bytes] if kept else None,
        }

    def _need(self) -> Sizes | None:
        """Room for what this rank alone holds; None if it holds nothing alone."""
        tensors = self._tensors()
        if not tensors:
            return None
        state = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
        gradients = sum(local_of(p).numel() * p.element_size() for _, p in self._parameters())
        # A capsule begins with its layout; a record may have to carry all that is left of one.
        capsule = state + META_BYTES_MAX
        return Sizes(capsule, gradients + META_BYTES_MAX + capsule, LOG_SLOTS)

    def _hand_over(self, boundary: int, theirs: dict[str, Any], mine: dict[str, Any]) -> None:
        """My shard to my mirror, unless it has what it needs."""
        assert self._exchange is not None, "opened above"
        if mine["need"] is None:
            return
        self._sizes = Sizes(*mine["need"])
        if _goes_on(boundary, theirs, mine):
            self._owner.covered(theirs["reach"][0])
            return
        capsule = self._capsule(boundary)
        self._exchange.send(boundary, tensor_view(capsule.raw))
        self._owner.covered(boundary)
        # Until it has left; the neighbour takes it while it hands over its own.
        self._handed = capsule

    def _take_over(
        self, boundary: int, ward: int, theirs: dict[str, Any], mine: dict[str, Any]
    ) -> None:
        assert self._exchange is not None, "opened above"
        if theirs["need"] is None:
            self._forget_ward()
            return
        if _goes_on(boundary, mine, theirs):
            return
        at, raw = self._exchange.take()
        if at != boundary:
            raise Permanent(f"a capsule of boundary {at} came for {boundary}")
        self._keeping, self._ward = Keeping(self._keeper.place.room, ward), ward
        self._keeping.renew(Sizes(*theirs["need"]), boundary, raw)

    def _forget_ward(self) -> None:
        self._keeping, self._ward = None, -1

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
        if self._sizes is not None:
            exchange.send(step, *self._record(step, updates=updates))
        if self._keeping is not None:
            self._keeping.take(exchange)
        exchange.flush()

    def _record(self, step: int, *, updates: bool) -> list[bytes | memoryview]:
        assert self._sizes is not None, "asked for by an owner"
        settings = self._keeper.registry.settings() if updates else None
        gradients = [
            local_of(parameter.grad) if updates and parameter.grad is not None else None
            for _, parameter in self._parameters()
        ]
        capsule = None
        if self._owner.capsule_due(step):
            capsule = self._capsule(step)
            if capsule.size > self._sizes.capsule_bytes:
                # The optimizer has made more state since: the next comparison makes room for it.
                capsule = None
        parts = self._owner.record(step, {"settings": settings}, gradients, capsule)
        fits = sum(map(len, parts)) <= self._sizes.record_bytes
        # A hole in the log is better than no step: the mirror then says that it covers no more.
        return parts if fits else []

    def voted(self) -> None:
        """The mirror has this step's record: it would not have voted without it."""
        self._owner.sent()

    def _capsule(self, boundary: int) -> Capsule:
        registry, mine = self._keeper.registry, self._mine
        layout = registry.layout(mine)
        return Capsule(boundary, {"layout": layout}, [tensor for _, tensor in self._tensors()])

    @property
    def _mine(self) -> str:
        return portion.name_of([self._keeper.place.rank])

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        return self._keeper.registry.shared(self._mine)

    def _parameters(self) -> list[tuple[str, torch.Tensor]]:
        return self._keeper.registry.optimized(self._mine)

    # ------------------------------------------------------------ after a fault

    def reach(self) -> tuple[wire.Cover, ...]:
        """What this rank can rebuild of another one."""
        kept = self._keeping.kept if self._keeping is not None else None
        found = kept.reach() if kept is not None else None
        if found is None:
            return ()
        return (wire.Cover(portion.name_of([self._ward]), *found),)

    def send(self, move: Move, boundary: int, header: dict[str, Any]) -> None:
        """Capsule and records to the rank that takes the seat."""
        pieces = self.pieces(move.portion, boundary)
        side, target = self._keeper.groups.side, int(move.target)
        send_json(side, {**header, "sizes": [len(piece) for piece in pieces]}, target)
        for piece in pieces:
            _send_bytes(side, piece, target)

    def pieces(self, name: str, boundary: int) -> list[memoryview]:
        """What leads to the boundary: the capsule, then the records of the steps since."""
        kept = self._keeping.kept if self._keeping is not None else None
        if kept is None or portion.name_of([self._ward]) != name:
            raise Permanent(f"no cover of portion {name} is kept here")
        first, raw = kept.capsule()
        return [raw, *(_recorded(kept, step) for step in range(first, boundary))]


def rebuild(keeper: Keeper, move: Move) -> dict[str, Any]:
    """The target's side. Returns what the source told beside it."""
    side, source = keeper.groups.side, int(move.sources[0])
    header = receive_json(side, source)
    keeper.adopt_header(header)
    keeper.tear()
    try:
        pieces = (_receive_bytes(side, source, size) for size in header["sizes"])
        make_again(keeper, move.portion, pieces)
    except Permanent as error:
        raise Permanent(f"source {source}: {error}") from error
    return header


def make_again(keeper: Keeper, name: str, pieces: Iterable[memoryview]) -> None:
    """The capsule in place, then every step since."""
    registry, left = keeper.registry, iter(pieces)

    def conform(layout: Any) -> list[torch.Tensor]:
        registry.conform([(n, d, s, c) for n, d, s, c in layout], name)
        return [tensor for _, tensor in registry.shared(name)]

    replay.load_capsule(next(left), conform)
    parameters = [parameter for _, parameter in registry.optimized(name)]
    for raw in left:
        keeper.reach("replay")
        record = read_record(raw)
        if record.meta["settings"] is None:
            continue  # A step without an update: the loss scaler skipped it.
        gradients = replay.gradients_of(record, [local_of(p) for p in parameters])
        registry.load_settings(record.meta["settings"])
        replay.update(registry.optimizers.values(), parameters, gradients)


def _goes_on(boundary: int, mirror: dict[str, Any], owner: dict[str, Any]) -> bool:
    """Has the mirror what it takes, and room for what comes? Both sides judge by the same rows."""
    reach, room, need = mirror["reach"], mirror["room"], owner["need"]
    if reach is None or need is None:
        return False
    return bool(reach[0] <= boundary <= reach[1] and room == need[:2])


def _recorded(kept: Kept, step: int) -> memoryview:
    found = kept.record(step)
    if found is None:
        raise Permanent(f"the record of step {step} is missing in {kept.path}")
    return found


def _send_bytes(side: Any, raw: memoryview, target: int) -> None:
    for start in range(0, len(raw), CHUNK_BYTES):
        side.send([bytes_tensor(bytes(raw[start : start + CHUNK_BYTES]))], target, _TAG).wait()


def _receive_bytes(side: Any, source: int, size: int) -> memoryview:
    whole = torch.empty(size, dtype=torch.uint8)
    for piece in whole.split(CHUNK_BYTES):
        side.recv([piece], source, _TAG).wait()
    return memoryview(bytearray(tensor_view(whole)))
