"""Many runs: scenarios, workloads, repetitions, arms; interleaved, kept and told.

The length of a workload's runs is settled first, by a short bare run: as many steps as the bare
engine does in the wanted time. Then repetition after repetition every arm runs once, in an order
that is drawn each time, so that a machine that grows slower meets all arms alike. Arms whose runs
were disturbed are run again at the end, with a bare run beside them.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench import intervals, page, record, rig, scenario, tables
from bench import launch as launching
from bench.arms import torchft
from bench.arms.arm import Arm, load, placeless
from bench.harness import Limits, Run
from bench.plan import SECONDS, Plan
from bench.record import ROOT
from keepstep.errors import ConfigError, KeepstepError, Permanent

RESTARTS = "checkpoint_restart:sync@20,checkpoint_restart:async@20"
ARMS = f"bare,keepstep,torchft,torchft:tuned,{RESTARTS}"
INTERVALS = (5, 20, 80)
SWEEP = ",".join(f"checkpoint_restart:{m}@{n}" for m in ("sync", "async") for n in INTERVALS)
BEST, BEST_SYNC, BEST_ASYNC = "{best}", "{sync}", "{async}"
"""In the matrix: what the sweep of the same workload found. Which interval is the best depends on
the workload and on the faults, and only the best is a fair opponent."""
SHORT_SECONDS = 25.0
REPEAT = 3
AGAIN = 1
"""Repetitions more, of the arms whose runs were disturbed."""
CALIBRATION_STEPS = 40
INTERRUPTED, LOST = 130, 3
"""Exits: by hand; by trouble that no run can be made in, such as a host that is lost."""
TROUBLE = (KeepstepError, OSError, subprocess.SubprocessError)
START_SECONDS = 20.0
"""What an arm takes to start and to end, roughly: for the estimate."""
SLOWER = {"bare": 1.0, "keepstep": 1.15, "torchft": 1.4, "checkpoint_restart": 2.2}
"""How long an arm takes under faults, by the bare engine, roughly: for the estimate."""

ALL = f"bare,keepstep,torchft,torchft:tuned,{BEST_SYNC},{BEST_ASYNC}"
FEW = f"bare,keepstep,torchft:tuned,{BEST}"
REST = ("clean", "single_kill", "llama3", "hangs", "slow_rank", "drain", "trace")
MATRIX: tuple[tuple[tuple[str, ...], str, str, str, int], ...] = (
    # scenarios, workload, size, arms, repetitions
    (("kills",), "ddp", "3m", SWEEP, 1),
    (("kills",), "ddp", "3m", ALL, REPEAT),
    (("kills",), "fsdp", "3m", SWEEP, 1),
    (("kills",), "fsdp", "3m", ALL, REPEAT),
    (("single_kill", "kills"), "hsdp", "3m", ALL, 1),
    (("single_kill", "kills"), "zero1", "3m", "bare,keepstep", 1),
    (REST, "ddp", "3m", FEW, 1),
    (REST, "fsdp", "3m", FEW, 1),
    (("single_kill",), "ddp", "100m", FEW, 1),
)
"""What a release is judged by. The rates at which restarts matter are repeated, the rest is not."""
SWEPT_UNDER, SWEPT_SIZE = "kills", "3m"
SWEPT_AS = {"hsdp": "fsdp"}
"""Workloads without a sweep of their own."""


@dataclass(frozen=True, slots=True)
class Job:
    """One line of the campaign: a scenario with a workload on some arms."""

    scenario: str
    workload: str
    size: str
    arms: tuple[str, ...]
    repeat: int
    tuned_for: str = ""
    """What the intervals between saves were found under, if that was not this one."""


def run(args: argparse.Namespace) -> int:
    jobs = [
        Job(name, workload, args.size, tuple(with_bare(args.arms)), repeat_of(args))
        for name in args.scenarios
        for workload in args.workload.split(",")
    ]
    return carry_out(jobs, args, "run").code


def matrix(args: argparse.Namespace) -> int:
    worst, all_jobs, usually = 0, [], RESTARTS.split(",")
    best: dict[str, list[str]] = {}
    for scenarios, workload, size, arms, usual in MATRIX:
        for name in scenarios:
            job = Job(
                name,
                workload,
                size,
                tuple(with_bare(filled(arms, best.get(SWEPT_AS.get(workload, workload), usually)))),
                repeat_of(args, usual),
                tuned_for(name, workload, size, arms),
            )
            all_jobs.append(job)
            if args.list:
                able = [arm for arm in job.arms if not refusal(job, arm, args)]
                print(line_of(job, able))
                continue
            # A file for each: a night's work is not lost with its last run.
            done = carry_out([job], args, "matrix")
            worst = max(worst, done.code)
            if arms == SWEEP and done.file is not None:
                best[workload] = best_of(record.read(done.file))
            if worst in (INTERRUPTED, LOST):
                return worst
    if args.list:
        print("checkpoint_restart after its sweep: @20 stands for what that finds")
        print(f"about {estimate(all_jobs, args) / 3600:.1f} hours, if the machine is quiet")
    return worst


def line_of(job: Job, able: Sequence[str]) -> str:
    """What the matrix would run, and what was tuned elsewhere."""
    what = (job.scenario, job.workload, job.size)
    tuned = [f"interval tuned for {job.tuned_for}"] if job.tuned_for else []
    tuned += [
        f"{arm} tuned for {where}" for arm in able if (where := torchft.tuned_for(arm, *what))
    ]
    told = f" ({'; '.join(tuned)})" if tuned else ""
    return f"{job.scenario}, {job.workload} {job.size}, {job.repeat}x: {', '.join(able)}{told}"


def tuned_for(scenario: str, workload: str, size: str, arms: str) -> str:
    """Where the sweep was made whose interval is taken; "" if it is this one's, or none is taken.

    The best under kills every 30 s saves more often than rarer faults ask for, and more rarely than
    the mix of llama3 does, with one every 12 s. To sweep in every scenario would take about six
    hours more, so it is said instead.
    """
    if not any(place in arms for place in (BEST, BEST_SYNC, BEST_ASYNC)):
        return ""
    swept = SWEPT_UNDER, SWEPT_AS.get(workload, workload), SWEPT_SIZE
    return "" if swept == (scenario, workload, size) else f"{swept[0]}, {swept[1]} {swept[2]}"


def filled(arms: str, best: Sequence[str]) -> str:
    """With what the sweep found in the places that are kept for it; the best comes first."""
    by_mode = {arm.partition("@")[0].partition(":")[2]: arm for arm in best}
    found = arms.replace(BEST, best[0])
    return found.replace(BEST_SYNC, by_mode["sync"]).replace(BEST_ASYNC, by_mode["async"])


def best_of(swept: Mapping[str, Any]) -> list[str]:
    """One of each way to save, the better one first. What was disturbed is better than nothing, and
    where none came to its end, the usual one is as good as any."""
    (case,) = swept["cases"]
    key = case["scenario"], tables.workload_name(swept, case)
    found = []
    for usual in RESTARTS.split(","):
        sweep = intervals.sweep_of([swept], key, intervals.family_of(usual))
        found.append(sweep.best if sweep is not None else usual)
    costs = {group.arm: intervals.cost(group) for group in tables.groups([swept])}
    return sorted(found, key=lambda arm: costs.get(arm, (True, math.inf)))


def with_bare(arms: str) -> list[str]:
    """The measure of the rest is always there."""
    return list(dict.fromkeys(["bare", *filter(None, arms.split(","))]))


def estimate(jobs: Sequence[Job], args: argparse.Namespace) -> float:
    """Seconds."""
    return sum(
        job.repeat * (SLOWER.get(arm.partition(":")[0], 1.5) * seconds_of(args) + START_SECONDS)
        for job in jobs
        for arm in job.arms
        if not refusal(job, arm, args)
    )


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


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended, and where its raw result is."""

    code: int
    file: Path | None = None


