"""Shared memory that outlives its writers: the progress page and the ring of private state.

Both are files on a tmpfs in the node's room, owned by neither the worker nor the agent:

    <room>/seat-<rank>-<incarnation>.page    the worker writes, the agent reads (and lends a head)
    <room>/seat-<rank>-<incarnation>.ring    a rank's own private state, one slot per boundary
    <room>/mirror-<rank>.ring                another node's rank: the second home

Reading progress needs nothing of the worker, not even its interpreter: liveness must not depend
on a GIL. A slot is valid only if its boundary and checksum fit, so a writer may die at any byte.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TypeVar

from keepstep.errors import Permanent

PAGE_BYTES = 4096
RING_SLOTS = 4
"""Two boundaries can be in play at once (ranks differ by one step); two more for safety."""
NEWEST = -1
"""In place of a boundary: whichever is the newest."""
_MAGIC = 0x4B45455053544550
_FIELDS = struct.Struct("<10q")
_LAUNCHED_AT = 48
_BUSY_AT, _BUSY_BYTES = 128, 64
_HEAD_AT, _HEAD_BYTES = 192, 64
T = TypeVar("T")


class Mark(IntEnum):
    """Where in its step a worker is, as seen from outside."""

    STARTING = 0
    FORWARD = 1
    """Between the begin of an attempt and complete gradients."""
    GRADS_READY = 2
    APPLIED = 3
    RECOVERING = 4
    """In the hands of a migration: its budgets hold, not the hang detector."""
    FINISHED = 5
    UPDATED = 6
    """The update is in here, and has yet to reach the others: it cannot be taken back."""


TRAINING = (Mark.FORWARD, Mark.GRADS_READY, Mark.UPDATED, Mark.APPLIED)
"""In a step, or between two."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One reading of a page."""

    pid: int
    generation: int
    step: int
    mark: Mark
    launched: int
    """Collectives launched so far in this generation: the rank with the fewest is the laggard."""
    busy_until_ns: int
    """On this machine's monotonic clock; 0 when nothing was declared."""
    committed: int
    step_ns: int
    """Median of the recent steps."""
    busy: str


class Page:
    """A worker's progress, in shared memory."""

    LAUNCHED_AT = _LAUNCHED_AT
    """Byte offset of the counter that the swapped backend increments by itself."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        if create:
            _fresh_file(path, PAGE_BYTES)
        self.memory = _map(path, PAGE_BYTES)
        if create:
            struct.pack_into("<q", self.memory, 0, _MAGIC)
            struct.pack_into("<q", self.memory, 8, os.getpid())
            self._put(32, -1)
            self._put(64, -1)
        elif struct.unpack_from("<q", self.memory, 0)[0] != _MAGIC:
            raise Permanent(f"{path} is no progress page")

    def _put(self, offset: int, value: int) -> None:
        struct.pack_into("<q", self.memory, offset, value)

    # Offsets: 0 magic, 8 pid, 16 generation, 24 mark, 32 step, 40 busy, 48 launched,
    # 56 step_ns, 64 committed, 72 launched before this generation.
    def mark(self, mark: Mark, step: int) -> None:
        self._put(32, step)
        self._put(24, mark)

    def set_generation(self, generation: int) -> None:
        self._put(16, generation)

    def count_launches_from_here(self) -> None:
        """A new generation begins: only what is launched from now on tells who lags."""
        self._put(72, struct.unpack_from("<q", self.memory, _LAUNCHED_AT)[0])

    def count_vote(self) -> None:
        """A vote is a collective too, outside the user's groups: who has not come to it lags."""
        self._put(72, struct.unpack_from("<q", self.memory, 72)[0] - 1)

    def set_committed(self, step: int) -> None:
        self._put(64, step)

    def set_step_ns(self, step_ns: int) -> None:
        self._put(56, step_ns)

    def set_busy(self, name: str, until_ns: int) -> None:
        text = name.encode()[: _BUSY_BYTES - 1]
        self.memory[_BUSY_AT : _BUSY_AT + _BUSY_BYTES] = text.ljust(_BUSY_BYTES, b"\0")
        self._put(40, until_ns)

    def set_head(self, head: str) -> None:
        """The agent's side: the journal head that the step log should quote."""
        text = head.encode()[:_HEAD_BYTES]
        self.memory[_HEAD_AT : _HEAD_AT + _HEAD_BYTES] = text.ljust(_HEAD_BYTES, b"\0")

    def head(self) -> str:
        return _text(self.memory[_HEAD_AT : _HEAD_AT + _HEAD_BYTES])

    def read(self) -> Progress:
        _, pid, generation, mark, step, busy, launched, step_ns, committed, before = (
            _FIELDS.unpack_from(self.memory, 0)
        )
        name = _text(self.memory[_BUSY_AT : _BUSY_AT + _BUSY_BYTES]) if busy else ""
        return Progress(
            pid, generation, step, Mark(mark), launched - before, busy, committed, step_ns, name
        )

    def close(self) -> None:
        _close_quietly(self.memory)


