"""A journal that was put back from a backup, under a real job that has gone on since."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.orchestrator import backups
from tests.process.job import SmallJob
from tests.process.test_planned import steps_logged
from tests.process.test_session import PLAIN_BODY, check_as_bare, loop

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
STEPS = 300
SCRIPT = loop(PLAIN_BODY, steps=STEPS)


def test_a_job_trains_on_under_a_journal_that_has_forgotten_a_generation(tmp_path: Path) -> None:
    with SmallJob(tmp_path, SCRIPT, ranks_per_node=2, spares=2) as job:
        job.wait_ready(2)
        journal, backup = tmp_path / "run" / "journal.db", tmp_path / "backup.db"
        backups.copy(journal, backup)
        job.kill(1)
        after = job.wait(
            lambda view: (
                view["state"] == "running" and not view["incident"] and view["incidents"] == 1
            ),
            "the end of the incident",
        )
        job.cluster.kill_orchestrator(restart=False)
        backups.put_back(backup, journal)
        job.cluster.start_orchestrator()
        found = job.wait(
            lambda view: (
                view.get("state") == "running"
                and not view["unsure"]
                and not view["incident"]
                and view["generation"] > after["generation"]
            ),
            "the job in a generation above the forgotten one",
        )
        assert [seat["incarnation"] for seat in found["seats"]] == [0, 1]
        assert job.cluster.client.cluster()["control_plane"]["gaps"]
        assert job.end()["exit_code"] == 0
        assert job.view()["fallbacks"] == 0
    assert steps_logged(tmp_path) == list(range(STEPS))
    check_as_bare(tmp_path, SCRIPT, world=2)
