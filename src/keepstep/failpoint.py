"""Named points at which a fault campaign may strike.

A campaign sets KEEPSTEP_FAILPOINTS to a directory and drops a file there named after a point
("rank-2-reform", "orchestrator-quiesce"). The process that reaches the point claims the file by
renaming it to "….hit" and waits there, so that the campaign can kill it, stop it or cut its
network at just this moment; it goes on when "….go" appears or its patience ends. Without the
variable, which is the case everywhere else, reaching a point costs one look-up.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

PATIENCE_SECONDS_MAX = 20.0


def reach(name: str) -> None:
    """Stop here if a campaign asked for it."""
    # Read anew each time: a forked worker imported this module before it had its environment.
    directory = os.environ.get("KEEPSTEP_FAILPOINTS")
    if not directory:
        return
    wanted = Path(directory) / name
    claimed = wanted.with_name(name + ".hit")
    try:
        action = wanted.read_text()
        os.rename(wanted, claimed)
    except OSError:
        return
    _act(action.strip(), wanted.with_name(name + ".go"))


def _act(action: str, go: Path) -> None:
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "gil":
            # PyDLL keeps the GIL: no other thread of this process runs while the call lasts.
            ctypes.PyDLL(None).sleep(3600)
        case "raise":
            raise ValueError("a user's mistake, made on purpose at a failpoint")
        case _:
            deadline = time.monotonic() + PATIENCE_SECONDS_MAX
            while not go.exists() and time.monotonic() < deadline:
                time.sleep(0.002)
