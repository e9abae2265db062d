"""What reaches the brain: messages of agents, and what its own loop notices. With a journal form.

An event is journaled with its `now` before the orders that it caused leave; reading the journal
back and stepping again gives the same state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from keepstep import codec
from keepstep.errors import ConfigError, WireError
from keepstep.model import TAINT_SECONDS, Generation, JobId, JobSpec, NodeId, Rank, Severity, Term
from keepstep.wire import Health, Hello, Observed, PhaseReport, Publish, Stalled, StandbyReport

VERSION = 2
"""Of what the journal keeps: of the events and of the state in a snapshot. Raised when either gets
what an earlier Keepstep could not read, once per release at most."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """Somebody wants this job to run."""

    spec: JobSpec
    by: str = ""
    """Whose token asked for it, here and in all that follow; empty in records of older versions."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """An operator, a SIGTERM or the wall time ends a job; with `save`, at a saved boundary."""

    job: JobId
    why: str
    save: bool = False
    by: str = ""
    rewind: bool = False
    """Not to end it: it goes back to its newest published checkpoint, and on from there."""


@dataclass(frozen=True, slots=True)
class MigrateAsked:
    """Somebody wants these ranks elsewhere, while their workers are alive and well."""

    job: JobId
    ranks: tuple[Rank, ...]
    why: str
    to: NodeId = NodeId("")
    """Only there; empty: the best spare."""
    home: bool = False
    """All ranks that are not where they started go back there; `ranks` is empty then."""
    request: str = ""
    """The same request again changes nothing; empty: this one is nobody's repetition."""
    cancel: bool = False
    """The opposite: these ranks need not move any more."""
    by: str = ""


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """A node shall become empty, and stay so until it is undrained."""

    node: NodeId
    why: str
    request: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True)
class UndrainAsked:
    """A drained node may be used again."""

    node: NodeId
    request: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True)
class ForgetAsked:
    """A node that is not here will not come back: it need not be remembered."""

    node: NodeId
    request: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True)
class TaintAsked:
    """There is a reason not to use a node, or one slot of it."""

    node: NodeId
    reason: str
    severity: Severity = Severity.AVOID
    slot: int = -1
    source: str = "operator"
    seconds: float = TAINT_SECONDS
    request: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True)
class UntaintAsked:
    """The reason does not hold any more."""

    node: NodeId
    slot: int = -1
    request: str = ""
    source: str = ""
    """Only what this source said; empty: whatever anybody said of this place."""
    by: str = ""


@dataclass(frozen=True, slots=True)
class FreezeAsked:
    """Until it is unfrozen Keepstep shall decide nothing by itself, in the whole cluster."""

    why: str
    request: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True)
class UnfreezeAsked:
    """What waited may go on."""

    request: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True)
class Reports:
    """Reports of one job that came together. Thousands of nodes are through a phase at once: one
    entry keeps what they say, and one step weighs it, report by report."""

    job: JobId
    reports: tuple[PhaseReport, ...]


@dataclass(frozen=True, slots=True)
class NodeSilent:
    """A node's heartbeats stopped."""

    node: NodeId
    crowd: int = 0
    """Others that are told of after it: missed in the same moment, or about to be."""


@dataclass(frozen=True, slots=True)
class NodeVouched:
    """A node says nothing, but a job with ranks there makes steps: its ranks are well."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class LinkLost:
    """An agent's stream closed. Its node may be well: agents restart."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""

    late_seconds: float = 0.0
    """So much later than it was due: our own loop was starved, and nobody else is to blame."""


@dataclass(frozen=True, slots=True)
class TermBegan:
    """A new leader: what is under way must be told again."""

    term: Term
    migrations_max: int = 0
    """By its settings: jobs that may be moved at once; 0: any number."""
    down_seconds: float = 0.0
    """So long nobody had written to the journal, by its own clock: nobody led."""
    seq: int = -1
    """Where the journal stood: nothing later is of an earlier term. -1: an older Keepstep wrote
    this and did not say."""
    tree: bool = False
    """Agents report through a tree. None does so far: the simulated fleet's do."""
    forget_seconds: float = 0.0
    """By its settings: after how long a node that is gone is forgotten; 0: never."""
    rules: int = 0
    """By which it decides: see rules.py. Older Keepsteps did not say."""


