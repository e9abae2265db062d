"""Nodes come, fall silent, are lost, and come back. What their agents list is compared with what
should be there.

A closed stream is not a dead node: agents restart, and their workers train on. A node counts as
lost when its heartbeats stop, when its stream stays closed too long, or when its stream is closed
and other nodes have broken collectives. As long as a job with ranks there makes steps, it is only
the agent that is missing, and a supervisor gets time to bring it back. If many nodes fall silent
at once, the brain suspects itself first: see suspicion.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from keepstep import sabotage
from keepstep.model import JobId, Mode, NodeId, OrderId, Phase, Policy, Rank, Seat, Sign
from keepstep.orchestrator import (
    budgets,
    forgetting,
    homes,
    incidents,
    observe,
    orders,
    planned,
    reconcile,
    roster,
    rules,
    slots,
    spares,
    suspicion,
)
from keepstep.orchestrator.events import NodeSilent
from keepstep.orchestrator.liveness import UNWATCHED_SECONDS_MAX
from keepstep.orchestrator.state import (
    Cause,
    Cluster,
    Job,
    NodeState,
    Occupant,
    Standby,
    natural,
    slot_key,
)
from keepstep.orchestrator.turn import Turn
from keepstep.wire import DropStandby, Fence, Heartbeat, Hello, Order, StandbyFact, Stop, WorkerFact

PEERS_BROKE = "its stream is closed and others have broken collectives"
SILENT_SETTLE_SECONDS = 0.25
"""Between the first sign of silence and the verdict: time to see whether all fall silent."""
MISSING_SECONDS = 0.3
"""After a Hello: an agent that knows how a worker ended says so at once; then the worker is dead
in any case."""


def hello(turn: Turn, event: Hello) -> None:
    """An agent's stream begins: update the node, compare, and tell it what it may have missed."""
    cluster = turn.cluster
    state = cluster.nodes.get(event.node)
    if state is not None and state.alive and state.boot != event.boot:
        lose(turn, event.node, "it rebooted")
    alone = suspicion.nobody_heard(cluster)
    returned = state is not None and not state.alive
    if state is not None and returned and not state.left:
        # Well from now on: its time without a fault begins.
        state.fault_at = turn.now
    moved_store = state is not None and state.store_port != event.store_port
    _register(turn, event, state)
    if alone:
        one_is_heard(turn)
    state = cluster.nodes[event.node]
    if state.boot == event.boot and moved_store and not returned:
        _store_moved(turn, state)
    what = "is back" if returned else "says hello"
    turn.note(f"node {event.node} {what} with {event.slots} slots, boot {event.boot}")
    reconcile.hear(turn, state, event)
    _compare_workers(turn, state, event.workers)
    _compare_standbys(turn, state, event.standbys)
    for name in sorted({user.job for user in state.uses.values()}):
        job = cluster.jobs.get(name)
        if job is not None and not job.state.over and job.unsure is None:
            orders.tell(turn, job, only=event.node)
    _give_time(turn, state)
    _stop_again(turn, event)
    reconcile.settle_all(turn)
    slots.index(cluster, state)


def _give_time(turn: Turn, state: NodeState) -> None:
    """Who comes back in the middle of a phase: its ranks are not late at once."""
    if not rules.waits_for_returned(turn.cluster):
        return
    ranks: dict[JobId, list[Rank]] = {}
    for user in state.uses.values():
        if user.rank >= 0 and not user.fenced and _trains(turn.cluster, user):
            ranks.setdefault(user.job, []).append(user.rank)
    for name, here in sorted(ranks.items()):
        job = turn.cluster.jobs[name]
        if job.unsure is None and budgets.came_back(job, here, turn.now):
            turn.touched = True


