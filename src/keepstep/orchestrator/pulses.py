"""Our own heartbeat to the agents: that we lead, how often to speak, and the heads of their jobs.

In a large cluster a pulse to everybody is thousands of writes. They are spread over the period, so
that an incident never waits behind them, and a frame is encoded once for all nodes with the same
jobs and the same pace: an agent is told of the jobs that it has, not of all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from keepstep import wire
from keepstep.clock import Clock
from keepstep.model import JobId, NodeId, Term
from keepstep.orchestrator.streams import AgentStream

SLICE = 100
"""Streams that are written to without a break, if we are in time: a few milliseconds, with TLS."""

PULSES_PER_SECOND_MAX = 2000
PULSE_SECONDS_MAX = 1.3
"""Very many are told a little less often: an agent that hears nothing for 4 s leaves."""


class Frames:
    """The pulses of one moment."""

    def __init__(
        self, term: Term, heads: Mapping[str, str], pace: Callable[[NodeId], float]
    ) -> None:
        """`pace`: how often a node is to speak, in seconds."""
        self._term = term
        self._heads = heads
        self._pace = pace
        self._known: dict[tuple[frozenset[JobId], float, int], bytes] = {}

    def of(self, node: NodeId, jobs: Iterable[JobId], version: int = wire.VERSION) -> bytes:
        """For the agent of this node, that has workers of these jobs and speaks this version of the
        wire."""
        alike = (frozenset(jobs), self._pace(node), version)
        frame = self._known.get(alike)
        if frame is None:
            heads = {str(job): self._heads[job] for job in alike[0] if job in self._heads}
            frame = wire.encode(wire.Pulse(self._term, heads, alike[1]), version)
            self._known[alike] = frame
        return frame


async def spread(
    streams: Mapping[NodeId, AgentStream],
    frames: Callable[[], Frames],
    jobs_on: Callable[[NodeId], Iterable[JobId]],
    seconds: float,
    clock: Clock,
) -> None:
    """One pulse to each stream, over so many seconds. A loop that is late sends more at once: an
    agent that hears nothing for long would leave, and come back as even more work."""
    began = clock.monotonic()
    waiting = tuple(streams.values())
    seconds = max(seconds, min(len(waiting) / PULSES_PER_SECOND_MAX, PULSE_SECONDS_MAX))
    at = 0
    while at < len(waiting):
        share = (clock.monotonic() - began) / seconds
        upto = min(len(waiting), max(at + SLICE, int(share * len(waiting))))
        now = frames()
        for stream in waiting[at:upto]:
            stream.send(now.of(stream.node, jobs_on(stream.node), stream.version))
        at = upto
        due = began + seconds * at / len(waiting)
        await asyncio.sleep(max(0.0, due - clock.monotonic()))
    if not waiting:
        await asyncio.sleep(seconds)
