"""What would happen: a fault that did not, played on a copy of the cluster with the brain itself.

    rank:2        the rank's process is killed        node:n3     the node is lost
    domain:rack1  all nodes with that `nvlink_domain` are lost
    drain:n3      an operator drains the node

Nothing is journaled and nobody is told. A job that is only observed, and a cluster that is frozen,
are played as if they were not; the answer says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from keepstep import codec
from keepstep.errors import ConfigError
from keepstep.model import JobId, Mode, NodeId, Phase, Policy, Rank, Seat, Sign
from keepstep.orchestrator import brain, budgets, lending, nodes, observe, placing
from keepstep.orchestrator.copies import copy_of
from keepstep.orchestrator.events import DrainAsked
from keepstep.orchestrator.incidents import died
from keepstep.orchestrator.remedies import remedies
from keepstep.orchestrator.state import Cause, Cluster, Job, natural, slot_key
from keepstep.orchestrator.turn import Note, Turn

FAULTS_MAX = 8
"""In one question: each is played on a copy of the whole cluster."""
KINDS = "give rank:2, node:n3, domain:NAME or drain:n3"
RANK_CHARS_MAX = 9
"""More digits are no rank's, and thousands of them are more than int() reads."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What whoever asks may know of."""

    nodes: Collection[NodeId]
    job: Callable[[str], bool]

    def note(self, note: Note) -> bool:
        """One of no job may tell of a node, and with it of all who are there."""
        return bool(note.job) and self.job(note.job)


def policy_view(
    cluster: Cluster,
    name: JobId,
    faults: tuple[str, ...],
    now: float,
    seen: Seen | None = None,
) -> Any:
    """A job's policy, its present budgets, and what each of these faults would lead to.

    `seen` is what whoever asks may know of; None: everything.

    Raises ConfigError for a fault that cannot be: it says which can.
    """
    job = cluster.jobs[name]
    usual = codec.to_plain(Policy())
    values = codec.to_plain(job.spec.policy)
    told = faults or _usual_faults(job)
    if len(told) > FAULTS_MAX:
        raise ConfigError(f"{len(told)} faults in one question; ask for {FAULTS_MAX} at most")
    return {
        "job": name,
        "state": job.state.value,
        "frozen": cluster.frozen or None,
        "policy": {key: {"value": values[key], "default": usual[key]} for key in values},
        "step_seconds": job.step_seconds or None,
        "state_bytes": job.state_bytes or None,
        "bytes_per_second": job.bytes_per_second or None,
        "budgets": {
            phase.value: {"seconds": budget.seconds, "why": budget.why}
            for phase, budget in budgets.phases(job).items()
        },
        "forecasts": [forecast(cluster, name, text, now, seen) for text in told],
    }


def _usual_faults(job: Job) -> tuple[str, ...]:
    if job.roster is None or job.state.over:
        return ()
    return ("rank:0", f"node:{job.roster.seats[0].node}")


def forecast(
    cluster: Cluster, name: JobId, text: str, now: float, seen: Seen | None = None
) -> dict[str, Any]:
    """What one fault would lead to."""
    before = cluster.jobs[name]
    if before.roster is None or before.state.over:
        raise ConfigError(f"{name} does not run: nothing can happen to it; see `keepstep status`")
    copy = copy_of(cluster)
    copy.begun_with = {}
    copy.frozen = ""
    job = copy.jobs[name]
    job.spec = replace(job.spec, policy=replace(job.spec.policy, mode=Mode.ACT))
    notes = _play(copy, job, text, now, copy.nodes if seen is None else seen.nodes)
    notes += _borrow(copy, job, now)
    gone = sorted(job.migration.gone) if job.migration else []
    waits = [leave.waits for leave in job.leaving.values() if leave.waits]
    return {
        "fault": text,
        "outcome": _outcome(job, bool(waits)),
        "says": [note.why for note in notes if seen is None or seen.note(note)],
        "moves": _moves(cluster, before, job),
        "without_spare": gone,
        "remedies": remedies(copy, job, now) if gone or waits else [],
    }


