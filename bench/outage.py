"""A rank dies while the database is away for minutes: survivors hold, and nothing is lost.

    python -m bench.outage [--seconds 300]

A job of two ranks under two orchestrators with a real PostgreSQL. The database is stopped; training
goes on; half-way a rank is killed, and its peer waits at the boundary. The database comes back, a
leader replaces the rank, and the job ends as one without faults does, bit for bit. Exit 1 if a step
is lost, if anything differs, or if the time is not booked as the control plane's.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from bench import record, rig
from keepstep.chaos import proof
from keepstep.chaos.database import PostgresServer, programs
from keepstep.cli.cluster import JOURNAL, ClusterPlan, Further, NodePlan
from keepstep.errors import Permanent
from keepstep.page import Progress

WORLD = 2
READY_SECONDS_MAX = 120.0
STEPS_AFTER = 40


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.outage", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=float, default=300.0, help="without a database")
    args = parser.parse_args()
    with rig.scratch("outage") as directory:
        found = measure(args.seconds, directory)
    print(f"raw: {record.keep('outage', found).name}")
    print(
        f"{found['outage_seconds']:.0f} s without a database, a rank killed after "
        f"{found['killed_after_seconds']:.0f} s: {found['steps_meanwhile']} steps before it, "
        f"{found['outcome']} {found['recovered_seconds']:.1f} s after the return, "
        f"{found['booked_seconds']:.0f} s booked as control_plane_down; "
        f"{found['steps_lost']} steps lost; {'bit-exact' if found['same'] else 'DIFFERS'}"
    )
    booked = found["booked_seconds"] > 0.8 * (args.seconds - found["killed_after_seconds"])
    well = found["same"] and found["sound"] and found["outcome"] == "resumed" and booked
    return 0 if well else 1


def measure(seconds: float, directory: Path) -> dict[str, Any]:
    where = programs()
    if where is None:
        raise Permanent("no PostgreSQL here; apt-get install postgresql")
    result, reference, last = directory / "result", directory / "reference", directory / "last"
    common = ["--step-seconds", "0.05"]
    arguments = ["--steps", "1000000", *common, "--finish-file", str(last), "--result", str(result)]
    spec = rig.spec_of(directory, rig.WORKLOAD, arguments, world=WORLD, spares=1)
    nodes = [NodePlan(f"n{number}", 1) for number in range(WORLD + 1)]
    with PostgresServer(where) as server:
        plan = ClusterPlan(followers=(Further(),), environment={JOURNAL: server.database()})
        with rig.running(spec, nodes, directory, plan) as job:
            found = without_database(job, server, seconds)
            steps = job.finished() + STEPS_AFTER
            last.write_text(str(steps), encoding="utf-8")
            job.cluster.wait(rig.JOB, READY_SECONDS_MAX)
    proof.reference_run(WORLD, ["--steps", str(steps), *common], reference, directory)
    compared = proof.compare(WORLD, result, reference)
    log = proof.check_step_log(directory / "state" / "steps.jsonl", steps)
    return {
        **found,
        "steps": steps,
        "steps_lost": log.lost + log.repeated,
        "sound": log.sound,
        "same": compared.same,
        "differences": compared.differences,
        "sums": compared.sums,
    }


def without_database(job: rig.Rig, server: PostgresServer, seconds: float) -> dict[str, Any]:
    job.wait_ready(1, READY_SECONDS_MAX)
    victim = job.pid_of(1)
    began, first = time.monotonic(), job.finished()
    server.stop()
    try:
        wait(began + seconds / 2)
        os.kill(victim, signal.SIGKILL)
        killed, trained = time.monotonic(), job.finished() - first
        wait(killed + 2.0)
        held = survivor(job).committed
        wait(began + seconds)
        if survivor(job).committed != held:
            raise Permanent("a step was made without the rank that was killed")
    finally:
        server.start()
    back = time.monotonic()
    incident = job.wait_incident(set(), READY_SECONDS_MAX)
    return {
        "outage_seconds": back - began,
        "killed_after_seconds": killed - began,
        "steps_meanwhile": trained,
        "outcome": incident["outcome"],
        "recovered_seconds": time.monotonic() - back,
        "pause_seconds": incident["pause_seconds"],
        "booked_seconds": incident["seconds"].get("control_plane_down", 0.0),
        "phases": incident["seconds"],
    }


def survivor(job: rig.Rig) -> Progress:
    return max((page for rank, page in job.progress() if rank == 0), key=lambda page: page.step)


def wait(until: float) -> None:
    time.sleep(max(0.0, until - time.monotonic()))


if __name__ == "__main__":
    sys.exit(main())
