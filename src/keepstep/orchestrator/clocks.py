"""Clocks that stood still: time in which nobody could have been on time counts against nobody.

Three things stop the brain's clocks: our own loop was starved, and what others said in the meantime
is still unread; nobody led, or the journal was away; or an operator has frozen the cluster.
Afterwards every budget goes on with as much of it left as there was before.
"""

from __future__ import annotations

from keepstep.orchestrator import planned, policy
from keepstep.orchestrator.state import Job, Migration, NodeState
from keepstep.orchestrator.turn import Turn


def late(turn: Turn, seconds: float, part: str = "late") -> None:
    """Our own loop was late by so much; `part` is what the pause of a job is put down to."""
    cluster, since = turn.cluster, turn.now - seconds
    for node in cluster.doubtful if not cluster.frozen else ():
        _shift_node(turn, cluster.nodes[node], since)
    for name in cluster.open_jobs:
        if not policy.stands_still(cluster, cluster.jobs[name]):
            shift_job(turn, cluster.jobs[name], since, part)


def shift_job(turn: Turn, job: Job, since: float, part: str) -> None:
    """The clocks of a job stood still since then; `part` is what its pause is put down to."""
    if job.broken_at >= 0:
        job.broken_at = _later(job.broken_at, since, turn.now)
        turn.touched = True
    if job.migration is not None:
        _book(turn, job, job.migration, since, part)
        _shift_migration(job.migration, since, turn.now)
        turn.touched = True


def _later(at: float, since: float, now: float) -> float:
    """As far back from now as it was from `since`; a moment after that has not passed at all."""
    return at + max(0.0, now - max(at, since))


def _shift_migration(migration: Migration, since: float, now: float) -> None:
    migration.phase_at = _later(migration.phase_at, since, now)
    migration.fresh = {r: _later(at, since, now) for r, at in migration.fresh.items()}
    if migration.hold_since >= 0:
        migration.hold_since = _later(migration.hold_since, since, now)


def _shift_node(turn: Turn, state: NodeState, since: float) -> None:
    doubtful = turn.cluster.doubtful
    doubtful[state.node] = _later(doubtful[state.node], since, turn.now)
    state.unlinked_at = _later(state.unlinked_at, since, turn.now)
    if state.silent_at >= 0:
        state.silent_at = _later(state.silent_at, since, turn.now)
    turn.touched = True


def _book(turn: Turn, job: Job, migration: Migration, since: float, part: str) -> None:
    """Time that no phase will account for is still part of the incident."""
    if job.incident is None:
        return
    # Where everybody trains nothing is a pause.
    name = migration.phase.value if migration.phase in planned.TRAINING else part
    still = turn.now - max(migration.phase_at, since)
    job.incident.seconds[name] = job.incident.seconds.get(name, 0.0) + max(0.0, still)
