"""What the brain knows: nodes, jobs, standbys, incidents, migrations. One value, owned by one turn.

The records that travel (seats, rosters, moves) are frozen. The few that grow with every message
are mutable and *owned*: `brain.step` takes the cluster, changes it, hands it back, and nobody else
may keep the old one. A frozen cluster would copy 16,384 reports for each of 2,048 messages.

Everything here goes through keepstep.codec, so a snapshot is exact and two states can be compared
byte for byte. The codec sorts keys: no decision may depend on the order of a mapping.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from keepstep import codec
from keepstep.model import (
    Generation,
    IncidentId,
    JobId,
    JobSpec,
    JobState,
    MigrationId,
    Move,
    NodeId,
    Phase,
    Rank,
    Roster,
    Seat,
    Severity,
    Sign,
    Term,
)
from keepstep.orchestrator.past import Past, Unissued
from keepstep.wire import Home, SeatReport

CLOSED_MAX = 1000
"""Closed incidents that stay in memory; the journal has them all."""
STORY_LINES_MAX = 200
STORY_LINES_CLOSED_MAX = 40
CAUSES_MAX = 64
SETTLED_MAX = 4
JOBS_OVER_MAX = 200
REQUESTS_MAX = 1000
LOANS_MAX = 1000
OUTAGES_MAX = 100
GAPS_MAX = 100
TERMS_MAX = 100
TAINTS_PER_PLACE_MAX = 16
DETAIL_CHARS_MAX = 8000


@dataclass(frozen=True, slots=True)
class Occupant:
    """Who uses a slot: a seat's worker, or a standby (rank -1)."""

    job: JobId
    rank: Rank = Rank(-1)
    incarnation: int = 0
    fenced: bool = False
    """Ordered to be killed; the slot is free once its death is seen."""


@dataclass(slots=True)
class NodeState:
    """A machine with one agent."""

    node: NodeId
    address: str
    slots: int
    peer_port: int
    store_port: int
    boot: str
    serial: int
    """The cluster's counter when this boot was first seen: memory made earlier is gone."""
    alive: bool = True
    linked: bool = True
    unlinked_at: float = 0.0
    silent_at: float = -1.0
    """When the heartbeats stopped; -1 while they come."""
    doubted: bool = False
    """It fell silent with many others: its silence is put down to ourselves until it is heard."""
    vouched_at: float = -1.0
    """When a job's steps last proved its ranks well, while its agent was not heard; -1: never."""
    store_good: bool = True
    drained: str = ""
    """Why nothing may be placed here any more; empty: it may."""
    uses: dict[int, Occupant] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    shares: str = ""
    """What it is lost together with, by its labels; empty: nobody said. Asked for each seat of each
    generation, so it is kept."""
    faults: int = 0
    """How often it was lost or found bad: the more, the longer until ranks go home to it."""
    fault_at: float = 0.0
    """When it was lost or found bad last, or when it came back from that."""
    left: bool = False
    """Not alive, but in good order: its stream was closed, and no rank was there."""


@dataclass(frozen=True, slots=True)
class Standby:
    """A parked worker, ordered or ready."""

    node: NodeId
    slot: int
    serial: int
    ready: bool = False
    level: int = 1


@dataclass(frozen=True, slots=True)
class Taint:
    """A recorded reason not to use a node or a device: one per place and source."""

    reason: str
    at: float
    until: float
    severity: Severity = Severity.AVOID
    source: str = "keepstep"


@dataclass(frozen=True, slots=True)
class Cause:
    """What was seen of one rank (or node) in an incident."""

    sign: Sign
    rank: Rank = Rank(-1)
    node: NodeId = NodeId("")
    incarnation: int = 0
    step: int = -1
    exit_code: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One sentence of an incident's story."""

    at: float
    phase: str
    why: str


