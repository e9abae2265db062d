"""A second home for shards that live once: what full-shard FSDP holds on one rank only.

Before a rank votes for a step's update it has written ahead, to the rank `mirror_stride` seats on,
what the update will need: its reduced gradients and the optimizer's settings. Nobody acknowledges:
the mirror withholds its own vote until the record lies in its node's memory (kept.py), so once a
vote is through, every shard's step can be made again from there. A capsule of the whole shard is
renewed every CAPSULE_STEPS steps, in pieces that travel behind the records.

        rank r    backward | record s, piece j -> r+k | vote | update
        rank r+k  backward | … takes r's record into its memory | vote | update

A rank that takes a lost one's seat gets capsule and records and makes the steps again with the same
kernels (replay.py): recovery only rolls forward.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from keepstep.errors import Permanent
from keepstep.training.digest import byte_view, digest_joined
from keepstep.training.exchange import Exchange, Frame, Room
from keepstep.training.inner import GroupsBroken
from keepstep.training.kept import CAPSULE_STEPS, RECORD, Kept, Sizes, kept_path
from keepstep.training.raw import bytes_in_place, bytes_tensor, tensor_bytes, tensor_view

PARTS = 8
"""Of a capsule, each with a digest of its own: a mirror looks at one of them at a time."""
FORM = "joined-1"
"""How digests are made: in every capsule and record, because a saved one may be read much later."""
_SLACK_BYTES = 4096
SLICE_BYTES = 4 * 1024
_CAPSULE = struct.Struct("<q16s")
"""Bytes of meta, and its digest."""


@dataclass(frozen=True, slots=True)
class Record:
    """What one step does to a shard."""

    meta: dict[str, Any]
    """What the caller said of the step, and of the gradients: `sizes` in bytes, -1 for none,
    `dtypes`, and `digest` of them all."""
    gradients: memoryview


def slice_digest(tensors: Sequence[tuple[str, torch.Tensor]], step: int) -> str:
    """Of a few bytes of the shard, others at each step: whoever makes the steps again compares."""
    if not tensors:
        return ""
    _, tensor = tensors[step % len(tensors)]
    raw = byte_view(tensor)
    first = step // len(tensors) * SLICE_BYTES % max(1, raw.numel())
    return hashlib.blake2b(
        tensor_bytes(raw[first : first + SLICE_BYTES]), digest_size=16
    ).hexdigest()


def read_record(raw: memoryview) -> Record:
    meta_bytes, gradient_bytes, *_, known = RECORD.unpack_from(raw, 0)
    start = RECORD.size
    meta = _read_meta(raw[start : start + max(0, meta_bytes)], known, "record")
    start += meta_bytes
    gradients = raw[start:]
    if not gradient_bytes == len(gradients) == sum(size for size in meta["sizes"] if size >= 0):
        raise Permanent("a mirror's record is not what its owner wrote: its sizes do not fit")
    return Record(meta, gradients)


def views_of(record: Record) -> Sequence[torch.Tensor]:
    """The gradients' bytes, one by one, if they are what the owner wrote."""
    sizes = [size for size in record.meta["sizes"] if size >= 0]
    return _in_place(record.gradients, sizes, record.meta["digest"], "record")


def landed(meta: dict[str, Any], body: memoryview, number: int) -> Sequence[torch.Tensor]:
    """The tensors' bytes in one part of a capsule, in place, if they are what the owner wrote."""
    sizes, part = meta["sizes"], parts_of(meta["sizes"])[number]
    first, last = sum(sizes[: part.start]), sum(sizes[: part.stop])
    mine = sizes[part.start : part.stop]
    return _in_place(body[first:last], mine, meta["digests"][number], "capsule")


def _in_place(
    raw: memoryview, sizes: Sequence[int], known: str, what: str
) -> Sequence[torch.Tensor]:
    views: Sequence[torch.Tensor] = bytes_in_place(raw).split(list(sizes))
    if digest_joined(views) != known:
        raise Permanent(f"a mirror's {what} is not what its owner wrote")
    return views


def parts_of(sizes: Sequence[int]) -> list[range]:
    """Which tensors are in each part: a tensor belongs to the one in which it begins. Pure."""
    begins = list(itertools.accumulate(sizes, initial=0))
    firsts = [bisect.bisect_left(begins, part * begins[-1] / PARTS) for part in range(PARTS)]
    # Tensors without a byte at the very end are in the last one.
    return list(itertools.starmap(range, itertools.pairwise([*firsts, len(sizes)])))


