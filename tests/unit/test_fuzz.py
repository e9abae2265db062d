"""A small part of `python -m bench.fuzz`, with a seed of its own: the rest is in bench/results."""

from __future__ import annotations

from bench import fuzz_wire

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