@dataclass(slots=True)
class Incident:
    """Observations judged to be one fault; the unit of reporting."""

    incident: IncidentId
    job: JobId
    opened_at: float
    closed_at: float = -1.0
    causes: tuple[Cause, ...] = ()
    causes_count: int = 0
    story: tuple[Line, ...] = ()
    outcome: str = ""
    """resumed | moved | abandoned | parked | fallback | restart | saved | failed | stopped; empty
    while it is open."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time spent in each phase."""
    generation: Generation = Generation(0)
    """The newest generation that this incident led to."""
    boundary: int = -1
    recoveries: int = 0
    late_seconds: float = 0.0
    """So long before it was opened the fault was there, and nobody could be told."""


@dataclass(frozen=True, slots=True)
class Outage:
    """A time in which nobody decided anything: no leader, or no journal."""

    at: float
    """When it ended."""
    seconds: float
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What REFORM or SAVE was told to do, kept so that it can be told again."""

    boundary: int
    digests: dict[str, str] = field(default_factory=dict)
    """Per portion: what its winners agreed on."""
    moves: tuple[Move, ...] = ()
    homes: tuple[Home, ...] = ()
    writers: dict[str, Rank] = field(default_factory=dict)
    path: str = ""
    winners: dict[str, tuple[Rank, ...]] = field(default_factory=dict)
    """Per portion: who holds it for sure."""
    names: str = ""
    """Of all portions, as portions.listed writes them."""
    bytes_max: int = 0
    """What the busiest rank sends or receives, over all waves."""
    groups_alike: bool = False


@dataclass(slots=True)
class Migration:
    """One attempt to move ranks (or, with nobody to move, to form the groups anew)."""

    migration: MigrationId
    kind: str
    """start | unplanned | planned."""
    purpose: str
    """recover | save | park | start | move."""
    phase: Phase
    phase_at: float
    began_at: float
    cold: bool = False
    """In RESUME: the workers were started from the top of the script, not from live state."""
    outcome: str = "resumed"
    settle_until: float = 0.0
    gone: dict[Rank, str] = field(default_factory=dict)
    """Seats without a worker, and why. Empty again once each has a joiner."""
    fences: dict[Rank, int] = field(default_factory=dict)
    """Incarnations whose death is awaited before anybody takes their seats."""
    fresh: dict[Rank, float] = field(default_factory=dict)
    """Joiners that have not reported yet, and when they were assigned: start-up takes longer."""
    reports: dict[Rank, SeatReport] = field(default_factory=dict)
    """This phase's reports. Grows by one entry per seat; replaced at each phase."""
    progress: dict[Rank, Phase] = field(default_factory=dict)
    busy: dict[Rank, float] = field(default_factory=dict)
    """Ranks that declared themselves busy, and until when their budget waits."""
    excluded: dict[Rank, int] = field(default_factory=dict)
    """Ranks that may have given bad state (or could not save), and how often."""
    joined: dict[Rank, int] = field(default_factory=dict)
    """Ranks that got a new worker in this migration, and its incarnation."""
    attempts: int = 0
    recoveries: int = 0
    counted_at: float = -1.0  # The last of them: deaths close to it are of the same fault.
    idle: int = 0
    """First steps that failed with nobody to blame."""
    plan: Plan | None = None
    hold_since: float = -1.0
    coming: dict[Rank, Seat] = field(default_factory=dict)
    """Planned: the seats that are being made warm while their ranks train on elsewhere."""
    warm: dict[Rank, SeatReport] = field(default_factory=dict)
    """What the workers of those seats said when they were ready."""
    leavers: dict[Rank, Seat] = field(default_factory=dict)
    """Planned: the old seats, with their workers waiting in case the new ones fail."""
    through: dict[Rank, int] = field(default_factory=dict)
    """Ranks whose workers ended in good order, before it or while others were asked to stop."""
    spared_until: float = 0.0
    """Nobody is late before this: the leader changed, or the cluster was frozen, and agents have to
    come back before their ranks can report."""
    agreed: int = -1
    """Planned: the boundary at which all ranks stop; -1: as soon as they can."""
    applying: tuple[Rank, ...] = ()
    """In QUIESCE: who was told to make the update that others have made."""
    apply_to: int = -1
    """The boundary that it leads to."""

    @property
    def saves(self) -> bool:
        """Nobody gets a seat any more: the boundary is written down."""
        return self.purpose in ("save", "park")


