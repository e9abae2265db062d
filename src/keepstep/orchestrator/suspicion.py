"""Suspect ourselves first: whose silence is more likely ours than theirs, and what else would prove
it. Pure.

    over 10 % of the nodes fall silent within 5 s   the cause is one that they share with us: our
                                                    own network, our own loop, a switch near us
    nobody at all is heard                          so, and there is nobody who could help
    anybody is silent within 30 s of taking over    they may not have found us yet

Such a node is not given up, whatever its silence lasts, before somebody else speaks against it:

    a broken collective     ranks elsewhere lost a peer, and nobody else turned out to be dead
    peers that stand still  ranks elsewhere make no step
    a node lost with it     another one of the same job, given up at about the same time, against
                            which peers spoke
    a taint                 an operator's or a monitor's word about this node, since it is silent
    a new boot              its Hello proves that the old one is gone (nodes.hello)

A few nodes of many are never put down to ourselves: clusters do lose two at once. Where those few
are all that there is, their silence counts against them after as long as a job holds for a spare:
somebody may wait for the job to end. Nodes without a seat need no evidence, since nobody is fenced
by giving them up, only some time.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, islice
from operator import attrgetter
from typing import NamedTuple

from keepstep.model import JobId, NodeId, Phase, Rank, Severity
from keepstep.orchestrator import budgets, policy
from keepstep.orchestrator.state import Cluster, Job, NodeState, place_key
from keepstep.orchestrator.turn import Turn

MASS_SHARE_MAX = 0.10
MASS_NODES_MIN = 3
"""Fewer are never put down to ourselves. From 30 nodes on it is the share that counts."""
WINDOW_SECONDS = 5.0
"""What falls silent within this time does so at once: a silent node is found within 5 s."""
LEADER_SECONDS = 30.0
"""After taking over. Agents look for the new leader with a back-off that ends well before."""
TERM_GRACE_SECONDS = 5.0
"""After a change of leader, or a freeze, agents have this long to come before their silence
counts."""
CULPRIT_SECONDS = 0.5
"""A broken collective beside a death is that death's: it is told within this time."""
UNSEATED_SECONDS_MAX = 15.0
"""How long a silent node without a seat stays in the books while we suspect ourselves."""

_SILENT_AT = attrgetter("silent_at")


def doubted(turn: Turn) -> frozenset[NodeId]:
    """The silent nodes whose silence we put down to ourselves.

    Who fell silent with many others stays among them when the others come back, or are given up.
    """
    cluster = turn.cluster
    for node in _crowd(cluster):
        if not cluster.nodes[node].doubted:
            cluster.nodes[node].doubted, turn.touched = True, True
    if led_lately(cluster, turn.now) or nobody_heard(cluster):
        return frozenset(cluster.doubtful)
    return frozenset(node for node in cluster.doubtful if cluster.nodes[node].doubted)


def nobody_heard(cluster: Cluster) -> bool:
    """The few nodes that we believe in are all silent: giving them up would end jobs that may
    train, with no node left to go on with. Once one is heard, the others get time to come, too, and
    are then as any that are silent (nodes.one_is_heard)."""
    few = 0 < len(cluster.doubtful) < MASS_NODES_MIN
    return few and all(state.node in cluster.doubtful for state in _alive(cluster))


def too_many(cluster: Cluster, silent: int) -> bool:
    """Whether so many at once are more likely our own fault."""
    if silent < MASS_NODES_MIN:
        return False
    if silent > _few_of(len(cluster.nodes)):
        return True
    # Counted no further than decides it: a few of many thousands is the usual case.
    enough = math.ceil(silent / MASS_SHARE_MAX) + 1
    alive = sum(1 for _ in islice(_alive(cluster), enough))
    return silent > _few_of(alive)


def in_a_crowd(turn: Turn, coming: int) -> bool:
    """Whether one who falls silent now does so with too many: those who are about to be missed as
    well, and those who were missed a moment ago. In the middle of a crowd neither are enough. Where
    it is the share that counts, those who were given up meanwhile are of it, too: else a network
    that fades loses all its nodes, one by one."""
    cluster, since = turn.cluster, max(turn.now - WINDOW_SECONDS, 0.0)
    if not too_many(cluster, coming + 1 + len(cluster.doubtful) + len(cluster.given_up)):
        return False
    gone: Iterable[float] = map(_SILENT_AT, map(cluster.nodes.__getitem__, cluster.doubtful))
    if len(cluster.nodes) * MASS_SHARE_MAX >= MASS_NODES_MIN:
        gone = chain(gone, cluster.given_up.values())
    # No line of Python per silent node, and no more of those who fell silent lately than decide it:
    # of thousands that do so together each one asks this.
    enough = max(_few_of(len(cluster.nodes)) - coming, 0)
    lately = len(list(islice(filter(since.__le__, gone), enough)))
    return too_many(cluster, coming + 1 + lately)


