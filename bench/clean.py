"""No false alarm: a long clean run with everything in it that looks like a fault and is none.

    python -m bench.clean [--minutes 20]

Four ranks train. The machine is loaded with ten burners, so that everything comes late; then
there is an evaluation of 60 s, a save of 30 s on rank 0 while the others wait in a collective,
and a compilation that nobody declared. Keepstep must sit still: no incident, no migration. The
run is invalid (exit 2) if one of these things did not happen, or the load did not reach ten.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import record, rig
from keepstep.cli.cluster import NodePlan
from keepstep.errors import Permanent

WORLD, SPARES = 4, 1
LOAD_MIN = 10.0
BURNERS = 10
AHEAD_STEPS = 20
"""Ranks differ by one step at most, so each of them reads an action well before its step."""
START_SECONDS_MAX = 900.0
ACTION_SECONDS_MAX = 900.0
LOOK_SECONDS = 1.0
WORKER = Path(__file__).parent / "clean_worker.py"
PLAN = (("load", 0.05), ("evaluate", 0.2), ("save", 0.4), ("recompile", 0.55), ("calm", 0.95))
"""What begins when, in parts of the whole run."""


@dataclass
class Run:
    """What happened so far."""

    directory: Path
    job: rig.Rig
    burners: list[subprocess.Popen[bytes]] = field(default_factory=list)
    asked: dict[str, int] = field(default_factory=dict)
    looks: list[dict[str, float]] = field(default_factory=list)

    def ask(self, action: str) -> None:
        """Write an action for all ranks to find, a few steps ahead."""
        self.asked[action] = self.job.finished() + AHEAD_STEPS
        path = self.directory / "actions.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self.asked), encoding="utf-8")
        partial.replace(path)

    def done(self) -> dict[str, list[float]]:
        """Action -> seconds on each rank that is through with it."""
        found: dict[str, list[float]] = {}
        for path in sorted(self.directory.glob("done-*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                plain = json.loads(line)
                found.setdefault(plain["action"], []).append(plain["seconds"])
        return found

    def pending(self) -> list[str]:
        done = self.done()
        return [name for name in self.asked if len(done.get(name, ())) < WORLD]

    def look(self, began: float) -> None:
        self.looks.append(
            {
                "at": round(time.monotonic() - began, 1),
                "step": self.job.finished(),
                "generation": self.job.generation(),
                "load": os.getloadavg()[0],
            }
        )


def main() -> int:
    args = options()
    print(f"no randomness beyond torch's fixed seeds; machine {record.machine()}")
    with ExitStack() as stack:
        directory = stack.enter_context(rig.scratch("clean"))
        job = stack.enter_context(start(directory, args))
        job.wait_ready(SPARES, START_SECONDS_MAX)
        run = Run(directory, job)
        stack.callback(stop_burners, run)
        follow_plan(run, args.minutes * 60.0)
        ended = finish(run)
        incidents, actions = job.incidents(), run.done()
    results = {
        "options": vars(args),
        "looks": run.looks,
        "actions": actions,
        "incidents": incidents,
        "job": {key: ended[key] for key in ("state", "generation", "exit_code", "fallbacks")},
    }
    path = record.keep("clean", results)
    print(f"raw results: {path}")
    return conclude(results)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.clean", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--evaluate-seconds", type=float, default=60.0)
    parser.add_argument("--save-seconds", type=float, default=30.0)
    parser.add_argument("--compile-seconds", type=float, default=10.0, help="at least")
    parser.add_argument("--backend", default="inductor", help="or aot_eager where no compiler is")
    return parser.parse_args()


def start(directory: Path, args: argparse.Namespace) -> Any:
    arguments = ["--directory", str(directory), "--backend", args.backend]
    for name in ("evaluate", "save", "compile"):
        arguments += [f"--{name}-seconds", str(getattr(args, f"{name}_seconds"))]
    spec = rig.spec_of(directory, WORKER, arguments, world=WORLD, spares=SPARES)
    # Each rank compiles for itself and nothing is found in a cache: the slow case is the test.
    spec.environment["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    spec.environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    nodes = [NodePlan(name, 1) for name in rig.node_names(WORLD + SPARES)]
    return rig.running(spec, nodes, directory)


def follow_plan(run: Run, seconds: float) -> None:
    """Start each thing in its time, one after another, and look every second."""
    began = time.monotonic()
    left = list(PLAN)
    while left or run.pending() or time.monotonic() - began < seconds:
        run.look(began)
        passed = time.monotonic() - began
        if passed > seconds + len(PLAN) * ACTION_SECONDS_MAX:
            raise Permanent(f"{run.pending()} did not end")
        if left and passed >= left[0][1] * seconds and not run.pending():
            name, _ = left.pop(0)
            print(f"{passed:6.0f} s, step {run.looks[-1]['step']}: {name}", flush=True)
            if name == "load":
                run.burners = [_burner() for _ in range(BURNERS)]
            elif name == "calm":
                stop_burners(run)
            else:
                run.ask(name)
        time.sleep(LOOK_SECONDS)


def finish(run: Run) -> dict[str, Any]:
    run.ask("finish")
    return run.job.cluster.wait(rig.JOB, START_SECONDS_MAX)


def stop_burners(run: Run) -> None:
    rig.end_all(run.burners)
    run.burners = []


def _burner() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "while True: pass"])


def conclude(results: dict[str, Any]) -> int:
    load = max(look["load"] for look in results["looks"])
    minutes = results["looks"][-1]["at"] / 60.0
    for name, seconds in results["actions"].items():
        print(f"{name}: {min(seconds):.1f} to {max(seconds):.1f} s")
    for incident in results["incidents"]:
        print(f"FALSE ALARM: {incident['id']}: {incident['causes']}")
    job = results["job"]
    migrations = job["generation"] - 1
    wanted = {"evaluate", "save", "recompile"}
    happened = wanted <= results["actions"].keys() and load >= LOAD_MIN
    quiet = not results["incidents"] and migrations == 0 and job["state"] == "finished"
    verdict = "invalid" if quiet and not happened else "holds" if quiet else "does not hold"
    print(
        f"clean run of {minutes:.1f} min, load to {load:.1f}: {migrations} migrations, "
        f"{len(results['incidents'])} incidents, job {job['state']}: {verdict}"
    )
    return {"holds": 0, "does not hold": 1, "invalid": 2}[verdict]


if __name__ == "__main__":
    sys.exit(main())
