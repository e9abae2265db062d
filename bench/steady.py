"""What each system costs while nothing breaks, by the method of bench.overhead.

    python -m bench.steady --arms keepstep,torchft,checkpoint_restart:sync@20 [--minutes 20]
    python -m bench.steady --onto bench/results/steady-….json.gz …       the steps that it lacks
    python -m bench.steady --read bench/results/steady-….json.gz         what it said
    python -m bench.steady --read … --write docs/benchmarks.md           its table, at its marks

For each arm three jobs live side by side and take turns in blocks of about a second: A bare, B the
arm, C bare again as the control; there and back, A B C | C B A. Whoever is not at turn is stopped
with everything that belongs to it. The figure is the ratio of sums over all quiet rounds, with the
bound of bench.overhead, over several fresh starts of all three. Model and data are those of
`python -m bench`; two ranks, so that each has a core. An arm that saves does so within its blocks,
in its own interval; a turn's length has no divisor in common with it, so that saves fall on timed
and untimed steps alike.

SIGTERM ends a run, and what it has by then is kept; so are the finished segments of an arm that
fails, or of a run that Ctrl-C ends. --onto goes on with them. Exit 0 only if each arm has its
steps, each control is within 0.5%, and nobody saw a fault, left a rank out or started one again.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bench import documents, figures, overhead, quiet, record, rig, truth
from bench.arms.arm import Arm, able, load, noted, notes_of, placeless
from bench.arms.keepstep import Keepstep
from bench.launch import Local, end_marked, marked
from bench.plan import Plan
from bench.workload.log import GATE
from keepstep.errors import KeepstepError, Permanent

ARMS = "keepstep,torchft,checkpoint_restart:sync@20,checkpoint_restart:async@20"
STEPS_MAX = 10_000_000
IDLE_SHARE_MAX = 0.15
IDLE_SECONDS_MAX = 90.0
CONTROL_FIRST = "control_first"
"""In a round: 1 if the control was started before the bare job."""
PATIENCE_SHARE = 3.0
"""Of the silence that an arm allows, what is planned to stand still."""
ROUNDS_MIN = 2
"""Of an interval: drawn from a single one, it would have no width."""
METHOD = 2
"""Raised when rounds are no longer made as before: --onto refuses others. 2: saves fall on timed
and untimed steps alike."""
NOT_KEPT = ("onto", "read", "write")
MARKS = "<!-- steady:begin", "<!-- steady:end -->"
JOBS = ("arm", "control")
"""Told by the bare one."""
HEAD = (
    *("arm", "quiet steps", "step, by the bare engine", "control"),
    *("processor time (control)", "fastest steps (control)"),
)
ALIKE = ("ranks", "size", "parallel", "seed", "quick")
"""Options that a run which goes on shares with the one before it."""


@dataclass(slots=True)
class Progress:
    """What is known of one arm, in the course of it: an end before its time takes nothing away."""

    rounds: list[dict[str, float]] = field(default_factory=list)
    steps_us: dict[str, list[int]] = field(default_factory=dict)
    """How long each step of rank 0 took in these rounds, by job."""
    alarms: list[str] = field(default_factory=list)
    failed: str = ""
    said: list[str] = field(default_factory=list)
    """The ends of its jobs' logs, if it failed."""


