"""Months of a simulated fleet, one seed after another, on all cores: does any invariant break?

    python -m bench.fleet --gpus 8000 --months 2000
    python -m bench.fleet --gpus 100000 --months 100 --minutes 30

Each month is `keepstep lab simulate --gpus N --seed S` in a process of its own. The raw result has
every month. With --minutes no month begins after that time, and the last line says how many there
were. Exit code 0: no invariant broke.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import statistics
import sys
import time

from bench import record
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
    asked = parser.parse_args()
    began = time.monotonic()
    months: list[Month] = []
    seeds = iter(range(asked.first, asked.first + asked.months))
    workers = os.cpu_count() or 1
    with concurrent.futures.ProcessPoolExecutor(workers, max_tasks_per_child=20) as pool:
        running: set[concurrent.futures.Future[Month]] = set()
        while True:
            late = asked.minutes and time.monotonic() - began > 60 * asked.minutes
            while len(running) < workers and not late:
                seed = next(seeds, None)
                if seed is None:
                    break
                plan = Plan(gpus=asked.gpus, days=asked.days, seed=seed)
                running.add(pool.submit(fleet.run_month, plan))
            if not running:
                break
            done, running = concurrent.futures.wait(
                running, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for one in done:
                months.append(one.result())
                if months[-1].broken:
                    print(f"seed {months[-1].plan.seed}: {months[-1].broken}", flush=True)
    return _tell(asked, sorted(months, key=lambda month: month.plan.seed))


def _plain(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog)


def _tell(asked: argparse.Namespace, months: list[Month]) -> int:
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
            "asked": vars(asked),
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
