"""`keepstep run` and LocalCluster with real processes; the jobs here need no torch of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.agent.offspring import COMMON
from keepstep.cli.cluster import (
    ORCHESTRATOR,
    LocalCluster,
    NodePlan,
    find_job,
    rooms_directory,
)
from keepstep.model import EXIT_REQUEUE, JobId, JobSpec
from tests.process.test_session import PLAIN_BODY, check_as_bare, loop

pytestmark = [pytest.mark.process, pytest.mark.slow]

SRC = Path(__file__).resolve().parents[2] / "src"
SCRIPT = """
import os, sys, time
from pathlib import Path
rank = os.environ["RANK"]
print(f"rank {rank} of {os.environ['WORLD_SIZE']} starts", flush=True)
Path(f"starts-{rank}").write_text(str(os.getpid()))
Path(f"starts-{rank}").rename(f"started-{rank}")
if "raise" in sys.argv:
    raise ValueError("the user's own bug")
while "wait" in sys.argv and not Path("go").exists():
    time.sleep(0.02)
print(f"rank {rank} ends", flush=True)
"""
SECONDS_MAX = 60.0


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(SCRIPT, encoding="utf-8")
    return tmp_path


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def marked_processes(run_dir: Path) -> dict[int, str]:
    """Whatever still has this run's rooms in its environment or command line, which is the value.

    One look per process, environment and command line together: helpers come and go.
    """
    marks = [str(rooms_directory(run_dir)).encode(), str(run_dir).encode()]
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            text = (entry / "environ").read_bytes() + command
        except OSError:
            continue
        if any(mark in text for mark in marks):
            found[int(entry.name)] = command.decode()
    return found


def only_process(run_dir: Path, program: str) -> int:
    """The pid of this program; a child between fork and exec looks like a second one."""
    pids: list[int] = []

    def is_alone() -> bool:
        pids[:] = [pid for pid, command in marked_processes(run_dir).items() if program in command]
        return len(pids) == 1

    until(is_alone, f"one process of {program!r}")
    return pids[0]


class Launched:
    """`keepstep run` as a user would start it."""

    def __init__(self, here: Path, *line: str) -> None:
        self.run_dir = here / "run"
        self.out, self.err = here / "out.txt", here / "err.txt"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                (
                    *(sys.executable, "-m", "keepstep.cli", "run", "--job", "j"),
                    *("--run-dir", str(self.run_dir), "--nproc-per-node", "2", *line),
                ),
                cwd=here,
                # As for users: nobody has imported anything for it.
                env={**os.environ, COMMON: "", "PYTHONPATH": str(SRC)},
                stdout=out,
                stderr=err,
            )

    def ends(self) -> int:
        return self.process.wait(SECONDS_MAX)

    def said(self) -> str:
        return self.out.read_text(encoding="utf-8") + self.err.read_text(encoding="utf-8")


@pytest.fixture
def launch(here: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def start(*line: str) -> Launched:
        started.append(Launched(here, *line))
        return started[-1]

    yield start
    for launched in started:
        if launched.process.poll() is None:
            launched.process.terminate()
            launched.process.wait(SECONDS_MAX)


def test_a_script_runs_as_under_torchrun_and_nothing_is_left_behind(
    launch: Callable[..., Launched], here: Path
):
    launched = launch("job.py")
    assert launched.ends() == 0, launched.said()
    assert "[rank0]: rank 0 of 2 starts" in launched.said()
    assert "[rank1]: rank 1 ends" in launched.said()
    assert not rooms_directory(launched.run_dir).exists()
    until(lambda: not marked_processes(launched.run_dir), "every process to be gone")


def test_a_users_exception_ends_with_its_traceback_and_one(launch: Callable[..., Launched]):
    launched = launch("--tee", "0", "job.py", "raise")
    assert launched.ends() == 1
    assert "ValueError: the user's own bug" in launched.said()


def test_an_observed_job_ends_with_its_first_death_and_says_what_would_have_been_done(
    launch: Callable[..., Launched], here: Path
):
    (here / "policy.toml").write_text('[job.j]\nmode = "observe"\n', encoding="utf-8")
    launched = launch("--policy", "policy.toml", "--spares", "1", "job.py", "wait")
    until(lambda: (here / "started-1").exists(), "the ranks")
    os.kill(int((here / "started-1").read_text(encoding="utf-8")), signal.SIGKILL)
    assert launched.ends() == 1
    said = launched.said()
    assert "rank 1 on " in said
    assert "observe: would migrate rank 1 to the" in said
    until(lambda: not marked_processes(launched.run_dir), "every process to be gone")


def test_ctrl_c_stops_the_job_and_ends_with_130(launch: Callable[..., Launched], here: Path):
    launched = launch("job.py", "wait")
    until(lambda: (here / "started-1").exists(), "the workers")
    launched.process.send_signal(signal.SIGINT)
    assert launched.ends() == 130, launched.said()
    until(lambda: not marked_processes(launched.run_dir), "every process to be gone")


def test_sigterm_saves_a_boundary_and_running_it_again_goes_on_there(
    launch: Callable[..., Launched], here: Path
):
    script, steps = loop(PLAIN_BODY, steps=60), here / "run" / "state" / "steps.jsonl"
    (here / "train.py").write_text(script, encoding="utf-8")
    launched = launch("--env", "PACE=0.1", "train.py")
    until(lambda: steps.exists() and len(steps.read_bytes().splitlines()) > 5, "some steps")
    launched.process.send_signal(signal.SIGTERM)
    assert launched.ends() == EXIT_REQUEUE, launched.said()
    assert "to go on: the same command, with --job j" in launched.said()
    made = len(steps.read_bytes().splitlines())
    assert 5 < made < 60
    (here / "hurry").touch()
    again = launch("train.py")
    assert again.ends() == 0, again.said()
    logged = [json.loads(line)["step"] for line in steps.read_bytes().splitlines()]
    assert logged == list(range(60)), "each step once, before the end or after it"
    check_as_bare(here, script, world=2)


def test_the_demo_proves_that_nothing_differs():
    done = subprocess.run(
        [sys.executable, "-m", "keepstep.cli", "demo"],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sums = re.findall(r"sha256 ([0-9a-f]{64})", done.stdout)
    assert len(sums) == 2
    assert sums[0] == sums[1]
    assert "kill -9" in done.stdout


def test_a_killed_orchestrator_and_a_killed_agent_are_put_back_under_a_running_job(
    launch: Callable[..., Launched], here: Path
):
    launched = launch("--node", "n0", "job.py", "wait")
    until(lambda: (here / "started-1").exists(), "the workers")
    until(lambda: launched.said().count("starts") == 2, "the workers' first lines")
    for program in ("keepstep.orchestrator", "keepstep.agent\0"):
        os.kill(only_process(launched.run_dir, program), signal.SIGKILL)
    time.sleep(0.5)
    (here / "go").touch()
    assert launched.ends() == 0, launched.said()
    assert launched.said().count("starts") == 2, "no worker was started twice"


def test_a_lost_node_is_gone_with_all_it_held_and_comes_back_empty(here: Path):
    nodes = [NodePlan("n0", slots=1), NodePlan("n1", slots=1)]
    with LocalCluster(here / "run", nodes) as cluster:
        cluster.wait_nodes()
        boot = cluster.client.cluster()["nodes"]["n1"]["boot"]
        cluster.client.submit(
            JobSpec(JobId("j"), str(here / "job.py"), ("wait",), nodes=2, directory=str(here))
        )
        until(lambda: (here / "started-1").exists(), "the workers")
        cluster.lose_node("n1")
        assert cluster.processes("n1") == ()
        assert not cluster.room("n1").exists()
        assert cluster.processes("n0")
        cluster.return_node("n1")
        picture = cluster.wait_until(
            lambda seen: seen["nodes"]["n1"]["alive"] and seen["nodes"]["n1"]["boot"] != boot,
            SECONDS_MAX,
            "n1 to come back with another boot",
        )
        assert find_job(picture, "j") is not None
        term, pid = picture["term"], cluster.pid_of(ORCHESTRATOR)
        cluster.kill_orchestrator()
        cluster.wait_until(lambda seen: seen["term"] == term + 1, SECONDS_MAX, "a higher term")
        assert cluster.pid_of(ORCHESTRATOR) != pid
        cluster.client.stop("j", save=False, why="the test is over")
        assert cluster.wait("j", SECONDS_MAX)["state"] == "stopped"
    assert not cluster.room("n0").exists()
    until(lambda: not marked_processes(cluster.run_dir), "every process to be gone")
