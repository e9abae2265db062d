"""What the benches share: a job on a cluster of real processes, and what can be seen of it.

Everything runs on one machine, so one monotonic clock orders kills, incidents and finished steps.
The orchestrator's records bear its own time, which is wall-clock time anchored once and monotonic
from then on; `offset` finds the constant between the two.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import keepstep
from bench.launch import free_port
from keepstep.agent.offspring import COMMON
from keepstep.cli.cluster import ClusterPlan, LocalCluster, NodePlan, find_job
from keepstep.errors import Permanent, Unreachable
from keepstep.model import JobId, JobSpec
from keepstep.page import Mark, Page, Progress

JOB = "bench"
WORKLOAD = Path(keepstep.__file__).parent / "chaos" / "workload.py"
OFFSET_LOOKS = 9
SEARCH_SECONDS = 0.02
"""Reading pages is cheap and looking for new ones is not: a watcher must not disturb a pause."""


class Rig:
    """One job on one cluster."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self._pages: dict[Path, Page] = {}
        self._search_due = 0.0

    # ---------------------------------------------------------------- the orchestrator's picture

    def picture(self) -> dict[str, Any]:
        """As soon as somebody answers."""
        return self.cluster.wait_until(lambda _: True, 30.0, "the orchestrator")

    def job(self) -> dict[str, Any]:
        return find_job(self.picture(), JOB) or {}

    def incidents(self) -> list[dict[str, Any]]:
        return [i for i in self.picture()["incidents"] if i["job"] == JOB]

    def offset(self) -> float:
        """The orchestrator's time minus our monotonic time: from the quickest of a few answers."""
        looks = []
        for _ in range(OFFSET_LOOKS):
            asked = time.monotonic()
            picture = self.cluster.client.cluster()
            answered = time.monotonic()
            looks.append((answered - asked, float(picture["now"]) - (asked + answered) / 2))
        return min(looks)[1]

    def wait_ready(self, spares: int, seconds_max: float) -> dict[str, Any]:
        """Until the job trains, no incident is open and the spares are warm."""

        def ready(picture: dict[str, Any]) -> bool:
            job = find_job(picture, JOB) or {}
            if job.get("over"):
                raise Permanent(f"the job is over: {job['state']}: {job['detail'][-2000:]}")
            running = job.get("state") == "running" and job["incident"] is None
            return running and job["spares"]["ready"] >= spares

        picture = self.cluster.wait_until(ready, seconds_max, f"{spares} warm spares")
        return find_job(picture, JOB) or {}

    def wait_incident(self, known: set[str], seconds_max: float) -> dict[str, Any]:
        """Until an incident that was not known before is closed."""
        found: list[dict[str, Any]] = []

        def closed(picture: dict[str, Any]) -> bool:
            found[:] = [
                i
                for i in picture["incidents"]
                if i["job"] == JOB and i["id"] not in known and i["closed_at"] is not None
            ]
            return bool(found)

        self.cluster.wait_until(closed, seconds_max, "the end of an incident")
        return found[0]

    # ---------------------------------------------------------------- the nodes' rooms

    def node_of(self, rank: int) -> str:
        return str(self.job()["seats"][rank]["node"])

    def pid_of(self, rank: int) -> int:
        """The process that has this rank's seat now."""
        seat = self.job()["seats"][rank]
        state = self.cluster.room(str(seat["node"])) / "agent-state.json"
        for worker in json.loads(state.read_text(encoding="utf-8"))["workers"]:
            if worker["job"] == JOB and worker["rank"] == rank:
                return int(worker["pid"])
        raise Permanent(f"no process of rank {rank} is recorded on {seat['node']}")

    def progress(self) -> list[tuple[int, Progress]]:
        """(rank, reading) of every page in the rooms; those of the dead are among them."""
        now = time.monotonic()
        if now >= self._search_due:
            self._search_due = now + SEARCH_SECONDS
            self._search()
        readings = []
        for path, page in self._pages.items():
            try:
                readings.append((int(path.name.split("-")[1]), page.read()))
            except (ValueError, struct.error):
                continue
        return readings

    def _search(self) -> None:
        found = set(self.cluster.room("x").parent.glob(f"*/{JOB}/seat-*.page"))
        for gone in self._pages.keys() - found:
            del self._pages[gone]
        for path in found - self._pages.keys():
            try:
                self._pages[path] = Page(path)
            except (OSError, ValueError, Permanent):
                continue  # It is being made, or goes with its node.

    def generation(self) -> int:
        return max((reading.generation for _, reading in self.progress()), default=0)

    def finished(self) -> int:
        """Steps finished by the furthest rank."""
        return max((finished(reading) for _, reading in self.progress()), default=0)


