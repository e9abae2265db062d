"""A journal that is behind reality: a restored backup, a replica that lost what was confirmed.

Agents keep what they obeyed. One that has seen a later term, a later entry or a later generation
than this journal has is the proof, and from then on it is believed more than the journal:

    proof --> nothing is decided about the jobs concerned --> agents list their workers
          --> every rank is found, and all agents came or had time to
              --> its seats are as listed; the groups are formed anew, in a generation above all
                  that was ever obeyed, and all state is compared
          --> a rank is found nowhere --> it is lost with its node, if the others do not train, or
                                          no node is missing; or it stays so, and says what helps

Must never: end a worker that the journal has merely forgotten, give out a number twice, or take a
state for whole that was not compared. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from keepstep import belonging
from keepstep.model import Generation, JobId, JobState, NodeId, Phase, Rank, Seat, Sign, Term
from keepstep.orchestrator import (
    given_away,
    launch,
    names,
    observe,
    orders,
    roster,
    rules,
    saving,
    slots,
    spares,
    suspicion,
)
from keepstep.orchestrator.events import JournalBehind
from keepstep.orchestrator.incidents import Fault, note_broken
from keepstep.orchestrator.past import Past
from keepstep.orchestrator.state import (
    GAPS_MAX,
    Cause,
    Cluster,
    Gap,
    Job,
    NodeState,
    Occupant,
    Settled,
    Unsure,
    generation_secret,
    slot_key,
)
from keepstep.orchestrator.turn import Turn
from keepstep.wire import Hello, Message, Observed, PhaseReport, WorkerFact

INCARNATIONS_SKIPPED = 100
"""Workers that the journal does not know of may have had the next ones: agents remember how each
of them ended. And so many per term: what another leader skipped to may be forgotten as well."""
TERM_MAX = Term(2**53)
"""No agent has seen a later one, whatever it says."""
PATIENCE_SECONDS = 30.0
"""Then it is said which ranks are missing, and those that cannot be anywhere are given up."""


def gap(cluster: Cluster, term: Term, seq: int, hello: Hello) -> JournalBehind | None:
    """What a node has obeyed beyond the end of its term, as this journal has it."""
    ends = [at for later, at in cluster.terms.items() if later > hello.term_seen]
    end = min(ends, default=seq) if hello.term_seen < term else seq
    if hello.seq_seen <= end or hello.seq_seen == cluster.ahead.get(hello.node):
        # Before its first order of this history a node says again what is written down already.
        return None
    obeyed = believed(cluster, hello).obeyed
    return JournalBehind(hello.node, hello.term_seen, hello.seq_seen, end + 1, obeyed)


def believed(cluster: Cluster, hello: Hello) -> Hello:
    """A node's word without jobs that are none of its business."""
    obeyed = {
        name: generation
        for name, generation in hello.obeyed.items()
        if (job := cluster.jobs.get(JobId(name))) is None or _belongs(cluster, job, hello)
    }
    return replace(hello, obeyed=obeyed)


def behind(turn: Turn, event: JournalBehind) -> None:
    """Write the gap down, and decide nothing about jobs that went on in it."""
    cluster = turn.cluster
    found = Gap(turn.now, event.node, event.term_seen, event.first, event.seq_seen)
    cluster.gaps = (*cluster.gaps, found)[-GAPS_MAX:]
    cluster.ahead[event.node], cluster.behind_at[event.node] = event.seq_seen, turn.now
    turn.note(
        f"this journal is behind: {event.node} has obeyed entry {event.seq_seen} of term "
        f"{event.term_seen}, and {event.first} to {event.seq_seen} are not here"
    )
    for name, generation in sorted(event.obeyed.items()):
        job = cluster.jobs.get(JobId(name))
        if job is not None and not job.state.over:
            known = cluster.begun_with.get(JobId(name), job.promised)
            if generation > known or (generation == known and _under_way(job)):
                _doubt(turn, job, generation, event.node)


def _under_way(job: Job) -> bool:
    """In the middle of a recovery the journal may have forgotten how far it came: who is a joiner
    without state here may have trained since. A save, or a move, is told again."""
    moving = job.migration
    return moving is not None and moving.purpose == "recover" and not (moving.saves or moving.cold)


