"""A second job of lower priority, whose devices the campaign's job may borrow.

It trains all the while, is parked and goes on when a fault asks for it, and has its own proof in
the end: a fault-free run without Keepstep, compared bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keepstep.chaos import proof
from keepstep.chaos.sight import Sight
from keepstep.cli.cluster import LocalCluster
from keepstep.errors import Permanent
from keepstep.model import JobId, JobSpec

LENDER = JobId("lender")
NODES = 2
STEP_SECONDS = 0.1
"""It shall move on, and leave the processor to the job that is watched."""
STEPS_AHEAD = 20
BACK_SECONDS_MAX = 90.0


class Lender:
    """One job in the shadow of another."""

    def __init__(self, cluster: LocalCluster, run_dir: Path, slots: int) -> None:
        self._cluster = cluster
        self._run_dir = run_dir
        self._slots = slots
        self.sight = Sight(cluster, LENDER)

    def close(self) -> None:
        self.sight.close()

    def start(self) -> None:
        self._cluster.client.submit(self._spec())
        self.wait_running("begins to train")

    def _spec(self) -> JobSpec:
        # Failpoints are named by rank: those of the other job are none of ours.
        points = self._run_dir / "failpoints-lender"
        points.mkdir(exist_ok=True)
        return JobSpec(
            job=LENDER,
            script=str(proof.WORKLOAD),
            arguments=(
                *("--steps", "10000000", "--step-seconds", str(STEP_SECONDS)),
                *("--finish-file", str(self._run_dir / "finish-lender")),
                *("--result", str(self._run_dir / "result-lender")),
            ),
            nodes=NODES,
            ranks_per_node=self._slots,
            priority=-1,
            environment={"KEEPSTEP_FAILPOINTS": str(points)},
            directory=str(self._run_dir),
            log_directory=str(self._run_dir / "logs-lender"),
            state_directory=str(self._run_dir / "state-lender"),
            tee=False,
        )

    def loans(self) -> list[dict[str, Any]]:
        """The account, as the orchestrator has it; empty while nobody answers."""
        picture = self.sight.picture() or {"loans": []}
        return [loan for loan in picture["loans"] if loan["lender"] == LENDER]

    def wait_parked(self, since: int, tend: Callable[[], None]) -> None:
        """Until a loan beyond these many has begun."""
        self._until(lambda: len(_begun(self.loans())) > since, "is parked", tend)

    def wait_running(self, what: str, tend: Callable[[], None] | None = None) -> None:
        """Until it makes steps in its newest generation."""

        def steps() -> bool:
            job = self.sight.job_now()
            if job["over"]:
                raise Permanent(f"the lender is {job['state']}: {job['detail'][-300:]}")
            return bool(
                job["state"] == "running"
                and not job["incident"]
                and self.sight.steps.newest.generation == job["generation"]
            )

        self._until(steps, what, tend)

    def _until(self, holds: Callable[[], bool], what: str, tend: Callable[[], None] | None) -> None:
        deadline = time.monotonic() + BACK_SECONDS_MAX
        while not holds():
            if time.monotonic() > deadline:
                state = self.sight.job_now()["state"]
                raise Permanent(f"no lender that {what} in {BACK_SECONDS_MAX:.0f} s: it is {state}")
            if tend is not None:
                tend()
            time.sleep(0.02)

    def finish(self, seconds_max: float) -> int:
        """Let it make a few more steps and end; how many it made."""
        last = self.sight.steps.newest.finished + STEPS_AHEAD
        fresh = self._run_dir / "finish-lender.new"
        fresh.write_text(str(last))
        fresh.replace(self._run_dir / "finish-lender")
        job = self._cluster.wait(LENDER, seconds_max)
        if job["state"] != "finished":
            raise Permanent(f"the lender ended as {job['state']}: {str(job['detail'])[-500:]}")
        return last

    def prove(self, steps: int) -> tuple[str, ...]:
        """What differs from a run without faults and loans: nothing, if all is well."""
        log = proof.check_step_log(self._run_dir / "state-lender" / "steps.jsonl", steps)
        world = NODES * self._slots
        reference = self._run_dir / "reference-lender"
        logs = self._run_dir / "logs-lender"
        proof.reference_run(world, ["--steps", str(steps)], reference, logs)
        found = proof.compare(world, self._run_dir / "result-lender", reference)
        told = [f"lender: {difference}" for difference in found.differences]
        if not log.sound or log.fallbacks:
            told.append(f"lender: its step log is not whole: {log}")
        return tuple(told)


def _begun(loans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [loan for loan in loans if loan["began_at"] is not None]
