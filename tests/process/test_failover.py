"""Two orchestrators, a real PostgreSQL and a real job: whoever leads may die, stop or lose its
database in the middle of a migration, and nothing is lost and nothing happens twice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keepstep.cli import certs
from keepstep.cli.client import TLS_DIRECTORY, Client
from keepstep.cli.cluster import JOURNAL, TLS, ClusterPlan, Further, LocalCluster, NodePlan
from keepstep.orchestrator.journal import verify
from keepstep.orchestrator.journal_postgres import PostgresJournal
from tests.postgres import PostgresServer
from tests.process.job import SECONDS_MAX, SmallJob
from tests.process.test_planned import steps_logged
from tests.process.test_session import PLAIN_BODY, check_as_bare, loop

pytestmark = [pytest.mark.process, pytest.mark.postgres, pytest.mark.timeout(300)]
STEPS = 300
SCRIPT = loop(PLAIN_BODY, steps=STEPS)


class TwoLeaders(SmallJob):
    """A small job under two orchestrators, with certificates all around."""

    def __init__(self, directory: Path, url: str) -> None:
        super().__init__(
            directory,
            SCRIPT,
            slots=(4,),
            ranks_per_node=2,
            spares=2,
        )
        self.points = directory / "points"
        self.points.mkdir()
        self.pki = directory / "pki"
        certs.make(self.pki, hosts=["127.0.0.1"], nodes=["n0"], operators=["test"])
        environment = {
            JOURNAL: url,
            "KEEPSTEP_FAILPOINTS": str(self.points),
            TLS: str(self.pki / "orchestrator"),
            "KEEPSTEP_AGENT_TLS_DIRECTORY": str(self.pki / "node-n0"),
        }
        plan = ClusterPlan(followers=(Further(),), environment=environment)
        self.cluster = LocalCluster(directory / "run", [NodePlan("n0", slots=4)], plan)

    def leader(self) -> str:
        found: list[str] = []
        until(lambda: bool(found.append(self.cluster.leader()) or found[-1]), "a leader")
        return found[-1]

    def strike_leader(self, phase: str, action: str) -> str:
        """A rank dies, and in that phase of its replacement the leader does."""
        self.wait(lambda job: job["state"] == "running" and job["spares"]["ready"] >= 1, "a spare")
        name, point = self.leader(), self.points / f"orchestrator-{phase}"
        point.write_text(action, encoding="utf-8")
        self.kill(1)
        until(point.with_name(point.name + ".hit").exists, f"the leader in {phase}")
        return name

    def recovers(self, incidents: int) -> None:
        """Until the job trains again, with so many incidents behind it."""
        self.wait(
            lambda job: (
                job.get("state") == "running"
                and not job["incident"]
                and job["incidents"] == incidents
            ),
            f"the end of incident {incidents}",
        )


def until(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not holds():
        assert time.monotonic() < deadline, f"waited {SECONDS_MAX} s for {what}"
        time.sleep(0.02)


def health(job: TwoLeaders, name: str) -> dict[str, Any]:
    url = job.cluster.client.urls[job.cluster.orchestrators.index(name)]
    found: dict[str, Any] = Client(url, "").health()
    return found


def test_leaders_are_killed_stopped_and_lose_their_database_and_the_job_ends_bit_for_bit(
    tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres.database()
    monkeypatch.setenv(TLS_DIRECTORY, str(tmp_path / "pki" / "operator-test"))
    with TwoLeaders(tmp_path, url) as job:
        job.wait_ready(2)
        job.wait_settled()
        first = job.leader()
        (other,) = set(job.cluster.orchestrators) - {first}
        # It may have looked last before anybody led.
        led = health(job, first)["leader"]
        until(lambda: health(job, other)["leader"] == led, "a follower that knows its leader")
        seen = health(job, other)
        assert seen["status"] == "following"

        killed = job.strike_leader("reform", "kill")
        job.recovers(1)
        assert job.leader() != killed or health(job, killed)["term"] != seen["term"]

        stopped = job.strike_leader("quiesce", "stop")
        job.recovers(2)
        until(lambda: job.cluster.leader() not in ("", stopped), "another leader")
        os.kill(job.cluster.pid_of(stopped), signal.SIGCONT)
        until(lambda: health(job, stopped)["status"] == "following", "the woken one to follow")

        job.wait(lambda view: view["spares"]["ready"] >= 1, "a spare")
        survivor, victim = job.page(0), job.page(1)
        assert health(job, job.leader())["leader"].startswith("https://")
        postgres.stop()
        try:
            before = survivor.read().step
            until(lambda: survivor.read().step > before + 5, "steps that nobody decides about")
            os.kill(victim.read().pid, signal.SIGKILL)
            time.sleep(4.0)  # The outage, with a fault in it.
            held = survivor.read().committed
            time.sleep(0.5)
            assert survivor.read().committed == held, "it waits at its boundary"
        finally:
            postgres.start()
        job.recovers(3)
        cut = job.incidents()[-1]
        assert cut["outcome"] == "resumed"
        assert 2.0 < cut["seconds"]["control_plane_down"] < cut["pause_seconds"]
        assert job.end()["exit_code"] == 0
        view = job.view()
        assert (view["fallbacks"], view["incidents"]) == (0, 3)
        # Three deaths of one rank, three new workers of it, and nobody else's.
        assert [seat["incarnation"] for seat in view["seats"]] == [0, 3]
        picture = job.cluster.client.cluster()
        assert picture["control_plane"]["down_seconds"] > 4.0
    journal = PostgresJournal(url)
    assert "job" in verify(journal)
    journal.close()
    assert steps_logged(tmp_path) == list(range(STEPS))
    check_as_bare(tmp_path, SCRIPT, world=2)
