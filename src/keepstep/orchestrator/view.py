"""The brain's state for people and programs: what the API, the CLI and the page show. Pure.

`describe` makes plain dictionaries; names here are part of the HTTP interface.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from keepstep import codec
from keepstep.model import JobId, Phase, Rank
from keepstep.orchestrator import homes, portions, remedies, shown
from keepstep.orchestrator.state import (
    Cluster,
    Incident,
    Job,
    Loan,
    Migration,
    NodeState,
    natural,
    slot_key,
)
from keepstep.wire import Heartbeat


def describe(
    cluster: Cluster, now: float = 0.0, heartbeats: Iterable[Heartbeat] = ()
) -> dict[str, Any]:
    """Everything: jobs and nodes by name, incidents oldest first (open ones last)."""
    pulses = shown.pulses_by_job(heartbeats)
    return {
        "term": cluster.term,
        "frozen": {"why": cluster.frozen, "since": cluster.frozen_at} if cluster.frozen else None,
        "self_doubt": {"why": cluster.self_doubt, "since": cluster.self_doubt_at}
        if cluster.self_doubt
        else None,
        "jobs": {name: job_view(cluster, job, now) for name, job in sorted(cluster.jobs.items())},
        "paces": {
            str(name): codec.to_plain(shown.pace(job, pulses.get(name, ())))
            for name, job in sorted(cluster.jobs.items())
        },
        "nodes": {
            node: node_view(cluster, cluster.nodes[node])
            for node in sorted(cluster.nodes, key=natural)
        },
        "incidents": [incident_view(i) for i in incidents(cluster)],
        "taints": [
            {"place": place, **codec.to_plain(taint)}
            for place, taints in sorted(cluster.taints.items())
            for taint in taints
        ],
        "loans": [loan_view(loan) for loan in (*cluster.loans, *_open_loans(cluster))],
        "control_plane": {
            "down_seconds": cluster.down_seconds,
            "outages": [codec.to_plain(outage) for outage in cluster.outages],
            "gaps": [codec.to_plain(gap) for gap in cluster.gaps],
        },
    }


def incidents(cluster: Cluster) -> list[Incident]:
    """Oldest first, open ones last."""
    jobs = (job for _, job in sorted(cluster.jobs.items()))
    return [*cluster.closed, *(job.incident for job in jobs if job.incident is not None)]


def _open_loans(cluster: Cluster) -> list[Loan]:
    jobs = (job for _, job in sorted(cluster.jobs.items()))
    return [job.loan for job in jobs if job.loan is not None]


def loan_view(loan: Loan) -> dict[str, Any]:
    """Who lent what to whom for how long; the times of what has not happened yet are null."""
    plain = codec.to_plain(loan)
    assert isinstance(plain, dict)
    for moment in ("began_at", "ended_at"):
        plain[moment] = plain[moment] if plain[moment] >= 0 else None
    return plain


def phases(cluster: Cluster, jobs: Iterable[JobId]) -> dict[str, str]:
    """Where each of these jobs is: the phase of its migration, or its state."""
    found = {}
    for name in jobs:
        job = cluster.jobs.get(name)
        if job is not None:
            found[str(name)] = job.migration.phase.value if job.migration else job.state.value
    return found


def job_view(cluster: Cluster, job: Job, now: float) -> dict[str, Any]:
    spec = job.spec
    return {
        "id": spec.job,
        "state": job.state.value,
        "over": job.state.over,
        "since": job.since,
        "generation": job.generation,
        "step": job.step,
        "world": spec.world_size,
        "nodes": spec.nodes,
        "ranks_per_node": spec.ranks_per_node,
        "priority": spec.priority,
        "project": spec.project,
        "mode": spec.policy.mode.value,
        "script": spec.script,
        "log_directory": spec.log_directory,
        "state_directory": spec.state_directory,
        "exit_code": job.exit_code,
        "detail": job.detail,
        "published": {"step": job.published_step, "path": job.published_path},
        "contaminated": list(job.contaminated),
        "spares": {
            "wanted": spec.spares,
            "ready": sum(1 for standby in job.standbys.values() if standby.ready),
            "standbys": [codec.to_plain(s) for _, s in sorted(job.standbys.items())],
        },
        "finished": len(job.finished),
        "incidents": job.incidents,
        "fallbacks": job.fallbacks,
        "incident": job.incident.incident if job.incident else None,
        "migration": _migration_view(job.migration) if job.migration else None,
        "leaving": [
            {"rank": rank, "why": leave.why, "to": leave.to or None, "waits": leave.waits or None}
            for rank, leave in sorted(job.leaving.items())
        ],
        "remedies": remedies.needed(cluster, job, now),
        "unsure": job.unsure.why if job.unsure else None,
        "uncovered": sorted(portions.alone(job)),
        "loan": loan_view(job.loan) if job.loan else None,
        "away": {
            str(rank): home for home, ranks in sorted(homes.away(job).items()) for rank in ranks
        },
        "store_node": job.roster.store_node if job.roster else None,
        "mirror_stride": job.roster.mirror_stride if job.roster else None,
        "seats": _seats_view(job),
    }


def _migration_view(migration: Migration) -> dict[str, Any]:
    return {
        "id": migration.migration,
        "kind": migration.kind,
        "purpose": migration.purpose,
        "phase": migration.phase.value,
        "phase_at": migration.phase_at,
        "began_at": migration.began_at,
        "reported": len(migration.reports),
        "empty_seats": {str(rank): why for rank, why in sorted(migration.gone.items())},
        "fences": sorted(migration.fences),
        "recoveries": migration.recoveries,
        "boundary": migration.plan.boundary if migration.plan else None,
        "hold_since": migration.hold_since if migration.hold_since >= 0 else None,
        "coming": [codec.to_plain(seat) for _, seat in sorted(migration.coming.items())],
        "leavers": [codec.to_plain(seat) for _, seat in sorted(migration.leavers.items())],
    }


def _seats_view(job: Job) -> list[dict[str, Any]]:
    if job.roster is None:
        return []
    return [
        {
            "rank": seat.rank,
            "node": seat.node,
            "slot": seat.slot,
            "incarnation": seat.incarnation,
            "phase": seat_phase(job, seat.rank),
        }
        for seat in job.roster.seats
    ]


def seat_phase(job: Job, rank: Rank) -> str:
    """What is known of one seat, in one word."""
    migration = job.migration
    if rank in job.finished:
        return "finished"
    if migration is None:
        return job.state.value
    if migration.phase in (Phase.WARM, Phase.AGREE):
        # Everybody trains, also who is about to leave.
        return "leaving" if rank in migration.coming else job.state.value
    if rank in migration.gone:
        return "empty"
    if rank in migration.fences:
        return "fencing"
    if rank in migration.fresh:
        return "joining"
    if rank in migration.reports:
        return f"{migration.phase.value}: reported"
    return migration.progress.get(rank, migration.phase).value


def node_view(cluster: Cluster, state: NodeState) -> dict[str, Any]:
    uses = []
    for slot in range(state.slots):
        user = state.uses.get(slot)
        uses.append(
            {
                "slot": slot,
                "job": user.job if user else None,
                "rank": user.rank if user and user.rank >= 0 else None,
                "standby": user is not None and user.rank < 0,
                "fenced": user is not None and user.fenced,
                "taint": _taint_reason(cluster, slot_key(state.node, slot)),
            }
        )
    return {
        "id": state.node,
        "alive": state.alive,
        "left": state.left,
        "linked": state.linked,
        "address": state.address,
        "peer_port": state.peer_port,
        "store_port": state.store_port,
        "boot": state.boot,
        "slots": state.slots,
        "free": state.slots - len(state.uses) if state.alive else 0,
        "store_good": state.store_good,
        "drained": state.drained or None,
        "taint": _taint_reason(cluster, state.node),
        "empty": _is_empty(cluster, state),
        "faults": state.faults,
        "fault_at": state.fault_at if state.faults else None,
        "labels": dict(state.labels),
        "uses": uses,
    }


def _taint_reason(cluster: Cluster, place: str) -> str | None:
    """Why a place is not to be used: what the worst of its taints says."""
    taints = cluster.taints.get(place)
    return taints[0].reason if taints else None


def _is_empty(cluster: Cluster, state: NodeState) -> bool:
    """Nothing runs here and nobody meets here: the node can be switched off."""
    open_jobs = (cluster.jobs[name] for name in cluster.open_jobs)
    meets = any(job.roster and job.roster.store_node == state.node for job in open_jobs)
    return not state.uses and not meets


def incident_view(incident: Incident) -> dict[str, Any]:
    """One incident with its story and the pause by phase."""
    closed = incident.closed_at >= 0
    return {
        "id": incident.incident,
        "job": incident.job,
        "opened_at": incident.opened_at,
        "closed_at": incident.closed_at if closed else None,
        "outcome": incident.outcome or "open",
        "generation": incident.generation,
        "boundary": incident.boundary,
        "recoveries": incident.recoveries,
        "causes": [codec.to_plain(cause) for cause in incident.causes],
        "causes_count": incident.causes_count,
        "story": [[line.at, line.phase, line.why] for line in incident.story],
        "seconds": dict(incident.seconds),
        "pause_seconds": pause_seconds(incident) if closed else None,
    }


def lasted_seconds(incident: Incident, now: float) -> float:
    """From the fault to the incident's end, or until now while it is open."""
    # A fault that nobody could be told of was there before its incident.
    began_at = incident.opened_at - incident.late_seconds
    return max(0.0, (incident.closed_at if incident.closed_at >= 0 else now) - began_at)


def pause_seconds(incident: Incident) -> float:
    """Of a closed incident: how long nobody trained."""
    # While targets warm up and a boundary is agreed upon, everybody trains.
    training = sum(incident.seconds.get(phase, 0.0) for phase in (Phase.WARM, Phase.AGREE))
    return max(0.0, lasted_seconds(incident, incident.closed_at) - training)
