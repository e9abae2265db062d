"""Training loops as people write them, with ranks killed in them: the end is bit for bit the same.

Each job runs real_loop.py with some of its switches, under faults, and is compared on every rank
with the same script under plain torchrun.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.process.bare import results
from tests.process.job import SmallJob

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]
SCRIPT = Path(__file__).with_name("real_loop.py").read_text()
WORLD = 2


def reference(directory: Path, features: str) -> list[dict[str, Any]]:
    """The same loop without Keepstep and without faults."""
    directory.mkdir()
    (directory / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOOP_FEATURES": features}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={WORLD}", "script.py"]
    subprocess.run(command, cwd=directory, env=environment, check=True, timeout=120)
    return results(directory, WORLD)


def run(directory: Path, features: str, *deaths: str) -> tuple[str, list[str]]:
    """The job with these deaths; every one is survived, and nothing differs on any rank.

    Returns what the ranks wrote, and which checkpoints were the newest in turn.
    """
    for death in deaths:
        (directory / f"die-{death}").touch()
    spares = len(deaths)
    newest: list[str] = []

    def over(job: dict[str, Any]) -> bool:
        path = job["published"]["path"]
        if path not in newest[-1:]:
            newest.append(path)
        return bool(job.get("over"))

    with SmallJob(
        directory,
        SCRIPT,
        slots=(WORLD + spares,),
        ranks_per_node=WORLD,
        spares=spares,
        environment={"LOOP_FEATURES": features},
    ) as job:
        job.wait_ready(spares)
        (directory / "go").touch()
        assert job.wait(over, "the end")["exit_code"] == 0
        incidents = job.incidents()
        said = job.logs()
    assert not list(directory.glob("die-*")), "everybody who was to die did"
    # Two deaths a few steps apart may be one incident: the second is told before the first is over.
    assert {incident["outcome"] for incident in incidents} == {"resumed"}, f"{incidents}\n{said}"
    assert sum(len(incident["causes"]) for incident in incidents) >= len(deaths), incidents
    expected = reference(directory / "bare", features)
    for rank, (mine, other) in enumerate(zip(results(directory, WORLD), expected, strict=True)):
        assert mine == other, f"rank {rank} differs"
    return said, newest


def test_a_scaler_that_skips_clipping_checkpointing_and_two_optimizers(tmp_path: Path) -> None:
    # In a skipped step; then after an update, with a collective still to come.
    run(tmp_path, "amp,checkpoint,two,tail", "0-11-backward", "1-13-updated")


def test_a_compiled_model_workers_that_draw_and_an_evaluation(tmp_path: Path) -> None:
    said, _ = run(tmp_path, "compile,workers,evaluate", "1-16-evaluation")
    assert "workers draw" not in said
    # The one that broke is left out: a newcomer takes no part in it, and nobody evaluates alone.
    seen = json.loads((tmp_path / "result/seen-0.json").read_text())
    assert [line.split()[0] for line in seen] == ["8", "24", "32"]


def test_a_save_that_runs_while_a_rank_dies_is_never_the_newest(tmp_path: Path) -> None:
    said, newest = run(tmp_path, "save,amp", "1-12-save")
    assert (tmp_path / "outlived").exists(), "the save's thread went on in the new generation"
    assert not (tmp_path / "checkpoint-12/.metadata").exists()
    assert "checkpoint-12" not in newest
    assert newest[-1] == "checkpoint-36"
    assert all((tmp_path / f"checkpoint-{step}/.metadata").exists() for step in (6, 18, 36))
    assert "the save of step 12 to checkpoint-12 was not completed" in said
