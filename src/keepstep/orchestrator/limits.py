"""How many jobs may be moved at once, and who waits for its turn. Pure.

A switch that fails hits many jobs in the same second. Their migrations share a fabric, a storage
and a pool of spares, and all of them at once would be slower than a few at a time. So at most
`migrations_max` jobs (a setting of the orchestrator) are under way; the others wait, in the order
in which they came, and say so.

    unplanned   waits in ALLOCATE, and only for other unplanned ones: a move that could wait never
                holds up a job that stands still
    planned     waits before anything is warmed, for both kinds. One that has waited for
                `leave_within_seconds` waits for planned ones only: a storm does not starve it

Not counted, and never made to wait: starts, saves (somebody's explicit order), and jobs that hold
for lack of a spare. Those do nothing, and when room comes they go on at once: they had their turn.
Nor are jobs in doubt, which may stand still for ever: what they ask for is judged anew afterwards.
Per job there is one migration at a time by construction; a planned one moves at most
`moving_ranks_max` ranks (the job's policy), and the rest in the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from keepstep.model import JobState, Phase, Rank
from keepstep.orchestrator import placing, rules
from keepstep.orchestrator.state import Cluster, Job
from keepstep.orchestrator.turn import Turn

_IDLE = (Phase.ALLOCATE, Phase.HOLD, Phase.FALLBACK)


def under_way(cluster: Cluster, *, planned: bool) -> int:
    """Jobs of this kind that have had their turn and are not through."""
    return sum(
        1
        for job in _open(cluster)
        if (moving := job.migration) is not None
        and (moving.purpose == "move") is planned
        and moving.purpose in ("move", "recover")
        and moving.phase not in _IDLE
    )


def must_wait(turn: Turn, job: Job) -> bool:
    """Whether an unplanned migration has to wait for its turn; says so once."""
    cluster, moving = turn.cluster, job.migration
    assert moving is not None
    if not cluster.migrations_max or moving.saves:
        let_go(turn, job)
        return False
    waiting = [
        other
        for other in _waiting(cluster)
        if (theirs := other.migration) is not None
        and theirs.phase is Phase.ALLOCATE
        and not (theirs.saves or theirs.fences)
    ]
    return _waits(turn, job, under_way(cluster, planned=False), waiting)


def planned_must_wait(turn: Turn, job: Job) -> str:
    """Why a planned move has to wait for its turn; empty: it may begin."""
    cluster = turn.cluster
    if not cluster.migrations_max:
        return ""
    oldest = min(leave.asked_at for leave in job.leaving.values())
    busy = under_way(cluster, planned=True)
    if turn.now < oldest + job.spec.policy.leave_within_seconds:
        busy += under_way(cluster, planned=False)
    waiting = [
        other
        for other in _waiting(cluster)
        # One whose wish was taken back, or that cannot move now, holds up nobody.
        if other.migration is None and other.leaving and turn.now >= other.leave_at
        if other.state is JobState.RUNNING and not other.finished
    ]
    return _sentence(cluster) if _waits(turn, job, busy, waiting, tell=False) else ""


def _waits(turn: Turn, job: Job, busy: int, waiting: Sequence[Job], *, tell: bool = True) -> bool:
    mine = (job.turn_at if job.turn_at >= 0 else turn.now, job.spec.job)
    ahead = sum(1 for other in waiting if (other.turn_at, other.spec.job) < mine)
    if busy + ahead < turn.cluster.migrations_max:
        let_go(turn, job)
        return False
    if job.turn_at < 0:
        job.turn_at, turn.touched = turn.now, True
        if tell:
            turn.note(f"{job.spec.job} waits for its turn: {_sentence(turn.cluster)}", job)
    return True


def let_go(turn: Turn, job: Job) -> None:
    """It does not wait for its turn any more: it has it, or cannot use it now."""
    if job.turn_at >= 0:
        job.turn_at, turn.touched = -1.0, True


def _sentence(cluster: Cluster) -> str:
    return f"no more than {cluster.migrations_max} jobs migrate at once (migrations_max)"


def _open(cluster: Cluster) -> Iterator[Job]:
    jobs = map(cluster.jobs.__getitem__, cluster.open_jobs)
    return (job for job in jobs if not rules.aside(cluster, job))


def _waiting(cluster: Cluster) -> list[Job]:
    return [job for job in _open(cluster) if job.turn_at >= 0]


def first_ones(turn: Turn, job: Job, ranks: Sequence[Rank]) -> list[Rank]:
    """As many of these as may move at once. What is replaced as a whole is not cut apart."""
    limit = job.spec.policy.moving_ranks_max
    if len(ranks) <= limit:
        return list(ranks)
    search = placing.Search(turn.cluster, job, turn.now)
    chosen: dict[Rank, None] = {}
    asked = set(ranks)
    for rank in ranks:
        if len(chosen) >= limit:
            break
        chosen[rank] = None
        for other in sorted(placing.companions(search, (rank,)) & asked):
            chosen[other] = None
    return list(chosen)
