"""No false alarm: ten thousand looks for corruption in clean jobs, and nothing is found.

    python -m bench.alarms [--looks 10000] [--parallel ddp,fsdp]

Four ranks train with --check-steps 1 until they have looked so often, all together: each look
compares every tensor of a rank with what it was when its last step was applied, and in full-shard
FSDP2 an eighth of what the rank keeps of another one. Nothing is injected, so whatever is found is
a false alarm. The ranks count their looks themselves. Exit 1 if anything was found, or anything
less than a clean end came of it; 2 if there were too few looks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import record, rig
from keepstep.cli.cluster import NodePlan

WORLD, NODES = 4, 2
SECONDS_MAX = 1800.0


def main() -> int:
    args = options()
    print(f"no randomness beyond torch's fixed seeds; machine {record.machine()}")
    runs = {parallel: measure(parallel, args) for parallel in args.parallel.split(",")}
    path = record.keep("alarms", {"options": vars(args), "runs": runs})
    print(f"raw results: {path}")
    return conclude(runs, args.looks)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.alarms", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--looks", type=int, default=10_000, help="of all ranks together")
    parser.add_argument("--parallel", default="ddp,fsdp", help="ways to spread the model")
    return parser.parse_args()


def measure(parallel: str, args: argparse.Namespace) -> dict[str, Any]:
    """One clean job from its first step to its last."""
    steps = -(-args.looks // WORLD)
    with rig.scratch("alarms") as directory:
        arguments = ["--steps", str(steps), "--parallel", parallel, "--looks", str(directory)]
        arguments += ["--batch", "2", "--accumulate", "1", "--workers", "0"]
        spec = rig.spec_of(directory, rig.WORKLOAD, arguments, world=WORLD, spares=0)
        spec = replace(spec, nodes=NODES, ranks_per_node=WORLD // NODES)
        spec.environment["KEEPSTEP_CHECK_STEPS"] = "1"
        nodes = [NodePlan(name, WORLD // NODES) for name in rig.node_names(NODES)]
        began = time.monotonic()
        with rig.running(spec, nodes, directory) as job:
            ended = job.cluster.wait(rig.JOB, SECONDS_MAX)
            incidents, taints = job.incidents(), job.picture()["taints"]
        looks = [told(directory, rank) for rank in range(WORLD)]
    return {
        "steps": steps,
        "seconds": round(time.monotonic() - began, 1),
        "looks": looks,
        "incidents": incidents,
        "taints": taints,
        "job": {key: ended[key] for key in ("state", "generation", "exit_code", "fallbacks")},
    }


def told(directory: Path, rank: int) -> int:
    try:
        return int(json.loads((directory / f"looks-{rank}.json").read_text()))
    except OSError:
        return 0


def conclude(runs: dict[str, dict[str, Any]], wanted: int) -> int:
    """Print what was found; 0 nothing, 1 a false alarm, 2 too few looks."""
    code = 0
    for parallel, run in runs.items():
        job, looks = run["job"], sum(run["looks"])
        for incident in run["incidents"]:
            print(f"FALSE ALARM: {incident['id']}: {incident['causes']}")
        clean = not run["incidents"] and not run["taints"]
        clean = clean and (job["state"], job["generation"]) == ("finished", 1)
        verdict = "does not hold" if not clean else "holds" if looks >= wanted else "invalid"
        code = max(code, {"holds": 0, "does not hold": 1, "invalid": 2}[verdict])
        print(
            f"{parallel}: {looks} looks in {run['steps']} steps of {WORLD} ranks, "
            f"{run['seconds']:.0f} s: {len(run['incidents'])} incidents, "
            f"job {job['state']}: {verdict}"
        )
    return code


if __name__ == "__main__":
    sys.exit(main())