def _stop_again(turn: Turn, event: Hello) -> None:
    """Jobs that ended while this node could not be told: what they left there is in its memory.

    Only what this journal knows to be over, be it only by its Past. A job that is parked or waits
    is not, and one that the journal does not have, or that this node has obeyed more of than we
    know, may run."""
    cluster = turn.cluster
    for name in map(JobId, event.keeps):
        job = cluster.jobs.get(name)
        known = job if job is not None else cluster.past.get(name)
        if known is None or (job is not None and not job.state.over):
            continue
        newest = max(known.generation, known.promised)
        obeyed = event.obeyed.get(name, newest)
        if reconcile.forgotten(cluster, name, event.node, obeyed):
            continue
        if obeyed <= newest:
            why = f"{name} is over, and {event.node} was not told"
            stop = Stop(job.exit_code if job is not None else 0, why)
            at = (cluster.term, newest, OrderId(f"{name}/g{newest}/stop"))
            turn.orders.append(Order(*at, name, (event.node,), stop))
            turn.note(why)


def _register(turn: Turn, event: Hello, state: NodeState | None) -> None:
    cluster = turn.cluster
    if state is None or state.boot != event.boot:
        serial = cluster.next()
    else:
        serial = state.serial
    if state is None:
        state = NodeState(
            event.node,
            event.address,
            event.slots,
            event.peer_port,
            event.store_port,
            event.boot,
            serial,
        )
        cluster.nodes[event.node] = state
    state.store_good = state.store_good or state.store_port != event.store_port
    state.address, state.slots = event.address, event.slots
    state.peer_port, state.store_port = event.peer_port, event.store_port
    state.boot, state.serial = event.boot, serial
    state.alive, state.linked, state.left = True, True, False
    state.silent_at = state.vouched_at = -1.0
    state.doubted = False
    state.labels, state.shares = dict(event.labels), roster.shares(event.labels)
    cluster.doubtful.pop(event.node, None)
    cluster.given_up.pop(event.node, None)
    turn.touched = True


def _store_moved(turn: Turn, state: NodeState) -> None:
    """The store process is a new one: generations that meet there have lost their rendezvous."""
    for name in turn.cluster.open_jobs:
        job = turn.cluster.jobs[name]
        if job.roster is not None and job.roster.store_node == state.node:
            cause = Cause(Sign.STORE_LOST, node=state.node)
            why = f"the store on {state.node} was replaced"
            observe.fault(turn, job, incidents.Fault((cause,), why))


def _compare_workers(turn: Turn, state: NodeState, facts: tuple[WorkerFact, ...]) -> None:
    listed = {(fact.job, fact.rank, fact.incarnation) for fact in facts}
    for fact in facts:
        stray = not _rightful(state, fact) and not sabotage.off("fence")
        if stray and not reconcile.left_alone(turn, state, fact):
            _fence_stray(turn, state, fact)
    for slot in sorted(state.uses):
        # Read anew: what was decided about one may have changed another.
        user = state.uses.get(slot)
        if user is None or user.rank < 0 or (user.job, user.rank, user.incarnation) in listed:
            continue
        if user.fenced:
            slots.release(turn.cluster, state.node, slot)
            continue
        job = turn.cluster.jobs[user.job]
        if job.unsure is not None:
            continue
        if waiting := planned.waits_here(job, user):
            if not planned.untold(job, waiting):
                planned.lose(turn, job, waiting, "not found by its restarted agent")
            continue
        if not _untold(job, user, listed & _seated(state, user.job)):
            job.missing[user.rank] = turn.now + MISSING_SECONDS


def _seated(state: NodeState, job: JobId) -> set[tuple[JobId, Rank, int]]:
    """Who of a job has its seat on this node. What else runs there proves nothing."""
    return {
        (user.job, user.rank, user.incarnation)
        for user in state.uses.values()
        if user.job == job and user.rank >= 0 and not user.fenced
    }


def _rightful(state: NodeState, fact: WorkerFact) -> bool:
    user = state.uses.get(fact.slot)
    return user == Occupant(fact.job, fact.rank, fact.incarnation)


def _fence_stray(turn: Turn, state: NodeState, fact: WorkerFact) -> None:
    """A worker whose seat is somebody else's by now. It dies before its slot is used again."""
    cluster = turn.cluster
    job = cluster.jobs.get(fact.job)
    generation = max(job.generation if job else fact.generation, fact.generation)
    seat = Seat(fact.rank, state.node, fact.slot, fact.incarnation)
    name = f"{fact.job}/g{generation}/stray/{state.node}/{fact.rank}.{fact.incarnation}"
    turn.orders.append(
        Order(cluster.term, generation, OrderId(name), fact.job, (state.node,), Fence((seat,)))
    )
    reconcile.keep_slot(turn, state, fact, fenced=True)
    turn.note(
        f"{state.node} still runs incarnation {fact.incarnation} of rank {fact.rank} of "
        f"generation {fact.generation}: fenced"
    )


