"""Every message between processes, its version, and how it is framed.

Three conversations: agent and orchestrator (one stream each), worker and agent (a Unix socket),
and anybody with an agent's peer port (fetching private state). All are JSON objects of the form
{"v": 2, "kind": "Quiesce", "body": {…}} behind a 4-byte length, strictly decoded by keepstep.codec,
never pickled. Receivers drop older terms and generations and say so.

This version and the one before it are spoken, so that a cluster can be upgraded node by node. What
the other side speaks at most is in the orchestrator's answer to an upgrade (OFFER), in an agent's
Hello and in a worker's WorkerHello. An older side is told what its version knew (wire_v1.py) and
nothing else; what it leaves out is read as the default. So a new field needs a default that means
what the older version does anyway, or it is NEEDED. docs/decisions/0041 says more.

The digest that compares state is named here because both sides of a wire must mean the same
function; its code is in keepstep/training/capsule.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from keepstep import codec, wire_v1
from keepstep.errors import WireError
from keepstep.model import (
    TAINT_SECONDS,
    Endpoint,
    Generation,
    JobId,
    JobSpec,
    Move,
    NodeId,
    OrderId,
    Phase,
    Rank,
    Seat,
    Severity,
    Sign,
    Term,
)

VERSION = 2
OLDEST = 1
"""The oldest version that is spoken: the one before."""
OFFER = "Keepstep-Wire"
"""The header with which an orchestrator says what it speaks: "1-2". One of version 1 sends none."""
DIGEST = "lane-poly-1"
FRAME_BYTES_MAX = 64 * 1024 * 1024
HELLO_BYTES_MAX, STRANGER_BYTES_MAX = 1024 * 1024, 16 * 1024
"""Of a frame whose sender is not known yet, and has shown something, or nothing."""

# ---------------------------------------------------------------- agent -> orchestrator


@dataclass(frozen=True, slots=True)
class WorkerFact:
    """A worker that an agent found alive, at its start or at a reconnect."""

    job: JobId
    rank: Rank
    slot: int
    incarnation: int
    generation: Generation


@dataclass(frozen=True, slots=True)
class StandbyFact:
    """A parked worker."""

    job: JobId
    slot: int
    level: int
    ready: bool


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of an agent's stream: who it is and what lives on its node."""

    node: NodeId
    address: str
    slots: int
    peer_port: int
    """Serves private state to a joiner: survives workers."""
    store_port: int
    """The node's store process: survives workers and the agent."""
    boot: str
    """Changes when the node lost its memory: rings of an older boot are gone."""
    workers: tuple[WorkerFact, ...] = ()
    standbys: tuple[StandbyFact, ...] = ()
    term_seen: Term = Term(0)
    token: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    seq_seen: int = 0
    """The newest entry of the journal whose order was obeyed here, in that term or before it."""
    obeyed: dict[str, Generation] = field(default_factory=dict)
    """By job, the highest generation whose orders were obeyed here: later ones get higher ones."""
    belongs: dict[str, str] = field(default_factory=dict)  # By job: that it knows (belonging.py).
    speaks: int = 1
    """The highest version of the wire that it speaks."""
    release: str = ""
    torch: str = ""  # As installed there; empty: none, or an older Keepstep, which does not say.
    keeps: tuple[str, ...] = ()  # Jobs of which its room holds something: are they over?


@dataclass(frozen=True, slots=True)
class JobPulse:
    """How a job fares on one node. Never stored."""

    job: JobId
    generation: Generation
    step: int
    committed: int
    step_seconds: float
    busy: str = ""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One per node and period, whatever the number of its workers. Never stored."""

    node: NodeId
    jobs: tuple[JobPulse, ...] = ()


@dataclass(frozen=True, slots=True)
class Observed:
    """One detector's reading about one rank (rank -1: about the node or the job)."""

    node: NodeId
    job: JobId
    sign: Sign
    rank: Rank = Rank(-1)
    incarnation: int = 0
    generation: Generation = Generation(0)
    step: int = -1
    exit_code: int = 0
    """Negative: the signal that ended the process."""
    detail: str = ""
    cover: str = ""
    """What is corrupt, or not up to date, is what it keeps of this portion."""
    age_seconds: float = 0.0
    """How long ago it was seen, on the clocks of those who kept it: nobody could be told."""


