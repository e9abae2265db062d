"""What users import: init_process_group, session, and the loop's `steps` and `attempt`.

    keepstep.init_process_group("gloo")
    session = keepstep.session(model=model, optimizer=optimizer)
    for x, y in session.steps(loader):
        with session.attempt():
            …forward, backward, optimizer.step()…

Under plain torchrun the same script trains without protection. Under `keepstep run` a failed
attempt is swallowed and the same batches are yielded again. Adapters use the primitives that this
sugar is made of: begin, grads_ready, applied, committed, recover.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from keepstep import sabotage
from keepstep.errors import ConfigError, Fenced, Transient
from keepstep.training import carried, checkpoint, forking, halfway, standby, zero
from keepstep.training.aside import Aside
from keepstep.training.groups import Groups
from keepstep.training.holders import held_by, is_cut
from keepstep.training.keeper import Keeper
from keepstep.training.loader import Cursor, WarmLoader, warm_up
from keepstep.training.optimizers import CLOSURE, Around
from keepstep.training.registry import Registry
from keepstep.training.reset import ddp_modules, forget_meshes
from keepstep.training.saves import Parts, Save, check_path, complete
from keepstep.training.seat import Place, Seat, read_place
from keepstep.training.seeded import seeded

__all__ = ["Seat", "Session", "held_by", "init_process_group", "seeded", "session"]

GROUP_SECONDS_MAX = 1800.0
"""torch's own default. A backstop only: a broken group is freed by its sockets, not by time."""
REHEARSALS = 3
"""DDP rebuilds its buckets after the first backward, with static_graph after the second; a joiner
needs the rebuilt layout, or its collectives differ in size from its peers'."""
COMPILE_SECONDS_MAX = 900.0

_groups: Groups | None = None


def init_process_group(backend: str = "gloo", *, timeout: timedelta | None = None) -> None:
    """In place of torch.distributed.init_process_group. Ranks come from the environment."""
    place = read_place()
    if place is None:
        dist.init_process_group(backend, timeout=timeout)
        return
    if place.role == "standby":
        raise ConfigError(
            "a level-2 standby has no rank yet: call keepstep.session(build) and let it make "
            "the groups, or run with --standby-level 1"
        )
    _init_groups(place, backend, timeout)


def session(build: Callable[[Seat], dict[str, Any]] | None = None, /, **parts: Any) -> Session:
    """Register what counts as state and get the session.

    Give the parts by name (`model=…, optimizer=…`), or a function `build(seat)` that makes them.
    With `build`, a level-2 standby makes them ahead of time, so it must have no side effects; it
    may also return `loader`, and `rehearse`, a function that runs one step on given batches.
    """
    place = read_place()
    if build is not None and parts:
        raise ConfigError("give keepstep.session either build or the parts themselves, not both")
    if place is None:
        if build is not None and not dist.is_initialized():
            dist.init_process_group("gloo")
        made = _call_build(build, None) if build is not None else parts
        return Session(made, None)
    if place.role == "standby":
        if build is None:
            raise ConfigError(
                "--standby-level 2 needs keepstep.session(build) with a build(seat) function; "
                "run with --standby-level 1 for keepstep.session(model=…)"
            )
        return _park(place, build)
    if _groups is None:
        if build is None:
            raise ConfigError("call keepstep.init_process_group before keepstep.session")
        _init_groups(place, "gloo", None)
    made = _call_build(build, place) if build is not None else parts
    assert _groups is not None, "groups were made above"
    return Session(made, Keeper(place, _groups))


