"""The preload server: imports torch once, then forks workers in milliseconds instead of seconds.

    python -m keepstep.agent.preload --socket PATH [--import MODULE]…

A process of its own that outlives the agent: it is the parent of every worker and standby of its
node, reaps them, and keeps each exit status until some agent has said that it saw it. One JSON
line per message on a Unix socket:

    agent:   Fork …            server:  Ready (once per connection), Forked …, Exited …
             Seen …

It stays single-threaded, because a fork keeps only the calling thread; it never computes with
torch, and it never imports torch by itself: module names come by argument. In a forked child
`serve` returns, so the child ends like any Python program, with its atexit handlers run.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from keepstep import codec, open_files
from keepstep.detect import process
from keepstep.errors import WireError

LINE_BYTES_MAX = 16 * 1024 * 1024
LOOK_SECONDS = 5.0
"""How often an idle server looks whether its socket is still there; without a room it leaves."""
SEND_SECONDS_MAX = 1.0
"""An agent that does not read for this long loses its connection; it may come again."""


@dataclass(frozen=True, slots=True)
class Fork:
    """Start a process. Safe to repeat: a living child with the same key is named, not doubled."""

    key: str
    entry: str
    """`package.module:function`, called without arguments; what it returns is the exit code."""
    arguments: tuple[str, ...]
    environment: dict[str, str]
    directory: str
    log: str
    preload: tuple[str, ...] = ()
    kind: Literal["fork"] = "fork"


@dataclass(frozen=True, slots=True)
class Seen:
    """The agent has an exit status; the server may forget it."""

    pid: int
    start: int
    kind: Literal["seen"] = "seen"


@dataclass(frozen=True, slots=True)
class Forked:
    """The child that a Fork made."""

    key: str
    pid: int
    start: int
    kind: Literal["forked"] = "forked"


@dataclass(frozen=True, slots=True)
class Exited:
    """A child was reaped. Negative codes are signals."""

    key: str
    pid: int
    start: int
    code: int
    kind: Literal["exited"] = "exited"


@dataclass(frozen=True, slots=True)
class Ready:
    """The imports are done; these children live."""

    pid: int
    children: tuple[Forked, ...] = ()
    kind: Literal["ready"] = "ready"


_KINDS: dict[str, type] = {"fork": Fork, "seen": Seen, "forked": Forked, "exited": Exited}
_KINDS["ready"] = Ready


def command(arguments: Sequence[str]) -> list[str]:
    """Starts a server. -P: what lies in the starter's directory is not on the workers' path."""
    return [sys.executable, "-P", "-m", "keepstep.agent.preload", *arguments]


def to_line(message: Fork | Seen | Forked | Exited | Ready) -> bytes:
    """One message as one line."""
    return codec.dumps(codec.to_plain(message)) + b"\n"


def from_line(line: bytes) -> Any:
    """Strictly read what `to_line` wrote."""
    plain = codec.loads(line)
    kind = _KINDS.get(str(plain.get("kind"))) if isinstance(plain, dict) else None
    if kind is None:
        raise WireError("the preload server and its agent do not speak the same version")
    return codec.from_plain(kind, plain)


@dataclass(slots=True)
class _Child:
    forked: Forked
    pidfd: int


@dataclass(slots=True)
class _Connection:
    socket: socket.socket
    buffer: bytearray = field(default_factory=bytearray)


class Server:
    """Forks, reaps and reports."""

    def __init__(self, listener: socket.socket, path: Path, parent: int = 0) -> None:
        """`parent`: leave with this process."""
        self.listener = listener
        self.path = path
        self.parent = parent
        self.inode = path.stat().st_ino
        self.connections: dict[int, _Connection] = {}
        self.children: dict[int, _Child] = {}
        """By pidfd: it becomes readable when the child has ended, with no signal handler."""
        self.exits: dict[tuple[int, int], Exited] = {}
        self.poll = select.poll()
        self.poll.register(listener, select.POLLIN)

    def serve(self) -> Fork | None:
        """Run until nobody wants it (None); in a forked child, return what it is to be."""
        while True:
            for fd, _ in self.poll.poll(LOOK_SECONDS * 1000):
                if fd == self.listener.fileno():
                    self._accept()
                elif fd in self.children:
                    self._reap(fd)
                elif fd in self.connections:
                    mine = self._read(self.connections[fd])
                    if mine is not None:
                        self._leave_to_parent()
                        return mine
            if not self._wanted():
                return None

    def _wanted(self) -> bool:
        if self.parent and os.getppid() != self.parent:
            return False
        try:
            return self.path.stat().st_ino == self.inode
        except OSError:
            return False

    def leave(self) -> None:
        """Take the socket away, unless it is another server's by now."""
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self.inode:
                self.path.unlink()

    def _accept(self) -> None:
        accepted, _ = self.listener.accept()
        accepted.settimeout(SEND_SECONDS_MAX)
        connection = _Connection(accepted)
        self.connections[accepted.fileno()] = connection
        self.poll.register(accepted, select.POLLIN)
        living = tuple(child.forked for child in self.children.values())
        self._send(connection, Ready(os.getpid(), living))
        for exited in list(self.exits.values()):
            self._send(connection, exited)

    def _send(self, connection: _Connection, message: Forked | Exited | Ready) -> None:
        if connection.socket.fileno() not in self.connections:
            return
        try:
            connection.socket.sendall(to_line(message))
        except OSError:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        fd = connection.socket.fileno()
        if self.connections.pop(fd, None) is not None:
            self.poll.unregister(fd)
            connection.socket.close()

    def _read(self, connection: _Connection) -> Fork | None:
        try:
            data = connection.socket.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return None
        connection.buffer += data
        while (end := connection.buffer.find(b"\n")) >= 0:
            line = bytes(connection.buffer[:end])
            del connection.buffer[: end + 1]
            try:
                message = from_line(line)
            except WireError as error:
                _say(f"refused a message: {error}")
                self._drop(connection)
                return None
            if isinstance(message, Fork) and self._fork(connection, message):
                return message
            if isinstance(message, Seen):
                self.exits.pop((message.pid, message.start), None)
        return None

    def _fork(self, connection: _Connection, fork: Fork) -> bool:
        """True in the child."""
        for child in self.children.values():
            if child.forked.key == fork.key:
                self._send(connection, child.forked)
                return False
        if fork.preload:
            import_all(fork.preload, fork.directory)
        pid = os.fork()
        if pid == 0:
            return True
        reading = process.probe(pid)
        assert reading is not None, "an unreaped child has its entry in /proc"
        pidfd = os.pidfd_open(pid)
        forked = Forked(fork.key, pid, reading.start)
        self.children[pidfd] = _Child(forked, pidfd)
        self.poll.register(pidfd, select.POLLIN)
        self._send(connection, forked)
        return False

    def _reap(self, pidfd: int) -> None:
        child = self.children.pop(pidfd)
        self.poll.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(child.forked.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        exited = Exited(child.forked.key, child.forked.pid, child.forked.start, code)
        self.exits[exited.pid, exited.start] = exited
        for connection in list(self.connections.values()):
            self._send(connection, exited)

    def _leave_to_parent(self) -> None:
        """In the child: what belongs to the server is none of ours."""
        self.listener.close()
        for connection in self.connections.values():
            connection.socket.close()
        for pidfd in self.children:
            os.close(pidfd)
        self.connections.clear()
        self.children.clear()


def import_all(modules: Sequence[str], directory: str = "") -> None:
    """Import what workers will need. One that fails is logged: the worker will fail by itself."""
    if directory:
        sys.path.insert(0, directory)
    for name in modules:
        if name not in sys.modules:
            with _Logged(f"import {name}"):
                importlib.import_module(name)
    if directory:
        sys.path.remove(directory)
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        _say(f"warning: {threads} threads after the imports; forks keep only one")
    # The children share these pages as long as nobody's collector writes into them.
    gc.collect()
    gc.freeze()


def settle(fork: Fork) -> Callable[[], int]:
    """In the child: become a process of its own, and find what to run."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    Path(fork.log).parent.mkdir(parents=True, exist_ok=True)
    # Opened here, not piped through the agent: output must survive the agent's death.
    out = os.open(fork.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(null)
    os.close(out)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # For people with `top`: all children have the server's command line.
    Path("/proc/self/comm").write_text(f"ks-{fork.key.split('/')[-2]}"[:15], encoding="utf-8")
    os.environ.clear()
    os.environ.update(fork.environment)
    os.chdir(fork.directory)
    sys.argv = [fork.entry, *fork.arguments]
    module, _, function = fork.entry.partition(":")
    entry: Callable[[], int] = getattr(importlib.import_module(module), function)
    return entry


class _Logged:
    """An import runs other people's code, which may raise anything: say so and go on."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None:
            return False
        _say(f"{self.what} failed: {error!r}")
        traceback.print_exception(error)
        return isinstance(error, Exception)


def _say(text: str) -> None:
    sys.stderr.write(f"preload: {text}\n")
    sys.stderr.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="keepstep.agent.preload")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--import", dest="modules", action="append", default=[])
    parser.add_argument("--parent", type=int, default=0, help="leave with this process")
    parser.add_argument("--title", help="room for the command lines of forks (offspring.py)")
    arguments = parser.parse_args()
    # As agents do: one that finds another limit here would not have a fork of ours (offspring.py).
    open_files.allow_many()
    # Listening before the imports: an agent's requests wait in the socket meanwhile.
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fresh = arguments.socket.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    listener.bind(str(fresh))
    listener.listen(64)
    fresh.replace(arguments.socket)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import_all(arguments.modules)
    server = Server(listener, arguments.socket, arguments.parent)
    fork = server.serve()
    if fork is None:
        server.leave()
        return 0
    return settle(fork)()


if __name__ == "__main__":
    sys.exit(main())
