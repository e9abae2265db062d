"""Months of a simulated fleet, one seed after another, on all cores: does any invariant break?

    python -m bench.fleet --gpus 8000 --months 2000
    python -m bench.fleet --gpus 100000 --months 100 --minutes 30
    python -m bench.fleet --gpus 100000 --months 100 --onto bench/results/fleet-100000-….json.gz

Each month is `keepstep lab simulate --gpus N --seed S` in a process of its own. The raw result has
every month. With --minutes no month begins after that time, and after SIGTERM none at all; the last
line says how many there were. --onto goes on with such a result: its months count, seeds that it
has are not run again unless they broke, and the new raw result holds both, with the commits and
machines of either. Exit code 0: no invariant broke; 1: one did; 2: not one month was run to its
end, or a process of the bench was lost.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from bench import record
from keepstep import codec
from keepstep.chaos import fleet
from keepstep.chaos.fleet_report import Month
from keepstep.chaos.fleet_setting import Plan
from keepstep.errors import ConfigError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_plain)
    parser.add_argument("--gpus", type=int, default=8000)
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--months", type=int, default=10)
    parser.add_argument("--first", type=int, help="the first seed; 0, or that of --onto")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin none after this time")
    parser.add_argument("--onto", type=Path, metavar="FILE", help="go on with one that is short")
    asked = parser.parse_args()
    try:
        earlier = Earlier.read(asked.onto, asked) if asked.onto is not None else Earlier()
    except ConfigError as error:
        parser.error(str(error))
    if asked.first is None:
        asked.first = earlier.first
    known = {month.plan.seed for month in earlier.months}
    seeds = (seed for seed in range(asked.first, asked.first + asked.months) if seed not in known)
    return _tell(asked, earlier, _run(asked, seeds))


@dataclasses.dataclass(frozen=True, slots=True)
class Earlier:
    """What an earlier run has, of months that held."""

    months: tuple[Month, ...] = ()
    first: int = 0
    history: tuple[dict[str, Any], ...] = ()
    """When, where and at which commit its parts were run, and which seeds those were."""

    @classmethod
    def read(cls, path: Path, asked: argparse.Namespace) -> Earlier:
        """Of the same plan, or it is refused: before anything is run."""
        kept = record.read(path)
        if not kept["bench"].startswith("fleet-"):
            raise ConfigError(f"{path} is no fleet's result, but of {kept['bench']}")
        months = [codec.from_plain(Month, month) for month in kept["months"]]
        wanted = Plan(gpus=asked.gpus, days=asked.days)
        for month in months:
            if (plan := dataclasses.replace(month.plan, seed=wanted.seed)) != wanted:
                raise ConfigError(f"{path} has months of {plan}, not of {wanted}")
        before = kept.get("onto", [])
        told = {seed for part in before for seed in part["seeds"]}
        held = [month for month in months if not month.broken]
        seeds = [month.plan.seed for month in held if month.plan.seed not in told]
        said = {**record.origin(kept), "seeds": seeds}
        return cls(tuple(held), kept["asked"]["first"], (*before, said))


@dataclasses.dataclass(slots=True)
class Ran:
    """The months of this run, and why it ended early."""

    months: list[Month] = dataclasses.field(default_factory=list)
    lost: str = ""


def _run(asked: argparse.Namespace, seeds: Iterator[int]) -> Ran:
    """One month after the other on each core: until there are enough, until it is late, or until
    it is told to end."""
    began = time.monotonic()
    told_to_end: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told_to_end.append(number))
    ran = Ran()
    workers = os.cpu_count() or 1
    with concurrent.futures.ProcessPoolExecutor(
        workers, max_tasks_per_child=20, initializer=_let_the_bench_decide
    ) as pool:
        running: set[concurrent.futures.Future[Month]] = set()
        while True:
            late = asked.minutes and time.monotonic() - began > 60 * asked.minutes
            try:
                while len(running) < workers and not late and not told_to_end:
                    seed = next(seeds, None)
                    if seed is None:
                        break
                    plan = Plan(gpus=asked.gpus, days=asked.days, seed=seed)
                    running.add(pool.submit(fleet.run_month, plan))
                if not running:
                    return ran
                done, running = concurrent.futures.wait(
                    running, return_when=concurrent.futures.FIRST_COMPLETED
                )
                for one in done:
                    ran.months.append(one.result())
                    _say(ran)
            except BrokenProcessPool as error:
                # Whatever it was: the months that are complete are kept.
                ran.lost = str(error)
                return ran


def _say(ran: Ran) -> None:
    """Each month as it ends, a broken one with its reason: there may be hours to the end."""
    month = ran.months[-1]
    print(
        f"{len(ran.months)}: seed {month.plan.seed}, {month.failures:,} failures, "
        f"{month.cpu_seconds:.0f} s: {month.broken or 'holds'}",
        flush=True,
    )


def _let_the_bench_decide() -> None:
    """SIGTERM often goes to the whole group: a month that has begun is run to its end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _plain(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog)


def _tell(asked: argparse.Namespace, earlier: Earlier, ran: Ran) -> int:
    months = sorted((*earlier.months, *ran.months), key=lambda month: month.plan.seed)
    if ran.lost:
        print(f"ended early: {ran.lost}")
    if not months:
        print("not one month was run to its end")
        return 2
    broken = [month for month in months if month.broken]
    figures = {
        name: statistics.median(getattr(month, name) for month in months)
        for name in ("failures", "ettr", "ettr_restart", "goodput", "goodput_restart")
    }
    path = record.keep(
        f"fleet-{asked.gpus}",
        {
            "asked": {key: value for key, value in vars(asked).items() if key != "onto"},
            "onto": earlier.history,
            "months": [dataclasses.asdict(month) for month in months],
            "median": figures,
            "broken": [month.plan.seed for month in broken],
        },
    )
    print(f"raw: {path.name}")
    for month in broken:
        print(f"seed {month.plan.seed}: {month.broken}")
    # Of this run's code and machine only: earlier months may be of others.
    spent = [month.cpu_seconds for month in ran.months] or [0.0]
    failures = sum(month.failures for month in months)
    fallbacks = sum(month.fallbacks for month in months)
    print(
        f"{len(months)} months of {asked.gpus:,} GPUs, {len(ran.months)} of them now, "
        f"{failures:,} failures, {fallbacks:,} fallbacks: {len(broken)} broken invariants; "
        f"ETTR {100 * figures['ettr']:.2f} % beside {100 * figures['ettr_restart']:.2f} % "
        f"(medians); a month takes {statistics.median(spent):.1f} s of CPU, "
        f"at most {max(spent):.1f}"
    )
    if broken:
        return 1
    return 2 if ran.lost else 0


if __name__ == "__main__":
    sys.exit(main())
