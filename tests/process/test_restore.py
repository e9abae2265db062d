"""A journal that was put back from a backup, under a real job that has gone on since."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep.cli.cluster import JOURNAL, ClusterPlan, LocalCluster, NodePlan
from keepstep.orchestrator import backups
from keepstep.orchestrator.journal import verify
from keepstep.orchestrator.journal_postgres import PostgresJournal
from tests.postgres import PostgresServer, programs
from tests.process.job import SmallJob
from tests.process.test_planned import steps_logged
from tests.process.test_session import PLAIN_BODY, check_as_bare, loop

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
STEPS = 300
SCRIPT = loop(PLAIN_BODY, steps=STEPS)


def test_a_job_trains_on_under_a_journal_that_has_forgotten_a_generation(tmp_path: Path) -> None:
    journal, backup = tmp_path / "run" / "journal.db", tmp_path / "backup.db"
    with SmallJob(tmp_path, SCRIPT, ranks_per_node=2, spares=2) as job:
        forget(
            job,
            back_up=lambda: backups.copy(journal, backup),
            put_back=lambda: backups.put_back(backup, journal),
        )
    assert steps_logged(tmp_path) == list(range(STEPS))
    check_as_bare(tmp_path, SCRIPT, world=2)


@pytest.mark.postgres
def test_so_it_does_under_a_database_that_was_restored(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    url = postgres.database()
    job = SmallJob(tmp_path, SCRIPT, slots=(4,), ranks_per_node=2, spares=2)
    plan = ClusterPlan(environment={JOURNAL: url})
    job.cluster = LocalCluster(tmp_path / "run", [NodePlan("n0", slots=4)], plan)
    dumps: list[Path] = []
    with job:
        forget(
            job,
            back_up=lambda: dumps.append(postgres.dump(url)),
            put_back=lambda: postgres.put_back(url, dumps[0]),
        )
    journal = PostgresJournal(url)
    assert "job" in verify(journal), "the chains go on from where the backup ends"
    journal.close()
    assert steps_logged(tmp_path) == list(range(STEPS))
    check_as_bare(tmp_path, SCRIPT, world=2)


@pytest.mark.postgres
@pytest.mark.usefixtures("postgres")
def test_so_it_does_when_a_replica_is_promoted_that_was_behind(tmp_path: Path) -> None:
    """The orchestrator lives through it: its database goes away, and comes back older."""
    where = programs()
    assert where is not None, "the fixture found it"
    with PostgresServer(where) as first, first.replica() as second:
        name = first.database().partition("?")[0]
        url = f"{name}?host={first.directory},{second.directory}"
        job = SmallJob(tmp_path, SCRIPT, slots=(4,), ranks_per_node=2, spares=2)
        plan = ClusterPlan(environment={JOURNAL: url})
        job.cluster = LocalCluster(tmp_path / "run", [NodePlan("n0", slots=4)], plan)

        def promote() -> None:
            first.stop()
            second.start()
            second.promote()

        with job:
            forget(job, back_up=second.stop, put_back=promote, kill=False)
        journal = PostgresJournal(url)
        assert "job" in verify(journal), "the chains go on from where the replica was"
        journal.close()
    assert steps_logged(tmp_path) == list(range(STEPS))
    check_as_bare(tmp_path, SCRIPT, world=2)


def forget(
    job: SmallJob,
    back_up: Callable[[], object],
    put_back: Callable[[], object],
    kill: bool = True,
) -> None:
    """A backup, a fault and its repair, and the journal of before; to the end of the job."""
    job.wait_ready(2)
    job.wait_settled()
    back_up()
    job.kill(1)
    after = job.wait(
        lambda view: view["state"] == "running" and not view["incident"] and view["incidents"] == 1,
        "the end of the incident",
    )
    if kill:
        job.cluster.kill_orchestrator(restart=False)
    put_back()
    if kill:
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
