"""One strike: what was done to a running job, when, and what has to be looked at afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.errors import Permanent


class Missed(Permanent):
    """The window did not come: the process never reached its failpoint."""


@dataclass(frozen=True, slots=True)
class Flip:
    """A bit that was flipped at rest, and who has to be named for it."""

    rank: int
    """Whose memory it was: of a mirror, not of the owner."""
    place: str
    """NODE/SLOT, which has to be tainted."""
    step: int
    """The boundary at which it lay."""
    name: str
    """What it was, as an incident has to call it."""
    steps_max: int = 0
    """It has to be found so many steps later, where each rank looks at every step."""


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
    untaint: tuple[str, ...] = ()
    """Places that may be used again afterwards."""
    home: dict[int, str] = field(default_factory=dict)
    """Ranks that have to be on these nodes in the end."""
    loans: int = -1
    """A loan beyond these many has to be made, and repaid; -1: no loan is asked for."""
    one_incident: bool = False
    """However many fall, it is one fault."""
    flip: Flip | None = None
    """State was changed behind everybody's back."""
    takeover_seconds: float | None = None
    """From the strike at a leader, or its database, to the first wish that was on disk after it."""