@dataclass(frozen=True, slots=True)
class StallFact:
    """A rank without progress, not busy by its own word."""

    rank: Rank
    incarnation: int
    step: int
    launched: int
    """Collectives launched in this generation; the rank with the fewest holds up the others."""
    stopped: bool = False
    """The kernel says that the process is stopped: no comparison needed."""


@dataclass(frozen=True, slots=True)
class Stalled:
    """The ranks of a job on this node that stand still. Who lags is judged over all nodes."""

    node: NodeId
    job: JobId
    generation: Generation
    ranks: tuple[StallFact, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Cover:
    """What a mirror keeps of a portion that one rank holds: enough to rebuild these boundaries."""

    portion: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class SeatReport:
    """What one rank says about itself at the end of a phase."""

    rank: Rank
    boundary: int = -1
    """The boundary at which its state is whole; -1 for a joiner that has none yet."""
    intact: bool = False
    """False: torn or empty; this rank is no source."""
    digests: dict[str, str] = field(default_factory=dict)
    """Per portion that it holds: over the portion's tensors, in the order of the registry."""
    ready: bool = False
    """It stands before the update of the step that begins at its boundary, with all gradients in
    hand: everybody's vote was asked and the answer is not known. It can still make the update."""
    portions: tuple[str, ...] = ()
    """What it holds, in RESUME; empty: not told."""
    entries: tuple[int, ...] = ()
    """Boundaries for which this rank holds its own private state."""
    state_bytes: int = 0
    step: int = -1
    unsettled: bool = False
    """True in the first step or two of a run: the engine has not laid out its buckets for good, so
    no joiner could sum in the same order. No step is committed by then: start anew."""
    step_seconds: float = 0.0
    """Its median step; in AGREE, QUIESCE and RESUME. 0: it has made none yet."""
    moved_bytes: int = 0
    """What it received; in VERIFY."""
    moved_seconds: float = 0.0
    """How long that took, from the first byte to the last digest."""
    groups: str = ""
    """A digest of its group log; in QUIESCE. Empty: it cannot say."""
    busy_seconds: float = 0.0
    """Above zero: not done yet, but declared busy for at most this long; budgets wait for it."""
    problem: str = ""
    """Why the phase could not be done on this rank; empty when all is well."""
    covers: tuple[Cover, ...] = ()
    """What it can rebuild of others, in QUIESCE and RESUME."""
    alike: str = ""
    """Ranks of which all of this is true, its own among them, named as a portion's holders are;
    empty: it speaks for itself. Nobody with a problem, a cover or business of its own is alike."""
    unsynced: tuple[str, ...] = ()
    """Portions that its update has changed in part: what other ranks updated has yet to come."""


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """What the ranks of one node say about a phase: aggregated, one message per node."""

    node: NodeId
    job: JobId
    generation: Generation
    phase: Phase
    """AGREE: where it is. QUIESCE: unwound (or, for a joiner, ready). VERIFY: state moved and
    digested. RESUME: the first step of the new generation is committed. SAVE: the just-in-time
    checkpoint is written."""
    seats: tuple[SeatReport, ...]


@dataclass(frozen=True, slots=True)
class StandbyReport:
    """A parked worker became ready, or was lost."""

    node: NodeId
    job: JobId
    slot: int
    level: int
    ready: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Publish:
    """A worker wants its checkpoint to be the newest: a compare-and-swap on the generation."""

    node: NodeId
    job: JobId
    generation: Generation
    rank: Rank
    step: int
    path: str
    request: str


@dataclass(frozen=True, slots=True)
class Health:
    """What the operator's health program says of its node: its newest word replaces the others."""

    node: NodeId
    severity: Severity | None
    """None: nothing is wrong."""
    reason: str = ""
    slot: int = -1
    """-1: the whole node."""
    seconds: float = TAINT_SECONDS
    """How long the word holds unless it is said again."""


# ---------------------------------------------------------------- orchestrator -> agent


@dataclass(frozen=True, slots=True)
class Membership:
    """What a worker has to know of a roster: not the roster, which has 16,384 seats."""

    world_size: int
    secret: str
    store: Endpoint
    mirror_stride: int


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """Start these seats' workers from the top of the user's script (first generation, fallback)."""

    spec: JobSpec
    seats: tuple[Seat, ...]
    membership: Membership
    resume_from: str = ""
    """A published checkpoint to start from; empty: the beginning."""


@dataclass(frozen=True, slots=True)
class StartStandby:
    """Warm a standby on this slot."""

    spec: JobSpec
    slot: int


@dataclass(frozen=True, slots=True)
class DropStandby:
    """End the standby on this slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class Home:
    """Where a rank's private state may be fetched."""

    rank: Rank
    endpoints: tuple[Endpoint, ...]
    secrets: tuple[str, ...] = ()
    """Of the generations in which those nodes sat: one that has no seat any more knows no newer."""


@dataclass(frozen=True, slots=True)
class Assign:
    """The standby on the seat's slot takes the seat, and gets ready to join."""

    spec: JobSpec
    seat: Seat
    membership: Membership
    homes: tuple[Home, ...] = ()
    """Where the seat's private state is: the joiner puts its data in order ahead of time."""
    forms: bool = False
    """All ranks are at a boundary, or about to be: begin to connect the groups."""


def joiner_environment(assign: Assign) -> dict[str, str]:
    """What a joiner is told beyond its seat, forked for it or parked before."""
    home = codec.dumps(codec.to_plain(assign.homes[0])).decode() if assign.homes else ""
    return {"KEEPSTEP_HOME": home, "KEEPSTEP_FORMS": "1" if assign.forms else ""}


@dataclass(frozen=True, slots=True)
class Fence:
    """Kill and reap these seats' workers. Safe to repeat; other incarnations are left alone."""

    seats: tuple[Seat, ...]


@dataclass(frozen=True, slots=True)
class Agree:
    """Say at which step you are, and train on: a boundary is sought that suits everybody."""


@dataclass(frozen=True, slots=True)
class Quiesce:
    """Leave the step for its boundary and wait there."""

    why: str
    at: int = -1
    """Train on to this boundary first; -1, or one that is behind you: leave the step at once."""
    leaving: tuple[Seat, ...] = ()
    """These workers' ranks are with others from now on. They wait, in case they are needed."""
    membership: Membership | None = None
    """Begin to connect the groups of this generation, on the way there if the boundary is ahead."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Others have made the update that leads to this boundary, so everybody had voted for it: make
    it too, if you stand before it, and report QUIESCE again from there."""

    boundary: int
    ranks: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class Reform:
    """Build the groups of the new generation, move state, digest it, report VERIFY."""

    membership: Membership
    boundary: int
    digests: dict[str, str]
    """Per portion: what every intact holder at the boundary agreed on."""
    moves: tuple[Move, ...]
    homes: tuple[Home, ...]
    """For ranks that must fetch their private state."""
    groups_alike: bool = False
    """All ranks have made the same groups: they need not meet to compare."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Train on from this boundary."""

    boundary: int


@dataclass(frozen=True, slots=True)
class Save:
    """Write a just-in-time checkpoint of this boundary, publish it, report SAVE."""

    boundary: int
    writers: dict[str, Rank]
    """Who writes each portion. The writer of the first one also writes what holds for all."""
    path: str
    homes: tuple[Home, ...]
    """For ranks that are gone: the writer fetches their private state."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the job's workers and standbys on this node."""

    exit_code: int
    why: str


Action = (
    StartWorkers
    | StartStandby
    | DropStandby
    | Assign
    | Fence
    | Agree
    | Quiesce
    | Apply
    | Reform
    | Resume
    | Save
    | Stop
)


@dataclass(frozen=True, slots=True)
class Order:
    """An instruction, fenced by term and generation, the same for all its nodes."""

    term: Term
    generation: Generation
    order_id: OrderId
    job: JobId
    nodes: tuple[NodeId, ...]
    action: Action
    seq: int = 0
    """Where the journal stood when it left: a node that obeys it has seen the journal so far."""


@dataclass(frozen=True, slots=True)
class Published:
    """The answer to Publish."""

    job: JobId
    request: str
    accepted: bool
    why: str


@dataclass(frozen=True, slots=True)
class Pulse:
    """The orchestrator's own heartbeat: its term, and the journal heads for the jobs' step logs."""

    term: Term
    heads: dict[str, str] = field(default_factory=dict)
    beat_seconds: float = 0.5
    """How often it wants to hear of the node: the more nodes, the more seldom."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Why the other side will not talk: a bad token, an older term, a fenced generation."""

    why: str


# ---------------------------------------------------------------- worker <-> agent


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """A worker (or standby, rank -1) connects, or reconnects to a restarted agent."""

    job: JobId
    slot: int
    pid: int
    rank: Rank = Rank(-1)
    incarnation: int = 0
    generation: Generation = Generation(0)
    level: int = 1
    speaks: int = 1
    """The version of the wire that its own code speaks: workers outlive an agent's upgrade."""


@dataclass(frozen=True, slots=True)
class StandbyReady:
    """A standby is parked and warm to its level."""

    job: JobId
    slot: int
    level: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One rank's part of a PhaseReport."""

    job: JobId
    generation: Generation
    phase: Phase
    seat: SeatReport


@dataclass(frozen=True, slots=True)
class WorkerBroken:
    """A collective failed; the worker waits at its boundary for orders."""

    job: JobId
    rank: Rank
    incarnation: int
    generation: Generation
    step: int
    detail: str
    corrupt: bool = False
    """No collective, but its own state: it is wrong."""
    cover: str = ""
    """Not even that, but what it keeps of this portion: wrong; or, not `corrupt`, out of date."""


@dataclass(frozen=True, slots=True)
class WorkerEnding:
    """The last words of a worker: what the exit code alone cannot say."""

    job: JobId
    rank: Rank
    incarnation: int
    generation: Generation
    sign: Sign
    step: int
    detail: str = ""


# ---------------------------------------------------------------- the peer port


@dataclass(frozen=True, slots=True)
class FetchEntry:
    """Ask a node for a rank's private state at a boundary; page.NEWEST: the newest it has."""

    job: JobId
    rank: Rank
    boundary: int
    secret: str


@dataclass(frozen=True, slots=True)
class Entry:
    """The answer; `payload` is base64, empty when the node has no such entry."""

    found: bool
    payload: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Greet:
    """The first word of a sealed conversation with a peer port (keepstep/sealed.py): the question
    and its answer travel inside."""

    job: JobId
    secret_id: str
    """Which of the job's secrets is meant, by digest."""
    word: str
    """Base64."""


@dataclass(frozen=True, slots=True)
class Word:
    """Each further one, in both directions: of the handshake, then sealed messages."""

    word: str


# ---------------------------------------------------------------- framing

_KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Hello,
        Heartbeat,
        Observed,
        Stalled,
        PhaseReport,
        StandbyReport,
        Publish,
        Health,
        Order,
        Published,
        Pulse,
        Refused,
        WorkerHello,
        StandbyReady,
        WorkerReport,
        WorkerBroken,
        WorkerEnding,
        FetchEntry,
        Entry,
        Greet,
        Word,
    )
}
_ACTIONS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        StartWorkers,
        StartStandby,
        DropStandby,
        Assign,
        Fence,
        Agree,
        Quiesce,
        Apply,
        Reform,
        Resume,
        Save,
        Stop,
    )
}

