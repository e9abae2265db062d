"""Loaders that draw: a rank that receives twice, one that has its batches, workers that last."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.job import SmallJob
from tests.process.test_session import FLIP_BODY, check_as_bare, loop

pytestmark = [pytest.mark.process, pytest.mark.timeout(480)]

DATA = """
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

class Augmented(Dataset):
    def __len__(self):
        return 40 * world
    def __getitem__(self, index):
        return (torch.full((8,), index + 0.5) + torch.rand(8),)

sampler = DistributedSampler(Augmented(), world, rank, seed=3)
loader = DataLoader(Augmented(), 4, sampler=sampler)
"""

BODY = """
session = keepstep.session(model=model, optimizer=optimizer)
for (x,) in session.steps(loader, passes=15):
    with session.attempt():
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        pace()
result()
"""


def test_a_joiner_whose_sources_fall_has_its_batches_and_what_they_drew(tmp_path: Path) -> None:
    script = loop(DATA + BODY)
    failpoints = tmp_path / "failpoints"
    failpoints.mkdir()
    environment = {"KEEPSTEP_FAILPOINTS": str(failpoints)}
    with SmallJob(tmp_path, script, slots=(5,), spares=2, environment=environment) as job:
        job.wait_ready(2)
        job.wait_settled()
        first = job.view()["generation"]
        # Nobody sends anything before rank 2 is known to be dead; the joiner fetches meanwhile.
        (failpoints / "rank-0-transfer").write_text("wait")
        (failpoints / "rank-2-transfer").write_text("kill")
        job.kill(1)
        job.wait(lambda view: view["generation"] == first + 2, "a second round")
        (failpoints / "rank-0-transfer.go").touch()
        assert job.end()["exit_code"] == 0
        (incident,) = job.incidents()
    assert incident["outcome"] == "resumed"
    check_as_bare(tmp_path, script)


@pytest.mark.parametrize("turn", [0, 5])
def test_a_survivor_that_receives_has_its_batches_and_what_they_drew(
    tmp_path: Path, turn: int
) -> None:
    # Where a pass begins, whose recorded place is the end of the last one, and inside of one.
    body = FLIP_BODY.replace("batches[:10]", "loader").replace("% 10 == 0", f"% 10 == {turn}")
    script = loop(DATA + body)
    with SmallJob(tmp_path, script, slots=(5,), ranks_per_node=4) as job:
        job.wait_ready()
        job.wait_settled()
        part = tmp_path / "part"
        part.touch()
        job.cluster.wait_until(lambda _: not part.exists(), 60.0, "a weight that rots")
        assert job.end()["exit_code"] == 0
        (incident,) = job.incidents()
    assert incident["outcome"] == "resumed"
    check_as_bare(tmp_path, script, world=4)


def test_workers_that_outlive_a_pass_are_started_anew_and_nothing_differs(tmp_path: Path) -> None:
    lasting = """
data = keepstep.seeded(Augmented(), 9)
loader = DataLoader(data, 4, sampler=sampler, num_workers=1, persistent_workers=True)
"""
    script = loop(DATA + lasting + BODY)
    with SmallJob(tmp_path, script) as job:
        job.outlives_a_kill(1, at_step=14)
    check_as_bare(tmp_path, script)
