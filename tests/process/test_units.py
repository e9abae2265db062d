"""A node that is replaced as a whole, with real processes: its well ranks are given up last."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from keepstep.model import Policy, Unit
from tests.process.job import SmallJob
from tests.process.test_planned import SCRIPT, STEPS, keepstep, steps_logged
from tests.process.test_session import check_as_bare

pytestmark = [pytest.mark.process, pytest.mark.timeout(480)]


def test_who_is_well_lives_until_the_others_have_answered(tmp_path: Path) -> None:
    policy = Policy(unit=Unit.NODE, budget_seconds_min=30.0)
    with SmallJob(
        tmp_path, SCRIPT, slots=(2, 2, 2), nodes=2, ranks_per_node=2, policy=policy
    ) as job:
        job.wait_ready()
        job.wait_step(3, 20)
        assert [seat["node"] for seat in job.view()["seats"]] == ["n0", "n0", "n1", "n1"]
        well = job.progress(2)
        assert well is not None
        keepstep(job, "taint", "n1/1", "--reason", "row remap", "--severity", "avoid")
        stopped = [job.kill(rank, signal.SIGSTOP) for rank in (0, 1)]
        job.kill(3)
        job.wait(lambda j: bool(j["migration"]), "a migration")
        time.sleep(1.0)
        found = job.view()
        assert found["migration"]["phase"] == "quiesce"
        assert list(found["migration"]["empty_seats"]) == ["3"]
        os.kill(well.pid, 0)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        job.wait(lambda j: j["state"] == "running" and not j["migration"], "the job goes on")
        assert [seat["node"] for seat in job.view()["seats"]] == ["n0", "n0", "n2", "n2"]
        assert job.end()["exit_code"] == 0
        (incident,) = job.incidents()
    assert incident["outcome"] == "resumed"
    said = " ".join(why for _, _, why in incident["story"])
    assert said.index("first the others say what they hold") < said.index("rank 2 moves too")
    check_as_bare(tmp_path, SCRIPT, world=4)
    assert steps_logged(tmp_path) == list(range(STEPS))
