"""Completion under kills, against the bare engine on a machine whose pace changes by the minute.

    python -m bench.turns --arms keepstep,torchft [--workload ddp] [--steps 500]

`python -m bench run` makes one run after another: on a machine that others share, the second may be
a quarter slower for reasons that are nobody's merit. Here three jobs live side by side and take
turns as in bench.overhead, in blocks of about a second: A bare, B the arm, C bare again as the
control, there and back. Whoever is not at turn is stopped with all that belongs to it. Only B is
struck, by the schedule of the scenario, on a clock that runs in its own blocks alone; a block with
a strike ends when its steps are in, however long that takes, and nothing is stopped meanwhile.

The figure is the arm's seconds for all blocks over the bare engine's for the same steps. No block
is left out. Steps at the start of a turn, while caches are cold, do not count; but timers that ran
out meanwhile fire there, so the ratio with them is told as well. What the machine gives one of them
it gives the others, too: the control tells how far that is true. All jobs train to the same step:
samples and weights are judged as in `bench run`. Exit 0 only if every arm came to the end, each
control is within 2%, and nobody died but who was struck.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench import figures, notes, overhead, record, rig, scenario, steady, truth
from bench.arms.arm import Arm, able, load, notes_of, placeless
from bench.harness import Follower
from bench.plan import BATCH, Plan
from bench.turn_line import Seats
from bench.workload.log import TURN
from bench.workload.order import Order
from keepstep.errors import KeepstepError, Permanent

WARM_STEPS = 20
CONTROL_OFF_MAX = 0.02
STRIKE_SHARE = 0.25
"""Into a block, by the blocks before: nobody is through with it yet."""
BLOCK_SECONDS_MAX, START_SECONDS_MAX, END_SECONDS_MAX = 180.0, 240.0, 60.0
KINDS = ("kill",)
JUDGED = (
    *("steps", "recomputed", "samples", "lost", "doubled", "foreign", "disagreements"),
    *("loss", "digests", "torn"),
)


@dataclass(frozen=True, slots=True)
class Struck:
    """A strike as it was carried out."""

    at: float
    """On the clock of the truth."""
    planned: float
    """Seconds of the arm's own."""
    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class Size:
    """Of a turn, in steps."""

    block: int
    lead: int
    rounds: int

    @property
    def steps(self) -> int:
        """Of a whole run."""
        return WARM_STEPS + 2 * self.rounds * (self.lead + self.block) + 1


@dataclass
class Job:
    """One job that takes its turns."""

    name: str
    arm: Arm
    plan: Plan
    seats: Seats
    done: int = 0
    """Steps that all have made."""
    seconds: float = 0.0
    """In blocks, up to now."""
    leads: float = 0.0
    """In steps before them."""
    strikes: list[Struck] = field(default_factory=list)

    def processes(self) -> list[int]:
        return steady.processes_of(self.plan)

    def freeze(self) -> None:
        """Also what is started while others are being stopped."""
        stopped: set[int] = set()
        while new := set(self.processes()) - stopped:
            overhead.signal_all(sorted(new), signal.SIGSTOP)
            stopped |= new

    def go(self, steps: int, strike: scenario.Strike | None = None, after: float = 0.0) -> float:
        """So many steps more; the seconds that they took."""
        self.done += steps
        began = time.monotonic()
        self.seats.let_until(self.done)
        deadline, due = began + BLOCK_SECONDS_MAX, began + after
        while (at := self.seats.all_there()) is None:
            now = time.monotonic()
            if strike is not None and now >= due and (pid := self.seats.pid_of(strike.rank)):
                os.kill(pid, signal.SIGKILL)
                self.strikes.append(Struck(now, strike.at, strike.rank, pid))
                strike = None
            if now > deadline:
                raise Permanent(f"{self.name}: step {self.done} is not there after {now - began} s")
            if why := self.arm.ended() if now - began > 5.0 else "":
                raise Permanent(f"{self.name} ended at step {self.done}: {why}")
            self.seats.hear(0.02 if strike is not None else 0.5)
        return at - began

    def turn(self, size: Size, strike: scenario.Strike | None = None, after: float = 0.0) -> float:
        """One block, from thaw to freeze; its seconds, without the hand-over."""
        overhead.wake(self.processes())
        self.leads += self.go(size.lead)
        seconds = self.go(size.block, strike, after)
        self.freeze()
        self.seconds += seconds
        return seconds

    def finish(self) -> dict[str, Any]:
        """To the last step, and what came of it."""
        overhead.wake(self.processes())
        self.go(self.plan.steps - self.done)
        self.seats.let_until(self.plan.steps + 1)
        follower = Follower(self.plan.truth, self.plan.world)
        deadline = time.monotonic() + END_SECONDS_MAX
        while len(follower.logs.ends) < self.plan.world and time.monotonic() < deadline:
            self.seats.hear(0.1)
            follower.look()
        windows = max((end.windows for end in follower.logs.ends), default=0)
        if not windows:
            raise Permanent(f"{self.name}: no rank came to its end")
        order = Order(windows, self.plan.world, self.plan.batch, self.plan.seed)
        asked = truth.Asked(order, self.plan.steps)
        found = asdict(truth.evaluate(follower.logs, asked, [s.at for s in self.strikes]))
        starts = [[start.rank, start.at] for start in follower.logs.starts]
        strikes = [asdict(strike) for strike in self.strikes]
        run = {"arm": self.arm.name, "starts": starts, "strikes": strikes}
        # Its times are of the wall, with all turns of others in them.
        judged = {name: found[name] for name in JUDGED}
        return judged | {"unmeant_starts": notes.unmeant_starts(run, asdict(self.plan))}


