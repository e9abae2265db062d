"""When a thread may speak for a leader's loop."""

from __future__ import annotations

import threading

import pytest

from keepstep.errors import Transient
from keepstep.model import Term
from keepstep.orchestrator import lease

LEASE = 2.0
SECONDS_MAX = 5.0


def fares(silent: float, *, away: bool = False) -> dict[str, object]:
    return {"away": away, "written_seconds_ago": silent, "lease_seconds": LEASE}


@pytest.mark.parametrize(
    ("told", "speaks"),
    [
        (fares(0.5), False),
        (fares(1.5), True),
        (fares(5.0), True),
        # Dead, for all we know: somebody else shall lead.
        (fares(lease.LATE_SECONDS_MAX), False),
        # It cannot write: a lease without a journal would keep everybody else from deciding.
        (fares(1.5, away=True), False),
    ],
)
def test_it_speaks_for_a_loop_that_is_late_and_for_no_other(told, speaks):
    assert lease.speaks(told, LEASE) is speaks


class Store:
    """A journal that counts, fails at first, and then says in turn whether there is a lease."""

    def __init__(self, *leads: bool) -> None:
        self.leads = list(leads)
        self.asked: list[Term] = []
        self.twice, self.all_said = threading.Event(), threading.Event()
        self.closed = threading.Event()

    def lease_line(self) -> Store:
        return self

    def ready(self) -> None: ...

    def prolong(self, term: Term) -> bool:
        self.asked.append(term)
        if len(self.asked) == 1:
            raise Transient("no answer", 0.1) if self.leads else OSError("too many open files")
        self.twice.set()
        if not self.leads:
            self.all_said.set()
        return self.leads.pop(0) if self.leads else True

    def close(self) -> None:
        self.closed.set()


def test_what_fails_is_tried_again_and_nothing_is_said_after_the_end():
    store, said = Store(), []
    late = {**fares(0.03), "lease_seconds": 0.04}
    with lease.kept(store, Term(7), lambda: late, lambda name, **_: said.append(name)):
        assert store.twice.wait(SECONDS_MAX)
    asked = len(store.asked)
    assert said[:2] == ["lease.not_prolonged", "lease.prolonged"]
    assert set(store.asked) == {7}
    assert not any(thread.name == "keepstep-lease" for thread in threading.enumerate())
    assert len(store.asked) == asked
    assert store.closed.is_set()


def test_a_lease_that_was_over_is_kept_again_once_the_loop_has_renewed_it():
    """The loop that was late has written since, and nobody had taken over: its term goes on."""
    store, said = Store(False, False, True, False), []
    late = {**fares(0.03), "lease_seconds": 0.04}
    with lease.kept(store, Term(7), lambda: late, lambda name, **_: said.append(name)):
        assert store.all_said.wait(SECONDS_MAX)
    assert said[:3] == ["lease.not_prolonged", "lease.lost", "lease.prolonged"], "said once"
    assert said[3] == "lease.lost"
    assert store.closed.is_set()


def test_a_loop_in_time_is_left_alone():
    store = Store()
    looked = threading.Event()

    def well() -> dict[str, object]:
        looked.set()
        return {**fares(0.0), "lease_seconds": 0.04}

    with lease.kept(store, Term(7), well, lambda *_, **__: None):
        looked.clear()
        assert looked.wait(SECONDS_MAX)
    assert store.asked == []
