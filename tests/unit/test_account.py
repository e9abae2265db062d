"""The account: every rank-second in one class, and the numbers that are made of them."""

from __future__ import annotations

import dataclasses
import json
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.ledger import cost, goodput, verify
from keepstep.ledger.account import account, against_restart, spread
from keepstep.ledger.goodput import Spent
from tests.unit.account_story import JOB, STEP, WORLD, Story, usual

SECOND = 1_000_000_000


def seconds(story: Story, kind: Spent) -> float:
    """Of the job, not of its ranks together."""
    found = account(story.chain(), story.lines)
    return found.classes.get(kind.value, 0) / SECOND / WORLD


# ---------------------------------------------------------------- the sum


PHASES = (
    "",
    "warm",
    "agree",
    "allocate",
    "quiesce",
    "reform",
    "resume",
    "hold",
    "save",
    "fallback",
)
STATES = ("waiting", "starting", "running", "migrating", "held", "parked", "finished", "saved", "?")
KINDS = ("Submitted", "Observed", "PhaseReport", "Tick", "TermBegan", "ControlPlaneDown", "New")


@st.composite
def any_facts(draw: Any) -> dict[str, Any]:
    if draw(st.integers(0, 9)) == 0:
        return {}
    facts: dict[str, Any] = {
        "state": draw(st.sampled_from(STATES)),
        "generation": draw(st.integers(0, 6)),
        "incidents": 0,
        "step": draw(st.integers(-1, 50)),
        "world": draw(st.integers(1, 5)),
        "spares": draw(st.integers(0, 3)),
    }
    if draw(st.booleans()):
        facts |= {
            "phase": draw(st.sampled_from(PHASES)),
            "kind": draw(st.sampled_from(("start", "planned", "unplanned"))),
            "cold": draw(st.booleans()),
        }
    if draw(st.booleans()):
        facts |= {"incident": draw(st.sampled_from(("i1", "i2"))), "opened_at": 0.0}
    return facts


@st.composite
def any_entry(draw: Any) -> dict[str, Any]:
    moved = draw(st.floats(0, 30))
    body = {"phase": "verify", "generation": 1, "seats": [{"rank": 0, "moved_seconds": moved}]}
    body["seconds"] = draw(st.floats(0, 50))
    entry = {
        "event": {"kind": draw(st.sampled_from(KINDS)), "body": body},
        "now": draw(st.floats(0, 200)),
        "why": "",
    }
    if facts := draw(any_facts()):
        entry["jobs"] = {JOB: facts}
    return {"entry": entry, "seq": 1, "term": draw(st.integers(1, 3))}


@st.composite
def any_line(draw: Any) -> dict[str, Any]:
    if draw(st.integers(0, 9)) == 0:
        return {"fallback_to": draw(st.integers(0, 9))}
    number = draw(st.integers(0, 60))
    line: dict[str, Any] = {"step": number, "generation": draw(st.integers(0, 6))}
    line["samples"] = [number, number + 1]
    if draw(st.integers(0, 9)):
        line["at"] = draw(st.floats(0.1, 260))
    if draw(st.booleans()):
        names = st.sampled_from(("eval", "save"))
        line["busy"] = draw(st.dictionaries(names, st.floats(0, 60), max_size=2))
    return line


@given(
    st.lists(any_entry(), min_size=1, max_size=30),
    st.lists(any_line(), max_size=30),
    st.integers(0, 300),
)
@settings(max_examples=300)
def test_the_classes_sum_to_the_total_for_any_journal(
    bodies: list[dict[str, Any]], lines: list[dict[str, Any]], until: int
) -> None:
    hashes = tuple(f"h{at}" for at in range(len(bodies)))
    chain = verify.Chain(JOB, tuple(bodies), hashes)
    for log in ((), lines):
        for run in goodput.runs_of(chain, log, until * SECOND):
            assert all(each.nanoseconds > 0 for each in run.segments)
            moments = [run.begin, *(at for s in run.segments for at in (s.begin, s.end)), run.end]
            assert moments == sorted(moments)
            assert sum(s.nanoseconds for s in run.segments) == run.end - run.begin
            assert all(one.end == two.begin for one, two in pairwise(run.segments))


def test_the_classes_of_a_whole_story_sum_to_the_total() -> None:
    story = usual(faults=5)
    found = account(story.chain(), story.lines)
    assert sum(found.classes.values()) == found.total
    spares = found.classes[Spent.IDLE_SPARE]
    assert found.total - spares == round((found.ended_at - found.began_at) * SECOND) * WORLD
    assert json.loads(json.dumps(found.to_plain()))["classes"] == found.classes


