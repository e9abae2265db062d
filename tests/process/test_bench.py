"""The comparison of systems on its smallest scale: real ranks, a real kill, the truth evaluated."""

from __future__ import annotations

import pytest

from bench import scenario
from bench.arms.arm import load
from bench.harness import Limits, Run
from bench.launch import Local, marked
from bench.plan import Plan

pytestmark = pytest.mark.process

KILL = '[[strike]]\nseconds = 1.0\nkind = "kill"\nrank = 1\n'


def run(arm, text, directory, steps):
    plan = Plan(size="1m", world=2, steps=steps, directory=str(directory))
    one = Run(load(arm), scenario.parse("s", text), plan, Local())
    result = one.go(Limits(60.0, still_seconds_max=45.0), lambda *_: None)
    assert list(marked(plan.directory)) == []
    assert result["outcome"] == "completed", result["said"]
    return result


def test_a_killed_rank_costs_checkpoint_restart_steps_and_keepstep_none(tmp_path):
    bare = run("bare", KILL, tmp_path / "bare", 150)
    assert bare["strikes"] == []
    live = run("keepstep", KILL, tmp_path / "keepstep", 150)
    rolled = run("checkpoint_restart:sync@40", KILL, tmp_path / "restart", 150)
    for struck in (live, rolled):
        assert [strike["kind"] for strike in struck["strikes"] if strike["pid"]] == ["kill"]
        assert (struck["truth"]["lost"], struck["truth"]["doubled"]) == (0, 0)
        assert len(struck["truth"]["pauses"]) == 1
    assert live["truth"]["recomputed"] == 0
    assert live["truth"]["digests"] == bare["truth"]["digests"]
    assert rolled["truth"]["recomputed"] > 0