@dataclass(frozen=True, slots=True)
class Settled:
    """A roster that was told to train: its nodes' memory is where private state lives."""

    roster: Roster
    serial: int


@dataclass(frozen=True, slots=True)
class Stall:
    """A rank that stands still, as last reported."""

    incarnation: int
    step: int
    launched: int
    stopped: bool
    at: float


@dataclass(frozen=True, slots=True)
class Death:
    """How a rank died last, and how often in the same way at the same step."""

    step: int
    exit_code: int
    count: int


@dataclass(frozen=True, slots=True)
class Leave:
    """A wish: this worker's rank shall move, as soon as a target is warm."""

    incarnation: int
    why: str
    asked_at: float
    to: NodeId = NodeId("")
    """Only there; empty: the best spare."""
    waits: str = ""
    """Why it cannot begin yet."""
    urgent: bool = False
    """Goes even if others, who wish to go too, have to wait."""
    home: bool = False
    """Back to where it started: given up if that becomes a bad place."""


@dataclass(frozen=True, slots=True)
class Loan:
    """A job gives up its devices for one of higher priority, and gets them back later."""

    lender: JobId
    borrower: JobId
    devices: int
    """What the lender gave up."""
    needed: int
    """What of it the borrower asked for; the rest joined the pool."""
    asked_at: float
    began_at: float = -1.0
    """When the lender's state was saved and its devices were free."""
    ended_at: float = -1.0
    boundary: int = -1
    """Where the lender stopped, and goes on."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Entries that a node has obeyed, and that this journal does not have."""

    at: float
    node: NodeId
    term: Term
    first: int
    last: int


@dataclass(slots=True)
class Unsure:
    """A job whose agents know more than the journal: nothing is decided until it is found."""

    since: float
    why: str
    generation: Generation = Generation(0)
    """The highest that any agent has obeyed."""
    claims: dict[NodeId, tuple[Seat, ...]] = field(default_factory=dict)
    """The living workers that each agent listed last."""
    dead: tuple[Seat, ...] = ()
    """Whose end was told; their slots are not known, and -1."""
    told: bool = False
    """That it takes long."""


