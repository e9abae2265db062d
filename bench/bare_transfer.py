"""Two ranks that do nothing but send and receive: the bare engine's transfer, timed.

Run by bench.pause as rank 0 (sends) and rank 1 (receives, and writes its seconds as JSON). One
tensor, sent whole, into memory that has been touched before: the least that moving these bytes
can cost here.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    receiving = dist.get_rank() == 1
    tensor = torch.full((args.bytes,), 0 if receiving else 1, dtype=torch.uint8)
    seconds = []
    for number in range(args.times + 1):
        dist.barrier()
        began = time.monotonic()
        if receiving:
            dist.recv(tensor, 0)
        else:
            dist.send(tensor, 1)
        # The first one opens connections and buffers.
        if number > 0:
            seconds.append(time.monotonic() - began)
    if receiving:
        assert bool((tensor[-8:] == 1).all()), "the bytes arrived"
        Path(args.out).write_text(json.dumps(seconds), encoding="utf-8")
    dist.barrier()


if __name__ == "__main__":
    main()
