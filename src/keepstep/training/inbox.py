"""Orders on their way from the agent's socket to the training thread.

The link's thread calls `receive`; the training thread calls `take`. An order of an older
generation is dropped; a repeated one is answered with the report that its first copy produced.
A Quiesce interrupts: the groups are aborted at once, from the link's thread, so that a training
thread that waits in a collective comes back. One that names a boundary ahead does not: the training
thread comes to it by itself. An Agree is answered from the link's thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from keepstep import wire
from keepstep.errors import Transient
from keepstep.model import Phase


class Inbox:
    """The newest generation's orders, in order of arrival."""

    def __init__(self, interrupt: Callable[[], None], send: Callable[[wire.Message], None]) -> None:
        self._interrupt = interrupt
        self._send = send
        self._ready = threading.Condition()
        self._orders: deque[wire.Order] = deque()
        self._seen: set[tuple[int, str]] = set()
        self._reports: dict[tuple[int, str], wire.WorkerReport] = {}
        self._answers: dict[str, wire.Published] = {}
        self.busy: Callable[[], wire.WorkerReport | None] = lambda: None
        """Says how long this rank is still busy, when it is; asked while a Quiesce waits."""
        self.where: Callable[[], wire.SeatReport | None] = lambda: None
        """Says where this rank is; None while it has no state."""
        self.passed: Callable[[int], bool] = lambda at: True
        """Whether a boundary lies behind this rank, or will never come."""
        self.prepare: Callable[[int, wire.Quiesce], None] = lambda generation, quiesce: None
        """Gets ready, while training goes on, for a boundary that lies ahead."""
        self.generation = 0

    @property
    def pending(self) -> bool:
        """True while an order waits for the training thread. Cheap: read at every boundary."""
        return bool(self._orders)

    def due(self, step: int) -> bool:
        """True if an order waits that is to be followed at this boundary. Cheap."""
        if not self._orders:
            return False
        try:
            action = self._orders[0].action
        except IndexError:
            # A newer generation's order is just taking its place.
            return True
        return not (isinstance(action, wire.Quiesce) and action.at > step)

    def receive(self, message: wire.Message) -> None:
        """The link's thread delivers."""
        if isinstance(message, wire.Published):
            with self._ready:
                self._answers[message.request] = message
                self._ready.notify_all()
        elif isinstance(message, wire.Order):
            self._receive_order(message)

    def _receive_order(self, order: wire.Order) -> None:
        key = (int(order.generation), type(order.action).__name__)
        with self._ready:
            if order.generation < self.generation:
                return
            if key in self._seen:
                report = self._reports.get(key)
                if report is not None:
                    self._send(report)
                return
            if order.generation > self.generation:
                self.generation = int(order.generation)
                self._seen.clear()
                self._reports.clear()
                self._orders.clear()
            if isinstance(order.action, wire.Agree):
                self._agree(order)
                return
            self._seen.add(key)
            self._orders.append(order)
            self._ready.notify_all()
        if isinstance(order.action, wire.Quiesce):
            # Looked at after the order is in place: whoever passed the boundary before did not see
            # it, and has to be called back.
            if self.passed(order.action.at):
                self._interrupt()
            else:
                self.prepare(int(order.generation), order.action)
            busy = self.busy()
            if busy is not None:
                self._send(busy)

    def _agree(self, order: wire.Order) -> None:
        here = self.where()
        if here is not None:
            self._send(wire.WorkerReport(order.job, order.generation, Phase.AGREE, here))

    def take(self, seconds_max: float) -> wire.Order:
        """The next order; raises Transient when none comes in time."""
        deadline = time.monotonic() + seconds_max
        with self._ready:
            while not self._orders:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Transient(f"no order came within {seconds_max:.0f} s")
                self._ready.wait(left)
            return self._orders.popleft()

    def put_back(self, order: wire.Order) -> None:
        """An order that is to be followed elsewhere: the next `take` gives it again."""
        with self._ready:
            if order.generation == self.generation:
                self._orders.appendleft(order)
                self._ready.notify_all()

    def comes(self, seconds_max: float) -> bool:
        """Whether an order waits, or comes in this time. It is left where it is."""
        with self._ready:
            return self._ready.wait_for(lambda: bool(self._orders), seconds_max)

    def report(self, kinds: str, report: wire.WorkerReport) -> None:
        """Remember what an order led to, or each of several ("Quiesce Apply"), and say it."""
        with self._ready:
            if report.generation == self.generation:
                for kind in kinds.split():
                    self._reports[(int(report.generation), kind)] = report
        self._send(report)

    def expect(self, generation: int) -> None:
        """A new process starts out in this generation."""
        self.generation = max(self.generation, generation)

    def answer(self, request: str, seconds_max: float) -> wire.Published | None:
        deadline = time.monotonic() + seconds_max
        with self._ready:
            while request not in self._answers:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._ready.wait(left)
            return self._answers.pop(request)
