"""How much of the machine others took meanwhile: its host, and whoever else runs on it.

    before = quiet.look(pids)
    …                             only these processes should be running
    share = quiet.others(before, quiet.look(pids))

A rented machine gives its processor to others for seconds at a time ("steal"). A comparison in
which that met one arm and not the other says nothing, so it is made again. The rule looks at what
others took and never at how the comparison went.

It also runs others on the other half of our cores, or lowers their clock. That takes no time from
us and makes us slow all the same: `pace` is what the same work costs now.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
PACE_ROUNDS = 20_000


@dataclass(frozen=True, slots=True)
class Look:
    """Processor time up to now, in seconds."""

    machine: float
    """All that there was, idle or not."""
    taken: float
    """All that was not idle, or was kept from us."""
    own: float
    """What the watched processes had of it."""
    stolen: float = 0.0
    """What the machine's host kept from us: a part of what was taken."""


def look(pids: Iterable[int]) -> Look:
    with open("/proc/stat", encoding="ascii") as file:
        fields = [int(text) for text in file.readline().split()[1:9]]
    machine = sum(fields) / _TICKS_PER_SECOND
    idle = (fields[3] + fields[4]) / _TICKS_PER_SECOND
    stolen = fields[7] / _TICKS_PER_SECOND
    return Look(machine, machine - idle, sum(map(_had, pids)), stolen)


def others(before: Look, after: Look) -> float:
    """The share of the machine that went to others, between 0 and 1."""
    machine = after.machine - before.machine
    theirs = (after.taken - before.taken) - (after.own - before.own)
    return max(0.0, theirs / machine) if machine > 0 else 0.0


def stolen(before: Look, after: Look) -> float:
    """The share of the machine that its host kept from us."""
    machine = after.machine - before.machine
    return (after.stolen - before.stolen) / machine if machine > 0 else 0.0


def busy(before: Look, after: Look) -> float:
    """The share of the machine that anybody had."""
    machine = after.machine - before.machine
    return (after.taken - before.taken) / machine if machine > 0 else 0.0


def pace() -> float:
    """Seconds of processor for a fixed piece of work: about a millisecond."""
    began = time.thread_time()
    total = 0
    for number in range(PACE_ROUNDS):
        total += number * number
    return time.thread_time() - began


def _had(pid: int) -> float:
    """Seconds on a processor: of threads that live to the nanosecond, or of all it ever had, to
    the tick, if there were others."""
    nanoseconds = 0
    try:
        # The name in it may hold anything, brackets too.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                nanoseconds += int((thread / "schedstat").read_text().split()[0])
    except OSError:
        # It ended: what it had counts as others', which is on the safe side.
        return 0.0
    ticks = int(fields[11]) + int(fields[12])
    return max(nanoseconds / 1e9, ticks / _TICKS_PER_SECOND)
