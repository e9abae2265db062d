"""The two homes of a rank's private entries: its own ring, and its neighbour's memory.

The ring lies in this node's shared memory and outlives the process; the mirror (mirror.py) carries
each entry to another node. Both are made anew with every generation, with its first entry in them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from keepstep.errors import NoHome
from keepstep.page import Ring, ring_path
from keepstep.training.groups import Groups
from keepstep.training.mirror import Mirror, payload_bytes_max
from keepstep.training.seat import Place
from keepstep.training.side import largest


class EntryHomes:
    """Where this rank's entries are. One per protected process."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._ring: Ring | None = None
        self._mirror: Mirror | None = None
        self._arrived: tuple[int, bytes] = (-1, b"")
        self.complete: Callable[[bytes], bytes] = bytes
        """Adds what an entry lacks because the update after it changed that."""

    def open(
        self, groups: Groups, generation: int, secret: str, stride: int, first: tuple[int, bytes]
    ) -> None:
        """Give a boundary's entry its two homes; the world agrees on the size of an entry."""
        place = self._place
        boundary, payload = first
        capacity = payload_bytes_max(largest(groups, len(payload)))
        path = ring_path(place.room, place.rank, place.incarnation)
        self._ring = Ring(path, payload_bytes_max=capacity, first=first)
        if self._mirror is not None:
            self._mirror.close()
        self._mirror = Mirror(place, generation, secret, stride if place.world_size > 1 else 0)
        self._mirror.open(groups.side, capacity)
        self._mirror.send(boundary, payload)
        self._mirror.finish()

    def put(self, boundary: int, payload: bytes) -> None:
        """The entry of the coming boundary, on its way to both."""
        assert self._ring is not None, "opened before the first step"
        self._ring.put(boundary, payload)
        if self._mirror is not None:
            self._mirror.send(boundary, payload)

    @property
    def room(self) -> int:
        """How long an entry may be, here and at the neighbour."""
        return self._ring.payload_bytes_max if self._ring is not None else sys.maxsize

    def settle(self) -> None:
        """Wait for the neighbour's entry, whose second home this rank is."""
        if self._mirror is not None:
            self._mirror.settle()

    def finish(self) -> bool:
        """Nothing is in flight any more. True if the neighbour's entry had not been waited for."""
        if self._mirror is None:
            return False
        late = not self._mirror.settled
        self._mirror.finish()
        return late

    def cancel(self, generation: int) -> None:
        """Free the training thread if it waits here in an older generation. Any thread."""
        mirror = self._mirror
        if mirror is not None and mirror.generation < generation:
            mirror.cancel()

    def arrived(self, boundary: int, payload: bytes) -> None:
        """What this rank became when it received its state; the ring comes later."""
        self._arrived = (boundary, payload)

    def boundaries(self) -> tuple[int, ...]:
        return self._ring.boundaries() if self._ring is not None else ()

    def find(self, boundary: int) -> bytes | None:
        """This rank's own private state at a boundary, if it is still here."""
        found = self._ring.get(boundary) if self._ring is not None else None
        if found is None and self._arrived[0] == boundary:
            # Received, and overtaken by another fault before the ring was made.
            return self._arrived[1]
        return found

    def get(self, boundary: int) -> bytes:
        """The same, whole, for whoever cannot do without it."""
        payload = self.find(boundary)
        if payload is None:
            raise NoHome(f"no private state of rank {self._place.rank} at {boundary}")
        return self.complete(payload)