def _few(cluster: Cluster) -> int:
    """As many as may fall silent at once without our doubting ourselves."""
    return _few_of(sum(1 for _ in _alive(cluster)))


def _few_of(alive: int) -> int:
    return max(MASS_NODES_MIN - 1, int(alive * MASS_SHARE_MAX))


def _alive(cluster: Cluster) -> Iterator[NodeState]:
    return (state for state in cluster.nodes.values() if state.alive)


def _crowd(cluster: Cluster) -> Collection[NodeId]:
    """Those of the silent nodes that fell silent within one window with too many others."""
    if not too_many(cluster, len(cluster.doubtful)):
        return ()
    few = _few(cluster)
    moments = sorted(cluster.doubtful.values())
    if moments[-1] - moments[0] <= WINDOW_SECONDS:
        return cluster.doubtful
    crowded = [
        (first, moments[at + few])
        for at, first in enumerate(moments[: len(moments) - few])
        if moments[at + few] - first <= WINDOW_SECONDS
    ]
    return [node for node, at in cluster.doubtful.items() if _within(crowded, at)]


def _within(spans: list[tuple[float, float]], at: float) -> bool:
    """Whether a moment lies in one of these overlapping, sorted spans of too many."""
    before = bisect.bisect_right(spans, at, key=lambda span: span[0])
    return before > 0 and spans[before - 1][1] >= at


def led_lately(cluster: Cluster, now: float) -> bool:
    return cluster.led_at >= 0 and now < cluster.led_at + LEADER_SECONDS


def all_came(cluster: Cluster) -> bool:
    """Whether the agents of all nodes that we believe in are connected."""
    return all(cluster.nodes[node].linked for node in cluster.doubtful)


def yet_to_come(cluster: Cluster, now: float) -> bool:
    """Whether, shortly after a change of leader, agents are still on their way."""
    lately = cluster.led_at >= 0 and now < cluster.led_at + TERM_GRACE_SECONDS
    return lately and not all_came(cluster)


def knows_more(cluster: Cluster, job: Job, now: float) -> bool:
    """Whether somebody has yet to come who may know of a later generation than the journal does.

    A replica that was promoted may lack the end of it, and a number must not be given out twice. So
    the first generation of a term waits for the nodes that have a rank or a standby of the job,
    whom it needs anyway.
    """
    if not yet_to_come(cluster, now) or job.promised > cluster.begun_with.get(
        job.spec.job, job.promised - 1
    ):
        return False
    away = (state for node in cluster.doubtful if not (state := cluster.nodes[node]).linked)
    return any(user.job == job.spec.job for state in away for user in state.uses.values())


class Proof(NamedTuple):
    """What speaks against a silent node."""

    why: str
    by_peers: bool
    """Ranks elsewhere miss it: so they may miss others that fell silent with it."""


def evidence(cluster: Cluster, nodes: Iterable[NodeId], now: float) -> dict[NodeId, Proof]:
    """What else speaks against these silent nodes, for those against which something does."""
    of_job: dict[JobId, str] = {}
    found = {}
    for node in nodes:
        state, since = cluster.nodes[node], cluster.doubtful[node]
        why = ""
        for name in sorted(seated(cluster, state)):
            if name not in of_job:
                of_job[name] = _peers_say(cluster, cluster.jobs[name], now)
            why = why or of_job[name] or _lost_together(cluster, cluster.jobs[name], since)
        by_peers = bool(why)
        why = why or _tainted_since(cluster, node, since) or _too_long(cluster, state, now - since)
        if not why and now >= since + UNSEATED_SECONDS_MAX and not seated(cluster, state):
            why = "no rank is there"
        if why:
            found[node] = Proof(why, by_peers)
    return found


def seated(cluster: Cluster, state: NodeState) -> set[JobId]:
    """The open jobs that have ranks on a node."""
    return {
        user.job
        for user in state.uses.values()
        if user.rank >= 0 and not user.fenced and not cluster.jobs[user.job].state.over
    }


def _too_long(cluster: Cluster, state: NodeState, silent_seconds: float) -> str:
    """Of a cluster so small that nobody is left to speak against them."""
    jobs = seated(cluster, state)
    held = max((cluster.jobs[job].spec.policy.hold_seconds_max for job in jobs), default=math.inf)
    if silent_seconds < held or not nobody_heard(cluster):
        return ""
    return f"nobody has been heard for {held:g} s"


