"""A store that can be pointed elsewhere: what torch believes to be the default store.

torch hands its default store to every group, mesh and barrier and never lets go of it. The host
of the real store may die, and each generation has a prefix of its own, so torch gets this one.

`connect` opens the real one. torch's client waits longer after each try and hears nothing
meanwhile. So a plain socket knocks first, which finds a store that is just coming up at once, and
the client is made on an errand, which is left when a newer order comes.

Must never: cache a value, or answer from anywhere but where it points now.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import TCPStore

from keepstep.model import Endpoint
from keepstep.training.errand import Errand
from keepstep.training.inner import GroupsBroken
from keepstep.training.store_sweep import TRAINS, mark

_KNOCK_SECONDS_MAX = 1.0
_KNOCK_AGAIN_SECONDS = 0.03


def connect(
    endpoint: Endpoint, seconds_max: float, overtaken: Callable[[], bool] = lambda: False
) -> Store:
    """The store at an endpoint. Raises GroupsBroken once overtaken, or if nobody is there.

    `seconds_max` is for finding it and, later, for each answer of it.
    """
    deadline = time.monotonic() + seconds_max
    while True:
        if overtaken():
            raise GroupsBroken("a newer order came while this one looked for its store")
        try:
            socket.create_connection((endpoint.host, endpoint.port), _KNOCK_SECONDS_MAX).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise GroupsBroken(f"no store at {endpoint.host}:{endpoint.port}") from error
        time.sleep(_KNOCK_AGAIN_SECONDS)
    return _opened(endpoint, seconds_max, overtaken)


def _opened(endpoint: Endpoint, seconds_max: float, overtaken: Callable[[], bool]) -> Store:
    """torch's client. A store that dies between the knock and here would hold us for seconds."""
    errand = Errand(
        "keepstep-store",
        lambda: TCPStore(
            endpoint.host,
            endpoint.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds_max),
        ),
    )
    errand.start()
    while not errand.wait(_KNOCK_AGAIN_SECONDS):
        if overtaken():
            raise GroupsBroken("a newer order came while this one opened its store")
    try:
        return errand.result()
    except RuntimeError as error:
        raise GroupsBroken(f"no store at {endpoint.host}:{endpoint.port}") from error


def tell_trains(store: Store, job: str, generation: int) -> None:
    """A step of this generation is committed: whoever hosts the store may remove older keys.

    On an errand: a store that does not answer must not hold up a step.
    """
    Errand("keepstep-trains", lambda: store.set(TRAINS, mark(job, generation))).start()


class PointedStore(Store):
    """Forwards every call to the store it points to."""

    def __init__(self, target: Store) -> None:
        super().__init__()
        # Any: torch's stubs lag behind what its stores can do.
        self._target: Any = target

    def point(self, target: Store) -> None:
        self._target = target

    def set(self, key: str, value: Any) -> None:
        self._target.set(key, value)

    def get(self, key: str) -> bytes:
        return self._target.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._target.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._target.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._target.wait(list(keys))
        else:
            self._target.wait(list(keys), timeout)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._target.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._target.delete_key(key)

    def num_keys(self) -> int:
        return self._target.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self._target.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        return self._target.timeout

    def clone(self) -> Store:
        # A copy must follow as well, so it points here and not at today's target.
        return PointedStore(self)
