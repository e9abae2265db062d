"""What a seed of the simulator runs: which jobs, with how many steps, on which nodes.

One job on a small cluster; or several that compete for it. The others have a lower priority, so
they lend when the first finds no spare; policies and the nodes' labels are drawn as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from keepstep.model import JobId, JobSpec, Policy, SameDomain, Unit
from keepstep.orchestrator.placing import DOMAIN, RACK, SWITCH

TRAIN = JobId("train")
SMALL = JobId("small")
TINY = JobId("tiny")

POLICY = Policy(
    hold_seconds_max=20.0,
    startup_seconds_max=40.0,
)


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node of the simulated cluster."""

    slots: int
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Setting:
    """The jobs of a seed, the most urgent first, and the nodes that they have."""

    specs: tuple[JobSpec, ...]
    steps: tuple[int, ...]
    nodes: tuple[NodePlan, ...]
    return_chance: float = 0.75
    """How likely a node that was lost comes back."""
    seconds_max: float = 400.0
    faults_max: int = 9
    shards: tuple[range, ...] = ()
    """Which ranks of the first job hold each shard of its state; none: all hold the same."""

    @property
    def compete(self) -> bool:
        """Several jobs want the same nodes."""
        return len(self.specs) > 1


def sharded(draw: Random, setting: Setting) -> Setting:
    """The first job as HSDP or tensor parallel: R x S ranks, each shard held by R of them."""
    size = setting.specs[0].world_size
    counts = [count for count in range(2, size // 2 + 1) if size % count == 0]
    if not counts:
        return setting
    count = draw.choice(counts)
    if draw.random() < 0.8:
        shards = tuple(range(first, size, count) for first in range(count))
    else:
        # Holders side by side, often on one node: the loss of it loses a shard.
        each = size // count
        shards = tuple(range(first, first + each) for first in range(0, size, each))
    return replace(setting, shards=shards)


def one_job(draw: Random, *, wide: bool = False) -> Setting:
    active, ranks = draw.randint(2, 4), draw.randint(2 if wide else 1, 3)
    spec = JobSpec(
        TRAIN,
        "train.py",
        nodes=active,
        ranks_per_node=ranks,
        spares=draw.randint(0, 3),
        policy=POLICY,
    )
    steps = draw.randint(40, 250)
    extra = draw.choice((0, 1, 1, 2))
    slots = [ranks + draw.choice((0, 0, 1, 2)) for _ in range(active + extra)]
    return Setting((spec,), (steps,), tuple(NodePlan(count, {}) for count in slots))


def several_jobs(draw: Random, *, wide: bool = False) -> Setting:
    """One job of high priority and one or two of lower ones, where spares run out often."""
    labelled = draw.random() < 0.5
    first = _spec(draw, TRAIN, 5, draw.randint(2, 3), labelled)
    specs = [
        replace(first, ranks_per_node=2) if wide else first,
        _spec(draw, SMALL, 1, draw.choice((1, 2, 2)), labelled),
    ]
    if draw.random() < 0.3:
        specs.append(_spec(draw, TINY, draw.randint(1, 2), 1, labelled))
    steps = tuple(draw.randint(100, 350) for _ in specs)
    if draw.random() < 0.75:
        count = sum(spec.nodes for spec in specs) + draw.choice((0, 0, 0, 1))
        each = max(spec.ranks_per_node for spec in specs)
    else:
        # The same nodes hold ranks of all.
        count = max(spec.nodes for spec in specs) + draw.choice((0, 0, 1))
        each = sum(spec.ranks_per_node for spec in specs)
    nodes = tuple(
        NodePlan(each + draw.choice((0, 0, 0, 0, 1)), _labels(i) if labelled else {})
        for i in range(count)
    )
    return Setting(tuple(specs), steps, nodes, draw.choice((0.75, 1.0, 1.0)), 250.0, 14)


def _spec(draw: Random, job: JobId, priority: int, nodes: int, labelled: bool) -> JobSpec:
    return JobSpec(
        job,
        f"{job}.py",
        nodes=nodes,
        ranks_per_node=draw.choice((1, 1, 2)),
        spares=draw.choice((0, 0, 0, 1)),
        priority=priority,
        policy=_policy(draw, labelled),
    )


def _policy(draw: Random, labelled: bool) -> Policy:
    drawn = replace(
        POLICY,
        hold_seconds_max=draw.choice((6.0, 20.0)),
        lend=draw.random() < 0.95,
        borrow=draw.random() < 0.95,
        lend_seconds_max=draw.choice((1.0, 4.0, 1000.0)),
        leave_within_seconds=draw.choice((3.0, 600.0)),
        move_home=draw.random() < 0.4,
        home_clean_seconds=draw.uniform(0.2, 3.0),
        unit=draw.choice((Unit.DEVICE, Unit.DEVICE, Unit.NODE)),
    )
    if not labelled:
        return drawn
    return replace(
        drawn,
        unit=draw.choice((Unit.DEVICE, Unit.NODE, Unit.DOMAIN)),
        same_domain=draw.choice((SameDomain.PREFER, *SameDomain)),
    )


def _labels(node: int) -> dict[str, str]:
    return {DOMAIN: f"d{node // 2}", RACK: f"r{node // 2}", SWITCH: f"s{node // 4}"}