def _play(copy: Cluster, job: Job, text: str, now: float, seen: Collection[NodeId]) -> list[Note]:
    kind, _, what = text.partition(":")
    match kind:
        case "rank":
            return _kill(copy, job, what, now)
        case "node":
            return _lose(copy, [_known_node(seen, what)], now)
        case "domain":
            return _lose(copy, _known_domain(copy, what, seen), now)
        case "drain":
            asked = DrainAsked(_known_node(seen, what), "a drain")
            return list(brain.step(copy, asked, now).notes)
        case _:
            raise ConfigError(f"{text[:80]!r} is no fault; {KINDS}")


def _borrow(copy: Cluster, job: Job, now: float) -> list[Note]:
    """Which jobs of lower priority would give way, if there is no spare."""
    turn = Turn(copy, now)
    lending.seek(turn, job)
    return [note for note in turn.notes if note.job != job.spec.job]


def _kill(copy: Cluster, job: Job, what: str, now: float) -> list[Note]:
    assert job.roster is not None
    last = len(job.roster.seats) - 1
    number = what.isascii() and what.isdigit() and len(what) <= RANK_CHARS_MAX
    if not number or int(what) > last:
        raise ConfigError(f"{job.spec.job} has no rank {what[:80]!r}; its ranks are 0 to {last}")
    seat = job.roster.seats[int(what)]
    cause = Cause(Sign.EXIT, seat.rank, seat.node, seat.incarnation, job.step, -9)
    turn = Turn(copy, now)
    observe.fault(turn, job, died(cause))
    return turn.notes


def _known_node(seen: Collection[NodeId], name: str) -> NodeId:
    if NodeId(name) not in seen:
        listed = ", ".join(sorted(seen, key=natural)[:8])
        raise ConfigError(f"no node is called {name[:80]!r}; there are: {listed}")
    return NodeId(name)


def _known_domain(copy: Cluster, name: str, seen: Collection[NodeId]) -> list[NodeId]:
    there = {node: known.labels.get(placing.DOMAIN, "") for node, known in copy.nodes.items()}
    found = [node for node, domain in there.items() if domain == name]
    if not name or not any(node in seen for node in found):
        listed = ", ".join(sorted({there[node] for node in seen} - {""})[:8])
        raise ConfigError(
            f"no node is in a domain {name[:80]!r}; there are: "
            + (listed or f"none, as no agent has a label {placing.DOMAIN}")
        )
    return found


def _lose(copy: Cluster, lost: list[NodeId], now: float) -> list[Note]:
    """All at once: none of them is a spare for another."""
    turn = Turn(copy, now)
    for node in lost:
        copy.nodes[node].linked = False
    for node in sorted(lost, key=natural):
        if copy.nodes[node].alive:
            nodes.lose(turn, node, "supposed")
    return turn.notes


def _outcome(job: Job, waits: bool) -> str:
    """In one word."""
    moving = job.migration
    if job.state.over:
        return job.state.value
    if moving is not None and moving.outcome in ("fallback", "restart"):
        return moving.outcome
    if moving is not None and moving.phase is Phase.HOLD:
        return "hold"
    if waits:
        return "waits"
    return "nothing" if moving is None else "migrate"


def _moves(cluster: Cluster, before: Job, job: Job) -> list[dict[str, Any]]:
    """Which spare takes each rank, by comparing the seats."""
    assert before.roster is not None
    assert job.roster is not None
    after = {seat.rank: seat for seat in job.roster.seats}
    gone: dict[Rank, str] = {}
    if job.migration is not None:
        after |= job.migration.coming
        gone = job.migration.gone
    return [
        {
            "rank": seat.rank,
            "from": codec.to_plain(seat),
            "to": codec.to_plain(after[seat.rank]),
            "why": _why_there(cluster, before, seat, after[seat.rank]),
        }
        for seat in before.roster.seats
        if after[seat.rank].incarnation != seat.incarnation and seat.rank not in gone
    ]


def _why_there(cluster: Cluster, before: Job, seat: Seat, new: Seat) -> str:
    standby = before.standbys.get(slot_key(new.node, new.slot))
    if standby is not None:
        return "ready standby" if standby.ready else "standby, still warming up"
    if (new.node, new.slot) == (seat.node, seat.slot):
        return "its own slot: a new process there"
    user = cluster.nodes[new.node].uses.get(new.slot)
    if user is None:
        return "free slot: a process is started there"
    who = "a standby" if user.rank < 0 else f"rank {user.rank}"
    return f"the slot of {who} of {user.job}"
