"""Moving state: Keepstep's transport against bare send/recv, and two sources against one.

    python -m bench.transfer [--mb 1024] [--rounds 6]

First, two processes on loopback: the transport with its digests and a bare `dist.send/recv` of as
many bytes take turns (A B B A), and their sums are compared. Then three network namespaces whose
sources may each send at 400 Mbit/s only: here the links are the limit, as between real nodes, and
state striped over two sources should come almost twice as fast as from one. Needs root for the
second part; nothing outside the namespaces is touched.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import figures, record, rig
from keepstep.chaos import network as networks
from keepstep.chaos.network import Network
from keepstep.errors import Permanent

BARE_TIMES_MAX = 1.3
SOURCES_TIMES_MIN = 1.8
RATE = "400mbit"
SECONDS_MAX = 900.0
PORT = "29500"
"""In a namespace of our own every port is free."""
WORKER = Path(__file__).parent / "transfer_worker.py"

Task = tuple[str | int, ...]


def main() -> int:
    args = options()
    print(f"machine {record.machine()}")
    with rig.scratch("transfer") as directory:
        against_bare = loopback(args, directory)
        why_not = networks.available()
        striped = {"skipped": why_not} if why_not else shaped(args, directory)
    results = {"options": vars(args), "loopback": against_bare, "shaped": striped}
    path = record.keep("transfer", results)
    print(f"raw results: {path}")
    return conclude(against_bare, striped, args.mb)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.transfer", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--mb", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=6, help="each is A B B A")
    parser.add_argument("--shaped-mb", type=int, default=128)
    parser.add_argument("--shaped-rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="of the bootstrap")
    return parser.parse_args()


def loopback(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The transport and bare send/recv in turns, between the same two processes."""
    bare: Task = ("bare",)
    ours: Task = ("keepstep", 1)
    tasks = [bare, ours]  # These open connections and buffers, and do not count.
    for number in range(args.rounds):
        outer, inner = (bare, ours) if number % 2 == 0 else (ours, bare)
        tasks += [outer, inner, inner, outer]
    log, out = directory / "loopback.log", directory / "loopback.json"
    ranks = rig.bare_world(command(args.mb, tasks, out), 2, log)
    rig.wait_all(ranks, SECONDS_MAX, log)
    rounds = in_rounds(tasks, json.loads(out.read_text(encoding="utf-8")))
    ratio = figures.ratio_of_sums(
        [r["keepstep"] for r in rounds], [r["bare"] for r in rounds], args.seed
    )
    return {"rounds": rounds, "ratio": ratio.value, "low": ratio.low, "high": ratio.high}


def in_rounds(tasks: Sequence[Task], seconds: Sequence[float]) -> list[dict[str, float]]:
    """Sums of each round's two transfers per arm, without the two that opened the way."""
    rounds = []
    for start in range(2, len(tasks), 4):
        sums = {"bare": 0.0, "keepstep": 0.0}
        for task, taken in zip(tasks[start : start + 4], seconds[start : start + 4], strict=True):
            sums[str(task[0])] += taken
        rounds.append(sums)
    return rounds


def shaped(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """One source and two sources in turns, each behind its own slow link."""
    one_a: Task = ("keepstep", 1)
    one_b: Task = ("keepstep", 2)
    two: Task = ("keepstep", 1, 2)
    # Single transfers come from either source, so that an uneven pair of links cannot flatter us.
    tasks = [two, *(task for _ in range(args.shaped_rounds) for task in (one_a, two, two, one_b))]
    log, out = directory / "shaped.log", directory / "shaped.json"
    names = ("target", "first", "second")
    with Network() as network:
        addresses = [network.join(name) for name in names]
        for source in names[1:]:
            slow_down([*network.prefix(source)])
        ranks = []
        with log.open("ab") as file:
            for rank, name in enumerate(names):
                around = {
                    "RANK": str(rank),
                    "WORLD_SIZE": "3",
                    "MASTER_ADDR": addresses[0],
                    "MASTER_PORT": PORT,
                    "GLOO_SOCKET_IFNAME": "eth0",
                    "OMP_NUM_THREADS": "1",
                }
                line = [*network.prefix(name), "env", *(f"{k}={v}" for k, v in around.items())]
                line += [sys.executable, *command(args.shaped_mb, tasks, out)]
                ranks.append(subprocess.Popen(line, stdout=file, stderr=file))
        rig.wait_all(ranks, SECONDS_MAX, log)
    seconds = json.loads(out.read_text(encoding="utf-8"))[1:]
    singles = [s for task, s in zip(tasks[1:], seconds, strict=True) if len(task) == 2]
    doubles = [s for task, s in zip(tasks[1:], seconds, strict=True) if len(task) == 3]
    gain = sum(singles) / sum(doubles)
    return {"rate": RATE, "one": singles, "two": doubles, "gain": gain}


def slow_down(prefix: list[str]) -> None:
    """Everything that leaves this namespace leaves at RATE."""
    line = [*prefix, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf"]
    line += ["rate", RATE, "burst", "256kb", "latency", "50ms"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=10, check=False)
    if done.returncode != 0:
        raise Permanent(f"`{' '.join(line)}` failed: {done.stderr.strip()}")


def command(size_mb: int, tasks: Sequence[Task], out: Path) -> list[str]:
    return [str(WORKER), "--mb", str(size_mb), "--tasks", json.dumps(tasks), "--out", str(out)]


def conclude(against_bare: dict[str, Any], striped: dict[str, Any], size_mb: int) -> int:
    for number, sums in enumerate(against_bare["rounds"]):
        bare, ours = sums["bare"] / 2, sums["keepstep"] / 2
        print(f"round {number + 1}: bare {bare:.3f} s, keepstep {ours:.3f} s per {size_mb} MB")
    ratio = against_bare["ratio"]
    print(f"loopback: {ratio:.3f} [{against_bare['low']:.3f}, {against_bare['high']:.3f}]")
    if "skipped" in striped:
        print(f"transfer {ratio:.2f} x bare (limit {BARE_TIMES_MAX}); two sources: not measured")
        print(f"invalid: {striped['skipped']}")
        return 2
    print(f"one source {striped['one']}, two {striped['two']} s at {RATE} each")
    gain = striped["gain"]
    holds = ratio <= BARE_TIMES_MAX and gain >= SOURCES_TIMES_MIN
    print(
        f"transfer {ratio:.2f} x bare send/recv (limit {BARE_TIMES_MAX}), two sources {gain:.2f} x "
        f"one (at least {SOURCES_TIMES_MIN}): {'holds' if holds else 'does not hold'}"
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
