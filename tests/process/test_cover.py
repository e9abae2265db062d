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


FLIP = """
import ctypes
from pathlib import Path
begin = session.begin

def flip_then_begin():
    here = Path(f"flip-{rank}")
    if here.exists() and not session.rehearsing:
        here.unlink()
        state = session.parts["optimizer"].state
        parameter = session.parts["optimizer"].param_groups[0]["params"][{index}]
        held = state[parameter]["exp_avg"] if "{what}" == "moment" else parameter.detach()
        held = held.to_local() if hasattr(held, "to_local") else held
        ctypes.c_uint8.from_address(held.data_ptr() + 1).value ^= 4
    return begin()

session.begin = flip_then_begin
"""


def flip(job: Sharded, rank: int) -> None:
    (job.directory / f"flip-{rank}").touch()


@pytest.mark.parametrize(("kind", "what"), [("hsdp", "weight"), ("fsdp", "moment")])
def test_a_flipped_bit_at_rest_is_found_before_it_is_used(
    tmp_path: Path, reference: Any, kind: str, what: str
) -> None:
    hook = FLIP.replace("{index}", "0").replace("{what}", what)
    with Sharded(tmp_path, kind, level=2, hook=hook, check_steps=1) as job:
        job.wait_ready(2)
        job.wait_step(0, 8)
        flip(job, 1)
        job.wait_moved(2)
        last = job.finish()
        (incident,) = job.incidents()
        (taint,) = job.cluster.client.cluster()["taints"]
    assert incident["outcome"] == "resumed", incident
    assert "changed between two steps" in incident["causes"][0]["detail"]
    assert "corrupt" in taint["reason"]
    check(tmp_path, reference(kind), last)


@pytest.mark.parametrize(("kind", "outcome"), [("ddp", "resumed"), ("hsdp", "fallback")])
def test_of_four_replicas_the_wrong_one_is_named_and_of_two_nobody(
    tmp_path: Path, kind: str, outcome: str
) -> None:
    hook = FLIP.replace("{index}", "0").replace("{what}", "weight")
    with Sharded(tmp_path, kind, level=2, hook=hook, check_steps=5) as job:
        job.wait_ready(2)
        job.wait_step(0, 8)
        flip(job, 2)
        job.wait_moved(2)
        job.finish()
        (incident,) = job.incidents()
        taints = job.cluster.client.cluster()["taints"]
    assert incident["outcome"] == outcome, incident
    cause = incident["causes"][0]
    assert "contaminated" in cause["detail"]
    assert (cause["rank"], len(taints)) == ((2, 1) if outcome == "resumed" else (-1, 0))
