"""Arms of the bench: what they are given alike, and what is said where it is not."""

from __future__ import annotations

import inspect
import shutil
import sys
from pathlib import Path
from tempfile import gettempdir
from types import ModuleType
from typing import Any, ClassVar

import pytest

from bench import campaign, readme, steady, tables, turns
from bench.arms import checkpoint_restart, keepstep, torchft
from bench.arms.arm import (
    SAID_CHARACTERS,
    environment_of,
    last_words,
    load,
    noted,
    notes_of,
    placeless,
)
from bench.harness import Limits, Run
from bench.launch import MARK, Local
from bench.plan import Plan
from bench.record import ROOT
from bench.scenario import Scenario
from keepstep.cli.cluster import SYNCHRONOUS
from keepstep.config import OrchestratorConfig
from keepstep.config import load as load_config
from keepstep.errors import Permanent
from tests.unit.test_bench_tables import a_result, a_run


@pytest.mark.parametrize("module", [torchft, checkpoint_restart])
def test_who_is_started_again_can_be_struck_before_it_loads(module: ModuleType):
    """A worker has its rank as soon as it knows its number, in both arms alike."""
    source = inspect.getsource(module.train)
    assert source.index("init_process_group") < source.index("log.start()")
    assert source.index("log.start()") < source.index("Windows(plan)") < source.index("bare_model")


def test_a_start_in_the_truth_is_not_readiness_for_the_first_quorum(tmp_path, monkeypatch):
    plan = Plan(world=2, directory=str(tmp_path / "run"))
    plan.write()
    monkeypatch.setattr(torchft, "READY_SECONDS_MAX", 0.0)
    for rank in range(2):
        (plan.truth / f"rank-{rank}.jsonl").touch()
    torchft.wait_for_all(plan, 0)
    ready = plan.room / "ready"
    assert [path.name for path in ready.iterdir()] == ["rank-0"], "the other one builds its model"
    torchft.wait_for_all(plan, 1)
    monkeypatch.setattr(torchft, "READY_SECONDS_MAX", 1e9)
    torchft.wait_for_all(plan, 1)


def test_a_stopped_shard_is_given_up_by_its_partner_as_in_a_restarted_job():
    own = checkpoint_restart.COLLECTIVE_SECONDS
    for name in ("torchft", "torchft:tuned"):
        assert load(name).settings["collective_seconds"] == own
    assert load("torchft:20-5000-1000").settings["collective_seconds"] == 40.0, "after the group's"


def test_keepsteps_journal_waits_for_the_disk_where_there_are_several_machines(tmp_path):
    around = environment_of(Plan(directory=str(tmp_path)))
    told = keepstep.orchestrators_own(around)
    assert told[SYNCHRONOUS] == "full"
    assert MARK in around
    assert MARK not in told
    config = load_config(OrchestratorConfig, None, {SYNCHRONOUS: told[SYNCHRONOUS]})
    assert config.journal_synchronous == "full"


def test_who_fails_leaves_the_ends_of_its_logs(tmp_path):
    plan = Plan(directory=str(tmp_path / "run"))
    for node in ("a", "b"):
        (plan.room / node).mkdir(parents=True)
    (plan.room / "a" / "agent.log").write_text(f"much\n{'-' * 2000}\nsee {plan.room}/x")
    (plan.room / "b" / "agent.log").write_text("well")
    (plan.room / "b" / "gone.log").symlink_to("nowhere")
    with pytest.raises(Permanent) as caught, noted("arm", plan):
        raise Permanent("it ended")
    assert str(caught.value) == "it ended"
    first, second = notes_of(caught.value)
    assert first.startswith("arm, a/agent.log: -")
    assert first.endswith("\nsee ROOM/x")
    assert len(first) < 1600
    assert second == "arm, b/agent.log: well"
    assert notes_of(OSError()) == []