class Session:
    """One training loop under protection, or without it where there is no Keepstep."""

    def __init__(self, parts: dict[str, Any], keeper: Keeper | None) -> None:
        self.parts = dict(parts)
        self.loader = self.parts.pop("loader", None)
        self._rehearse_step = self.parts.pop("rehearse", None)
        self._keeper = keeper
        self._cursor: Cursor | None = None
        self._step = 0
        self._attempts = 0
        self._optimizers_done = 0
        self._rehearsing = False
        self._rehearsed = False
        self._warm: WarmLoader | None = None
        self._watches_compiler = False
        self._hooks: list[Around] = []
        self._fresh_in = -1
        """The generation in which the last attempt went through; -1 if it failed."""
        if keeper is not None:
            self._register(keeper)

    # ------------------------------------------------------------ sugar

    def steps(
        self,
        loader: Iterable[Any] | None = None,
        *,
        accumulate: int | None = None,
        passes: int = 1,
        max_steps: int | Callable[[], int | None] | None = None,
    ) -> Iterator[Any]:
        """The batches of each step, again and again until the step is in.

        Yields one batch, or a list of `accumulate` of them. Goes over the loader `passes` times
        (calling the sampler's set_epoch) and ends after `max_steps` steps if that is given; a
        function is asked before each step, and must answer the same on every rank.
        """
        source = loader if loader is not None else self.loader
        if source is None:
            raise ConfigError("session.steps needs a loader")
        if self._keeper is not None and self._cursor is not None:
            raise ConfigError(
                "session.steps was called a second time: whoever takes a lost rank's seat would be "
                "in the first loop again; go over the data with session.steps(loader, passes=N)"
            )
        cursor = self._cursor = Cursor(source, passes, accumulate)
        cursor.warm, self._warm = self._warm, None
        if self._keeper is not None:
            checkpoint.agree(self._keeper)
            # A rerun rehearses as well, all ranks together: its first step is not the job's
            # first, so it needs DDP's rebuilt buckets, which decide the order of summation.
            if not self._keeper.starts_at_the_top and not self._rehearsed:
                yield from self._rehearse(cursor, accumulate)
            carried.check(self._keeper)
            self._keeper.start(cursor)
        while True:
            if self._keeper is not None:
                self._keeper.uncovered.idle_until()
                # Before the batches are asked for: a pause is time in which a loader gets ready.
                self._keeper.follow_orders()
            limit = max_steps() if callable(max_steps) else max_steps
            batches = cursor.peek() if limit is None or self.step < limit else None
            if batches is None:
                if self._keeper is None or self._keeper.finish():
                    return
                continue
            self._attempts = 0
            if self._keeper is not None:
                self._keeper.uncovered.idle_from(self.step)
            yield batches if accumulate is not None else batches[0]
            if self._attempts == 0:
                raise ConfigError("each step needs its `with session.attempt():` block")

    def attempt(self) -> contextlib.AbstractContextManager[int]:
        """One try at one step. A fault of the machine is swallowed; an error of yours is not."""
        return _Attempt(self)

    # ------------------------------------------------------------ primitives

    def begin(self) -> int:
        """Enter a step. Returns its number."""
        self._attempts += 1
        self._optimizers_done = 0
        self._fresh_in = -1
        if self._keeper is None or self._rehearsing:
            return self._step
        for hooks in self._hooks:
            hooks.close_in()
        if self._keeper.registry.regrouped():
            self._keeper.uncovered.regrouped()
        if not self._watches_compiler and "torch._dynamo" in sys.modules:
            self._watch_compiler()
        return self._keeper.begin()

    def grads_ready(self) -> None:
        """All gradients of this step are reduced; the update comes next."""
        if self._keeper is not None and self._keeper.boundary.in_attempt:
            self._keeper.grads_ready()

    def applied(self) -> None:
        """The update of this step is in on this rank."""
        if self._rehearsing:
            return
        if self._keeper is None:
            assert self._cursor is not None, "a step has a cursor"
            self._cursor.advance()
            self._step += 1
            self._fresh_in = 0
            return
        generation = self._keeper.generation
        self._keeper.grads_ready(updates=False)
        self._keeper.applied()
        self._fresh_in = generation

    @property
    def committed(self) -> int:
        """The last step that survives the loss of any one failure domain; -1 for none yet."""
        return self._keeper.commits.newest if self._keeper is not None else self._step - 1

    def recover(self, error: BaseException) -> bool:
        """Handle what a step raised: True if it was a fault and training may go on."""
        if self._keeper is None or self._rehearsing or not self._keeper.is_fault(error):
            return False
        before = self.step
        self._keeper.fault(error)
        if sabotage.off("loader") and self.step == before and self._cursor is not None:
            self._cursor.advance()
        return True

    # ------------------------------------------------------------ around the loop

    @property
    def step(self) -> int:
        """How many steps are applied on this rank."""
        return self._keeper.boundary.step if self._keeper is not None else self._step

    @property
    def generation(self) -> int:
        return self._keeper.generation if self._keeper is not None else 0

    @property
    def rehearsing(self) -> bool:
        """True while a joiner warms up on thrown-away state: log nothing, save nothing."""
        return self._rehearsing

    @property
    def looks(self) -> int:
        """How often this rank has looked for corrupt state (`keepstep run --check-steps`)."""
        return self._keeper.rest.looks if self._keeper is not None else 0

    @property
    def protected(self) -> bool:
        return self._keeper is not None

    def on_commit(self, callback: Callable[[int], None]) -> None:
        """Call back with each step's number once it is committed: the place for side effects."""
        if self._keeper is not None:
            self._keeper.commits.callbacks.append(callback)

    @contextlib.contextmanager
    def busy(self, name: str, *, seconds_max: float) -> Iterator[None]:
        """Declared slowness (an evaluation, a save) is not a hang."""
        if self._keeper is None:
            yield
            return
        self._keeper.busy.begin(name, seconds_max)
        try:
            yield
        finally:
            self._keeper.busy.end()

    def reports(self, *, flops_per_step: float = 0.0, tokens_per_step: float = 0.0) -> None:
        """What one step of the whole job does, for the account: MFU, tokens a second per device.

        Say it on every rank: whoever writes the step log adds it to each line from then on.
        """
        if self._keeper is not None:
            told = {"flops": float(flops_per_step), "tokens": float(tokens_per_step)}
            self._keeper.log.work = {name: value for name, value in told.items() if value > 0}

    def due(self, every: int) -> bool:
        """After an attempt: is it time for what is done every so many steps, on all ranks alike?

        Use it for collectives outside attempts, such as an evaluation or a save. It says no after
        an attempt that failed: some ranks did that step before the fault, and a newcomer did not.
        """
        return not self._rehearsing and self._fresh_in == self.generation and self.step % every == 0

    @contextlib.contextmanager
    def evaluation(self, *, seconds_max: float) -> Iterator[None]:
        """Work between two attempts that leaves no trace in training.

        Generators, modes and buffers are put back after it. A fault inside is swallowed like an
        attempt's: the rest of the block is left out, and training goes on.
        """
        aside = Aside(self.parts.values())
        try:
            # Put back before a recovery: what this rank receives then must not be written over.
            with aside, self.busy("evaluation", seconds_max=seconds_max):
                yield
        except RuntimeError as error:
            if self._keeper is not None and aside.moved and self._keeper.is_fault(error):
                # Weights that were swapped in, say, and nobody swapped back: no source for anybody.
                self._keeper.tear()
                self._keeper.uncovered.evaluation_moves()
            if not self.recover(error):
                raise

    def saving(self, future: Any, path: str) -> Save:
        """Tell of a save that runs beside training, as DCP's async_save returns one.

        It is published at a boundary once it is complete. If ranks are replaced meanwhile it ends
        with an error, which `wait` on what is returned here takes for what it is.
        """
        check_path(path)
        save = Save(self, future, path)
        if self._keeper is not None:
            self._keeper.saves.add(save)
        return save

    def publish_complete(self) -> None:
        """Publish the saves that have become complete. Done at every boundary, too."""
        if self._keeper is not None:
            self._keeper.saves.publish_complete()

    def held_by(self, what: str | torch.nn.Module | torch.Tensor, ranks: Iterable[int]) -> None:
        """Declare which ranks hold the same values, where no DTensor and no DDP says it.

        `what` is a module, a tensor, or the name of registered state ("model.blocks.0"). Call it
        on every rank before the first step.
        """
        if self._keeper is None:
            return
        if not isinstance(what, str):
            held_by(what, ranks)
            return
        tensors = self._keeper.registry.under(what)
        if not tensors:
            raise ConfigError(f"no registered state is called {what!r}")
        for tensor in tensors:
            held_by(tensor, ranks)

    def save(self) -> str | None:
        """Write a checkpoint of this boundary, on every rank.

        Call it between attempts. It is published two steps later, when all ranks have written their
        parts; keep the one before it until then. If ranks are replaced in between, it is not.
        Returns its path; None without protection or a state directory.
        """
        keeper = self._keeper
        if keeper is None or keeper.place.state_directory is None:
            return None
        path = str(checkpoint.save(keeper))
        if keeper.place.rank == 0:
            check_path(path)
            keeper.saves.add_parts(Parts(self, keeper.generation, path))
        return path

    def publish(self, path: str) -> None:
        """Make a checkpoint the newest. Refused to a worker whose generation is over.

        While nobody decides it is asked for again at later boundaries: training goes on.
        """
        if self._keeper is None:
            return
        check_path(path)
        try:
            accepted, why = self._keeper.publish(self.step, path)
        except Transient:
            self._keeper.saves.add(complete(self, path))
            return
        if not accepted:
            raise Fenced(f"{path} was not published: {why}")

    # ------------------------------------------------------------ inside

    def _register(self, keeper: Keeper) -> None:
        keeper.boundary.tell = keeper.uncovered.buffer_comes_or_goes
        for name, part in self.parts.items():
            keeper.registry.add(name, part)
        for optimizer in keeper.registry.optimizers.values():
            self._hooks.append(
                Around(optimizer, self._update_begins, self._one_update_done, self._hooks_done)
            )
            halfway.watch(keeper, optimizer)

    def _update_begins(self, beyond: str) -> None:
        keeper = self._keeper
        if keeper is not None and keeper.boundary.in_attempt:
            keeper.uncovered.closure |= beyond == CLOSURE
            if keeper.covering is not None:
                keeper.covering.update_begins(beyond)
        self.grads_ready()

    def _one_update_done(self) -> None:
        self._optimizers_done += 1
        keeper = None if self._rehearsing else self._keeper
        if keeper is None:
            return
        keeper.boundary.in_hooks = True
        if self._optimizers_done >= len(keeper.registry.optimizers):
            keeper.update_done()

    def _hooks_done(self) -> None:
        if self._keeper is not None:
            self._keeper.boundary.in_hooks = False

    def _rehearse(self, cursor: Cursor, accumulate: int | None) -> Iterator[Any]:
        """A joiner runs the loop's body alone before it takes its seat; what it computes goes."""
        batches = cursor.rehearsal()
        self._rehearsing = True
        try:
            for _ in range(REHEARSALS if batches else 0):
                yield batches if accumulate is not None else batches[0]
        finally:
            self._rehearsing = False
        self._rehearsed = True

    def rehearse_ahead(self, times: int = REHEARSALS) -> None:
        """A level-2 standby's rehearsal, with the step that build() returned."""
        self._warm = warm_up(self.loader)
        if self._rehearse_step is None or self.loader is None:
            return
        batches = Cursor(self.loader, 1, getattr(self._rehearse_step, "accumulate", 1)).rehearsal()
        self._rehearsing = True
        try:
            for _ in range(times):
                self._rehearse_step(batches)
        finally:
            self._rehearsing = False
        self._rehearsed = True

    def _watch_compiler(self) -> None:
        """A compilation is slow and says so itself: nobody has to declare it."""
        from torch._dynamo.callback import callback_handler

        self._watches_compiler = True
        keeper = self._keeper
        assert keeper is not None, "only a protected session watches"
        callback_handler.register_start_callback(
            lambda _: keeper.busy.begin("compile", COMPILE_SECONDS_MAX)
        )
        callback_handler.register_end_callback(lambda _: keeper.busy.end())


