"""Full-shard FSDP2: state that lives once comes back from its mirror, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.training.kept import CAPSULE_STEPS, Kept
from tests.process.test_sharded import Sharded, check, check_moves, reference

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


@pytest.mark.parametrize(
    "kills",
    [
        ((1, "backward"), (2, "voted"), (3, "mirror")),
        # A mirror within a piece of a capsule; then its ward, which comes back from the new one.
        ((2, "piece"), (1, "backward")),
    ],
)
def test_killed_ranks_of_a_full_shard_job_are_rebuilt(
    tmp_path: Path, kills: tuple[tuple[int, str], ...]
) -> None:
    with Sharded(tmp_path, "fsdp", level=2) as job:
        job.wait_ready(2)
        job.wait_step(0, 21)
        for generation, (rank, point) in enumerate(kills):
            job.wait_ready(1)
            job.arm(rank, point)
            job.wait_moved(generation + 2)
        assert job.in_rooms("cover-*.kept"), "what is to be gone afterwards is there"
        last = job.finish()
        assert job.outcomes() == ["resumed"] * len(kills)
        assert "other than an optimizer" not in job.logs()
        job.wait_cleared()
    check(tmp_path, reference("fsdp"), last)


@pytest.mark.parametrize("kind", ["fsdp", "zero1"])
def test_what_the_program_resets_by_itself_is_reset_in_the_second_home(
    tmp_path: Path, kind: str
) -> None:
    """Neither a gradient nor a capsule that was on its way says so."""
    with Sharded(tmp_path, kind, level=2, reset=25) as job:
        job.wait_ready(2)
        job.wait_step(0, 26)
        job.arm(1, "voted")
        job.wait_moved(2)
        last = job.finish()
        assert job.outcomes() == ["resumed"]
        # Each rank that was there says it, once.
        assert job.logs().count("other than an optimizer changed") == 4
    check(tmp_path, reference(kind, reset=25), last)


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
        if "{what}" == "nan":
            ctypes.c_float.from_address(held.data_ptr()).value = float("nan")
        else:
            ctypes.c_uint8.from_address(held.data_ptr() + 1).value ^= 4
    return begin()

session.begin = flip_then_begin
"""


def flip(job: Sharded, rank: int) -> None:
    (job.directory / f"flip-{rank}").touch()


@pytest.mark.parametrize(("kind", "what"), [("hsdp", "nan"), ("fsdp", "moment")])
def test_a_change_at_rest_is_found_before_it_is_used(tmp_path: Path, kind: str, what: str) -> None:
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


def test_a_flip_in_a_mirror_is_mended_before_its_owner_is_lost(tmp_path: Path) -> None:
    with Sharded(tmp_path, "fsdp", level=2, check_steps=1) as job:
        job.wait_ready(2)
        job.wait_step(0, 8)
        picture = job.cluster.client.cluster()["jobs"]["job"]
        mirror = (1 + picture["mirror_stride"]) % 4
        node = picture["seats"][mirror]["node"]
        kept = Kept(job.cluster.room(node) / "job" / "cover-1.kept")
        reach = kept.reach()
        assert reach is not None
        record = kept.record(reach[1] - 1)
        assert record is not None
        # In the middle of the newest record: gradients, or what is said about them.
        record[-9] ^= 1
        job.wait_moved(2)
        (incident,) = job.incidents()
        (taint,) = job.cluster.client.cluster()["taints"]
        # What counts is the cover that was made anew.
        job.wait_ready(2)
        job.arm(1, "voted")
        job.wait_moved(3)
        last = job.finish()
        assert job.outcomes() == ["resumed", "resumed"], job.incidents()
    cause = incident["causes"][0]
    assert (cause["sign"], cause["rank"]) == ("corrupt", mirror)
    assert f"cover of rank 1: step {reach[1] - 1}: " in cause["detail"]
    assert cause["step"] <= reach[1] + CAPSULE_STEPS, "in time"
    assert "what rank" in taint["reason"]
    check(tmp_path, reference("fsdp"), last)


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


def test_a_rank_of_a_full_shard_job_moves_while_all_is_well(tmp_path: Path) -> None:
    check_moves(tmp_path, "fsdp")
