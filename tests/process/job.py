"""A small real job for tests: one node or several, a script, and faults by hand."""

from __future__ import annotations

import contextlib
import os
import signal
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from keepstep.cli.cluster import LocalCluster, NodePlan
from keepstep.model import JobId, JobSpec, Policy
from keepstep.page import Page, Progress

SECONDS_MAX = 150.0
GONE_SECONDS_MAX = 10.0
SETTLED = 4
"""DDP has its last buckets by then (decision 0021)."""


class SmallJob:
    """Starts a cluster and a job in it; everything is gone when the block ends.

    A step of a script that heeds `PACE` takes so many seconds until the test waits for the end: no
    job is over before the fault that it is to survive, and none is long after it.
    """

    def __init__(
        self,
        directory: Path,
        script: str,
        *,
        slots: Sequence[int] = (4,),
        ranks_per_node: int = 3,
        nodes: int = 1,
        spares: int = 1,
        level: int = 1,
        environment: dict[str, str] | None = None,
        policy: Policy | None = None,
        pace: float = 0.1,
    ) -> None:
        self.directory = directory
        path = directory / "script.py"
        path.write_text(textwrap.dedent(script))
        self.cluster = LocalCluster(
            directory / "run", [NodePlan(f"n{i}", slots=count) for i, count in enumerate(slots)]
        )
        self.spec = JobSpec(
            job=JobId("job"),
            script=str(path),
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            spares=spares,
            standby_level=level,
            environment={"PACE": str(pace), **(environment or {})},
            directory=str(directory),
            log_directory=str(directory / "logs"),
            state_directory=str(directory / "state"),
            tee=False,
            policy=policy or Policy(),
        )

    def __enter__(self) -> SmallJob:
        self.cluster.start()
        self.cluster.wait_nodes(SECONDS_MAX)
        self.cluster.client.submit(self.spec)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            error.add_note(self.logs())
        self.cluster.stop()

    def logs(self) -> str:
        """What the ranks, and then the agents and orchestrators, said last."""
        ranks = sorted((self.directory / "logs").rglob("*.log"))
        others = sorted((self.directory / "run").glob("*.log"))
        said = [(path, 2000) for path in ranks] + [(path, 6000) for path in others]
        return "\n".join(f"== {path.name}\n{path.read_text()[-last:]}" for path, last in said)

    def view(self) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.client.cluster()["jobs"].get("job", {})
        return found

    def wait(self, holds: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        picture = self.cluster.wait_until(
            lambda p: holds(p["jobs"].get("job", {})), SECONDS_MAX, what
        )
        found: dict[str, Any] = picture["jobs"]["job"]
        return found

    def wait_ready(self, spares: int = 1) -> None:
        """Running, with warm spares; perhaps in its first steps."""
        self.wait(
            lambda job: job.get("state") == "running" and job["spares"]["ready"] >= spares,
            f"a running job with {spares} spares",
        )

    def wait_settled(self) -> None:
        """Past the first steps: whoever dies from now on is replaced, and nobody starts anew."""
        for rank in range(len(self.view()["seats"])):
            self.wait_step(rank, SETTLED)

    def wait_step(self, rank: int, step: int) -> Progress:
        deadline = time.monotonic() + SECONDS_MAX
        while time.monotonic() < deadline:
            progress = self.progress(rank)
            if progress is not None and progress.step >= step:
                return progress
            time.sleep(0.005)
        raise TimeoutError(f"rank {rank} did not come to step {step}")

    def page(self, rank: int) -> Page:
        """What a rank writes of itself, whoever is there to be asked."""
        seat = self.view()["seats"][rank]
        room = self.cluster.room(seat["node"]) / "job"
        return Page(room / f"seat-{rank}-{seat['incarnation']}.page")

    def progress(self, rank: int) -> Progress | None:
        try:
            return self.page(rank).read()
        except OSError:
            return None

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> int:
        progress = self.progress(rank)
        assert progress is not None, f"rank {rank} has no page yet"
        os.kill(progress.pid, number)
        return progress.pid

    def outlives_a_kill(self, rank: int, *, at_step: int) -> None:
        """Kill a rank of the warm, running job; the job must end well all the same."""
        self.wait_ready()
        self.wait_step(rank, at_step)
        self.kill(rank)
        assert self.end()["exit_code"] == 0

    def hurry(self) -> None:
        """The story is told: what is left of the steps takes no time."""
        (self.directory / "hurry").touch()

    def end(self) -> dict[str, Any]:
        self.hurry()
        return self.cluster.wait("job", SECONDS_MAX)

    def incidents(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.cluster.client.cluster()["incidents"]
        return found


@contextlib.contextmanager
def memory_limit(size: int) -> Iterator[None]:
    """What this process starts meanwhile has this much, and no more."""
    groups = Path("/sys/fs/cgroup")
    first = (groups / "cgroup.controllers").exists()
    base, limit = (groups, "memory.max") if first else (groups / "memory", "memory.limit_in_bytes")
    group = base / f"keepstep-test-{os.getpid()}"
    own = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    wanted = "" if first else "memory"
    before = next(line.split(":", 2)[2] for line in own if line.split(":", 2)[1] == wanted)
    group.mkdir()
    try:
        (group / limit).write_text(str(size), encoding="utf-8")
        (group / "cgroup.procs").write_text(str(os.getpid()), encoding="utf-8")
        try:
            yield
        finally:
            back = base / before.lstrip("/") / "cgroup.procs"
            back.write_text(str(os.getpid()), encoding="utf-8")
    finally:
        deadline = time.monotonic() + GONE_SECONDS_MAX
        # Who was killed belongs to it until its parent, or init, has reaped it.
        while (group / "cgroup.procs").read_text(encoding="utf-8") and time.monotonic() < deadline:
            time.sleep(0.01)
        group.rmdir()
