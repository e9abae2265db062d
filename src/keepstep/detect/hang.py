"""Who stands still: a rank whose page has not changed for too long, and that is not busy.

The probe reads pages in shared memory (keepstep.agent.probes), so a worker needs neither its GIL
nor its main thread to be seen. The judge below is pure. It names stalled ranks, not the guilty one:
in a collective everybody stands still, and who lags is decided by the orchestrator over all nodes.

What must never happen here is a false alarm. Time in which this very process did not run (a
suspended machine, an overloaded one) is taken off every rank's account: suspect ourselves first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from keepstep.model import Policy
from keepstep.page import Mark, Progress

LATE_SECONDS_MAX = 1.0
"""A probe that comes later than this after its time has itself been kept from running."""


@dataclass(frozen=True, slots=True)
class Watch:
    """What a rank showed last, and since when it shows it."""

    progress: tuple[int, int, int, int]
    """(generation, step, mark, launched): any change is progress."""
    since: float


@dataclass(frozen=True, slots=True)
class Stall:
    """One rank without progress."""

    rank: int
    seconds: float
    why: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The watches to hand back at the next call, and the ranks that stand still now."""

    watches: Mapping[int, Watch]
    stalls: tuple[Stall, ...]
    due: float = float("inf")
    """When the patience with the next one ends, if it shows nothing new until then."""


def judge(
    watches: Mapping[int, Watch],
    readings: Mapping[int, Progress],
    now: float,
    policy: Policy,
) -> Verdict:
    """Compare this reading of a job's local ranks with the last one. `now` is monotonic."""
    kept: dict[int, Watch] = {}
    stalls: list[Stall] = []
    due = float("inf")
    for rank, reading in readings.items():
        watch = kept[rank] = _watch(watches.get(rank), reading, now)
        seconds_max = patience(reading, policy)
        if seconds_max is None:
            continue
        still = now - watch.since
        if still < seconds_max:
            due = min(due, watch.since + seconds_max)
        else:
            why = (
                f"rank {rank} has been in {reading.mark.name} of step {reading.step}"
                f" for {still:.1f} s; {seconds_max:.1f} s are allowed"
            )
            stalls.append(Stall(rank, still, why))
    return Verdict(kept, tuple(stalls), due)


def patience(reading: Progress, policy: Policy) -> float | None:
    """How long this rank may stand where it stands; None: for ever."""
    match reading.mark:
        case Mark.STARTING:
            return policy.startup_seconds_max
        case Mark.FORWARD | Mark.GRADS_READY | Mark.UPDATED | Mark.APPLIED:
            return max(policy.hang_seconds_min, policy.hang_steps * reading.step_ns / 1e9)
        case Mark.RECOVERING | Mark.FINISHED:
            return None


def discount(watches: Mapping[int, Watch], seconds: float) -> Mapping[int, Watch]:
    """Take time in which the judge itself was not running off every rank's account."""
    return {rank: replace(watch, since=watch.since + seconds) for rank, watch in watches.items()}


def lateness(due: float, now: float) -> float:
    """How much time to discount for a probe that was due at `due`; small delays are ordinary."""
    late = now - due
    return late if late > LATE_SECONDS_MAX else 0.0


def _watch(watch: Watch | None, reading: Progress, now: float) -> Watch:
    progress = (reading.generation, reading.step, int(reading.mark), reading.launched)
    # Declared slowness does not count: the account starts when the declared time is over.
    busy = reading.busy_until_ns / 1e9 > now
    if watch is None or watch.progress != progress or busy:
        return Watch(progress, now)
    return watch
