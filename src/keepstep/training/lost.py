"""Operations that Gloo has lost, and whoever waits for them.

A peer says that it is ready to receive, and dies. If Gloo's own thread hears of the first before
the second, its write fails, and the operation is nowhere any more: no socket's end wakes it, and
its waiter waits for the group's timeout, half an hour as a rule. That is a survivor that does not
come back, and with a shard that nobody else holds it would be a second loss.

So whoever waits, waits through the swap, which can be told to let go (swap.cpp). That is done when
the groups were aborted, and Gloo's threads have nothing left to do: one that is late, on a machine
that stands still, might yet write to the tensors of the operation.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOST = "gloo lost this operation when a peer died, and the groups were aborted"
GRACE_SECONDS = 0.5
"""After an abort, until the first look: by then nearly all is over."""
LOOK_SECONDS = 0.25
FOR_SECONDS_MAX = 60.0
"""Long before, a rank that does not come back is replaced."""
LAZY = "TORCH_GLOO_LAZY_INIT"
"""With it, sockets are opened that no abort knows of: peers might write through them later."""
_LOOP, _WORKER = "gloo_tcp_loop", "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")


@dataclass(frozen=True, slots=True)
class Thread:
    """One of Gloo's, at one moment."""

    name: str
    asleep: bool
    slept: int
    """How often it went to sleep or was put to it."""


Looked = dict[int, Thread]


@dataclass(frozen=True, slots=True)
class Flight:
    """What was launched on one inner backend of a swap."""

    swap: Any
    number: int

    @classmethod
    def of(cls, swaps: Sequence[Any]) -> tuple[Flight, ...]:
        """Of those that can end what they have launched: the C++ swap, as it is built now."""
        return tuple(cls(swap, swap.number()) for swap in swaps if hasattr(swap, "release"))


def look() -> Looked:
    """Gloo's threads in this process; nothing where one could not be looked at."""
    found = {}
    try:
        for entry in os.listdir(_TASKS):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                name = (_TASKS / entry / "comm").read_text().strip()
                if name in (_LOOP, _WORKER):
                    found[int(entry)] = _read(name, (_TASKS / entry / "status").read_text())
    except OSError:
        return {}  # No file to be had. One that was left out might be the one that still writes.
    return found


def _read(name: str, status: str) -> Thread:
    fields = dict(line.split(":", 1) for line in status.splitlines())
    counts = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
    slept = sum(int(fields.get(count, 0)) for count in counts)
    return Thread(name, fields["State"].strip().startswith("S"), slept)


def still(before: Looked, after: Looked) -> bool:
    """Between two looks no worker has done anything, and the thread of every network has been up
    and found nothing left to do. Where there are no such threads nobody knows. Pure."""
    if {thread.name for thread in after.values()} != {_LOOP, _WORKER}:
        return False
    for number, now in after.items():
        then = before.get(number)
        if then is None or not then.asleep or not now.asleep:
            return False
        if now.name == _WORKER and now.slept != then.slept:
            return False
        if now.name == _LOOP and now.slept == then.slept:
            return False
    return True


def watch(flights: Sequence[Flight]) -> None:
    """The groups were aborted: from now on somebody looks, until nothing flies any more."""
    if not flights or os.environ.get(LAZY, "0") not in ("", "0"):
        return
    looking = threading.Thread(target=free, args=(flights,), name="keepstep-free", daemon=True)
    # Without a thread to be had, all is as it was without this file; the abort has more to do.
    with contextlib.suppress(RuntimeError):
        looking.start()


def free(flights: Sequence[Flight]) -> None:
    """End what is lost, once nothing moves any more."""
    deadline = time.monotonic() + FOR_SECONDS_MAX
    time.sleep(GRACE_SECONDS)
    before = look()
    while _flying(flights) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        after = look()
        if still(before, after):
            for flight in flights:
                flight.swap.release(flight.number, LOST)
        before = after


def _flying(flights: Sequence[Flight]) -> int:
    return sum(flight.swap.flying(flight.number) for flight in flights)