NEEDED = frozenset({"SeatReport.unsynced", "SeatReport.alike", "Policy.encrypt_state"})
"""What is newer than OLDEST and must not be left out, once it says anything: a message with it is
not sent to an older side. Half an update is no update; what is to be sealed must not go open."""

_V1 = codec.Older(wire_v1.FIELDS, wire_v1.MEMBERS, NEEDED)
Message = Any
_LENGTH = struct.Struct(">I")


def encode(message: Message, version: int = VERSION) -> bytes:
    """One frame: 4 bytes of length, then JSON. A WireError if that version has no word for it."""
    body = codec.dumps(to_plain(message, version))
    if len(body) > FRAME_BYTES_MAX:
        raise WireError(f"a {type(message).__name__} of {len(body)} bytes is over the limit")
    return _LENGTH.pack(len(body)) + body


def frames(order: Order, version: int = VERSION) -> Iterator[tuple[NodeId, bytes]]:
    """An order as each of its nodes gets it: encoded once, and addressed to that node alone.

    The names of 2,048 nodes would be most of it.
    """
    whole = codec.dumps(to_plain(replace(order, nodes=()), version))
    # Keys are sorted and the action comes first: the last one is the order's own. A quote inside
    # of a string is escaped.
    before, empty, after = whole.rpartition(b'"nodes":[]')
    assert empty, "an order has nodes"
    for node in order.nodes:
        body = b"".join((before, b'"nodes":', codec.dumps([node]), after))
        if len(body) > FRAME_BYTES_MAX:
            raise WireError(f"an order of {len(body)} bytes is over the limit")
        yield node, _LENGTH.pack(len(body)) + body