@dataclass(slots=True)
class Job:
    """One training run, many generations."""

    spec: JobSpec
    state: JobState
    since: float
    generation: Generation = Generation(0)
    roster: Roster | None = None
    """Of the newest generation, also while it is being formed."""
    promised: Generation = Generation(0)
    """The newest generation that any worker was told of; later ones have higher numbers."""
    incarnations: dict[Rank, int] = field(default_factory=dict)
    """The highest that a rank ever had, if its present worker has a lower one."""
    leaving: dict[Rank, Leave] = field(default_factory=dict)
    turn_at: float = -1.0
    """Since when it waits for its turn, because too many others migrate; -1: it does not."""
    leave_at: float = 0.0
    """Before this moment no planned move begins: the last one failed."""
    moves_failed: int = 0
    loan: Loan | None = None
    """This job is parked, or about to be, so that another one can go on."""
    lend_at: float = 0.0
    """Before this moment it is not asked to lend: the last time it could not save."""
    homes: dict[Rank, NodeId] = field(default_factory=dict)
    """The nodes that the ranks started on."""
    settled: tuple[Settled, ...] = ()
    places: tuple[NodeId, ...] = ()
    """Nodes of rosters that are not among these any more: they keep what its ranks left there."""
    portions: dict[str, int] = field(default_factory=dict)
    """Of its state, by name, since the workers were last started from the top, and how many ranks
    hold each. Empty: nobody told, and all state is one."""
    portions_told: bool = False
    covers: dict[str, Rank] = field(default_factory=dict)
    """Portions that one rank holds alone, and the mirror that can rebuild each of them."""
    """All ranks have said what they hold, so no portion is missing above."""
    begun: bool = False
    """Some rank committed a step since the workers were last started from the top."""
    step: int = -1
    """The newest boundary that the brain was told of; heartbeats know better."""
    step_seconds: float = 0.0
    """The slowest rank's median step, as last reported; 0: nothing is known since the start."""
    state_bytes: int = 0
    """What the largest rank holds, as last reported."""
    bytes_per_second: float = 0.0
    """What the slowest receiver of the last transfer got; 0: none was measured yet."""
    first_incarnation: int = 0
    """Above those of an earlier run of this job."""
    published_step: int = -1
    published_path: str = ""
    contaminated: tuple[int, ...] = ()
    """First and last of the steps in which a rank with corrupt state took part; empty: none."""
    finished: dict[Rank, int] = field(default_factory=dict)
    missing: dict[Rank, float] = field(default_factory=dict)
    """Seats that a reconnected agent did not list; believed dead at the moment given."""
    standbys: dict[str, Standby] = field(default_factory=dict)
    standby_losses: int = 0
    refill_at: float = 0.0
    incident: Incident | None = None
    migration: Migration | None = None
    broken_at: float = -1.0
    """When the first unexplained broken collective of this generation was seen."""
    broken_why: str = ""
    stalls: dict[Rank, Stall] = field(default_factory=dict)
    stalls_at: float = -1.0
    deaths: dict[Rank, Death] = field(default_factory=dict)
    exception: Cause | None = None
    """The last end that may be the program's own: user code raised, or ran out of memory."""
    observed: dict[str, float] = field(default_factory=dict)
    """In mode observe: what was told of and not acted upon, and when it was last seen."""
    detail: str = ""
    exit_code: int = 0
    incidents: int = 0
    fallbacks: int = 0
    unsure: Unsure | None = None
    unissued: tuple[Unissued, ...] = ()  # Until what has them is found, or ended by an operator.


@dataclass(slots=True)
class Cluster:
    """All the brain knows."""

    secret: str
    term: Term = Term(0)
    counter: int = 0
    """Ids are made from it: unique, and the same in every replay."""
    nodes: dict[NodeId, NodeState] = field(default_factory=dict)
    free: tuple[NodeId, ...] = ()
    """Living nodes with a free slot, in natural order."""
    doubtful: dict[NodeId, float] = field(default_factory=dict)
    """Living nodes whose stream is closed or whose heartbeats stopped, and since when."""
    given_up: dict[NodeId, float] = field(default_factory=dict)
    """Nodes with ranks, lost without a word of their peers, and when. Until they return."""
    drained: tuple[NodeId, ...] = ()
    """Nodes with a reason in NodeState.drained: a tick must not look at all nodes."""
    frozen: str = ""
    """Why nothing is decided at present; empty: things are."""
    frozen_at: float = 0.0
    led_at: float = -1.0  # When the present leader took over nodes of another; -1: of nobody.
    self_doubt: str = ""
    """Why silence is put down to ourselves at present; empty: it is not."""
    self_doubt_at: float = 0.0
    migrations_max: int = 0  # Jobs that may be moved at once, by the leader's settings; 0: any.
    forget_seconds: float = 0.0  # And after how long a node that is gone is forgotten; 0: never.
    forget_due: float = -1.0  # Nobody's time has come before this; -1: nobody waits for it.
    rules: int = 0  # By which it is decided, in this term: see rules.py.
    tree: bool = False  # The node where a generation meets speaks for all its ranks.
    jobs: dict[JobId, Job] = field(default_factory=dict)
    open_jobs: tuple[JobId, ...] = ()
    past: dict[JobId, Past] = field(default_factory=dict)  # Of names whose jobs are forgotten.
    past_number: int = 0  # The highest generation or incarnation of names that are forgotten, too.
    taints: dict[str, tuple[Taint, ...]] = field(default_factory=dict)
    """By place, the worst first: see `put_taint`. No place has an empty tuple."""
    requests: dict[str, int] = field(default_factory=dict)
    """Operators' requests that were followed, and when, by the counter: a repetition is known."""
    closed: tuple[Incident, ...] = ()
    """The last incidents, oldest first; and so are loans that are over, outages and gaps."""
    loans: tuple[Loan, ...] = ()
    outages: tuple[Outage, ...] = ()
    down_seconds: float = 0.0
    """All outages together, also those that are not in the list any more."""
    terms: dict[Term, int] = field(default_factory=dict)
    """Where the journal stood when each of the last terms began."""
    begun_with: dict[JobId, Generation] = field(default_factory=dict)
    """The newest generation of each open job when this term began."""
    gaps: tuple[Gap, ...] = ()
    ahead: dict[NodeId, int] = field(default_factory=dict)
    """Nodes that obeyed entries which this journal does not have, and the last of those; until
    they have obeyed one that it has."""
    behind_at: dict[NodeId, float] = field(default_factory=dict)
    """When a node last showed such entries: what had ended by then may have gone on in them."""
    shown: dict[NodeId, dict[JobId, Generation]] = field(default_factory=dict)
    """Who has workers of runs that this journal lacks, and showed that it was told of them."""

    def next(self) -> int:
        self.counter += 1
        return self.counter


