"""Places that are not to be used, and why: drained nodes, tainted nodes and devices.

    avoid      nothing new is placed there; who is there stays
    leave      ranks there move as soon as there is room for all of them, without hurry
    imminent   they move now, as many as there is room for; if the place dies first, that is an
               unplanned migration like any other

A taint has a reason, a source and an end. Each source has its own taint of a place, and the worst
of them counts: an alert that is resolved lifts what it said itself, never what an operator said.
A drain is an operator's word: it has no end, and takes a node out altogether.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from keepstep.model import REASON_CHARS_MAX, TAINT_SECONDS_MAX, NodeId, Severity
from keepstep.orchestrator import homes, planned, rules, spares
from keepstep.orchestrator.events import TaintAsked, UntaintAsked
from keepstep.orchestrator.state import (
    Cluster,
    Job,
    NodeState,
    Taint,
    place_key,
    put_taint,
)
from keepstep.orchestrator.turn import Turn
from keepstep.wire import Health

HEALTH = "health"
"""The source of what nodes' health programs say."""

# ---------------------------------------------------------------- drains


def drain(turn: Turn, node: NodeId, why: str) -> None:
    """Nothing new comes here, and what is here leaves as soon as it can."""
    state = turn.cluster.nodes.get(node)
    if state is None:
        turn.ignore(f"no node is called {node}")
        return
    if not state.drained:
        state.drained = why
        turn.cluster.drained = (*turn.cluster.drained, node)
        turn.note(f"node {node} is drained: {why}")
    _clear_out(turn, state, -1, _drain_why(state), Severity.LEAVE)
    if not turn.touched:
        turn.ignore(f"node {node} is drained already")


def undrain(turn: Turn, node: NodeId) -> None:
    state = turn.cluster.nodes.get(node)
    if state is None or not state.drained:
        turn.ignore(f"node {node} is not drained")
        return
    why = _drain_why(state)
    state.drained = ""
    turn.cluster.drained = tuple(n for n in turn.cluster.drained if n != node)
    turn.note(f"node {node} may be used again")
    _withdraw(turn, why)


def _drain_why(state: NodeState) -> str:
    return f"{state.node} is drained: {state.drained}"


# ---------------------------------------------------------------- taints


def taint(turn: Turn, event: TaintAsked) -> None:
    """From now on there is a reason not to use this place."""
    state = turn.cluster.nodes.get(event.node)
    place = place_key(event.node, event.slot)
    if state is None or event.slot >= state.slots:
        turn.ignore(f"{place} is no place in this cluster")
        return
    before = _said_by(turn, place, event.source)
    new = Taint(event.reason, turn.now, turn.now + event.seconds, event.severity, event.source)
    renewed = before is not None and _same(before, new)
    said = f"({new.severity}, by {new.source}): {new.reason}, for {event.seconds:g} s"
    if before is None:
        turn.note(f"{place} is tainted {said}")
    elif not renewed:
        turn.note(f"{place} is tainted {said}")
        _replace_wishes(turn, place, before, new)
    elif before.until < new.until:
        turn.note(f"{place} stays tainted {said}")
        new = replace(new, at=before.at)
    else:
        turn.ignore(f"{place} is tainted already: {before.reason}")
        return
    put_taint(turn.cluster, place, new)
    if not renewed and new.severity is not Severity.AVOID:
        homes.found_bad(state, turn.now)
    _clear_out(turn, state, event.slot, _why(place, new), event.severity, again=renewed)


def untaint(turn: Turn, event: UntaintAsked) -> None:
    """A source takes back its own word; without a source, everybody's."""
    place = place_key(event.node, event.slot)
    known = turn.cluster.taints.get(place, ())
    gone = [taint for taint in known if event.source in ("", taint.source)]
    if gone:
        _lift(turn, place, gone)
    else:
        by = f" by {event.source}" if event.source else ""
        turn.ignore(f"{place} is not tainted{by}")


def health(turn: Turn, state: NodeState, event: Health) -> None:
    """A node's health program speaks for the whole node: what it said before is replaced."""
    bad = place_key(state.node, event.slot) if event.severity is not None else ""
    for place in (place_key(state.node, slot) for slot in range(-1, state.slots)):
        before = _said_by(turn, place, HEALTH)
        if before is not None and place != bad:
            _lift(turn, place, [before])
    if event.severity is not None:
        reason = event.reason[:REASON_CHARS_MAX]
        seconds = min(event.seconds, TAINT_SECONDS_MAX)
        taint(turn, TaintAsked(state.node, reason, event.severity, event.slot, HEALTH, seconds))
    elif not turn.touched:
        turn.ignore(f"{state.node} is well, by its health program")


