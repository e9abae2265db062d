"""One rank of bench.transfer: receives (rank 0) or sends (the others), as its list of tasks says.

    bare         dist.send/recv of one whole tensor
    keepstep     keepstep.training.transport over the same Gloo group, digests included
                 sources: which ranks send; with two of them the stripes come over two links

Rank 0 writes the seconds of each task, and checks every transfer by digest or by value.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from keepstep.model import Move, Rank
from keepstep.training import transport
from keepstep.training.capsule import digest

MIB = 1024 * 1024
LARGE_BYTES = 64 * MIB
SMALL_BYTES = 4096
SMALL_COUNT = 64


def state(size_mb: int, value: float) -> list[torch.Tensor]:
    """Tensors as a model has them: a few large ones and many small ones, memory touched."""
    left = size_mb * MIB - SMALL_COUNT * SMALL_BYTES
    sizes = [SMALL_BYTES] * SMALL_COUNT
    while left > 0:
        sizes.append(min(left, LARGE_BYTES))
        left -= sizes[-1]
    return [torch.full((size // 4,), value) for size in sizes]


def run_bare(whole: torch.Tensor) -> None:
    if dist.get_rank() == 0:
        dist.recv(whole, 1)
    elif dist.get_rank() == 1:
        dist.send(whole, 0)


def run_keepstep(side: Any, tensors: list[torch.Tensor], sources: Sequence[int]) -> list[str]:
    rank = dist.get_rank()
    move = Move(Rank(0), tuple(Rank(source) for source in sources))
    if rank == 0:
        return transport.receive(side, tensors, move)
    if rank in sources:
        transport.send(side, tensors, move, rank)
    return []


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, required=True)
    parser.add_argument("--tasks", required=True, help='JSON: [["bare"], ["keepstep", 1, 2], …]')
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    receiving = dist.get_rank() == 0
    side = c10d._get_default_group()._get_backend(torch.device("cpu"))
    tensors = state(args.mb, 0.0 if receiving else 1.5)
    whole = torch.full((args.mb * MIB,), 0 if receiving else 1, dtype=torch.uint8)
    expected = [digest(tensor) for tensor in state(args.mb, 1.5)] if receiving else []
    seconds = []
    for kind, *sources in json.loads(args.tasks):
        if receiving:
            for tensor in tensors:
                tensor.zero_()
            whole.zero_()
        dist.barrier()
        began = time.monotonic()
        digests: list[str] = []
        if kind == "bare":
            run_bare(whole)
        else:
            digests = run_keepstep(side, tensors, sources)
        seconds.append(time.monotonic() - began)
        if receiving and kind == "bare":
            assert bool((whole == 1).all()), "the bytes arrived"
        elif receiving:
            assert digests == expected, "the receiver's digests are the state's"
    if receiving:
        Path(args.out).write_text(json.dumps(seconds), encoding="utf-8")
    dist.barrier()


if __name__ == "__main__":
    main()
