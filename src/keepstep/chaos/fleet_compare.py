"""The same failures under checkpoint-restart, for comparison: no brain, only arithmetic.

Every failure that interrupts a job costs the work since its last checkpoint, the replacement of a
machine, the restore and the start-up. A checkpoint stops the job for a while; their interval is the
best one for the job's own rate of failures (Young, Daly), or as given. What is planned costs no
work, only the restart. Detection is taken to be instant, and a spare to be there: in its favour.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from keepstep.chaos.fleet_faults import Strike
from keepstep.chaos.fleet_setting import GPUS_PER_NODE, SAVE_SECONDS, STARTUP_SECONDS, Plan
from keepstep.model import JobSpec

REPLACE_SECONDS = 600.0
RESTORE_SECONDS = 300.0
"""With STARTUP_SECONDS the vendor's figures for 1,024 GPUs (10, 5 and 5 min)."""
PLANNED = frozenset({"drain", "taint"})


@dataclass(frozen=True, slots=True)
class Restarted:
    """How one job would have fared."""

    useful_seconds: float
    interval_seconds: float
    lost_seconds: float


def interval(plan: Plan, ranks: int) -> float:
    """The best time between two checkpoints, to first order."""
    mttf = plan.mttf_hours * 3600.0 * plan.mttf_gpus / (ranks * GPUS_PER_NODE)
    return max(SAVE_SECONDS, math.sqrt(2 * SAVE_SECONDS * mttf) - SAVE_SECONDS)


def checkpoint_restart(
    plan: Plan, spec: JobSpec, strikes: Iterable[Strike], given_seconds: float = 0.0
) -> Restarted:
    """One job under its own failures."""
    every = given_seconds or interval(plan, spec.world_size)
    cycle = every + SAVE_SECONDS
    up_at = STARTUP_SECONDS
    useful = lost = 0.0
    for strike in strikes:
        if spec.job not in strike.jobs:
            continue
        if strike.at > up_at:
            cycles, rest = divmod(strike.at - up_at, cycle)
            useful += cycles * every
            if strike.effect in PLANNED:
                useful += min(rest, every)
            else:
                lost += min(rest, every)
        down = RESTORE_SECONDS + STARTUP_SECONDS + REPLACE_SECONDS
        if strike.effect == "process":
            down -= REPLACE_SECONDS
        up_at = max(up_at, strike.at + down)
    if plan.seconds > up_at:
        cycles, rest = divmod(plan.seconds - up_at, cycle)
        useful += cycles * every + min(rest, every)
    return Restarted(useful, every, lost)
