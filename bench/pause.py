"""How long training stands still when a rank is killed: from the kill to the first finished step.

    python -m bench.pause [--kills 20] [--sizes 10,1024] [--standby-level 2] [--seed 1]

A job of four ranks on four nodes with warm spares trains; a random rank is killed with SIGKILL at a
random moment; the step is finished when every rank has applied it. The goals are for spares of
level 2; those of level 1 (imports done) and cold slots (0) are measured and not judged. Each pause
is told by part:

    kill | detection | quiesce | reform, transfer, verify | resume and first step | finished

Beside it, in the same run and before and after the kills, the bare engine does what nobody can
save: one step of the same script without Keepstep, and one send/recv of the same bytes. The figure
is the pause minus these two.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench import figures, record, rig
from keepstep.cli.cluster import NodePlan
from keepstep.errors import Permanent
from keepstep.page import TRAINING

P50_SECONDS_MAX = 0.200
P95_SECONDS_MAX = 0.500
WORLD, SPARES, LEVEL = 4, 2, 2
WARM_SECONDS_MAX = 300.0
INCIDENT_SECONDS_MAX = 120.0
LOOK_SECONDS = 0.001
CALM_STEPS = 30
CALM_SECONDS_MAX = 60.0
BARE_STEPS = 150
QUIESCE = ("allocate", "quiesce", "hold")
REFORM = ("reform", "transfer", "verify")
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Pause:
    """One kill. All in seconds."""

    rank: int
    detection: float
    quiesce: float
    reform: float
    """Re-forming, transfer and verification together: they overlap."""
    resume: float
    """From the order to resume until every rank has finished its first step."""
    whole: float
    first_rank: float
    """Until the first rank had applied it, for comparison with other measures."""
    outcome: str
    phases: dict[str, float]


PARTS = ("detection", "quiesce", "reform", "resume", "whole")


def main() -> int:
    args = options()
    print(f"seed {args.seed}; machine {record.machine()}")
    results = {
        str(size): measure(size, args) for size in (int(text) for text in args.sizes.split(","))
    }
    path = record.keep(
        "pause", {"seed": args.seed, "options": vars(args), "world": WORLD, "sizes": results}
    )
    print(f"raw results: {path}")
    return conclude(results, judged=args.standby_level == LEVEL)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.pause", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--standby-level", type=int, choices=(0, 1, 2), default=LEVEL)
    add_options(parser)
    return parser.parse_args()


def add_options(parser: argparse.ArgumentParser) -> None:
    """What bench.planned takes as well."""
    parser.add_argument("--sizes", default="10,1024", help="MiB of frozen weights")
    parser.add_argument("--step-seconds", type=float, default=0.02, help="idle time in each step")
    parser.add_argument("--loader-workers", type=int, default=2)
    parser.add_argument("--bare-steps", type=int, default=BARE_STEPS)
    parser.add_argument("--seed", type=int, default=1)


def measure(size_mb: int, args: argparse.Namespace) -> dict[str, Any]:
    """One size of state: the bare engine, the kills, the bare engine again."""
    with rig.scratch("pause") as directory:
        before = bare(size_mb, args, directory)
        pauses = kill_ranks(size_mb, args, directory)
        after = bare(size_mb, args, directory)
    step = figures.median(before["steps"] + after["steps"])
    transfer = figures.median(before["transfers"] + after["transfers"])
    own = [pause.whole - step - transfer for pause in pauses]
    return {
        "bare": [before, after],
        "bare_step_seconds": step,
        "bare_transfer_seconds": transfer,
        "pauses": [asdict(pause) for pause in pauses],
        "own": own,
        "p50": figures.percentile(own, 50),
        "p95": figures.percentile(own, 95),
    }


# ---------------------------------------------------------------- the bare engine


def workload_arguments(size_mb: int, args: argparse.Namespace, steps: int) -> list[str]:
    return [
        *("--steps", str(steps)),
        *("--frozen-mb", str(size_mb)),
        *("--step-seconds", str(args.step_seconds)),
        *("--workers", str(args.loader_workers)),
        # Long passes: a new pass forks new loader workers, and that is no part of a step. Not
        # longer than needed: a joiner opens its sampler, and torch's takes 150 ms a million.
        *("--samples", str(1 << 18)),
    ]


def bare(size_mb: int, args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Seconds of single steps without Keepstep, and of moving the same bytes between two ranks."""
    log = directory / "bare.log"
    times = directory / "times.json"
    command = [str(rig.WORKLOAD), *workload_arguments(size_mb, args, args.bare_steps)]
    ranks = rig.bare_world([*command, "--times", str(times)], WORLD, log)
    rig.wait_all(ranks, WARM_SECONDS_MAX, log)
    ends = json.loads(times.read_text(encoding="utf-8"))
    steps = [late - early for early, late in itertools.pairwise(ends)]
    out = directory / "transfers.json"
    mover = [str(Path(__file__).parent / "bare_transfer.py"), "--bytes", str(size_mb * MIB)]
    pair = rig.bare_world([*mover, "--out", str(out)], 2, log)
    rig.wait_all(pair, WARM_SECONDS_MAX, log)
    # The first steps rebuild buckets and fill the loaders' queues.
    steady = steps[len(steps) // 5 :]
    return {"steps": steady, "transfers": json.loads(out.read_text(encoding="utf-8"))}


# ---------------------------------------------------------------- the kills


def a_job(
    size_mb: int, args: argparse.Namespace, directory: Path, level: int = LEVEL
) -> AbstractContextManager[rig.Rig]:
    """The job that is struck: one rank per node, and nodes to spare."""
    arguments = workload_arguments(size_mb, args, steps=10_000_000)
    spares = SPARES if level else 0
    spec = rig.spec_of(directory, rig.WORKLOAD, arguments, world=WORLD, spares=spares)
    spec = replace(spec, standby_level=level or spec.standby_level)
    nodes = [NodePlan(name, 1) for name in rig.node_names(WORLD + SPARES)]
    return rig.running(spec, nodes, directory)


def kill_ranks(size_mb: int, args: argparse.Namespace, directory: Path) -> list[Pause]:
    """One job, and one kill after another, each on a calm machine with warm spares."""
    chance = random.Random(args.seed * 1_000_003 + size_mb)
    pauses: list[Pause] = []
    with a_job(size_mb, args, directory, args.standby_level) as job:
        for number in range(args.kills):
            job.wait_ready(SPARES if args.standby_level else 0, WARM_SECONDS_MAX)
            wait_calm(job)
            time.sleep(chance.uniform(0.0, 0.25))
            pause = kill(job, chance.randrange(WORLD))
            pauses.append(pause)
            print(f"{size_mb} MB, kill {number + 1}/{args.kills}: {told(pause)}", flush=True)
            if pause.outcome != "resumed":
                raise Permanent(f"kill {number + 1} ended as {pause.outcome}, not live")
    return pauses


def wait_calm(job: rig.Rig) -> None:
    """Until steps come at an even pace: whatever was started by the last kill has settled."""
    deadline = time.monotonic() + CALM_SECONDS_MAX
    while time.monotonic() < deadline:
        paces = []
        for _ in range(2):
            began, first = time.monotonic(), job.finished()
            while job.finished() < first + CALM_STEPS:
                if time.monotonic() - began > WARM_SECONDS_MAX:
                    raise Permanent("the job stands still")
                time.sleep(0.01)
            paces.append(time.monotonic() - began)
        if max(paces) < 1.2 * min(paces):
            return
    print("the machine does not come to rest: figures of this run are suspect", flush=True)


def kill(job: rig.Rig, rank: int) -> Pause:
    """Strike, watch the pages until all ranks have a step of the next generation, then ask why."""
    known = {incident["id"] for incident in job.incidents()}
    offset = job.offset()
    pid = job.pid_of(rank)
    before = job.generation()
    struck = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    first, last = watch(job, before, struck)
    incident = job.wait_incident(known, INCIDENT_SECONDS_MAX)
    phases = {name: float(seconds) for name, seconds in incident["seconds"].items()}
    detection = incident["opened_at"] - offset - struck
    quiesce = sum(phases.get(name, 0.0) for name in QUIESCE)
    reform = sum(phases.get(name, 0.0) for name in REFORM)
    whole = last - struck
    resume = whole - detection - quiesce - reform
    return Pause(
        rank,
        detection,
        quiesce,
        reform,
        resume,
        whole,
        first - struck,
        str(incident["outcome"]),
        phases,
    )


def watch(job: rig.Rig, generation: int, struck: float) -> tuple[float, float]:
    """When the first and the last rank finished their first step in a later generation."""
    done: dict[int, float] = {}
    boundary: dict[int, int] = {}
    while len(done) < WORLD:
        now = time.monotonic()
        if now - struck > INCIDENT_SECONDS_MAX:
            raise Permanent(f"no step within {INCIDENT_SECONDS_MAX:.0f} s of the kill")
        for rank, reading in job.progress():
            if reading.generation <= generation or reading.mark not in TRAINING:
                continue
            begun = boundary.setdefault(rank, reading.step)
            if rank not in done and rig.finished(reading) > begun:
                done[rank] = now
        time.sleep(LOOK_SECONDS)
    return min(done.values()), max(done.values())


# ---------------------------------------------------------------- telling


def told(pause: Pause) -> str:
    parts = ", ".join(f"{name} {1000 * getattr(pause, name):.0f}" for name in PARTS)
    return f"rank {pause.rank}: {parts} ms ({pause.outcome})"


def conclude(results: dict[str, Any], *, judged: bool) -> int:
    """A table by part, and the figure."""
    holds = True
    figure = []
    for size, run in results.items():
        step, transfer = run["bare_step_seconds"], run["bare_transfer_seconds"]
        print(f"\n{size} MB of state, {len(run['pauses'])} kills; milliseconds")
        print(f"{'part':<28}{'p50':>8}{'p95':>8}{'max':>8}")
        for name in PARTS:
            values = [1000 * pause[name] for pause in run["pauses"]]
            p50, p95 = (figures.percentile(values, p) for p in (50, 95))
            print(f"{LABELS[name]:<28}{p50:>8.0f}{p95:>8.0f}{max(values):>8.0f}")
        print(f"{'bare: one step':<28}{1000 * step:>8.0f}")
        print(f"{'bare: send/recv':<28}{1000 * transfer:>8.0f}")
        holds = holds and run["p50"] <= P50_SECONDS_MAX and run["p95"] <= P95_SECONDS_MAX
        figure.append(f"{size} MB p50 {1000 * run['p50']:.0f} ms p95 {1000 * run['p95']:.0f} ms")
    if not judged:
        print(f"\npause minus one step minus bare transfer: {'; '.join(figure)}")
        return 0
    limits = f"limits p50 {1000 * P50_SECONDS_MAX:.0f} ms, p95 {1000 * P95_SECONDS_MAX:.0f} ms"
    verdict = "holds" if holds else "does not hold"
    print(f"\npause minus one step minus bare transfer ({limits}): {'; '.join(figure)}: {verdict}")
    return 0 if holds else 1


LABELS = {
    "detection": "detection",
    "quiesce": "quiesce",
    "reform": "reform + transfer + verify",
    "resume": "resume + first step",
    "whole": "whole pause",
}


if __name__ == "__main__":
    sys.exit(main())
