"""The second home of a rank's private state.

Each rank sends its entry for the coming boundary to the rank `mirror_stride` seats on, over the
data plane, just before its first gradient collective. There is no acknowledgement to wait for: the
neighbour withholds its own last gradient collective until it holds my entry in shared memory, so
nobody can finish the step's gradients, let alone apply them, before every entry has two homes.

        rank r   forward | entry -> r+k | bucket bucket … bucket(last) | update
        rank r+k forward | entry -> …   | bucket bucket … (has r's entry?) bucket(last) | update
"""

from __future__ import annotations

import base64
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from keepstep import wire
from keepstep.errors import Permanent, WireError
from keepstep.model import Endpoint, JobId, Rank
from keepstep.page import Ring, find_entry, mirror_path
from keepstep.training.private import tensor_bytes

_FRAME = struct.Struct("<qq")
_TAG = 11
FETCH_SECONDS_MAX = 5.0


def payload_bytes_max(longest: int) -> int:
    """Room for an entry that grows a little: numbers in its header get longer with time."""
    return longest + longest // 4 + 4096


class Mirror:
    """Exchanges entries with the neighbours of one generation."""

    def __init__(self, side: Any, room: Path, rank: int, world_size: int, stride: int) -> None:
        self._side = side
        self._room = room
        self._to = (rank + stride) % world_size
        self._from = (rank - stride) % world_size
        self.enabled = stride % world_size != 0
        self._ring: Ring | None = None
        self._outgoing: tuple[Any, torch.Tensor] | None = None
        self._incoming: tuple[Any, torch.Tensor] | None = None

    def open(self, capacity: int) -> None:
        """Agree on the size of an entry; all ranks call this with the same capacity."""
        if not self.enabled:
            return
        path = mirror_path(self._room, self._from)
        self._ring = Ring(path, payload_bytes_max=capacity)
        self._send_buffer = torch.zeros(_FRAME.size + capacity, dtype=torch.uint8)
        self._receive_buffer = torch.zeros(_FRAME.size + capacity, dtype=torch.uint8)

    def send(self, boundary: int, payload: bytes) -> None:
        """Start the exchange of one entry. An exchange in flight is settled first."""
        if not self.enabled:
            return
        self.settle()
        if self._outgoing is not None:
            self._outgoing[0].wait()
        buffer = self._send_buffer
        frame = _FRAME.pack(boundary, len(payload)) + payload
        if len(frame) > buffer.numel():
            raise Permanent(f"private state grew to {len(payload)} bytes, over its mirror's room")
        buffer[: len(frame)] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        self._incoming = (
            self._side.recv([self._receive_buffer], self._from, _TAG),
            self._receive_buffer,
        )
        self._outgoing = (self._side.send([buffer], self._to, _TAG), buffer)

    def settle(self) -> None:
        """Wait for the neighbour's entry and put it where it outlives this process."""
        if self._incoming is None:
            return
        work, buffer = self._incoming
        work.wait()
        self._incoming = None
        boundary, length = _FRAME.unpack(tensor_bytes(buffer[: _FRAME.size]))
        assert self._ring is not None, "a mirror is opened before it is used"
        payload = tensor_bytes(buffer[_FRAME.size : _FRAME.size + length])
        self._ring.put(boundary, payload)

    @property
    def settled(self) -> bool:
        return self._incoming is None

    def finish(self) -> None:
        """Let go of what is in flight at the end of a step."""
        self.settle()
        if self._outgoing is not None:
            self._outgoing[0].wait()
            self._outgoing = None


def fetch_entry(
    room: Path, endpoints: Sequence[Endpoint], question: wire.FetchEntry
) -> tuple[bytes | None, str]:
    """A rank's private state at a boundary: from this node's memory, else from its homes."""
    payload = find_entry(room, question.rank, question.boundary)
    if payload is not None:
        return payload, "this node"
    reasons = []
    for endpoint in endpoints:
        payload, why = _ask(endpoint, question)
        if payload is not None:
            return payload, f"{endpoint.host}:{endpoint.port}"
        reasons.append(f"{endpoint.host}:{endpoint.port}: {why}")
    return None, "; ".join(reasons) or "no home is left to ask"


def fetch_from(
    room: Path, home: wire.Home, job: JobId, boundary: int, secret: str
) -> tuple[bytes | None, str]:
    """A rank's private state from its homes, asked with each secret that they may know."""
    payload, why = None, "no home is left to ask"
    for known in dict.fromkeys((*home.secrets, secret)):
        payload, why = fetch_entry(room, home.endpoints, question(job, home.rank, boundary, known))
        if payload is not None:
            break
    return payload, why


def question(job: JobId, rank: int, boundary: int, secret: str) -> wire.FetchEntry:
    return wire.FetchEntry(job, Rank(rank), boundary, secret)


def _ask(endpoint: Endpoint, question: wire.FetchEntry) -> tuple[bytes | None, str]:
    decoder = wire.Decoder()
    try:
        with socket.create_connection((endpoint.host, endpoint.port), FETCH_SECONDS_MAX) as peer:
            peer.sendall(wire.encode(question))
            while True:
                data = peer.recv(1 << 20)
                if not data:
                    return None, "the peer closed without an answer"
                for answer in decoder.feed(data):
                    if isinstance(answer, wire.Entry):
                        if not answer.found:
                            return None, answer.why
                        return base64.b64decode(answer.payload), ""
    except (OSError, WireError) as error:
        return None, str(error)
