"""A frozen cluster: until an operator unfreezes it, Keepstep decides nothing by itself.

For the hour in which a switch is replaced, or when Keepstep itself is under suspicion. Training
that works goes on. What agents see is recorded. But no node is given up, nobody is killed for being
late, no phase follows another, no move begins, and no standby is started. Survivors of a death wait
where they are. Orders that somebody gives (stop, save) are followed.

Afterwards all of it is taken up at once, with clocks that stood still in the meantime. Nodes that
are not heard at that moment get as long as after a change of leader to come back.
"""

from __future__ import annotations

from keepstep.orchestrator import budgets, clocks, migration, nodes, policy, suspicion
from keepstep.orchestrator.events import FreezeAsked
from keepstep.orchestrator.happenings import Thawed
from keepstep.orchestrator.turn import Turn


def freeze(turn: Turn, event: FreezeAsked) -> None:
    cluster = turn.cluster
    if cluster.frozen:
        turn.ignore(f"the cluster is frozen already: {cluster.frozen}")
        return
    cluster.frozen, cluster.frozen_at = event.why, turn.now
    turn.note(f"the cluster is frozen: {event.why}; nothing is decided until it is unfrozen")


def unfreeze(turn: Turn) -> None:
    """Clocks go on, and what was recorded meanwhile is weighed."""
    cluster = turn.cluster
    if not cluster.frozen:
        turn.ignore("the cluster is not frozen")
        return
    for name in cluster.open_jobs:
        job = cluster.jobs[name]
        if policy.stands_still(cluster, job):
            clocks.shift_job(turn, job, cluster.frozen_at, "frozen")
            budgets.spare(job, turn.now + suspicion.TERM_GRACE_SECONDS)
            # Who stood still then says so again within half a second, if it still does.
            job.stalls, job.stalls_at = {}, -1.0
    nodes.give_grace(turn, cluster.doubtful)
    lasted = turn.now - cluster.frozen_at
    cluster.frozen, cluster.frozen_at = "", 0.0
    turn.note(f"the cluster is not frozen any more, after {lasted:.0f} s")
    for name in cluster.open_jobs:
        migration.step(turn, cluster.jobs[name], Thawed())
