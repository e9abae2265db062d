"""A leader's lease outlives its loop's being late.

The loop makes its lease longer with every write, and writes when it has nothing to say. But one
turn of an event loop takes as long as all that came in together: thousands of handshakes after a
failover are seconds of it. A leader that loses its lease for that is replaced by one with the same
work before it, and a good deal more: they would depose each other for ever. So a thread looks at
the last write, and speaks for a loop that is late, on a connection of its own.

Must never: speak for a loop that is dead, that has not written for LATE_SECONDS_MAX, or whose last
write failed. Who is killed, stopped or cut off from the database loses the lease as before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from keepstep.errors import Transient
from keepstep.model import Term
from keepstep.orchestrator.journal import SharedJournal

LATE_SECONDS_MAX = 10.0
"""A loop that is late by more is taken for dead. Agents have left it by then, after 4 s."""
LEAVE_SECONDS_MAX = 0.5
"""For the thread to end. It may be connecting; it says nothing after that."""

Log = Callable[..., None]


def speaks(keeping: Mapping[str, Any], lease_seconds: float) -> bool:
    """Whether a loop that fares like this is late, and alive. In time it speaks for itself."""
    silent = float(keeping["written_seconds_ago"])
    return not keeping["away"] and lease_seconds / 2 < silent < LATE_SECONDS_MAX


@contextmanager
def kept(
    journal: SharedJournal, term: Term, keeping: Callable[[], Mapping[str, Any]], log: Log
) -> Iterator[None]:
    """While this term leads. `keeping` tells how its writer fares, and is asked from a thread."""
    lease = float(keeping()["lease_seconds"])
    over = threading.Event()

    def keep() -> None:
        line, lost = journal.lease_line(), False
        try:
            while not over.wait(lease / 4):
                try:
                    # In time: a leader that is late has none to connect.
                    line.ready()
                    told = keeping()
                    if over.is_set() or not speaks(told, lease):
                        continue
                    if line.prolong(term):
                        lost = False
                        log("lease.prolonged", late_seconds=round(told["written_seconds_ago"], 3))
                    elif not lost:
                        # Not the end of it: if nobody has taken over, the loop's next write leases
                        # anew, and it may be late again. Of another term it finds out itself.
                        lost = True
                        log("lease.lost", term=term)
                except (Transient, OSError, RuntimeError) as error:
                    # No file or thread to be had is a bad moment, too, and not the end of it.
                    log("lease.not_prolonged", why=str(error))
        finally:
            line.close()

    thread = threading.Thread(target=keep, name="keepstep-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LEAVE_SECONDS_MAX)