def hear(turn: Turn, state: NodeState, event: Hello) -> None:
    """What one agent knows of the jobs in doubt; its word may be what brings one into doubt."""
    if turn.cluster.ahead.get(event.node, event.seq_seen) != event.seq_seen:
        # Since the gap was written down it has obeyed entries that are here.
        del turn.cluster.ahead[event.node]
    turn.cluster.shown.pop(event.node, None)
    for name, generation in sorted(event.obeyed.items()):
        job = turn.cluster.jobs.get(JobId(name))
        if job is None or job.state.over:
            _note_unknown(turn, JobId(name), event)
            continue
        # Nearly always it knows no more than we do: then nobody looks through the seats for it.
        later = generation > job.promised or job.unsure is not None
        later = later or _runs_unknown(turn.cluster, job, event)
        if later and _belongs(turn.cluster, job, event):
            _doubt(turn, job, generation, event.node)
    for job in _unsure(turn.cluster):
        assert job.unsure is not None
        facts = [fact for fact in event.workers if fact.job == job.spec.job]
        if _belongs(turn.cluster, job, event):
            # What this agent has to tell besides comes behind its hello.
            late = turn.now + suspicion.TERM_GRACE_SECONDS - PATIENCE_SECONDS
            job.unsure.since = max(job.unsure.since, late)
        else:
            if facts:
                _disbelieve(turn, job, state, facts)
            continue
        living = {(fact.rank, state.node, fact.incarnation) for fact in facts}
        job.unsure.dead = tuple(seat for seat in job.unsure.dead if _who(seat) not in living)
        job.unsure.claims[state.node] = tuple(
            Seat(fact.rank, state.node, fact.slot, fact.incarnation) for fact in facts
        )
        for fact in facts:
            _doubt(turn, job, fact.generation, event.node)
            # Of a rank that only an earlier, larger run had there is no seat.
            keep_slot(turn, state, fact, fenced=fact.rank >= job.spec.world_size)
        turn.touched = True


def _note_unknown(turn: Turn, name: JobId, hello: Hello) -> None:
    """A run that the journal lacks, of a name that does not run here. Whoever runs it again gets
    numbers that no agent takes for those of then; and if it lives, that is the run then."""
    cluster, node = turn.cluster, hello.node
    known = _known(cluster, name)
    if not names.never_given_out(known, hello.obeyed[name]):
        return
    told = _told(cluster, name, hello)
    if told is None or not names.never_given_out(known, told):
        return
    lives = any(fact.job == name for fact in hello.workers)
    if lives:
        # Its word is proof enough, also of a node that was forgotten with what it had shown.
        cluster.behind_at.setdefault(node, turn.now)
        cluster.shown.setdefault(node, {})[name] = told
    if not forgotten(cluster, name, node, told):
        return
    if told > max(known.promised if known is not None else 0, cluster.past_number):
        floor = max(told, cluster.term * INCARNATIONS_SKIPPED)
        cluster.past_number = floor + INCARNATIONS_SKIPPED


def _runs_unknown(cluster: Cluster, job: Job, hello: Hello) -> bool:
    """Whether a job that waits here lives there, in numbers that were skipped for such a run. What
    was merely obeyed may have ended: then it is to be run again."""
    if job.state is not JobState.WAITING or hello.node not in cluster.behind_at:
        return False
    facts = (fact for fact in hello.workers if fact.job == job.spec.job)
    return any(names.never_given_out(job, fact.generation) for fact in facts)


def submitted(turn: Turn, name: JobId) -> None:
    """A job is submitted again that lives in a run which the journal lacks: that is found, and none
    is started beside it."""
    cluster, job = turn.cluster, turn.cluster.jobs[name]
    told = {node: runs.pop(name) for node, runs in cluster.shown.items() if name in runs}
    cluster.shown = {node: runs for node, runs in cluster.shown.items() if runs}
    for node in sorted(told):
        state = cluster.nodes[node]
        users = [(slot, user) for slot, user in sorted(state.uses.items()) if user.job == name]
        if not users:
            continue
        _doubt(turn, job, told[node], node)
        assert job.unsure is not None
        if state.linked:
            job.unsure.claims[node] = tuple(
                Seat(user.rank, node, slot, user.incarnation) for slot, user in users
            )
    if job.unsure is not None:
        settle(turn, job)


