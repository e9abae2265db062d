"""Going home: ranks go back to the nodes they started on, once those are well again.

By an operator's word (`keepstep migrate --home`) at once, or by itself (policy `move_home`) after a
time without a fault that doubles with each relapse: a lemon gets its ranks back late.
"""

from __future__ import annotations

from keepstep.model import NodeId, Policy, Rank
from keepstep.orchestrator import planned, slots
from keepstep.orchestrator.state import Cluster, Job, NodeState
from keepstep.orchestrator.turn import Turn

CLEAN_SECONDS_MAX = 86_400.0
FORGIVEN_SECONDS = 7 * 86_400.0
"""After a week without a fault the next one counts as the first."""


def found_bad(state: NodeState, now: float) -> None:
    """A node was lost, or found bad: one more reason to wait before ranks go home to it."""
    forgiven = now - state.fault_at > FORGIVEN_SECONDS
    state.faults = 1 if forgiven else state.faults + 1
    state.fault_at = now


def worthy_at(state: NodeState, policy: Policy) -> float:
    """From when on ranks go home to this node by themselves, if nothing more happens to it."""
    if state.faults == 0:
        return 0.0
    doubled = policy.home_clean_seconds * 2.0 ** min(state.faults - 1, 30)
    return state.fault_at + min(doubled, CLEAN_SECONDS_MAX)


def away(job: Job) -> dict[NodeId, list[Rank]]:
    """Ranks that are not where they started, by the node that they started on."""
    found: dict[NodeId, list[Rank]] = {}
    for seat in job.roster.seats if job.roster else ():
        home = job.homes.get(seat.rank, seat.node)
        if home != seat.node:
            found.setdefault(home, []).append(seat.rank)
    return found


def go(turn: Turn, job: Job, why: str) -> None:
    """All ranks that can go home do, whatever happened there."""
    lost = away(job)
    if not lost:
        turn.ignore(f"all ranks of {job.spec.job} are where they started")
    for home, ranks in sorted(lost.items()):
        if reason := _shut(turn.cluster, home, turn.now) or _full(turn, job, home, len(ranks)):
            turn.note(f"rank {', '.join(map(str, ranks[:8]))} cannot go home: {reason}", job)
        else:
            planned.wish(turn, job, ranks, why, home, home=True)


def tick(turn: Turn) -> None:
    """Begin to go home where a job wishes so; forget it where home became a bad place."""
    for name in turn.cluster.open_jobs:
        job = turn.cluster.jobs[name]
        if not job.leaving and not job.spec.policy.move_home:
            continue
        homewards = [rank for rank, leave in job.leaving.items() if leave.home]
        for rank in sorted(homewards):
            if reason := _shut(turn.cluster, job.leaving[rank].to, turn.now):
                del job.leaving[rank]
                turn.note(f"rank {rank} stays where it is: {reason}", job)
        # Whoever waits for one certain place holds up nobody.
        stuck = all(leave.to and leave.waits for leave in job.leaving.values())
        if job.spec.policy.move_home and stuck and planned.steady(job):
            _by_itself(turn, job)


def _by_itself(turn: Turn, job: Job) -> None:
    if planned.refusal(job):
        return
    for home, ranks in sorted(away(job).items()):
        state = turn.cluster.nodes.get(home)
        if state is None or _shut(turn.cluster, home, turn.now):
            continue
        if turn.now >= worthy_at(state, job.spec.policy) and not _full(turn, job, home, len(ranks)):
            clean = (turn.now - state.fault_at) / 60
            since = f" for {clean:.0f} min" if state.faults else ""
            why = f"{home} is well{since}: its ranks go home"
            planned.wish(turn, job, ranks, why, home, home=True)


def _full(turn: Turn, job: Job, node: NodeId, wanted: int) -> str:
    """Why so many cannot go there just now; empty if they can."""
    room = slots.room(turn.cluster, turn.cluster.nodes[node], job.spec.job, turn.now)
    return "" if room >= wanted else f"{node} has room for {room}; free it, then ask again"


def _shut(cluster: Cluster, node: NodeId, now: float) -> str:
    """Why nobody can go there; empty if somebody can."""
    state = cluster.nodes.get(node)
    if state is None or not state.alive:
        return f"{node} is not here; bring it back first"
    if state.drained:
        return f"{node} is drained; `keepstep undrain {node}` first"
    if not slots.usable(state):
        return f"the agent of {node} is away; start it again first"
    if all(slots.tainted(cluster, node, slot, now) for slot in range(state.slots)):
        return f"{node} is tainted; `keepstep untaint` it first (see `keepstep taints`)"
    return ""