def finished(reading: Progress) -> int:
    """Steps that a rank has finished, by its page."""
    return reading.step + (1 if reading.mark is Mark.APPLIED else 0)


@contextmanager
def scratch(bench: str) -> Iterator[Path]:
    """A directory that goes with success, and stays with its logs after anything else."""
    with ending_in_good_order():
        directory = Path(tempfile.mkdtemp(prefix=f"ks-{bench}-"))
        try:
            yield directory
        except BaseException:
            print(f"logs are left in {directory}", file=sys.stderr)
            raise
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def running(
    spec: JobSpec, nodes: Sequence[NodePlan], run_dir: Path, plan: ClusterPlan = ClusterPlan()
) -> Iterator[Rig]:
    """A cluster with this job on it, from its submission to the end of all processes."""
    # Each node imports torch by itself, as nodes do.
    plan = replace(plan, environment={COMMON: "", **plan.environment})
    with LocalCluster(run_dir / "run", nodes, plan) as cluster:
        cluster.wait_nodes()
        cluster.client.submit(spec)
        yield Rig(cluster)


def spec_of(
    run_dir: Path,
    script: Path,
    arguments: Sequence[str],
    *,
    world: int,
    spares: int,
    interface: str = "lo",
) -> JobSpec:
    """One rank per node, so that private state is mirrored; standbys warm at level 2."""
    return JobSpec(
        JobId(JOB),
        str(script),
        tuple(arguments),
        nodes=world,
        ranks_per_node=1,
        spares=spares,
        standby_level=2,
        environment={"GLOO_SOCKET_IFNAME": interface},
        directory=str(run_dir),
        log_directory=str(run_dir / "logs"),
        state_directory=str(run_dir / "state"),
        tee=False,
    )


@contextmanager
def ending_in_good_order() -> Iterator[None]:
    """A bench that is told to end (by `timeout`, by CI) takes its processes with it."""
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def node_names(count: int) -> list[str]:
    return [f"n{number}" for number in range(count)]


# ---------------------------------------------------------------- the bare engine


def bare_world(
    command: Sequence[str], world: int, log: Path, environment: Mapping[str, str] | None = None
) -> list[subprocess.Popen[bytes]]:
    """Start one process per rank with nothing but torch's own variables around it."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KEEPSTEP_")}
    common = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        **(environment or {}),
    }
    processes = []
    with log.open("ab") as file:
        for rank in range(world):
            around = {**clean, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(
                subprocess.Popen([sys.executable, *command], env=around, stdout=file, stderr=file)
            )
    return processes


def wait_all(processes: Sequence[subprocess.Popen[bytes]], seconds_max: float, log: Path) -> None:
    """Until all have ended well; the first that has not takes the others with it."""
    deadline = time.monotonic() + seconds_max
    try:
        for process in processes:
            code = process.wait(max(0.1, deadline - time.monotonic()))
            if code != 0:
                raise Permanent(f"a bare process ended with {code}; see {log}")
    except subprocess.TimeoutExpired as error:
        raise Unreachable(f"bare processes still ran after {seconds_max:.0f} s") from error
    finally:
        end_all(processes)


def end_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