def carry_out(jobs: Sequence[Job], args: argparse.Namespace, name: str) -> Done:
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
    path = None
    with rig.scratch("bench") as scratch:
        room = args.keep.resolve() if args.keep is not None else scratch
        bench = Campaign(args, room, seconds, jobs)
        try:
            for job in jobs:
                if not bench.ended:
                    bench.case(job)
            bench.why = bench.why if bench.ended else ""
        finally:
            # Whatever ends it: the runs that are complete are kept, and that one was not.
            if any(map(is_begun, bench.cases)):
                path = keep(bench, args, name, time.monotonic() - started)
    if path is None:
        print("nothing was completed", flush=True)
        return Done(bench.ended or 2)
    whole = record.read(path)
    out = page_of(path)
    out.write_text(page.page(whole, path.name), encoding="utf-8")
    found = tables.apart([whole])
    print(f"\n{tables.terminal(found)}\n")
    print(f"raw results: {path}\npage: {out}")
    well = all(group.completed == group.runs for group in found)
    return Done(bench.ended or (0 if well else 1), path)


def keep(bench: Campaign, args: argparse.Namespace, name: str, took_seconds: float) -> Path:
    kept = {
        "measure": tables.MEASURE,
        "short": bool(args.short),
        "seconds": bench.seconds,
        "took_seconds": round(took_seconds),
        "asked": asked(bench.jobs, args),
        "hosts": bench.slots,
        "ended": bench.why,
        "cases": [case for case in bench.cases if is_begun(case)],
    }
    return record.keep(f"{name}-short" if args.short else name, kept)


def asked(jobs: Sequence[Job], args: argparse.Namespace) -> dict[str, Any]:
    """What the command was told to do: what is not there afterwards was left out by somebody."""
    told = {name: getattr(args, name) for name in ("seed", "ranks", "batch", "again")}
    return {**told, "seconds": seconds_of(args), "jobs": [asdict(job) for job in jobs]}


