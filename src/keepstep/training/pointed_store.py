"""A store that can be pointed elsewhere: what torch believes to be the default store.

torch hands its default store to every group, mesh and barrier and never lets go of it. The host
of the real store may die, and each generation has a prefix of its own, so torch gets this one.

Must never: cache a value, or answer from anywhere but where it points now.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store


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
