"""What a month of a simulated fleet is made of: machines, jobs, rates, and how long things take.

One rank stands for one machine of eight GPUs, which is also what is replaced: a fleet of 100,000
GPUs has 12,500 nodes, each with an agent of its own, and its largest job 2,048 ranks. Machines
stand in racks of sixteen, and four racks share a leaf switch.

Where a duration was measured, its raw file is named. Those were measured with four ranks on one
machine without a GPU, so what grows with a real fabric is added as an assumption, and called one.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from random import Random

from keepstep.errors import ConfigError
from keepstep.model import JobId, JobSpec, NodeId, Policy
from keepstep.orchestrator.placing import RACK, SWITCH

GPUS_PER_NODE = 8
NODES_PER_RACK = 16
RACKS_PER_SWITCH = 4
DAY = 86_400.0

# Measured: medians of bench/results/chaos-300-seed-13.json.gz, by kind of fault.
EXIT_SEEN_SECONDS = 0.04
"""From a death to the brain's knowing of it (sigkill)."""
SILENCE_SEEN_SECONDS = 3.66
"""From a node's last word (silent_node); the rule says 3.5 s."""
STALL_SEEN_SECONDS = 4.27
"""From a rank that stands still to its being known (sigstop)."""
QUIESCE_SECONDS = 0.05
REFORM_SECONDS = 0.12
RESUME_SECONDS = 0.11

# Assumed.
GROUPS_SECONDS = 20.0
"""Communicators anew at 1,024 GPUs, growing with the logarithm: what TrainMover publishes for a
whole move. Keepstep was never measured at that size."""
TRANSFER_SECONDS = 5.0
"""A machine's state over its own links."""
JOIN_SECONDS = 2.0
"""A warm standby takes a seat."""
STARTUP_SECONDS = 300.0
"""From the start of a script to its first step, without and with a checkpoint to load: what
published accounts of checkpoint-restart call start-up and restore, each (5 min)."""
REPAIR_SECONDS = 4 * 3600.0
"""Median of a machine's repair."""
SAVE_SECONDS = 30.0
PUBLISH_SECONDS = 6 * 3600.0
"""Between two checkpoints that a job publishes of itself: only a fallback ever reads one."""

MIGRATIONS_MAX = 8
"""Low, so that a lost switch makes jobs wait for their turn."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One row of the published failure mix, and what it does to a machine."""

    name: str
    count: int
    """Of 419 interruptions of Llama 3 on 16,384 H100 in 54 days."""
    effect: str
    """device: the process dies, the machine goes for repair. process: it dies, the machine is well.
    hang: it stands still. node: the machine is gone without a word. network: a cable, a rack or a
    leaf switch is cut off. drain: somebody wants it empty. taint: it announces its end. corrupt:
    its state is wrong."""


MIX = (
    Kind("GPU", 148, "device"),
    Kind("HBM3", 72, "device"),
    Kind("software", 54, "process"),
    Kind("switch or cable", 35, "network"),
    Kind("host maintenance", 32, "drain"),
    Kind("GPU SRAM", 19, "device"),
    Kind("GPU system processor", 17, "device"),
    Kind("NIC", 7, "node"),
    Kind("NCCL watchdog", 7, "hang"),
    Kind("silent corruption", 6, "corrupt"),
    Kind("thermal", 6, "taint"),
    Kind("SSD", 3, "node"),
    Kind("PSU", 3, "node"),
    Kind("chassis, IO, CPU, RAM", 8, "node"),
    Kind("dependency", 2, "process"),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked for."""

    gpus: int = 100_000
    days: float = 30.0
    mttf_hours: float = 7.9
    mttf_gpus: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        if self.gpus < 64 * GPUS_PER_NODE:
            raise ConfigError(f"--gpus {self.gpus}: a fleet has at least {64 * GPUS_PER_NODE}")
        if self.days <= 0 or self.mttf_hours <= 0 or self.mttf_gpus <= 0:
            raise ConfigError("--days and --mttf must be above zero")

    @property
    def nodes(self) -> int:
        return self.gpus // GPUS_PER_NODE

    @property
    def seconds(self) -> float:
        return self.days * DAY

    @property
    def faults_per_second(self) -> float:
        """In the whole fleet."""
        return self.gpus / self.mttf_gpus / (self.mttf_hours * 3600.0)


def groups_seconds(gpus: int) -> float:
    """A job's communicators anew."""
    return GROUPS_SECONDS * math.log2(max(gpus, 2)) / math.log2(1024)


def read_mttf(text: str) -> tuple[float, int]:
    """`7.9h@1024`: hours between two failures of so many GPUs."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)h@(\d+)", text)
    if found is None:
        raise ConfigError(f"--mttf {text}: write hours at a number of GPUs, like 7.9h@1024")
    return float(found[1]), int(found[2])


def labels_of(node: int) -> dict[str, str]:
    rack = node // NODES_PER_RACK
    return {RACK: f"r{rack}", SWITCH: f"s{rack // RACKS_PER_SWITCH}"}


def node_name(number: int) -> NodeId:
    return NodeId(f"n{number}")


def jobs_of(plan: Plan, draw: Random) -> list[tuple[JobSpec, float]]:
    """The jobs and their seconds per step: one takes a sixth of the fleet, two a twelfth each, and
    so on down to an eighth of the first; more of the smallest fill it up.

    Larger ones have a higher priority, and the others lend to them. About 2 % of the machines are
    left as spares, some of them kept warm.
    """
    left = int(plan.nodes * 0.98)
    largest = 1
    while 2 * largest * 6 <= plan.nodes:
        largest *= 2
    found: list[tuple[JobSpec, float]] = []
    smallest = max(4, largest // 8)
    size, many = largest, 1
    while size >= smallest:
        for _ in range(many if size > smallest else left // size):
            job = _job(len(found), size, draw)
            left -= size + job[0].spares
            if left < 0:
                return found
            found.append(job)
        size, many = size // 2, many * 2
    return found


def _job(number: int, nodes: int, draw: Random) -> tuple[JobSpec, float]:
    policy = Policy(
        hold_seconds_max=draw.choice((600.0, 1800.0)),
        startup_seconds_max=4 * STARTUP_SECONDS,
        lend_seconds_max=draw.choice((1800.0, 6 * 3600.0)),
        move_home=False,
    )
    spec = JobSpec(
        JobId(f"job{number}"),
        "train.py",
        nodes=nodes,
        ranks_per_node=1,
        spares=max(1, nodes // 128),
        priority=nodes.bit_length(),
        policy=policy,
    )
    return spec, draw.uniform(4.0, 12.0)
