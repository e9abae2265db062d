"""When a leader lets others lead."""

from __future__ import annotations

from keepstep import wire
from keepstep.errors import Behind
from keepstep.model import NodeId, Term
from keepstep.orchestrator import events
from keepstep.orchestrator.stepping_down import (
    ALONE_SECONDS,
    HEED_SECONDS,
    TERMS_AHEAD_MAX,
    Leaving,
    hears_nobody,
    heeds,
    of_another,
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
    assert why_not_term(seen(2**62), Term(5))
    assert why_not_term(seen(6 + TERMS_AHEAD_MAX), Term(5))
    assert why_not_term(seen(5 + TERMS_AHEAD_MAX), Term(5)) == ""
    assert why_not_term(seen(900), Term(5)) == ""
    assert why_not_term(seen(1), Term(5)) == ""


def seen(term: int, node: NodeId = A, boot: str = "boot", seq: int = 0) -> wire.Hello:
    return wire.Hello(node, "a", 1, 1, 2, boot, term_seen=Term(term), seq_seen=seq)


def test_a_term_that_was_seen_before_its_leader_greeted_anybody_was_begun_twice():
    assert of_another(seen(5), Term(5), {})
    assert of_another(seen(5), Term(5), {B: "another boot"})
    assert of_another(seen(6), Term(5), {A: "boot"}), "a later one was, whoever says so"


def test_who_was_greeted_in_this_term_may_know_it_and_who_knows_an_earlier_one_is_no_wonder():
    assert not of_another(seen(5), Term(5), {A: "boot"}), "its stream broke"
    assert not of_another(seen(5, boot="new"), Term(5), {A: "boot"})
    assert not of_another(seen(5, node=B), Term(5), {A: "boot"}), "renamed, with its room"
    assert not of_another(seen(4), Term(5), {})
    assert not of_another(seen(0), Term(5), {})


def test_before_it_leaves_a_leader_writes_down_what_the_first_one_of_its_term_had_ordered():
    """Entries 101 to 103 of the first term 5 are gone, and others have their numbers by now."""
    leaving = Leaving()
    word = leaving.heed(seen(5, seq=103), Term(5), 100, 0.0)
    assert isinstance(word, events.JournalBehind)
    assert (word.node, word.term_seen, word.first, word.seq_seen) == (A, 5, 101, 103)
    assert isinstance(leaving.why, Behind)
    assert leaving.why.term == 5


def test_what_is_in_the_journal_of_a_term_begun_twice_is_no_gap():
    assert Leaving().heed(seen(5, seq=100), Term(5), 100, 0.0) == events.Tick()
    assert Leaving().heed(seen(6, seq=103), Term(5), 100, 0.0) == events.Tick(), "told in the next"


def test_one_node_deposes_one_leader_a_minute():
    heeded: dict[NodeId, float] = {}
    assert heeds(heeded, A, 100.0)
    assert not heeds(heeded, A, 101.0)
    assert heeds(heeded, B, 101.0)
    assert heeds(heeded, A, 100.0 + HEED_SECONDS)
    assert len(heeded) == 2
