"""Which ranks a system starts again when one of them dies. Pure: raw results are read with it.

    alone     the one that died: Keepstep's spare takes its seat, the others live on
    group     those of its replica group: one torchrun each has started them (TorchFT)
    all       everybody: one torchrun has started them (checkpoint-restart); also arms unknown here

A start that these do not explain is a death that nobody meant.
"""

from __future__ import annotations

from bench.arms.torchft import REPLICAS

TOGETHER = {"bare": "alone", "keepstep": "alone", "torchft": "group", "checkpoint_restart": "all"}


def restarted_with(arm: str, rank: int, parallel: str, world: int) -> range:
    """The ranks that may start once more because this one was struck."""
    match TOGETHER.get(arm.partition(":")[0], "all"):
        case "alone":
            return range(rank, rank + 1)
        case "group":
            size = 1 if parallel == "ddp" else world // REPLICAS
            first = rank - rank % size
            return range(first, first + size)
        case _:
            return range(world)
