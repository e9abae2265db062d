"""Jobs whose state is in portions, two holders each: HSDP and tensor parallel x DDP, 2 x 2.

Every job is compared bit for bit, on all ranks, with one without faults and without Keepstep. The
reference is run once per kind and leaves its sums after every step.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from keepstep.training.checkpoint import has_all_files
from tests.process import bare
from tests.process.job import SmallJob

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]
SCRIPT = Path(__file__).with_name("sharded_loop.py").read_text()
WORLD = 4
STEPS_MAX = 160
SECONDS_MAX = 30.0


def reference(kind: str, reset: int = -1) -> list[dict[str, Any]]:
    """Every rank's sums after each step."""
    told = {"SHARDED_KIND": kind, "SHARDED_STEPS": str(STEPS_MAX), "SHARDED_RESET": str(reset)}
    return bare.run(SCRIPT, WORLD, told)


class Sharded(SmallJob):
    """A sharded job with failpoints; ends a few steps after it is told to."""

    def __init__(
        self,
        directory: Path,
        kind: str,
        *,
        hook: str = "",
        check_steps: int = 0,
        reset: int = -1,
        **more: Any,
    ) -> None:
        self.points = directory / "points"
        self.points.mkdir()
        environment = {
            "SHARDED_KIND": kind,
            "SHARDED_HOOK": hook,
            "SHARDED_RESET": str(reset),
            "KEEPSTEP_CHECK_STEPS": str(check_steps),
            "KEEPSTEP_FAILPOINTS": str(self.points),
        }
        options = {"slots": (3, 3), "ranks_per_node": 2, "nodes": 2, "spares": 2, **more}
        super().__init__(directory, SCRIPT, environment=environment, **options)

    def wait_ready(self, spares: int = 1) -> None:
        quick = self.directory / "quick"
        quick.unlink(missing_ok=True)
        super().wait_ready(spares)
        quick.touch()

    def arm(self, rank: int, point: str, action: str = "kill") -> Path:
        """A failpoint for the next step; returns the file that shows it was reached."""
        fresh = self.points / ".fresh"
        fresh.write_text(action)
        fresh.rename(self.points / f"rank-{rank}-{point}")
        hit = self.points / f"rank-{rank}-{point}.hit"
        deadline = time.monotonic() + SECONDS_MAX
        while not hit.exists():
            assert time.monotonic() < deadline, f"nobody reached rank-{rank}-{point}"
            time.sleep(0.005)
        return hit

    def wait_moved(self, generation: int) -> None:
        """The next generation trains."""
        self.wait(
            lambda job: (
                job["state"] == "running"
                and job["generation"] >= generation
                and not job["migration"]
                and not job["incident"]
            ),
            f"generation {generation}",
        )

    def finish(self) -> int:
        """A few steps more, and out."""
        progress = self.progress(0)
        assert progress is not None
        # Steps take long enough for every rank to read it in time.
        last = progress.step + 15
        fresh = self.directory / "finish.new"
        fresh.write_text(str(last))
        fresh.rename(self.directory / "finish")
        assert self.end()["exit_code"] == 0
        return last

    def in_rooms(self, pattern: str) -> list[Path]:
        """What the job has in the nodes' memory."""
        nodes = self.cluster.client.cluster()["nodes"]
        return [path for node in nodes for path in (self.cluster.room(node) / "job").glob(pattern)]

    def in_stores(self) -> list[str]:
        """What generations have left where they met."""
        nodes = self.cluster.client.cluster()["nodes"].values()
        at = [(node["address"], node["store_port"]) for node in nodes]
        stores = [TCPStore(*each, is_master=False, wait_for_workers=False) for each in at]
        return [key for store in stores for key in store.list_keys()]

    def secrets(self) -> set[str]:
        """Of its generations, as its nodes keep them."""
        rooms = [self.cluster.room(node) for node in self.cluster.client.cluster()["nodes"]]
        states = [json.loads((room / "agent-state.json").read_text()) for room in rooms]
        return {one for state in states for job in state["jobs"] for one in job["secrets"]}

    def wait_cleared(self) -> None:
        """Nodes are told that the job is over, and what it left goes: also from their stores."""
        deadline = time.monotonic() + SECONDS_MAX
        while left := [*self.in_rooms("*"), *self.in_stores()]:
            assert time.monotonic() < deadline, f"still there: {left}"
            time.sleep(0.05)

    def outcomes(self) -> list[str]:
        return [incident["outcome"] for incident in self.incidents()]


def check(directory: Path, expected: list[dict[str, Any]], last: int) -> None:
    for rank, (mine, other) in enumerate(
        zip(bare.results(directory, WORLD), expected, strict=True)
    ):
        assert mine == {str(last): other[str(last)]}, f"rank {rank} differs after {last} steps"


def test_hsdp_ranks_come_back_from_their_twins_and_move_while_all_is_well(tmp_path: Path) -> None:
    with Sharded(tmp_path, "hsdp", level=2) as job:
        job.wait_ready(2)
        job.wait_step(0, 4)
        job.arm(1, "backward")
        job.wait_moved(2)
        job.wait_ready(1)
        job.cluster.client.migrate("job", {"ranks": [2]})
        job.wait_moved(3)
        secrets, keys = job.secrets(), job.in_stores()
        assert secrets
        assert keys
        assert not any(secret in key for secret in secrets for key in keys), "errors tell the keys"
        last = job.finish()
        assert job.outcomes() == ["resumed", "moved"]
    check(tmp_path, reference("hsdp"), last)


