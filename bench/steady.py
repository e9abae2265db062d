"""What each system costs while nothing breaks, by the method of bench.overhead.

    python -m bench.steady --arms keepstep,torchft,checkpoint_restart:sync@20 [--minutes 20]

For each arm three jobs live side by side and take turns in blocks of about a second: A bare, B the
arm, C bare again as the control; there and back, A B C | C B A. Whoever is not at turn is stopped
with everything that belongs to it. The figure is the ratio of sums over all quiet rounds, with the
bound of bench.overhead, over several fresh starts of all three. Model and data are those of
`python -m bench`; two ranks, so that each has a core. An arm that saves does so within its blocks,
in its own interval. Exit 0 only if each arm has its steps and each control is within 0.5%.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
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
            try:
                runs[spec] = measure(spec, args)
            except Permanent as error:
                # What is known of the others is not thrown away for it.
                runs[spec] = {"failed": str(error)}
            tell(spec, runs[spec])
    except (KeyboardInterrupt, SystemExit):
        print("interrupted: the arms that are complete are kept", flush=True)
    if not runs:
        return 2
    name = "steady-quick" if args.quick else "steady"
    path = record.keep(name, {"options": vars(args), "runs": runs})
    print(f"raw results: {path}")
    whole = len(runs) == len(args.arms.split(","))
    return 0 if whole and all(run.get("valid") for run in runs.values()) else 2


def tell(spec: str, run: dict[str, Any]) -> None:
    if "failed" in run:
        print(f"{spec}: {run['failed']}", flush=True)
        return
    value, upper, low, high = run["ratio"]
    print(
        f"{spec}: {run['steps_per_arm']} steps per arm, ratio {value:.4f} [{low:.4f}, "
        f"{high:.4f}], upper 95% {upper:.4f}, control {run['control'][0]:.4f}, processor time "
        f"{run['processor'][0]:.4f}"
        f"{'' if run['valid'] else ': invalid, the control is off or steps are missing'}",
        flush=True,
    )


def options(line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.steady", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--arms", default=ARMS)
    parser.add_argument("--minutes", type=float, default=20.0, help="for each arm")
    parser.add_argument("--steps", type=int, default=1500, help="per arm, then it is enough")
    parser.add_argument("--segments", type=int, default=3, help="fresh starts of all three jobs")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", default="3m")
    parser.add_argument("--parallel", default="ddp")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a try-out; proves nothing")
    args = parser.parse_args(line)
    if args.quick:
        args.minutes, args.steps, args.segments = min(args.minutes, 1.5), min(args.steps, 60), 1
    return args


def measure(spec: str, args: argparse.Namespace) -> dict[str, Any]:
    rounds: list[dict[str, float]] = []
    deadline = time.monotonic() + 60.0 * args.minutes
    for number in range(1, args.segments + 1):
        wanted = args.steps * number / args.segments - steps_in(quiet_ones(rounds, args))
        if wanted > 0 and time.monotonic() < deadline:
            rounds += segment(spec, args, wanted, deadline)
    calm = quiet_ones(rounds, args)
    if not calm:
        raise Permanent(f"not one quiet round for {spec} in {args.minutes} min")
    bare = [r["bare"] for r in calm]
    ratio = figures.ratio_of_sums([r["arm"] for r in calm], bare, args.seed)
    control = figures.ratio_of_sums([r["control"] for r in calm], bare, args.seed)
    used = [r["bare_processor"] for r in rounds]
    processor = figures.ratio_of_sums([r["arm_processor"] for r in rounds], used, args.seed)
    enough = steps_in(calm) >= args.steps
    return {
        "settings": load(spec).settings,
        "steps_per_arm": int(steps_in(calm)),
        "valid": enough and abs(control.value - 1) <= overhead.CONTROL_OFF_MAX,
        "rounds": rounds,
        "ratio": [ratio.value, ratio.upper, ratio.low, ratio.high],
        "control": [control.value, control.upper, control.low, control.high],
        "processor": [processor.value, processor.upper, processor.low, processor.high],
    }


def quiet_ones(
    rounds: Sequence[dict[str, float]], args: argparse.Namespace
) -> list[dict[str, float]]:
    return [r for r in rounds if r["others"] <= overhead.OTHERS_MAX or args.quick]


def steps_in(rounds: Sequence[dict[str, float]]) -> float:
    return sum(r["steps"] for r in rounds)


def segment(
    spec: str, args: argparse.Namespace, wanted: float, deadline: float
) -> list[dict[str, float]]:
    """Three fresh jobs, until there are so many more quiet steps."""
    with ExitStack() as stack:
        directory = stack.enter_context(rig.scratch("steady"))
        jobs = [
            stack.enter_context(gated(name, arm, directory, args))
            for name, arm in (("bare", "bare"), ("arm", spec), ("control", "bare"))
        ]
        for job in jobs:
            job.run(overhead.WARM_STEPS)
        step_seconds = jobs[0].run(overhead.WARM_STEPS) / overhead.WARM_STEPS
        block, lead = overhead.block_of(step_seconds)
        rounds: list[dict[str, float]] = []
        while time.monotonic() < deadline and steps_in(quiet_ones(rounds, args)) < wanted:
            rounds.append(overhead.one_round(jobs, block, lead, len(rounds)))
        return rounds


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
                for connection in connections:
                    connection.close()
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
