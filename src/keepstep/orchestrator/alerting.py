"""Alerts that arrived: each is followed, or told why not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from keepstep.orchestrator import alerts, brain, events
from keepstep.orchestrator.run import Log

Decide = Callable[[events.Asked], Awaitable[brain.Decision]]


async def follow(
    verdicts: Iterable[alerts.Verdict], decide: Decide, log: Log
) -> list[dict[str, Any]]:
    """All at once: they share one write to the journal."""
    return await asyncio.gather(*(_follow_one(verdict, decide, log) for verdict in verdicts))


async def _follow_one(verdict: alerts.Verdict, decide: Decide, log: Log) -> dict[str, Any]:
    told = {"alert": verdict.alert.name, "place": verdict.place or None}
    told["status"] = "firing" if verdict.alert.firing else "resolved"
    if verdict.event is None:
        # Nobody reads the answer to a webhook: whoever wonders looks into our log.
        log("alert.ignored", **told, why=verdict.why)
        return {**told, "changed": False, "why": verdict.why}
    decision = await decide(verdict.event)
    return {**told, "changed": decision.changed, "why": decision.why}
