"""Names of jobs: what one keeps when its job is over, and when the job is forgotten. Pure.

    job is over -> 200 others end -> only its Past is left -> 20,000 names are newer -> gone

Agents remember the numbers that they obeyed, and how each worker ended, for longer than that. So a
name that is used again goes on above its own numbers; and one that is not known at all, above those
of all names that are gone. Must never: give out a number that an agent may remember, or let a
project have a name under which there is still something of another's.
"""

from __future__ import annotations

from keepstep.model import Generation, JobId
from keepstep.orchestrator.past import PAST_MAX, Past, Unissued
from keepstep.orchestrator.state import Cluster, Job, Occupant, next_incarnation

AT_ONCE = 10
"""A tenth of all names goes at once: to find the oldest takes a look at each."""
UNISSUED_MAX = 4
"""Of one name: each was skipped for another loss of the journal's end."""


class Owners:
    """Whose each name is, as far as it is known."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def get(self, name: str, /) -> str | None:
        """The project; empty: of none. None: nobody has, or had, a job of this name."""
        job = self._cluster.jobs.get(JobId(name))
        if job is not None:
            return job.spec.project
        past = self._cluster.past.get(JobId(name))
        return past.project if past is not None else None


def past_of(job: Job) -> Past:
    """What the next run under a job's name has to know."""
    first = job.first_incarnation
    if job.roster is not None:
        first = max(next_incarnation(job, seat) for seat in job.roster.seats)
    return Past(
        job.spec.project,
        job.since,
        job.generation,
        job.promised,
        first,
        job.published_step,
        job.published_path,
        job.contaminated,
        job.unissued,
    )


def go_on(cluster: Cluster, job: Job) -> None:
    """A new run takes its name's numbers and checkpoint over, if the name was used before."""
    name = job.spec.job
    before, past = cluster.jobs.get(name), cluster.past.pop(name, None)
    if before is not None:
        past = past_of(before)
    if past is not None:
        # The rerun goes on at the published checkpoint, and no old worker can meet a new one.
        job.generation, job.promised = past.generation, past.promised
        job.published_step, job.published_path = past.published_step, past.published_path
        job.contaminated = past.contaminated
        job.first_incarnation, job.unissued = past.first_incarnation, past.unissued
    last = cluster.past_number
    if last > min(job.promised, job.first_incarnation):
        skipped = Unissued(Generation(job.promised + 1), last, job.first_incarnation)
        job.unissued = (*job.unissued, skipped)[-UNISSUED_MAX:]
        job.promised = Generation(max(job.promised, last))


def first_incarnation(job: Job) -> int:
    """Of a run that starts from the top. Ends of those that were skipped may still be told."""
    return max([job.first_incarnation, *(skipped.last for skipped in job.unissued)])


def never_given_out(known: Job | Past | None, generation: Generation) -> bool:
    """Whether this journal never gave a generation out under a name, as far as that is known."""
    if known is None or generation > max(known.generation, known.promised):
        return True
    return any(skipped.first <= generation <= skipped.last for skipped in known.unissued)


def unknown(job: Job, user: Occupant) -> bool:
    """A worker under a job's name, of a run that this journal lacks: not one of ours to end."""
    at = user.incarnation
    return user.fenced and any(s.incarnation <= at < s.last for s in job.unissued)


def forget(cluster: Cluster, job: Job) -> None:
    """A job that is over makes room for others; its name does not."""
    del cluster.jobs[job.spec.job]
    cluster.past[job.spec.job] = past_of(job)
    if len(cluster.past) > PAST_MAX:
        oldest = sorted(cluster.past, key=lambda name: (cluster.past[name].ended_at, name))
        _let_go(cluster, frozenset(oldest[: len(oldest) - PAST_MAX + PAST_MAX // AT_ONCE]))


def _let_go(cluster: Cluster, gone: frozenset[JobId]) -> None:
    """Anybody may have these names from now on, so nothing may be left under them."""
    for name in gone:
        past = cluster.past.pop(name)
        highest = max(past.generation, past.promised, past.first_incarnation)
        cluster.past_number = max(cluster.past_number, highest)
    cluster.closed = tuple(one for one in cluster.closed if one.job not in gone)
    cluster.loans = tuple(
        loan for loan in cluster.loans if loan.lender not in gone and loan.borrower not in gone
    )