def _untold(job: Job, user: Occupant, listed: set[tuple[JobId, Rank, int]]) -> bool:
    """True for a worker whose order may never have arrived: it is told again, not mourned.

    `listed` are those of its job that the node does have: one order starts them all.
    """
    moving = job.migration
    if moving is None:
        return False
    if user.rank in moving.fresh and moving.phase in (Phase.QUIESCE, Phase.HOLD):
        return True
    return moving.cold and moving.phase is Phase.RESUME and not job.begun and not listed


def _compare_standbys(turn: Turn, state: NodeState, facts: tuple[StandbyFact, ...]) -> None:
    cluster = turn.cluster
    listed = {fact.slot: fact for fact in facts}
    for slot, user in sorted(state.uses.items()):
        if user.rank >= 0:
            continue
        job = cluster.jobs[user.job]
        if job.unsure is not None:
            continue
        fact = listed.get(slot)
        if fact is None or fact.job != user.job:
            spares.start_standby(turn, job, job.standbys[slot_key(state.node, slot)])
        elif fact.ready:
            spares.standby_ready(turn, job, state.node, slot, fact.level)
    for fact in facts:
        if fact.slot not in state.uses:
            _adopt_or_drop(turn, state, fact)


def _adopt_or_drop(turn: Turn, state: NodeState, fact: StandbyFact) -> None:
    job = turn.cluster.jobs.get(fact.job)
    wanted = (
        job is not None
        and not job.state.over
        and job.roster is not None
        and len(job.standbys) < job.spec.spares
        and fact.slot < state.slots
        and not state.drained
        and not slots.tainted(turn.cluster, state.node, fact.slot, turn.now)
    )
    if job is not None and wanted:
        slots.occupy(turn.cluster, state.node, fact.slot, Occupant(fact.job))
        job.standbys[slot_key(state.node, fact.slot)] = Standby(
            state.node, fact.slot, turn.cluster.next(), fact.ready, fact.level
        )
        turn.note(f"the standby on {state.node} slot {fact.slot} is kept", job)
        return
    generation = job.generation if job else orders.NO_GENERATION
    name = OrderId(f"{fact.job}/g{generation}/drop/{state.node}.{fact.slot}/stray")
    action = DropStandby(fact.slot)
    turn.orders.append(Order(turn.cluster.term, generation, name, fact.job, (state.node,), action))


def link_lost(turn: Turn, node: NodeId) -> None:
    state = turn.cluster.nodes.get(node)
    if state is None or not state.alive or not state.linked:
        turn.ignore(f"closed stream of {node} ignored: nothing was expected of it")
        return
    state.linked, state.unlinked_at = False, turn.now
    turn.cluster.doubtful.setdefault(node, turn.now)
    turn.note(f"the stream of {node} closed: its agent may be restarting")


def silent(turn: Turn, event: NodeSilent) -> None:
    node = event.node
    state = turn.cluster.nodes.get(node)
    if state is None or not state.alive or state.silent_at >= 0:
        turn.ignore(f"silence of {node} ignored: nothing was expected of it")
        return
    state.doubted = state.doubted or suspicion.in_a_crowd(turn, event.crowd)
    state.silent_at = turn.now
    turn.cluster.doubtful.setdefault(node, turn.now)
    turn.note(f"node {node} fell silent")


def vouched(turn: Turn, node: NodeId) -> None:
    """A job makes steps, and it has ranks there: they are well. Give the agent time."""
    state = turn.cluster.nodes.get(node)
    if state is None or node not in turn.cluster.doubtful:
        turn.ignore(f"vouching for {node} ignored: nobody doubts it")
        return
    state.vouched_at = turn.now
    turn.note(f"node {node} says nothing, but its ranks make steps: only its agent is missing")


