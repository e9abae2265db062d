"""What a mirror keeps of a rank whose shard lives nowhere else: capsules, and the log since.

    <room>/cover-<rank>.kept     two capsules (one complete, one growing) | a ring of records

A record says what one step did to the shard: its reduced gradients and the optimizer's settings.
The newest complete capsule and the records since lead to any boundary after it, by doing those
steps again. The file lies on a tmpfs, owned by no process, like the rings in keepstep.page: its
writer may die at any byte, so a record is valid only after its last one.

Must never: call something rebuildable that has a hole in it, or whose bytes do not fit its digest.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from keepstep.errors import Permanent

_MAGIC = 0x4B45455054434F56
_HEADER = struct.Struct("<qqqq")
_CAPSULE = struct.Struct("<qqq")
"""Its boundary, its bytes, how many of them are here."""
_NONE = (-1, -1, 0)
_SLOT = struct.Struct("<qq")
"""Its step and its bytes."""
CAPSULES = 2
RECORD = struct.Struct("<qqqqqq16s")
"""What a record begins with. Bytes of meta and of gradients; of the piece that comes behind it, if
any, a capsule's boundary, its size, where the piece begins, and how long it is; the digest of the
meta, which holds that of the gradients."""
CAPSULE_STEPS = 8
"""A capsule is about three times a record: so it adds three eighths to what a record costs. And
the mirror's log has to hold twice so many records."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Room for capsules and records, the same for all that a mirror gets from one rank."""

    capsule_bytes: int
    record_bytes: int
    slots: int

    @property
    def total(self) -> int:
        capsules = CAPSULES * (_CAPSULE.size + self.capsule_bytes)
        return _HEADER.size + capsules + self.slots * (_SLOT.size + self.record_bytes)


def kept_path(room: Path, rank: int) -> Path:
    return room / f"cover-{rank}.kept"


