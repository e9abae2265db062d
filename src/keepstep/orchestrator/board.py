"""What the live page shows, as one small record: the brain's state in, a Board out. Pure.

The page draws and does not reckon: tones, marks, phases, paces and sentences are made here, by the
same functions that serve the terminal (shown.py, view.py). It has to be small at 12,500 nodes: a
node is a name, one letter for its mark and one letter per device; a job's ranks are one letter
each. Lists have lengths, and what was left out is counted.

    fleet.groups[g].nodes[i]   "n17"
    fleet.groups[g].marks[i]   one letter of fleet.marks: what is wrong with the node
    fleet.groups[g].cells[i]   "tttts.!-": one letter of fleet.cells per device
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from keepstep.model import JobId, JobState, NodeId, Phase, Severity
from keepstep.orchestrator import portions, remedies, shown, view
from keepstep.orchestrator.state import Cluster, Incident, Job, NodeState, natural, slot_key
from keepstep.wire import Heartbeat

GROUP_NODES_MAX = 64
"""Nodes without a rack are shown in blocks of so many."""
GROUP_LABELS = ("rack", "switch", "nvlink_domain")
"""The first of these that a node has says which block it is in."""
JOBS_MAX = 60
CLOSED_MAX = 12
STORY_LINES_MAX = 60
NOTES_MAX = 8
TAINTS_MAX = 100


@dataclass(frozen=True, slots=True)
class Key:
    """What one letter stands for."""

    word: str
    tone: str


CELLS: Mapping[str, Key] = {
    "t": Key("training", "good"),
    "m": Key("paused by an incident", "busy"),
    "b": Key("starting", "busy"),
    "h": Key("held: no spare", "bad"),
    "s": Key("standby, warm", "spare"),
    "w": Key("standby, warming", "busy"),
    ".": Key("free", "free"),
    "x": Key("fenced", "bad"),
    "!": Key("tainted, unused", "taint"),
    "T": Key("tainted, in use", "taint"),
    "-": Key("gone with its node", "dim"),
}
MARKS: Mapping[str, Key] = {
    ".": Key("ready", "good"),
    "L": Key("lost", "bad"),
    "l": Key("left", "dim"),
    "a": Key("agent away", "bad"),
    "d": Key("draining", "busy"),
    "e": Key("empty", "dim"),
    "t": Key("tainted", "taint"),
}
RANKS: Mapping[str, Key] = {
    "r": Key("running", "good"),
    "f": Key("finished", "dim"),
    "l": Key("leaving", "busy"),
    "p": Key("in a phase", "busy"),
    "d": Key("done with the phase", "good"),
    "j": Key("joining", "spare"),
    "x": Key("fencing", "bad"),
    "e": Key("empty", "bad"),
    "h": Key("held", "bad"),
    "w": Key("not started", "dim"),
}
_MARK_LETTERS = {key.word: letter for letter, key in MARKS.items()}
_RANK_LETTERS = {key.word: letter for letter, key in RANKS.items()}
_RANK_LETTERS |= {"migrating": "p", "waiting": "w", "starting": "w", "parked": "w"}
_natural = functools.lru_cache(1 << 16)(natural)
"""Names are compared again with each board, and there are 12,500 of them."""
_IN_USE = {JobState.RUNNING: "t", JobState.HELD: "h", JobState.MIGRATING: "m"}


@dataclass(frozen=True, slots=True)
class Account:
    """What the ledger says of a job to date. Nothing here is reckoned: where it keeps no account,
    there is none."""

    goodput: float | None = None
    """Useful over paid rank-seconds."""
    live_ratio: float | None = None
    """Failures resolved live with no lost progress, over all that count."""
    target_ratio: float | None = None
    """What was promised."""
    failures: int = 0
    """How many count."""


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that are shown together: a rack, mostly."""

    name: str
    nodes: tuple[str, ...]
    marks: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fleet:
    """Every node and device."""

    cells: dict[str, Key]
    marks: dict[str, Key]
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Count:
    """How many devices there are of one kind."""

    word: str
    tone: str
    many: int


@dataclass(frozen=True, slots=True)
class Totals:
    """The fleet in a few numbers."""

    nodes: int
    nodes_ready: int
    devices: int
    devices_training: int
    devices_free: int
    standbys_ready: int
    by_word: tuple[Count, ...]
    """Devices by what their letter stands for; what there is none of is left out."""


