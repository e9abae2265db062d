"""The test of the tests: one protection switched off, so that a campaign must notice.

`keepstep lab chaos --sabotage NAME` sets KEEPSTEP_SABOTAGE for its processes. Nobody else does;
a process that finds it set says so on its first use.
"""

from __future__ import annotations

import functools
import os
import sys

NAMES = (
    "rng",
    "loader",
    "buffers",
    "fence",
    "digest",
    "reset",
    "fsdp-reset",
    "vote",
    "mirror",
    "phase",
)


@functools.cache
def off(protection: str) -> bool:
    """True when this protection is sabotaged. Read once per process and name."""
    assert protection in NAMES, f"no protection is called {protection!r}"
    chosen = os.environ.get("KEEPSTEP_SABOTAGE", "") == protection
    if chosen:
        sys.stderr.write(f"keepstep: protection {protection!r} is SWITCHED OFF (sabotage)\n")
    return chosen