def jobs_on(cluster: Cluster, nodes: Iterable[NodeId]) -> dict[NodeId, set[JobId]]:
    """Whose steps can vouch for these nodes: the jobs that have ranks there."""
    return {
        node: {
            user.job
            for user in cluster.nodes[node].uses.values()
            if user.rank >= 0 and not user.fenced and _trains(cluster, user)
        }
        for node in nodes
        if node in cluster.nodes
    }


def own_pulses(cluster: Cluster, beat: Heartbeat) -> Heartbeat:
    """A heartbeat without jobs that have nobody on its node: their steps are not its to tell."""
    state = cluster.nodes.get(beat.node)
    here = {user.job for user in state.uses.values()} if state is not None else set()
    if all(pulse.job in here for pulse in beat.jobs):
        return beat
    return replace(beat, jobs=tuple(pulse for pulse in beat.jobs if pulse.job in here))


def _trains(cluster: Cluster, user: Occupant) -> bool:
    """It has a seat: it is no target that warms up, and nobody who waits to leave."""
    job = cluster.jobs[user.job]
    seats = job.roster.seats if job.roster is not None else ()
    return user.rank < len(seats) and seats[user.rank].incarnation == user.incarnation


def heard(turn: Turn, state: NodeState) -> None:
    """A message from a node that was taken for silent: it is not."""
    if state.silent_at >= 0:
        alone = suspicion.nobody_heard(turn.cluster)
        state.silent_at, state.doubted = -1.0, False
        if state.linked:
            turn.cluster.doubtful.pop(state.node, None)
        turn.note(f"node {state.node} is heard again")
        _give_time(turn, state)
        if alone:
            one_is_heard(turn)


def one_is_heard(turn: Turn) -> None:
    """Nobody was, and it was put down to ourselves: the others may be about to come as well."""
    until = turn.now + suspicion.TERM_GRACE_SECONDS
    for node in turn.cluster.doubtful:
        state = turn.cluster.nodes[node]
        turn.cluster.doubtful[node] = until
        if state.silent_at >= 0:
            state.silent_at = until
        if not state.linked:
            state.unlinked_at = until


def tick(turn: Turn) -> None:
    """Give up the nodes whose time has come, unless their silence may be ours."""
    cluster = turn.cluster
    if not cluster.doubtful and not cluster.self_doubt:
        return
    due = _due(turn, SILENT_SETTLE_SECONDS)
    if due:
        # Who is silent by now goes with them: a rack is one fault, not one for each of its nodes.
        due = _due(turn, 0.0)
    elif not cluster.self_doubt:
        return
    doubted = suspicion.doubted(turn)
    in_doubt = sorted(doubted & due.keys())
    # All of it before anybody is lost: the first loss would explain away what speaks against two.
    proof = suspicion.evidence(cluster, sorted(due), turn.now)
    suspicion.tell(turn, [node for node in in_doubt if node not in proof], doubted)
    lost = {}
    for node in sorted(due, key=natural):
        if node not in doubted or node in proof:
            said = f", and {proof[node].why}" if node in doubted else ""
            lost[node] = f"{due[node]}{said}"
            missed = due[node] == PEERS_BROKE or (node in proof and proof[node].by_peers)
            if not missed and suspicion.seated(cluster, cluster.nodes[node]):
                cluster.given_up[node] = turn.now
    lose_all(turn, lost)


def _due(turn: Turn, settle_seconds: float) -> dict[NodeId, str]:
    """The nodes whose time has come, and why."""
    nodes = turn.cluster.nodes
    found = ((node, _given_up(turn, nodes[node], settle_seconds)) for node in turn.cluster.doubtful)
    return {node: why for node, why in found if why}


