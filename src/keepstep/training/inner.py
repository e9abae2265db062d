"""Build the inner backends of one generation, and give them up from any thread.

For: connecting Gloo under groups that stay. Two things torch does not offer are made here. A
backend is aborted by shutting down its own sockets, which are found by looking at the process's
sockets before and after its construction. A construction is cancelled by leaving it to its errand:
the caller goes on at once, and the thread dies of its dead sockets.

Must never: close or shut down a socket that was there before the construction began; block in
`cancel`; hold a lock while it waits for a peer.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import resource
import socket
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from keepstep.training.errand import Errand

PROC_FDS = "/proc/self/fd"


class GroupsBroken(RuntimeError):
    """The groups were aborted: nothing may be launched until they are re-formed.

    A RuntimeError, because DDP, FSDP and autograd hand those through to the caller unchanged.
    """


@dataclass(frozen=True)
class InnerSpec:
    """What one inner backend is built from; `rank` is the rank inside the group."""

    name: str
    kind: str
    rank: int
    size: int
    timeout: timedelta
    shares: bool = False
    """Uses the network thread of the backends before it. Gloo gives each one a thread of its own,
    which looks around a hundred times a second even if there is never anything to do."""


class Formation:
    """The inner backends of one generation, with their own connection to the store.

    Its own connection, because a blocked wait on a store client can only be freed by shutting
    that client down, and the session's clients must live on.
    """

    def __init__(self, store: Store, prefix: str, generation: int) -> None:
        _spare()  # while there still are files
        self.generation = generation
        self._origin: Any = store  # torch's stubs do not know clone()
        self._prefix = prefix
        self._store: Store | None = None
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._errands: list[Errand[list[Any]]] = []
        self._sockets: list[_Sockets] = []
        # Held until they are forgotten: one that is freed joins its threads, and we wait for it.
        self._backends: list[Any] = []
        self._devices: list[Any] = []

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    @property
    def store(self) -> Store:
        """Where this generation's default group keeps its keys."""
        assert self._store is not None, "build before asking for the store"
        return PrefixStore(f"{self._prefix}/{self.generation}/default", self._store)

    def build(
        self, specs: Sequence[InnerSpec], connect_seconds_max: float | None = None
    ) -> list[Any]:
        """One connected backend per spec, in order. Raises GroupsBroken when cancelled or failed.

        `connect_seconds_max` bounds the whole; None leaves it to the groups' own timeouts. It is
        kept here and not given to Gloo, which would use it for every later send and receive.
        """
        sockets = _Sockets()
        errand = Errand("keepstep-connect", lambda: self._connect(specs, sockets))
        with self._lock:
            if self.cancelled:
                raise GroupsBroken("the groups were aborted before they were connected")
            self._errands.append(errand)
            self._sockets.append(sockets)
        errand.start()
        # cancel() leaves it, so that the caller never waits for a lost construction.
        in_time = errand.wait(connect_seconds_max)
        with self._lock:
            self._errands.remove(errand)
        if not in_time:
            self.cancel()
            raise GroupsBroken(f"a peer did not come within {connect_seconds_max} s")
        if self.cancelled:
            raise GroupsBroken("the groups were aborted while they were being connected")
        try:
            built = errand.result()
        except (RuntimeError, OSError) as error:
            raise GroupsBroken(f"a group could not be connected: {error}") from error
        self._backends.extend(built)
        return built

    def cancel(self) -> None:
        """Free everyone blocked in these backends. Any thread, any number of times."""
        with self._lock:
            self._cancelled.set()
            errands, tracked = list(self._errands), list(self._sockets)
        # Look before waking anyone: who wakes may open the next generation's sockets at once.
        for sockets in tracked:
            sockets.settle()
        for errand in errands:
            errand.leave()
        for sockets in tracked:
            sockets.shut_down()

    def forget(self) -> None:
        """Let go of the backends, so that they can be freed once nobody uses them."""
        self._backends.clear()
        self._devices = []
        self._store = None
        for sockets in self._sockets:
            sockets.release()

    def _connect(self, specs: Sequence[InnerSpec], sockets: _Sockets) -> list[Any]:
        built: list[Any] = []
        try:
            store = self._store = self._store or self._origin.clone()
            for spec in specs:
                if self.cancelled:
                    raise GroupsBroken("the groups were aborted before they were connected")
                built.append(self._construct(spec, store))
        finally:
            sockets.settle()
            if self.cancelled:
                built.clear()
        return built

    def _construct(self, spec: InnerSpec, base: Store) -> Any:
        store = PrefixStore(f"{self._prefix}/{self.generation}/{spec.name}", base)
        gloo: Any = ProcessGroupGloo  # torch's stubs call the options by other names
        if spec.shares and self._devices:
            options = gloo._Options()
            options._devices, options._timeout = self._devices, spec.timeout
            options._threads = 2 * len(self._devices)
            backend = gloo(store, spec.rank, spec.size, options)
        else:
            backend = gloo(store, spec.rank, spec.size, timeout=spec.timeout)
        self._devices = self._devices or backend.options._devices
        backend._set_sequence_number_for_group()
        return backend