def _disbelieve(turn: Turn, job: Job, state: NodeState, facts: list[WorkerFact]) -> None:
    """Whoever it is gets no seat by saying so; what it runs, if it does, is left alone for now."""
    for fact in facts:
        keep_slot(turn, state, fact, fenced=True)
    ranks = ", ".join(str(fact.rank) for fact in facts[:8])
    turn.note(
        f"{state.node} lists rank {ranks} of {job.spec.job}, and does not show that it was ever "
        "told of it: not believed",
        job,
    )


def keep_slot(turn: Turn, state: NodeState, fact: WorkerFact, *, fenced: bool) -> None:
    """Nothing else may be placed where a worker is that nobody knew of."""
    if fact.slot not in state.uses and fact.slot < state.slots:
        user = Occupant(fact.job, fact.rank, fact.incarnation, fenced=fenced)
        slots.occupy(turn.cluster, state.node, fact.slot, user)


def _who(seat: Seat) -> tuple[Rank, NodeId, int]:
    """Without the slot, which is not known of the dead."""
    return seat.rank, seat.node, seat.incarnation


def _belongs(cluster: Cluster, job: Job, hello: Hello) -> bool:
    """Whether a node may speak for a job: it has something of it as far as the journal knows, or it
    was told the secret of a generation that the journal has forgotten. Any other's word neither
    stops a job nor takes a seat: it may be the only node that somebody broke into."""
    name, node = job.spec.job, hello.node
    state, now = cluster.nodes.get(node), job.roster
    if state is not None and any(u.job == name and not u.fenced for u in state.uses.values()):
        return True
    if now is not None and any(seat.node == node for seat in now.seats):
        return True
    told = _told(cluster, name, hello)
    return told is not None and told >= job.generation


def _told(cluster: Cluster, name: JobId, hello: Hello) -> Generation | None:
    """The generation of a job that a node shows it was told of."""
    said = hello.belongs.get(str(name), "")
    generation = belonging.generation_of(said)
    if generation is None:
        return None
    secret = generation_secret(cluster, name, generation)
    real = belonging.same(said, belonging.word(secret, name, generation, hello.node))
    return generation if real else None


def _doubt(turn: Turn, job: Job, generation: Generation, node: NodeId) -> None:
    if job.unsure is None:
        skipped = generation < job.promised and names.never_given_out(job, generation)
        knows = "does not have it" if skipped else f"knows {job.promised}"
        why = (
            f"{node} has obeyed generation {generation} of {job.spec.job}, and the journal "
            f"{knows}: nothing is decided before all its ranks are found"
        )
        job.unsure = Unsure(turn.now, why, claims=_listed(turn.cluster, job))
        if job.roster is not None and job.migration is not None:
            job.unsure.dead = tuple(job.roster.seats[rank] for rank in sorted(job.migration.gone))
        job.broken_at = -1.0
        if rules.doubts_stand_aside(turn.cluster):
            # What it asks for is judged anew when it is known; till then nobody waits behind it.
            job.turn_at = -1.0
        turn.note(why, job)
    job.unsure.generation = max(job.unsure.generation, generation)


def _listed(cluster: Cluster, job: Job) -> dict[NodeId, tuple[Seat, ...]]:
    """What agents that came before the doubt have of a job: they listed who is in the books."""
    claims = {}
    for state in cluster.nodes.values():
        seats = tuple(
            Seat(user.rank, state.node, slot, user.incarnation)
            for slot, user in sorted(state.uses.items())
            if user.job == job.spec.job and user.rank >= 0 and not user.fenced
            if user.rank not in job.missing
        )
        if seats and state.alive and state.linked:
            claims[state.node] = seats
    return claims