def test_tensor_parallel_ranks_come_back_rank_0_too(tmp_path: Path) -> None:
    with Sharded(tmp_path, "tp", level=2) as job:
        job.wait_ready(2)
        job.wait_step(0, 4)
        job.arm(0, "backward")
        job.wait_moved(2)
        job.wait_ready(1)
        job.arm(3, "voted")
        job.wait_moved(3)
        last = job.finish()
        assert job.outcomes() == ["resumed", "resumed"]
    check(tmp_path, reference("tp"), last)


def check_moves(tmp_path: Path, kind: str) -> None:
    """On request, and away from a device that announces its end."""
    with Sharded(tmp_path, kind, level=2) as job:
        job.wait_ready(2)
        # Behind the first capsule: what is moved has been renewed, and records lie on top of it.
        job.wait_step(0, 11)
        job.cluster.client.migrate("job", {"ranks": [2]})
        job.wait_moved(2)
        job.wait_ready(1)
        seat = job.cluster.client.cluster()["jobs"]["job"]["seats"][1]
        told = {"node": seat["node"], "slot": seat["slot"], "reason": "XID 94"}
        job.cluster.client.taint({**told, "severity": "imminent"})
        job.wait_moved(3)
        last = job.finish()
        assert job.outcomes() == ["moved", "moved"]
    check(tmp_path, reference(kind), last)


def test_tensor_parallel_ranks_move_while_all_is_well(tmp_path: Path) -> None:
    check_moves(tmp_path, "tp")


UNHEARD = """
import os, signal, time
from pathlib import Path
from keepstep.training import vote

heard = vote.side_barrier

def barrier(groups):
    heard(groups)
    at = Path("unheard")
    if session.rehearsing or not at.exists() or session.step != int(at.read_text()):
        return
    Path(f"passed-{rank}").touch()
    if rank == 2:
        raise RuntimeError("Connection closed by peer")
    deadline = time.monotonic() + 10
    while rank == 0 and time.monotonic() < deadline:
        if all(Path(f"passed-{other}").exists() for other in (1, 2, 3)):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.001)

vote.side_barrier = barrier
"""


def test_who_did_not_hear_the_vote_makes_the_update_that_others_made(tmp_path: Path) -> None:
    """Rank 0 dies past the vote. Its twin, the last holder, missed the answer; the others did not.

    The update of that step lives nowhere else any more: the twin must make it from the gradients
    that it kept.
    """
    with Sharded(tmp_path, "hsdp", hook=UNHEARD) as job:
        job.wait_ready(1)
        job.wait_step(0, 4)
        progress = job.progress(0)
        assert progress is not None
        (tmp_path / "unheard.new").write_text(str(progress.step + 20))
        (tmp_path / "unheard.new").rename(tmp_path / "unheard")
        job.wait_moved(2)
        last = job.finish()
        assert job.outcomes() == ["resumed"]
        told = "\n".join(job.cluster.client.journal("job"))
    assert (tmp_path / "passed-3").exists()
    assert "Apply" in told
    check(tmp_path, reference("hsdp"), last)


def test_a_shard_without_a_holder_left_is_a_declared_fallback(tmp_path: Path) -> None:
    with Sharded(tmp_path, "hsdp") as job:
        job.wait_ready(2)
        job.wait_step(0, 4)
        holders = [job.progress(rank) for rank in (1, 3)]
        # Both at once: a recovery between the two deaths would find a holder.
        for holder in holders:
            assert holder is not None
            os.kill(holder.pid, signal.SIGKILL)
        job.wait(lambda j: j["fallbacks"] == 1 and j["state"] == "running", "a fallback")
        job.wait_step(0, 2)
        last = job.finish()
        assert "fallback" in job.outcomes()
    check(tmp_path, reference("hsdp"), last)


def test_a_checkpoint_whose_writer_died_is_not_published(tmp_path: Path) -> None:
    (tmp_path / "save-every").write_text("5")
    with Sharded(tmp_path, "hsdp") as job:
        job.wait_ready(2)
        job.wait(lambda j: j["published"]["step"] > 0, "a checkpoint")
        job.arm(1, "portion")
        job.wait_moved(2)
        saved = (tmp_path / "state").glob("boundary-*-g1")
        (torn,) = (path for path in saved if not has_all_files(path))
        step = int(torn.name.split("-")[1])
        job.wait(lambda j: j["published"]["step"] > step, "the next checkpoint")
        told = "\n".join(job.cluster.client.journal("job"))
        last = job.finish()
    assert str(torn) not in told
    assert "published: " in told
    check(tmp_path, reference("hsdp"), last)


@pytest.mark.parametrize("kind", ["hsdp", "tp"])
def test_a_checkpoint_in_portions_is_where_the_rerun_goes_on(tmp_path: Path, kind: str) -> None:
    with Sharded(tmp_path, kind, spares=0) as job:
        job.wait_ready(0)
        job.wait_step(0, 4)
        job.cluster.client.stop("job", save=True, why="the test asked for it")
        assert job.end()["exit_code"] == 75
        (saved,) = (tmp_path / "state").glob("boundary-*")
        found = sorted(path.name for path in saved.glob("shared-*.pt"))
        assert found == ["shared-0-2_2.pt", "shared-0-3.pt", "shared-1-3_2.pt"]
        began = int(saved.name.split("-")[1])
        assert began >= 4
        job.cluster.client.submit(job.spec)
        job.wait(lambda j: j["state"] == "running", "the rerun")
        job.wait_step(0, began + 2)
        last = job.finish()
    check(tmp_path, reference(kind), last)
