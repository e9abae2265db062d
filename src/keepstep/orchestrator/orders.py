"""What the present phase tells whom: computed from the state, so that it can be told again.

A new leader, a node that reconnects and the phase's own beginning all call `tell`. Every order is
safe to repeat and carries the same id each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from operator import attrgetter

from keepstep.model import Endpoint, Generation, NodeId, Phase, Rank, Roster, Seat
from keepstep.orchestrator import policy, roster
from keepstep.orchestrator.state import Cluster, Job, Migration, generation_secret, in_migration
from keepstep.orchestrator.turn import Turn
from keepstep.wire import (
    Agree,
    Apply,
    Assign,
    Fence,
    Membership,
    Quiesce,
    Reform,
    Resume,
    Save,
    StartWorkers,
)

NO_GENERATION = Generation(0)
"""For orders about jobs that the brain no longer knows."""
_NODE = attrgetter("node")
_ALIVE = attrgetter("alive")


def tell(turn: Turn, job: Job, only: NodeId | None = None) -> None:
    """The orders of the present phase, to all nodes or to one that may have missed them."""
    migration = job.migration
    if migration is None or job.roster is None:
        return
    match migration.phase:
        case Phase.WARM:
            _tell_warm(turn, job, migration, only)
        case Phase.AGREE:
            nodes = _nodes(turn.cluster, job, only)
            turn.order(job, "agree", nodes, Agree(), job.promised)
        case Phase.ALLOCATE | Phase.FALLBACK:
            if not policy.stands_still(turn.cluster, job):
                fence(turn, job, migration.fences, only)
        case Phase.QUIESCE | Phase.HOLD:
            _tell_quiesce(turn, job, migration, only)
            tell_apply(turn, job, only)
        case Phase.REFORM:
            _tell_reform(turn, job, migration, only)
        case Phase.RESUME if migration.cold:
            _tell_start(turn, job, only)
        case Phase.RESUME:
            assert migration.plan is not None
            nodes = _nodes(turn.cluster, job, only)
            turn.order(job, "resume", nodes, Resume(migration.plan.boundary))
        case Phase.SAVE:
            assert migration.plan is not None
            plan = migration.plan
            action = Save(plan.boundary, plan.writers, plan.path, plan.homes)
            nodes = _nodes(turn.cluster, job, only, without=migration.gone)
            turn.order(job, f"save/{plan.writers[min(plan.writers)]}", nodes, action)
        case _:
            raise AssertionError(f"a migration does not rest in {migration.phase}")


def membership(cluster: Cluster, now: Roster | None) -> Membership:
    """What a worker has to know of a roster."""
    assert now is not None
    store = cluster.nodes[now.store_node]
    where = Endpoint(store.address, store.store_port)
    return Membership(len(now.seats), now.secret, where, now.mirror_stride)


def next_roster(cluster: Cluster, job: Job) -> Roster:
    """The roster that a planned move leads to."""
    migration, now = in_migration(job)
    seats = [migration.coming.get(seat.rank, seat) for seat in now.seats]
    store = roster.store_node(seats, cluster.nodes, migration.coming, now.store_node)
    secret = generation_secret(cluster, job.spec.job, job.promised)
    return roster.build(job.spec.job, job.promised, secret, store, seats, cluster.nodes)


def _tell_warm(turn: Turn, job: Job, migration: Migration, only: NodeId | None) -> None:
    known = membership(turn.cluster, next_roster(turn.cluster, job))
    for rank, seat in sorted(migration.coming.items()):
        if only is None or seat.node == only:
            name = f"assign/{rank}.{seat.incarnation}"
            turn.order(job, name, (seat.node,), _assign(turn, job, seat, known), job.promised)


def _assign(turn: Turn, job: Job, seat: Seat, known: Membership, forms: bool = False) -> Assign:
    homes = roster.homes([seat.rank], job.settled, turn.cluster.nodes)
    return Assign(job.spec, seat, known, homes, forms)


def fence(turn: Turn, job: Job, incarnations: dict[Rank, int], only: NodeId | None = None) -> None:
    """Kill these workers, each where its seat is."""
    assert job.roster is not None
    seats = [job.roster.seats[rank] for rank in sorted(incarnations)]
    fence_seats(turn, job, "fence", [s for s in seats if only is None or s.node == only])


def fence_seats(turn: Turn, job: Job, verb: str, seats: Iterable[Seat]) -> None:
    """One order per node; a node that is lost cannot be told."""
    by_node: dict[NodeId, list[Seat]] = {}
    for seat in seats:
        by_node.setdefault(seat.node, []).append(seat)
    for node, there in by_node.items():
        if turn.cluster.nodes[node].alive:
            name = f"{verb}/{node}/{there[0].rank}.{there[0].incarnation}"
            turn.order(job, name, (node,), Fence(tuple(there)))


def _tell_quiesce(turn: Turn, job: Job, migration: Migration, only: NodeId | None) -> None:
    assert job.roster is not None
    survivors = _nodes(
        turn.cluster, job, only, without={**migration.gone, **dict.fromkeys(migration.fresh)}
    )
    incident = job.incident
    why = incident.story[0].why if incident and incident.story else migration.purpose
    known = membership(turn.cluster, job.roster)
    # While some seats are empty, or if all will save and go, there is nothing to form.
    forms = migration.phase is Phase.QUIESCE and not migration.saves and not migration.gone
    # Joiners first: they have the longer way to the boundary.
    for rank in sorted(migration.fresh):
        seat = job.roster.seats[rank]
        if only is None or seat.node == only:
            name = f"assign/{rank}.{seat.incarnation}"
            turn.order(job, name, (seat.node,), _assign(turn, job, seat, known, forms))
    leavers = tuple(migration.leavers.values())
    waiting = (seat.node for seat in leavers if only in (None, seat.node))
    nodes = dict.fromkeys((*survivors, *(n for n in waiting if turn.cluster.nodes[n].alive)))
    turn.order(
        job, "quiesce", nodes, Quiesce(why, migration.agreed, leavers, known if forms else None)
    )


def tell_apply(turn: Turn, job: Job, only: NodeId | None = None) -> None:
    """Those who stand before an update that others have made are told to make it."""
    migration, now = in_migration(job)
    nodes = dict.fromkeys(now.seats[rank].node for rank in migration.applying)
    told = [n for n in nodes if only in (None, n) and turn.cluster.nodes[n].alive]
    turn.order(job, "apply", told, Apply(migration.apply_to, migration.applying))


def _tell_reform(turn: Turn, job: Job, migration: Migration, only: NodeId | None) -> None:
    plan = migration.plan
    assert plan is not None
    known = membership(turn.cluster, job.roster)
    alike = plan.groups_alike
    action = Reform(known, plan.boundary, plan.digests, plan.moves, plan.homes, alike)
    turn.order(job, "reform", _nodes(turn.cluster, job, only), action)


def _tell_start(turn: Turn, job: Job, only: NodeId | None) -> None:
    assert job.roster is not None
    by_node: dict[NodeId, list[Seat]] = {}
    for seat in _seats(turn.cluster, job, only):
        by_node.setdefault(seat.node, []).append(seat)
    known = membership(turn.cluster, job.roster)
    for node, seats in by_node.items():
        action = StartWorkers(job.spec, tuple(seats), known, job.published_path)
        turn.order(job, f"start/{node}", (node,), action)


def _nodes(
    cluster: Cluster, job: Job, only: NodeId | None, without: Iterable[Rank] = ()
) -> list[NodeId]:
    """Nodes with seats of the job, in the order of ranks; with `only`, that one at most."""
    # No line of Python per seat: each phase of each generation asks.
    seats = _seats(cluster, job, only)
    assert job.roster is not None
    present = bytearray(b"\1") * len(job.roster.seats)
    for rank in without:
        present[rank] = 0
    there = present if only is None else [present[seat.rank] for seat in seats]
    nodes = dict.fromkeys(map(_NODE, compress(seats, there)))
    return list(compress(nodes, map(_ALIVE, map(cluster.nodes.__getitem__, nodes))))


def _seats(cluster: Cluster, job: Job, only: NodeId | None) -> Sequence[Seat]:
    assert job.roster is not None
    if only is None:
        return job.roster.seats
    ranks = sorted(
        user.rank
        for user in cluster.nodes[only].uses.values()
        if user.job == job.spec.job and user.rank >= 0 and not user.fenced
    )
    return [job.roster.seats[r] for r in ranks if job.roster.seats[r].node == only]
