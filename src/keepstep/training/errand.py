"""Work on a thread of its own that its caller may leave behind.

For: constructors of torch that block for seconds and cannot be interrupted. Who asked for one goes
on as soon as the result is worthless; the thread ends by itself and its result is dropped.

Must never: be used for work whose side effects matter after it was left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Errand(Generic[T]):
    """One call on a daemon thread; what it raises is raised to whoever asks for its result."""

    def __init__(self, name: str, work: Callable[[], T]) -> None:
        self._over = threading.Event()
        self._made: list[T] = []
        self._trouble: BaseException | None = None
        self._work: Callable[[], T] | None = work
        self._name = name

    def start(self) -> None:
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def wait(self, seconds_max: float | None = None) -> bool:
        """Until it is done or left; False if neither came in time."""
        return self._over.wait(seconds_max)

    def leave(self) -> None:
        """Let the waiter go. Any thread, any number of times."""
        self._over.set()

    def result(self) -> T:
        """What the work returned or raised. To be asked for once, and not if it was left."""
        trouble, self._trouble = self._trouble, None
        if trouble is not None:
            try:
                raise trouble
            finally:
                # Its traceback knows what the work knew, and this errand: a ring that would keep a
                # broken generation's backend until the next collection.
                del trouble
        return self._made[0]

    def _run(self) -> None:
        # Forgotten at once: work that knows its owner, who knows the errand, would keep what was
        # made until the next collection, and a backend's threads with it.
        work, self._work = self._work, None
        assert work is not None, "an errand is run once"
        try:
            self._made.append(work())
        except BaseException as error:
            # Also an exit: who waits would find neither a result nor a reason.
            self._trouble = error
        finally:
            del work
            self._over.set()
