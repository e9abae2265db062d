"""One step of the loop: the event, what was decided about it, and how it is kept and told.

A step is written to the journal, its orders leave, and its record goes to /v1/events and the log;
all three say the same sentence.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keepstep import wire
from keepstep.model import JobId
from keepstep.orchestrator import brain, events, facts, policy
from keepstep.orchestrator.journal import Entry

AGE_SECONDS_MIN = 0.1
"""What waited for less came as it happened."""
REPORTS_TOGETHER_MAX, ITEMS_TOGETHER_MAX = 64, 512
"""So many make one entry, of some tens of kilobytes: what is done for each entry weighs no more
then. Items are seats and all that they list: digests, portions, covers."""


@dataclass(slots=True)
class Waiting:
    """One event in the inbox, and who waits for its decision."""

    event: events.Event
    decided: asyncio.Future[brain.Decision] | None = None
    heard_at: float = -1.0
    """Of a message: when it came in, on our monotonic clock. -1: it is no message."""
    alone: bool = False
    """It is stepped without its neighbours: together with them it has failed."""

    def settle(self, decision: brain.Decision) -> None:
        if self.decided is not None and not self.decided.done():
            self.decided.set_result(decision)

    def fail(self, error: Exception) -> None:
        if self.decided is not None and not self.decided.done():
            self.decided.set_exception(error)


@dataclass(slots=True)
class Stepped:
    """One step that is not on disk yet."""

    waiting: Waiting
    decision: brain.Decision
    jobs: tuple[JobId, ...]
    facts: dict[str, dict[str, Any]]
    """Where those jobs were after the step; the cluster itself goes on to the next step."""
    now: float

    @property
    def weight(self) -> int:
        """Events that a replay has to step through."""
        return len(self.decision.counted) or int(to_be_kept(self.decision))


def come(inbox: asyncio.Queue[Waiting], most: int) -> list[Waiting]:
    """What has come, without waiting for more."""
    return [inbox.get_nowait() for _ in range(min(most, inbox.qsize()))]


def next_of(batch: deque[Waiting]) -> Waiting:
    """The next event. Reports of one job that wait next to each other are one event."""
    first = batch.popleft()
    together, items = [], 0
    report = _joined(first)
    while report is not None:
        together.append(report)
        items += items_of(report)
        following = _joined(batch[0]) if batch else None
        if following is None or following.job != report.job:
            break
        if (
            len(together) == REPORTS_TOGETHER_MAX
            or items + items_of(following) > ITEMS_TOGETHER_MAX
        ):
            break
        report = following
        batch.popleft()
    if len(together) < 2:
        return first
    job = together[0].job
    return Waiting(events.Reports(job, tuple(together)), heard_at=first.heard_at)


def _joined(item: Waiting) -> wire.PhaseReport | None:
    """The report that may be one with its neighbours; one with a problem speaks for itself."""
    report = item.event
    if not isinstance(report, wire.PhaseReport) or item.alone or item.decided is not None:
        return None
    return None if any(seat.problem for seat in report.seats) else report


def items_of(report: wire.PhaseReport) -> int:
    """How much a report lists."""
    lists = ((s.digests, s.portions, s.entries, s.covers, s.unsynced) for s in report.seats)
    return len(report.seats) + sum(len(each) for several in lists for each in several)


def apart(item: Waiting) -> list[Waiting]:
    """What `next_of` has put together, as it was; empty: it was one event in the first place."""
    if not isinstance(item.event, events.Reports):
        return []
    return [Waiting(report, heard_at=item.heard_at, alone=True) for report in item.event.reports]


def with_its_age(item: Waiting, now: float) -> events.Event | None:
    """An event that had to wait, for the journal or for others, as it is to be understood now.

    None: it says nothing any more. Agents repeat a stall for as long as it lasts, and one that is
    over must not be taken for a hang.
    """
    waited = now - item.heard_at if item.heard_at >= 0 else 0.0
    match item.event:
        case wire.Stalled() if waited > policy.STALL_FRESH_SECONDS:
            return None
        case wire.Observed() if waited > AGE_SECONDS_MIN:
            return replace(item.event, age_seconds=item.event.age_seconds + waited)
        case _:
            return item.event


def to_be_kept(decision: brain.Decision) -> bool:
    return decision.changed or bool(decision.orders)


def jobs_touched(event: events.Event, decision: brain.Decision) -> tuple[JobId, ...]:
    """The jobs that a step is about, or changed, or gave orders for: it goes into their chains."""
    touched = {order.job for order in decision.orders}
    touched |= {note.job for note in decision.notes}
    touched |= {events.job_of(event) or JobId("")}
    return tuple(sorted(touched - {JobId("")}))


def kept_of(event: events.Event, decision: brain.Decision) -> events.Event:
    """An event as the journal keeps it: of reports that came together, those that counted."""
    if not isinstance(event, events.Reports) or not decision.counted:
        return event
    first, *others = decision.counted
    return replace(event, reports=decision.counted) if others else first


def entry_of(done: Stepped) -> Entry:
    body = {
        "event": events.to_plain(kept_of(done.waiting.event, done.decision)),
        "jobs": done.facts,
        "now": done.now,
        "orders": [_order_line(order) for order in done.decision.orders],
        "why": done.decision.why,
    }
    return Entry(done.jobs, body)


def _order_line(order: wire.Order) -> dict[str, Any]:
    """An order as the journal names it; replaying the event gives the whole of it again."""
    kind = type(order.action).__name__
    number = len(order.nodes)
    return {"generation": order.generation, "id": order.order_id, "kind": kind, "nodes": number}


def stepped_of(
    waiting: Waiting, decision: brain.Decision, now: float, earlier: Sequence[Stepped] = ()
) -> Stepped:
    """Earlier: of the same batch. At the same instant, a closed incident is told by one of them."""
    jobs = jobs_touched(waiting.event, decision)
    told = facts.of(decision.cluster, jobs, now)
    for each in (each for each in told.values() if "closed" in each):
        same = (told for done in earlier if done.now == now for told in done.facts.values())
        if any(told.get("closed", {}).get("id") == each["closed"]["id"] for told in same):
            del each["closed"]
    return Stepped(waiting, decision, jobs, told, now)


def records_of(last_seq: int, steps: list[Stepped]) -> list[dict[str, Any]]:
    """Of steps that were written together, up to this entry."""
    first = last_seq - len(steps) + 1
    return [record_of(first + offset, done) for offset, done in enumerate(steps)]


def record_of(seq: int, done: Stepped) -> dict[str, Any]:
    """One decision as /v1/events and the log show it."""
    event = kept_of(done.waiting.event, done.decision)
    return {
        "seq": seq,
        "at": done.now,
        "kind": type(event).__name__,
        "by": getattr(event, "by", ""),
        "jobs": list(done.jobs),
        "node": getattr(event, "node", None),
        "why": done.decision.why,
        "phases": {job: told.get("phase", told["state"]) for job, told in done.facts.items()},
        "notes": [
            {"job": note.job, "incident": note.incident, "phase": note.phase, "why": note.why}
            for note in done.decision.notes
        ],
        "orders": [f"{type(o.action).__name__} to {len(o.nodes)}" for o in done.decision.orders],
    }


class Told:
    """The newest records, for whoever comes back, and who is to hear of each at once."""

    def __init__(self, records_max: int) -> None:
        self.records: deque[dict[str, Any]] = deque(maxlen=records_max)
        self.hearers: list[Callable[[Iterable[dict[str, Any]]], None]] = []

    def tell(self, records: Sequence[dict[str, Any]]) -> None:
        self.records.extend(records)
        for hear in self.hearers:
            hear(records)
