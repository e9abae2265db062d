"""`keepstep cost`: what faults cost, and how many spares are right."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from keepstep.cli.fit import columns, fit, table
from keepstep.cli.moves import seconds_of
from keepstep.errors import ConfigError
from keepstep.ledger import cost

PAUSE = "1.8s"
"""The mean over the faults of `keepstep lab chaos --faults 300 --seed 13`, detection included
(bench/results). A larger state takes longer: give your own."""
SIZES = (256, 1024, 4096, 16_384, 65_536, 100_000)
BAR = 40


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "cost",
        help="what faults cost, and how many spares are right",
        description="Reckons what faults cost a cluster with checkpoint and restart, and what "
        "they cost with Keepstep. Times are written like 90s, 10m, 1.5h, 7d.",
    )
    option = command.add_argument
    option("--gpus", type=int, required=True, metavar="N", help="devices of the job")
    option("--price", type=float, default=3.0, metavar="X", help="of one for an hour (default 3)")
    option("--mttf", metavar="TIME", help="between failures anywhere in the job")
    option("--trace", type=Path, metavar="FILE", help="failures instead: a date or hours per line")
    option("--checkpoint-interval", default="1h", metavar="TIME", help="default 1h")
    option("--replacement", default="10m", metavar="TIME", help="of a node (default 10m)")
    option("--restore", default="5m", metavar="TIME", help="of a checkpoint (default 5m)")
    option("--startup", default="5m", metavar="TIME", help="of the job (default 5m)")
    option("--save", default="1m", metavar="TIME", help="training stands still (default 1m)")
    option("--pause", default=PAUSE, metavar="TIME", help=f"with Keepstep (default {PAUSE})")
    option("--live", type=float, default=0.9, metavar="P", help="end in a pause (default 0.9)")
    option("--node-gpus", type=int, default=8, metavar="N", help="lost together (default 8)")
    option("--repair", default="24h", metavar="TIME", help="of a node (default 24h)")
    option("--enough", type=float, default=0.999, metavar="P", help="spares (default 0.999)")
    option("-o", "--output", choices=("text", "json"), default="text", help="default: text")
    command.set_defaults(run=run_cost)


def run_cost(asked: argparse.Namespace) -> int:
    setting = _setting(asked)
    setting.check()
    if asked.output == "json":
        print(json.dumps(_found(setting), indent=2))
        return 0
    print("\n".join(fit(_told(setting), columns())))
    return 0


def _setting(asked: argparse.Namespace) -> cost.Setting:
    if bool(asked.mttf) == bool(asked.trace):
        raise ConfigError("give --mttf TIME, or --trace FILE with the moments of failures")
    mttf = seconds_of(asked.mttf) if asked.mttf else cost.mttf_of(_moments(asked.trace))
    return cost.Setting(
        gpus=asked.gpus,
        price=asked.price,
        mttf=mttf,
        interval=seconds_of(asked.checkpoint_interval),
        replacement=seconds_of(asked.replacement),
        restore=seconds_of(asked.restore),
        startup=seconds_of(asked.startup),
        save=seconds_of(asked.save),
        pause=seconds_of(asked.pause),
        live=asked.live,
        node_gpus=asked.node_gpus,
        repair=seconds_of(asked.repair),
        enough=asked.enough,
    )


def _moments(path: Path) -> list[float]:
    """In seconds. A line is a date and time (ISO 8601) or hours since any start."""
    found = []
    try:
        lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            found.append(float(text) * cost.HOUR)
        except ValueError:
            try:
                found.append(datetime.fromisoformat(text).timestamp())
            except ValueError:
                raise ConfigError(
                    f"{path}, line {number}: neither hours nor a date like 2026-01-31T03:00"
                ) from None
    return found


def _found(setting: cost.Setting) -> dict[str, object]:
    nodes = cost.spare_nodes(setting)
    best = {
        name: value if math.isfinite(value := cost.best_interval(setting, keepstep=k)) else None
        for name, k in (("restart", False), ("keepstep", True))
    }
    return {
        "setting": asdict(setting),
        "faults_per_month": cost.faults_per_month(setting),
        "lost_seconds_per_fault": {
            "restart": cost.lost_by_restart(setting),
            "keepstep": cost.lost_with_keepstep(setting),
        },
        "money_per_month": {
            "restart": cost.money(setting, cost.lost_by_restart(setting)),
            "keepstep": cost.money(setting, cost.lost_with_keepstep(setting)),
        },
        "best_interval_seconds": best,
        "goodput_by_gpus": {
            str(gpus): {"restart": restart, "keepstep": keepstep}
            for gpus, restart, keepstep in _by_size(setting)
        },
        "spare_nodes": nodes,
        "spares_money_per_month": _spares_money(setting, nodes),
    }


def _spares_money(setting: cost.Setting, nodes: int) -> float:
    return nodes * setting.node_gpus * setting.price * cost.HOURS_PER_MONTH


def _by_size(setting: cost.Setting) -> Iterator[tuple[int, float, float]]:
    """Goodput of either way, each with the checkpoint interval that suits it best."""
    for gpus in sorted({*SIZES, setting.gpus}):
        there = cost.at_size(setting, gpus)
        yield (
            gpus,
            cost.goodput(cost.at_best(there, keepstep=False), keepstep=False),
            cost.goodput(cost.at_best(there, keepstep=True), keepstep=True),
        )


# ---------------------------------------------------------------- in words


def _told(setting: cost.Setting) -> Iterator[str]:
    restart, kept = cost.lost_by_restart(setting), cost.lost_with_keepstep(setting)
    paid, now = cost.money(setting, restart), cost.money(setting, kept)
    nodes = cost.spare_nodes(setting)
    yield (
        f"{cost.faults_per_month(setting):.0f} faults a month: one every {_time(setting.mttf)} on "
        f"{setting.gpus:,} GPUs"
    )
    yield ""
    rows = [
        ["checkpoint and restart", _time(restart), _cash(paid)],
        ["Keepstep", _time(kept), _cash(now)],
        ["kept", _time(restart - kept), _cash(paid - now)],
    ]
    yield from table(["", "LOST PER FAULT", "A MONTH"], rows)
    yield ""
    yield (
        f"{setting.gpus:,} x {_cash(setting.price, cents=True)} x (half of "
        f"{_time(setting.interval)} + "
        f"{_time(restart - setting.interval / 2)}) x {cost.HOURS_PER_MONTH:.0f} h / "
        f"{_time(setting.mttf)} = {_cash(paid)}"
    )
    yield (
        f"with Keepstep {setting.live:.0%} of the faults are a pause of {_time(setting.pause)}, "
        "the others as without"
    )
    yield ""
    without = cost.best_interval(setting, keepstep=False)
    with_it = cost.best_interval(setting, keepstep=True)
    yield (
        f"best checkpoint interval, if a save stops training for {_time(setting.save)}: "
        f"{_time(without)}, with Keepstep {_time(with_it)}"
    )
    yield (
        f"dedicated spares, if a node is back after {_time(setting.repair)} and one shall be there "
        f"with a probability of {setting.enough:g}: {nodes} nodes of {setting.node_gpus} GPUs, "
        f"{_cash(_spares_money(setting, nodes))} a month"
    )
    yield ""
    yield "goodput by size, each with its best checkpoint interval (# Keepstep, . restart)"
    for gpus, bare, protected in _by_size(setting):
        yield f"{gpus:>8,} {_bar(bare, protected)} {bare:6.1%} {protected:6.1%}"


def _bar(bare: float, protected: float) -> str:
    low, high = sorted((round(bare * BAR), round(protected * BAR)))
    return "." * low + "#" * (high - low) + " " * (BAR - high)


def _time(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "never"
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _cash(amount: float, *, cents: bool = False) -> str:
    return f"${amount:,.2f}".removesuffix(".00") if cents else f"${amount:,.0f}"
