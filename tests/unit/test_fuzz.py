"""A small part of `python -m bench.fuzz`, with a seed of its own: the rest is in bench/results."""

from __future__ import annotations

from bench import fuzz_brain, fuzz_wire
from keepstep.orchestrator import reconcile

INPUTS = 10_000


def test_hostile_inputs_are_refused_or_read_and_crash_nobody():
    found = fuzz_wire.attack(seed=2, first=0, count=INPUTS)
    assert found["crashes"] == []
    for name, outcomes in found["outcomes"].items():
        # An attack that is always refused at the first byte would prove nothing.
        assert outcomes["refused"] > 100, name
        assert sum(outcomes.values()) - outcomes["refused"] > 10, name


def test_a_crash_would_be_seen(monkeypatch):
    def brittle(data: bytes) -> str:
        if data.startswith(b"{") and b"n1" in data:
            raise ValueError("a bug")
        return "refused"

    monkeypatch.setitem(fuzz_wire.READERS, "messages", brittle)
    found = fuzz_wire.attack(seed=2, first=0, count=200)
    assert found["crashes"]
    again = fuzz_wire.Inputs(2).make(found["crashes"][0]["number"])
    assert b"n1" in again, "an input is found again by its number"


def test_a_node_that_was_broken_into_crashes_nobody_and_changes_nobody_elses_job():
    found = fuzz_brain.attack(seed=2, first=0, count=60)
    assert found["crashes"] == []
    assert found["outcomes"]["stepped"] > 20 * 60


def test_a_lie_that_is_believed_would_be_seen(monkeypatch):
    monkeypatch.setattr(reconcile, "_belongs", lambda cluster, job, hello: True)
    found = fuzz_brain.attack(seed=2, first=0, count=20)
    assert any("changed another's job" in crash["why"] for crash in found["crashes"])
