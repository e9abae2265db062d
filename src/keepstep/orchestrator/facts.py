"""Where a job stands after a step, as its chain keeps it: what the account is reckoned from. Pure.

Replaying the events would give the same, but only with this program at this version. Whoever pays
reads the chain without it, so each entry says in plain words what it led to. A restart never reads
these facts: the events alone decide.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from typing import Any

from keepstep.model import JobId
from keepstep.orchestrator.state import Cluster, Incident, Job

CAUSES_TOLD_MAX = 8


def of(cluster: Cluster, jobs: Iterable[JobId], now: float) -> dict[str, dict[str, Any]]:
    """For each of these jobs: its state, its migration, its incident, and one that closed now."""
    newest = takewhile(lambda incident: incident.closed_at == now, reversed(cluster.closed))
    closed = {incident.job: incident for incident in newest}
    found = {}
    for name in jobs:
        job = cluster.jobs.get(name)
        if job is not None:
            found[str(name)] = _facts(job)
            if name in closed:
                found[str(name)]["closed"] = _closed(closed[name])
    return found


def _facts(job: Job) -> dict[str, Any]:
    told: dict[str, Any] = {
        "state": job.state.value,
        "generation": job.generation,
        "step": job.step,
        "world": job.spec.world_size,
        "spares": len(job.standbys),
        "ready": sum(1 for standby in job.standbys.values() if standby.ready),
        "incidents": job.incidents,
    }
    if job.migration is not None:
        told["phase"] = job.migration.phase.value
        told["kind"] = job.migration.kind
        told["cold"] = job.migration.cold
    if job.incident is not None:
        told["incident"] = job.incident.incident
        told["opened_at"] = job.incident.opened_at
        told["causes"] = job.incident.causes_count
    return told


def _closed(incident: Incident) -> dict[str, Any]:
    causes = incident.causes[:CAUSES_TOLD_MAX]
    return {
        "id": incident.incident,
        "opened_at": incident.opened_at,
        "closed_at": incident.closed_at,
        "outcome": incident.outcome,
        "generation": incident.generation,
        "boundary": incident.boundary,
        "recoveries": incident.recoveries,
        "seconds": dict(incident.seconds),
        "causes": [{"sign": c.sign.value, "rank": c.rank, "node": c.node} for c in causes],
        "causes_count": incident.causes_count,
    }
