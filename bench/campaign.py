"""Many runs: scenarios, workloads, repetitions, arms; interleaved, kept and told.

The length of a workload's runs is settled first, by a short bare run: as many steps as the bare
engine does in the wanted time. Then repetition after repetition every arm runs once, in an order
that moves on by one each time, so that a machine that grows slower meets all arms alike.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench import launch as launching
from bench import page, record, rig, scenario, tables
from bench.arms.arm import ROOT, Arm, load
from bench.harness import Limits, Run
from bench.plan import Plan
from keepstep.errors import ConfigError, KeepstepError, Permanent

ARMS = "bare,keepstep,torchft,torchft:tuned,checkpoint_restart:sync@20,checkpoint_restart:async@20"
INTERVALS = (5, 10, 20, 40, 80)
SWEEP = ",".join(f"checkpoint_restart:{m}@{n}" for m in ("sync", "async") for n in INTERVALS)
"""Tables tell the best one of each mode: what it is depends on the workload and on the faults."""
SECONDS, SHORT_SECONDS = 150.0, 25.0
REPEAT = 3
CALIBRATION_STEPS = 24
INTERRUPTED, LOST = 130, 3
"""Exits: by hand; by trouble that no run can be made in, such as a host that is lost."""
TROUBLE = (KeepstepError, OSError, subprocess.SubprocessError)
START_SECONDS = 20.0
"""What an arm takes to start and to end, roughly: for the estimate."""

MATRIX: tuple[tuple[tuple[str, ...], str, str, str, int], ...] = (
    # scenarios, workload, size, arms, repetitions
    (("kills",), "ddp", "3m", SWEEP, 1),
    (("kills",), "ddp", "3m", ARMS, REPEAT),
    (
        ("clean", "single_kill", "llama3", "hangs", "slow_rank", "drain", "trace"),
        "ddp",
        "3m",
        ARMS,
        1,
    ),
    (("kills",), "fsdp", "3m", SWEEP, 1),
    (("kills",), "fsdp", "3m", ARMS, REPEAT),
    (
        ("clean", "single_kill", "llama3", "hangs", "slow_rank", "drain", "trace"),
        "fsdp",
        "3m",
        ARMS,
        1,
    ),
    (("single_kill", "kills"), "hsdp", "3m", ARMS, 1),
    (("single_kill", "kills"), "zero1", "3m", "bare,keepstep", 1),
    (("single_kill",), "ddp", "100m", ARMS, 1),
)
"""What a release is judged by. The rates at which restarts matter are repeated, the rest is not."""


@dataclass(frozen=True, slots=True)
class Job:
    """One line of the campaign: a scenario with a workload on some arms."""

    scenario: str
    workload: str
    size: str
    arms: tuple[str, ...]
    repeat: int


def run(args: argparse.Namespace) -> int:
    jobs = [
        Job(name, workload, args.size, tuple(with_bare(args.arms)), repeat_of(args))
        for name in args.scenarios
        for workload in args.workload.split(",")
    ]
    return carry_out(jobs, args, "run")


def matrix(args: argparse.Namespace) -> int:
    jobs = [
        Job(name, workload, size, tuple(with_bare(arms)), repeat_of(args, usual))
        for scenarios, workload, size, arms, usual in MATRIX
        for name in scenarios
    ]
    if args.list:
        for job in jobs:
            able = ", ".join(arm for arm in job.arms if not refusal(job, arm, args))
            print(f"{job.scenario}, {job.workload} {job.size}, {job.repeat}x: {able}")
        print(f"about {estimate(jobs, args) / 3600:.1f} hours, if nobody is much slower than bare")
        return 0
    worst = 0
    for job in jobs:
        # A file for each: a night's work is not lost with its last run.
        worst = max(worst, carry_out([job], args, "matrix"))
        if worst in (INTERRUPTED, LOST):
            break
    return worst


def with_bare(arms: str) -> list[str]:
    """The measure of the rest is always there."""
    return list(dict.fromkeys(["bare", *filter(None, arms.split(","))]))


def estimate(jobs: Sequence[Job], args: argparse.Namespace) -> float:
    """Seconds. Arms that are struck take longer than the bare engine, say by a quarter."""
    each = 1.25 * seconds_of(args) + START_SECONDS
    return sum(job.repeat * each for job in jobs for arm in job.arms if not refusal(job, arm, args))


def refusal(job: Job, arm: str, args: argparse.Namespace) -> str:
    return arm_of(arm, hosts_of(args)).refuses(plan_of(job, args))


def plan_of(job: Job, args: argparse.Namespace) -> Plan:
    return Plan(
        parallel=job.workload,
        size=job.size,
        world=args.ranks,
        batch=args.batch,
        seed=args.seed,
    )


def arm_of(spec: str, hosts: tuple[launching.Host, ...]) -> Arm:
    arm = load(spec)
    arm.hosts = hosts
    return arm


def hosts_of(args: argparse.Namespace) -> tuple[launching.Host, ...]:
    if args.hostfile is None:
        return ()
    if args.keep is None or "GLOO_SOCKET_IFNAME" not in os.environ:
        raise ConfigError(
            "--hostfile needs --keep DIR, a directory that all hosts share, and "
            "GLOO_SOCKET_IFNAME, the network between them"
        )
    return launching.read_hostfile(args.hostfile.read_text(encoding="utf-8"))


def seconds_of(args: argparse.Namespace) -> float:
    return float(args.seconds or (SHORT_SECONDS if args.short else SECONDS))


def repeat_of(args: argparse.Namespace, usual: int = REPEAT) -> int:
    return int(args.repeat or (1 if args.short else usual))


def carry_out(jobs: Sequence[Job], args: argparse.Namespace, name: str) -> int:
    seconds = seconds_of(args)
    print(f"machine {record.machine()}; about {estimate(jobs, args) / 60:.0f} min", flush=True)
    for job in jobs:
        # A name that is not one is told now, not after hours.
        scenario.schedule(scenario.read(job.scenario), args.ranks, seconds, seconds)
    refused = {(job.workload, arm): refusal(job, arm, args) for job in jobs for arm in job.arms}
    for (workload, arm), why in refused.items():
        if why:
            print(f"{workload}, {arm}: not run: {why}", flush=True)
    started = time.monotonic()
    cases: list[dict[str, Any]] = []
    with rig.scratch("bench") as scratch:
        room = args.keep.resolve() if args.keep is not None else scratch
        bench = Campaign(args, room, seconds)
        for job in jobs:
            if not bench.ended:
                cases += [bench.case(job)]
    cases = [case for case in cases if case["repetitions"]]
    if not cases:
        print("nothing was completed", flush=True)
        return bench.ended or 2
    kept = {
        "short": bool(args.short),
        "seconds": seconds,
        "took_seconds": round(time.monotonic() - started),
        "cases": cases,
    }
    path = record.keep(f"{name}-short" if args.short else name, kept)
    whole = record.read(path)
    out = page_of(path)
    out.write_text(page.page(whole, path.name), encoding="utf-8")
    found = tables.groups([whole])
    print(f"\n{tables.terminal(found)}\n")
    print(f"raw results: {path}\npage: {out}")
    if bench.ended:
        return bench.ended
    return 0 if all(group.completed == group.runs for group in found) else 1


def page_of(raw: Path) -> Path:
    """Beside other things that are made again from raw results: not in git."""
    directory = ROOT / "build" / "bench"
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"{raw.name.removesuffix('.json.gz')}.html"


class Campaign:
    """What the runs of one command share."""

    def __init__(self, args: argparse.Namespace, room: Path, seconds: float) -> None:
        self.room, self.seconds = room, seconds
        self.ended = 0
        """Before its time: how, as an exit."""
        self._args = args
        self._hosts = hosts_of(args)
        self._launch: launching.Launch = (
            launching.Ssh(str(ROOT), self._hosts) if self._hosts else launching.Local()
        )
        self._number = 0
        self._steps: dict[tuple[str, str], tuple[int, float]] = {}

    def case(self, job: Job) -> dict[str, Any]:
        told, plan = scenario.read(job.scenario), plan_of(job, self._args)
        refused: dict[str, str] = {}
        for spec in job.arms:
            arm = arm_of(spec, self._hosts)
            if why := arm.refuses(plan):
                refused[arm.name] = why
        able = [spec for spec in job.arms if load(spec).name not in refused]
        repetitions: list[list[dict[str, Any]]] = []
        step_seconds = 0.0
        try:
            steps, step_seconds = self._settle(plan)
            plan = replace(plan, steps=steps)
            for number in range(job.repeat):
                repetitions.append([])
                # The order moves on: nobody always runs first, or behind the same neighbour.
                for spec in able[number % len(able) :] + able[: number % len(able)]:
                    one = self._run(spec, told, plan, f"{number + 1}/{job.repeat}")
                    repetitions[-1].append(one)
        except (KeyboardInterrupt, SystemExit):
            self._end(INTERRUPTED, "interrupted")
        except TROUBLE as error:
            # A host that is lost, say: what it still runs would disturb those that come.
            self._end(LOST, str(error))
        for runs in repetitions:
            runs.sort(key=lambda run: able.index(run["spec"]))
        return {
            "scenario": told.name,
            "title": told.title,
            "why": told.why,
            "plan": {**asdict(plan), "directory": ""},
            "bare_step_seconds": step_seconds,
            "refused": refused,
            "repetitions": [runs for runs in repetitions if runs],
        }

    def _new_room(self, said: str) -> Path:
        """One that nobody had before: with --keep, earlier campaigns left theirs."""
        while True:
            self._number += 1
            path = self.room / f"{self._number:03d}-{said}"
            if not path.exists():
                return path

    def _end(self, code: int, why: str) -> None:
        self.ended = code
        print(f"\nended: {why}; the runs that are complete, if any, are kept", flush=True)

    def _settle(self, plan: Plan) -> tuple[int, float]:
        """How many steps the bare engine does in the wanted time."""
        key = (plan.parallel, plan.size)
        if key not in self._steps:
            trial = replace(plan, steps=CALIBRATION_STEPS)
            result = self._run("bare", scenario.Scenario("clean", "calibration"), trial, "trial")
            if result["outcome"] != "completed":
                raise Permanent(f"the bare engine failed: {result['outcome']}")
            step = float(result["truth"]["step_seconds"])
            self._steps[key] = max(CALIBRATION_STEPS, round(self.seconds / step)), step
        return self._steps[key]

    def _run(
        self, spec: str, told: scenario.Scenario, plan: Plan, repetition: str
    ) -> dict[str, Any]:
        arm = arm_of(spec, self._hosts)
        said = f"{told.name}-{plan.parallel}-{arm.name.replace(':', '-')}"
        plan = replace(plan, directory=str(self._new_room(said)))
        bar = Bar(f"{told.name} {plan.parallel} {repetition} {arm.name}")
        one = Run(arm, told, plan, self._launch)
        result = one.go(Limits(self.seconds), bar.told)
        bar.close(result)
        if result["outcome"] == "completed" and self._args.keep is None:
            one.clear()
        return {"spec": spec, **result}


class Bar:
    """One line that fills; a plain line at its end, also where there is no terminal."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._due = 0.0
        self._shows = sys.stderr.isatty()

    def told(self, phase: str, done: int, wanted: int) -> None:
        now = time.monotonic()
        if not self._shows or now < self._due:
            return
        self._due = now + 0.5
        full = 30 * done // wanted
        bar = "#" * full + "." * (30 - full)
        text = f"\r{self._name:<44} {bar} {done}/{wanted} {phase:<9}"
        print(text, end="", file=sys.stderr, flush=True)

    def close(self, result: dict[str, Any]) -> None:
        truth = result["truth"]
        seconds = "-" if truth["seconds"] is None else f"{truth['seconds']:.1f} s"
        told = f"{truth['steps']} steps, {seconds}, {len(result['strikes'])} strikes"
        if self._shows:
            print("\r" + " " * 100 + "\r", end="", file=sys.stderr)
        print(f"{self._name:<44} {told}: {result['outcome']}", flush=True)