class _Sockets:
    """The connected TCP sockets that appeared between its birth and its first settling.

    The first shut-down settles it too. From then on the caller has gone on, and what appears is
    the next generation's: a lost construction that still looked would take those down with it.

    Only the reading side is shut down, which ends every wait in Gloo. Gloo loses an operation whose
    first write fails: had this rank, or the peer it writes to, shut down writing as well, one that
    is launched in that very moment would be waited for until the group's timeout. For the same
    reason the sockets are held open until the next generation stands.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before = frozenset(_socket_inodes().values())
        self._owned: dict[int, str] | None = None
        self._held: dict[str, socket.socket] = {}

    def settle(self) -> dict[int, str]:
        with self._lock:
            if self._owned is None:
                links = _socket_inodes().items()
                self._owned = {fd: link for fd, link in links if link not in self._before}
            return self._owned

    def shut_down(self) -> None:
        for fd, link in self.settle().items():
            with self._lock:
                if link not in self._held and (held := _shut_down(fd, link)) is not None:
                    self._held[link] = held

    def release(self) -> None:
        """Nobody writes to them any more."""
        with self._lock:
            for held in self._held.values():
                held.close()
            self._held = {}


def _socket_inodes() -> dict[int, str]:
    try:
        listed: Iterable[int] = map(int, os.listdir(PROC_FDS))
    except OSError:
        # Listing takes a file, and there is none to be had: then about every number is in use.
        listed = range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    links = ((fd, _link(fd)) for fd in listed)
    return {fd: link for fd, link in links if link.startswith("socket:")}


def _link(fd: int) -> str:
    try:
        return os.readlink(f"{PROC_FDS}/{fd}")
    except OSError:
        return ""  # closed since it was listed


def _shut_down(fd: int, link: str) -> socket.socket | None:
    """End reading from `fd` if it still is the socket we saw: numbers are reused by other threads.

    Returns a second hold on it, by which it stays open; None if it is none of ours to end, or if
    there is no file to be had for one.
    """
    try:
        pinned = os.dup(fd)
    except OSError as error:
        if error.errno == errno.EMFILE:
            _spare().shut_down(fd, link)
        return None
    held = _end_reading(pinned, link)
    if held is None:
        os.close(pinned)
    return held


def _end_reading(pinned: int, link: str) -> socket.socket | None:
    """The same by a number that is ours alone, under which nobody can put another socket."""
    if _link(pinned) != link:
        return None
    held = socket.socket(fileno=pinned)
    try:
        if held.family in (socket.AF_INET, socket.AF_INET6):
            held.getpeername()  # a listener has none; Gloo's loop dies if its listener does
            held.shutdown(socket.SHUT_RD)
            return held
    except OSError:
        pass
    held.detach()
    return None


class _Spare:
    """A number that is kept for the case that there are no others, and what lies there meanwhile.

    Who waits for a socket that was not shut down waits until the group's timeout.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nothing = os.open(os.devnull, os.O_RDONLY)
        self._number = os.dup(self._nothing)

    def shut_down(self, fd: int, link: str) -> None:
        """One socket at a time, and none is held."""
        with self._lock, contextlib.suppress(OSError):
            os.dup2(fd, self._number, inheritable=False)
            held = _end_reading(self._number, link)
            if held is not None:
                held.detach()
            os.dup2(self._nothing, self._number, inheritable=False)


@functools.cache
def _spare() -> _Spare:
    return _Spare()
