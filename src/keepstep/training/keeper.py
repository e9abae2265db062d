"""The protected side of a session: what happens at each boundary, and how a rank recovers.

The keeper owns this process's groups, its link to the agent, its page and its ring. Steps pass
through it with a handful of cheap calls; a fault takes it to its orders (recovery.py).

It must never resume on state that was not verified, and never break training by failing to
protect: what it cannot cover it says loudly.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from keepstep import failpoint, wire
from keepstep.errors import Transient
from keepstep.model import Endpoint, Generation, NodeId, Phase, Rank
from keepstep.page import Mark, Page, page_path
from keepstep.sealed import store_prefix
from keepstep.training import carried, checkpoint, recovery, vote
from keepstep.training.boundary import Boundary
from keepstep.training.busy import Busy
from keepstep.training.commits import Commits
from keepstep.training.covering import Covering
from keepstep.training.finding import Finding, Foresight
from keepstep.training.groups import Groups, GroupsBroken
from keepstep.training.holders import Holders
from keepstep.training.homes import EntryHomes
from keepstep.training.inbox import Inbox
from keepstep.training.link import Link
from keepstep.training.loader import Cursor
from keepstep.training.movement import SliceDigest, agree_on_holders
from keepstep.training.pointed_store import connect, tell_trains
from keepstep.training.recorder import Recorder
from keepstep.training.registry import Registry
from keepstep.training.reset import settles_at
from keepstep.training.rot import Rest
from keepstep.training.saves import Saves
from keepstep.training.seat import Place
from keepstep.training.side import exchange_rows, side_barrier
from keepstep.training.steplog import StepLog, StepRecord
from keepstep.training.trouble import is_communication
from keepstep.training.uncovered import Uncovered

ORDER_SECONDS_MAX = 7 * 24 * 3600.0
"""The orchestrator's budgets end a wait, not this: training never stops because control does."""
SAVE_SECONDS_MAX = 2.0
"""In mode observe: so much later than its neighbours a rank may hear that all shall save."""
_COMPARE_AT = (1, 2, 16, 256, 4096, 65536)
"""Boundaries at which all ranks compare digests to find private tensors."""


