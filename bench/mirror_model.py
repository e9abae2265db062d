"""What mirrors would cost on a real fabric: a model, not a measurement.

    python -m bench.mirror_model

Full-shard FSDP2 over n GPUs, each shard once, and its second home on another node (decision 0029).
Prints the tables of docs/scale.md, so that no figure there is typed by hand. What it assumes of the
machines is in `Machine`, of the job in `Model`; the rest is what the code does: a record per step
with the gradients, and behind it an eighth of a capsule; 17 places for records, two for capsules.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from keepstep.training.kept import CAPSULE_STEPS, CAPSULES

LOG_SLOTS = 2 * CAPSULE_STEPS + 1
G_BYTES = 4.0
"""g: of a reduced gradient, per parameter. FSDP2 keeps them in the parameters' own fp32."""
S_BYTES = 12.0
"""s: of a parameter and its two AdamW moments in fp32."""
FSDP_BYTES = 8.0
"""f: what FSDP2 itself moves per parameter and step, through each GPU: two gathers of bf16, one
reduce-scatter of fp32."""
GPUS = (64, 512, 1024)


@dataclass(frozen=True, slots=True)
class Machine:
    """Nominal rates times what can be had of them."""

    gpus: int = 8
    """m: per node, each with a NIC of its own."""
    link: float = 0.8 * 50e9
    """B_net: 400 Gbit/s, bytes per second, one way."""
    bus: float = 0.8 * 63e9
    """B_bus: PCIe 5.0 x16 between a GPU and its host, one way."""
    memory: float = 0.7 * 614e9
    """B_mem: of a host with two sockets of 8 channels DDR5-4800, all its GPUs together."""
    flops: float = 989e12
    utilization: float = 0.4


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    parameters: float
    tokens: int
    """Per GPU and step."""


MODELS = (Model("8B", 8e9, 16_384), Model("70B", 70e9, 8_192))


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one rank and one step."""

    gradients: float
    """G = g P / n."""
    state: float
    """S = s P / n."""
    step_seconds: float
    """T = 6 P tokens / (flops x utilization): no waiting for the fabric in it."""
    machine: Machine

    @property
    def sent(self) -> float:
        """D = G + S / C: out of each rank, and into each."""
        return self.gradients + self.state / CAPSULE_STEPS

    @property
    def link_seconds(self) -> float:
        return self.sent / self.machine.link

    @property
    def bus_seconds(self) -> float:
        """From the GPU to its host, on average; nothing comes back until somebody is rebuilt."""
        return self.sent / self.machine.bus

    @property
    def memory_seconds(self) -> float:
        """All ranks of a node: D in from the GPU, out to the NIC, in from the NIC to its place."""
        return self.machine.gpus * 3 * self.sent / self.machine.memory

    @property
    def one_by_one(self) -> float:
        """As built: after the backward pass, before the vote, one stage after another."""
        return self.bus_seconds + self.link_seconds + self.memory_seconds

    @property
    def streamed(self) -> float:
        """The stages at once, still between backward pass and vote."""
        return max(self.bus_seconds, self.link_seconds, self.memory_seconds)

    @property
    def kept(self) -> float:
        """Host memory of a node, for each of its ranks: 17 places of G and two capsules of another
        rank's, and the copy of its own that is on its way."""
        each = LOG_SLOTS * self.gradients + (CAPSULES + 1) * self.state
        return self.machine.gpus * each

    @property
    def rebuild_seconds(self) -> float:
        """The longest: a capsule and 16 records over one link. Their updates come on top."""
        most = self.state + 2 * CAPSULE_STEPS * self.gradients
        return most / self.machine.link

    @property
    def burst_seconds(self) -> float:
        """Every eighth step the whole shard is copied to the host at once."""
        return self.state / self.machine.bus

    @property
    def looked_at(self) -> float:
        """--check-steps 1: the state twice, and of a cover an eighth, with two records."""
        return 2 * self.state + self.state / CAPSULE_STEPS + 2 * self.gradients


def cost(model: Model, gpus: int, machine: Machine = Machine()) -> Cost:
    seconds = 6 * model.parameters * model.tokens / (machine.flops * machine.utilization)
    per_rank = model.parameters / gpus
    return Cost(G_BYTES * per_rank, S_BYTES * per_rank, seconds, machine)


def share_of_traffic(gpus: int) -> float:
    """D over what FSDP2 moves itself: (g + s/C) / (f (n - 1)), whatever the model."""
    return (G_BYTES + S_BYTES / CAPSULE_STEPS) / (FSDP_BYTES * (gpus - 1))


def table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in body)])


def per_step() -> str:
    """What a step costs while nothing fails."""
    rows = [
        ["model, GPUs", "step T", "G", "D", "link", "bus", "host", "one by one", "streamed"],
    ]
    for model in MODELS:
        for gpus in GPUS:
            c = cost(model, gpus)
            rows.append(
                [
                    f"{model.name}, {gpus}",
                    f"{c.step_seconds:.2f} s",
                    _bytes(c.gradients),
                    _bytes(c.sent),
                    _ms(c.link_seconds),
                    _ms(c.bus_seconds),
                    _ms(c.memory_seconds),
                    f"{_ms(c.one_by_one)}, {c.one_by_one / c.step_seconds:.2%}",
                    f"{_ms(c.streamed)}, {c.streamed / c.step_seconds:.2%}",
                ]
            )
    return table(rows)


def at_hand() -> str:
    """What has to be there, and what a fault takes."""
    rows = [
        [
            "model, GPUs",
            "D of FSDP2's own traffic",
            "S over the bus",
            "host memory per node",
            "rebuild",
            "new mirror",
        ],
    ]
    for model in MODELS:
        for gpus in GPUS:
            c = cost(model, gpus)
            rows.append(
                [
                    f"{model.name}, {gpus}",
                    f"{share_of_traffic(gpus):.2%}",
                    _ms(c.burst_seconds),
                    _bytes(c.kept),
                    _ms(c.rebuild_seconds),
                    _ms(c.state / c.machine.link),
                ]
            )
    return table(rows)


def _bytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def main() -> None:
    argparse.ArgumentParser(prog="bench.mirror_model", description=__doc__).parse_args()
    print(per_step())
    print()
    print(at_hand())
    unit = cost(MODELS[0], GPUS[0])
    print()
    print(
        f"kept per rank: {unit.kept / unit.machine.gpus / unit.gradients:.1f} shards of gradients"
    )
    print(f"read per step with --check-steps 1: {unit.looked_at / unit.gradients:.1f} of them")


if __name__ == "__main__":
    main()