class Kept:
    """One rank's cover in this node's memory. One writer; readers come when it has stopped."""

    def __init__(self, path: Path, sizes: Sizes | None = None) -> None:
        """With `sizes` a new one, empty, in place of an older one; without, opened."""
        self.path = path
        if sizes is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            with path.open("wb") as file:
                # Now, or not at all: a tmpfs that is full would end this process when it writes.
                os.posix_fallocate(file.fileno(), 0, sizes.total)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        if sizes is not None:
            self.sizes = sizes
            for index in range(CAPSULES):
                self._set_capsule(index, _NONE)
            for step in range(sizes.slots):
                self._set_slot(step, -1, 0)
            # Last, so that a file cut short by a death is none.
            _HEADER.pack_into(self._memory, 0, _MAGIC, *astuple(sizes))
        if len(self._memory) < _HEADER.size:
            raise Permanent(f"{path} is no cover")
        magic, *fields = _HEADER.unpack_from(self._memory, 0)
        self.sizes = Sizes(*fields)
        if magic != _MAGIC or self.sizes.total != len(self._memory):
            raise Permanent(f"{path} is no cover")

    def move_to(self, path: Path) -> None:
        """In the place of what lies there."""
        self.path.replace(path)
        self.path = path

    # ------------------------------------------------------------ writing

    def begin_capsule(self, boundary: int, size: int) -> None:
        """The older of the two makes room. The other one stays what it is."""
        if size > self.sizes.capsule_bytes:
            raise Permanent(f"a capsule of {size} bytes does not fit {self.path}")
        whole = self._newest_whole()
        # Never the one that is whole: until this one is, it is all there is.
        index = next(i for i in range(CAPSULES) if i != whole)
        # Number by number, and a death may come between two: never whole on the way.
        self._set_capsule(index, _NONE)
        self._set_capsule(index, (boundary, size, 0))

    def room_for_piece(self, boundary: int, offset: int, length: int) -> memoryview:
        """Where the next bytes of a capsule that was begun go; they count once they landed."""
        index = self._index_of(boundary)
        _, size, here = self._capsule(index)
        if offset != here or offset + length > size:
            raise Permanent(f"a piece of capsule {boundary} at {offset}, with {here} bytes here")
        start = self._capsule_at(index) + _CAPSULE.size + offset
        return memoryview(self._memory)[start : start + length]

    def landed(self, boundary: int, length: int) -> None:
        index = self._index_of(boundary)
        _, size, here = self._capsule(index)
        self._set_capsule(index, (boundary, size, here + length))

    def room_for(self, step: int, size: int) -> memoryview:
        """Where the record of this step goes; it counts once it is sealed."""
        if size > self.sizes.record_bytes:
            raise Permanent(f"a record of {size} bytes does not fit {self.path}")
        self._set_slot(step, -1, size)
        start = self._slot_at(step) + _SLOT.size
        return memoryview(self._memory)[start : start + size]

    def seal(self, step: int, size: int) -> None:
        self._set_slot(step, step, size)

    # ------------------------------------------------------------ reading

    def reach(self) -> tuple[int, int] | None:
        """The boundaries that can be rebuilt, from the newest whole capsule on; None if none."""
        index = self._newest_whole()
        if index is None:
            return None
        low = high = self._capsule(index)[0]
        while self.record(high) is not None:
            high += 1
        return low, high

    def capsule(self) -> tuple[int, memoryview]:
        """The newest whole one."""
        index = self._newest_whole()
        if index is None:
            raise Permanent(f"{self.path} holds no whole capsule")
        boundary, size, _ = self._capsule(index)
        start = self._capsule_at(index) + _CAPSULE.size
        return boundary, memoryview(self._memory)[start : start + size]

    def newest(self) -> tuple[int, memoryview]:
        """The capsule of the newest boundary, as far as it is here: whole, or still growing."""
        index = max(range(CAPSULES), key=lambda each: self._capsule(each)[0])
        boundary, _, here = self._capsule(index)
        start = self._capsule_at(index) + _CAPSULE.size
        return boundary, memoryview(self._memory)[start : start + here]

    def record(self, step: int) -> memoryview | None:
        at = self._slot_at(step)
        found, size = _SLOT.unpack_from(self._memory, at)
        if found != step or not 0 <= size <= self.sizes.record_bytes:
            return None
        start = at + _SLOT.size
        return memoryview(self._memory)[start : start + size]

    # ------------------------------------------------------------ places

    def _newest_whole(self) -> int | None:
        found: tuple[int, int] | None = None
        for index in range(CAPSULES):
            boundary, size, here = self._capsule(index)
            if boundary >= 0 and here == size and (found is None or boundary > found[0]):
                found = (boundary, index)
        return found[1] if found is not None else None

    def _index_of(self, boundary: int) -> int:
        for index in range(CAPSULES):
            if self._capsule(index)[0] == boundary:
                return index
        raise Permanent(f"capsule {boundary} was not begun")

    def _capsule(self, index: int) -> Sequence[int]:
        return _CAPSULE.unpack_from(self._memory, self._capsule_at(index))

    def _set_capsule(self, index: int, fields: tuple[int, int, int]) -> None:
        self._write(self._capsule_at(index), _CAPSULE.pack(*fields))

    def _set_slot(self, step: int, holds: int, size: int) -> None:
        self._write(self._slot_at(step), _SLOT.pack(holds, size))

    def _write(self, at: int, numbers: bytes) -> None:
        # Not pack_into, which clears its place first: a capsule of no bytes would be whole.
        self._memory[at : at + len(numbers)] = numbers

    def _capsule_at(self, index: int) -> int:
        return _HEADER.size + index * (_CAPSULE.size + self.sizes.capsule_bytes)

    def _slot_at(self, step: int) -> int:
        slot = step % self.sizes.slots
        return self._capsule_at(CAPSULES) + slot * (_SLOT.size + self.sizes.record_bytes)