def main() -> int:
    args = options()
    print(f"machine {record.machine()}; seed {args.seed}")
    runs: dict[str, Any] = {}
    try:
        for spec in args.arms.split(","):
            try:
                runs[spec] = measure(spec, args)
            except (KeepstepError, OSError) as error:
                # What is known of the others is not thrown away for it.
                runs[spec] = {"failed": placeless(str(error)), "said": notes_of(error)}
            tell(spec, runs[spec])
    except (KeyboardInterrupt, SystemExit):
        print("interrupted: the arms that are complete are kept", flush=True)
    # Nobody can end what looks bad, and have it gone.
    runs |= {spec: {"failed": "interrupted"} for spec in args.arms.split(",") if spec not in runs}
    name = "turns-quick" if args.quick else "turns"
    kept = {"options": vars(args), "scenario_digest": digest_of(args.scenario), "runs": runs}
    print(f"raw results: {record.keep(name, kept)}")
    return 0 if all(run.get("valid") for run in runs.values()) else 2


def digest_of(name: str) -> str:
    """Of the scenario; "" if there is none, which is what has failed then."""
    try:
        return scenario.read(name).digest
    except KeepstepError:
        return ""


def options(line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.turns", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--arms", default="keepstep,torchft,checkpoint_restart:sync@20")
    parser.add_argument("--scenario", default="kills", help="kills only: others need a clock")
    parser.add_argument("--workload", default="ddp")
    parser.add_argument("--size", default="3m")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=BATCH, help=f"default: {BATCH} per rank")
    parser.add_argument("--steps", type=int, default=500, help="in blocks, of each job")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a try-out; proves nothing")
    args = parser.parse_args(line)
    if args.quick:
        args.steps = min(args.steps, 60)
    return args


def measure(spec: str, args: argparse.Namespace) -> dict[str, Any]:
    """One arm between two bare jobs."""
    arm = able(spec, plan_of(args, WARM_STEPS, Path()))
    faults = scenario.schedule(scenario.read(args.scenario), args.ranks, 1e3, 1e4)
    if any(fault.kind not in KINDS for fault in faults):
        raise Permanent(f"{args.scenario}: only {', '.join(KINDS)} can be struck in turns")
    if args.quick:
        faults = faults[:1]
    size = size_of(arm, args)
    with ExitStack() as stack:
        directory = stack.enter_context(rig.scratch("turns"))
        named: dict[str, Job] = {}
        # The arm last: while others start, it would stand still for longer than it may.
        for name, system in (("bare", load("bare")), ("control", load("bare")), ("arm", arm)):
            job = stack.enter_context(started(name, system, directory / name, args, size.steps))
            overhead.wake(job.processes())
            job.go(WARM_STEPS)
            job.freeze()
            named[name] = job
        jobs = [named[name] for name in ("bare", "arm", "control")]
        made = [one_round(jobs, number, size, faults) for number in range(size.rounds)]
        whole = {job.name: round(job.seconds + job.leads, 3) for job in jobs}
        # And the first to end, for the same reason.
        truths = {name: named[name].finish() for name in ("arm", "bare", "control")}
        strikes = [asdict(strike) for strike in named["arm"].strikes]
    found = judged(made, truths, strikes, args) | {"settings": arm.settings}
    return found | {"size": asdict(size), "seconds_with_leads": whole}


def size_of(arm: Arm, args: argparse.Namespace) -> Size:
    """By how long a step takes now. Nobody is to stand still for so long that it is a fault."""
    with rig.scratch("turns") as directory:
        with started("trial", load("bare"), directory / "trial", args, 3 * WARM_STEPS) as job:
            overhead.wake(job.processes())
            job.go(WARM_STEPS)
            step = job.go(WARM_STEPS) / WARM_STEPS
    return sized(arm, step, args.steps)


