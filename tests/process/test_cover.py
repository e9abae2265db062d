"""Full-shard FSDP2: state that lives once comes back from its mirror, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.process.test_sharded import Sharded, check, reference

__all__ = ["reference"]
pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


@pytest.mark.parametrize(("rank", "point"), [(1, "backward"), (2, "voted"), (3, "mirror")])
def test_a_killed_rank_of_a_full_shard_job_is_rebuilt(
    tmp_path: Path, reference: Any, rank: int, point: str
) -> None:
    with Sharded(tmp_path, "fsdp", level=2) as job:
        job.wait_ready(2)
        job.wait_step(0, 21)
        job.arm(rank, point)
        job.wait_moved(2)
        last = job.finish()
        (incident,) = job.incidents()
    assert incident["outcome"] == "resumed", incident
    check(tmp_path, reference("fsdp"), last)