# ---------------------------------------------------------------- what falls into which class


def test_a_pause_is_told_phase_by_phase_and_its_detection_is_found_in_the_step_log() -> None:
    story = Story().begin().train(20).fault(detection=2.0).train(20).end()
    found = account(story.chain(), story.lines)
    (incident,) = found.incidents
    assert incident.parts == pytest.approx(
        {
            "retried": STEP,
            "detection": 2.0 - STEP,
            "allocate": 0.2,
            "quiesce": 0.2,
            "reform": 0.1,
            "transfer": 0.1,
            "resume": 0.2,
        }
    )
    assert incident.rto_seconds == pytest.approx(2.0 + 4 * 0.2)
    assert (incident.rpo_steps, incident.standing) == (0, "resolved")
    assert seconds(story, Spent.USEFUL) == pytest.approx(41 * STEP)


def test_a_pause_ends_with_the_next_step_and_not_when_the_orchestrator_hears_of_it() -> None:
    story = Story().begin().train(20).fault(told_after=0.1).later(1.0).train(20).end()
    (incident,) = account(story.chain(), story.lines).incidents
    assert incident.rto_seconds == pytest.approx(1.0 + 4 * 0.2)
    assert seconds(story, Spent.RESUME) == pytest.approx(0.2)
    assert seconds(story, Spent.USEFUL) == pytest.approx(41 * STEP + 0.1 + 1.0)


def test_a_job_without_faults_is_useful_but_for_its_start_and_its_end() -> None:
    story = Story().begin(seconds=3.0).train(20).end()
    found = account(story.chain(), story.lines)
    assert seconds(story, Spent.USEFUL) == pytest.approx(20 * STEP)
    assert seconds(story, Spent.WAITING) == pytest.approx(1.0)
    assert seconds(story, Spent.STARTUP) == pytest.approx(3.0)
    assert seconds(story, Spent.ENDING) == pytest.approx(0.1)
    assert found.goodput == pytest.approx(10 / 13.1)
    assert found.mttf_seconds is None
    assert found.rto.count == 0


def test_declared_slowness_is_neither_useful_nor_a_gap() -> None:
    story = Story().begin().train(10).train(1, busy={"eval": 8.0, "save": 2.0}).train(10).end()
    found = account(story.chain(), story.lines)
    assert seconds(story, Spent.BUSY) == pytest.approx(8.0)
    assert seconds(story, Spent.SAVE) == pytest.approx(2.0)
    assert Spent.STALLED not in found.classes
    assert found.guarantee.declared == {"eval": 8.0, "save": 2.0}
    assert found.guarantee.counted == 0


def test_a_gap_that_nobody_noticed_is_stalled_and_an_incident_by_itself() -> None:
    story = Story().begin().train(10)
    story.later(20 * STEP).train(10).end()
    found = account(story.chain(), story.lines)
    assert seconds(story, Spent.STALLED) == pytest.approx(20 * STEP)
    (gap,) = found.incidents
    assert (gap.standing, gap.incident) == ("missed", "gap-10")
    assert gap.rto_seconds == pytest.approx(20 * STEP)


def test_steps_that_are_made_again_after_a_fallback_are_not_useful() -> None:
    story = Story().begin().train(10)
    story.step = 4
    story.lines.append({"fallback_to": 4})
    story.fault(outcome="fallback").train(9).end()
    found = account(story.chain(), story.lines)
    assert seconds(story, Spent.USEFUL) == pytest.approx(14 * STEP)
    assert seconds(story, Spent.RECOMPUTE) == pytest.approx(6 * STEP)
    (incident,) = found.incidents
    assert (incident.rpo_steps, incident.standing) == (6, "missed")
    assert found.guarantee.credit == 0.25


def test_a_planned_move_counts_neither_for_nor_against_the_guarantee() -> None:
    story = (
        Story().begin().train(10).fault(detection=0.0, outcome="moved", causes=[], kind="planned")
    )
    found = account(story.train(10).end().chain(), story.lines)
    assert [each.standing for each in found.incidents] == ["planned"]
    assert found.guarantee.counted == 0
    assert Spent.DETECTION not in found.classes
    assert found.mttf_seconds is None


