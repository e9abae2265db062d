"""Which new jobs are let in: how many, how large, and with which policy.

A job that waits is not free: it is in the journal and in each snapshot, and whoever looks through
the open jobs looks at it. So there are bounds, and one project's jobs leave room for others'.

A job that is open already is not new, however often it is submitted. All its launchers say the
same, and they get the answer of the first, also where there is no room left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from keepstep import codec, policy_file
from keepstep.errors import ConfigError
from keepstep.model import JobId, JobSpec
from keepstep.orchestrator.http import BadRequest
from keepstep.orchestrator.state import Cluster
from keepstep.orchestrator.tokens import Caller

SPEC_BYTES_MAX = 256 * 1024
"""Of a job, as it is journaled. A command line and the variables that somebody named take a few
KiB, and none of them is longer than 4."""


def check(spec: JobSpec) -> None:
    """Raises BadRequest if a job of this size, or with this policy, is not let in."""
    size = len(codec.dumps(codec.to_plain(spec)))
    if size > SPEC_BYTES_MAX:
        fix = f"at most {SPEC_BYTES_MAX}: give long arguments and variables in a file"
        raise BadRequest(413, f"{spec.job} is described by {size} bytes", fix)
    try:
        policy_file.check(spec.policy)
    except ConfigError as error:
        fix = "see `keepstep admin policy show`"
        raise BadRequest(400, f"policy of {spec.job}: {error}", fix) from error


class Intake:
    """How many jobs are open, and are about to be: in all, and of each project."""

    def __init__(self, project_max: int, total_max: int) -> None:
        self._project_max, self._total_max = project_max, total_max
        self._coming: Counter[tuple[str, JobId]] = Counter()
        """What is submitted and not decided yet, and by how many: else all that come at the same
        instant would be let in before the first of them was counted."""
        self._seen: tuple[JobId, ...] = ()
        self._open_of: Counter[str] = Counter()

    @contextmanager
    def room_for(self, spec: JobSpec, caller: Caller, cluster: Cluster) -> Iterator[None]:
        """For as long as this job is decided about. Raises BadRequest if it is not let in."""
        if _is_open(spec.job, cluster):
            yield
            return
        check(spec)
        coming = (spec.project, spec.job)
        if coming not in self._coming:
            self._check_number(spec.project, caller, cluster)
        self._coming[coming] += 1
        try:
            yield
        finally:
            self._coming[coming] -= 1
            if not self._coming[coming]:
                del self._coming[coming]

    def _check_number(self, project: str, caller: Caller, cluster: Cluster) -> None:
        if cluster.open_jobs is not self._seen:
            self._seen = cluster.open_jobs
            self._open_of = Counter(cluster.jobs[name].spec.project for name in self._seen)
        # Whoever sees everything is of no project, and bound by the whole alone.
        # What was decided and is not on disk yet is open already, and still coming: once is enough.
        coming = [one for one in self._coming if not _is_open(one[1], cluster)]
        of_project = self._open_of[project] + sum(of == project for of, _ in coming)
        if caller.project and of_project >= self._project_max:
            why = f"project {project} has {self._project_max} open jobs, and may have no more"
            fix = "stop some, or wait until some are over; the setting is project_open_jobs_max"
            raise BadRequest(429, why, fix)
        if len(self._seen) + len(coming) >= self._total_max:
            # How many there are of whom is not a project's to know.
            why = f"no more than {self._total_max} jobs may be open at once in this cluster"
            fix = "stop some, or wait until some are over; the setting is open_jobs_max"
            raise BadRequest(429, why, fix)


def _is_open(name: JobId, cluster: Cluster) -> bool:
    known = cluster.jobs.get(name)
    return known is not None and not known.state.over
