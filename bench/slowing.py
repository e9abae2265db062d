"""Makes one process slow: stopped and continued in slices, on the machine where it runs.

    python -m bench.slowing PID SECONDS STOPPED_SHARE

A process of its own beside its victim: slices of a twentieth of a second do not travel over ssh.
Whatever ends it, its time, a signal or a connection that is gone, it wakes the victim first. One
that somebody else has stopped is left alone, now and later: it hangs, and must not be woken.
Exit 0: somebody was slowed down. 3: nobody was there. Any other: it could not be done.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from bench.launch import is_stopped, is_zombie

SLICE_SECONDS = 0.05
NOBODY = 3
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(pid: int, seconds: float, stopped_share: float) -> int:
    # Blocked, and looked for in the pauses: so they never come between a stop and its end.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    stopped, hit, told = SLICE_SECONDS * stopped_share, False, False
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until and not told and not is_zombie(pid):
            if is_stopped(pid):
                break  # Not by us: we have woken it.
            os.kill(pid, signal.SIGSTOP)
            hit = True
            told = _pause(stopped)
            os.kill(pid, signal.SIGCONT)
            told = told or _pause(SLICE_SECONDS - stopped)
    except ProcessLookupError:
        pass  # It is gone, and what was done was done.
    return 0 if hit else NOBODY


def _pause(seconds: float) -> bool:
    """True: somebody wants an end of this."""
    return signal.sigtimedwait(ENDS, seconds) is not None


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))
