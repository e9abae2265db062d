"""Small talk between ranks over Keepstep's own side group, unseen by the user's groups.

For rare moments: JSON from one rank to another, or from everybody to everybody; the largest of all
numbers; and a barrier.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from keepstep.training.groups import Groups
from keepstep.training.raw import bytes_tensor, tensor_bytes

_TAG_LENGTH, _TAG_HEADER = 21, 22


def send_json(side: Any, value: object, target: int) -> None:
    raw = bytes_tensor(json.dumps(value).encode())
    side.send([torch.tensor([raw.numel()])], target, _TAG_LENGTH).wait()
    side.send([raw], target, _TAG_HEADER).wait()


def receive_json(side: Any, source: int) -> dict[str, Any]:
    length = torch.zeros(1, dtype=torch.int64)
    side.recv([length], source, _TAG_LENGTH).wait()
    raw = torch.empty(int(length), dtype=torch.uint8)
    side.recv([raw], source, _TAG_HEADER).wait()
    decoded: dict[str, Any] = json.loads(tensor_bytes(raw))
    return decoded


def exchange_rows(groups: Groups, row: object) -> list[Any]:
    """Every rank's row, on every rank. For rare moments: two small collectives."""
    world = torch.distributed.get_world_size()
    raw = json.dumps(row).encode()
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    groups.side.allgather([lengths], [torch.tensor([len(raw)])]).wait()
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(raw)] = bytes_tensor(raw)
    rows = [torch.zeros(longest, dtype=torch.uint8) for _ in range(world)]
    groups.side.allgather([rows], [padded]).wait()
    return [json.loads(tensor_bytes(r[: int(n)])) for r, n in zip(rows, lengths, strict=True)]


def largest(groups: Groups, number: int) -> int:
    """The largest of the ranks' numbers, on every rank."""
    agreed = torch.tensor([number])
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    groups.side.allreduce([agreed], options).wait()
    return int(agreed)


def side_barrier(groups: Groups) -> None:
    """Every rank has come to this point. Keepstep's own traffic, unseen by the user's groups."""
    groups.side.barrier().wait()
