"""The nouns: what a job, a node, a seat and a roster are. Frozen, standard library only.

The glossary in docs/concepts.md says what each word means; this file says what each thing holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

JobId = NewType("JobId", str)
NodeId = NewType("NodeId", str)
Rank = NewType("Rank", int)
Generation = NewType("Generation", int)
Term = NewType("Term", int)
OrderId = NewType("OrderId", str)
IncidentId = NewType("IncidentId", str)
MigrationId = NewType("MigrationId", str)

CHECK_STEPS = "KEEPSTEP_CHECK_STEPS"
"""In a job's environment: steps between two looks for corrupt state."""
EXIT_REQUEUE = 75
"""What a job ends with after a just-in-time checkpoint: run it again and it goes on there."""


TAINT_SECONDS = 24 * 3600.0
"""How long a taint lasts unless told otherwise: enough for somebody to look at the device."""
TAINT_SECONDS_MAX = 365 * 24 * 3600.0
REASON_CHARS_MAX = 500
"""Of a taint's reason: it stands in lists, logs and on the page."""
PATH_CHARS_MAX = 4096
"""Of a checkpoint's: as long as Linux takes one."""


class Phase(StrEnum):
    """The stages of a migration, in the order of the happy path."""

    WARM = "warm"
    """Planned only: the target gets ready to join while everybody trains on."""
    AGREE = "agree"
    """Planned only: all ranks say where they are, so that one boundary suits them all."""
    ALLOCATE = "allocate"
    QUIESCE = "quiesce"
    REFORM = "reform"
    TRANSFER = "transfer"
    VERIFY = "verify"
    RESUME = "resume"
    DONE = "done"
    HOLD = "hold"
    SAVE = "save"
    FALLBACK = "fallback"
    STOPPED = "stopped"


class Sign(StrEnum):
    """What an observation says happened."""

    EXIT = "exit"
    """The process is gone: a signal, or an exit code without a Python traceback."""
    EXCEPTION = "exception"
    """User code raised, and `detail` holds the traceback; or, with the exit code of SIGKILL, the
    kernel ended it for lack of memory."""
    FINISHED = "finished"
    """The worker ended its script in good order."""
    HANG = "hang"
    """The worker is known to hang (a health program or an operator says so)."""
    BROKEN = "broken"
    """A collective failed under a living worker: evidence that somebody else is gone."""
    CORRUPT = "corrupt"
    """A rank's state is not what it was, or not what other holders have."""
    STORE_LOST = "store_lost"
    """The process that hosts the generation's store is gone."""
    UNCOVERED = "uncovered"
    """What a rank keeps of another's portion leads no further. Nobody has to stop for it."""


class Severity(StrEnum):
    """How bad a place is that should not be used."""

    AVOID = "avoid"
    """Nothing new is placed there."""
    LEAVE = "leave"
    """Who is there moves, once there is room for all."""
    IMMINENT = "imminent"
    """Who is there moves now: the place is about to fail."""


class Mode(StrEnum):
    """What Keepstep does about a job's faults."""

    ACT = "act"
    """Ranks move, and the job goes on."""
    OBSERVE = "observe"
    """What would be done is written down, and nothing is done: the job fares as under torchrun
    without restarts."""


class Unit(StrEnum):
    """What is replaced as a whole when one rank of it fails."""

    DEVICE = "device"
    NODE = "node"
    DOMAIN = "domain"


class SameDomain(StrEnum):
    """Whether a rank's new place has to be in the NVLink domain of the old one."""

    REQUIRE = "require"
    """Only there; survivors hold until it has room."""
    PREFER = "prefer"
    """There if it has room, else anywhere."""
    SWAP_WHOLE = "swap_whole"
    """There if it has room, else all ranks of the domain move to another one together."""


