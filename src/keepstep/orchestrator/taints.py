"""Places that are not to be used, and why: drained nodes, tainted nodes and devices.

    avoid      nothing new is placed there; who is there stays
    leave      ranks there move as soon as there is room for all of them, without hurry
    imminent   they move now, as many as there is room for; if the place dies first, that is an
               unplanned migration like any other

A taint has a reason, a source and an end. A drain is an operator's word: it has no end, and takes
a node out altogether.
"""

from __future__ import annotations

from keepstep.model import NodeId, Severity
from keepstep.orchestrator import homes, planned, spares
from keepstep.orchestrator.events import TaintAsked, UntaintAsked
from keepstep.orchestrator.state import Job, NodeState, Taint, place_key
from keepstep.orchestrator.turn import Turn

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
    cluster = turn.cluster
    state = cluster.nodes.get(event.node)
    if state is None or event.slot >= state.slots:
        turn.ignore(f"{place_key(event.node, event.slot)} is no place in this cluster")
        return
    place = place_key(event.node, event.slot)
    before = cluster.taints.get(place)
    new = Taint(event.reason, turn.now, turn.now + event.seconds, event.severity, event.source)
    if before is not None and _same(before, new) and before.until >= new.until:
        turn.ignore(f"{place} is tainted already: {before.reason}")
        return
    cluster.taints[place] = new
    if before is None or not _same(before, new):
        said = f"{place} is tainted ({event.severity}, by {event.source}): {event.reason}"
        turn.note(f"{said}, for {event.seconds:g} s")
        if before is not None:
            _withdraw(turn, _why(place, before))
        if event.severity is not Severity.AVOID:
            homes.found_bad(state, turn.now)
    turn.touched = True
    _clear_out(turn, state, event.slot, _why(place, new), event.severity)


def untaint(turn: Turn, event: UntaintAsked) -> None:
    place = place_key(event.node, event.slot)
    gone = turn.cluster.taints.pop(place, None)
    if gone is None:
        turn.ignore(f"{place} is not tainted")
        return
    turn.note(f"{place} is not tainted any more (it was: {gone.reason})")
    _withdraw(turn, _why(place, gone))


def tick(turn: Turn) -> None:
    """Taints whose time is over."""
    over = [place for place, taint in turn.cluster.taints.items() if turn.now >= taint.until]
    for place in sorted(over):
        gone = turn.cluster.taints.pop(place)
        turn.note(f"the taint of {place} has expired (it was: {gone.reason})")
        _withdraw(turn, _why(place, gone))
    # A rank that came back to such a place, by a fault of its target, has to leave again.
    for node in turn.cluster.drained:
        state = turn.cluster.nodes[node]
        if state.uses:
            _clear_out(turn, state, -1, _drain_why(state), Severity.LEAVE, again=True)
    for place, taint in sorted(turn.cluster.taints.items()):
        name, _, slot = place.partition("/")
        there = turn.cluster.nodes.get(NodeId(name))
        if taint.severity is not Severity.AVOID and there is not None and there.uses:
            at = int(slot) if slot else -1
            _clear_out(turn, there, at, _why(place, taint), taint.severity, again=True)


def _same(left: Taint, right: Taint) -> bool:
    return (left.reason, left.severity, left.source) == (right.reason, right.severity, right.source)


def _why(place: str, taint: Taint) -> str:
    return f"{place} is tainted: {taint.reason}"


def _withdraw(turn: Turn, why: str) -> None:
    for name in turn.cluster.open_jobs:
        planned.withdraw(turn, turn.cluster.jobs[name], why)


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