@dataclass(frozen=True, slots=True)
class Step:
    """One phase of a migration, as its line shows it."""

    name: str
    state: str
    """done | now | to come"""
    seconds: float


@dataclass(frozen=True, slots=True)
class Told:
    """One sentence of a story, and when it was said after the incident began."""

    after_seconds: float
    phase: str
    why: str


@dataclass(frozen=True, slots=True)
class Story:
    """One incident, as it happens or as it was."""

    id: str
    job: str
    outcome: str
    tone: str
    opened_at: float
    lasted_seconds: float
    """From the fault on; until now, if it is open."""
    pause_seconds: float | None
    """Of it, without training; known when it is over."""
    seen: tuple[str, ...]
    phases: tuple[Step, ...]
    told: tuple[Told, ...]
    told_before: int
    """Lines that were left out, before these."""


@dataclass(frozen=True, slots=True)
class JobCard:
    """One job."""

    id: str
    state: str
    tone: str
    mode: str
    over: bool
    since: float
    generation: int
    world: int
    pace: shown.Pace
    spares_ready: int
    spares_wanted: int
    incidents: int
    fallbacks: int
    uncovered: int
    ranks: str
    """One letter per rank; empty before it has a roster, and once it is over."""
    counts: dict[str, int]
    """Ranks by what their letter stands for."""
    notes: tuple[str, ...]
    """What an operator should know: what it waits for, and what would help."""
    account: Account | None


@dataclass(frozen=True, slots=True)
class TaintLine:
    place: str
    severity: Severity
    source: str
    reason: str
    left_seconds: float


@dataclass(frozen=True, slots=True)
class Frozen:
    why: str
    since: float


@dataclass(frozen=True, slots=True)
class Board:
    """One look at everything."""

    now: float
    term: int
    seq: int
    """Of the newest decision: /v1/events goes on from here."""
    trouble: str
    """Why this orchestrator should not be believed at present; empty: it leads."""
    frozen: Frozen | None
    totals: Totals
    rank_words: dict[str, Key]
    jobs: tuple[JobCard, ...]
    jobs_not_shown: int
    account: Account | None
    """Of all jobs together; a promise is kept or broken to one job's owner, so there is none."""
    open: tuple[Story, ...]
    closed: tuple[Story, ...]
    """The newest first."""
    taints: tuple[TaintLine, ...]
    taints_not_shown: int
    fleet_version: str
    """Changes with the fleet: who has this one need not be sent it again."""
    fleet: Fleet | None
    """None for those who have it already."""


@dataclass(frozen=True, slots=True)
class Around:
    """What only the running orchestrator knows."""

    now: float
    seq: int = 0
    trouble: str = ""
    heartbeats: Iterable[Heartbeat] = ()
    account: Callable[[JobId], Account | None] = field(default=lambda _: None)
    account_of_all: Account | None = None


def board(cluster: Cluster, around: Around, whole: Fleet, fleet_version: str = "") -> Board:
    """Everything that the page shows. The fleet is given: it changes less often than the rest."""
    now = around.now
    jobs = sorted(cluster.jobs.values(), key=_order)
    pulses = shown.pulses_by_job(around.heartbeats)
    ready = sum(s.ready for job in jobs if not job.state.over for s in job.standbys.values())
    places = sorted(cluster.taints.items(), key=lambda item: _natural(NodeId(item[0])))
    taints = [
        TaintLine(place, taint.severity, taint.source, taint.reason, max(0.0, taint.until - now))
        for place, held in places[:TAINTS_MAX]
        for taint in held[:1]
    ]
    stories = [story(i, job, now) for job in jobs if (i := job.incident) is not None]
    stories.sort(key=lambda told: -told.opened_at)
    newest = cluster.closed[: -CLOSED_MAX - 1 : -1]
    return Board(
        now=now,
        term=cluster.term,
        seq=around.seq,
        trouble=around.trouble,
        frozen=Frozen(cluster.frozen, cluster.frozen_at) if cluster.frozen else None,
        totals=_totals(whole, ready),
        rank_words=dict(RANKS),
        jobs=tuple(
            _card(cluster, job, shown.pace(job, pulses.get(job.spec.job, ())), around)
            for job in jobs[:JOBS_MAX]
        ),
        jobs_not_shown=max(0, len(jobs) - JOBS_MAX),
        account=around.account_of_all,
        open=tuple(stories),
        closed=tuple(story(i, cluster.jobs.get(i.job), now) for i in newest),
        taints=tuple(taints),
        taints_not_shown=max(0, len(places) - TAINTS_MAX),
        fleet_version=fleet_version,
        fleet=None,
    )