def test_raw_results_do_not_say_where_things_lie(tmp_path):
    room = tmp_path / "run"
    places = (room, tmp_path, ROOT, sys.prefix, sys.base_prefix, Path.home(), gettempdir())
    text = placeless("".join(f"at {place}/x\n" for place in places), room)
    assert text.splitlines()[:3] == ["at ROOM/x", "at ROOMS/x", "at ROOT/x"]
    assert not any(str(place) in text for place in places)
    (room / "logs").mkdir(parents=True)
    plan = Plan(directory=str(room))
    (room / "logs" / "a.log").write_text(f"{room}/{'-' * (SAID_CHARACTERS - 5)}")
    (said,) = last_words(plan).values()
    assert said == f"ROOM/{'-' * (SAID_CHARACTERS - 5)}", "cut after that, not before"

    class Homeless(Failing):
        def start(self, plan: Plan, launch: Any) -> None:
            super().start(plan, launch)
            raise Permanent(f"no {plan.room}/spec.json")

    class Lost(Failing):
        def ended(self) -> str:
            return f"the orchestrator is gone: no {room}/socket"

    for arm, why in (
        (Homeless(), "Permanent: no ROOM/spec.json"),
        (Lost(), "ended before the first step: the orchestrator is gone: no ROOM/socket"),
    ):
        run = Run(arm, Scenario("none", "by hand"), plan, Local())
        assert run.go(Limits(1.0), lambda *_: None)["outcome"] == why
        run.clear()


class Failing:
    """An arm that ends before it began."""

    name, hosts = "failing", ()
    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.did: list[str] = []

    def refuses(self, plan: Plan) -> str:
        return ""

    def start(self, plan: Plan, launch: Any) -> None:
        self.log = plan.room / "rank-0.log"
        self.did.append("start")

    def ended(self) -> str:
        return "a process ended with 1"

    def stop(self) -> None:
        self.did.append("stop")
        self.log.write_text("why")


def test_a_job_that_does_not_begin_is_told_with_all_that_it_said(tmp_path):
    """By the time somebody reads the raw result, its room is gone."""
    for begin in (
        lambda arm: steady.gated("arm", arm, tmp_path, steady.options([])),
        lambda arm: turns.started("arm", arm, tmp_path / "arm", turns.options([]), 4),
    ):
        arm = Failing()
        with (
            pytest.raises(Permanent, match="before it began: a process ended with 1") as caught,
            begin(arm),
        ):
            raise AssertionError("it never began")
        assert arm.did == ["start", "stop"]
        assert notes_of(caught.value) == ["arm, rank-0.log: why"]
        shutil.rmtree(tmp_path / "arm")


def test_timeouts_that_were_tuned_for_something_else_are_labelled():
    def told(scenario: str, **plan: str) -> str:
        result = a_result((a_run("bare", 10.0), a_run("torchft", 13.0), a_run("torchft:tuned", 12)))
        (case,) = result["cases"]
        case["scenario"] = scenario
        case["plan"] |= plan
        under = tables.terminal(tables.apart([result]))
        assert ("tuned for" in under) == ("tuned for" in readme.markdown([result], ["f"]))
        return under

    assert "tuned for" not in told("kills")
    for under in (told("hangs"), told("kills", parallel="hsdp"), told("kills", size="100m")):
        assert "torchft:tuned: its timeouts were tuned for kills, ddp 3m, and not here" in under
        assert under.count("tuned for") == 1


def test_the_matrix_says_where_timeouts_come_from():
    arms = ("bare", "torchft", "torchft:tuned")
    line = campaign.line_of(campaign.Job("hangs", "ddp", "3m", arms, 1), arms)
    assert (
        line
        == "hangs, ddp 3m, 1x: bare, torchft, torchft:tuned (torchft:tuned tuned for kills, ddp 3m)"
    )
    line = campaign.line_of(campaign.Job("kills", "hsdp", "3m", arms, 1, "kills, fsdp 3m"), arms)
    assert line.endswith(
        "(interval tuned for kills, fsdp 3m; torchft:tuned tuned for kills, ddp 3m)"
    )
    assert "(" not in campaign.line_of(campaign.Job("kills", "ddp", "3m", arms, 1), arms)