def left_alone(turn: Turn, state: NodeState, fact: WorkerFact) -> bool:
    """A worker without a seat that is not to be fenced: the journal may have forgotten its seat."""
    cluster = turn.cluster
    job = cluster.jobs.get(fact.job)
    if job is not None and job.unsure is not None:
        return True
    if not forgotten(cluster, fact.job, state.node, fact.generation):
        return False
    keep_slot(turn, state, fact, fenced=True)
    turn.note(
        f"{state.node} runs rank {fact.rank} of {fact.job}, which this journal does not have: it "
        "is left alone, and nothing is decided about it"
    )
    return True


def forgotten(cluster: Cluster, name: JobId, node: NodeId, generation: Generation) -> bool:
    """A run that is not one of this journal's, and may be one of those that it lacks, which this
    node has obeyed. What ended after that was found ended for good: its workers are not left alone.
    What was never given out here did not end here either, however often its name was run since."""
    behind_at, known = cluster.behind_at.get(node), _known(cluster, name)
    if behind_at is None:
        return False
    if known is None or names.never_given_out(known, generation):
        return True
    if isinstance(known, Job):
        return known.state.over and known.since <= behind_at
    return known.ended_at <= behind_at


def _known(cluster: Cluster, name: JobId) -> Job | Past | None:
    return cluster.jobs.get(name) or cluster.past.get(name)


def date_gaps(cluster: Cluster, moment: float) -> None:
    """A snapshot of before the moments were kept, and when it was made: who was left alone by it is
    left alone."""
    cluster.behind_at = dict.fromkeys(cluster.ahead, moment)
    for found in sorted(cluster.gaps, key=lambda gap: gap.at):
        cluster.behind_at[found.node] = found.at


def heard(turn: Turn, job: Job, event: Message) -> None:
    """A message about a job in doubt: an end, and that it does not train, are remembered; the rest
    is told again later."""
    assert job.unsure is not None
    if event.node not in job.unsure.claims:
        # Those who belong to it have listed what they have, if it is nothing.
        turn.ignore(f"message about {job.spec.job} ignored: {event.node} has nothing of it")
        return
    match event:
        case Observed(sign=Sign.EXIT | Sign.EXCEPTION | Sign.FINISHED) if event.rank >= 0:
            _ended(turn, job, event)
        case Observed(sign=Sign.BROKEN):
            why = f"rank {event.rank} on {event.node}: {event.detail}"
            turn.touched |= note_broken(job, why, turn.now)
        case PhaseReport() if event.phase not in (Phase.RESUME, Phase.AGREE) and any(
            seat.boundary >= 0 for seat in event.seats
        ):
            # Those who join report as well, and so do targets of a move while all others train.
            why = f"ranks on {event.node} wait in {event.phase}"
            turn.touched |= note_broken(job, why, turn.now)
    if not turn.touched:
        turn.ignore(f"message about {job.spec.job} ignored: its ranks are not found yet")


def _ended(turn: Turn, job: Job, event: Observed) -> None:
    """Agents tell of all ends that they remember: of earlier workers, and of earlier runs, too."""
    assert job.unsure is not None
    rank, at = event.rank, event.incarnation
    if rank >= job.spec.world_size:
        return
    if at < (job.roster.seats[rank].incarnation if job.roster else job.first_incarnation):
        return
    seat = Seat(rank, event.node, -1, at)
    if event.sign is Sign.FINISHED and job.finished.get(rank, -1) < at:
        job.finished[rank], turn.touched = at, True
    if seat not in job.unsure.dead:
        job.unsure.dead = (*job.unsure.dead, seat)
        turn.touched = True


def give_up(job: Job) -> None:
    """Somebody ends the job: agents refuse a number below what they have obeyed."""
    assert job.unsure is not None
    job.generation = max(job.generation, job.unsure.generation)
    job.promised = max(job.promised, job.generation)
    job.unsure, job.unissued = None, ()


def term_began(turn: Turn) -> None:
    """All agents come again: what they had before is not what they have now."""
    for job in _unsure(turn.cluster):
        assert job.unsure is not None
        job.unsure.claims, job.unsure.since, job.unsure.told = {}, turn.now, False
        job.broken_at = -1.0