_RING_HEADER = struct.Struct("<qqq")
_SLOT_HEADER = struct.Struct("<qqq")


class Ring:
    """The last few private states of one rank: opaque payloads, one slot per boundary."""

    def __init__(
        self,
        path: Path,
        *,
        payload_bytes_max: int | None = None,
        first: tuple[int, bytes | memoryview] | None = None,
    ) -> None:
        """With `payload_bytes_max` a new ring is made in place of an older one; without, opened.

        A new one takes the older one's place with its `first` entry in it.
        """
        self.path = path
        if payload_bytes_max is not None:
            size = _RING_HEADER.size + RING_SLOTS * (_SLOT_HEADER.size + payload_bytes_max)
            fresh = path.with_suffix(".new")
            _fresh_file(fresh, size)
            memory = _map(fresh, size)
            _RING_HEADER.pack_into(memory, 0, _MAGIC, RING_SLOTS, payload_bytes_max)
            for slot in range(RING_SLOTS):
                _SLOT_HEADER.pack_into(memory, self._slot_at(slot, payload_bytes_max), -1, 0, 0)
            self.memory, self.payload_bytes_max = memory, payload_bytes_max
            if first is not None:
                self.put(*first)
            os.replace(fresh, path)
        else:
            self.memory = _map(path, path.stat().st_size)
        magic, _, self.payload_bytes_max = _RING_HEADER.unpack_from(self.memory, 0)
        if magic != _MAGIC:
            raise Permanent(f"{path} is no ring")

    @staticmethod
    def _slot_at(slot: int, payload_bytes_max: int) -> int:
        return _RING_HEADER.size + slot * (_SLOT_HEADER.size + payload_bytes_max)

    def put(self, boundary: int, payload: bytes | memoryview) -> None:
        if len(payload) > self.payload_bytes_max:
            raise Permanent(f"private state of {len(payload)} bytes does not fit {self.path}")
        at = self._slot_at(boundary % RING_SLOTS, self.payload_bytes_max)
        # Invalid first, valid last: a writer that dies in between leaves an empty slot.
        struct.pack_into("<q", self.memory, at, -1)
        start = at + _SLOT_HEADER.size
        self.memory[start : start + len(payload)] = payload
        _SLOT_HEADER.pack_into(self.memory, at, -1, len(payload), zlib.crc32(payload))
        struct.pack_into("<q", self.memory, at, boundary)

    def get(self, boundary: int) -> bytes | None:
        at = self._slot_at(boundary % RING_SLOTS, self.payload_bytes_max)
        found, length, checksum = _SLOT_HEADER.unpack_from(self.memory, at)
        if found != boundary or not 0 <= length <= self.payload_bytes_max:
            return None
        start = at + _SLOT_HEADER.size
        payload = bytes(self.memory[start : start + length])
        return payload if zlib.crc32(payload) == checksum else None

    def boundaries(self) -> tuple[int, ...]:
        held = []
        for slot in range(RING_SLOTS):
            at = self._slot_at(slot, self.payload_bytes_max)
            held.append(_SLOT_HEADER.unpack_from(self.memory, at)[0])
        return tuple(sorted(b for b in held if b >= 0))

    def close(self) -> None:
        _close_quietly(self.memory)


def page_path(room: Path, rank: int, incarnation: int) -> Path:
    return room / f"seat-{rank}-{incarnation}.page"


def ring_path(room: Path, rank: int, incarnation: int) -> Path:
    return room / f"seat-{rank}-{incarnation}.ring"


def mirror_path(room: Path, rank: int) -> Path:
    return room / f"mirror-{rank}.ring"


def find_entry(room: Path, rank: int, boundary: int) -> bytes | None:
    """A rank's private state at a boundary, wherever this node's room holds it."""
    own = _quietly(lambda: _newest_first(room, f"seat-{rank}-*.ring")) or []
    if boundary == NEWEST:
        # A guess for whoever gets ready. What counts is asked for by its boundary.
        rings = [*own[:1], mirror_path(room, rank)]
        held = [_quietly(lambda path=path: Ring(path).boundaries()) or () for path in rings]  # type: ignore[misc]
        boundary = max((b for there in held for b in there), default=0)
    for path in [*own, mirror_path(room, rank)]:
        payload = _quietly(lambda path=path: Ring(path).get(boundary))  # type: ignore[misc]
        if payload is not None:
            return payload
    return None


def _newest_first(room: Path, pattern: str) -> list[Path]:
    return sorted(room.glob(pattern), key=lambda path: path.stat().st_mtime, reverse=True)


def _quietly(read: Callable[[], T | None]) -> T | None:
    """A ring that is being replaced, or was cut short by a death, holds nothing."""
    try:
        return read()
    except (OSError, ValueError, struct.error, Permanent):
        return None


def _fresh_file(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


def _map(path: Path, size: int) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), size)


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def _close_quietly(memory: mmap.mmap) -> None:
    try:
        memory.close()
    except BufferError:
        # A tensor still looks into it; the mapping goes with the process.
        return
