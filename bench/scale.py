"""What the measured constants come to at 1,024 to 100,000 GPUs, beside what others publish.

    python -m bench.scale [--months 3] [--write docs/scale.md]
    python -m bench.scale --read bench/results/scale-….json.gz [--write docs/scale.md]

Two tables. The first is simulated: months of fleets with many jobs, by the real brain, under the
published mix of failures (`keepstep lab simulate`); the other systems are reckoned with the same
failures, each with the pause that its makers publish. The second is arithmetic: one job that takes
all the GPUs, so that every failure stops all of them. Where the constants come from, and which of
them are assumed, stands in docs/simulation.md. Exit code 1 if an invariant broke.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import record, tables
from keepstep.chaos import fleet
from keepstep.chaos import fleet_setting as setting
from keepstep.chaos.fleet_compare import PUBLISHED, REPLACE_SECONDS, RESTORE_SECONDS

GPUS = (1024, 4096, 16_384, 100_000)
MARKS = "<!-- scale:begin -->", "<!-- scale:end -->"


def main() -> int:
    asked = options()
    if asked.read:
        result = record.read(asked.read)
        name = asked.read.name
    else:
        months = simulate(asked.months)
        path = record.keep("scale", {"asked": {"months": asked.months}, "months": months})
        result, name = record.read(path), path.name
    text = f"{simulated(result['months'])}\n\n{reckoned()}\n\nRaw: `bench/results/{name}`."
    print(text)
    if asked.write:
        whole = asked.write.read_text(encoding="utf-8")
        asked.write.write_text(tables.replaced(whole, text, MARKS), encoding="utf-8")
    broken = [month for month in result["months"] if month["broken"]]
    for month in broken:
        print(f"seed {month['plan']['seed']}: {month['broken']}", file=sys.stderr)
    return 1 if broken else 0


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.scale", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--months", type=int, default=3, help="of each size, one seed each")
    parser.add_argument("--read", type=Path, metavar="FILE", help="tell of a raw result again")
    parser.add_argument(
        "--write", type=Path, metavar="DOCUMENT", help="put them between its markers"
    )
    return parser.parse_args()


def simulate(months: int) -> list[dict[str, Any]]:
    # The longest first: nobody waits for it alone at the end.
    plans = [setting.Plan(gpus=gpus, seed=seed) for gpus in GPUS[::-1] for seed in range(months)]
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), max_tasks_per_child=1) as pool:
        found = [dataclasses.asdict(month) for month in pool.map(fleet.run_month, plans)]
    return sorted(found, key=lambda month: (month["plan"]["gpus"], month["plan"]["seed"]))


# ---------------------------------------------------------------- fleets, simulated


def simulated(months: Sequence[Mapping[str, Any]]) -> str:
    heads = ["GPUs", "largest job", "failures a month", "pause p50 / p95", "Keepstep"]
    heads += [*(system.name for system in PUBLISHED), "checkpoint-restart"]
    lines = _head(heads)
    for gpus in sorted({month["plan"]["gpus"] for month in months}):
        mine = [month for month in months if month["plan"]["gpus"] == gpus]

        def middle(name: str, mine: Sequence[Mapping[str, Any]] = mine) -> float:
            return float(statistics.median(month[name] for month in mine))

        others = [
            statistics.median(month["ettr_published"][system.name] for month in mine)
            for system in PUBLISHED
        ]
        cells = [f"{gpus:,}", f"{mine[0]['largest']:,}", f"{middle('failures'):,.0f}"]
        cells += [f"{middle('pause_p50'):.1f} / {middle('pause_p95'):.1f} s"]
        cells += [_percent(part) for part in (middle("ettr"), *others, middle("ettr_restart"))]
        lines.append(_row(cells))
    return "\n".join(lines)


# ---------------------------------------------------------------- one job, reckoned


def keepstep_pause(gpus: int) -> float:
    """A device fails under one job of that size, and a warm standby takes its seat."""
    meeting = max(setting.QUIESCE_SECONDS, setting.JOIN_SECONDS)
    measured = setting.EXIT_SEEN_SECONDS + setting.REFORM_SECONDS + setting.RESUME_SECONDS
    return measured + meeting + setting.groups_seconds(gpus) + setting.TRANSFER_SECONDS


def restart_share(mttf: float) -> float:
    """Of a job that saves at the best interval, to first order (Young, Daly)."""
    down = REPLACE_SECONDS + RESTORE_SECONDS + setting.STARTUP_SECONDS
    every = max(setting.SAVE_SECONDS, math.sqrt(2 * setting.SAVE_SECONDS * mttf))
    lost = down + every / 2
    return max(0.0, every / (every + setting.SAVE_SECONDS) * (1 - lost / (mttf + lost)))


def reckoned() -> str:
    heads = ["GPUs in one job", "time between failures", "Keepstep's pause", "Keepstep"]
    heads += [*(system.name for system in PUBLISHED), "checkpoint-restart"]
    lines = _head(heads)
    for gpus in GPUS:
        plan = setting.Plan(gpus=gpus)
        mttf = 1.0 / plan.faults_per_second
        pause = keepstep_pause(gpus)
        between = f"{mttf / 3600:.1f} h" if mttf >= 3600 else f"{mttf / 60:.0f} min"
        shares = [mttf / (mttf + p) for p in (pause, *(s.seconds for s in PUBLISHED))]
        cells = [f"{gpus:,}", between, f"{pause:.0f} s"]
        lines.append(_row(cells + [_percent(part) for part in (*shares, restart_share(mttf))]))
    return "\n".join(lines)


# ---------------------------------------------------------------- text


def _head(heads: Sequence[str]) -> list[str]:
    return [_row(heads), "|" + "---|" * len(heads)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _percent(part: float) -> str:
    return f"{100 * part:.2f} %"


if __name__ == "__main__":
    sys.exit(main())
