"""A large cluster that never ran: the state that a brain would have, made up, for what is to scale.

12,500 nodes of 8 devices in racks of 16, a job of 16,384 ranks that is being repaired, many smaller
ones, standbys, and something wrong here and there. Nothing is random.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep import wire
from keepstep.model import (
    Generation,
    IncidentId,
    JobId,
    JobSpec,
    JobState,
    MigrationId,
    NodeId,
    Phase,
    Rank,
    Roster,
    Seat,
    Severity,
    Sign,
)
from keepstep.orchestrator import state

NOW = 1_790_000_000.0
SLOTS = 8
RACK = 16


@dataclass(frozen=True)
class Sizes:
    nodes: int = 12_500
    largest: int = 16_384
    jobs: int = 200
    ranks: int = 352
    """Of each of the other jobs."""
    closed: int = 300


def cluster(sizes: Sizes = Sizes(), now: float = NOW) -> state.Cluster:
    made = state.new_cluster("secret")
    for number in range(sizes.nodes):
        name = NodeId(f"n{number}")
        made.nodes[name] = state.NodeState(
            *(name, f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", SLOTS, 1, 2, "boot"),
            serial=number,
            labels={"rack": f"r{number // RACK}"},
        )
    place = 0
    for number in range(sizes.jobs):
        world = sizes.largest if number == 0 else sizes.ranks
        name = JobId(f"job-{number}")
        _add_job(made, name, world, place, now)
        place += -(-(world + SLOTS) // SLOTS)
    _add_incident(made, JobId("job-0"), now)
    made.closed = tuple(
        _closed(made, JobId(f"job-{n % sizes.jobs}"), now) for n in range(sizes.closed)
    )
    _add_trouble(made, now)
    made.free = tuple(n for n, node in made.nodes.items() if node.alive and len(node.uses) < SLOTS)
    return made


def heartbeats(made: state.Cluster) -> dict[NodeId, wire.Heartbeat]:
    """One per living node, as the agents would send them."""
    found = {}
    for name, node in made.nodes.items():
        jobs = {user.job for user in node.uses.values() if user.rank >= 0}
        pulses = [
            wire.JobPulse(job, made.jobs[job].generation, 5001, 5000, 1.25) for job in sorted(jobs)
        ]
        if node.alive:
            found[name] = wire.Heartbeat(name, tuple(pulses))
    return found


def _add_job(made: state.Cluster, name: JobId, world: int, place: int, now: float) -> None:
    spec = JobSpec(name, "train.py", nodes=world // SLOTS, ranks_per_node=SLOTS, spares=1)
    seats = []
    for rank in range(world):
        node, slot = NodeId(f"n{place + rank // SLOTS}"), rank % SLOTS
        seats.append(Seat(Rank(rank), node, slot, 0))
        made.nodes[node].uses[slot] = state.Occupant(name, Rank(rank))
    store = seats[0].node
    roster = Roster(name, Generation(3), "secret", store, 8, tuple(seats))
    spare = NodeId(f"n{place + -(-world // SLOTS)}")
    job = state.Job(spec, JobState.RUNNING, now - 9000.0, Generation(3), roster, step=4980)
    job.incidents = 2
    job.standbys[state.slot_key(spare, 0)] = state.Standby(spare, 0, 1, ready=True)
    made.nodes[spare].uses[0] = state.Occupant(name)
    made.jobs[name] = job
    made.open_jobs = (*made.open_jobs, name)


def _add_incident(made: state.Cluster, name: JobId, now: float) -> None:
    """A node with eight ranks was lost, and their state is on its way to another."""
    job = made.jobs[name]
    assert job.roster is not None
    lost = job.roster.seats[job.spec.world_size // 2].node
    made.nodes[lost].alive, made.nodes[lost].uses = False, {}
    ranks = [seat.rank for seat in job.roster.seats if seat.node == lost]
    job.state = JobState.MIGRATING
    story = (
        state.Line(now - 6.2, "allocate", f"{lost} says nothing for 3.5 s: taken for lost"),
        state.Line(now - 6.1, "allocate", f"ranks {ranks[0]} to {ranks[-1]} go to a spare"),
        state.Line(
            now - 5.2,
            "quiesce",
            f"all {job.spec.world_size - len(ranks)} survivors are back at boundary 5000",
        ),
        state.Line(now - 3.1, "reform", "generation 4 has met"),
    )
    job.incident = state.Incident(
        IncidentId(f"i-{made.next()}"),
        name,
        now - 6.2,
        causes=(state.Cause(Sign.EXIT, node=lost, detail="its heartbeats stopped"),),
        causes_count=1,
        story=story,
        seconds={"allocate": 0.1, "quiesce": 0.9, "reform": 2.1},
        generation=Generation(4),
        boundary=5000,
    )
    moving = state.Migration(
        MigrationId("m-1"), "unplanned", "recover", Phase.TRANSFER, now - 3.1, now - 6.2
    )
    moving.fresh = dict.fromkeys(ranks, now - 6.1)
    moving.reports = {
        Rank(rank): wire.SeatReport(Rank(rank), 5000)
        for rank in range(0, job.spec.world_size, 3)
        if rank not in ranks
    }
    job.migration = moving


def _closed(made: state.Cluster, name: JobId, now: float) -> state.Incident:
    number = made.next()
    opened = now - 8000.0 + number
    return state.Incident(
        IncidentId(f"i-{number}"),
        name,
        opened,
        opened + 4.0 + number % 7,
        causes=(state.Cause(Sign.EXIT, Rank(number % 300), NodeId("n1"), 0, 4000, -9),),
        causes_count=1,
        story=(state.Line(opened, "allocate", "a standby takes the seat"),),
        outcome="fallback" if number % 60 == 0 else "resumed",
        seconds={"allocate": 0.1, "quiesce": 1.0, "reform": 1.4, "transfer": 1.2, "resume": 0.3},
        generation=Generation(3),
        boundary=4000,
        recoveries=1,
    )


def _add_trouble(made: state.Cluster, now: float) -> None:
    names = list(made.nodes)
    for name in names[9000::400]:
        made.nodes[name].drained = "new kernel"
    for name in names[77::900]:
        taint = state.Taint("XID 63, row remap pending", now, now + 3600, Severity.LEAVE, "dcgm")
        state.put_taint(made, state.slot_key(name, 3), taint)
    for name in names[12_000::250]:
        made.nodes[name].alive = False
