"""The training side's end of the agent's Unix socket, and its one background thread.

Training never waits here: `send` writes what fits and leaves the rest to the thread, and while
there is no agent (it was killed, it is being restarted) the thread tries again and again. After
each connect it says who we are and repeats the last message of each kind, so nothing has to be
queued: a later message of a kind supersedes an earlier one, and receivers bear repetition.

    link = Link(path, hello, on_message); link.start(); link.send(report); …; link.close()

`on_message` runs on the link's thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace

from keepstep import wire
from keepstep.errors import WireError

RETRY_SECONDS_MIN = 0.02
RETRY_SECONDS_MAX = 0.5
CLOSE_SECONDS_MAX = 1.0
UNSENT_BYTES_MAX = 16 * 1024 * 1024
"""An agent that reads nothing for so long is left; the next connection starts from nothing."""


class Link:
    """A connection that comes back by itself."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        hello: Callable[[], wire.WorkerHello],
        on_message: Callable[[wire.Message], None],
    ) -> None:
        self._path = os.fspath(path)
        self._hello = hello
        self._on_message = on_message
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._unsent = bytearray()
        self._latest: dict[str, wire.Message] = {}
        self._closing = threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        self._thread = threading.Thread(target=self._run, name="keepstep-link", daemon=True)

    def start(self) -> None:
        """Connect, now and for ever."""
        self._thread.start()

    def send(self, message: wire.Message) -> None:
        """Say something; returns at once, connected or not. Safe from any thread."""
        kind = type(message).__name__
        frame = wire.encode(message)
        with self._lock:
            # Last in the order of repetition, too.
            self._latest.pop(kind, None)
            self._latest[kind] = message
            if self._socket is not None:
                self._unsent += frame
                self._flush()

    def close(self) -> None:
        """End the thread and the connection. What was sent before is written if the agent reads."""
        self._closing.set()
        self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS_MAX)

    def _flush(self) -> None:
        """Under the lock: write what fits without waiting."""
        assert self._socket is not None
        while self._unsent:
            try:
                written = self._socket.send(self._unsent)
            except BlockingIOError:
                break
            except OSError:
                # The thread sees the same end and connects again.
                self._unsent.clear()
                return
            del self._unsent[:written]
        if len(self._unsent) > UNSENT_BYTES_MAX:
            self._unsent.clear()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        elif self._unsent:
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        pause = RETRY_SECONDS_MIN
        while not self._closing.is_set():
            if self._serve():
                pause = RETRY_SECONDS_MIN
            else:
                self._closing.wait(pause)
                pause = min(2 * pause, RETRY_SECONDS_MAX)
        os.close(self._wake_read)

    def _serve(self) -> bool:
        """One connection, from its beginning to its end; False if there was none, or trouble."""
        connection: socket.socket | None = None
        try:
            connection = self._connect()
            if connection is not None:
                self._talk(connection)
            return connection is not None
        except Exception:
            # No file or no thread to be had for what an order asks for, say. Without this thread
            # the worker would hear no order again; the agent repeats them to the next connection.
            raised = traceback.format_exc()
            sys.stderr.write(f"keepstep: what the agent said was not followed:\n{raised}")
            sys.stderr.flush()
            return False
        finally:
            with self._lock:
                self._socket = None
                self._unsent.clear()
            if connection is not None:
                connection.close()

    def _connect(self) -> socket.socket | None:
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:
            return None  # No file to be had: a recovery needs many, and gives them back.
        try:
            connection.settimeout(RETRY_SECONDS_MAX)
            connection.connect(self._path)
            connection.setblocking(False)
        except OSError:
            connection.close()
            return None
        hello = wire.encode(replace(self._hello(), speaks=wire.VERSION))
        with self._lock:
            self._socket = connection
            self._unsent = bytearray(hello)
            for message in self._latest.values():
                self._unsent += wire.encode(message)
            self._flush()
        return connection

    def _talk(self, connection: socket.socket) -> None:
        """Until the agent is gone or this link is closed."""
        decoder = wire.Decoder()
        while not self._closing.is_set():
            with self._lock:
                wanted = select.POLLIN | (select.POLLOUT if self._unsent else 0)
            # Not select(): a training process may well have more than 1,024 open files.
            poll = select.poll()
            poll.register(connection, wanted)
            poll.register(self._wake_read, select.POLLIN)
            ready = dict(poll.poll())
            if self._wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            happened = ready.get(connection.fileno(), 0)
            if happened & select.POLLOUT:
                with self._lock:
                    self._flush()
            if happened & ~select.POLLOUT and not self._receive(connection, decoder):
                return

    def _receive(self, connection: socket.socket, decoder: wire.Decoder) -> bool:
        try:
            data = connection.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        try:
            messages = decoder.feed(data)
        except WireError:
            # Of another version: nothing it says can be trusted. Try again later.
            self._closing.wait(RETRY_SECONDS_MAX)
            return False
        for message in messages:
            self._on_message(message)
        return True