def sized(arm: Arm, step_seconds: float, steps: int) -> Size:
    """Shorter turns for who bears less silence. Pure."""
    every = int(arm.settings.get("every_steps", 1))
    block, lead = steady.spread_block(step_seconds, every, steady.may_stand_still(arm))
    return Size(block, lead, max(1, round(steps / (2 * block))))


def one_round(
    jobs: Sequence[Job], number: int, size: Size, faults: list[scenario.Strike]
) -> dict[str, float | list[float]]:
    """There and back. The two bare jobs change places from round to round."""
    bare, arm, control = jobs
    outer, inner = (bare, control) if number % 2 == 0 else (control, bare)
    blocks: dict[str, list[float]] = {job.name: [] for job in jobs}
    struck = len(arm.strikes)
    for job in (outer, arm, inner, inner, arm, outer):
        due = faults[0] if job is arm and faults and faults[0].at <= arm.seconds else None
        usual = figures.median([s for all_ in blocks.values() for s in all_] or [1.0])
        blocks[job.name].append(job.turn(size, due, STRIKE_SHARE * usual))
        if due is not None and len(arm.strikes) > struck:
            struck += 1
            faults.pop(0)
    sums: dict[str, float | list[float]] = {name: sum(times) for name, times in blocks.items()}
    return sums | {"blocks": blocks["arm"], "strikes": float(struck)}


def judged(
    rounds: Sequence[dict[str, Any]],
    truths: dict[str, dict[str, Any]],
    strikes: Sequence[dict[str, Any]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    bare = [r["bare"] for r in rounds]
    ratio = figures.ratio_of_sums([r["arm"] for r in rounds], bare, args.seed)
    control = figures.ratio_of_sums([r["control"] for r in rounds], bare, args.seed)
    return {
        "seconds": {name: round(sum(r[name] for r in rounds), 3) for name in truths},
        "ratio": ratio.listed(),
        "control": control.listed(),
        "valid": abs(control.value - 1) <= CONTROL_OFF_MAX
        and not any(found["unmeant_starts"] for found in truths.values()),
        "weights_equal": weights_equal(truths),
        "strikes": strikes,
        "rounds": rounds,
        "truths": truths,
    }


def weights_equal(truths: dict[str, dict[str, Any]]) -> bool:
    """Of all jobs, rank by rank: of what is cut, each has its own."""
    first, *others = (found["digests"] for found in truths.values())
    return bool(first) and all(one == first for one in others)


def tell(spec: str, run: dict[str, Any]) -> None:
    if "failed" in run:
        print(f"{spec}: {run['failed']}", flush=True)
        return
    value, _, low, high = run["ratio"]
    found, size, whole = run["truths"]["arm"], run["size"], run["seconds_with_leads"]
    print(
        f"{spec}: {2 * size['block'] * size['rounds']} steps, {len(run['strikes'])} strikes: "
        f"{value:.3f} x bare "
        f"[{low:.3f}, {high:.3f}], control {run['control'][0]:.3f}, "
        f"{whole['arm'] / whole['bare']:.3f} with all steps; {found['recomputed']} steps "
        f"again, {found['lost']} samples lost, {found['doubled']} doubled, weights "
        f"{'equal' if run['weights_equal'] else 'differ'}"
        f"{'' if run['valid'] else ': invalid, the control is off or a rank died unstruck'}",
        flush=True,
    )


@contextmanager
def started(name: str, arm: Arm, room: Path, args: argparse.Namespace, steps: int) -> Iterator[Job]:
    """One job at its first halt, stopped."""
    plan = plan_of(args, steps, room)
    path = room.parent / f"{name}.turn"
    with Seats(path, plan.world) as seats, steady.running(name, arm, plan, (TURN, path)):
        job = Job(name, arm, plan, seats)
        wait_all(job)
        steady.settle(job)
        yield job


def plan_of(args: argparse.Namespace, steps: int, room: Path) -> Plan:
    sizes = (args.workload, args.size, args.ranks, steps, args.batch)
    return Plan(*sizes, seed=args.seed, directory=str(room))


def wait_all(job: Job) -> None:
    """Until every rank has made a step, and waits."""
    deadline = time.monotonic() + START_SECONDS_MAX
    while not job.seats.all_began():
        if why := job.arm.ended():
            raise Permanent(f"{job.name} ended before it began: {why}")
        if time.monotonic() > deadline:
            raise Permanent(f"{job.name}: not all ranks came in {START_SECONDS_MAX:.0f} s")
        job.seats.hear(0.5)


if __name__ == "__main__":
    sys.exit(main())