def tick(turn: Turn) -> None:
    """Taints whose time is over."""
    for place, taints in sorted(turn.cluster.taints.items()):
        over = [taint for taint in taints if turn.now >= taint.until]
        if over:
            _lift(turn, place, over, expired=True)
    # A rank that came back to such a place, by a fault of its target, has to leave again.
    for node in turn.cluster.drained:
        state = turn.cluster.nodes[node]
        if state.uses:
            _clear_out(turn, state, -1, _drain_why(state), Severity.LEAVE, again=True)
    for place, taints in sorted(turn.cluster.taints.items()):
        name, _, slot = place.partition("/")
        there = turn.cluster.nodes.get(NodeId(name))
        if there is None or not there.uses:
            continue
        for taint in taints:
            if taint.severity is not Severity.AVOID:
                at = int(slot) if slot else -1
                _clear_out(turn, there, at, _why(place, taint), taint.severity, again=True)


def _said_by(turn: Turn, place: str, source: str) -> Taint | None:
    known = turn.cluster.taints.get(place, ())
    return next((taint for taint in known if taint.source == source), None)


def _same(left: Taint, right: Taint) -> bool:
    return (left.reason, left.severity, left.source) == (right.reason, right.severity, right.source)


def _why(place: str, taint: Taint) -> str:
    return f"{place} is tainted: {taint.reason}"


def _replace_wishes(turn: Turn, place: str, before: Taint, new: Taint) -> None:
    if before.severity is not new.severity:
        _withdraw(turn, _why(place, before))
        return
    # A reading in the reason changes with each look: who waits for room keeps its place in the row.
    for name in turn.cluster.open_jobs:
        planned.reword(turn.cluster.jobs[name], _why(place, before), _why(place, new))


def _lift(turn: Turn, place: str, gone: Sequence[Taint], *, expired: bool = False) -> None:
    _drop(turn.cluster, place, gone)
    left = ", ".join(taint.source for taint in turn.cluster.taints.get(place, ()))
    still = f"; it is still tainted by {left}" if left else ""
    for taint in gone:
        if expired:
            said = f"the taint of {place} has expired"
        elif left:
            said = f"{place} is not tainted by {taint.source} any more"
        else:
            said = f"{place} is not tainted any more"
        turn.note(f"{said} (it was: {taint.reason}){still}")
        _withdraw(turn, _why(place, taint))


def _withdraw(turn: Turn, why: str) -> None:
    for name in turn.cluster.open_jobs:
        planned.withdraw(turn, turn.cluster.jobs[name], why)


def _drop(cluster: Cluster, place: str, gone: Iterable[Taint]) -> None:
    """These taints of a place do not hold any more."""
    lifted = {taint.source for taint in gone}
    left = tuple(taint for taint in cluster.taints[place] if taint.source not in lifted)
    if left:
        cluster.taints[place] = left
    else:
        del cluster.taints[place]


# ---------------------------------------------------------------- who is there


def _clear_out(
    turn: Turn, state: NodeState, slot: int, why: str, severity: Severity, *, again: bool = False
) -> None:
    """Standbys end, and ranks are asked to leave if the severity says so."""
    users = [user for at, user in state.uses.items() if slot in (-1, at) and not user.fenced]
    for name in sorted({user.job for user in users}):
        job = turn.cluster.jobs[name]
        if again and planned.refusal(job):
            continue
        if rules.aside(turn.cluster, job):
            # A standby of it, or who is to take a rank over, may be a rank by now. It is asked for
            # again when that is known.
            if not again:
                turn.note(f"{why}, and yet {name} stays: its ranks are not found yet", job)
            continue
        if not job.state.over:
            _clear_job(turn, job, state, slot, why, severity)


def _clear_job(
    turn: Turn, job: Job, state: NodeState, slot: int, why: str, severity: Severity
) -> None:
    for standby in [s for s in job.standbys.values() if s.node == state.node]:
        if slot in (-1, standby.slot):
            spares.drop_standby(turn, job, standby.node, standby.slot)
    planned.avoid(turn, job, state.node, slot)
    if severity is Severity.AVOID or job.roster is None:
        return
    if refusal := planned.refusal(job):
        turn.note(f"{why}, and yet its rank stays: {refusal}", job)
        return
    seats = [seat for seat in job.roster.seats if seat.node == state.node]
    ranks = [seat.rank for seat in seats if slot in (-1, seat.slot)]
    planned.wish(turn, job, ranks, why, urgent=severity is Severity.IMMINENT)
