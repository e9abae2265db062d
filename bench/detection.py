"""How soon a fault is noticed: from the fault to the incident that the orchestrator opens.

    python -m bench.detection [--kills 10] [--hangs 3] [--silences 3] [--seed 1]

Three kinds, each at random moments on random ranks of a real job: SIGKILL of a rank, SIGSTOP of a
rank, and a node whose network is cut without a word (its port leaves the bridge between network
namespaces; needs root). Every single one must be within its limit, so the figure is the worst.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import figures, record, rig
from keepstep.chaos import network as networks
from keepstep.chaos.network import Network
from keepstep.cli.cluster import ClusterPlan, NodePlan

DEATH_SECONDS_MAX = 0.1
HANG_SECONDS_MAX, HANG_STEPS_MAX = 5.0, 5.0
SILENT_SECONDS_MAX = 5.0
WORLD, SPARES = 4, 2
WARM_SECONDS_MAX = 300.0
INCIDENT_SECONDS_MAX = 120.0
STEP_SECONDS = 0.03


@dataclass(frozen=True, slots=True)
class Noticed:
    """One fault."""

    kind: str
    rank: int
    seconds: float
    limit: float
    outcome: str
    causes: list[Any]


class Lab:
    """A job, and a network that can be cut if we may have one."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self.network: Network | None = None
        # Before anything starts a thread: the whole process moves into the hub's namespace.
        if not networks.available():
            self.network = stack.enter_context(Network())
        nodes = [self._node(name) for name in rig.node_names(WORLD + SPARES)]
        listen = f"{networks.HUB_ADDRESS}:0" if self.network else "127.0.0.1:0"
        arguments = ["--steps", "10000000", "--step-seconds", str(STEP_SECONDS)]
        spec = rig.spec_of(
            directory,
            rig.WORKLOAD,
            [*arguments, "--samples", str(1 << 20)],
            world=WORLD,
            spares=SPARES,
            interface="eth0" if self.network else "lo",
        )
        plan = ClusterPlan(listen=listen)
        self.job = stack.enter_context(rig.running(spec, nodes, directory, plan))

    def _node(self, name: str) -> NodePlan:
        if self.network is None:
            return NodePlan(name, 1)
        return NodePlan(name, 1, self.network.join(name), self.network.prefix(name))

    def strike(self, kind: str, rank: int) -> Noticed:
        """One fault and its incident, from a steady job to a job that trains again."""
        job = self.job
        known = {incident["id"] for incident in job.incidents()}
        pid, node, offset = job.pid_of(rank), job.node_of(rank), job.offset()
        steps = [reading.step_ns for _, reading in job.progress() if reading.step_ns > 0]
        step_seconds = figures.median(steps) / 1e9 if steps else 0.0
        struck = time.monotonic()
        if kind == "silent":
            assert self.network is not None
            self.network.cut(node)
        else:
            os.kill(pid, signal.SIGKILL if kind == "death" else signal.SIGSTOP)
        incident = job.wait_incident(known, INCIDENT_SECONDS_MAX)
        if kind == "silent":
            assert self.network is not None
            self.network.heal(node)
        limit = {
            "death": DEATH_SECONDS_MAX,
            "hang": max(HANG_SECONDS_MAX, HANG_STEPS_MAX * step_seconds),
            "silent": SILENT_SECONDS_MAX,
        }[kind]
        seconds = incident["opened_at"] - offset - struck
        return Noticed(kind, rank, seconds, limit, incident["outcome"], incident["causes"])


def main() -> int:
    args = options()
    print(f"seed {args.seed}; machine {record.machine()}")
    chance = random.Random(args.seed)
    kinds = ["death"] * args.kills + ["hang"] * args.hangs
    if why := networks.available():
        print(f"silent nodes are left out: {why}")
    else:
        kinds += ["silent"] * args.silences
    chance.shuffle(kinds)
    noticed: list[Noticed] = []
    with ExitStack() as stack:
        directory = stack.enter_context(rig.scratch("detection"))
        lab = Lab(stack, directory)
        for kind in kinds:
            lab.job.wait_ready(SPARES, WARM_SECONDS_MAX)
            time.sleep(chance.uniform(1.0, 1.5))
            noticed.append(lab.strike(kind, chance.randrange(WORLD)))
            print(told(noticed[-1]), flush=True)
    path = record.keep(
        "detection",
        {"seed": args.seed, "options": vars(args), "noticed": [asdict(n) for n in noticed]},
    )
    print(f"raw results: {path}")
    return conclude(noticed)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.detection", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--hangs", type=int, default=3)
    parser.add_argument("--silences", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def told(one: Noticed) -> str:
    return (
        f"{one.kind} of rank {one.rank}: noticed after {1000 * one.seconds:.0f} ms "
        f"(limit {1000 * one.limit:.0f}), {one.outcome}"
    )


def conclude(noticed: list[Noticed]) -> int:
    """The worst of each kind; 2 if a kind could not be tried."""
    parts = []
    code = 0
    for kind in ("death", "hang", "silent"):
        of_kind = [one for one in noticed if one.kind == kind]
        if not of_kind:
            parts.append(f"{kind} not measured")
            code = max(code, 2)
            continue
        worst = max(of_kind, key=lambda one: one.seconds / one.limit)
        limit = f"{1000 * worst.limit:.0f}"
        parts.append(f"{kind} {1000 * worst.seconds:.0f} ms (limit {limit}, {len(of_kind)} times)")
        if worst.seconds > worst.limit:
            code = 1 if code == 0 else code
    verdict = {0: "holds", 1: "does not hold", 2: "invalid"}[code]
    print(f"detection, worst of each: {'; '.join(parts)}: {verdict}")
    return code


if __name__ == "__main__":
    sys.exit(main())