def _tainted_since(cluster: Cluster, node: NodeId, since: float) -> str:
    for taint in cluster.taints.get(place_key(node), ()):
        if taint.at >= since and taint.severity is not Severity.AVOID:
            return f"{taint.source} says: {taint.reason}"
    return ""


def _peers_say(cluster: Cluster, job: Job, now: float) -> str:
    """What ranks of a job on other nodes say of a peer that nobody else accounts for."""
    if job.migration is not None or job.roster is None:
        return ""
    if job.broken_at >= 0 and now >= job.broken_at + CULPRIT_SECONDS:
        return f"{job.spec.job} has broken collectives elsewhere"
    still = (
        rank
        for rank, stall in job.stalls.items()
        if now - stall.at <= policy.STALL_FRESH_SECONDS
        and job.roster.seats[rank].node not in cluster.doubtful
    )
    if job.stalls and next(still, None) is not None:
        return f"ranks of {job.spec.job} elsewhere stand still"
    return ""


def _lost_together(cluster: Cluster, job: Job, since: float) -> str:
    """The job's open incident began at about that time, with a lost node or with nobody to blame.

    A collective that broke, and for which no culprit was found, is one for which this node is. A
    node that no peer missed proves nothing: where our own network fades, the first few are too few
    for a doubt, and they would speak against all who follow.
    """
    incident = job.incident
    if incident is None or abs(incident.opened_at - since) > 2 * WINDOW_SECONDS:
        return ""
    for cause in incident.causes:
        if cause.rank < 0:
            return f"{job.spec.job} broke at that time, and nobody else is to blame"
        other = cluster.nodes.get(cause.node)
        gone = other is not None and not other.alive and not other.left
        if gone and cause.node not in cluster.given_up:
            return f"{job.spec.job} lost {cause.node} at that time"
    return ""


def tell(turn: Turn, waiting: Collection[NodeId], still: Collection[NodeId]) -> None:
    """Say once that we wait, and why; and once that we do not any more."""
    cluster = turn.cluster
    if waiting and not cluster.self_doubt:
        cluster.self_doubt, cluster.self_doubt_at = _sentence(cluster, waiting, turn.now), turn.now
        turn.note(cluster.self_doubt)
    elif cluster.self_doubt and not still:
        lasted = turn.now - cluster.self_doubt_at
        cluster.self_doubt, cluster.self_doubt_at = "", 0.0
        turn.note(f"we do not suspect ourselves any more, after {lasted:.1f} s")


def _sentence(cluster: Cluster, waiting: Collection[NodeId], now: float) -> str:
    alive = sum(1 for state in cluster.nodes.values() if state.alive)
    number = len(waiting)
    # No names: every project reads this. What fell silent is told where its node is.
    share = f"{100 * number / max(alive, 1):.0f} % of nodes" if number > 1 else "a node"
    when = f"within {WINDOW_SECONDS:g} s"
    if led_lately(cluster, now):
        when = f"within {LEADER_SECONDS:g} s of our taking the lead, or coming back"
    what = f"{share} fell silent {when}"
    if nobody_heard(cluster) and not led_lately(cluster, now):
        what = "no node at all is heard"
    return f"{what}: we suspect ourselves; waiting for second evidence"


def excuses(turn: Turn, job: Job) -> bool:
    """A phase is late, but only for ranks on nodes whose silence is put down to ourselves.

    Not for ever: the others wait at a boundary, as long as they would wait for a spare.
    """
    cluster, moving = turn.cluster, job.migration
    if not cluster.self_doubt or moving is None or moving.phase not in budgets.WAITS:
        return False
    if turn.now >= moving.phase_at + job.spec.policy.hold_seconds_max:
        return False
    if moving.phase is Phase.HOLD and turn.now >= budgets.hold(job):
        return False
    stops = moving.phase in (Phase.QUIESCE, Phase.HOLD)
    late = budgets.slow_to_quiesce(job, turn.now) if stops else budgets.silent_ranks(job)
    return bool(late) and not heard(cluster, job, late)


def heard(cluster: Cluster, job: Job, ranks: Iterable[Rank]) -> list[Rank]:
    """Those of these ranks whose nodes we hear, or whose silence is their own."""
    assert job.roster is not None
    seats, away = job.roster.seats, cluster.doubtful if cluster.self_doubt else {}
    return [rank for rank in ranks if seats[rank].node not in away]