@dataclass(frozen=True, slots=True)
class ControlPlaneBack:
    """The journal could not be written for a while, and nothing was decided meanwhile."""

    seconds: float
    why: str
    sent_away: bool = False
    """It took longer than the lease, so all agents were sent away: they have to come again. False
    in records of older versions, whatever happened."""


@dataclass(frozen=True, slots=True)
class JournalBehind:
    """A node has obeyed what this journal does not have: it was restored from a copy, or its
    database lost what it had confirmed."""

    node: NodeId
    term_seen: Term
    seq_seen: int
    first: int
    """Of the entries that are missing, as far as this node knows: first to seq_seen."""
    obeyed: dict[str, Generation] = field(default_factory=dict)
    """As in its Hello."""


Asked = (
    Submitted
    | StopAsked
    | MigrateAsked
    | DrainAsked
    | UndrainAsked
    | ForgetAsked
    | TaintAsked
    | UntaintAsked
    | FreezeAsked
    | UnfreezeAsked
)
"""What somebody asked for: the journal names who."""

Event = (
    Hello
    | Observed
    | Stalled
    | PhaseReport
    | Reports
    | StandbyReport
    | Publish
    | Health
    | Submitted
    | StopAsked
    | MigrateAsked
    | DrainAsked
    | UndrainAsked
    | ForgetAsked
    | TaintAsked
    | UntaintAsked
    | FreezeAsked
    | UnfreezeAsked
    | NodeSilent
    | NodeVouched
    | LinkLost
    | Tick
    | TermBegan
    | ControlPlaneBack
    | JournalBehind
)

_KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Hello,
        Observed,
        Stalled,
        PhaseReport,
        Reports,
        StandbyReport,
        Publish,
        Health,
        Submitted,
        StopAsked,
        MigrateAsked,
        DrainAsked,
        UndrainAsked,
        ForgetAsked,
        TaintAsked,
        UntaintAsked,
        FreezeAsked,
        UnfreezeAsked,
        NodeSilent,
        NodeVouched,
        LinkLost,
        Tick,
        TermBegan,
        ControlPlaneBack,
        JournalBehind,
    )
}


def to_plain(event: Event) -> dict[str, Any]:
    """An event as the journal keeps it."""
    assert type(event).__name__ in _KINDS, f"{type(event).__name__} is no event of the brain"
    return {"kind": type(event).__name__, "body": codec.to_plain(event), "v": VERSION}


def from_plain(plain: object) -> Event:
    """Strictly read what `to_plain` wrote, in this version or an earlier one."""
    if not isinstance(plain, dict) or plain.keys() - {"v"} != {"kind", "body"}:
        raise WireError("an event is an object with kind and body")
    refuse_newer(plain)
    kind = _KINDS.get(plain["kind"]) if isinstance(plain["kind"], str) else None
    if kind is None:
        raise WireError(f"unknown event {plain['kind']!r}")
    event: Event = codec.from_plain(kind, plain["body"])
    return event


def refuse_newer(plain: Mapping[str, Any]) -> None:
    """An event or a snapshot of a later version: it may say what this one cannot understand."""
    version = plain.get("v", 1)
    if isinstance(version, int) and version > VERSION:
        raise ConfigError(
            f"the journal was written by a newer Keepstep (its version {version}; this one reads "
            f"up to {VERSION}): install that release here, or restore a backup from before it"
        )


def weight(event: Event) -> int:
    """How many events it is made of."""
    return len(event.reports) if isinstance(event, Reports) else 1


def job_of(event: Event) -> JobId | None:
    """The one job that an event is about; None for a node's or the cluster's events."""
    match event:
        case Submitted(spec=spec):
            return spec.job
        case Observed() | Stalled() | PhaseReport() | Reports() | StandbyReport() | Publish():
            return event.job
        case StopAsked() | MigrateAsked():
            return event.job
        case _:
            return None