def is_begun(case: Mapping[str, Any]) -> bool:
    return bool(case["repetitions"] or case["interrupted"])


def page_of(raw: Path) -> Path:
    """Beside other things that are made again from raw results: not in git."""
    directory = ROOT / "build" / "bench"
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"{raw.name.removesuffix('.json.gz')}.html"


class Campaign:
    """What the runs of one command share."""

    def __init__(
        self, args: argparse.Namespace, room: Path, seconds: float, jobs: Sequence[Job] = ()
    ) -> None:
        self.room, self.seconds, self.jobs = room, seconds, jobs
        self.ended = 0
        """Before its time: how, as an exit."""
        self.why = "an error of its own"
        """And why. Who comes to the end says that nothing was."""
        self._args = args
        self._hosts = hosts_of(args)
        self.slots = [host.slots for host in self._hosts]
        """Of each host of a hostfile. Their names are nobody's business."""
        self._launch: launching.Launch = (
            launching.Ssh(str(ROOT), self._hosts) if self._hosts else launching.Local()
        )
        self.cases: list[dict[str, Any]] = []
        self._number = 0
        self._steps: dict[tuple[str, str], tuple[int, float]] = {}

    def case(self, job: Job) -> None:
        told, plan = scenario.read(job.scenario), plan_of(job, self._args)
        refused: dict[str, str] = {}
        for spec in job.arms:
            arm = arm_of(spec, self._hosts)
            if why := arm.refuses(plan):
                refused[arm.name] = why
        able = [spec for spec in job.arms if load(spec).name not in refused]
        case: dict[str, Any] = {
            "scenario": told.name,
            "title": told.title,
            "why": told.why,
            "scenario_digest": told.digest,
            "tuned_for": job.tuned_for,
            "timeouts_tuned_for": {
                spec: where
                for spec in job.arms
                if (where := torchft.tuned_for(spec, job.scenario, job.workload, job.size))
            },
            "refused": refused,
            "repetitions": [],
            "interrupted": [],
        }
        self.cases.append(case)
        try:
            steps, case["bare_step_seconds"] = self._settle(plan)
            plan = replace(plan, steps=steps)
            case["plan"] = {**asdict(plan), "directory": ""}
            for _ in range(job.repeat):
                self._repeat(case, told, plan, able)
            for _ in range(self._args.again):
                due = [spec for spec in able if spec in disturbed(case, job.repeat)]
                if not due:
                    break
                self._repeat(case, told, plan, list(dict.fromkeys(["bare", *due])))
        except (KeyboardInterrupt, SystemExit):
            self._end(INTERRUPTED, "interrupted")
        except TROUBLE as error:
            # A host that is lost, say: what it still runs would disturb those that come.
            self._end(LOST, str(error))

    def _repeat(
        self, case: dict[str, Any], told: scenario.Scenario, plan: Plan, specs: list[str]
    ) -> None:
        """Each of them once. The order is drawn: nobody is always first, or behind the same one."""
        number = len(case["repetitions"]) + 1
        runs: list[dict[str, Any]] = []
        chance = random.Random(f"{plan.seed}/{told.name}/{plan.parallel}/{number}")
        for spec in chance.sample(specs, len(specs)):
            # Whatever ends it, that it was begun is kept: a run that looks bad is not ended unseen.
            stub = {"spec": spec, "arm": load(spec).name, "repetition": number}
            case["interrupted"].append({**stub, "outcome": "interrupted"})
            one = self._run(spec, told, plan, str(number))
            case["interrupted"].pop()
            if not runs:
                case["repetitions"].append(runs)
            runs.append(one)
            runs.sort(key=lambda run: specs.index(run["spec"]))

    def _new_room(self, said: str) -> Path:
        """One that nobody had before: with --keep, earlier campaigns left theirs."""
        while True:
            self._number += 1
            path = self.room / f"{self._number:03d}-{said}"
            if not path.exists():
                return path

    def _end(self, code: int, why: str) -> None:
        self.ended, self.why = code, placeless(why)
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
        _, step = self._steps.get((plan.parallel, plan.size), (0, 0.0))
        result = one.go(Limits(plan.steps * step or self.seconds), bar.told)
        bar.close(result)
        if result["outcome"] == "completed" and self._args.keep is None:
            one.clear()
        return {"spec": spec, **result}


def disturbed(case: Mapping[str, Any], wanted: int) -> set[str]:
    """Arms with fewer quiet runs than were wanted. How those came out is not asked."""
    quiet = Counter(
        run["spec"] for run, bare in tables.pairs_of(case) if tables.is_quiet((run, bare))
    )
    return {
        run["spec"]
        for runs in case["repetitions"]
        for run in runs
        if run["arm"] != "bare" and quiet[run["spec"]] < wanted
    }


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
