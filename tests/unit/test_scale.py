"""docs/scale.md tells what the script says, and the script reckons as it claims."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench import record, scale
from keepstep.chaos.fleet_compare import PUBLISHED, Published, paused
from keepstep.chaos.fleet_faults import Strike
from keepstep.chaos.fleet_setting import STARTUP_SECONDS, Plan, groups_seconds
from keepstep.model import JobId, JobSpec

ROOT = Path(__file__).resolve().parents[2]
PLAN = Plan(gpus=1024, days=1.0)
SPEC = JobSpec(JobId("j"), "train.py")
SYSTEM = Published("x", 100.0, 10.0)


def test_the_page_holds_the_tables_of_its_raw_result():
    text = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    told = text.partition(scale.MARKS[0])[2].partition(scale.MARKS[1])[0]
    (name,) = re.findall(r"scale-[0-9TZ]+\.json\.gz", told)
    result = record.read(ROOT / "bench" / "results" / name)
    assert not any(month["broken"] for month in result["months"])
    assert {month["plan"]["gpus"] for month in result["months"]} == set(scale.GPUS)
    assert scale.simulated(result["months"]) in told
    assert scale.reckoned() in told


def strike(at, effect="device", job="j"):
    return Strike(at, "x", effect, (JobId(job),))


@pytest.mark.parametrize(
    ("strikes", "stood"),
    [
        ((), 0.0),
        ((strike(1000.0),), 100.0),
        ((strike(1000.0, "drain"),), 10.0),
        ((strike(1000.0, job="other"),), 0.0),
        # Two in one pause: it lasts from the first to the end of the second.
        ((strike(1000.0), strike(1040.0)), 140.0),
        ((strike(1000.0), strike(1040.0, "drain")), 100.0),
        # Before the first step nobody pauses, and after the month nobody counts.
        ((strike(STARTUP_SECONDS - 100.0),), 0.0),
        ((strike(PLAN.seconds - 30.0), strike(PLAN.seconds + 5.0)), 30.0),
    ],
)
def test_a_published_pause_is_counted_once_per_standstill(strikes, stood):
    assert paused(PLAN, SPEC, strikes, SYSTEM) == PLAN.seconds - STARTUP_SECONDS - stood


def test_a_longer_pause_is_never_better():
    strikes = [strike(500.0 + 77.0 * n) for n in range(900)]
    useful = [paused(PLAN, SPEC, strikes, replace(SYSTEM, seconds=s)) for s in (20, 105, 120, 150)]
    assert useful == sorted(useful, reverse=True)
    assert len({system.name for system in PUBLISHED}) == len(PUBLISHED)


def test_orders_over_direct_streams_take_longer_with_more_nodes():
    assert scale.fan_out_seconds(8 * scale.FAN_OUT_NODES) == pytest.approx(scale.FAN_OUT_SECONDS)
    grown = scale.keepstep_pause(100_000) - scale.keepstep_pause(16_384)
    orders = 3 * (12_500 - 2048) * scale.FAN_OUT_SECONDS / scale.FAN_OUT_NODES
    assert grown == pytest.approx(orders + groups_seconds(100_000) - groups_seconds(16_384))


def test_a_pause_grows_with_the_job_and_a_restart_suffers_most():
    pauses = [scale.keepstep_pause(gpus) for gpus in scale.GPUS]
    assert pauses == sorted(pauses)
    for gpus in scale.GPUS:
        mttf = 1.0 / Plan(gpus=gpus).faults_per_second
        assert scale.restart_share(gpus) < mttf / (mttf + max(s.seconds for s in PUBLISHED))