def main() -> int:
    args = options()
    if args.read is not None:
        return tell_again(args.read, args.write)
    specs = args.arms.split(",")
    runs: dict[str, Any] = {}
    earlier: dict[str, Progress] = {}
    history: list[dict[str, Any]] = []
    try:
        # A name that is not one is told now, and not after an hour.
        for spec in specs:
            load(spec)
        if args.onto is not None:
            earlier, history = parts_of(args.onto, record.read(args.onto), args)
        need_short_turns(earlier)
    except (KeepstepError, OSError) as error:
        print(f"bench.steady: {error}", file=sys.stderr)
        return 2
    print(f"machine {record.machine()}")
    told_to_end = threading.Event()
    # What was asked for, and then what is only carried on.
    for spec in dict.fromkeys([*specs, *earlier]):
        progress = earlier.get(spec, Progress())
        try:
            if spec in specs:
                # Who goes on may do better.
                progress.failed, progress.said = "", []
                measure(spec, args, progress, told_to_end)
            if spec in specs and not progress.rounds and not told_to_end.is_set():
                progress.failed = f"not one round in {args.minutes} min"
        except (KeepstepError, OSError) as error:
            # What is known of this one and of the others is not thrown away for it.
            progress.failed = placeless(f"{type(error).__name__}: {error}")
            progress.said = notes_of(error)
        except (KeyboardInterrupt, SystemExit):
            told_to_end.set()
            print("interrupted: what was measured is kept, for --onto", flush=True)
        if progress.rounds or progress.failed:
            runs[spec] = summed_up(spec, args, progress)
            tell(spec, runs[spec])
    if not runs:
        return 2
    plain = {name: value for name, value in vars(args).items() if name not in NOT_KEPT}
    kept = {"method": METHOD, "options": plain, "onto": history, "runs": runs}
    path = record.keep("steady-quick" if args.quick else "steady", kept)
    print(f"raw results: {path}")
    return 0 if all(spec in runs and runs[spec]["valid"] for spec in specs) else 2


def tell_again(path: Path, into: Sequence[Path]) -> int:
    """What a raw result says, by what its figures mean today."""
    try:
        kept = record.read(path)
        args = argparse.Namespace(**kept["options"])
        found, _ = parts_of(path, kept, args)
        runs = {spec: summed_up(spec, args, progress) for spec, progress in found.items()}
        source = f"bench/results/{path.name}"
        documents.write(into, MARKS, lambda _: markdown(kept["options"], runs, source))
    except (KeepstepError, OSError) as error:
        print(f"bench.steady: {error}", file=sys.stderr)
        return 2
    for spec, run in runs.items():
        tell(spec, run)
    return 0 if all(run["valid"] for run in runs.values()) else 2


def markdown(asked: dict[str, Any], runs: dict[str, Any], source: str) -> str:
    """A document's table, by time."""
    by_time = sorted(runs, key=lambda spec: runs[spec].get("ratio", [math.inf])[0])
    table = "\n".join(documents.table(HEAD, [_row(spec, runs[spec]) for spec in by_time]))
    what = f"**{asked['parallel']} {asked['size']} x{asked['ranks']} ranks**, nobody struck"
    if any("ratio" in run and not run["valid"] for run in runs.values()):
        what += "; in brackets, what does not count"
    return f"{what}:\n\n{table}\n\nRaw result: `{source}`, read by `python -m bench.steady --read`."


def _row(spec: str, run: dict[str, Any]) -> tuple[str, ...]:
    if "ratio" not in run:
        why = run["failed"] or f"fewer than {ROUNDS_MIN} quiet rounds"
        return (spec, why, *("-",) * (len(HEAD) - 2))
    value, _, low, high = run["ratio"]
    told = f"{value:.3f} [{low:.3f}, {high:.3f}]"
    used = f"{run['processor'][0]:.3f} ({run['processor_control'][0]:.3f})"
    if fast := run["fastest_us"]:
        fastest = "{:.3f} ({:.3f})".format(*(fast[name] / fast["bare"] for name in JOBS))
    else:
        fastest = "-"
    row = (spec, f"{run['steps_per_arm']:,}", told, f"{run['control'][0]:.3f}", used, fastest)
    return row if run["valid"] else tuple(f"({cell})" for cell in row)


def tell(spec: str, run: dict[str, Any]) -> None:
    for why in (run["failed"], *run["alarms"]):
        if why:
            print(f"{spec}: {why}", flush=True)
    if "ratio" not in run:
        print(f"{spec}: fewer than {ROUNDS_MIN} quiet rounds", flush=True)
        return
    value, upper, low, high = run["ratio"]
    print(
        f"{spec}: {run['steps_per_arm']} steps per arm, ratio {value:.4f} [{low:.4f}, "
        f"{high:.4f}], upper 95% {upper:.4f}, control {run['control'][0]:.4f}, processor time "
        f"{run['processor'][0]:.4f} (control {run['processor_control'][0]:.4f}){fastest_told(run)}"
        f"{'' if run['valid'] else ': invalid: control off, steps missing, or see above'}",
        flush=True,
    )