def decode(frame: bytes) -> Message:
    """The message in one frame's body (without its length)."""
    return from_plain(codec.loads(frame))


def to_plain(message: Message, version: int = VERSION) -> dict[str, Any]:
    """A message as plain JSON; an order's action carries its kind beside it."""
    plain: dict[str, Any] = {"v": version, "kind": type(message).__name__}
    if version == VERSION:
        body = codec.to_plain(message)
    else:
        assert version == OLDEST, f"version {version} is nobody's that we talk to"
        body = codec.to_older(message, _V1)
    if isinstance(message, Order):
        body["action"] = {"kind": type(message.action).__name__, "body": body["action"]}
    plain["body"] = body
    return plain


def from_plain(plain: object) -> Message:
    """Strictly read what `to_plain` wrote."""
    if not isinstance(plain, dict) or plain.keys() != {"v", "kind", "body"}:
        raise WireError("a message is an object with v, kind and body")
    version, name = plain["v"], plain["kind"]
    if type(version) is not int or not OLDEST <= version <= VERSION:
        raise WireError(why_not(version))
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        said = repr(name[:40]) if isinstance(name, str) else type(name).__name__
        raise WireError(f"unknown message {said}")
    if kind is not Order:
        return codec.from_plain(kind, plain["body"])
    return _order_from_plain(plain["body"])


