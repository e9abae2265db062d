"""When a leader lets others lead."""

from __future__ import annotations

from keepstep import wire
from keepstep.model import NodeId, Term
from keepstep.orchestrator.stepping_down import (
    ALONE_SECONDS,
    HEED_SECONDS,
    TERMS_AHEAD_MAX,
    hears_nobody,
    heeds,
    why_not_term,
)

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def test_a_leader_that_hears_nobody_lets_others_lead():
    why = hears_nobody({A: 0.0, B: 1.0}, (A, B), 1.1 + ALONE_SECONDS)
    assert str(why) == "none of 2 nodes was heard for 2.6 s"


def test_one_voice_is_enough_to_go_on():
    assert hears_nobody({A: 0.0, B: 100.0}, (A, B), 100.0) is None


def test_who_has_left_or_has_yet_to_come_says_nothing_about_our_network():
    assert hears_nobody({A: 0.0, B: 0.0, C: 0.0}, (A,), 100.0) is None
    assert hears_nobody({A: 0.0, B: 0.0}, (), 100.0) is None


def test_a_term_that_nobody_can_have_begun_is_refused_and_a_forgotten_one_is_not():
    def seen(term: int) -> wire.Hello:
        return wire.Hello(A, "a", 1, 1, 2, "boot", term_seen=Term(term))

    assert why_not_term(seen(2**62), Term(5))
    assert why_not_term(seen(6 + TERMS_AHEAD_MAX), Term(5))
    assert why_not_term(seen(5 + TERMS_AHEAD_MAX), Term(5)) == ""
    assert why_not_term(seen(900), Term(5)) == ""
    assert why_not_term(seen(1), Term(5)) == ""


def test_one_node_deposes_one_leader_a_minute():
    heeded: dict[NodeId, float] = {}
    assert heeds(heeded, A, 100.0)
    assert not heeds(heeded, A, 101.0)
    assert heeds(heeded, B, 101.0)
    assert heeds(heeded, A, 100.0 + HEED_SECONDS)
    assert len(heeded) == 2
