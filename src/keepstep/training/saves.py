"""Saves that run beside training: torch.distributed.checkpoint's async_save.

Its thread plans and ends a save through collectives of its own, whenever it comes to them. If
groups are re-formed while it writes files, its next collective would go to the new generation's
group, whose newcomer knows nothing of that save: it would wait for ever, and meet the next save's
calls. So a save belongs to the generation in which it began.

    begun in g -- collectives -- complete -- published at a boundary, by rank 0
        |
        groups are re-formed: the collective that it is in breaks, later ones are refused

A save of the session's own (`session.save`) is files that each rank writes alone. Rank 0 publishes
it once a later commit proves that every rank has left its save, and all the files are there.

Must never: hold up a recovery for a slow disk; let a save of an older generation into a newer
one's groups; publish what is not complete.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.errors import ConfigError, Permanent, Transient
from keepstep.model import PATH_CHARS_MAX
from keepstep.training import checkpoint
from keepstep.training.inner import GroupsBroken
from keepstep.training.trouble import is_communication

if TYPE_CHECKING:
    from keepstep.training.keeper import Keeper
    from keepstep.training.session import Session

LEAVE_SECONDS_MAX = 10.0
"""An abort frees a thread from its collective at once; this is a backstop."""
ANSWER_SECONDS_MAX = 2.0
ASK_AGAIN_SECONDS = 30.0
"""Publishing can wait, and training must not wait for it."""
LOOK_AGAIN_SECONDS = 5.0
FILES_SECONDS_MAX = 120.0
"""A network file system shows other nodes' files late, and not that late."""
_COLLECTIVES = (
    "broadcast_object",
    "gather_object",
    "all_gather_object",
    "scatter_object",
    "barrier",
)


class Save:
    """An asynchronous save that the session was told of."""

    def __init__(self, owner: Session, future: Any, path: str) -> None:
        self._owner = owner
        # With zero-copy staging there are two futures; the second one is the save.
        self._future: Future[Any] = getattr(future, "upload_completion", future)
        self.step = owner.step
        self.path = path

    @property
    def done(self) -> bool:
        return self._future.done()

    def wait(self, seconds_max: float = 600.0) -> bool:
        """Wait for its end. True: the checkpoint is complete. False: a fault has ended it.

        What else went wrong, such as a full disk, is raised as it came.
        """
        with self._owner.busy("save", seconds_max=seconds_max):
            error = _error_of(self._future, seconds_max)
        self._owner.publish_complete()
        if error is None:
            return True
        if is_communication(error):
            return False
        raise error


def check_path(path: str) -> None:
    """The orchestrator would refuse it, and the user would learn of it at a later step."""
    if len(path) > PATH_CHARS_MAX:
        raise ConfigError(
            f"a checkpoint's path of {len(path)} characters cannot be published; give at most "
            f"{PATH_CHARS_MAX}"
        )


def complete(owner: Session, path: str) -> Save:
    """A checkpoint of this boundary that is written, and only has to be published."""
    written: Future[None] = Future()
    written.set_result(None)
    return Save(owner, written, path)


class Parts:
    """A checkpoint of the session's own: rank 0 has written its part, the others may be at it."""

    def __init__(self, owner: Session, generation: int, path: str) -> None:
        self._whole: Future[None] = Future()
        self.save = Save(owner, self._whole, path)
        self._generation = generation
        self._look_at, self._until = 0.0, math.inf

    def judge(self, keeper: Keeper, now: float) -> bool:
        """True: its save is done, for better or worse."""
        if keeper.generation != self._generation:
            # Whoever was replaced may have died in the middle of its part.
            self._whole.set_exception(GroupsBroken("ranks were replaced meanwhile"))
        elif keeper.commits.newest < self.save.step or now < self._look_at:
            # The step after this boundary is committed when every rank is past it, and past its
            # save. The boundary's own step may have been committed before.
            return False
        elif checkpoint.has_all_files(Path(self.save.path)):
            self._whole.set_result(None)
        elif now > self._until:
            self._whole.set_exception(Permanent("not every rank has written its part"))
        else:
            self._look_at = now + LOOK_AGAIN_SECONDS
            self._until = min(self._until, now + FILES_SECONDS_MAX)
        return self._whole.done()