def _order(job: Job) -> tuple[bool, bool, int, float]:
    """Those in trouble first, then the largest; what is over comes last, the newest first."""
    over = job.state.over
    return over, job.state is JobState.RUNNING, -job.spec.world_size * (not over), -job.since


# ---------------------------------------------------------------- the fleet


def fleet(cluster: Cluster, connected: Collection[NodeId]) -> Fleet:
    """Every node in its rack, in the order in which people read their names."""
    racks: dict[str, list[NodeState]] = {}
    for name in sorted(cluster.nodes, key=_natural):
        node = cluster.nodes[name]
        labels = node.labels
        label = next((key for key in GROUP_LABELS if key in labels), "")
        racks.setdefault(f"{label} {labels[label]}" if label else "", []).append(node)
    used = {name: _IN_USE.get(cluster.jobs[name].state, "b") for name in cluster.open_jobs}
    tainted = {place.partition("/")[0] for place in cluster.taints}
    groups = []
    for rack, nodes in sorted(racks.items(), key=lambda item: _natural(NodeId(item[0]))):
        parts = [nodes]
        if not rack:
            at = range(0, len(nodes), GROUP_NODES_MAX)
            parts = [nodes[first : first + GROUP_NODES_MAX] for first in at]
        groups += [
            Group(
                rack or _block_name(part),
                tuple(node.node for node in part),
                "".join([_mark(cluster, node, connected) for node in part]),
                tuple([_cells(cluster, node, used, node.node in tainted) for node in part]),
            )
            for part in parts
        ]
    return Fleet(dict(CELLS), dict(MARKS), tuple(groups))


def _block_name(nodes: list[NodeState]) -> str:
    first, last = nodes[0].node, nodes[-1].node
    return str(first) if len(nodes) == 1 else f"{first} to {last}"


def _mark(cluster: Cluster, node: NodeState, connected: Collection[NodeId]) -> str:
    mark = shown.node_mark(
        alive=node.alive,
        left=node.left,
        connected=node.node in connected,
        drained=bool(node.drained),
        empty=not node.uses,
        tainted=node.node in cluster.taints,
    )
    return _MARK_LETTERS[mark or "ready"]


def _cells(cluster: Cluster, node: NodeState, used: Mapping[JobId, str], tainted: bool) -> str:
    """A letter per device. `tainted`: there is a taint somewhere on this node."""
    if not node.alive:
        return "-" * node.slots
    uses = node.uses
    if not tainted and len(uses) == node.slots:
        # Most nodes, most of the time: all devices train.
        letters = [used.get(u.job, "b") for u in uses.values() if u.rank >= 0 and not u.fenced]
        if len(letters) == node.slots and letters == letters[:1] * len(letters):
            return "".join(letters)
    return "".join([_cell(cluster, node, slot, used, tainted) for slot in range(node.slots)])


def _cell(
    cluster: Cluster, node: NodeState, slot: int, used: Mapping[JobId, str], tainted: bool
) -> str:
    user = node.uses.get(slot)
    if tainted:
        tainted = not cluster.taints.keys().isdisjoint((node.node, slot_key(node.node, slot)))
    if user is None:
        return "!" if tainted or node.drained else "."
    if user.fenced:
        return "x"
    if user.rank < 0:
        standby = cluster.jobs[user.job].standbys.get(slot_key(node.node, slot))
        return "s" if standby is not None and standby.ready else "w"
    return "T" if tainted else used.get(user.job, "b")


def _totals(whole: Fleet, ready: int) -> Totals:
    cells, marks = Counter[str](), Counter[str]()
    for group in whole.groups:
        cells.update("".join(group.cells))
        marks.update(group.marks)
    return Totals(
        nodes=sum(marks.values()),
        nodes_ready=marks["."],
        devices=sum(cells.values()),
        devices_training=cells["t"],
        devices_free=cells["."],
        standbys_ready=ready,
        by_word=tuple(
            Count(key.word, key.tone, cells[letter])
            for letter, key in CELLS.items()
            if cells[letter]
        ),
    )


