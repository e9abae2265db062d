"""One strike: what was done to a running job, when, and what has to be looked at afterwards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Strike:
    """What was done, when (our monotonic clock), and to whom."""

    at: float
    pids: tuple[int, ...] = ()
    node: str = ""
    """The node that must refuse its old worker when it is back, if any."""
    forbidden: str = ""
    """A checkpoint that a fenced worker tried to publish: it must not become the newest."""
    tainted: str = ""
    """A node whose device is tainted by this fault and has to be replaced."""
    moved: tuple[int, ...] = ()
    """Ranks that were asked to move."""
    drained: tuple[str, ...] = ()
    """Nodes that have to be empty in the end; they are undrained afterwards."""
    power_off: bool = False
    """Once empty, they are switched off: nobody may notice."""
    lost: str = ""
    """A node that was taken away by the way, and has to come back."""