def lose(job: Job, node: NodeId) -> None:
    """A node is gone with all that it claimed."""
    if job.unsure is not None:
        job.unsure.claims.pop(node, None)


def tick(turn: Turn) -> None:
    for job in _unsure(turn.cluster):
        _give_up_the_lost(turn, job)
    settle_all(turn)
    for job in _unsure(turn.cluster):
        assert job.unsure is not None
        if not job.unsure.told and turn.now >= job.unsure.since + PATIENCE_SECONDS:
            job.unsure.told = True
            seats, dead = _found(job)
            missing = _problem(job, seats)
            missing = missing or given_away.why_not(turn.cluster, job, seats, dead)
            missing = missing or "an agent has yet to come"
            job.unsure.why = (
                f"the journal is behind, and {missing}: bring "
                f"back the nodes that ran {job.spec.job}, or end it with `keepstep stop`"
            )
            turn.note(job.unsure.why, job)


def settle_all(turn: Turn) -> None:
    for job in _unsure(turn.cluster):
        settle(turn, job)


def settle(turn: Turn, job: Job) -> None:
    """If every rank is found: these are its seats, and everybody forms the groups anew."""
    unsure = job.unsure
    assert unsure is not None
    seats, dead = _found(job)
    if _problem(job, seats) or given_away.why_not(turn.cluster, job, seats, dead):
        return
    waits = turn.now < unsure.since + suspicion.TERM_GRACE_SECONDS
    if waits and (dead or not suspicion.all_came(turn.cluster)):
        # Of a rank that ended, or was fenced, a later worker may live where nobody spoke yet, or
        # may have finished, which is told behind its agent's hello.
        return
    if all(job.finished.get(rank) == seat.incarnation for rank, seat in seats.items()):
        give_up(job)
        why = f"all {len(seats)} ranks finished, and the journal had forgotten"
        launch.finish(turn, job, JobState.FINISHED, 0, why)
        return
    if len(dead) == len(seats) and not _all_had_time(turn, unsure):
        return  # Nothing would be left but a checkpoint: somebody may come who lives.
    saves = job.migration is not None and job.migration.saves
    _seat(turn, job, [seats[Rank(rank)] for rank in range(job.spec.world_size)], dead)
    job.unsure = None
    why = (
        f"the seats of {job.spec.job} are as {len(unsure.claims)} agents list them, up to "
        f"generation {unsure.generation}: the journal had forgotten"
    )
    cause = Cause(Sign.STORE_LOST, detail=why)
    observe.fault(turn, job, Fault((cause,), why, dead=tuple(sorted(dead))))
    if saves and not job.state.over:
        saving.leave(turn, job, "it was, before the journal forgot")


def _give_up_the_lost(turn: Turn, job: Job) -> None:
    """A rank of which no agent says a word, though all have come and had time, and whose peers miss
    it: its node was started anew, or is lost. It is as dead as any rank of a lost node."""
    unsure, cluster = job.unsure, turn.cluster
    assert unsure is not None
    if not _all_had_time(turn, unsure):
        return
    seats, dead = _found(job)
    stands = job.broken_at >= 0 or bool(dead)
    if not stands and not all(state.linked for state in cluster.nodes.values()):
        return  # It may train well where we hear nobody.
    lost = [s for s in (job.roster.seats if job.roster else ()) if s.rank not in seats]
    if lost:
        unsure.dead = (*unsure.dead, *lost)
        names = ", ".join(str(seat.rank) for seat in lost[:8])
        turn.note(f"no agent has rank {names} of {job.spec.job}: lost with its node", job)


def _all_had_time(turn: Turn, unsure: Unsure) -> bool:
    return turn.now >= unsure.since + PATIENCE_SECONDS and suspicion.all_came(turn.cluster)


