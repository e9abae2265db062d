"""What takes a migration one step further, beside reports and the clock."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.orchestrator.events import Tick
from keepstep.orchestrator.incidents import Fault
from keepstep.wire import PhaseReport


@dataclass(frozen=True, slots=True)
class Room:
    """A slot or a standby became available."""


@dataclass(frozen=True, slots=True)
class SaveAsked:
    """Leave in good order: a boundary, a checkpoint of it, exit 75."""

    why: str


@dataclass(frozen=True, slots=True)
class RewindAsked:
    """Go back to the newest published checkpoint, and on from there."""

    why: str


@dataclass(frozen=True, slots=True)
class Thawed:
    """The cluster was frozen: what came in the meantime has not been weighed yet."""


Happening = Fault | PhaseReport | Room | SaveAsked | RewindAsked | Thawed | Tick