def test_a_change_of_leader_in_the_middle_of_a_pause_is_the_control_planes() -> None:
    story = Story().begin().train(10).later(1.0)
    story.incidents += 1
    moving = {"state": "migrating", "kind": "unplanned", "incident": "i1", "opened_at": story.now}
    story.entry("Observed", {}, phase="quiesce", **moving)
    story.term += 1
    story.later(5.0).entry("PhaseReport", story._report("quiesce"), phase="reform", **moving)
    assert seconds(story, Spent.CONTROL_PLANE_DOWN) == pytest.approx(5.0)


@pytest.mark.parametrize("kind", ["TermBegan", "ControlPlaneBack"])
def test_an_outage_that_is_told_of_takes_its_length_and_no_more(kind: str) -> None:
    story = Story().begin().train(10).later(1.0)
    story.incidents += 1
    moving = {"state": "held", "kind": "unplanned", "incident": "i1", "opened_at": story.now}
    story.entry("Observed", {}, phase="hold", **moving)
    story.term += 1
    told = {"down_seconds": 2.0} if kind == "TermBegan" else {"seconds": 2.0}
    story.later(5.0).entry(kind, told, phase="hold", **moving)
    assert seconds(story, Spent.CONTROL_PLANE_DOWN) == pytest.approx(2.0)
    assert seconds(story, Spent.HELD) == pytest.approx(3.0)


def test_a_fault_that_nobody_could_hear_was_late_because_of_the_control_plane() -> None:
    story = Story().begin().train(10)
    story.fault(detection=6.0, seconds={"control_plane_down": 4.0}).train(10).end()
    assert seconds(story, Spent.CONTROL_PLANE_DOWN) == pytest.approx(4.0)
    assert seconds(story, Spent.DETECTION) == pytest.approx(2.0 - STEP)


def test_without_a_step_log_training_is_useful_and_the_account_says_what_it_lacks() -> None:
    story = usual()
    found = account(story.chain())
    assert any("no step log" in note for note in found.notes)
    assert found.classes[Spent.USEFUL] > 0
    assert Spent.DETECTION not in found.classes


@pytest.mark.parametrize("shift", [-7.5, 7.5])
def test_a_step_log_of_another_clock_is_moved_until_causes_come_before_effects(
    shift: float,
) -> None:
    straight, story = usual(), usual()
    for line in story.lines:
        line["at"] += shift
    mine = account(story.chain(), story.lines)
    right = account(straight.chain(), straight.lines)
    assert mine.clock_shift_seconds == pytest.approx(-shift, abs=3 * STEP)
    assert mine.goodput == pytest.approx(right.goodput, abs=0.05)


def test_a_job_that_is_run_again_has_two_runs_and_nothing_is_paid_between_them() -> None:
    story = Story().begin().train(10).end().later(100.0)
    story.begin().train(10).end()
    found = account(story.chain(), story.lines)
    assert found.runs == 2
    assert seconds(story, Spent.USEFUL) == pytest.approx(20 * STEP)
    assert found.total < 60 * SECOND * WORLD


# ---------------------------------------------------------------- numbers made of them


def test_tokens_and_flops_are_per_device_over_all_time_that_was_paid() -> None:
    story = Story().begin().train(20, work={"tokens": 1000.0, "flops": 4e12}).end()
    work = account(story.chain(), story.lines, peak_flops=1e13).work
    assert work is not None
    paid = 3.0 + 20 * STEP + 0.1
    assert work.tokens_per_second_per_device == pytest.approx(20_000 / paid / WORLD)
    assert work.mfu == pytest.approx(20 * 4e12 / paid / WORLD / 1e13)


def test_percentiles_are_by_nearest_rank() -> None:
    values = [float(n) for n in range(1, 101)]
    random.Random(1).shuffle(values)
    assert dataclasses.astuple(spread(values)) == (100, 50.0, 95.0, 50.5, 100.0)


def test_money_is_reckoned_against_checkpoint_and_restart() -> None:
    story = usual(faults=2)
    found = account(story.chain(), story.lines)
    setting = cost.Setting(WORLD, 3.0, 1.0, 3600, 600, 300, 300, 0, 1, 0.9, 1, 0, 0)
    saved = against_restart(found, setting)
    ours = sum(each.rto_seconds for each in found.incidents)
    assert saved.restart_seconds == 2 * 3000
    assert saved.device_hours == pytest.approx((6000 - ours) * WORLD / 3600)
    assert saved.money == pytest.approx(saved.device_hours * 3.0)