def _found(job: Job) -> tuple[dict[Rank, Seat], set[Rank]]:
    """The newest worker of each rank; and the ranks of whom it is known that theirs is dead."""
    assert job.unsure is not None
    ended_ = set(map(_who, job.unsure.dead))
    seats: dict[Rank, Seat] = {}
    # Of two with one number the one that lives.
    for seat in sorted(_claimed(job), key=lambda s: (s.incarnation, _who(s) not in ended_)):
        seats[seat.rank] = seat
    for seat in job.roster.seats if job.roster is not None else ():
        # Where the journal has it, and its end was told: only its slot is not in what was told.
        if seat.rank not in seats and _who(seat) in ended_:
            seats[seat.rank] = seat
    for seat in sorted(job.unsure.dead, key=lambda seat: -seat.incarnation):
        seats.setdefault(seat.rank, seat)
    return seats, {rank for rank, seat in seats.items() if _who(seat) in ended_}


def _claimed(job: Job) -> list[Seat]:
    """Workers that agents list. Of a rank that only an earlier run had there is no seat."""
    assert job.unsure is not None
    claims = job.unsure.claims.values()
    return [seat for claim in claims for seat in claim if seat.rank < job.spec.world_size]


def _problem(job: Job, seats: Mapping[Rank, Seat]) -> str:
    """What is not known of the ranks, of which these were found; empty: all is."""
    assert job.unsure is not None
    missing = [rank for rank in range(job.spec.world_size) if Rank(rank) not in seats]
    if missing:
        return f"rank {', '.join(map(str, missing[:8]))} was found nowhere"
    ended_ = set(map(_who, job.unsure.dead))
    for seat in _claimed(job):
        newest = seats.get(seat.rank, seat)
        if _who(seat) in ended_ or _who(newest) in ended_:
            continue
        if seat != newest and seat.incarnation == newest.incarnation:
            return f"rank {seat.rank} runs on {seat.node} and on {newest.node}"
    return ""


def _seat(turn: Turn, job: Job, seats: list[Seat], dead: set[Rank]) -> None:
    """From now on the journal knows these seats."""
    cluster, unsure, name = turn.cluster, job.unsure, job.spec.job
    assert unsure is not None
    for state in cluster.nodes.values():
        for slot in [s for s, user in state.uses.items() if user.job == name and user.rank >= 0]:
            slots.release(cluster, state.node, slot)
    for seat in seats:
        if seat.rank in dead:
            continue  # Its slot is free, or another rank's by now.
        user = cluster.nodes[seat.node].uses.get(seat.slot)
        if user is not None:
            # Whoever it was in the journal is not there.
            if (owner := cluster.jobs.get(user.job)) is not None:
                owner.standbys.pop(slot_key(seat.node, seat.slot), None)
            slots.release(cluster, seat.node, seat.slot)
        occupant = Occupant(name, seat.rank, seat.incarnation)
        slots.occupy(cluster, seat.node, seat.slot, occupant)
    others = [s for claim in unsure.claims.values() for s in claim if s not in seats]
    job.generation = max(job.generation, unsure.generation)
    job.promised = max(job.promised, job.generation)
    secret = generation_secret(cluster, name, job.generation)
    before = job.roster.store_node if job.roster is not None else NodeId("")
    store = roster.store_node(seats, cluster.nodes, dead, before)
    job.roster = roster.build(name, job.generation, secret, store, seats, cluster.nodes)
    # Private state may also be where ranks sat before what was forgotten.
    spares.settle(cluster, job, Settled(job.roster, cluster.counter), *job.settled)
    floor = cluster.term * INCARNATIONS_SKIPPED
    job.incarnations = {s.rank: max(s.incarnation, floor) + INCARNATIONS_SKIPPED for s in seats}
    job.homes = job.homes or {seat.rank: seat.node for seat in seats}
    job.migration, job.missing, job.finished, job.leaving = None, {}, {}, {}
    job.loan, job.unissued = None, ()
    job.broken_at, job.stalls, job.stalls_at = -1.0, {}, -1.0
    job.begun, job.state = True, JobState.RUNNING
    orders.fence_seats(turn, job, "forgotten", others)


def _unsure(cluster: Cluster) -> list[Job]:
    jobs = map(cluster.jobs.__getitem__, cluster.open_jobs)
    return [job for job in jobs if job.unsure is not None]