def new_cluster(secret: str) -> Cluster:
    """An empty cluster. The secret is what generations' secrets are derived from."""
    return Cluster(secret=secret)


def to_plain(cluster: Cluster) -> Any:
    """A snapshot as plain JSON."""
    return codec.to_plain(cluster)


def from_plain(plain: object) -> Cluster:
    """Strictly read a snapshot."""
    return codec.from_plain(Cluster, plain)


def fingerprint(cluster: Cluster) -> str:
    """Equal for equal states: what a replay is checked against."""
    return hashlib.sha256(codec.dumps(to_plain(cluster))).hexdigest()


def generation_secret(cluster: Cluster, job: JobId, generation: Generation) -> str:
    """New with each generation, and the same in each replay."""
    return hashlib.sha256(f"{cluster.secret}/{job}/{generation}".encode()).hexdigest()[:32]


def in_migration(job: Job) -> tuple[Migration, Roster]:
    """The migration that a job is in, and the roster that it leads to."""
    assert job.migration is not None
    assert job.roster is not None
    return job.migration, job.roster


@lru_cache(maxsize=65_536)
def natural(name: str) -> tuple[str | int, ...]:
    """Sorts n2 before n10, as people read them."""
    return tuple(int(p) if p.isdigit() else p for p in re.split(r"(\d+)", name))


def next_incarnation(job: Job, seat: Seat) -> int:
    """One that no worker of this rank ever had: agents remember how each of them ended."""
    return 1 + max(seat.incarnation, job.incarnations.get(seat.rank, -1))


def place_key(node: NodeId, slot: int = -1) -> str:
    """A device, or without a slot the whole node: where a taint is."""
    return node if slot < 0 else slot_key(node, slot)


def slot_key(node: NodeId, slot: int) -> str:
    return f"{node}/{slot}"


def put_taint(cluster: Cluster, place: str, taint: Taint) -> None:
    """Record what one source says of a place. What others say of it stands beside it."""
    others = (other for other in cluster.taints.get(place, ()) if other.source != taint.source)
    mild = list(Severity)
    ordered = sorted((*others, taint), key=lambda t: (-mild.index(t.severity), t.source))
    cluster.taints[place] = tuple(ordered[:TAINTS_PER_PLACE_MAX])
