"""`keepstep lab`: experiments on a cluster of your own making. Never touches anybody's job.

keepstep lab chaos      a real job under real faults, compared bit for bit with a fault-free run
keepstep lab failover   the same while leaders and their database are struck
keepstep lab simulate   the real brain under a virtual clock: small clusters and a hostile network,
                        or with --gpus a month of a whole fleet
"""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path

from keepstep import sabotage
from keepstep.chaos.faults import PARALLEL
from keepstep.errors import ConfigError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    lab = commands.add_parser("lab", help="experiments: fault campaigns, the simulator")
    inner = lab.add_subparsers(title="experiments", metavar="EXPERIMENT", required=True)
    _add_chaos(inner)
    _add_failover(inner)
    _add_simulate(inner)


def _add_chaos(inner: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    chaos = inner.add_parser("chaos", help="a real job under faults, compared bit for bit")
    option = chaos.add_argument
    option("--world", type=int, default=4, metavar="N", help="ranks (default 4)")
    option("--nodes", type=int, default=4, metavar="N", help="nodes that hold ranks (default 4)")
    option("--spares", type=int, default=2, metavar="N", help="standbys (default 2)")
    option("--faults", type=int, default=20, metavar="N", help="how many (default 20)")
    option("--seed", type=int, default=None, help="the same seed gives the same faults")
    option(
        "--mix",
        choices=("unplanned", "planned", "all", "hold", "fallback", "user", "flips", "failover"),
        default="unplanned",
        metavar="MIX",
        help="unplanned (default); planned: ranks are moved while all is well; all: both; hold, "
        "fallback, user: kinds "
        "that do not end in a plain live resume; flips: bits flip at rest; failover: leaders and "
        "their PostgreSQL are struck",
    )
    option(
        "--check-steps",
        type=int,
        metavar="K",
        help="look for corrupt state every K steps (default 1 with --mix flips, else never)",
    )
    option("--kinds", default="", metavar="A,B", help="only these kinds")
    option(
        "--parallel",
        choices=PARALLEL,
        default="ddp",
        help="how the model is spread",
    )
    off = f"one protection off, so that it must fail: {', '.join(sabotage.NAMES)}"
    option("--sabotage", metavar="NAME", choices=sabotage.NAMES, default="", help=off)
    option("--out", type=Path, metavar="FILE", help="the raw result, JSON; gzip if it ends in .gz")
    option("--run-dir", type=Path, metavar="DIR", help="logs and journal (default: temporary)")
    chaos.set_defaults(run=run_chaos)


def run_chaos(asked: argparse.Namespace) -> int:
    from keepstep.chaos import campaign
    from keepstep.chaos.faults import Mix

    looks = 1 if asked.mix == Mix.FLIPS else 0
    plan = campaign.Plan(
        world=asked.world,
        nodes=asked.nodes,
        spares=asked.spares,
        faults=asked.faults,
        seed=secrets.randbelow(1_000_000) if asked.seed is None else asked.seed,
        mix=Mix(asked.mix),
        kinds=tuple(kind for kind in asked.kinds.split(",") if kind),
        sabotage=asked.sabotage,
        parallel=asked.parallel,
        check_steps=looks if asked.check_steps is None else asked.check_steps,
        out=asked.out,
        run_dir=asked.run_dir.resolve() if asked.run_dir else None,
    )
    return campaign.run(plan)


def _add_failover(inner: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    failover = inner.add_parser("failover", help="two orchestrators on a PostgreSQL, struck")
    option = failover.add_argument
    option("--faults", type=int, default=10, metavar="N", help="how many (default 10)")
    option("--seed", type=int, default=None, help="the same seed gives the same faults")
    option("--kinds", default="", metavar="A,B", help="only these kinds")
    option("--out", type=Path, metavar="FILE", help="the raw result, JSON; gzip if it ends in .gz")
    option("--run-dir", type=Path, metavar="DIR", help="logs (default: temporary)")
    rest = {"world": 2, "nodes": 2, "spares": 2, "mix": "failover", "parallel": "ddp"}
    failover.set_defaults(run=run_chaos, sabotage="", check_steps=None, **rest)


def _add_simulate(inner: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    simulate = inner.add_parser("simulate", help="the real brain under a virtual clock")
    small = simulate.add_argument_group("small clusters, message by message (the default)")
    small.add_argument("--seeds", type=int, metavar="N", help="runs (default 100)")
    small.add_argument("--first", type=int, metavar="SEED", help="the first seed (default 0)")
    fleet = simulate.add_argument_group("a month of a whole fleet, beside checkpoint-restart")
    option = fleet.add_argument
    option("--gpus", type=int, metavar="N", help="of the fleet, like 100000")
    option("--days", type=float, metavar="N", help="virtual days (default 30)")
    option("--mttf", metavar="T", help="time between failures (default 7.9h@1024), scaled")
    option("--seed", type=int, help="the same seed gives the same month")
    option(
        "--checkpoint-minutes",
        type=float,
        metavar="N",
        help="of the comparison; default: each job's best",
    )
    simulate.set_defaults(run=run_simulate)


def run_simulate(asked: argparse.Namespace) -> int:
    wants_fleet = [
        name
        for name in ("days", "mttf", "seed", "checkpoint_minutes")
        if getattr(asked, name) is not None
    ]
    if asked.gpus is not None:
        if asked.seeds is not None or asked.first is not None:
            raise ConfigError("--seeds and --first are for small clusters; leave out --gpus")
        return _run_fleet(asked)
    if wants_fleet:
        option = wants_fleet[0].replace("_", "-")
        raise ConfigError(f"--{option} is for a fleet; say how large it is with --gpus")
    from keepstep.chaos import simulate

    try:
        summary = simulate.run_seeds(asked.first or 0, 100 if asked.seeds is None else asked.seeds)
    except simulate.Violation as error:
        print(error)
        return 1
    print("\n".join(summary.lines()))
    return 0


def _run_fleet(asked: argparse.Namespace) -> int:
    from keepstep.chaos import fleet, fleet_report
    from keepstep.chaos.fleet_setting import Plan, read_mttf

    hours, gpus = read_mttf(asked.mttf or "7.9h@1024")
    plan = Plan(
        asked.gpus,
        30.0 if asked.days is None else asked.days,
        hours,
        gpus,
        secrets.randbelow(1_000_000) if asked.seed is None else asked.seed,
    )
    minutes = asked.checkpoint_minutes or 0.0
    month = fleet.run_month(plan, interval_seconds=60.0 * minutes)
    print("\n".join(fleet_report.lines(month)))
    return 1 if month.broken else 0
