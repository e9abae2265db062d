"""When it is certain that Gloo has nothing left to do."""

from __future__ import annotations

import pytest

from keepstep.training import lost
from keepstep.training.lost import Flight, Thread, still


def loop(slept: int, *, asleep: bool = True) -> Thread:
    return Thread("gloo_tcp_loop", asleep, slept)


def worker(slept: int, *, asleep: bool = True) -> Thread:
    return Thread("pt_gloo_runloop", asleep, slept)


def test_workers_that_slept_and_a_network_that_was_looked_at_are_still():
    assert still({1: loop(5), 2: worker(9)}, {1: loop(30), 2: worker(9)})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({1: loop(5), 2: worker(9)}, {1: loop(30), 2: worker(10)}),
        ({1: loop(5), 2: worker(9)}, {1: loop(30), 2: worker(9, asleep=False)}),
        ({1: loop(5), 2: worker(9, asleep=False)}, {1: loop(30), 2: worker(9)}),
        ({1: loop(5), 2: worker(9)}, {1: loop(5), 2: worker(9)}),
        ({1: loop(5, asleep=False), 2: worker(9)}, {1: loop(30), 2: worker(9)}),
        ({1: loop(5)}, {1: loop(30), 2: worker(1)}),
        ({}, {}),
        ({1: loop(5)}, {1: loop(30)}),
    ],
    ids=["woke", "runs", "ran", "nobody looked", "late", "new", "no threads", "no worker"],
)
def test_anything_else_may_yet_write(before, after):
    assert not still(before, after)


class Swap:
    """Something flies until it is released."""

    def __init__(self) -> None:
        self.left = 1
        self.said: list[tuple[int, str]] = []

    def number(self) -> int:
        return 7

    def flying(self, number: int) -> int:
        return self.left

    def release(self, number: int, why: str) -> None:
        self.left = 0
        self.said.append((number, why))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("GRACE", 0.0), ("LOOK", 0.001)):
        monkeypatch.setattr(lost, f"{name}_SECONDS", seconds)


def test_what_flies_is_ended_once_nothing_moves(quick: None, monkeypatch: pytest.MonkeyPatch):
    looks = iter([{1: loop(n), 2: worker(min(n, 3))} for n in range(100)])
    monkeypatch.setattr(lost, "look", lambda: next(looks))
    swap = Swap()
    lost.free(Flight.of([swap, object(), None]))
    assert swap.said == [(7, lost.LOST)]
    assert next(looks)[1].slept == 5, "at the first look after which its worker slept on"


def test_what_still_moves_is_left_alone(quick: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lost, "FOR_SECONDS_MAX", 0.05)
    looks = iter([{1: loop(n), 2: worker(n)} for n in range(10_000)])
    monkeypatch.setattr(lost, "look", lambda: next(looks))
    swap = Swap()
    lost.free(Flight.of([swap]))
    assert swap.said == []