def _given_up(turn: Turn, state: NodeState, settle_seconds: float) -> str:
    if state.silent_at < 0 and (state.linked or turn.now < state.unlinked_at):
        return ""
    known = turn.cluster.jobs
    jobs = [known[name] for name in sorted({u.job for u in state.uses.values()}) if name in known]
    policies = [job.spec.policy for job in jobs if not job.state.over] or [Policy()]
    silent_seconds_max = min(p.silent_seconds_max for p in policies)
    # Giving up a node of jobs that are only observed would end jobs that train.
    only_observed = all(p.mode is Mode.OBSERVE for p in policies)
    watched = turn.now < turn.cluster.doubtful[state.node] + UNWATCHED_SECONDS_MAX
    vouched_for = 0 <= state.vouched_at > turn.now - silent_seconds_max and (
        watched or only_observed
    )
    if state.silent_at >= 0 and turn.now >= state.silent_at + settle_seconds:
        return "" if vouched_for else "its heartbeats stopped"
    if state.linked:
        return ""
    away = turn.now - state.unlinked_at
    if away >= silent_seconds_max and not vouched_for:
        return f"its stream is closed for {away:.1f} s"
    if away >= min(p.restart_grace_seconds for p in policies) and any(
        job.broken_at >= 0 for job in jobs
    ):
        return PEERS_BROKE
    return ""


def lose(turn: Turn, node: NodeId, why: str) -> None:
    """A node and all on it are gone."""
    lose_all(turn, {node: why})


def lose_all(turn: Turn, lost: Mapping[NodeId, str]) -> None:
    """Nodes and all on them are gone: per job one fault, whatever the number of nodes and ranks."""
    cluster = turn.cluster
    hit: dict[JobId, dict[NodeId, str]] = {}
    seated: set[JobId] = set()
    for node, why in lost.items():
        for slot, user in _take_out(turn, node, why):
            hit.setdefault(user.job, {})[node] = why
            if user.rank < 0:
                cluster.jobs[user.job].standbys.pop(slot_key(node, slot), None)
            elif not user.fenced:
                seated.add(user.job)
            if user.job in cluster.jobs:
                cluster.jobs[user.job].missing.pop(Rank(user.rank), None)
    for name, nodes in sorted(hit.items()):
        job = cluster.jobs.get(name)
        if job is None or job.state.over:
            continue
        for node in nodes:
            reconcile.lose(job, node)
        if job.roster is None:
            # In doubt: agents have it, and this journal has not started it yet.
            continue
        in_vain = [planned.lose_node(turn, job, node) for node in nodes]
        fault = incidents.nodes_lost(job, nodes)
        if (name in seated and fault.dead) or any(in_vain):
            observe.fault(turn, job, fault)


def closed(state: NodeState) -> bool:
    """A closed stream without a rank behind it is somebody who left: an agent was stopped, a job
    was over. A machine that fails says nothing, or takes ranks along."""
    return not state.linked and all(user.rank < 0 or user.fenced for user in state.uses.values())


def _take_out(turn: Turn, node: NodeId, why: str) -> list[tuple[int, Occupant]]:
    """The node is no place any more; returns who was there."""
    cluster = turn.cluster
    state = cluster.nodes[node]
    users = sorted(state.uses.items())
    state.left = closed(state)
    state.alive, state.linked = False, False
    state.silent_at = state.vouched_at = -1.0
    state.doubted = False
    cluster.doubtful.pop(node, None)
    forgetting.gone(turn, node)
    state.uses = {}
    if not state.drained and not state.left:
        homes.found_bad(state, turn.now)
    slots.index(cluster, state)
    turn.note(f"node {node} {'has left' if state.left else 'is lost'}: {why}")
    return users


def term_began(turn: Turn) -> None:
    """A new leader has no streams yet; agents come to it. What is under way is told again."""
    cluster = turn.cluster
    believed = [node for node, state in cluster.nodes.items() if state.alive]
    cluster.led_at = turn.now if believed else -1.0
    give_grace(turn, believed)
    reconcile.term_began(turn)
    for name in cluster.open_jobs:
        job = cluster.jobs[name]
        budgets.spare(job, turn.now + suspicion.TERM_GRACE_SECONDS)
        orders.tell(turn, job)
        for _, standby in sorted(job.standbys.items()):
            if not standby.ready:
                spares.start_standby(turn, job, standby)


def give_grace(turn: Turn, away: Iterable[NodeId]) -> None:
    """These nodes' agents are not connected; their silence counts only after a while."""
    until = turn.now + suspicion.TERM_GRACE_SECONDS
    for node in tuple(away):
        state = turn.cluster.nodes[node]
        state.linked, state.silent_at, state.unlinked_at = False, -1.0, until
        turn.cluster.doubtful[node] = until