class Saves:
    """One per protected process."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._changed = threading.Condition()
        self._generation = keeper.generation
        self._inside = 0
        self._running = 0
        self.collectives = 0
        """How many were begun by saves; for whoever tells them from the loop's own."""
        self._thread = threading.local()
        self._watches = False
        self._watched_in = self._generation
        self._pending: list[Save] = []
        self._parts: list[Parts] = []
        self._ask_at = 0.0

    # ------------------------------------------------------------ the fence

    def watch(self) -> None:
        """Stand before DCP's collectives, once it is loaded. Cheap: called at every boundary."""
        if self._watches or "torch.distributed.checkpoint" not in sys.modules:
            return
        from torch.distributed.checkpoint import (
            _async_process_executor,
            _async_thread_executor,
            utils,
        )

        self._watches, self._watched_in = True, self._generation
        wrapper: Any = utils._DistWrapper
        wrapper.__init__ = self._stamping(wrapper.__init__)
        for name in _COLLECTIVES:
            setattr(wrapper, name, self._fenced(getattr(wrapper, name)))
        threads: Any = _async_thread_executor._ThreadBasedAsyncCheckpointExecutor
        threads.execute_save = self._starting(threads.execute_save)
        processes: Any = _async_process_executor._ProcessBasedAsyncCheckpointExecutor
        processes.execute_save = self._reporting(processes.execute_save)

    def fence(self, generation: int) -> None:
        """Before groups are re-formed: saves that began earlier have no more say in them."""
        self.watch()
        deadline = time.monotonic() + LEAVE_SECONDS_MAX
        with self._changed:
            self._generation = generation
            while self._inside:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise GroupsBroken(f"a save did not leave its collective for {generation}")

    def _stamping(self, init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def stamped(this: Any, *args: Any, **kwargs: Any) -> None:
            init(this, *args, **kwargs)
            this.keepstep_generation = getattr(self._thread, "generation", self._generation)

        return stamped

    def _fenced(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def fenced(this: Any, *args: Any, **kwargs: Any) -> Any:
            if not this.use_dist:
                return collective(this, *args, **kwargs)
            # One without a stamp began before anything was watched.
            with self._passing(getattr(this, "keepstep_generation", self._watched_in)):
                return collective(this, *args, **kwargs)

        return fenced

    @contextlib.contextmanager
    def _passing(self, begun: int) -> Iterator[None]:
        with self._changed:
            if begun != self._generation:
                raise GroupsBroken(
                    f"this save began in generation {begun}, and now is {self._generation}"
                )
            self._inside += 1
            self.collectives += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def _starting(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        """A save belongs to the moment of the call: its thread may come to its first collective
        in another generation."""

        @functools.wraps(execute)
        def started(this: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("process_group") is None and not kwargs.get("no_dist"):
                self._keeper.uncovered.save_on_default_group()
            generation, submit = self._generation, this._executor.submit

            def belong(work: Callable[..., Any], *given: Any, **named: Any) -> Any:
                self._thread.generation = generation
                return work(*given, **named)

            this._executor.submit = functools.partial(submit, belong)
            with self._changed:
                self._running += 1
            future: Future[Any] | None = None
            try:
                future = execute(this, *args, **kwargs)
                future.add_done_callback(self._ended)
            finally:
                if future is None:
                    self._ended(None)
            return future

        return started

    def _ended(self, _: object) -> None:
        with self._changed:
            self._running -= 1

    def _reporting(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(execute)
        def reported(this: Any, *args: Any, **kwargs: Any) -> Any:
            self._keeper.uncovered.save_in_a_process()
            return execute(this, *args, **kwargs)

        return reported

    @property
    def running(self) -> bool:
        return self._running > 0

    # ------------------------------------------------------------ publishing

    def add(self, save: Save) -> None:
        self._pending.append(save)

    def add_parts(self, parts: Parts) -> None:
        self._parts.append(parts)
        self._pending.append(parts.save)

    def publish_complete(self) -> None:
        """At a boundary: what has become complete since the last one is published."""
        now = time.monotonic()
        if self._parts:
            self._parts = [parts for parts in self._parts if not parts.judge(self._keeper, now)]
        if not self._pending or now < self._ask_at:
            return
        for save in [save for save in self._pending if save.done]:
            try:
                if not self._publish(save):
                    continue
            except Transient:
                # Nobody decides at present: a checkpoint can wait.
                self._ask_at = now + ASK_AGAIN_SECONDS
                return
            self._pending.remove(save)

    def _publish(self, save: Save) -> bool:
        """True: there is no more to be done about it."""
        keeper = self._keeper
        error = _error_of(save._future, 0)
        if error is not None:
            _say(f"the save of step {save.step} to {save.path} was not completed: {error!r:.300}")
        elif keeper.place.rank == 0:
            accepted, why = keeper.publish(save.step, save.path, ANSWER_SECONDS_MAX)
            if not accepted and keeper.inbox.comes(ANSWER_SECONDS_MAX):
                # Another generation is on its way, and this rank may be in it.
                return False
            if not accepted:
                _say(f"{save.path} was not published: {why}")
        return True


def _error_of(future: Future[Any], seconds_max: float) -> BaseException | None:
    try:
        return future.exception(seconds_max)
    except CancelledError as error:
        return error


def _say(text: str) -> None:
    sys.stderr.write(f"keepstep: {text}\n")
    sys.stderr.flush()
