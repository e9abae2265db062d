"""ZeRO-1: the optimizer's state lives once, and a step can end half-way; bit for bit the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.test_sharded import Sharded, check, check_moves, reference

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


def test_a_rank_killed_in_the_optimizers_collectives_is_rebuilt_and_only_the_sync_repeated(
    tmp_path: Path,
) -> None:
    with Sharded(tmp_path, "zero1", level=2) as job:
        job.wait_ready(2)
        job.wait_step(0, 11)
        job.arm(1, "sync")
        job.wait_moved(2)
        job.wait_ready(1)
        job.arm(0, "halfway")
        job.wait_moved(3)
        last = job.finish()
        told = "\n".join(job.cluster.client.journal("job"))
        assert job.outcomes() == ["resumed", "resumed"]
        assert "other than an optimizer" not in job.logs()
    assert "3 ranks complete 0-3; rank 3 rebuilds 1" in told
    check(tmp_path, reference("zero1"), last)


def test_a_step_left_half_way_is_saved_and_brought_to_its_end_by_the_rerun(tmp_path: Path) -> None:
    with Sharded(tmp_path, "zero1", spares=0, slots=(2, 2)) as job:
        job.wait_ready(0)
        job.wait_step(0, 11)
        before = job.arm(2, "sync")
        # Long before a worker for the empty seat has started.
        job.cluster.client.stop("job", save=True, why="the test asked for it")
        assert job.end()["exit_code"] == 75
        (saved,) = (tmp_path / "state").glob("boundary-*")
        began = int(saved.name.split("-")[1])
        assert '"unsynced": true' in (saved / "shared-0-3.json").read_text()
        assert '"mirrored": true' in (saved / "shared-2.json").read_text()
        before.unlink()
        job.cluster.client.submit(job.spec)
        job.wait(lambda j: j["state"] == "running", "the rerun")
        job.wait_step(0, began + 2)
        last = job.finish()
    check(tmp_path, reference("zero1"), last)


def test_a_rank_with_optimizer_state_of_its_own_moves_while_all_is_well(tmp_path: Path) -> None:
    check_moves(tmp_path, "zero1")
