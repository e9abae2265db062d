"""Two neighbours of a ring, met at once: I connect to one, the other connects to me.

Everybody does the same at the same time, so nobody may wait for one side before it has served the
other: both handshakes are driven from one loop. A word is two bytes of length and its bytes, and
nothing beyond it is read: what follows belongs to the exchange.

Must never: believe a peer before its handshake is through; let a stranger that says nothing keep a
neighbour waiting: all who come are heard side by side, and the first that proves itself is it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable

from keepstep.sealed import Greeting, NotSealed

COMERS_MAX = 32
"""Who is heard at a time; one more, and the one that came first is left."""
_LENGTH = struct.Struct(">H")
_LOOK_SECONDS = 0.2


class Met:
    """One socket and the handshake on it."""

    def __init__(self, peer: socket.socket, greeting: Greeting, *, opens: bool) -> None:
        self.socket, self.greeting = peer, greeting
        self._heard = b""
        peer.setblocking(False)
        if opens:
            self._say(greeting.shake(b""))

    def hear(self) -> None:
        """Take what is there of one word, and answer once it is whole."""
        size = _LENGTH.size
        if len(self._heard) >= size:
            size += _LENGTH.unpack(self._heard[:size])[0]
        data = self.socket.recv(size - len(self._heard))
        if not data:
            raise NotSealed("it left in the middle of its greeting")
        self._heard += data
        if len(self._heard) == _LENGTH.size:
            size = _LENGTH.size + _LENGTH.unpack(self._heard)[0]
        if len(self._heard) == size:
            word, self._heard = self._heard[_LENGTH.size :], b""
            self._say(self.greeting.shake(word))

    def _say(self, word: bytes) -> None:
        if word:
            # A few hundred bytes into an empty socket: they fit.
            self.socket.sendall(_LENGTH.pack(len(word)) + word)


def meet(
    there: Met,
    listener: socket.socket,
    welcome: Callable[[socket.socket], Met],
    leave: Callable[[socket.socket], None],
    deadline: float,
) -> Met:
    """Until both are met: the one that I connected to, and one that came to me, who is returned."""
    comers: list[Met] = []
    listener.setblocking(False)
    while True:
        here = next((met for met in comers if met.greeting.ready), None)
        if here is not None and there.greeting.ready:
            break
        if time.monotonic() > deadline:
            raise TimeoutError("a neighbour does not answer")
        waiting = [] if there.greeting.ready else [there]
        waiting += comers if here is None else []
        poll = select.poll()
        for each in (listener, *(met.socket for met in waiting)):
            poll.register(each, select.POLLIN)
        ready = {number for number, _ in poll.poll(1000 * _LOOK_SECONDS)}
        for met in waiting:
            if met.socket.fileno() not in ready:
                continue
            try:
                met.hear()
            except BlockingIOError:
                continue
            except (NotSealed, OSError):
                if met is there:
                    raise
                # A stranger, or a rank of another generation.
                comers.remove(met)
                leave(met.socket)
        if listener.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                comers.append(welcome(listener.accept()[0]))
        if len(comers) > COMERS_MAX and comers[0] is not here:
            leave(comers.pop(0).socket)
    for met in comers:
        if met is not here:
            leave(met.socket)
    return here
