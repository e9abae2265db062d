"""When a leader lets others lead."""

from __future__ import annotations

from keepstep.model import NodeId
from keepstep.orchestrator.stepping_down import ALONE_SECONDS, hears_nobody

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def test_a_leader_that_hears_nobody_lets_others_lead():
    why = hears_nobody({A: 0.0, B: 1.0}, (A, B), 1.1 + ALONE_SECONDS)
    assert str(why) == "none of 2 nodes was heard for 2.6 s"


def test_one_voice_is_enough_to_go_on():
    assert hears_nobody({A: 0.0, B: 100.0}, (A, B), 100.0) is None


def test_who_has_left_or_has_yet_to_come_says_nothing_about_our_network():
    assert hears_nobody({A: 0.0, B: 0.0, C: 0.0}, (A,), 100.0) is None
    assert hears_nobody({A: 0.0, B: 0.0}, (), 100.0) is None
