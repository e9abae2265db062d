"""What each system costs while nothing breaks, by the method of bench.overhead.

    python -m bench.steady --arms keepstep,torchft,checkpoint_restart:sync@20 [--minutes 20]

For each arm three jobs live side by side and take turns in blocks of about a second: A bare, B the
arm, C bare again as the control; there and back, A B C | C B A. Whoever is not at turn is stopped
with everything that belongs to it. The figure is the ratio of sums over all quiet rounds, with the
bound of bench.overhead. Model and data are those of `python -m bench`; two ranks, so that each has
a core. An arm that saves does so within its blocks, in its own interval.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench import figures, overhead, quiet, record, rig
from bench.arms.arm import load
from bench.launch import Local, end_marked, marked
from bench.plan import Plan
from bench.workload.log import GATE
from keepstep.errors import Permanent

ARMS = "keepstep,torchft,checkpoint_restart:sync@20,checkpoint_restart:async@20"
STEPS_MAX = 10_000_000
IDLE_SHARE_MAX = 0.15
IDLE_SECONDS_MAX = 90.0


def main() -> int:
    args = options()
    print(f"machine {record.machine()}")
    runs: dict[str, Any] = {}
    try:
        for spec in args.arms.split(","):
            runs[spec] = measure(spec, args)
            tell(spec, runs[spec])
    except (KeyboardInterrupt, SystemExit):
        print("interrupted: the arms that are complete are kept", flush=True)
    if not runs:
        return 2
    name = "steady-quick" if args.quick else "steady"
    path = record.keep(name, {"options": vars(args), "runs": runs})
    print(f"raw results: {path}")
    return 0


def tell(spec: str, run: dict[str, Any]) -> None:
    value, upper, low, high = run["ratio"]
    off = abs(run["control"][0] - 1) > overhead.CONTROL_OFF_MAX
    print(
        f"{spec}: {run['steps_per_arm']} steps per arm, ratio {value:.4f} [{low:.4f}, "
        f"{high:.4f}], upper 95% {upper:.4f}, control {run['control'][0]:.4f}"
        f"{': invalid, the control is off' if off else ''}",
        flush=True,
    )


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.steady", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--arms", default=ARMS)
    parser.add_argument("--minutes", type=float, default=20.0, help="for each arm")
    parser.add_argument("--steps", type=int, default=1500, help="per arm, then it is enough")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", default="3m")
    parser.add_argument("--parallel", default="ddp")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a try-out; proves nothing")
    args = parser.parse_args()
    if args.quick:
        args.minutes, args.steps = min(args.minutes, 1.5), min(args.steps, 60)
    return args


def measure(spec: str, args: argparse.Namespace) -> dict[str, Any]:
    with ExitStack() as stack:
        directory = stack.enter_context(rig.scratch("steady"))
        jobs = [
            stack.enter_context(gated(name, arm, directory, args))
            for name, arm in (("bare", "bare"), ("arm", spec), ("control", "bare"))
        ]
        for job in jobs:
            job.run(overhead.WARM_STEPS)
        step_seconds = jobs[0].run(overhead.WARM_STEPS) / overhead.WARM_STEPS
        block = max(4, round(overhead.BLOCK_SECONDS / step_seconds))
        deadline = time.monotonic() + 60.0 * args.minutes
        rounds: list[dict[str, float]] = []
        calm: list[dict[str, float]] = []
        while time.monotonic() < deadline and 2 * block * len(calm) < args.steps:
            rounds.append(overhead.one_round(jobs, block, len(rounds)))
            calm = [r for r in rounds if r["others"] <= overhead.OTHERS_MAX or args.quick]
    if not calm:
        raise Permanent(f"not one quiet round for {spec} in {args.minutes} min")
    bare = [r["bare"] for r in calm]
    ratio = figures.ratio_of_sums([r["arm"] for r in calm], bare, args.seed)
    control = figures.ratio_of_sums([r["control"] for r in calm], bare, args.seed)
    return {
        "settings": load(spec).settings,
        "steps_per_arm": 2 * block * len(calm),
        "step_seconds": step_seconds,
        "rounds": rounds,
        "ratio": [ratio.value, ratio.upper, ratio.low, ratio.high],
        "control": [control.value, control.upper, control.low, control.high],
    }


@contextmanager
def gated(
    name: str, spec: str, directory: Path, args: argparse.Namespace
) -> Iterator[overhead.Arm]:
    """One job behind a gate, stopped."""
    arm = load(spec)
    room = directory / name
    plan = Plan(
        args.parallel, args.size, args.ranks, STEPS_MAX, seed=args.seed, directory=str(room)
    )
    if why := arm.refuses(plan):
        raise Permanent(f"{spec}: {why}")
    plan.write()
    gate = directory / f"{name}.gate"
    os.environ[GATE] = str(gate)
    try:
        with overhead.listening(gate) as listener:
            arm.start(plan, Local())
            try:
                connections = overhead.accept_all(listener, plan.world, lambda: check(arm))
                job = overhead.Arm(name, connections, lambda: list(marked(plan.directory)))
                # Spares get warm, stores settle: the method must not measure a start.
                wait_idle(job)
                job.freeze()
                yield job
            finally:
                # Stopped processes do not end when they are told to.
                thaw(list(marked(plan.directory)))
                arm.stop()
                end_marked(plan.directory)
    finally:
        os.environ.pop(GATE, None)


def thaw(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue


def check(arm: Any) -> None:
    if why := arm.ended():
        raise Permanent(f"{arm.name} ended before it began: {why}")


def wait_idle(job: overhead.Arm) -> None:
    """Until its processes use next to nothing for two seconds, while the ranks wait at the gate."""
    deadline = time.monotonic() + IDLE_SECONDS_MAX
    calm = 0
    while calm < 2 and time.monotonic() < deadline:
        pids = job.processes()
        before = quiet.look(pids)
        time.sleep(1.0)
        after = quiet.look(pids)
        calm = calm + 1 if after.own - before.own < IDLE_SHARE_MAX else 0


if __name__ == "__main__":
    sys.exit(main())
