"""Launchers that join an orchestrator by its URL: who leaves, who stays, and who is not let in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.cli.client import Client
from keepstep.errors import KeepstepError
from tests.process.test_launcher import SCRIPT, SECONDS_MAX, SRC, until

pytestmark = [pytest.mark.process, pytest.mark.slow]
TOKEN = "a token of more than sixteen letters"


class Cluster:
    """An orchestrator of its own, and launchers that join it."""

    def __init__(self, here: Path) -> None:
        self.here = here
        (here / "job.py").write_text(SCRIPT, encoding="utf-8")
        (here / "token").write_text(TOKEN, encoding="utf-8")
        self.started: list[subprocess.Popen[bytes]] = []
        self.orchestrator = self.lead("127.0.0.1:0")
        until((here / "port").exists, "the orchestrator's port")
        self.listen = f"127.0.0.1:{(here / 'port').read_text().strip()}"
        self.client = Client(f"http://{self.listen}", TOKEN)

    def lead(self, listen: str) -> subprocess.Popen[bytes]:
        line = ["--listen", listen, "--journal", "journal.db", "--token-file", "token"]
        return self.start("orchestrator", "keepstep.orchestrator", *line, "--port-file", "port")

    def launch(self, node: str, *, run_dir: str) -> subprocess.Popen[bytes]:
        line = ["run", "--orchestrator", f"http://{self.listen}", "--token-file", "token"]
        line += ["--job", "j", "--node", node, "--run-dir", run_dir, "--log-dir", "logs"]
        return self.start(run_dir, "keepstep.cli", *line, "--state-dir", "s", "job.py", "wait")

    def start(self, name: str, module: str, *line: str) -> subprocess.Popen[bytes]:
        # Given up after two seconds, if it were given up.
        own = {"PYTHONPATH": str(SRC), "KEEPSTEP_LAUNCHER_UNREACHABLE_SECONDS_MAX": "2"}
        with (self.here / f"{name}.txt").open("ab") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *line],
                cwd=self.here,
                env={**os.environ, **own},
                stdout=said,
                stderr=said,
            )
        self.started.append(process)
        return process

    def said(self, name: str) -> str:
        return (self.here / f"{name}.txt").read_text(encoding="utf-8")

    def connected(self) -> set[str]:
        try:
            return set(self.client.cluster()["connected"])
        except KeepstepError:
            return set()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    for process in reversed(made.started):
        if process.poll() is None:
            process.kill() if process is made.orchestrator else process.terminate()
            process.wait(SECONDS_MAX)


def test_who_leaves_leaves_alone_and_nobody_is_ended_for_a_lost_orchestrator(cluster: Cluster):
    here = cluster.here
    working = cluster.launch("n0", run_dir="r0")
    until((here / "started-0").exists, "the worker")
    pid = (here / "started-0").read_text()
    spare = cluster.launch("n1", run_dir="r1")
    # One of the same name from elsewhere, and one from the same directory: both are told the fix.
    twin = cluster.launch("n0", run_dir="r2")
    again = cluster.launch("n0", run_dir="r0")
    assert again.wait(SECONDS_MAX) == 2
    assert "node n0 is run from" in cluster.said("r0")
    assert twin.wait(SECONDS_MAX) == 1
    assert "a node called n0 is here already" in cluster.said("r2")
    assert "another name with --node" in cluster.said("r2")
    until(lambda: cluster.connected() == {"n0", "n1"}, "the spare")
    cluster.client.drain("n1", {"why": "patches"})
    spare.send_signal(signal.SIGTERM)
    assert spare.wait(SECONDS_MAX) == 0
    assert "no rank of j is here, so the job goes on" in cluster.said("r1")
    # The orchestrator is away for longer than would be waited for if nobody worked.
    cluster.orchestrator.kill()
    cluster.orchestrator.wait()
    until(lambda: "training goes on; trying again" in cluster.said("r0"), "a word about it")
    cluster.orchestrator = cluster.lead(cluster.listen)
    until(lambda: "n0" in cluster.connected(), "the agent to come back")
    picture = cluster.client.cluster()
    assert picture["jobs"]["j"]["state"] in ("starting", "running")
    assert {name: node["faults"] for name, node in picture["nodes"].items()} == {"n0": 0, "n1": 0}
    (here / "go").touch()
    assert working.wait(SECONDS_MAX) == 0
    assert (here / "started-0").read_text() == pid