class _Attempt(contextlib.AbstractContextManager[int]):
    """`with session.attempt():`"""

    def __init__(self, owner: Session) -> None:
        self._session = owner

    def __enter__(self) -> int:
        while True:
            try:
                return self._session.begin()
            except RuntimeError as error:
                if not self._session.recover(error):
                    raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if error is None:
            try:
                self._session.applied()
                return False
            except RuntimeError as broken:
                if not self._session.recover(broken):
                    raise
                return False
        return self._session.recover(error)


def _init_groups(place: Place, backend: str, timeout: timedelta | None) -> None:
    global _groups
    if _groups is not None:
        raise ConfigError("keepstep.init_process_group was called twice")
    forking.leave_garbage_alone()
    seconds = timeout or timedelta(seconds=GROUP_SECONDS_MAX)
    groups = Groups()
    rehearse = place.role != "worker"
    store = standby.empty_store() if rehearse else standby.job_store(place)
    groups.init(backend, max(place.rank, 0), place.world_size, store, seconds, rehearse)
    _groups = groups


def _call_build(build: Callable[[Seat], dict[str, Any]], place: Place | None) -> dict[str, Any]:
    if place is None:
        seat = Seat(dist.get_rank(), dist.get_world_size(), 0)
    else:
        seat = Seat(max(place.rank, 0), place.world_size, place.local_rank, place.role == "standby")
    made = build(seat)
    if not isinstance(made, dict):
        raise ConfigError("build(seat) must return a dict of named parts: {'model': …, …}")
    return made


