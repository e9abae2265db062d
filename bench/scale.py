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
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import documents, record
from keepstep.chaos import fleet
from keepstep.chaos import fleet_setting as setting
from keepstep.chaos.fleet_compare import (
    PLANNED,
    PUBLISHED,
    REPLACE_SECONDS,
    RESTORE_SECONDS,
    interval,
)

GPUS = (1024, 4096, 16_384, 100_000)
MARKS = "<!-- scale:begin", "<!-- scale:end -->"


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
        documents.write([asked.write], MARKS, lambda _: text)
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
    heads = ["GPUs", "spare machines", "largest job", "failures a month", "pause p50 / p95"]
    heads += ["Keepstep", *(system.name for system in PUBLISHED), "checkpoint-restart"]
    lines = _head(heads)
    for gpus in sorted({month["plan"]["gpus"] for month in months}):
        mine = [month for month in months if month["plan"]["gpus"] == gpus]

        def middle(name: str, mine: Sequence[Mapping[str, Any]] = mine) -> float:
            return float(statistics.median(month[name] for month in mine))

        others = [
            statistics.median(month["ettr_published"][system.name] for month in mine)
            for system in PUBLISHED
        ]
        spare = mine[0]["spares"] / (gpus // setting.GPUS_PER_NODE)
        cells = [f"{gpus:,}", f"{100 * spare:.1f} %", f"{mine[0]['largest']:,}"]
        cells += [f"{middle('failures'):,.0f}"]
        cells += [f"{middle('pause_p50'):.1f} / {middle('pause_p95'):.1f} s"]
        cells += [_percent(part) for part in (middle("ettr"), *others, middle("ettr_restart"))]
        lines.append(_row(cells))
    return "\n".join(lines)


# ---------------------------------------------------------------- one job, reckoned


STEP_SECONDS = 8.0
"""The middle of what the simulator draws. Half of one is lost with a fault, on average."""
SEEN = {
    "hang": setting.STALL_SEEN_SECONDS,
    "node": setting.SILENCE_SEEN_SECONDS,
    "network": setting.SILENCE_SEEN_SECONDS,
}
"""By what a failure does; all others are assumed to be seen as a killed process is, at once: no
GPU has failed under it yet."""


FAN_OUT_SECONDS, FAN_OUT_NODES = 0.97, 2049
"""Measured: the longest of five generation orders to so many agents of 4,200, over direct streams,
from the last report of the phase before to the arrival (p99), orchestrator and agents on two cores
(bench/results/agents-20261117T072008Z.json.gz; the shortest was 0.55 s)."""
ORDERS = 3
"""That all nodes of a job get one after the other: to quiesce, to re-form, to resume."""


def fan_out_seconds(gpus: int) -> float:
    """One order to every node of a job. Direct streams: it grows with the nodes."""
    return FAN_OUT_SECONDS / FAN_OUT_NODES * (gpus / setting.GPUS_PER_NODE)


def share(*effects: str) -> float:
    """Of the failures that do this, by the published mix."""
    whole = sum(kind.count for kind in setting.MIX)
    return sum(kind.count for kind in setting.MIX if kind.effect in effects) / whole


def keepstep_pause(gpus: int) -> float:
    """From a failure under one job of that size to its next new step: a warm standby takes over."""
    seen = sum(seconds * share(effect) for effect, seconds in SEEN.items())
    seen += setting.EXIT_SEEN_SECONDS * (1 - share(*SEEN))
    meeting = max(setting.QUIESCE_SECONDS, setting.JOIN_SECONDS)
    phases = meeting + setting.REFORM_SECONDS + setting.RESUME_SECONDS
    phases += ORDERS * fan_out_seconds(gpus)
    engine = setting.groups_seconds(gpus) + setting.TRANSFER_SECONDS
    return seen + phases + engine + STEP_SECONDS / 2


def restart_share(gpus: int) -> float:
    """Of a job that saves at the best interval: what is planned loses no work, and who only crashed
    waits for no machine, as in the simulated comparison."""
    plan = setting.Plan(gpus=gpus)
    mttf, every = 1.0 / plan.faults_per_second, interval(plan, gpus // setting.GPUS_PER_NODE)
    down = REPLACE_SECONDS * (1 - share("process")) + RESTORE_SECONDS + setting.STARTUP_SECONDS
    lost = down + every / 2 * (1 - share(*PLANNED))
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
        lines.append(_row(cells + [_percent(part) for part in (*shares, restart_share(gpus))]))
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
