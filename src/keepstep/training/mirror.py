"""The second home of a rank's private state.

Each rank sends its entry for the coming boundary to the rank `mirror_stride` seats on, worker to
worker (exchange.py), just before its first gradient collective. There is no acknowledgement to wait
for: the neighbour withholds its own last gradient collective until it holds my entry in shared
memory, so nobody can finish the step's gradients, let alone apply them, before every entry has two
homes.

        rank r   forward | entry -> r+k | bucket bucket … bucket(last) | update
        rank r+k forward | entry -> …   | bucket bucket … (has r's entry?) bucket(last) | update
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from keepstep import wire
from keepstep.model import Endpoint
from keepstep.page import NEWEST, Ring, find_entry, mirror_path
from keepstep.training.asking import ask_in_turn
from keepstep.training.exchange import Exchange
from keepstep.training.private import decode_entry, not_carried
from keepstep.training.raw import bytes_tensor, tensor_bytes
from keepstep.training.seat import Place

_TAG = 11
_ENDPOINT_BYTES = 64
CONNECT_SECONDS_MAX = 10.0


def payload_bytes_max(longest: int) -> int:
    """Room for an entry that grows a little: numbers in its header get longer with time."""
    return longest + longest // 4 + 4096


class Mirror:
    """Exchanges entries with the neighbours of one generation."""

    def __init__(self, place: Place, generation: int, secret: str, stride: int) -> None:
        self.generation = generation
        self._room = place.room
        self._to = (place.rank + stride) % place.world_size
        self._from = (place.rank - stride) % place.world_size
        self._ring: Ring | None = None
        self._exchange: Exchange | None = None
        self._awaits = False
        self._capacity = 0
        if stride % place.world_size != 0:
            said = hello(secret, generation, place.rank, self._to, "entry")
            expected = hello(secret, generation, self._from, place.rank, "entry")
            self._exchange = Exchange(place.address, said, expected, sealed=place.encrypt)

    def open(self, side: Any, capacity: int) -> None:
        """Connect, and make room for entries; all ranks call this with the same capacity."""
        if self._exchange is None:
            return
        # Who sends to me must know where I listen, and I where my own mirror does.
        mine = _endpoint_tensor(self._exchange.endpoint)
        told = side.send([mine], self._from, _TAG)
        theirs = torch.zeros(_ENDPOINT_BYTES, dtype=torch.uint8)
        side.recv([theirs], self._to, _TAG).wait()
        told.wait()
        self._capacity = capacity
        self._exchange.connect(_endpoint_of(theirs), CONNECT_SECONDS_MAX)

    def send(self, boundary: int, payload: bytes) -> None:
        """Start the exchange of one entry. An exchange in flight is settled first."""
        if self._exchange is None:
            return
        self.settle()
        self._exchange.send(boundary, payload)
        self._awaits = True

    def settle(self) -> None:
        """Wait for the neighbour's entry and put it where it outlives this process."""
        if not self._awaits:
            return
        assert self._exchange is not None, "opened before it is used"
        boundary, payload = self._exchange.take()
        self._awaits = False
        if self._ring is None:
            # Not before the new entry is here: the old ring may be its rank's last home.
            path = mirror_path(self._room, self._from)
            first = (boundary, payload)
            self._ring = Ring(path, payload_bytes_max=self._capacity, first=first)
        else:
            self._ring.put(boundary, payload)

    @property
    def settled(self) -> bool:
        return not self._awaits

    def finish(self) -> None:
        """Let go of what is in flight at the end of a step."""
        self.settle()
        if self._exchange is not None:
            self._exchange.flush()

    def cancel(self) -> None:
        """Free the training thread if it waits here. Any thread."""
        if self._exchange is not None:
            self._exchange.cancel()

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()


def hello(secret: str, generation: int, sender: int, receiver: int, what: str) -> bytes:
    """What only this generation's ranks can say, and only about this pair of them."""
    return hashlib.sha256(f"{secret}/{generation}/{what}/{sender}>{receiver}".encode()).digest()


def _endpoint_tensor(endpoint: Endpoint) -> torch.Tensor:
    raw = f"{endpoint.host} {endpoint.port}".encode().ljust(_ENDPOINT_BYTES)
    return bytes_tensor(raw)


def _endpoint_of(told: torch.Tensor) -> Endpoint:
    host, port = tensor_bytes(told).decode().split()
    return Endpoint(host, int(port))


def fetch_from(
    place: Place, home: wire.Home, boundary: int, secret: str
) -> tuple[bytes | None, str]:
    """A rank's private state at a boundary: from this node's memory, else from its homes, which are
    asked with each secret that they may know."""
    payload, why = find_entry(place.room, int(home.rank), boundary), "this node"
    if payload is None:
        secrets = dict.fromkeys((*home.secrets, secret))
        questions = [wire.FetchEntry(place.job, home.rank, boundary, known) for known in secrets]
        payload, why = ask_in_turn(home.endpoints, questions, sealed=place.encrypt)
    if payload is not None and boundary != NEWEST and (lacks := decode_entry(payload).lacks):
        return None, not_carried(lacks)
    return payload, why
