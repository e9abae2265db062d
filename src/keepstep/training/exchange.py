"""One message to one neighbour and one from another, each step, without waking a thread.

For: small state that must be at a neighbour before a step counts. A message is written with one
system call and lies in the receiver's socket until its training thread asks for it. Gloo would wake
four threads per message for its handshake, in the middle of everybody's backward pass.

    rank r    connect -> r+k's listener, prove the generation's secret;   send(frame)
    rank r+k  accept                                                      take() -> frame

Must never: block in `send`; close a socket from another thread (`cancel` only shuts down); believe
a peer that does not know the secret.
"""

from __future__ import annotations

import contextlib
import hmac
import select
import socket
import struct
import threading
import time
from typing import Any

from keepstep.model import Endpoint
from keepstep.training.inner import GroupsBroken

_FRAME = struct.Struct("<qq")
_HELLO_BYTES = 32
_LOOK_SECONDS = 1.0


class Exchange:
    """Connected to two neighbours: what is sent goes to one, what is taken comes from the other."""

    def __init__(self, address: str, hello: bytes) -> None:
        """Listens at once; `hello` is what both sides of a connection must know."""
        assert len(hello) == _HELLO_BYTES, "a hello has a fixed size, so that it is read whole"
        self._hello = hello
        self._lock = threading.Lock()
        self._cancelled = False
        family = _resolve(Endpoint(address, 0))[0]
        self._listener = socket.create_server((address, 0), family=family, backlog=8)
        self._out: socket.socket | None = None
        self._in: socket.socket | None = None
        self._left = memoryview(b"")
        """What did not fit into the socket yet."""
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
            out = socket.socket(family, socket.SOCK_STREAM)
            self._own("_out", out)  # before it connects: a node that is gone does not answer
            out.settimeout(seconds_max)
            out.connect(where)
            out.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            out.sendall(self._hello)
            self._own("_in", self._accept(deadline))
            out.setblocking(False)
        except OSError as error:
            raise GroupsBroken(f"no mirror connection with a neighbour: {error}") from error

    def send(self, boundary: int, payload: bytes) -> None:
        """Hand a frame to the network; what does not fit at once leaves with take and flush."""
        self.flush()
        self._left = memoryview(_FRAME.pack(boundary, len(payload)) + payload)
        self._push()

    def take(self) -> tuple[int, memoryview]:
        """The neighbour's next frame; valid until the next take. Waits for it."""
        boundary, length = _FRAME.unpack(self._read(_FRAME.size))
        if length > len(self._buffer):
            self._buffer = bytearray(length)
        return boundary, self._read(length)

    def flush(self) -> None:
        """Until everything that was sent has left."""
        while not self._push():
            self._wait(reading=False)

    def cancel(self) -> None:
        """Free whoever waits here, for good. Any thread, any number of times."""
        with self._lock:
            self._cancelled = True
            held = [s for s in (self._listener, self._out, self._in) if s is not None]
        for each in held:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the sockets back. The training thread only."""
        self.cancel()
        for each in (self._listener, self._out, self._in):
            if each is not None:
                each.close()

    # ------------------------------------------------------------ inside

    def _own(self, name: str, made: socket.socket) -> None:
        with self._lock:
            setattr(self, name, made)
            if self._cancelled:
                raise GroupsBroken("the mirror was given up while it was being connected")

    def _accept(self, deadline: float) -> socket.socket:
        while True:
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            peer, _ = self._listener.accept()
            peer.settimeout(max(0.001, deadline - time.monotonic()))
            said = b""
            while len(said) < _HELLO_BYTES and (piece := peer.recv(_HELLO_BYTES - len(said))):
                said += piece
            if hmac.compare_digest(said, self._hello):
                peer.setblocking(False)
                return peer
            peer.close()  # A stranger, or a rank of another generation.

    def _push(self) -> bool:
        """Send what the socket takes; True when nothing is left."""
        if self._left:
            assert self._out is not None, "connect comes first"
            try:
                sent = self._out.send(self._left, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            except OSError as error:
                raise GroupsBroken(f"the neighbour that keeps my entries: {error}") from error
            self._left = self._left[sent:]
        return not self._left

    def _read(self, size: int) -> memoryview:
        assert self._in is not None, "connect comes first"
        view = memoryview(self._buffer)[:size]
        got = 0
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
        poll = select.poll()
        if reading:
            poll.register(self._in, select.POLLIN)
        if self._left:
            poll.register(self._out, select.POLLOUT)
        while not poll.poll(1000 * _LOOK_SECONDS):
            if self._cancelled:
                raise GroupsBroken("the mirror was given up")
        self._push()


def _resolve(endpoint: Endpoint) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    family, _, _, _, where = socket.getaddrinfo(
        endpoint.host, endpoint.port, type=socket.SOCK_STREAM
    )[0]
    return family, where