class Keeper:
    """One per protected process."""

    def __init__(self, place: Place, groups: Groups) -> None:
        self.place = place
        self.groups = groups
        self.generation = int(place.generation)
        self.secret = place.secret
        self.registry = Registry(place.rank, place.world_size)
        self.boundary = Boundary(self.registry)
        self.cursor: Cursor | None = None
        self.has_state = place.role == "worker"
        """A joiner holds nothing until it has received and verified."""
        self.saved: checkpoint.Found | None = None
        """The checkpoint that a rerun goes on from, once all ranks have agreed on it."""
        self.moved: tuple[int, float] = (0, 0.0)
        """What this rank received in the present generation: bytes, seconds."""
        self.homes = EntryHomes(place)
        self.covering: Covering | None = None
        """A second home for what one rank holds alone, where there is such state."""
        self.mirror_stride = place.mirror_stride
        self.expected_collectives = 1
        self.resumed_report_due = False
        self.reformed = False
        """The groups were re-formed, and training has not gone on since."""
        self.finding: Finding | None = None
        self.foresight: Foresight | None = None
        self.unsettled = False
        """In the first steps of a run, until DDP uses the buckets that it keeps."""
        self._settles_at = 0
        self.sharded = False
        """Some state is not held by all ranks: everybody votes before an update (vote.py)."""
        self.applies_in = -1
        """In this generation this rank was told to make the update that others have made."""
        self.flying: list[dist.Work] = []
        """What a sync of parameters has launched and not yet waited for (halfway.py)."""
        self.recorder = Recorder(self)
        self.uncovered = Uncovered()
        self.saves = Saves(self)
        self._link = Link(place.socket, self._hello, self._on_message)
        self.inbox = Inbox(self._interrupt, self._link.send)
        self.inbox.expect(self.generation)
        self.busy = Busy(self)
        self.inbox.busy = self.busy.report
        self.inbox.where = self._where
        self.inbox.passed = self._passed
        self.inbox.prepare = self.prepare
        self.leaves_in = -1
        """In this generation another worker has our rank; we wait, in case it fails."""
        self._finishing = False
        self._slices = SliceDigest()
        self.rest = Rest(place.check_steps)
        self._open_memory()
        self._link.start()

    # ------------------------------------------------------------ memory and link

    def _open_memory(self) -> None:
        place = self.place
        self.page = Page(page_path(place.room, place.rank, place.incarnation), create=True)
        if self.has_state:
            # A joiner trains in no generation yet, and while a move is planned others still do.
            self.page.set_generation(self.generation)
        self.groups.bind_counter(self.page.memory, Page.LAUNCHED_AT)
        path = None
        if place.rank == 0 and place.state_directory is not None:
            path = place.state_directory / "steps.jsonl"
        self.log = StepLog(path)
        self.commits = Commits(self.page, self.log, joining=not self.has_state)

    def _hello(self) -> wire.WorkerHello:
        place = self.place
        rank, generation = Rank(place.rank), Generation(self.generation)
        return wire.WorkerHello(
            place.job, place.slot, os.getpid(), rank, place.incarnation, generation, place.level
        )

    def _on_message(self, message: wire.Message) -> None:
        self.inbox.receive(message)

    def _interrupt(self) -> None:
        # A joiner that rehearses waits for nobody; it comes to its orders by itself.
        if self.has_state or self.cursor is not None:
            self.abort(self.inbox.generation)

    def abort(self, generation: int) -> None:
        """Free the training thread from whatever it waits for in older generations. Any thread."""
        self.groups.abort(generation)
        self.homes.cancel(generation)
        covering = self.covering
        if covering is not None and covering.generation < generation:
            covering.cancel()

    # ------------------------------------------------------------ the step

    def start(self, cursor: Cursor) -> None:
        """The first boundary of this process: from the beginning, a checkpoint, or its peers."""
        self.cursor = cursor
        self.uncovered.strays(self.registry.strays())
        if not self.has_state:
            self.reach("attach")
            self.report("Assign", Phase.QUIESCE, recovery.empty_seat(self, self.generation))
            if self.place.forms:
                self.connect_groups(self.generation, self.place.store, self.place.secret)
            # After the report, for which others wait: until its orders come this rank has time.
            self.foresight = Foresight(self.place, cursor)
            self.recover()
            return
        self.registry.holders = agree_on_holders(self.groups, self.registry.view())
        self.know_holders()
        if self.saved is not None:
            recovery.load_checkpoint(self, self.saved)
            self._listen()
        # Until the first comparison every buffer may be private.
        self.registry.private |= {name for name, _ in self.registry.buffers()}
        self.open_mirror(self.boundary.step, self.recorder.entry(), self.generation)
        side_barrier(self.groups)
        self.page.count_launches_from_here()
        self.page.set_committed(self.boundary.step - 1)
        self.log.start_at(self.boundary.step)
        self.resumed_report_due = True
        if self.starts_at_the_top:
            modules = self.registry.modules.values()
            self._settles_at = max((settles_at(module) for module in modules), default=0)
            self.unsettled = self._settles_at > 0

    def know_holders(self) -> None:
        """Who holds what is settled, here or by those who gave this rank its state."""
        holders = self.registry.holders
        self.sharded = holders.parted
        self._listen()
        lonely = holders.lonely()
        if lonely and self.mirror_stride % self.place.world_size == 0 and self.place.rank == 0:
            self.uncovered.lonely(lonely)
        if lonely and len(self.registry.optimizers) > 1:
            self.uncovered.several_optimizers()

    def _listen(self) -> None:
        # In a sharded job what a step leaves is recorded before its vote, not before its first
        # gradient collective: FSDP2 gathers parameters in every backward pass of the step.
        late = self.sharded or self.recorder.late
        self.groups.on_backward(None if late else self._before_gradients)

    @property
    def starts_at_the_top(self) -> bool:
        """This process makes the job's very first step, with DDP's very first buckets."""
        return self.has_state and (self.saved is None or self.saved.boundary == 0)

    def begin(self) -> int:
        """Enter a step; joins a migration first if one waits."""
        self.uncovered.idle_until()
        self.saves.watch()
        self.follow_orders()
        self.saves.publish_complete()
        while self.rest.is_corrupt(self):
            self.recover()
        if self.boundary.step in _COMPARE_AT:
            self._compare()
        self.recorder.begin()
        self.groups.reset_backward()
        self.groups.before_nth(self.expected_collectives, self.homes.settle)
        self.boundary.begin()
        self.page.mark(Mark.FORWARD, self.boundary.step)
        return self.boundary.step

    def follow_orders(self) -> None:
        """Between two steps: go through the migration that waits for this boundary, if one does."""
        while self.inbox.due(self._here):
            self.recover()
        if self.boundary.step in _COMPARE_AT and self.cursor and not self.cursor.has_batches:
            self.recorder.before_fetch(self.boundary.step)

    def _before_gradients(self, *, early: bool = True) -> None:
        """The forward pass is through: the coming boundary's private state is known now."""
        if not self.boundary.in_attempt or self.cursor is None:
            return
        if self.unsettled and self.boundary.step >= self._settles_at:
            self.unsettled = False
        assert self.cursor.has_batches, "a step has batches, and its entry says which come next"
        self.recorder.record(early=early)
        self.uncovered.forward_done(self.boundary.step)

    def _after_backward(self) -> None:
        """Is what was recorded before the gradients still so?"""
        if self.recorder.compare():
            step = self.boundary.step
            told = next((at for at in _COMPARE_AT if at > step), sys.maxsize)
            if told > step + 1:
                self.uncovered.late_change(step, told)
            self.uncovered.forward_done(step)

    def grads_ready(self, *, updates: bool = True) -> None:
        """All gradients are in: the previous step is committed, and this one may be applied.

        Not `updates`: the step is over and no optimizer was asked, as a loss scaler does.
        """
        if self.boundary.updating:
            return
        launched = self.groups.launched_in_backward
        unseen = self.recorder.missing
        if unseen:
            # Gradients were reduced by hand, outside any backward pass, or a backward pass changes
            # what is to be recorded: record it now.
            self._before_gradients(early=False)
        else:
            self._after_backward()
        late = self.homes.finish()
        if self.sharded:
            vote.cast(self, updates=updates)
        elif unseen or late:
            # My last gradient collective left before the neighbour's entry was safe, or there was
            # none that proves anything. Every rank sees the same count, so all of them vote.
            side_barrier(self.groups)
        if launched:
            self.expected_collectives = launched
        self.boundary.grads_ready()
        self.uncovered.update_begins(self.launched())
        self.page.mark(Mark.GRADS_READY, self.boundary.step)
        self._commit(self.boundary.step - 1)

    def applied(self) -> None:
        """The attempt is through on this rank."""
        step = self.boundary.step
        self.uncovered.attempt_done(
            self.launched(), updated=self.boundary.updated, versions=self.registry.versions()
        )
        if self.cursor is not None and self.cursor.watched.drawn:
            self.uncovered.workers_draw()
        self.step_through(step)
        step_ns = self.boundary.applied()
        self.page.set_step_ns(step_ns)
        unsynced = self.boundary.unsynced
        if unsynced and self.uncovered.tail_moves:
            # By parameters that were not in yet: it may be the first time that it did.
            self.boundary.torn = True
        self.page.mark(Mark.APPLIED, step)
        if self.rest.every == 1 and not unsynced:
            self.rest.remember(self.registry)
        self.uncovered.idle_from(step)
        if self.applies_in >= 0 or unsynced:
            self.recover()
        elif self.resumed_report_due:
            self.resumed_report_due = False
            self._report_resumed(step, step_ns / 1e9)
            self.groups.drop_retired()

    def step_through(self, step: int) -> None:
        """This step is in here: the log remembers it, and the data moves on."""
        assert self.cursor is not None, "a step has a cursor"
        digest = "" if self.boundary.unsynced else self.slice_digest(step)
        samples = self.cursor.sample_range(self.place.world_size)
        self.log.remember(StepRecord(step, self.generation, samples, digest))
        self.cursor.advance()

    def _report_resumed(self, step: int, pace: float) -> None:
        seat = wire.SeatReport(
            Rank(self.place.rank),
            boundary=step + 1,
            state_bytes=self.registry.state_bytes(),
            portions=self.registry.portions(),
            covers=self.covers,
            step=step,
            step_seconds=pace,
        )
        self.report("Resume", Phase.RESUME, seat)
        if self.place.rank == 0:
            tell_trains(self.groups.store, self.place.job, self.generation)

    def slice_digest(self, step: int) -> str:
        return self._slices.next(self.registry, step)

    def update_done(self) -> None:
        """The optimizers are through; only the tail of the attempt is left."""
        # A second update in one attempt, or one outside, is the program's own: no record has it.
        if self.covering is not None and self.boundary.updating and not self.boundary.updated:
            self.covering.updated()
        self.boundary.update_done()
        self.uncovered.update_done(self.launched(), self.registry.versions())

    def launched(self) -> tuple[int, int] | None:
        """Collectives so far, and saves' among them; None while a save's thread launches some."""
        return None if self.saves.running else (self.groups.launched, self.saves.collectives)

    def _commit(self, step: int) -> None:
        # An unsettled run starts anew after a fault: its steps are not for anybody to see yet.
        if not self.unsettled:
            self.commits.here(step)

    def finish(self) -> bool:
        """After the last step one more world collective commits it. False: try again."""
        # From here on no boundary is ahead of us: whatever is ordered is followed where we are.
        self._finishing = True
        try:
            self.follow_orders()
            side_barrier(self.groups)
        except RuntimeError as error:
            if not self.is_fault(error):
                raise
            self.fault(error)
            return False
        self.unsettled = False
        self._commit(self.boundary.step - 1)
        self.page.mark(Mark.FINISHED, self.boundary.step)
        if self.place.rank == 0:
            checkpoint.remove_rescues(self.place)
        return True

    # ------------------------------------------------------------ private state

    def tear(self) -> None:
        """State is about to land over what this rank holds: it is no source until verified."""
        self.boundary.torn = True
        self.has_state = False
        self.rest.forget()

    def open_mirror(self, boundary: int, payload: bytes, generation: int) -> None:
        """Give what only this rank has at a boundary its second home.

        Nobody may go on before every rank is through here.
        """
        first = (boundary, payload)
        self.homes.open(self.groups, generation, self.secret, self.mirror_stride, first)
        if self.covering is None and self.registry.holders.lonely():
            self.covering = Covering(self)
        if self.covering is not None:
            self.covering.open(boundary, generation)

    @property
    def covers(self) -> tuple[wire.Cover, ...]:
        """What this rank can rebuild of others."""
        return self.covering.reach() if self.covering is not None else ()

    def adopt_header(self, header: Mapping[str, Any]) -> None:
        """What a source tells before it sends."""
        if not self.has_state:
            # Who has none was told nothing yet; the others agreed on it.
            self.registry.holders = Holders.from_plain(header["holders"])
        self.registry.private = set(header["private"])
        self.registry.set_syncs(header["syncs"])
        self.recorder.late = bool(header["late"])

    def arrive(self, boundary: int, payload: bytes) -> None:
        """What was received is verified: this rank is whole, and a source, from here on."""
        self.boundary.arrive(boundary)
        self.has_state = True
        self.log.amend(self.slice_digest)
        self.homes.arrived(boundary, payload)

    def _compare(self) -> None:
        """Find tensors that replicas do not share. A world collective, so all ranks come here."""
        rows = exchange_rows(self.groups, [*self.recorder.wishes(), self.registry.digests()])
        # This boundary's own entry may be an early one, too.
        newly = self.recorder.agree(rows)
        if newly:
            self._listen()
        step = self.boundary.step
        first = step == _COMPARE_AT[0]
        if first:
            carried.check_made(self)
        # What was alike in the first steps and is not any more is corrupt, not private.
        settled = self.rest.every > 1 and step > _COMPARE_AT[1]
        found = self.registry.compared([row[-1] for row in rows], first=first, settled=settled)
        if found or first or newly or any(row[2] for row in rows):
            self.open_mirror(step, self.recorder.entry(), self.generation)
            side_barrier(self.groups)

    # ------------------------------------------------------------ faults

    def is_fault(self, error: BaseException) -> bool:
        """Is this a broken collective, or the user's own exception?"""
        called = self.inbox.due(self._here)
        if self.place.observed and is_communication(error) and not called:
            # Nobody comes to help. Only a save calls the ranks back, and our neighbours may have
            # heard of it before us.
            return self.inbox.comes(SAVE_SECONDS_MAX)
        return is_communication(error) or (isinstance(error, RuntimeError) and called)

    def fault(self, error: BaseException) -> None:
        """A collective broke under us: say so, and do as the orders tell."""
        self.tell_broken(error)
        self.recover()

    def tell_broken(self, error: BaseException) -> None:
        """Say that a collective broke, unless orders came already."""
        if not self.inbox.pending and self.applies_in < 0:
            text = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
            self.report_broken(self.generation, text[:300])

    def recover(self) -> None:
        """Follow a migration's orders until training may go on."""
        self.uncovered.idle_until()
        self.page.mark(Mark.RECOVERING, self.boundary.step)
        if self.applies_in >= 0:
            vote.report_applied(self)
        while True:
            order = self.inbox.take(ORDER_SECONDS_MAX)
            try:
                if recovery.obey(self, order):
                    return
            except (GroupsBroken, RuntimeError) as error:
                # A peer died while we re-formed: the next generation's orders are on their way.
                if not self.is_fault(error):
                    raise
                if not self.inbox.pending:
                    text = f"while recovering: {str(error).strip()[:300]}"
                    self.report_broken(int(order.generation), text)

    def report_broken(
        self, generation: int, text: str, *, corrupt: bool = False, cover: str = ""
    ) -> None:
        """Only about the generation that broke: the next one knows nothing of it."""
        place, step = self.place, self.boundary.step
        who = (place.job, Rank(place.rank), place.incarnation, Generation(generation))
        self._link.send(wire.WorkerBroken(*who, step, text, corrupt, cover))

    @property
    def _here(self) -> int:
        """The boundary that this rank is at; after the last step no boundary is ahead of it."""
        return sys.maxsize if self._finishing else self.boundary.step

    def _where(self) -> wire.SeatReport | None:
        """For the link's thread: the boundary that this rank is at."""
        if not self.has_state or self.cursor is None:
            return None
        return wire.SeatReport(
            Rank(self.place.rank),
            boundary=self.boundary.step,
            step_seconds=self.step_seconds,
            unsettled=self.unsettled,
        )

    @property
    def step_seconds(self) -> float:
        """The median step so far; 0 before the first."""
        return self.page.read().step_ns / 1e9

    def _passed(self, at: int) -> bool:
        return not self.has_state or self._here >= at

    def prepare(self, generation: int, quiesce: wire.Quiesce) -> None:
        """Begin to connect a generation's groups, as soon as it is known. Any thread."""
        known = quiesce.membership
        if known is not None and not self.is_leaving(quiesce):
            self.connect_groups(generation, known.store, known.secret)

    def connect_groups(self, generation: int, store: Endpoint, secret: str) -> None:
        def overtaken() -> bool:
            return self.inbox.generation != generation

        prefix = store_prefix(secret)
        self.groups.prepare(
            lambda: connect(store, recovery.STORE_SECONDS_MAX, overtaken), prefix, generation
        )

    def is_leaving(self, quiesce: wire.Quiesce) -> bool:
        """Another worker has our rank from now on."""
        me = (self.place.rank, self.place.incarnation)
        return me in [(seat.rank, seat.incarnation) for seat in quiesce.leaving]

    def reach(self, point: str) -> None:
        failpoint.reach(f"rank-{self.place.rank}-{point}")

    def report(
        self, kind: str, phase: Phase, seat: wire.SeatReport, generation: int | None = None
    ) -> None:
        number = Generation(self.inbox.generation if generation is None else generation)
        self.inbox.report(kind, wire.WorkerReport(self.place.job, number, phase, seat))

    # ------------------------------------------------------------ publishing

    def publish(self, step: int, path: str, seconds_max: float = 10.0) -> tuple[bool, str]:
        """Ask for a checkpoint to become the newest; an older generation is refused."""
        request = f"{self.place.rank}-{self.place.incarnation}-{self.generation}-{step}"
        self._link.send(
            wire.Publish(
                NodeId(""),
                self.place.job,
                Generation(self.generation),
                Rank(self.place.rank),
                step,
                path,
                request,
            )
        )
        answer = self.inbox.answer(request, seconds_max)
        if answer is None:
            raise Transient(f"nobody answered within {seconds_max:.0f} s", seconds_max)
        return answer.accepted, answer.why
