"""The driver's side of the turns: who has which rank, how far it is, and how far it may go.

A seat is a connection of a rank's process. It is gone with the process; whoever takes the rank over
has a new one, and counts from its first step on: a process that is still being started holds nobody
up, unless the others wait for it themselves.
"""

from __future__ import annotations

import json
import selectors
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

HELLO_SECONDS_MAX = 10.0


@dataclass(slots=True)
class Seat:
    line: socket.socket
    rank: int
    pid: int
    done: int = 0
    """Steps, as it said last; 0: none since it came."""
    at: float = 0.0
    """When it said so, on the machine's clock."""
    rest: bytes = b""


class Seats:
    """All ranks of one job."""

    def __init__(self, path: Path, world: int) -> None:
        self._world = world
        self._until = 1
        self._seats: dict[int, Seat] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for seat in tuple(self._seats.values()):
            seat.line.close()
        self._selector.close()
        self._listener.close()

    def pid_of(self, rank: int) -> int:
        """Of whoever trains as this rank; 0: nobody does."""
        seat = self._seats.get(rank)
        return seat.pid if seat is not None and seat.done else 0

    def let_until(self, steps: int) -> None:
        """All may make so many steps in all, also those that come later."""
        self._until = steps
        for seat in tuple(self._seats.values()):
            self._tell(seat)

    def all_began(self) -> bool:
        return len(self._seats) == self._world and all(s.done for s in self._seats.values())

    def all_there(self) -> float | None:
        """When the last of those who train was where all may go; None: not yet."""
        training = [seat for seat in self._seats.values() if seat.done]
        if not training or any(seat.done < self._until for seat in training):
            return None
        return max(seat.at for seat in training)

    def hear(self, seconds: float) -> None:
        """What they say within this time, at the first word."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._welcome()
            else:
                self._read(key.data)

    def _welcome(self) -> None:
        line, _ = self._listener.accept()
        line.settimeout(HELLO_SECONDS_MAX)
        said, newline, rest = _first_line(line).partition(b"\n")
        if not newline:
            line.close()  # It died before it said who it is.
            return
        hello = json.loads(said)
        before = self._seats.pop(int(hello["rank"]), None)
        if before is not None:
            self._leave(before)
        seat = Seat(line, int(hello["rank"]), int(hello["pid"]))
        self._seats[seat.rank] = seat
        self._selector.register(line, selectors.EVENT_READ, seat)
        self._tell(seat)
        _take(seat, rest)

    def _read(self, seat: Seat) -> None:
        try:
            data = seat.line.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            if self._seats.get(seat.rank) is seat:
                del self._seats[seat.rank]
            self._leave(seat)
            return
        _take(seat, data)

    def _tell(self, seat: Seat) -> None:
        try:
            seat.line.sendall(json.dumps({"until": self._until}).encode() + b"\n")
        except OSError:
            return  # It is gone, and will be found to be.

    def _leave(self, seat: Seat) -> None:
        if seat.line.fileno() < 0:
            return  # Another took its rank, in the very moment in which its end was heard.
        self._selector.unregister(seat.line)
        seat.line.close()


def _take(seat: Seat, data: bytes) -> None:
    *lines, seat.rest = (seat.rest + data).split(b"\n")
    for line in lines:
        said: dict[str, Any] = json.loads(line)
        seat.done, seat.at = int(said["done"]), int(said["at"]) / 1e9


def _first_line(line: socket.socket) -> bytes:
    data = b""
    while b"\n" not in data:
        try:
            piece = line.recv(1 << 12)
        except OSError:
            piece = b""
        if not piece:
            break
        data += piece
    return data
