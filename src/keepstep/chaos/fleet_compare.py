"""The same failures under other systems, for comparison: no brain, only arithmetic.

Every failure that interrupts a job costs the work since its last checkpoint, the replacement of a
machine, the restore and the start-up. A checkpoint stops the job for a while; their interval is the
best one for the job's own rate of failures (Young, Daly), or as given. What is planned costs no
work, only the restart. Detection is taken to be instant, and a spare to be there: in its favour.

Systems that publish how long a job stands still are reckoned by that figure alone: whatever the
size of the job, no work is lost, and a spare is there. All of that is in their favour.
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


@dataclass(frozen=True, slots=True)
class Published:
    """How long a job stands still, as a system's makers say."""

    name: str
    seconds: float
    planned_seconds: float


PUBLISHED = (
    Published("TrainMover", 20.0, 20.0),  # At 1,024 GPUs.
    Published("TorchPass", 120.0, 30.0),
    Published("AWS checkpointless", 105.0, 105.0),
    Published("FlashRecovery", 150.0, 150.0),  # At 4,800 devices, with at most one step lost.
)


def paused(plan: Plan, spec: JobSpec, strikes: Iterable[Strike], system: Published) -> float:
    """Useful seconds of one job that only stands still, for as long as is published."""
    up_at, stood = STARTUP_SECONDS, STARTUP_SECONDS
    for strike in strikes:
        if spec.job not in strike.jobs or strike.at >= plan.seconds:
            continue
        down = system.planned_seconds if strike.effect in PLANNED else system.seconds
        until = min(plan.seconds, strike.at + down)
        # A second failure in the same pause prolongs it.
        stood += max(0.0, until - max(up_at, strike.at))
        up_at = max(up_at, until)
    return plan.seconds - stood


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
