"""Devices lent by a job of lower priority, with real processes: both jobs end as if alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.model import JobId
from tests.process.job import SmallJob
from tests.process.test_planned import keepstep, steps_logged
from tests.process.test_session import PLAIN_BODY, check_as_bare, loop

pytestmark = [pytest.mark.process, pytest.mark.timeout(480)]
BIG = loop(PLAIN_BODY, steps=400)
LONG = loop(PLAIN_BODY, steps=600)
SMALL = loop(PLAIN_BODY, steps=300)


def with_a_lender(directory: Path, script: str) -> tuple[SmallJob, SmallJob]:
    """Three nodes: two for a job of higher priority, one for the job that may lend it."""
    for name in ("big", "small"):
        (directory / name).mkdir()
    big = SmallJob(directory / "big", script, slots=(1, 1, 2), nodes=2, ranks_per_node=1, spares=0)
    big.spec = replace(big.spec, priority=5)
    small = SmallJob(directory / "small", SMALL, ranks_per_node=2, spares=0)
    small.spec = replace(small.spec, job=JobId("small"))
    return big, small


def test_a_parked_lender_goes_on_bit_for_bit_and_the_account_says_so(tmp_path: Path) -> None:
    big, small = with_a_lender(tmp_path, BIG)
    with big:
        big.wait_ready(0)
        big.wait_settled()
        big.cluster.client.submit(small.spec)
        cluster = big.cluster
        cluster.wait_until(lambda p: p["jobs"]["small"]["step"] >= 0, 120.0, "a second job")
        lost = big.view()["seats"][1]["node"]
        cluster.lose_node(lost)
        cluster.wait_until(lambda p: p["jobs"]["small"]["state"] == "parked", 60.0, "a lender")
        big.wait(lambda job: job["state"] == "running" and not job["migration"], "the borrower")
        assert big.view()["seats"][1]["node"] == "n2"
        assert "lends 2 devices to job" in keepstep(big, "status")
        assert "and still parked" in keepstep(big, "loans")
        # One of its two devices is in use: it waits, until the lost node is back and has two.
        cluster.return_node(lost)
        small.hurry()
        assert big.end()["exit_code"] == 0
        over = cluster.wait("small", 240.0)
        assert (over["state"], over["fallbacks"]) == ("finished", 0)
        (loan,) = cluster.client.cluster()["loans"]
        assert (loan["lender"], loan["borrower"], loan["devices"]) == ("small", "job", 2)
        assert loan["began_at"] < loan["ended_at"]
        outcomes = [i["outcome"] for i in big.incidents()]
        assert sorted(outcomes) == ["parked", "resumed"]
    check_as_bare(tmp_path / "big", BIG, world=2)
    check_as_bare(tmp_path / "small", SMALL, world=2)
    assert steps_logged(tmp_path / "big") == list(range(400))
    assert steps_logged(tmp_path / "small") == list(range(300))


def test_a_drain_borrows_too_and_the_rank_goes_home_afterwards(tmp_path: Path) -> None:
    big, small = with_a_lender(tmp_path, LONG)
    with big:
        big.wait_ready(0)
        big.wait_settled()
        big.cluster.client.submit(small.spec)
        cluster = big.cluster
        cluster.wait_until(lambda p: p["jobs"]["small"]["step"] >= 0, 120.0, "a second job")
        home = big.view()["seats"][1]["node"]
        assert keepstep(big, "drain", home, "--wait") == f"{home} is empty, safe to power off"
        assert big.view()["away"] == {"1": home}
        keepstep(big, "undrain", home)
        said = keepstep(big, "migrate", "--job", "job", "--home", "--wait")
        assert said == f"rank 1 is on {home}; no step was lost"
        assert "all ranks of job are where" in keepstep(big, "migrate", "--job", "job", "--home")
        small.hurry()
        assert cluster.wait("small", 240.0)["state"] == "finished"
        assert big.end()["exit_code"] == 0
        outcomes = [i["outcome"] for i in big.incidents()]
        assert sorted(outcomes) == ["moved", "moved", "parked"]
    check_as_bare(tmp_path / "big", LONG, world=2)
    check_as_bare(tmp_path / "small", SMALL, world=2)