def _park(place: Place, build: Callable[[Seat], dict[str, Any]]) -> Session:
    """A level-2 standby: make everything, rehearse, and wait here for a seat."""
    _init_groups(place, "gloo", None)
    groups = _groups
    assert groups is not None, "groups were made above"
    made = _call_build(build, place)
    cut = any(
        zero.is_zero(part) or (isinstance(part, torch.nn.Module) and is_cut(part))
        for part in made.values()
    )
    rehearsal = Session(made, None)
    rehearsal.rehearse_ahead()
    if cut:
        # Meshes, shards and their sizes are the tentative rank's. What stays is what a first build
        # and a first step cost: imports, caches, memory.
        del rehearsal, made
        forget_meshes()
        return _build_again(standby.park(), groups, build)
    warm = Registry()
    for name, part in rehearsal.parts.items():
        warm.add(name, part)
    standby.own_pages(warm)
    seated = standby.park()
    groups.reseat(seated.rank)
    for part in made.values():
        if isinstance(part, torch.nn.Module):
            groups.adopt(part)
    if made.get("loader") is not None:
        Cursor(made["loader"], 1, None).reseat(seated.rank, seated.world_size)
    session_ = Session(made, Keeper(seated, groups))
    session_._rehearsed, session_._warm = rehearsal._rehearsed, rehearsal._warm
    return session_


def _build_again(seated: Place, groups: Groups, build: Callable[[Seat], dict[str, Any]]) -> Session:
    """A sharded model for the seat that its standby was given."""
    groups.reseat(seated.rank, anew=True)
    made = _call_build(build, seated)
    # Registered before anything runs: DDP over a mesh hides parameters in its first forward pass.
    session_ = Session(made, Keeper(seated, groups))
    # Kernels and memory are warm since the first build. What FSDP2 makes at its first step, it
    # makes once; only DDP needs more of them.
    modules = [part for part in made.values() if isinstance(part, torch.nn.Module)]
    settles = any(ddp_modules(module) for module in modules)
    session_.rehearse_ahead(REHEARSALS if settles else 1)
    return session_
