"""Decisions as server-sent events, for whoever listens: as much of each as they may see.

    : connected            the stream has begun
    id: 7, data: {…}       a decision
    event: gap, data:{…}   {"asked": 3, "from": 7}: what was between is not kept here, so look again
    : alive                nothing was sent for a while

Thousands may listen, on the loop that decides. So whoever sees nothing of a decision is not woken
for it, and what a project sees of one is made once for all of its listeners. Whose jobs a decision
is about is noted when it is told: a name may be somebody else's job later.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from keepstep import codec
from keepstep.orchestrator.access import Sight
from keepstep.orchestrator.exporting import PART_SECONDS_MAX
from keepstep.orchestrator.http import PIECE_BYTES
from keepstep.orchestrator.run import Orchestrator

ALIVE_SECONDS = 5.0
"""A listener that gets no byte for longer may take us for gone."""
ALL = ""
"""The project of those who see every decision."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One decision, and what its listeners get of it."""

    record: dict[str, Any]
    projects: frozenset[str]
    """Whose jobs it is about."""
    texts: dict[str, bytes] = field(default_factory=dict)
    """By project, once somebody has listened for it. Empty: that project sees nothing of it."""

    @property
    def seq(self) -> int:
        return int(self.record["seq"])


class Telling:
    """The newest decisions of one leader, by who may see something of them."""

    def __init__(self, orchestrator: Orchestrator, sight: Callable[[str], Sight]) -> None:
        self._orchestrator, self._sight = orchestrator, sight
        self._kept: dict[str, deque[Kept]] = {ALL: deque()}
        self._gone: dict[str, int] = {}
        """Of each project the newest decision that is not kept any more."""
        self._more: dict[str, asyncio.Event] = {}
        """One for each project that somebody has listened for."""
        self._before = 0
        """The last decision before the first that we know: an earlier leader's."""
        self.hear(orchestrator.history)
        if self._kept[ALL]:
            self._before = self._kept[ALL][0].seq - 1
        orchestrator.hearers.append(self.hear)

    def hear(self, records: Iterable[dict[str, Any]]) -> None:
        """Keep these, and wake those who see something of them."""
        jobs, concerned = self._orchestrator.cluster.jobs, set()
        for record in records:
            known = (jobs[name] for name in record["jobs"] if name in jobs)
            kept = Kept(record, frozenset(job.spec.project for job in known) - {ALL})
            for project in (ALL, *kept.projects):
                self._kept.setdefault(project, deque()).append(kept)
                concerned.add(project)
            if len(self._kept[ALL]) > (self._orchestrator.history.maxlen or 0):
                self._forget(self._kept[ALL][0])
        for project in concerned:
            if more := self._more.pop(project, None):
                more.set()

    def _forget(self, oldest: Kept) -> None:
        for project in (ALL, *oldest.projects):
            self._gone[project] = self._kept[project].popleft().seq
            if project and not self._kept[project]:
                del self._kept[project]

    # ---------------------------------------------------------------- one listener

    async def events(
        self, last: str, project: str, spent: Callable[[float], None]
    ) -> AsyncIterator[bytes]:
        """From the decision after `last` on. Without a place to go on from, what comes from now on.
        `spent` is told how much of the loop's time it took."""
        newest = self._kept[ALL][-1].seq if self._kept[ALL] else 0
        # Not isdigit(): that takes a superscript two, which int() does not.
        after = int(last) if re.fullmatch("[0-9]{1,18}", last) else newest
        if after == 0:
            after = self._lost(project)  # All that there is: nothing is missed.
        part = b": connected\n\n"
        if after > newest:
            # A journal that was put back to an earlier time: these numbers come once more.
            part += self._gap(after, project)
            after = self._lost(project)
        # Noted before: whoever takes it may let us wait, and that is time without a byte as well.
        sent_at = time.monotonic()
        yield part
        while True:
            # Taken before the look: a decision made while the listener is busy is not missed.
            more = self._more.setdefault(project, asyncio.Event())
            began, before = time.thread_time(), after
            part, after = self._next(project, after)
            spent(time.thread_time() - began)
            if after == before:
                try:
                    async with asyncio.timeout(sent_at + ALIVE_SECONDS - time.monotonic()):
                        await more.wait()
                    continue
                except TimeoutError:
                    part = b": alive\n\n"
            if part:
                sent_at = time.monotonic()
                yield part
            else:
                await asyncio.sleep(0)

    def _next(self, project: str, after: int) -> tuple[bytes, int]:
        """What comes next for whoever knows all up to here, as far as it is made in a moment; and
        how far that is."""
        parts: list[bytes] = []
        if after < self._lost(project):
            parts, after = [self._gap(after, project)], self._lost(project)
        length, sight, began = 0, None, time.monotonic()
        for kept in newer(self._kept.get(project, ()), after):
            if project not in kept.texts:
                sight = sight or self._sight(project)
                kept.texts[project] = _text(sight, kept)
            parts.append(kept.texts[project])
            length, after = length + len(parts[-1]), kept.seq
            if length >= PIECE_BYTES or time.monotonic() - began >= PART_SECONDS_MAX:
                break
        return b"".join(parts), after

    def _lost(self, project: str) -> int:
        """The newest decision that this project's listeners cannot be told, if they missed it."""
        return max(self._before, self._gone.get(project, 0))

    def _gap(self, asked: int, project: str) -> bytes:
        lost = self._lost(project)
        told = codec.dumps({"asked": asked, "from": lost + 1})
        # No blank after `data:`. It is the same for every reader of such streams but for ours of
        # before, which takes each line that begins with `data: ` for a decision.
        return b"id: %d\nevent: gap\ndata:%s\n\n" % (lost, told)


def newer(kept: Sequence[Kept], after: int) -> list[Kept]:
    """From the newest back: whoever has heard all but the last does not look through the rest."""
    found = []
    for each in reversed(kept):
        if each.seq <= after:
            break
        found.append(each)
    return found[::-1]


def _text(sight: Sight, kept: Kept) -> bytes:
    shown = sight.record(kept.record)
    return b"id: %d\ndata: %s\n\n" % (kept.seq, codec.dumps(shown)) if shown else b""
