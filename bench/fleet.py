"""Months of a simulated fleet, one seed after another, on all cores: does any invariant break?

    python -m bench.fleet --gpus 8000 --months 2000
    python -m bench.fleet --gpus 100000 --months 100 --minutes 30
    python -m bench.fleet --gpus 100000 --months 100 --onto bench/results/fleet-100000-….json.gz

Each month is `keepstep lab simulate --gpus N --seed S` in a process of its own. The raw result has
every month. With --minutes no month begins after that time, and after SIGTERM none at all; the last
line says how many there were. --onto goes on with such a result: its months count, seeds that it
has are not run again, and the new raw result holds both, with the commits and machines of either.
Exit code 0: no invariant broke.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import record
from keepstep import codec
from keepstep.chaos import fleet
from keepstep.chaos.fleet_report import Month
from keepstep.chaos.fleet_setting import Plan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_plain)
    parser.add_argument("--gpus", type=int, default=8000)
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--months", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin none after this time")
    parser.add_argument("--onto", type=Path, metavar="FILE", help="go on with one that is short")
    asked = parser.parse_args()
    kept = record.read(asked.onto) if asked.onto is not None else {}
    then = kept.get("asked", {})
    if then and (then["gpus"], then["days"]) != (asked.gpus, asked.days):
        parser.error(f"{asked.onto} has {then['gpus']:,} GPUs for {then['days']:g} days")
    earlier = [codec.from_plain(Month, month) for month in kept.get("months", ())]
    known = {month.plan.seed for month in earlier}
    seeds = (seed for seed in range(asked.first, asked.first + asked.months) if seed not in known)
    months = [*earlier, *_run(asked, seeds)]
    return _tell(asked, sorted(months, key=lambda month: month.plan.seed), _history(kept))


def _run(asked: argparse.Namespace, seeds: Iterator[int]) -> list[Month]:
    """One month after the other on each core, until there are enough or it is told to end."""
    began = time.monotonic()
    told_to_end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.set())
    months: list[Month] = []
    workers = os.cpu_count() or 1
    with concurrent.futures.ProcessPoolExecutor(workers, max_tasks_per_child=20) as pool:
        running: set[concurrent.futures.Future[Month]] = set()
        while True:
            late = asked.minutes and time.monotonic() - began > 60 * asked.minutes
            while len(running) < workers and not late and not told_to_end.is_set():
                seed = next(seeds, None)
                if seed is None:
                    break
                plan = Plan(gpus=asked.gpus, days=asked.days, seed=seed)
                running.add(pool.submit(fleet.run_month, plan))
            if not running:
                return months
            done, running = concurrent.futures.wait(
                running, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for one in done:
                months.append(one.result())
                if months[-1].broken:
                    print(f"seed {months[-1].plan.seed}: {months[-1].broken}", flush=True)


def _history(kept: dict[str, Any]) -> list[dict[str, Any]]:
    """When, where and at which commit the earlier months were run."""
    if not kept:
        return []
    said = {name: kept[name] for name in ("at", "commit", "machine", "versions")}
    seeds = [month["plan"]["seed"] for month in kept["months"]]
    before = {seed for part in kept.get("onto", ()) for seed in part["seeds"]}
    said["seeds"] = [seed for seed in seeds if seed not in before]
    return [*kept.get("onto", ()), said]


def _plain(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog)


def _tell(asked: argparse.Namespace, months: list[Month], onto: list[dict[str, Any]]) -> int:
    broken = [month for month in months if month.broken]
    figures = {
        name: statistics.median(getattr(month, name) for month in months)
        for name in ("failures", "ettr", "ettr_restart", "goodput", "goodput_restart")
    }
    figures["cpu_seconds"] = statistics.median(month.cpu_seconds for month in months)
    figures["cpu_seconds_max"] = max(month.cpu_seconds for month in months)
    path = record.keep(
        f"fleet-{asked.gpus}",
        {
            "asked": {key: value for key, value in vars(asked).items() if key != "onto"},
            "onto": onto,
            "months": [dataclasses.asdict(month) for month in months],
            "median": figures,
            "broken": [month.plan.seed for month in broken],
        },
    )
    failures = sum(month.failures for month in months)
    print(f"raw: {path.name}")
    print(
        f"{len(months)} of {asked.months} months of {asked.gpus:,} GPUs, {failures:,} failures: "
        f"{len(broken)} broken invariants; ETTR {100 * figures['ettr']:.2f} % beside "
        f"{100 * figures['ettr_restart']:.2f} % (medians); a month takes "
        f"{figures['cpu_seconds']:.1f} s of CPU, at most {figures['cpu_seconds_max']:.1f}"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
