"""Keepstep: distributed PyTorch training that keeps every step through faults.

The names below are the public ones; nothing else is promised. Importing this package does nothing
and needs nothing but the standard library: torch is imported when a training name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepstep.training.session import (
        Seat,
        Session,
        held_by,
        init_process_group,
        seeded,
        session,
    )

__version__ = "0.1.0"
__all__ = [
    "Seat",
    "Session",
    "__version__",
    "held_by",
    "init_process_group",
    "seeded",
    "session",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        try:
            training = importlib.import_module("keepstep.training.session")
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(
                f"keepstep.{name} needs PyTorch, which Keepstep never installs for you: "
                "pip install torch"
            ) from error
        return getattr(training, name)
    raise AttributeError(f"module 'keepstep' has no attribute {name!r}")
