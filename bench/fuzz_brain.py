"""One node that was broken into says whatever it likes: well-formed, and about anybody. Seeded.

It has the certificate of its node, `evil`, a rank of job `own`, and nothing of job `victim`. Each
story is some dozens of its messages, with ticks in between, through the checks at the edge and
through the brain. Nothing may raise, the journal must give the same state again, and `victim` must
be as it was: the same seats, running, in no doubt, and not ordered about anywhere but on `evil`.
"""

from __future__ import annotations

import random
import typing
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from typing import Any

from keepstep import wire
from keepstep.model import JobId, JobSpec, NodeId, Phase, Term
from keepstep.orchestrator import (
    admission,
    bounds,
    brain,
    events,
    nodes,
    reconcile,
    rules,
    state,
    view,
)
from keepstep.orchestrator.streams import NEWS

EVIL, VICTIM, OWN = NodeId("evil"), JobId("victim"), JobId("own")
TOKEN = "token"
MESSAGES = 30
WHY_CHARS_MAX = 20_000
"""Of what is told about one event, whatever it says."""
NUMBERS = (0, 0, 1, 1, 2, 3, 5, 7, 9)
WRONG = (-(2**31), -2, -1, 100, 10**6, 2**31, 2**53, 2**62)
WORDS: Mapping[str, tuple[Any, ...]] = {
    "job": (*[VICTIM] * 8, *[OWN] * 8, "nosuch", "nosuch", "", "a b"),
    "node": (EVIL,),
    "slots": (*[2] * 20, 0, 10**9),
    "boot": (*["b"] * 9, "another"),
    "token": (TOKEN,),
    "seq_seen": (0, 0, 0, 5, 10**9),
    "term_seen": (0, 1),
    "speaks": (wire.VERSION,),
    **dict.fromkeys(("detail", "problem", "path", "reason"), ("", "x", "x" * 10**5)),
}


def attack(seed: int, first: int, count: int) -> dict[str, Any]:
    """The stories `first` to `first + count`; what became of their messages."""
    outcomes: Counter[str] = Counter()
    crashes: list[dict[str, Any]] = []
    for number in range(first, first + count):
        try:
            tell(random.Random(f"{seed}/story/{number}"), outcomes)
        except Exception as error:
            outcomes["crash"] += 1
            crashes.append({"reader": "brain", "number": number, "why": repr(error)[:300]})
    return {"outcomes": dict(sorted(outcomes.items())), "crashes": crashes, "stories": count}


def tell(chance: random.Random, outcomes: Counter[str]) -> None:
    """One story."""
    cluster, replayed = beginning(), beginning()
    seats = roster_of(cluster)
    now = 10.0
    for _ in range(MESSAGES):
        now += chance.choice((0.01, 0.3, 6.0, 31.0))
        for event in next_events(chance, cluster, outcomes):
            decision = brain.step(cluster, event, now)
            outcomes["stepped"] += 1
            check(cluster, decision, seats, event)
            if decision.changed:
                again = events.from_plain(events.to_plain(event))
                brain.step(replayed, again, now)
    assert state.fingerprint(replayed) == state.fingerprint(cluster), "the journal says otherwise"
    view.describe(state.from_plain(state.to_plain(cluster)), now)


def beginning() -> state.Cluster:
    """Two jobs that train; `evil` has a rank of one of them, and n4 is free."""
    cluster = state.new_cluster("secret")
    brain.step(cluster, events.TermBegan(Term(1), rules=rules.NEWEST), 0.0)
    for job, names in ((VICTIM, ("n0", "n1")), (OWN, ("n3", EVIL)), (None, ("n4",))):
        for name in names:
            brain.step(cluster, wire.Hello(NodeId(name), name, 1, 1, 2, "b"), 0.0)
        if job is None:
            continue
        brain.step(cluster, events.Submitted(JobSpec(job, "t.py", nodes=2, spares=0)), 0.0)
        begun = cluster.jobs[job]
        assert begun.roster is not None
        for seat in begun.roster.seats:
            told = (wire.SeatReport(seat.rank, 1, True, step=1),)
            report = wire.PhaseReport(seat.node, job, begun.generation, Phase.RESUME, told)
            brain.step(cluster, report, 1.0)
    return cluster


def next_events(
    chance: random.Random, cluster: state.Cluster, outcomes: Counter[str]
) -> list[events.Event]:
    """A message of the node's, if it gets past the edge, or a tick."""
    if chance.random() < 0.2:
        return [events.Tick()]
    kind = chance.choice((wire.Hello, wire.Hello, *NEWS))
    message = example(kind, chance)
    if not isinstance(message, wire.Hello):
        if bounds.why_not(message, EVIL) or bounds.refused(message):
            outcomes["refused"] += 1
            return []
        return [bounds.cut(message)]
    if admission.why_not_agent(message, TOKEN, None, secure=False):
        outcomes["refused"] += 1
        return []
    gap = reconcile.gap(cluster, Term(1), 5, message)
    return [gap, message] if gap is not None else [message]


def example(kind: Any, chance: random.Random, name: str = "") -> Any:
    """A value of a wire type that means somebody: real jobs, ranks and nodes, and wrong ones."""
    if name in WORDS:
        return chance.choice(WORDS[name])
    if isinstance(kind, typing.NewType):
        kind = kind.__supertype__
    if kind in (int, float):
        return kind(chance.choice(NUMBERS if chance.random() < 0.95 else WRONG))
    if kind in (str, bool, type(None)):
        return {str: chance.choice(("", "0-1", "x")), bool: chance.random() < 0.5}.get(kind)
    arguments = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if origin is tuple:
        return tuple(example(arguments[0], chance) for _ in range(chance.randrange(4)))
    if origin is dict:
        keys = chance.sample((VICTIM, OWN, "nosuch"), chance.randrange(3))
        return {str(key): example(arguments[1], chance) for key in keys}
    if arguments:
        return example(chance.choice(arguments), chance)
    if issubclass(kind, Enum):
        return chance.choice(list(kind))
    hints = typing.get_type_hints(kind)
    return kind(**{field: example(hint, chance, field) for field, hint in hints.items()})


def roster_of(cluster: state.Cluster) -> tuple[Any, ...]:
    roster = cluster.jobs[VICTIM].roster
    assert roster is not None
    return roster.seats


def check(
    cluster: state.Cluster, decision: brain.Decision, seats: tuple[Any, ...], event: events.Event
) -> None:
    """What the loop asks after each event must have an answer, and `victim` must be as it was."""
    assert len(decision.why) < WHY_CHARS_MAX, f"{type(event).__name__} fills the journal"
    brain.due(cluster)
    nodes.jobs_on(cluster, list(cluster.nodes))
    job = cluster.jobs[VICTIM]
    stands = (job.state.value, job.migration, job.unsure, roster_of(cluster))
    as_it_was = stands == ("running", None, None, seats)
    assert as_it_was, f"{event} changed another's job: {decision.why}"
    for order in decision.orders:
        strange = order.job == VICTIM and order.nodes != (EVIL,)
        assert not strange, f"{event} ordered another's job about: {order}"
