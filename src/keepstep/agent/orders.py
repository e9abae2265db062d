"""Carry out orders. Each is judged by its effect, so that repeating one is always safe.

    StartWorkers, Assign       a seat that has its worker, or had it, is reported, not started again
    StartStandby, DropStandby  the slot is brought into the wanted state
    Fence                      the named incarnations are killed; their deaths are the answer
    Agree                      passed on to the job's local workers
    Quiesce Reform Resume Save forwarded to them, once per connection; repeated, they bring the
                               standing reports again
    Apply                      the same, for the ranks that it names
    Stop                       the job's processes end, by themselves or by force

Orders of an older generation than the job's newest are refused, except those that name their
victim or their slot exactly. Terms were compared before an order comes here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from keepstep import belonging, codec, wire
from keepstep.agent import log
from keepstep.agent.forks import Forks
from keepstep.agent.links import Link, Links
from keepstep.agent.reports import Reports
from keepstep.agent.room import FORWARDED_MAX, SECRETS_MAX, Room
from keepstep.agent.tee import Tee
from keepstep.agent.workers import Worker, Workers, surroundings
from keepstep.errors import Transient
from keepstep.model import EXIT_REQUEUE, JobId, JobSpec, OrderId, Seat, Sign

STOP_SECONDS_MAX = 5.0
"""From SIGTERM to SIGKILL."""
LEAVE_SECONDS_MAX = 10.0
"""After a just-in-time checkpoint workers leave by themselves, with their own exit code."""
JOBS_MAX = 64
"""Records of jobs that are over; older ones are forgotten."""
FENCED_MAX = 4096


@dataclass(frozen=True, slots=True)
class Hands:
    """What an order may touch."""

    room: Room
    forks: Forks
    workers: Workers
    links: Links
    reports: Reports
    tee: Tee
    send: Callable[[wire.Message], object]
    spawn: Callable[[Coroutine[Any, Any, None]], None]


class Orders:
    """Obeys, one order at a time; what takes long goes on in the background."""

    def __init__(self, hands: Hands) -> None:
        self._hands = hands
        self._node = hands.workers.node
        self._under_way: set[OrderId] = set()
        self._fenced: dict[tuple[JobId, int, int], None] = {}
        """Seats that must not come to life any more, should their start still be under way."""
        self._agree: dict[JobId, wire.Order] = {}
        self._leaving: dict[JobId, set[tuple[int, int]]] = {}
        """Leavers of the newest generation. Forgotten with this process, which costs 50 ms."""

    def obey(self, order: wire.Order) -> wire.Refused | None:
        """Carry out an order, or say why not."""
        if self._node not in order.nodes:
            return wire.Refused(f"order {order.order_id} is not for node {self._node}")
        action = order.action
        known = self._hands.room.jobs.get(order.job)
        exact = isinstance(action, wire.Fence | wire.StartStandby | wire.DropStandby)
        if known is not None and order.generation < known.generation and not exact:
            why = (
                f"order {order.order_id} is of generation {order.generation};"
                f" this node has obeyed {known.generation}"
            )
            return wire.Refused(why)
        log.info("order.obeyed", order=order.order_id, job=order.job, kind=type(action).__name__)
        match action:
            case wire.StartWorkers():
                self._begin_workers(order, action)
            case wire.Assign():
                self._assign(order, action)
            case wire.StartStandby():
                # Before anything is awaited: the next order may already speak of this job.
                self._hands.room.meet_job(action.spec)
                self._hands.room.save()
                self._once(order, self._start_standby(order, action))
            case wire.DropStandby():
                self._drop_standby(order, action)
            case wire.Fence():
                self._fence(order, action)
            case wire.Agree():
                # Kept for workers that come back, and not on record: a generation that may never
                # come is none to refuse others for.
                self._agree[order.job] = order
                self._pass_on(order)
            case wire.Quiesce() | wire.Apply() | wire.Reform() | wire.Resume() | wire.Save():
                self._forward(order)
            case wire.Stop():
                if known is not None:
                    self._note(order, known.spec, None, forward=True)
                self._once(order, self._stop(order, action))
        return None

    def welcome(self, worker: Worker, link: Link, hello: wire.WorkerHello) -> None:
        """A worker (re)connected: give it the orders of its generation that it may have missed."""
        job = self._hands.room.jobs.get(worker.record.job)
        if job is None or worker.is_standby:
            return
        if (agree := self._agree.get(worker.record.job)) is not None:
            link.send(agree)
        for text in job.forwarded:
            order = wire.from_plain(codec.loads(text))
            if isinstance(order.action, wire.Assign):
                seat = order.action.seat
                mine = (worker.record.rank, worker.record.incarnation)
                known = hello.rank >= 0 and hello.generation >= order.generation
                if known or (seat.rank, seat.incarnation) != mine:
                    continue
            if not _is_for(order, worker):
                continue
            link.send(order)

    # ------------------------------------------------------------ starting

    def _once(self, order: wire.Order, work: Coroutine[Any, Any, None]) -> None:
        """Run in the background; the same order again while it runs adds nothing."""
        if order.order_id in self._under_way:
            work.close()
            return
        self._under_way.add(order.order_id)

        async def run() -> None:
            try:
                await work
            finally:
                self._under_way.discard(order.order_id)

        self._hands.spawn(run())

    def _begin_workers(self, order: wire.Order, start: wire.StartWorkers) -> None:
        known = self._hands.room.jobs.get(order.job)
        fresh = known is None or order.generation > known.generation
        try:
            self._note(order, start.spec, start.membership)
        except OSError:
            # Not obeyed: told again, it must still be fresh, or lies of an earlier run would stay.
            self._hands.room.jobs.pop(order.job, None)
            if known is not None:
                self._hands.room.jobs[order.job] = known
            raise
        mine = [seat for seat in start.seats if seat.node == self._node]
        self._once(order, self._start_workers(order, mine, fresh=fresh))

    async def _start_workers(self, order: wire.Order, mine: list[Seat], *, fresh: bool) -> None:
        hands = self._hands
        wanted = {(seat.rank, seat.incarnation) for seat in mine}
        slots = {seat.slot for seat in mine}
        for worker in hands.workers:
            record = worker.record
            stays = record.job == order.job and (record.rank, record.incarnation) in wanted
            if not stays and record.slot in slots:
                log.warning("slot.vacated", slot=record.slot, job=record.job, rank=record.rank)
                await hands.workers.fence(worker)
        if fresh and not hands.workers.seated(order.job):
            # A start from the top of the script: entries of an earlier run would be lies.
            hands.room.sweep_job(order.job)
        await asyncio.gather(*(self._start_seat(order, seat) for seat in mine))

    async def _start_seat(self, order: wire.Order, seat: Seat) -> None:
        hands = self._hands
        name = (order.job, int(seat.rank), seat.incarnation)
        if hands.workers.on_seat(*name) is not None or self._tell_ending(*name):
            return
        if name in self._fenced:
            return
        around = surroundings(hands.room, hands.room.jobs[order.job].spec)
        if around.spec.tee:
            hands.tee.follow(around.rank_log(seat.rank), seat.rank)
        try:
            worker = await hands.workers.start_worker(hands.forks, around, seat, order)
        except Transient as error:
            self._tell_absent(order, seat, f"not started: {error}")
            return
        if name in self._fenced:
            hands.workers.kill(worker)
        self._settle_slot(seat.slot)

    def _settle_slot(self, slot: int) -> None:
        """A seat and a standby that were started for one slot at the same time: the seat stays."""
        there = self._hands.workers.on_slot(slot)
        if any(not worker.is_standby for worker in there):
            for worker in there:
                if worker.is_standby:
                    self._hands.workers.kill(worker)

    async def _start_standby(self, order: wire.Order, start: wire.StartStandby) -> None:
        hands = self._hands
        for worker in hands.workers.on_slot(start.slot):
            record = worker.record
            if record.job == order.job and worker.is_standby:
                self._tell_standby(worker)
                return
            if not worker.is_standby:
                detail = f"slot {start.slot} has rank {record.rank} of job {record.job}"
                self._tell_no_standby(start.spec, start.slot, detail)
                return
            await hands.workers.fence(worker)
        around = surroundings(hands.room, start.spec)
        try:
            await hands.workers.start_standby(hands.forks, around, start.slot, order.order_id)
            self._settle_slot(start.slot)
        except Transient as error:
            self._tell_no_standby(start.spec, start.slot, f"not started: {error}")

    def _drop_standby(self, order: wire.Order, drop: wire.DropStandby) -> None:
        for worker in self._hands.workers.on_slot(drop.slot):
            if worker.is_standby and worker.record.job == order.job:
                self._hands.workers.kill(worker)

    def _assign(self, order: wire.Order, assign: wire.Assign) -> None:
        """The slot's standby takes the seat, connected or not; without one, fork a joiner."""
        hands, seat = self._hands, assign.seat
        if seat.node != self._node:
            return
        again = not self._note(order, assign.spec, assign.membership, forward=True)
        name = (order.job, int(seat.rank), seat.incarnation)
        seated = hands.workers.on_seat(*name)
        if seated is not None or self._tell_ending(*name):
            if seated is not None and order.generation > seated.record.generation:
                self._assign_again(order, seated)
            if again:
                self._tell_reports(order.job)
            return
        around = surroundings(hands.room, assign.spec)
        for worker in hands.workers.on_slot(seat.slot):
            if worker.is_standby and worker.is_alive and worker.record.job == order.job:
                path = around.rank_log(seat.rank)
                taken = replace(
                    worker.record,
                    rank=seat.rank,
                    incarnation=seat.incarnation,
                    generation=order.generation,
                    log=str(path),
                )
                hands.room.ending_path(taken).unlink(missing_ok=True)
                hands.workers.update(worker, taken)
                if assign.spec.tee:
                    hands.tee.follow(path, seat.rank)
                link = hands.links.find(taken.pid)
                if link is not None and link.hello is not None:
                    self.welcome(worker, link, link.hello)
                return
        self._once(order, self._start_joiner(order, seat))

    def _assign_again(self, order: wire.Order, worker: Worker) -> None:
        """A second rank fell while this joiner was on its way: same seat, newer generation."""
        taken = replace(worker.record, generation=order.generation)
        self._hands.workers.update(worker, taken)
        link = self._hands.links.find(taken.pid)
        if link is not None and link.hello is not None:
            link.send(order)

    async def _start_joiner(self, order: wire.Order, seat: Seat) -> None:
        for worker in self._hands.workers.on_slot(seat.slot):
            log.warning("slot.vacated", slot=seat.slot, job=worker.record.job)
            await self._hands.workers.fence(worker)
        await self._start_seat(order, seat)

    # ------------------------------------------------------------ ending

    def _fence(self, order: wire.Order, fence: wire.Fence) -> None:
        for seat in fence.seats:
            if seat.node != self._node:
                continue
            name = (order.job, int(seat.rank), seat.incarnation)
            self._fenced[name] = None
            while len(self._fenced) > FENCED_MAX:
                del self._fenced[next(iter(self._fenced))]
            worker = self._hands.workers.on_seat(*name)
            if worker is not None:
                # Its death is reported by whoever watches it, as any other death.
                self._hands.workers.kill(worker)
            elif not self._tell_ending(*name):
                self._tell_absent(order, seat, "fenced; not on this node")

    async def _stop(self, order: wire.Order, stop: wire.Stop) -> None:
        hands = self._hands
        leaving = stop.exit_code == EXIT_REQUEUE
        waits = []
        for worker in hands.workers.of_job(order.job):
            link = hands.links.find(worker.record.pid)
            if link is not None and not worker.is_standby:
                link.send(order)
            by_itself = leaving and not worker.is_standby
            grace = LEAVE_SECONDS_MAX if by_itself else STOP_SECONDS_MAX
            waits.append(hands.workers.end(worker, grace, ask=not by_itself))
        await asyncio.gather(*waits)
        hands.reports.forget_job(order.job)
        self._put_away(order)

    def _put_away(self, order: wire.Order) -> None:
        """The job is over here: what it left is only memory now."""
        room = self._hands.room
        job = room.jobs.get(order.job)
        if job is not None and job.generation > order.generation:
            return
        if not self._hands.workers.seated(order.job):
            room.sweep_job(order.job)
        if job is None:
            room.forget_job(order.job)
            return
        # Last in the order of forgetting.
        room.jobs[order.job] = replace(room.jobs.pop(order.job), forwarded=())
        idle = [name for name in room.jobs if not self._hands.workers.of_job(name)]
        for name in idle[: max(0, len(room.jobs) - JOBS_MAX)]:
            room.forget_job(name)
        room.save()

    # ------------------------------------------------------------ forwarding

    def _forward(self, order: wire.Order) -> None:
        hands = self._hands
        known = hands.room.jobs.get(order.job)
        if known is None:
            log.warning("order.no_such_job", order=order.order_id, job=order.job)
            return
        # First to the workers, who wait for it; an agent that dies in between gets it again.
        self._pass_on(order)
        self._agree.pop(order.job, None)
        if isinstance(order.action, wire.Quiesce):
            leaving = order.action.leaving
            self._leaving[order.job] = {(int(s.rank), s.incarnation) for s in leaving}
        membership = order.action.membership if isinstance(order.action, wire.Reform) else None
        if not self._note(order, known.spec, membership, forward=True):
            self._tell_reports(order.job)

    def _pass_on(self, order: wire.Order) -> None:
        for worker in self._hands.workers.seated(order.job):
            link = self._hands.links.find(worker.record.pid)
            if link is not None and _is_for(order, worker):
                link.send(order)

    def leaves(self, worker: Worker) -> bool:
        """Its rank is with another worker in the newest generation: it reports nothing."""
        record = worker.record
        return (record.rank, record.incarnation) in self._leaving.get(record.job, ())

    def _note(
        self,
        order: wire.Order,
        spec: JobSpec,
        membership: wire.Membership | None,
        *,
        forward: bool = False,
    ) -> bool:
        """Remember generation, secret and, for workers, the order itself. False: known already."""
        room = self._hands.room
        record = room.meet_job(spec)
        if order.generation > record.generation:
            record = replace(record, generation=order.generation, forwarded=())
        if membership is not None and membership.secret not in record.secrets:
            record = replace(record, secrets=(*record.secrets, membership.secret)[-SECRETS_MAX:])
        if membership is not None and record.secrets[-1] == membership.secret:
            word = belonging.word(membership.secret, order.job, order.generation, self._node)
            record = replace(record, belongs=word)
        new = True
        if forward:
            text = codec.dumps(wire.to_plain(order)).decode()
            new = text not in record.forwarded
            if new:
                record = replace(record, forwarded=(*record.forwarded, text)[-FORWARDED_MAX:])
        room.jobs[spec.job] = record
        room.save()
        return new

    # ------------------------------------------------------------ telling

    def _tell_reports(self, job: JobId) -> None:
        for report in self._hands.reports.standing(job):
            self._hands.send(report)

    def _tell_ending(self, job: JobId, rank: int, incarnation: int) -> bool:
        """Say again how this seat's worker ended; False if none did."""
        record = self._hands.room.jobs.get(job)
        for observed in reversed(record.endings if record is not None else ()):
            if (observed.rank, observed.incarnation) == (rank, incarnation):
                self._hands.send(observed)
                return True
        return False

    def _tell_absent(self, order: wire.Order, seat: Seat, detail: str) -> None:
        self._hands.send(
            wire.Observed(
                node=self._node,
                job=order.job,
                sign=Sign.EXIT,
                rank=seat.rank,
                incarnation=seat.incarnation,
                generation=order.generation,
                detail=detail,
            )
        )

    def _tell_standby(self, worker: Worker) -> None:
        record = worker.record
        self._hands.send(
            wire.StandbyReport(
                node=self._node,
                job=record.job,
                slot=record.slot,
                level=record.level,
                ready=record.ready,
                detail="" if record.ready else "warming",
            )
        )

    def _tell_no_standby(self, spec: JobSpec, slot: int, detail: str) -> None:
        self._hands.send(
            wire.StandbyReport(
                node=self._node,
                job=spec.job,
                slot=slot,
                level=spec.standby_level,
                ready=False,
                detail=detail,
            )
        )


def _is_for(order: wire.Order, worker: Worker) -> bool:
    """Most orders are for all workers of a job; an update is made by those who are named."""
    named = order.action.ranks if isinstance(order.action, wire.Apply) else None
    return named is None or worker.record.rank in named