def fastest_told(run: dict[str, Any]) -> str:
    """Steps that nobody disturbed, whatever the machine did in between. A step that waits for a
    save is none of these."""
    if not (fast := run["fastest_us"]):
        return ""
    by_bare = (fast[name] / fast["bare"] for name in JOBS)
    return ", fastest steps {:.4f} (control {:.4f})".format(*by_bare)


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
    parser.add_argument("--onto", type=Path, metavar="FILE", help="go on with one that is short")
    parser.add_argument("--read", type=Path, metavar="FILE", help="tell of a raw result again")
    documents.add_option(parser)
    args = parser.parse_args(line)
    if args.write and args.read is None:
        parser.error("--write goes with --read FILE")
    if args.quick:
        args.minutes, args.steps, args.segments = min(args.minutes, 1.5), min(args.steps, 60), 1
    return args


def parts_of(
    path: Path, kept: dict[str, Any], args: argparse.Namespace
) -> tuple[dict[str, Progress], list[dict[str, Any]]]:
    """Of a raw result, by arm; and when, where and at which commit its parts were measured."""
    if kept.get("method") != METHOD:
        raise Permanent(f"{path}: its rounds were made in another way")
    for name in ALIKE:
        then, now = kept["options"][name], getattr(args, name)
        if then != now:
            raise Permanent(f"{path} was measured with --{name} {then}, not {now}")
    found = {
        spec: Progress(
            run["rounds"],
            run.get("rank0_steps_us", {}),
            run["alarms"],
            run["failed"],
            run.get("said", []),
        )
        for spec, run in kept["runs"].items()
    }
    return found, [*kept["onto"], record.origin(kept)]


def need_short_turns(earlier: dict[str, Progress]) -> None:
    """Longer turns and shorter ones are not added up: in these a larger share of steps is not
    timed. Who was not at turn stood still for what the bare engine needed, and for some steps."""
    for spec, progress in earlier.items():
        still = figures.median([one["bare"] for one in progress.rounds] or [0.0])
        if still >= may_stand_still(load(spec)):
            raise Permanent(f"{spec} has shorter turns now than in this raw result")


def measure(
    spec: str, args: argparse.Namespace, progress: Progress, told_to_end: threading.Event
) -> None:
    """Segments until there are enough quiet steps, with those that there were before."""
    deadline = time.monotonic() + 60.0 * args.minutes
    for number in range(1, args.segments + 1):
        done = steps_in(quiet_ones(progress.rounds, args))
        limit = overhead.Limit(args.steps * number / args.segments - done, deadline, told_to_end)
        if limit.steps > 0 and not limit.reached():
            segment(spec, args, progress, limit)


