"""Reports of local ranks become one message per node, soon, and none is lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.agent.reports import GATHER_SECONDS_MAX, Reports, joined
from keepstep.model import Generation, JobId, NodeId, Phase, Rank
from keepstep.wire import Cover, PhaseReport, SeatReport, WorkerReport

JOB = JobId("job")
LOCAL = {JOB: frozenset({Rank(0), Rank(1), Rank(2)})}


def said(
    rank: int, *, generation: int = 1, phase: Phase = Phase.QUIESCE, boundary: int = 5
) -> WorkerReport:
    return WorkerReport(JOB, Generation(generation), phase, SeatReport(Rank(rank), boundary))


def ranks(reports: Reports, now: float) -> list[list[int]]:
    return [[int(s.rank) for s in report.seats] for report in reports.due(LOCAL, now)]


def test_a_report_leaves_at_once_when_all_local_ranks_have_spoken():
    reports = Reports(NodeId("n1"))
    for rank in (2, 0):
        reports.heard(said(rank), 10.0)
        assert ranks(reports, 10.0) == []
    reports.heard(said(1), 10.0)
    assert ranks(reports, 10.0) == [[0, 1, 2]]
    assert ranks(reports, 11.0) == [], "once"


def test_those_present_are_reported_in_time_and_the_rest_later():
    reports = Reports(NodeId("n1"))
    reports.heard(said(0), 10.0)
    assert reports.next_due() == 10.0 + GATHER_SECONDS_MAX
    assert ranks(reports, 10.0 + GATHER_SECONDS_MAX) == [[0]]
    assert reports.next_due() is None
    reports.heard(said(1), 12.0)
    reports.heard(said(2), 12.01)
    assert ranks(reports, 12.01) == [[0, 1, 2]]


def test_when_the_missing_rank_dies_the_others_are_all():
    reports = Reports(NodeId("n1"))
    reports.heard(said(0), 10.0)
    reports.heard(said(1), 10.0)
    survivors = {JOB: frozenset({Rank(0), Rank(1)})}
    [report] = reports.due(survivors, 10.001)
    assert len(report.seats) == 2


def test_a_dead_ranks_word_is_not_repeated():
    reports = Reports(NodeId("n1"))
    for rank in range(3):
        reports.heard(said(rank), 0.0)
    reports.due(LOCAL, 0.0)
    reports.forget_rank(JOB, Rank(1))
    [report] = reports.standing()
    assert [seat.rank for seat in report.seats] == [0, 2]


def test_phases_are_gathered_apart():
    reports = Reports(NodeId("n1"))
    reports.heard(said(0), 0.0)
    reports.heard(said(1, phase=Phase.VERIFY), 0.0)
    due = reports.due(LOCAL, 1.0)
    assert {(report.phase, len(report.seats)) for report in due} == {
        (Phase.QUIESCE, 1),
        (Phase.VERIFY, 1),
    }


def test_an_older_generation_is_dropped_and_a_newer_one_replaces_it():
    reports = Reports(NodeId("n1"))
    reports.heard(said(0, generation=2), 0.0)
    assert "ignored" in reports.heard(said(1, generation=1), 0.0)
    reports.heard(said(0, generation=3), 0.0)
    [report] = reports.due(LOCAL, 1.0)
    assert report.generation == 3


def test_a_repeated_report_is_not_sent_again_but_stands():
    reports = Reports(NodeId("n1"))
    for rank in range(3):
        reports.heard(said(rank), 0.0)
    reports.due(LOCAL, 0.0)
    assert reports.heard(said(0), 5.0) == "repeated"
    assert ranks(reports, 6.0) == []
    assert [len(report.seats) for report in reports.standing(JOB)] == [3]
    assert reports.standing(JobId("other")) == []


def test_a_changed_word_is_sent_again():
    reports = Reports(NodeId("n1"))
    for rank in range(3):
        reports.heard(said(rank), 0.0)
    reports.due(LOCAL, 0.0)
    reports.heard(said(0, boundary=6), 5.0)
    [report] = reports.due(LOCAL, 5.0)
    assert [seat.boundary for seat in report.seats] == [6, 5, 5]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from([Phase.QUIESCE, Phase.VERIFY, Phase.RESUME]),
            st.floats(0.0, 0.2),
        ),
        max_size=30,
    )
)
def test_every_word_leaves_within_the_gathering_time(story: list[tuple[int, Phase, float]]):
    reports = Reports(NodeId("n1"))
    now = 0.0
    told: set[tuple[Phase, int]] = set()
    spoken: dict[tuple[Phase, int], float] = {}
    for rank, phase, gap in story:
        # The agent's timer: it asks whenever something is due.
        while (due := reports.next_due()) is not None and due <= now + gap:
            now, gap = due, max(0.0, gap - (due - now))
            for report in reports.due(LOCAL, now):
                told |= {(report.phase, int(seat.rank)) for seat in report.seats}
        now += gap
        reports.heard(said(rank, phase=phase), now)
        spoken.setdefault((phase, rank), now)
        for report in reports.due(LOCAL, now):
            told |= {(report.phase, int(seat.rank)) for seat in report.seats}
        overdue = {k for k, at in spoken.items() if now - at > GATHER_SECONDS_MAX + 1e-6}
        assert overdue <= told


def whole(*seats: SeatReport, phase: Phase = Phase.QUIESCE) -> PhaseReport:
    return PhaseReport(NodeId("n1"), JOB, Generation(1), phase, seats)


def well(rank: int, **more: object) -> SeatReport:
    told: dict[str, Any] = {"boundary": 5, "intact": True, "digests": {"0-3": "d"}, **more}
    return SeatReport(Rank(rank), **told)


def test_ranks_of_which_the_same_is_true_are_named_in_one_word():
    slow = replace(well(2), step_seconds=0.7)
    told = joined(whole(well(0), well(1), slow, well(5)))
    assert told == whole(replace(well(0), alike="0-2+5", step_seconds=0.7))
    assert joined(told) == told


@pytest.mark.parametrize(
    "own",
    [
        {"boundary": -1, "intact": False, "digests": {}},
        {"intact": False},
        {"problem": "torn"},
        {"covers": (Cover("1", 3, 5),)},
        {"busy_seconds": 3.0},
        {"unsynced": ("0-3",)},
        {"ready": True},
        {"unsettled": True},
        {"moved_bytes": 7},
    ],
)
def test_who_has_something_of_its_own_to_say_speaks_for_itself(own: dict[str, object]):
    told = joined(whole(well(0), well(1, **own), well(2), well(3, **own)))
    assert [seat.rank for seat in told.seats] == [0, 1, 3]
    assert [seat.alike for seat in told.seats] == ["0-2/2", "", ""]


@pytest.mark.parametrize("other", [{"boundary": 4}, {"digests": {"0-3": "e"}}, {"groups": "g"}])
def test_two_kinds_of_the_same_are_two_words(other: dict[str, object]):
    told = joined(whole(well(0), well(1, **other), well(2), well(3, **other)))
    assert [seat.alike for seat in told.seats] == ["0-2/2", "1-3/2"]


def test_who_has_resumed_does_not_say_that_it_is_whole():
    told = joined(whole(well(0, intact=False), well(1, intact=False), phase=Phase.RESUME))
    assert [seat.alike for seat in told.seats] == ["0-1"]


def test_progress_and_agreement_are_told_one_by_one():
    for phase in (Phase.AGREE, Phase.REFORM, Phase.TRANSFER, Phase.SAVE):
        report = whole(well(0), well(1), phase=phase)
        assert joined(report) is report
