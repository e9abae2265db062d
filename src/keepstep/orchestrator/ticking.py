"""When the loop looks at its clock again: the brain's next deadline, a period, a lease to renew."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from keepstep.clock import Clock
from keepstep.config import OrchestratorConfig
from keepstep.orchestrator import rules
from keepstep.orchestrator.events import TermBegan
from keepstep.orchestrator.journal import Standing
from keepstep.orchestrator.liveness import LOOKS_PER_SECOND_MAX

TICK_SECONDS_MIN = 0.02
"""The shortest time between two ticks."""
LOOK_SECONDS = 1.0
"""Between two looks at a file in which nothing is written: does this term still lead?"""


def term_began(standing: Standing, config: OrchestratorConfig) -> TermBegan:
    """What the brain is told of a new leader, and of those of its settings that are the brain's."""
    return TermBegan(
        standing.term,
        config.migrations_max,
        standing.vacant_seconds,
        standing.seq,
        forget_seconds=config.forget_nodes_seconds,
        rules=rules.NEWEST,
    )


def until_tick(
    due: float | None, now: float, config: OrchestratorConfig, lease: float, doubtful: int = 0
) -> float:
    """Seconds until the brain should look at its clock. `lease`: 0 for none."""
    # An idle leader writes when it ticks, to keep its lease, or to see whether a file, which has
    # none, has another leader.
    pause = lease / 4 or LOOK_SECONDS
    if due is None:
        return min(config.tick_seconds, pause)
    # Not at once even if overdue: a budget that ran out must not make us spin.
    # And a tick looks at every node in doubt: with thousands of them, ticks come less often.
    least = min(max(TICK_SECONDS_MIN, doubtful / LOOKS_PER_SECOND_MAX), pause)
    return min(max(due - now, least), max(config.tick_busy_seconds, least), pause)


async def doze(
    clock: Clock,
    hurried: asyncio.Event,
    until: Callable[[], float],
    tick_due: float,
    look_due: float,
) -> float:
    """Sleep until something is due. A step may bring the next tick forward: when it is due."""
    while (left := min(tick_due, look_due) - clock.monotonic()) > 0:
        try:
            async with asyncio.timeout(left):
                await hurried.wait()
        except TimeoutError:
            break
        hurried.clear()
        tick_due = min(tick_due, clock.monotonic() + until())
    return tick_due
