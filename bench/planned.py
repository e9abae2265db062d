"""How long training stands still when a rank is moved on purpose, beside a kill in the same run.

    python -m bench.planned [--moves 20] [--sizes 10,1024] [--seed 1]

A job of four ranks on four nodes with warm spares trains; in turns a random rank is asked to move
(`migrate`) and another one is killed. A planned pause lasts from the last step that was finished in
the old generation to the moment when every rank has finished its first step in the new one: while
targets warm up and a boundary is agreed upon, everybody trains. As in bench.pause, one bare step
and one bare transfer of the same bytes are taken off.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

from bench import figures, pause, record, rig
from keepstep.errors import Permanent
from keepstep.page import TRAINING

P50_SECONDS_MAX = 0.100


def main() -> int:
    args = options()
    print(f"seed {args.seed}; machine {record.machine()}")
    results = {
        str(size): measure(size, args) for size in (int(text) for text in args.sizes.split(","))
    }
    path = record.keep(
        "planned",
        {"seed": args.seed, "options": vars(args), "world": pause.WORLD, "sizes": results},
    )
    print(f"raw results: {path}")
    return conclude(results)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.planned", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--moves", type=int, default=20, help="and as many kills")
    pause.add_options(parser)
    return parser.parse_args()


def measure(size_mb: int, args: argparse.Namespace) -> dict[str, Any]:
    """One size of state: the bare engine, moves and kills in turns, the bare engine again."""
    with rig.scratch("planned") as directory:
        before = pause.bare(size_mb, args, directory)
        moves, kills = in_turns(size_mb, args, directory)
        after = pause.bare(size_mb, args, directory)
    step = figures.median(before["steps"] + after["steps"])
    transfer = figures.median(before["transfers"] + after["transfers"])
    return {
        "bare": [before, after],
        "bare_step_seconds": step,
        "bare_transfer_seconds": transfer,
        "moves": moves,
        "kills": kills,
        "planned": [move["pause"] - step - transfer for move in moves],
        "unplanned": [seconds - step - transfer for seconds in kills],
    }


def in_turns(
    size_mb: int, args: argparse.Namespace, directory: Path
) -> tuple[list[dict[str, Any]], list[float]]:
    chance = random.Random(args.seed * 1_000_003 + size_mb)
    moves: list[dict[str, Any]] = []
    kills: list[float] = []
    with pause.a_job(size_mb, args, directory) as job:
        for number in range(args.moves):
            for strike in ("move", "kill"):
                job.wait_ready(pause.SPARES, pause.WARM_SECONDS_MAX)
                pause.wait_calm(job)
                rank = chance.randrange(pause.WORLD)
                if strike == "move":
                    moves.append(move(job, rank))
                else:
                    kills.append(pause.kill(job, rank).whole)
            planned, unplanned = 1000 * moves[-1]["pause"], 1000 * kills[-1]
            print(
                f"{size_mb} MB, {number + 1}/{args.moves}: moved in {planned:.0f} ms, "
                f"replaced in {unplanned:.0f} ms",
                flush=True,
            )
    return moves, kills


def move(job: rig.Rig, rank: int) -> dict[str, Any]:
    """Ask for it, and watch the pages: the last step there, the first step here."""
    known = {incident["id"] for incident in job.incidents()}
    before = job.generation()
    asked = time.monotonic()
    job.cluster.client.migrate(rig.JOB, {"ranks": [rank], "why": "bench.planned"})
    stopped, resumed = watch(job, before, asked)
    incident = job.wait_incident(known, pause.INCIDENT_SECONDS_MAX)
    if incident["outcome"] != "moved":
        raise Permanent(f"the move of rank {rank} ended as {incident['outcome']}")
    return {
        "rank": rank,
        "pause": resumed - stopped,
        "warm": stopped - asked,
        "phases": incident["seconds"],
    }


def watch(job: rig.Rig, generation: int, asked: float) -> tuple[float, float]:
    """When the last step of the old generation was finished, and by all the first of the new."""
    newest, stopped = -1, asked
    done: dict[int, float] = {}
    boundary: dict[int, int] = {}
    while len(done) < pause.WORLD:
        now = time.monotonic()
        if now - asked > pause.INCIDENT_SECONDS_MAX:
            raise Permanent("no step of a new generation: the rank did not move")
        for rank, reading in job.progress():
            if reading.generation == generation and rig.finished(reading) > newest:
                newest, stopped = rig.finished(reading), now
            elif reading.generation > generation and reading.mark in TRAINING:
                begun = boundary.setdefault(rank, reading.step)
                if rank not in done and rig.finished(reading) > begun:
                    done[rank] = now
        time.sleep(pause.LOOK_SECONDS)
    return stopped, max(done.values())


def conclude(results: dict[str, Any]) -> int:
    holds = True
    figure = []
    for size, run in results.items():
        rows = {name: [1000 * s for s in run[name]] for name in ("planned", "unplanned")}
        print(f"\n{size} MB of state, {len(run['moves'])} moves and kills; milliseconds")
        print(f"{'minus one step and transfer':<28}{'p50':>8}{'p95':>8}{'max':>8}")
        for name, values in rows.items():
            p50, p95 = (figures.percentile(values, p) for p in (50, 95))
            print(f"{name:<28}{p50:>8.0f}{p95:>8.0f}{max(values):>8.0f}")
        print(f"{'bare: one step':<28}{1000 * run['bare_step_seconds']:>8.0f}")
        print(f"{'bare: send/recv':<28}{1000 * run['bare_transfer_seconds']:>8.0f}")
        middle = figures.median(rows["planned"])
        holds = holds and middle <= 1000 * P50_SECONDS_MAX
        other = figures.median(rows["unplanned"])
        figure.append(f"{size} MB p50 {middle:.0f} ms (unplanned {other:.0f} ms)")
    verdict = "holds" if holds else "does not hold"
    limit = f"limit p50 {1000 * P50_SECONDS_MAX:.0f} ms"
    print(f"\nplanned pause minus one step minus bare transfer ({limit}): ", end="")
    print(f"{'; '.join(figure)}: {verdict}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