# ---------------------------------------------------------------- jobs


def _card(cluster: Cluster, job: Job, pace: shown.Pace, around: Around) -> JobCard:
    spec, over = job.spec, job.state.over
    ranks = "" if over else rank_letters(job)
    counts = Counter(ranks)
    alone = 0 if over else len(portions.alone(job))
    return JobCard(
        id=spec.job,
        state=job.state.value,
        tone=shown.STATE_TONES.get(job.state.value, "dim"),
        mode=spec.policy.mode.value,
        over=over,
        since=job.since,
        generation=job.generation,
        world=spec.world_size,
        pace=pace,
        spares_ready=sum(1 for standby in job.standbys.values() if standby.ready),
        spares_wanted=spec.spares,
        incidents=job.incidents,
        fallbacks=job.fallbacks,
        uncovered=alone,
        ranks=ranks,
        counts={RANKS[letter].word: count for letter, count in sorted(counts.items())},
        notes=tuple(_notes(cluster, job, alone, around.now))[:NOTES_MAX],
        account=around.account(spec.job),
    )


def rank_letters(job: Job) -> str:
    """One letter per rank. While nothing happens that is one letter for all of them."""
    if job.roster is None:
        return ""
    if job.migration is None and not job.finished:
        return _RANK_LETTERS[job.state.value] * len(job.roster.seats)
    return "".join(_rank_letter(view.seat_phase(job, seat.rank)) for seat in job.roster.seats)


def _rank_letter(phase: str) -> str:
    if phase.endswith(": reported"):
        return "d"
    return _RANK_LETTERS.get(phase, "p")


def _notes(cluster: Cluster, job: Job, alone: int, now: float) -> Iterable[str]:
    """What the terminal says below a job's line."""
    if job.state.over:
        yield from job.detail.strip().splitlines()[-1:]
        return
    if job.loan is not None:
        yield f"lends {job.loan.devices} devices to {job.loan.borrower}"
    for rank, leave in sorted(job.leaving.items()):
        if leave.waits:
            yield f"rank {rank} shall move; {leave.waits}"
    if alone:
        yield f"state of {alone} ranks has no second home: the loss of one would be a fallback"
    for remedy in remedies.needed(cluster, job, now):
        yield f"what would help: {remedy}"


# ---------------------------------------------------------------- incidents


def story(incident: Incident, job: Job | None, now: float) -> Story:
    """One incident. `job` says where its migration is, while the incident is open."""
    plain = view.incident_view(incident)
    closed = incident.closed_at >= 0
    told = incident.story[-STORY_LINES_MAX:]
    moving = None if closed or job is None else job.migration
    stuck = moving is not None and moving.phase in (Phase.HOLD, Phase.FALLBACK)
    return Story(
        id=incident.incident,
        job=incident.job,
        outcome=plain["outcome"],
        tone="bad" if stuck else shown.outcome_tone(plain["outcome"]),
        opened_at=incident.opened_at,
        lasted_seconds=view.lasted_seconds(incident, now),
        pause_seconds=plain["pause_seconds"],
        seen=tuple(shown.cause_lines(plain)),
        phases=tuple(_steps(incident, None if closed else job, now)),
        told=tuple(
            Told(round(line.at - incident.opened_at, 3), line.phase, line.why) for line in told
        ),
        told_before=len(incident.story) - len(told),
    )


def _steps(incident: Incident, job: Job | None, now: float) -> Iterable[Step]:
    """Each phase that was, is, or is to come on the happy path."""
    seconds = dict(incident.seconds)
    moving = job.migration if job is not None else None
    kind = moving.kind if moving else ("planned" if Phase.WARM in seconds else "unplanned")
    path = list(shown.phases_of(kind))
    at = moving.phase.value if moving else ""
    if moving:
        seconds[at] = seconds.get(at, 0.0) + max(0.0, now - moving.phase_at)
    path += [name for name in seconds if name not in path]
    reached = path.index(at) if at in path else len(path)
    for number, name in enumerate(path):
        if name == at:
            yield Step(name, "now", seconds[name])
        elif name in seconds:
            yield Step(name, "done", seconds[name])
        elif number > reached or (moving and at not in shown.phases_of(kind)):
            yield Step(name, "to come", 0.0)