def _order_from_plain(body: object) -> Order:
    if not isinstance(body, dict) or not isinstance(body.get("action"), dict):
        raise WireError("Order: needs an action")
    action = body["action"]
    name = action.get("kind")
    kind = _ACTIONS.get(name) if isinstance(name, str) else None
    if action.keys() != {"kind", "body"} or kind is None:
        said = repr(name[:40]) if isinstance(name, str) else type(name).__name__
        raise WireError(f"Order.action: unknown action {said}")
    done: Action = codec.from_plain(kind, action["body"])
    header = codec.from_plain(_OrderHeader, {k: v for k, v in body.items() if k != "action"})
    ids = (header.term, header.generation, header.order_id)
    return Order(*ids, header.job, header.nodes, done, header.seq)


@dataclass(frozen=True, slots=True)
class _OrderHeader:
    term: Term
    generation: Generation
    order_id: OrderId
    job: JobId
    nodes: tuple[NodeId, ...]
    seq: int = 0


def why_not(version: object) -> str:
    """Why there is no talking with a side that speaks this version at most, or nothing older."""
    said = version if isinstance(version, int) else type(version).__name__
    newer = isinstance(version, int) and version > VERSION
    which = "this side" if newer else "the side that speaks it"
    return (
        f"version {said} of the wire is not spoken here, only {OLDEST} to {VERSION}: upgrade "
        f"{which} first"
    )


def agreed(speaks: int) -> int:
    """The version to talk in with a side that speaks this one at most, and the one before it."""
    if speaks < OLDEST:
        raise WireError(why_not(speaks))
    return min(speaks, VERSION)


def offered(header: str) -> int:
    """The version to talk in with an orchestrator whose answer had this header (OFFER)."""
    oldest, _, newest = (header.strip() or "1-1").partition("-")
    if not (oldest.isdecimal() and newest.isdecimal()) or len(header) > 20:
        raise WireError(f"{OFFER}: {header[:40]!r} names no versions")
    if int(oldest) > VERSION:
        raise WireError(why_not(int(oldest)))
    return agreed(int(newest))


class _Reader(Protocol):
    async def readexactly(self, n: int, /) -> bytes: ...


async def read(stream: _Reader, bytes_max: int = FRAME_BYTES_MAX) -> Message:
    """The next message of an asyncio stream; raises asyncio.IncompleteReadError at its end.

    `bytes_max`: less, as long as nobody knows who is talking.
    """
    length = _frame_bytes(await stream.readexactly(_LENGTH.size), bytes_max)
    return decode(await stream.readexactly(length))


class Decoder:
    """Frames out of a byte stream that arrives in pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        messages: list[Message] = []
        # Most often a piece is one whole frame, and nothing has to be kept.
        known: bytes | bytearray = data
        if self._buffer:
            self._buffer += data
            known = self._buffer
        at, size = 0, len(known)
        while size - at >= _LENGTH.size:
            begin = at + _LENGTH.size
            end = begin + _frame_bytes(known[at:begin])
            if size < end:
                break
            messages.append(decode(bytes(known[begin:end])))
            at = end
        if known is data:
            self._buffer += data[at:]
        else:
            del self._buffer[:at]
        return messages


def _frame_bytes(prefix: bytes | bytearray, bytes_max: int = FRAME_BYTES_MAX) -> int:
    (length,) = _LENGTH.unpack(prefix)
    if length > bytes_max:
        raise WireError(f"a frame of {length} bytes is over the limit of {bytes_max}")
    return int(length)
