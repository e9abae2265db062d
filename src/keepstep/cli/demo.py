"""`keepstep demo`: a rank is killed before your eyes, and the result is the same to the last bit.

A real 4-rank job on this machine, three agents, one spare, no GPU and no root. On a terminal the
cluster is drawn live; in a pipe each decision is a line. At the end the same script is run without
Keepstep and without a fault, and both results are compared by SHA-256.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keepstep.chaos import proof
from keepstep.chaos.campaign import until_told_to_leave
from keepstep.chaos.sight import Sight
from keepstep.cli import view, watch
from keepstep.cli.cluster import ClusterPlan, LocalCluster, NodePlan, find_job
from keepstep.errors import KeepstepError, Permanent, Transient
from keepstep.model import JobId, JobSpec

JOB = JobId("demo")
WORLD = 4
VICTIM = 2
STEPS_BEFORE_KILL = 40
STEPS_AFTER_KILL = 60
STEP_SECONDS = 0.03
START_SECONDS_MAX = 180.0
RECOVERY_SECONDS_MAX = 60.0
FRAME_SECONDS = 0.1

Picture = dict[str, Any]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("demo", help="a rank is killed before your eyes (a minute)")
    command.add_argument("--keep", action="store_true", help="keep the run directory")
    command.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    run_dir = Path(tempfile.mkdtemp(prefix="keepstep-demo-"))
    keep = bool(asked.keep)
    try:
        # SIGTERM too must end what was started here.
        with until_told_to_leave():
            return _play(run_dir)
    except KeepstepError:
        keep = True
        raise
    finally:
        if keep:
            print(f"logs and journal: {run_dir}")
        else:
            shutil.rmtree(run_dir, ignore_errors=True)


def _play(run_dir: Path) -> int:
    nodes = [NodePlan("n0", 2), NodePlan("n1", 2), NodePlan("n2", 1)]
    with LocalCluster(run_dir, nodes, ClusterPlan(common_preload=True)) as cluster:
        stage: _Stage = _Screen(cluster) if sys.stdout.isatty() else _Lines(cluster)
        sight = Sight(cluster, JOB)
        try:
            with stage:
                incident, steps, pause = _kill_one(cluster, sight, stage, run_dir)
        finally:
            sight.close()
        _tell_story(incident, pause)
    return _prove(run_dir, steps)


def _kill_one(
    cluster: LocalCluster, sight: Sight, stage: _Stage, run_dir: Path
) -> tuple[Picture, int, float]:
    """Start, kill, watch it go on, end. Returns the incident, the steps made and the pause."""
    stage.say("starting an orchestrator and three agents")
    stage.say(f"in a browser: {cluster.client.url}/ (it asks for what {cluster.token_file} holds)")
    stage.until(lambda p: len(p["connected"]) == len(cluster.nodes), "all agents")
    stage.say("4 ranks on n0 and n1, a warm spare on n2")
    cluster.client.submit(_spec(run_dir))
    stage.until(lambda p: _fit(p) and sight.steps.newest.finished >= STEPS_BEFORE_KILL, "the job")
    job = sight.job_now()
    node, pid = sight.node_of(VICTIM), sight.pid_of(VICTIM)
    struck = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    stage.say(f"kill -9 {pid}: that was rank {VICTIM} on {node}")
    stage.until(lambda p: _running(p, job["generation"] + 1), "the recovery", RECOVERY_SECONDS_MAX)
    incident: Picture = cluster.client.cluster()["incidents"][-1]
    finish = sight.steps.first_finish(job["generation"], int(incident["boundary"]))
    pause = (finish or time.monotonic()) - struck
    stage.say(
        f"rank {VICTIM} lives on {sight.node_of(VICTIM)} now; the other three processes lived on"
    )
    steps = sight.steps.newest.finished + STEPS_AFTER_KILL
    (run_dir / "finish.new").write_text(str(steps))
    (run_dir / "finish.new").replace(run_dir / "finish")
    stage.until(lambda p: bool((find_job(p, JOB) or {}).get("over")), "the job's end")
    ended = sight.job_now()
    if ended["state"] != "finished":
        raise Permanent(f"the job ended as {ended['state']}: {str(ended['detail'])[-1000:]}")
    stage.say(f"the job finished all {steps} steps")
    return incident, steps, pause


def _spec(run_dir: Path) -> JobSpec:
    return JobSpec(
        job=JOB,
        script=str(proof.WORKLOAD),
        arguments=(
            *("--steps", "1000000", "--step-seconds", str(STEP_SECONDS)),
            *("--finish-file", str(run_dir / "finish"), "--result", str(run_dir / "result")),
        ),
        nodes=2,
        ranks_per_node=2,
        spares=1,
        standby_level=2,
        directory=str(run_dir),
        log_directory=str(run_dir / "logs"),
        state_directory=str(run_dir / "state"),
        tee=False,
    )


def _fit(picture: Picture) -> bool:
    job = find_job(picture, JOB)
    return job is not None and _running(picture, 0) and job["spares"]["ready"] >= 1


def _running(picture: Picture, generation: int) -> bool:
    job = find_job(picture, JOB)
    if job is None or (job["over"] and job["state"] != "finished"):
        raise Permanent(f"the job is {job['state'] if job else 'gone'}: {job and job['detail']}")
    return bool(job["state"] == "running" and job["generation"] >= generation)


def _tell_story(incident: Picture, pause: float) -> None:
    paint = view.ansi if sys.stdout.isatty() else view.plain
    print("\n".join(["", *view.incident_lines(incident, paint)]))
    print(f"\nfrom kill -9 to the first finished step: {pause:.2f} s", flush=True)


def _prove(run_dir: Path, steps: int) -> int:
    print(f"\nthe same {steps} steps again, without Keepstep and without a fault …", flush=True)
    reference = run_dir / "reference"
    proof.reference_run(WORLD, ["--steps", str(steps)], reference, run_dir / "logs")
    found = proof.compare(WORLD, run_dir / "result", reference)
    log = proof.check_step_log(run_dir / "state" / "steps.jsonl", steps)
    for part in ("weights", "optimizer", "buffers", "rng"):
        print(f"  {part:<10} {found.sums[part][:16]}…  {found.reference_sums[part][:16]}…")
    print(f"with a killed rank   sha256 {_sha256(run_dir / 'result')}")
    print(f"without any fault    sha256 {_sha256(reference)}")
    for difference in found.differences:
        print(f"  {difference}")
    same = found.same and log.sound
    print(
        f"{'the same, to the last bit' if found.same else 'NOT THE SAME'}: weights, optimizer, "
        f"scheduler, buffers, random numbers and data order of all {WORLD} ranks; "
        f"{log.steps} steps committed, {log.lost} lost, {log.repeated} made twice"
    )
    return 0 if same else 1


def _sha256(directory: Path) -> str:
    """Of every rank's result file, in order of rank."""
    total = hashlib.sha256()
    for rank in range(WORLD):
        total.update((directory / f"rank-{rank}.json").read_bytes())
    return total.hexdigest()


