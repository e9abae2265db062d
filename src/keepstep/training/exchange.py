"""A few frames to one neighbour and as many from another, each step, without waking a thread.

For: small state that must be at a neighbour before a step counts. A message is written with one
system call and lies in the receiver's socket until its training thread asks for it. Gloo would wake
four threads per message for its handshake, in the middle of everybody's backward pass.

    rank r    connect -> r+k's listener, both prove the generation's secret;   send(frame)
    rank r+k  accept                                                           take() -> frame

With `sealed` everything after the proofs is encrypted too (keepstep/sealed.py).

What does not fit into the socket leaves while this rank waits for its neighbour's first frame, and
after that on a thread, which then is the only one to push: nobody's message may depend on when
another rank comes back to its own.

Must never: hold a collective back for the neighbour's reading; close a socket from another thread
(`cancel` only shuts down); believe a peer that does not know the secret.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from keepstep.model import Endpoint
from keepstep.sealed import Challenge, Greeting, NotSealed, Seal, sealed_bytes
from keepstep.training.errand import Errand
from keepstep.training.inner import GroupsBroken
from keepstep.training.meeting import Met, meet

_FRAME = struct.Struct("<qq")
_LOOK_SECONDS = 1.0
_PARTS_MAX = 256
"""Of a frame, handed to the kernel at once; it takes 1,024."""

Parts = Sequence[bytes | memoryview]
Frame = tuple[int, Parts]
"""Its boundary, and what it consists of."""
Room = Callable[[int, int], memoryview]
"""Where a frame of this boundary and length shall land."""


class Exchange:
    """Connected to two neighbours: what is sent goes to one, what is taken comes from the other."""

    def __init__(self, address: str, said: bytes, expected: bytes, *, sealed: bool = False) -> None:
        """Listens at once. I and whom I connect to know `said`, I and who connects to me know
        `expected`; neither is ever sent."""
        self._said, self._expected, self._sealed = said, expected, sealed
        self._seal_out: Seal | None = None
        self._seal_in: Seal | None = None
        self._lock = threading.Lock()
        self._cancelled = False
        try:
            family = _resolve(Endpoint(address, 0))[0]
            self._listener = socket.create_server((address, 0), family=family, backlog=8)
        except OSError as error:
            raise GroupsBroken(f"no listener on {address} for a neighbour: {error}") from error
        self._sockets = [self._listener]
        self._out: socket.socket | None = None
        self._in: socket.socket | None = None
        self._left: deque[memoryview] = deque()
        """What did not fit into the socket yet."""
        self._pusher: Errand[None] | None = None
        self._buffer = bytearray(1 << 16)

    @property
    def endpoint(self) -> Endpoint:
        host, port = self._listener.getsockname()[:2]
        return Endpoint(str(host), int(port))

    def connect(self, there: Endpoint, seconds_max: float) -> None:
        """To the neighbour that I send to, and from the one that sends to me."""
        deadline = time.monotonic() + seconds_max
        try:
            family, where = _resolve(there)
            # Owned before it connects: a node that is gone does not answer.
            out = self._own(socket.socket(family, socket.SOCK_STREAM))
            out.settimeout(seconds_max)
            out.connect(where)
            self._check()
            out.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            mine = Met(out, self._greeting(self._said, opens=True), opens=True)
            theirs = meet(mine, self._listener, self._welcome, self._leave, deadline)
            self._check()
            if isinstance(mine.greeting, Seal) and isinstance(theirs.greeting, Seal):
                self._seal_out, self._seal_in = mine.greeting, theirs.greeting
            self._in, self._out = theirs.socket, out
        except (OSError, NotSealed) as error:
            raise GroupsBroken(f"no connection with a neighbour: {error}") from error

    def send(self, boundary: int, *parts: bytes | memoryview) -> None:
        """Hand a frame to the network; what does not fit at once leaves with take and flush.

        Parts are not copied: they must stay as they are until then.
        """
        self.send_all([(boundary, parts)])

    def send_all(self, frames: Sequence[Frame]) -> None:
        """Several of them, one behind the other: each is taken by itself."""
        self.flush()
        whole = (part for frame in frames for part in self._packed(*frame))
        self._left = deque(memoryview(part) for part in whole if len(part))
        self._push()

    def take(self, room: Room | None = None) -> tuple[int, memoryview]:
        """The neighbour's next frame; waits for it. It lands in the `room` for its boundary and
        length, or else in a buffer that the next take uses again."""
        boundary, length = _FRAME.unpack(self._opened(memoryview(self._buffer)[: _FRAME.size]))
        if room is None and length > len(self._buffer):
            self._buffer = bytearray(length)
        frame = self._opened(
            memoryview(self._buffer)[:length] if room is None else room(boundary, length)
        )
        if self._left and self._pusher is None:
            # My own frame must not wait for this thread, which has a collective to launch now.
            self._pusher = Errand("keepstep-push", self._push_all)
            self._pusher.start()
        return boundary, frame

    def flush(self) -> None:
        """Until everything that was sent has left."""
        if self._pusher is not None:
            self._pusher.wait()
            pusher, self._pusher = self._pusher, None
            pusher.result()
        self._push_all()

    def cancel(self) -> None:
        """Free whoever waits here, for good. Any thread, any number of times."""
        with self._lock:
            self._cancelled = True
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the sockets back. The training thread only."""
        self.cancel()
        if self._pusher is not None:
            self._pusher.wait()
        with self._lock:
            for each in self._sockets:
                each.close()
            self._sockets = []

    # ------------------------------------------------------------ inside

    def _own(self, made: socket.socket) -> socket.socket:
        """From here on a cancel reaches it."""
        with self._lock:
            self._sockets.append(made)
        self._check()
        return made

    def _check(self) -> None:
        if self._cancelled:
            raise GroupsBroken("the exchange was given up while it was being connected")

    def _greeting(self, key: bytes, *, opens: bool) -> Greeting:
        if self._sealed:
            return Seal(key.hex(), "exchange", opens=opens)
        return Challenge(key, opens=opens)

    def _welcome(self, peer: socket.socket) -> Met:
        return Met(self._own(peer), self._greeting(self._expected, opens=False), opens=False)

    def _leave(self, peer: socket.socket) -> None:
        with self._lock:
            self._sockets.remove(peer)
            peer.close()
        self._check()

    def _opened(self, view: memoryview) -> memoryview:
        """Fill it with what the neighbour sent, unsealed."""
        if self._seal_in is None:
            return self._read(view)
        sealed = self._read(memoryview(bytearray(sealed_bytes(len(view)))))
        try:
            self._seal_in.open(sealed, view)
        except NotSealed as error:
            raise GroupsBroken(f"the neighbour whose entries I keep: {error}") from error
        return view

    def _packed(self, boundary: int, parts: Parts) -> Parts:
        head = _FRAME.pack(boundary, sum(map(len, parts)))
        if self._seal_out is None:
            return (head, *parts)
        return (self._seal_out.seal(head), *self._seal_out.slices(b"".join(parts)))

    def _push_all(self) -> None:
        while not self._push():
            self._wait(reading=False)

    def _push(self) -> bool:
        """Send what the socket takes; True when nothing is left."""
        if self._left:
            assert self._out is not None, "connect comes first"
            some = list(itertools.islice(self._left, _PARTS_MAX))
            try:
                sent = self._out.sendmsg(some, (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            except OSError as error:
                raise GroupsBroken(f"the neighbour that keeps my entries: {error}") from error
            while self._left and sent >= len(self._left[0]):
                sent -= len(self._left.popleft())
            if sent:
                self._left[0] = self._left[0][sent:]
        return not self._left

    def _read(self, view: memoryview) -> memoryview:
        """Fill it."""
        assert self._in is not None, "connect comes first"
        size, got = len(view), 0
        while got < size:
            try:
                count = self._in.recv_into(view[got:])
            except BlockingIOError:
                self._wait(reading=True)
                continue
            except OSError as error:
                raise GroupsBroken(f"the neighbour whose entries I keep: {error}") from error
            if not count:
                raise GroupsBroken("the neighbour whose entries I keep is gone")
            got += count
        return view

    def _wait(self, *, reading: bool) -> None:
        """Until something can move. My own rest is pushed on meanwhile: a ring must not stand."""
        assert self._in is not None and self._out is not None, "connect comes first"
        # Two who push would send the same bytes twice: where there is a pusher, it alone does.
        pushes = not reading or self._pusher is None
        poll = select.poll()
        if reading:
            poll.register(self._in, select.POLLIN)
        if pushes and self._left:
            poll.register(self._out, select.POLLOUT)
        while not poll.poll(1000 * _LOOK_SECONDS):
            self._check()
        if pushes:
            self._push()


def _resolve(endpoint: Endpoint) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    family, _, _, _, where = socket.getaddrinfo(
        endpoint.host, endpoint.port, type=socket.SOCK_STREAM
    )[0]
    return family, where
