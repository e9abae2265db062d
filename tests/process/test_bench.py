"""The comparison of systems on its smallest scale: real ranks, a real kill, the truth evaluated."""

from __future__ import annotations

import pytest

from bench import scenario, steady
from bench.arms.arm import load
from bench.harness import Limits, Run
from bench.launch import Local, marked
from bench.plan import Plan

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

STEPS = 100
KILL = '[[strike]]\nseconds = 1.0\nkind = "kill"\nrank = 1\n'


def run(arm, directory):
    plan = Plan(size="1m", world=2, steps=STEPS, directory=str(directory))
    one = Run(load(arm), scenario.parse("s", KILL), plan, Local())
    result = one.go(Limits(60.0, still_seconds_max=60.0), lambda *_: None)
    assert list(marked(plan.directory)) == []
    assert result["outcome"] == "completed", result["said"]
    return result


def struck_once(result):
    strikes = [strike["kind"] for strike in result["strikes"] if strike["pid"]]
    return strikes == ["kill"] and len(result["truth"]["pauses"]) == 1


def test_keepstep_loses_no_step_and_no_sample_and_ends_like_the_bare_engine(tmp_path):
    bare = run("bare", tmp_path / "bare")
    assert bare["strikes"] == []
    live = run("keepstep", tmp_path / "keepstep")
    assert struck_once(live)
    found = live["truth"]
    assert (found["recomputed"], found["lost"], found["doubled"]) == (0, 0, 0)
    assert found["digests"] == bare["truth"]["digests"]


def test_checkpoint_restart_computes_steps_again_and_loses_no_sample(tmp_path):
    anew, loaded = (
        run(f"checkpoint_restart:sync@{every}", tmp_path / str(every)) for every in (1000, 10)
    )
    for rolled in (anew, loaded):
        assert struck_once(rolled)
        assert (rolled["truth"]["lost"], rolled["truth"]["doubled"]) == (0, 0)
    assert anew["truth"]["recomputed"] > 10, "it began again"
    assert loaded["truth"]["recomputed"] <= 10, "it began where it had saved"


def test_the_cost_while_nothing_breaks_is_measured_against_two_bare_jobs():
    found = steady.measure("bare", steady.options(["--quick", "--steps", "8", "--size", "1m"]))
    assert found["steps_per_arm"] >= 8
    assert 0.5 < found["ratio"][0] < 2.0
    assert {"bare", "arm", "control", "arm_processor", "others"} <= found["rounds"][0].keys()