# ---------------------------------------------------------------- the stage


class _Stage:
    """Shows the cluster while something is waited for."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._feed = watch.Feed(cluster.client)
        self._began = time.monotonic()

    def __enter__(self) -> _Stage:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def say(self, text: str) -> None:
        raise NotImplementedError

    def show(self, picture: Picture) -> None:
        raise NotImplementedError

    def until(
        self,
        holds: Callable[[Picture], bool],
        what: str,
        seconds_max: float = START_SECONDS_MAX,
    ) -> None:
        deadline = time.monotonic() + seconds_max
        while time.monotonic() < deadline:
            self._cluster.supervisor.check()
            try:
                picture = self._cluster.client.cluster()
            except Transient:
                time.sleep(FRAME_SECONDS)
                continue
            self.show(picture)
            if holds(picture):
                return
            time.sleep(FRAME_SECONDS)
        raise Permanent(f"waited {seconds_max:.0f} s for {what}")

    def _clock(self) -> str:
        return f"{time.monotonic() - self._began:5.1f} s"


class _Lines(_Stage):
    """For pipes and logs: each decision once, as it comes."""

    def __init__(self, cluster: LocalCluster) -> None:
        super().__init__(cluster)
        self._told = 0

    def say(self, text: str) -> None:
        print(f"{self._clock()}  {text}", flush=True)

    def show(self, picture: Picture) -> None:
        for record in self._feed.recent():
            if record["seq"] > self._told and record["why"]:
                self._told = int(record["seq"])
                print(f"{self._clock()}    {view.record_line(record)}", flush=True)


class _Screen(_Stage):
    """For terminals: the cluster, drawn in place, with what was said above it."""

    def __init__(self, cluster: LocalCluster) -> None:
        super().__init__(cluster)
        self._said: list[str] = []

    def __enter__(self) -> _Stage:
        sys.stdout.write("\x1b[?1049h\x1b[?25l")
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        print("\n".join(self._said), flush=True)

    def say(self, text: str) -> None:
        self._said.append(f"{self._clock()}  {text}")

    def show(self, picture: Picture) -> None:
        size = shutil.get_terminal_size()
        top = [view.ansi("keepstep demo", "strong"), *self._said, ""]
        room = max(5, size.lines - 1 - len(top))
        told = [record for record in self._feed.recent() if record["why"]]
        frame = view.frame_lines(picture, told, room, view.ansi, size.columns)
        watch.draw([*top, *frame], size.columns)
