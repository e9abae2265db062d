"""When a borrower has to make room for its lender."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep import wire
from keepstep.model import JobState, NodeId, Term
from keepstep.orchestrator import events, rules, slots, state
from tests.unit.test_in_doubt import HIGH, LOW, two_jobs
from tests.unit.test_reconcile import step


def overdue() -> state.Cluster:
    """`low` has been parked for too long, and `high` has a node that it needs."""
    cluster = two_jobs(4)
    low = cluster.jobs[LOW]
    for node in ("n0", "n1"):
        slots.release(cluster, NodeId(node), 0)
    low.roster, low.state, low.published_step = None, JobState.PARKED, 4
    low.spec = replace(low.spec, policy=replace(low.spec.policy, lend_seconds_max=1.0))
    low.loan = state.Loan(LOW, HIGH, 2, 1, 5.0, began_at=6.0, boundary=4)
    return cluster


@pytest.mark.parametrize("by", [0, rules.NEWEST])
def test_a_borrower_trains_on_while_its_lender_waits_for_agents_of_before(by: int):
    cluster = overdue()
    step(cluster, events.TermBegan(Term(2), rules=by), 20.0)
    step(cluster, wire.Hello(NodeId("n0"), "a0", 1, 1, 2, "b"), 20.5)
    roster = cluster.jobs[HIGH].roster
    assert roster is not None
    for seat in roster.seats:
        facts = (wire.WorkerFact(HIGH, seat.rank, seat.slot, seat.incarnation, roster.generation),)
        step(cluster, wire.Hello(seat.node, f"a{seat.node[1:]}", 1, 1, 2, "b", facts), 20.5)
    # n1 has yet to come: in entries that are lost the lender may have been started there.
    step(cluster, events.Tick(), 21.0)
    assert (cluster.jobs[HIGH].migration is None) == (by > 0)
    step(cluster, events.Tick(), 26.0)
    moving = cluster.jobs[HIGH].migration
    assert moving is not None
    assert moving.purpose == "park"