def _sign(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def _read_meta(text: memoryview, known: bytes, what: str) -> dict[str, Any]:
    # Before it is parsed: a settings' digit that flipped would still be good JSON.
    if _sign(bytes(text)) != known:
        raise Permanent(f"a mirror's {what} is not what its owner wrote: its meta differs")
    meta: dict[str, Any] = json.loads(bytes(text))
    if meta.get("form") != FORM:
        raise Permanent(f"a mirror's {what} is of another release of keepstep: rerun with that one")
    return meta


class Capsule:
    """A copy of the shard at a boundary, on its way to the mirror piece by piece."""

    def __init__(
        self,
        boundary: int,
        meta: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        room: torch.Tensor | None = None,
    ) -> None:
        """`room`: where an earlier one lies that is not needed any more, if there is one."""
        self.boundary = boundary
        views = [byte_view(tensor) for tensor in tensors]
        sizes = [view.numel() for view in views]
        # Of the shard itself, not of the copy: one that is no copy of it is refused later.
        digests = [digest_joined([views[i] for i in part]) for part in parts_of(sizes)]
        said = {"form": FORM, "boundary": boundary, "sizes": sizes, "digests": digests}
        text = json.dumps({**meta, **said}).encode()
        head = _CAPSULE.pack(len(text), _sign(text)) + text
        size = len(head) + sum(sizes)
        if room is None or room.numel() < size:
            # A little more than is needed: what is said of the next one may be a few digits longer.
            room = torch.empty(size + _SLACK_BYTES, dtype=torch.uint8)
        self.room, self.raw = room, room[:size]
        torch.cat([bytes_tensor(head), *(view.cpu() for view in views)], out=self.raw)
        self.sent = 0

    @property
    def size(self) -> int:
        return int(self.raw.numel())

    def next_piece(self, steps_left: int) -> tuple[int, memoryview]:
        """Where it begins, and its bytes: so many that `steps_left` such pieces are enough."""
        first = self.sent
        self.sent = min(self.size, first + -(-(self.size - first) // max(1, steps_left)))
        return first, tensor_view(self.raw)[first : self.sent]


def read_capsule(raw: memoryview) -> tuple[dict[str, Any], memoryview]:
    """A capsule's meta, and the bytes of its tensors, one behind the other."""
    length, known = _CAPSULE.unpack_from(raw, 0)
    at = _CAPSULE.size + length
    meta = _read_meta(raw[_CAPSULE.size : max(_CAPSULE.size, at)], known, "capsule")
    body = raw[at:]
    if sum(meta["sizes"]) != len(body):
        raise Permanent("a capsule's sizes do not fit its bytes")
    return meta, body


class Owner:
    """This rank's side as the owner of a shard: what to write ahead, step by step."""

    def __init__(self, steps: int = CAPSULE_STEPS) -> None:
        self._steps = steps
        self._growing: Capsule | None = None
        self._whole_at = -1
        """The boundary of the newest capsule that the mirror has whole."""

    def covered(self, boundary: int) -> None:
        """The mirror has a whole capsule of this boundary; one that was on its way is given up."""
        self._whole_at = boundary
        self._growing = None

    def capsule_due(self, step: int) -> bool:
        """Should the caller hand over a copy of the shard with this step's record?"""
        return self._growing is None and step > self._whole_at

    def record(
        self,
        step: int,
        meta: dict[str, Any],
        gradients: Sequence[torch.Tensor | None],
        capsule: Capsule | None = None,
    ) -> list[Frame]:
        """This step's message: its record, and behind it the next piece of a capsule, if there is
        one. The gradients must stay as they are until it left."""
        if capsule is not None:
            self._growing = capsule
        boundary, size, first, piece = -1, 0, 0, memoryview(b"")
        if self._growing is not None:
            boundary, size = self._growing.boundary, self._growing.size
            # Before the log runs out of room for the steps since the capsule that is whole.
            left = min(self._growing.boundary, self._whole_at + self._steps) + self._steps - step
            first, piece = self._growing.next_piece(left)
        present = [byte_view(g) for g in gradients if g is not None]
        sizes = [-1 if g is None else g.numel() * g.element_size() for g in gradients]
        dtypes = [None if g is None else str(g.dtype) for g in gradients]
        known = digest_joined(present)
        said = {"form": FORM, "sizes": sizes, "dtypes": dtypes, "digest": known}
        text = json.dumps({**meta, **said}).encode()
        sent_bytes = sum(v.numel() for v in present)
        head = RECORD.pack(len(text), sent_bytes, boundary, size, first, len(piece), _sign(text))
        record: Frame = (step, [head + text, *map(tensor_view, present)])
        return [record, (boundary, [piece])] if len(piece) else [record]

    def give_up(self) -> None:
        """What was on its way does not arrive: the capsule that is whole stays."""
        self._growing = None

    def begin_anew(self) -> None:
        """Records do not lead from the capsules so far to where the shard is: the next record
        comes with a whole capsule."""
        self._growing, self._whole_at = None, -sys.maxsize

    def sent(self) -> None:
        """The step's vote is through: the mirror has what was sent."""
        if self._growing is not None and self._growing.sent == self._growing.size:
            self._whole_at = self._growing.boundary
            self._growing = None


def _announced(boundary: int, length: int, room: memoryview | None) -> Room:
    """Where a piece lands that a record announced; without a room it is dropped. Any other frame
    would put all that follows out of step."""

    def land(at: int, size: int) -> memoryview:
        if (at, size) != (boundary, length):
            raise GroupsBroken(f"{size} bytes of boundary {at} came for {length} of {boundary}")
        return memoryview(bytearray(size)) if room is None else room

    return land


class Keeping:
    """This rank's side as the mirror of another one."""

    def __init__(
        self, room: Path, rank: int, reach: Callable[[str], None] = lambda point: None
    ) -> None:
        """`reach` is told where a campaign may strike."""
        self.path = kept_path(room, rank)
        self._reach = reach
        self.kept: Kept | None = None
        self.newest = -1
        """The boundary that it has to lead to; -1 if its owner left a hole."""
        self.spoilt = ""
        """Why what came could not be kept; empty as a rule."""

    def renew(self, sizes: Sizes, boundary: int, exchange: Exchange) -> str:
        """Begin anew, with a whole capsule that comes now. Returns why that cannot be; empty if it
        is done."""
        # Room for it is made while its owner is still at it.
        fresh_path, why = self.path.with_suffix(".new"), ""
        fresh: Kept | None = None
        try:
            fresh = Kept(fresh_path, sizes)
        except OSError as error:
            why = str(error)

        def land(at: int, size: int) -> memoryview:
            nonlocal why
            if at != boundary:
                raise Permanent(f"a capsule of boundary {at} came for {boundary}")
            try:
                if fresh is not None:
                    fresh.begin_capsule(boundary, size)
                    return fresh.room_for_piece(boundary, 0, size)
            except Permanent as error:
                why = str(error)
            # Its owner does not know: it is taken from the network all the same.
            return memoryview(bytearray(size))

        whole = False
        try:
            _, raw = exchange.take(land)
            whole = not why
        finally:
            if not whole:
                fresh_path.unlink(missing_ok=True)
        self.kept = None
        if fresh is None or not whole:
            return why
        fresh.landed(boundary, len(raw))
        # Not before the new one is whole: the old one may be the shard's last home.
        fresh.move_to(self.path)
        self.kept, self.newest = fresh, boundary
        return ""

    def drop(self) -> None:
        """Nobody needs it any more."""
        self.kept = None
        self.path.unlink(missing_ok=True)

    def take(self, exchange: Exchange) -> None:
        """The next record and what comes behind it, from the network into their places."""
        kept = self.kept
        # Without one there is no room for it here, and its owner does not know.
        step, raw = exchange.take(self._room_for_record if kept is not None else None)
        if not raw:
            self.newest = -1
            return  # A step that its owner could not record: a hole, and nobody seals it.
        *_, boundary, size, first, length, _ = RECORD.unpack_from(raw, 0)
        room = self._room_for_piece(boundary, size, first, length) if length else None
        if length:
            self._reach("piece")
            exchange.take(_announced(boundary, length, room))
        if kept is None or self.kept is None:
            return
        if length:
            kept.landed(boundary, length)
        kept.seal(step, len(raw))
        # Behind a hole it leads nowhere, until there is a new capsule.
        reach = kept.reach()
        if reach is not None and reach[1] > step:
            self.newest = step + 1

    def _room_for_record(self, step: int, size: int) -> memoryview:
        assert self.kept is not None, "asked for by take"
        # A step that is made again takes its own record's place: until it is sealed, none is there.
        self.newest = min(self.newest, step)
        return self.kept.room_for(step, size)

    def _room_for_piece(
        self, boundary: int, size: int, first: int, length: int
    ) -> memoryview | None:
        """None: there is none, and what comes is dropped."""
        if self.kept is None:
            return None
        try:
            if first == 0:
                self.kept.begin_capsule(boundary, size)
            return self.kept.room_for_piece(boundary, first, length)
        except Permanent as error:
            # What is written about the capsules in that file is wrong. The step goes on.
            self.kept, self.spoilt = None, str(error)
            return None
