"""Planned moves with real processes: ranks leave while all is well, and nothing differs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.job import SmallJob
from tests.process.test_session import PLAIN_BODY, check_as_bare, loop

pytestmark = [pytest.mark.process, pytest.mark.timeout(480)]
STEPS = 300
SCRIPT = loop(PLAIN_BODY, steps=STEPS)


def keepstep(job: SmallJob, *arguments: str, seconds_max: float = 120.0) -> str:
    """A command as an operator would type it; it must succeed."""
    client = job.cluster.client
    token = job.directory / "run" / "token"
    command = [sys.executable, "-m", "keepstep.cli", *arguments]
    command += ["--orchestrator", client.url, "--token-file", str(token)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds_max, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def node_of(job: SmallJob, rank: int) -> str:
    return str(job.view()["seats"][rank]["node"])


def steps_logged(directory: Path) -> list[int]:
    lines = (directory / "state/steps.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_moves_and_nothing_differs(tmp_path: Path, rank: int) -> None:
    with SmallJob(tmp_path, SCRIPT, slots=(2, 2), nodes=1, ranks_per_node=2, spares=1) as job:
        job.wait_ready()
        job.wait_step(rank, 20)
        assert node_of(job, rank) == "n0"
        said = keepstep(job, "migrate", "--rank", str(rank), "--to", "n1", "--wait")
        assert said == f"rank {rank} is on n1; no step was lost"
        assert job.end()["exit_code"] == 0
        (incident,) = job.incidents()
    assert incident["outcome"] == "moved"
    # The pause is not the time in which the target became warm.
    assert incident["pause_seconds"] < incident["closed_at"] - incident["opened_at"]
    check_as_bare(tmp_path, SCRIPT, world=2)
    assert steps_logged(tmp_path) == list(range(STEPS))


def test_a_rank_moves_to_another_slot_of_its_node(tmp_path: Path) -> None:
    """Leaver and target are two workers of one rank beside each other."""
    with SmallJob(tmp_path, SCRIPT, slots=(3,), ranks_per_node=2, spares=1) as job:
        job.wait_ready()
        job.wait_step(1, 20)
        keepstep(job, "taint", "n0/1", "--reason", "row remap", "--severity", "leave")
        job.wait(lambda j: j["seats"][1]["slot"] == 2 and not j["migration"], "the move")
        assert "row remap" in keepstep(job, "taints")
        assert job.end()["exit_code"] == 0
        (incident,) = job.incidents()
    assert incident["outcome"] == "moved"
    check_as_bare(tmp_path, SCRIPT, world=2)
    assert steps_logged(tmp_path) == list(range(STEPS))


PROBE = """#!/bin/sh
test "$KEEPSTEP_NODE" = n0 && test -e "$1" || exit 0
echo "slot=1 row remap pending"
exit 3
"""


def test_a_rank_leaves_a_device_that_the_health_program_condemns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe, bad = tmp_path / "probe.sh", tmp_path / "bad"
    probe.write_text(PROBE)
    probe.chmod(0o755)
    monkeypatch.setenv("KEEPSTEP_AGENT_HEALTH_PROGRAM", f"{probe} {bad}")
    monkeypatch.setenv("KEEPSTEP_AGENT_HEALTH_SECONDS", "0.2")
    with SmallJob(tmp_path, SCRIPT, slots=(2, 2), ranks_per_node=2, spares=1) as job:
        job.wait_ready()
        job.wait_step(1, 20)
        assert job.cluster.client.taints()["taints"] == []
        bad.touch()
        job.wait(lambda j: j["seats"][1]["node"] == "n1" and not j["migration"], "the move")
        (taint,) = job.cluster.client.taints()["taints"]
        said = (taint["place"], taint["severity"], taint["source"], taint["reason"])
        assert said == ("n0/1", "imminent", "health", "row remap pending")
        bad.unlink()
        job.cluster.wait_until(lambda picture: not picture["taints"], 60.0, "no taint any more")
        assert job.end()["exit_code"] == 0
        (incident,) = job.incidents()
    assert incident["outcome"] == "moved"
    check_as_bare(tmp_path, SCRIPT, world=2)
    assert steps_logged(tmp_path) == list(range(STEPS))


def test_a_node_with_several_ranks_is_drained_by_one_migration(tmp_path: Path) -> None:
    with SmallJob(tmp_path, SCRIPT, slots=(2, 2, 2), nodes=2, ranks_per_node=2, spares=2) as job:
        job.wait_ready(2)
        job.wait_step(0, 20)
        would = keepstep(job, "drain", "n1", "--dry-run")
        assert "would: node n1 is drained" in would
        assert job.view()["leaving"] == []
        said = keepstep(job, "drain", "n1", "--wait")
        assert said == "n1 is empty, safe to power off"
        assert {node_of(job, rank) for rank in range(4)} == {"n0", "n2"}
        # Switched off, as promised: nobody misses it.
        job.cluster.lose_node("n1")
        assert job.end()["exit_code"] == 0
        incidents = job.incidents()
    assert [incident["outcome"] for incident in incidents] == ["moved"]
    check_as_bare(tmp_path, SCRIPT, world=4)
    assert steps_logged(tmp_path) == list(range(STEPS))


def test_four_ranks_leave_a_node_in_one_migration_with_one_pause(tmp_path: Path) -> None:
    """Together to another node, and together back from it when that is drained."""
    script = loop(PLAIN_BODY, steps=5000)
    with SmallJob(tmp_path, script, slots=(5, 4), ranks_per_node=5, spares=0) as job:
        job.wait_ready(0)
        job.wait_step(0, 20)
        four = [word for rank in (1, 2, 3, 4) for word in ("--rank", str(rank))]
        said = keepstep(job, "migrate", *four, "--to", "n1", "--wait")
        assert said.endswith("rank 4 is on n1; no step was lost")
        assert keepstep(job, "drain", "n1", "--wait") == "n1 is empty, safe to power off"
        assert {node_of(job, rank) for rank in range(5)} == {"n0"}
        incidents = job.incidents()
        # One pause each: one generation more.
        assert [incident["outcome"] for incident in incidents] == ["moved", "moved"]
        assert [incident["generation"] for incident in incidents] == [2, 3]
        assert job.view()["generation"] == 3
        job.cluster.client.stop("job", save=True, why="enough was seen")
        boundary = job.end()["published"]["step"]
    # The end bit for bit is for the tests with fewer ranks. Here: each step once; the last one is
    # written down when the rerun has proved it committed.
    assert steps_logged(tmp_path) == list(range(boundary - 1))


@pytest.mark.parametrize("phase", ["attach", "reform", "verify"])
def test_a_target_that_dies_leaves_the_rank_where_it_was(tmp_path: Path, phase: str) -> None:
    """The leaver waits until the target has made a step: it goes on, and the wish stays."""
    points = tmp_path / "points"
    points.mkdir()
    environment = {"KEEPSTEP_FAILPOINTS": str(points)}
    with SmallJob(
        tmp_path, SCRIPT, slots=(2, 2), ranks_per_node=2, spares=0, environment=environment
    ) as job:
        job.wait_ready(0)
        job.wait_step(1, 20)
        (points / f"rank-1-{phase}").write_text("kill")
        keepstep(job, "migrate", "--rank", "1")
        hit = points / f"rank-1-{phase}.hit"
        job.cluster.wait_until(lambda _: hit.exists(), 60.0, f"a target in {phase}")
        job.cluster.wait_until(
            lambda p: p["incidents"] and p["incidents"][0]["outcome"] != "open", 60.0, "an outcome"
        )
        assert job.end()["exit_code"] == 0
        outcomes = [incident["outcome"] for incident in job.incidents()]
    assert outcomes[0] == ("abandoned" if phase == "attach" else "resumed"), outcomes
    check_as_bare(tmp_path, SCRIPT, world=2)
    assert steps_logged(tmp_path) == list(range(STEPS))


def test_a_leaver_that_dies_while_its_target_warms_up_is_replaced_by_it(tmp_path: Path) -> None:
    points = tmp_path / "points"
    points.mkdir()
    environment = {"KEEPSTEP_FAILPOINTS": str(points)}
    with SmallJob(
        tmp_path, SCRIPT, slots=(2, 1), ranks_per_node=2, spares=0, environment=environment
    ) as job:
        job.wait_ready(0)
        job.wait_step(1, 20)
        (points / "rank-1-attach").write_text("pause")
        keepstep(job, "migrate", "--rank", "1", "--to", "n1")
        hit = points / "rank-1-attach.hit"
        job.cluster.wait_until(lambda _: hit.exists(), 60.0, "a target that warms up")
        job.kill(1)
        job.wait(lambda j: j["incident"] is not None and j["state"] != "running", "a migration")
        (points / "rank-1-attach.go").touch()
        assert job.end()["exit_code"] == 0
        (incident,) = job.incidents()
        assert node_of(job, 1) == "n1"
    assert incident["outcome"] == "resumed"
    check_as_bare(tmp_path, SCRIPT, world=2)


def test_without_room_nothing_moves_and_the_reason_is_told(tmp_path: Path) -> None:
    with SmallJob(tmp_path, SCRIPT, slots=(2, 1), ranks_per_node=2, spares=0) as job:
        job.wait_ready(0)
        job.wait_step(0, 5)
        keepstep(job, "drain", "n1")
        said = keepstep(job, "migrate", "--rank", "0")
        assert "cannot move: no room yet" in said
        assert "undrain" in said
        # Room comes, and the wish is remembered.
        keepstep(job, "undrain", "n1")
        job.wait(lambda j: j["seats"][0]["node"] == "n1" and not j["migration"], "the move")
        assert job.end()["exit_code"] == 0
    check_as_bare(tmp_path, SCRIPT, world=2)
