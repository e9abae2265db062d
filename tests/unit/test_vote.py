"""The vote before an update: what a rank does whose vote broke."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from keepstep import wire
from keepstep.model import (
    Generation,
    JobId,
    NodeId,
    OrderId,
    Phase,
    Rank,
    Seat,
    Term,
)
from keepstep.training import recovery, vote
from keepstep.training.boundary import Boundary
from keepstep.training.inbox import Inbox
from keepstep.training.inner import GroupsBroken
from keepstep.training.keeper import Keeper
from keepstep.training.registry import Registry

RANK = 2


def order(action: wire.Action, generation: int = 2) -> wire.Order:
    return wire.Order(Term(1), Generation(generation), OrderId("o"), JobId("job"), (), action)


class FakeKeeper:
    """A rank in step 5, with its gradients in hand and a vote that breaks."""

    def __init__(self) -> None:
        self.said: list[wire.WorkerReport] = []
        self.norm = nn.BatchNorm1d(2)
        self.registry = Registry(RANK, 4)
        self.registry.add("norm", self.norm)
        self.boundary = Boundary(self.registry)
        self.boundary.step = 5
        self.boundary.begin()
        self.digests = self.registry.shared_digests()
        self.norm(torch.rand(4, 2))
        self.inbox = Inbox(lambda: None, lambda message: None)
        self.place = SimpleNamespace(rank=RANK, incarnation=0, job=JobId("job"))
        self.page = SimpleNamespace(mark=lambda *_: None, count_vote=lambda: None)
        self.leaves_in = self.applies_in = -1
        self.has_state, self.unsettled, self.step_seconds = True, False, 0.1
        self.homes = SimpleNamespace(boundaries=lambda: (5, 6))
        self.covering, self.covers = None, ()
        self.step_through = lambda step: None
        self.groups = SimpleNamespace(
            side=SimpleNamespace(barrier=self._barrier),
            log_digest=lambda: "",
            prepared=lambda generation: None,
        )

    def _barrier(self) -> Any:
        raise GroupsBroken("aborted")

    def reach(self, point: str) -> None: ...

    def abort(self, generation: int) -> None: ...

    is_leaving = Keeper.is_leaving

    def prepare(self, generation: int, quiesce: wire.Quiesce) -> None: ...

    def tell_broken(self, error: BaseException) -> None: ...

    def is_fault(self, error: BaseException) -> bool:
        return isinstance(error, GroupsBroken)

    def report(
        self, kinds: str, phase: Phase, seat: wire.SeatReport, generation: int | None = None
    ) -> None:
        told = wire.WorkerReport(JobId("job"), Generation(generation or 0), phase, seat)
        self.inbox.report(kinds, told)
        self.said.append(told)


@pytest.fixture
def keeper() -> Any:
    return FakeKeeper()


def test_a_vote_that_passes_asks_for_no_orders(keeper: Any) -> None:
    keeper.groups.side.barrier = lambda: SimpleNamespace(wait=lambda: True)
    vote.cast(keeper, updates=True)
    assert keeper.said == []
    assert keeper.applies_in == -1


def test_who_missed_the_answer_reports_its_boundary_and_makes_the_update_when_told(
    keeper: Any,
) -> None:
    moved = keeper.norm.running_mean.clone()
    keeper.inbox.receive(order(wire.Quiesce("a test")))
    keeper.inbox.receive(order(wire.Apply(6, (Rank(RANK),))))
    vote.cast(keeper, updates=True)
    (told,) = keeper.said
    assert (told.phase, told.seat.boundary, told.seat.ready) == (Phase.QUIESCE, 5, True)
    assert told.seat.intact
    # Of the boundary, not of the middle of the step; and the step is as it was.
    assert told.seat.digests == keeper.digests
    assert torch.equal(keeper.norm.running_mean, moved)
    assert keeper.applies_in == 2
    # The user's code makes the update.
    keeper.boundary.grads_ready()
    keeper.boundary.update_done()
    keeper.boundary.applied()
    vote.report_applied(keeper)
    assert keeper.said[-1].seat.boundary == 6
    assert not keeper.said[-1].seat.ready
    assert keeper.applies_in == -1


def test_a_repeated_order_is_answered_with_the_newest_report(keeper: Any) -> None:
    sent: list[Any] = []
    keeper.inbox = Inbox(lambda: None, sent.append)
    keeper.inbox.receive(order(wire.Quiesce("a test")))
    keeper.inbox.receive(order(wire.Apply(6, (Rank(RANK),))))
    vote.cast(keeper, updates=True)
    keeper.boundary.applied()
    vote.report_applied(keeper)
    for action in (wire.Quiesce("a test"), wire.Apply(6, (Rank(RANK),))):
        keeper.inbox.receive(order(action))
        assert sent[-1].seat.boundary == 6


def test_a_newer_generation_finds_the_rank_still_ready(keeper: Any) -> None:
    asked = iter([order(wire.Quiesce("a test"), 2), order(wire.Quiesce("a test"), 3)])
    keeper.inbox.take = lambda seconds_max: next(asked, order(wire.Apply(6, (Rank(RANK),)), 3))
    vote.cast(keeper, updates=True)
    assert [int(told.generation) for told in keeper.said] == [2, 3]
    assert all(told.seat.ready for told in keeper.said)
    assert keeper.applies_in == 3


def test_an_update_for_others_is_no_reason_to_make_one(keeper: Any) -> None:
    keeper.inbox.receive(order(wire.Quiesce("a test")))
    keeper.inbox.receive(order(wire.Apply(6, (Rank(0),))))
    keeper.inbox.receive(order(wire.Stop(0, "told to")))
    with pytest.raises(GroupsBroken):
        vote.cast(keeper, updates=True)
    assert keeper.applies_in == -1


@pytest.mark.parametrize("action", [wire.Stop(0, "told to"), wire.Save(5, {}, "there", ())])
def test_anything_else_is_followed_outside_the_optimizer(keeper: Any, action: wire.Action) -> None:
    keeper.inbox.receive(order(wire.Quiesce("a test")))
    keeper.inbox.receive(order(action))
    with pytest.raises(GroupsBroken, match="step 5"):
        vote.cast(keeper, updates=True)
    assert keeper.inbox.pending
    assert keeper.inbox.take(0.0).action == action
    recovery.unwind(keeper)
    assert keeper.registry.shared_digests() == keeper.digests


def test_a_leaver_does_not_speak_for_its_rank(keeper: Any) -> None:
    leaving = Seat(Rank(RANK), NodeId("n"), 0, 0)
    keeper.inbox.receive(order(wire.Quiesce("a test", leaving=(leaving,))))
    with pytest.raises(GroupsBroken):
        vote.cast(keeper, updates=True)
    assert keeper.said == []
    assert keeper.inbox.pending
