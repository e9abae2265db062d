"""Which implementation of group swapping this process uses: C++ where built, else Python.

Must never: compile anything, or choose differently within one process.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keepstep.errors import ConfigError
from keepstep.training import loopback, swap_python
from keepstep.training.swap import build as swap_build


@dataclass(frozen=True)
class Parts:
    """What the two implementations have in common."""

    gate: Callable[[type[BaseException]], Any]
    swap: Callable[[int, int, Any, Any], Any]
    loopback: Callable[[int, int], Any]


def choose() -> Parts:
    wanted = os.environ.get("KEEPSTEP_GROUPS", "")
    if wanted not in ("", "cpp", "python"):
        raise ConfigError(f"KEEPSTEP_GROUPS={wanted!r}: use cpp or python, or leave it unset")
    python = Parts(swap_python.Gate, swap_python.SwapGroup, loopback.Loopback)
    if wanted == "python":
        return python
    built = swap_build.load()
    if built is not None:
        return Parts(built.Gate, built.SwapBackend, built.Loopback)
    advice = "build it with `python -m keepstep.training.swap.build`"
    if wanted == "cpp":
        raise ConfigError(
            f"KEEPSTEP_GROUPS=cpp, but {swap_build.library_path()} is missing: {advice}"
        )
    warnings.warn(
        f"no C++ swap for this torch, using the slower Python one: {advice}",
        RuntimeWarning,
        stacklevel=3,
    )
    return python