def summed_up(spec: str, args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    calm = quiet_ones(progress.rounds, args)
    kept = {
        "settings": load(spec).settings,
        "steps_per_arm": int(steps_in(calm)),
        "valid": False,
        "failed": progress.failed,
        "said": progress.said,
        "alarms": progress.alarms,
        "rounds": progress.rounds,
        "rank0_steps_us": progress.steps_us,
        "fastest_us": {
            job: figures.percentile(micros, 10.0)
            for job, micros in progress.steps_us.items()
            if micros
        },
    }
    if len(calm) < ROUNDS_MIN:
        return kept
    bare = [r["bare"] for r in calm]
    ratio = figures.ratio_of_sums([r["arm"] for r in calm], bare, args.seed)
    control = figures.ratio_of_sums([r["control"] for r in calm], bare, args.seed)
    used = [r["bare_processor"] for r in progress.rounds]
    processor, processor_control = (
        figures.ratio_of_sums([r[f"{job}_processor"] for r in progress.rounds], used, args.seed)
        for job in ("arm", "control")
    )
    enough = steps_in(calm) >= args.steps and not progress.alarms
    return kept | {
        "valid": enough and abs(control.value - 1) <= overhead.CONTROL_OFF_MAX,
        "ratio": ratio.listed(),
        "control": control.listed(),
        "processor": processor.listed(),
        "processor_control": processor_control.listed(),
    }


def quiet_ones(
    rounds: Sequence[dict[str, float]], args: argparse.Namespace
) -> list[dict[str, float]]:
    return [r for r in rounds if r["others"] <= overhead.OTHERS_MAX or args.quick]


def steps_in(rounds: Sequence[dict[str, float]]) -> float:
    return sum(r["steps"] for r in rounds)


def segment(spec: str, args: argparse.Namespace, progress: Progress, limit: overhead.Limit) -> None:
    """Three fresh jobs, until there are so many quiet steps. Its rounds count once it is known that
    nobody saw a fault in them."""
    system = able(spec, plan_of(args, Path()))
    with ExitStack() as stack:
        directory = stack.enter_context(rig.scratch("steady"))
        # After the round, and not in its middle: what was measured by then is kept.
        signal.signal(signal.SIGTERM, lambda *_: limit.told_to_end.set())
        control_first = control_is_next(progress.rounds)
        made = {
            name: stack.enter_context(gated(name, load("bare"), directory, args))
            for name in (("control", "bare") if control_first else ("bare", "control"))
        }
        bare, control = made["bare"], made["control"]
        for gate in (bare, control):
            gate.job.run(overhead.WARM_STEPS)
        step_seconds = bare.job.run(overhead.WARM_STEPS) / overhead.WARM_STEPS
        # Last: from here on it never stands still for longer than the others' blocks take. What
        # is measured may take a silence of five seconds for a fault.
        arm = stack.enter_context(gated("arm", system, directory, args))
        arm.job.run(overhead.WARM_STEPS)
        gates = [bare, arm, control]
        jobs = [gate.job for gate in gates]
        every = int(arm.arm.settings.get("every_steps", 1))
        block, lead = spread_block(step_seconds, every, may_stand_still(arm.arm))
        for job in jobs:
            # Those to get warm: neither their steps nor their processor time are anybody's.
            job.blocks.clear()
        rounds: list[dict[str, float]] = []
        while not limit.reached() and not is_enough(quiet_ones(rounds, args), limit):
            one = overhead.one_round(jobs, block, lead, len(rounds))
            rounds.append({**one, CONTROL_FIRST: float(control_first)})
        # Before the end, while everything of it still runs.
        alarms = [alarm for gate in gates for alarm in gate.alarms()]
        progress.rounds += rounds
        for job in jobs:
            micros = [us for block in job.blocks for us in block["rank0_step_us"]]
            progress.steps_us.setdefault(job.name, []).extend(micros)
        progress.alarms += alarms


def is_enough(calm: Sequence[dict[str, float]], limit: overhead.Limit) -> bool:
    """Short steps may all be made in one round, which would have no interval."""
    return steps_in(calm) >= limit.steps and len(calm) >= ROUNDS_MIN


def control_is_next(rounds: Sequence[dict[str, float]]) -> bool:
    """Which of the two bare jobs is started first: whoever was so in fewer rounds. In seven of the
    first eight runs, all begun by the bare one, that one was the slower of the two by 0.4 to 1.9%:
    what a process gets of the machine depends on what was there before it."""
    first = sum(one.get(CONTROL_FIRST, 0.0) for one in rounds)
    return first < len(rounds) - first


def may_stand_still(arm: Arm) -> float:
    """For how long it may stand still, reckoned by steps as they are now: a rented machine may take
    three times as long at any moment, and who is silent for longer than its system allows is given
    up. Who names no limit gets what Keepstep's agents bear."""
    return min(overhead.STILL_SECONDS_MAX, patience_of(arm) / PATIENCE_SHARE)


def patience_of(arm: Arm) -> float:
    """How long a silence it allows, in seconds."""
    return float(arm.settings.get("heartbeat_ms", math.inf)) / 1000.0


def spread_block(step_seconds: float, every: int, still_max: float) -> tuple[int, int]:
    """The block of bench.overhead, or one nearly as long in which saves have their share.

    An arm saves after every so many steps. A save after the last step of a turn, or between two
    that do not count, is not timed. If the length of a turn had a divisor in common with the
    interval, saves would fall on the same few places of every turn: all of them timed, or none.
    """
    wanted, lead = overhead.block_of(step_seconds, still_max)
    for block in sorted(range(1, 2 * wanted + every), key=lambda n: (abs(n - wanted), n)):
        still = overhead.still_seconds(block, lead, step_seconds)
        if still < still_max and math.gcd(block + lead, every) == 1:
            return block, lead
    raise Permanent(f"no block of about {wanted} steps has its share of saves every {every} steps")


@dataclass(frozen=True, slots=True)
class Gated:
    """One job behind a gate, with the arm that runs it."""

    job: overhead.Arm
    arm: Arm
    plan: Plan

    def alarms(self) -> list[str]:
        """What nobody may have seen or done: stops by the method are no faults."""
        logs = truth.Logs()
        for rank in range(self.plan.world):
            file = self.plan.truth / f"rank-{rank}.jsonl"
            logs.add(rank, file.read_text(encoding="utf-8", errors="replace"))
        found = [f"{self.job.name}: {why}" for why in uneven(logs, self.plan.world)]
        if isinstance(self.arm, Keepstep) and self.arm.keeper is not None:
            self.job.thaw()
            found += overhead.false_alarms(self.arm.keeper, self.job)
        return found


def uneven(logs: truth.Logs, world: int) -> list[str]:
    """Steps in which not everybody had a part are other steps than the bare engine's, and cheaper
    ones; a rank that was started again has measured its start. Pure."""
    fewer = {line.step for line in logs.lines if sum(map(bool, line.marks)) < world}
    found = [f"{len(fewer)} steps without all ranks"] if fewer else []
    again = len(logs.starts) - len({start.rank for start in logs.starts})
    return found + ([f"ranks were started {again} times more"] if again else [])


@contextmanager
def gated(name: str, arm: Arm, directory: Path, args: argparse.Namespace) -> Iterator[Gated]:
    """Stopped."""
    plan = plan_of(args, directory / name)
    gate = directory / f"{name}.gate"
    with overhead.listening(gate) as listener, running(name, arm, plan, (GATE, gate)):
        connections = overhead.accept_all(listener, plan.world, lambda: check(arm))
        job = overhead.Arm(name, connections, lambda: processes_of(plan))
        settle(job)
        yield Gated(job, arm, plan)
        for connection in connections:
            connection.close()


def plan_of(args: argparse.Namespace, room: Path) -> Plan:
    shape = (args.parallel, args.size, args.ranks, STEPS_MAX)
    return Plan(*shape, seed=args.seed, directory=str(room))


@contextmanager
def running(name: str, arm: Arm, plan: Plan, gate: tuple[str, Path]) -> Iterator[None]:
    """One job whose ranks stop at a gate: the variable that tells them, and the file. Who fails in
    here bears the ends of its logs."""
    variable, path = gate
    plan.write()
    os.environ[variable] = str(path)
    try:
        with noted(name, plan):
            try:
                arm.start(plan, Local())
                yield
            finally:
                # Stopped processes do not end when they are told to.
                overhead.wake(processes_of(plan))
                arm.stop()
                end_marked(plan.directory)
    finally:
        os.environ.pop(variable, None)


def processes_of(plan: Plan) -> list[int]:
    return list(marked(plan.directory))


def check(arm: Any) -> None:
    if why := arm.ended():
        raise Permanent(f"{arm.name} ended before it began: {why}")


class Stoppable(Protocol):
    """A job whose ranks wait at their gate."""

    def processes(self) -> list[int]: ...

    def freeze(self) -> None: ...


def settle(job: Stoppable) -> None:
    """Spares get warm, stores settle, and it is stopped: the method must not measure a start."""
    wait_idle(job.processes)
    job.freeze()


def wait_idle(processes: Callable[[], list[int]]) -> None:
    """Until these use next to nothing for two seconds, while the ranks wait at the gate."""
    deadline = time.monotonic() + IDLE_SECONDS_MAX
    calm = 0
    while calm < 2 and time.monotonic() < deadline:
        pids = processes()
        before = quiet.look(pids)
        time.sleep(1.0)
        after = quiet.look(pids)
        calm = calm + 1 if after.own - before.own < IDLE_SHARE_MAX else 0


if __name__ == "__main__":
    sys.exit(main())