class JobState(StrEnum):
    """Where a job is in its life."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    MIGRATING = "migrating"
    HELD = "held"
    PARKED = "parked"
    """Its boundary is saved and its devices serve another job; it goes on when there is room."""
    FINISHED = "finished"
    SAVED = "saved"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def over(self) -> bool:
        return self in (JobState.FINISHED, JobState.SAVED, JobState.FAILED, JobState.STOPPED)


@dataclass(frozen=True, slots=True)
class Policy:
    """What a job's owner may decide about faults. Seconds, each with its reason."""

    mode: Mode = Mode.ACT
    """Whether faults are acted upon, or Keepstep only writes down what it would do: the way to get
    to know it."""
    hold_seconds_max: float = 600.0
    """How long survivors wait for a spare before they save and leave: a reboot fits in."""
    silent_seconds_max: float = 3.5
    """A node that has something of this job and says nothing for this long is taken for lost; at
    least 1.2. Heartbeats come every 0.5 s, from 1,000 nodes on less often, up to 1.5 s."""
    restart_grace_seconds: float = 1.5
    """A closed agent stream beside a broken collective: an agent restart fits in this time."""
    hang_seconds_min: float = 4.0
    """No worker is called hung before this, however short its steps."""
    hang_steps: float = 4.0
    """Nor before this many median steps. With the settling time: decided within 5 s or 5 steps."""
    hang_settle_seconds: float = 0.4
    """How long the brain collects the nodes' stall reports before it names a laggard."""
    startup_seconds_max: float = 600.0
    """From the start of a worker to its first step: imports, data, compilation."""
    budget_seconds_min: float = 5.0
    """What a phase of a migration may take at least; whoever is later is replaced. Healthy ranks
    need well under a second, a starved machine a few."""
    budget_steps: float = 10.0
    """And at least this many median steps of the job: a rank in the middle of a long step is well.
    Where state moves, its bytes at half the measured bandwidth come on top."""
    transfer_attempts_max: int = 3
    """How many sources are tried before state counts as lost."""
    recoveries_max: int = 16
    """Generations one incident may burn: a recovery that never ends is a fault of its own."""
    leave_within_seconds: float = 600.0
    """A rank that shall leave waits for the others that shall leave too, but no longer than this:
    then it goes alone."""
    moving_ranks_max: int = 64
    """Ranks that a planned move takes along at once; the others go with the next one."""
    unit: Unit = Unit.DEVICE
    """What is replaced as a whole: a device, a node with all its ranks, an NVLink domain."""
    same_domain: SameDomain = SameDomain.PREFER
    """Whether a rank stays in its NVLink domain (node label `nvlink_domain`)."""
    lend: bool = True
    """Whether this job may be parked so that one of higher priority gets its devices."""
    lend_seconds_max: float = 86_400.0
    """How long it stays parked at most: then the borrower is parked, and it goes on."""
    borrow: bool = True
    """Whether jobs of lower priority may be parked when this one finds no other spare."""
    move_home: bool = False
    """Whether ranks go back to the node they started on, once it is well again."""
    encrypt_state: bool = False
    """Whether state that moves between workers is encrypted, with keys from the generation's own
    secret. Gradients are not: those are torch's; see docs/security.md."""
    home_clean_seconds: float = 1800.0
    """A node must be without a fault for this long before ranks go home to it; doubled with each
    relapse, up to a day."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What was asked for: the command line of `keepstep run`, settled."""

    job: JobId
    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    """True for `-m package.module`."""
    nodes: int = 1
    """How many nodes hold active ranks."""
    ranks_per_node: int = 1
    spares: int = 0
    """Standbys to keep warm, over all nodes."""
    priority: int = 0
    standby_level: int = 1
    preload: tuple[str, ...] = ()
    """Modules that the preload server imports before it forks, beside torch."""
    environment: dict[str, str] = field(default_factory=dict)
    directory: str = "."
    """Working directory of the workers."""
    log_directory: str = ""
    state_directory: str = ""
    """Where steps.jsonl and just-in-time checkpoints go; on shared storage for many nodes."""
    tee: bool = True
    terms: str = ""
    """The digest of the guarantee's terms that it runs under; empty: none were named."""
    project: str = ""
    """Whose it is: tokens of a project see and touch its own jobs only. Empty: nobody's but those
    who see everything."""
    policy: Policy = field(default_factory=Policy)

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place: which slot of which node, and the how-manieth worker on this rank."""

    rank: Rank
    node: NodeId
    slot: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where something listens."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Roster:
    """Who is which rank in one generation."""

    job: JobId
    generation: Generation
    secret: str
    """New with each generation: the old side cannot meet the new one."""
    store_node: NodeId
    """The node whose store process serves this generation's rendezvous."""
    mirror_stride: int
    """Rank r's private state has its second home with rank (r + stride) mod world size."""
    seats: tuple[Seat, ...]
    """Indexed by rank."""


@dataclass(frozen=True, slots=True)
class Move:
    """State for one rank: who receives, from whom. Stripes go over all the sources."""

    target: Rank
    sources: tuple[Rank, ...]
    wave: int = 0
    """Waves run one after another, so that the last home of a tensor is never overwritten."""
    staged: bool = False
    """Receive beside the old state and replace it only once verified."""
    portion: str = ""
    """What is moved: a portion's name says who holds it (keepstep.portion)."""
    rebuilt: bool = False
    """Nobody holds it: its mirror gives a capsule and the records since, and the target makes those
    steps again."""
