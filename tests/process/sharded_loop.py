"""The script of the sharded jobs: HSDP or tensor parallel x DDP, 2 x 2; full shard; ZeRO-1.

It runs under `keepstep run` and, for the reference, under plain torchrun. Each rank leaves the
sums of its local state: the reference after every step, a job under faults after its last.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import keepstep
from keepstep import failpoint

KIND = os.environ["SHARDED_KIND"]
STEPS_MAX = int(os.environ.get("SHARDED_STEPS", "100000"))
RESET = int(os.environ.get("SHARDED_RESET", "-1"))
"""Before this step the program forgets its moments."""
REFERENCE = "KEEPSTEP_SOCKET" not in os.environ
FINISH, SAVE_EVERY = Path("finish"), Path("save-every")
TOGETHER = 2 if KIND == "tp" else 1
"""Ranks that work on the same samples."""
MESHES = {
    "hsdp": lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
    "fsdp": lambda: init_device_mesh("cpu", (4,), mesh_dim_names=("shard",)),
}
training: list[keepstep.Session] = []


class Net(nn.Module):
    """Dropout, a buffer that each forward pass moves, odd sizes that shard unevenly."""

    order: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 32)
        self.leave = nn.Linear(32, 8)
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 5)
        self.register_buffer("order", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        reach("forward")
        self.order.mul_(0.5).add_(x.double().sum())
        h = self.norm(self.leave(torch.tanh(self.enter(x))))
        h.register_hook(in_backward)
        out: torch.Tensor = self.head(self.drop(h))
        return out


def reach(point: str) -> None:
    if training and not training[0].rehearsing:
        failpoint.reach(f"rank-{dist.get_rank()}-{point}")


def in_backward(gradient: torch.Tensor) -> torch.Tensor:
    reach("backward")
    return gradient


def build(seat: keepstep.Seat) -> dict[str, Any]:
    torch.manual_seed(0)
    model: nn.Module = Net()
    if KIND in MESHES:
        mesh = MESHES[KIND]()
        fully_shard(model.enter, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif KIND in ("ddp", "zero1"):
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(
            model, mesh["tp"], {"enter": ColwiseParallel(), "leave": RowwiseParallel()}
        )
        model = DistributedDataParallel(model, device_mesh=mesh["dp"], bucket_cap_mb=0.001)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if KIND == "zero1":
        # Its decay goes by the parameters, so that they must be right when a step is made again.
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, lr=1e-2, weight_decay=0.1
        )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    # Ranks of one tensor-parallel group work on the same samples.
    share = seat.rank // TOGETHER
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": Samples(share),
    }


class Samples:
    """Each batch is a function of its number and its reader."""

    def __init__(self, share: int) -> None:
        self.share = share

    def __iter__(self) -> Any:
        for number in range(STEPS_MAX * 2):
            generator = torch.Generator().manual_seed(1000 * number + self.share)
            yield torch.randn(4, 8, generator=generator)


def train(parts: dict[str, Any], batches: list[torch.Tensor]) -> None:
    model, optimizer = parts["model"], parts["optimizer"]
    optimizer.zero_grad()
    for x in batches:
        (model(x).pow(2).mean() / len(batches)).backward()
    optimizer.step()
    reach("updated")
    parts["scheduler"].step()


def forget_moments(optimizer: Any) -> None:
    """On DTensors, this raises no version."""
    for key in ("exp_avg", "exp_avg_sq"):
        states = getattr(optimizer, "optim", optimizer).state.values()
        torch._foreach_zero_([state[key] for state in states])


def sums(parts: dict[str, Any]) -> dict[str, str]:
    optimizer = parts["optimizer"]
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    state = getattr(optimizer, "optim", optimizer).state
    moments = [state[p][k] for p in weights if p in state for k in sorted(state[p])]
    model = parts["model"]
    order = next(buffer for name, buffer in model.named_buffers() if name.endswith("order"))
    return {
        "weights": digest(weights),
        "optimizer": digest(moments),
        "order": digest([order]),
        "rng": digest([torch.get_rng_state()]),
        "lr": repr(parts["scheduler"].get_last_lr()),
    }


def digest(tensors: list[torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        whole.update(repr(local.detach().tolist()).encode())
    return whole.hexdigest()


def step_seconds() -> float:
    """Slow while a test waits for its standbys, so that the reference need not be long."""
    if REFERENCE:
        return 0.0
    return 0.1 if Path("quick").exists() else 0.5


def last_step() -> int:
    return int(FINISH.read_text()) if FINISH.exists() else STEPS_MAX


def main() -> None:
    torch.set_num_threads(1)
    session = keepstep.session(build)
    rank = dist.get_rank()
    torch.manual_seed(100 + rank // TOGETHER)
    training.append(session)
    if hook := os.environ.get("SHARDED_HOOK"):
        exec(hook, {"rank": rank, "session": session})
    found = {}
    for batches in session.steps(accumulate=2, max_steps=last_step):
        if session.step == RESET and not session.rehearsing:
            forget_moments(session.parts["optimizer"])
        with session.attempt():
            train(session.parts, batches)
            time.sleep(step_seconds())
        if SAVE_EVERY.exists() and session.due(int(SAVE_EVERY.read_text())):
            session.save()
        if REFERENCE:
            found[session.step] = sums(session.parts)
    found[session.step] = sums(session.parts)
    Path("result").mkdir(exist_ok=True)
    Path(f"result/rank-{rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
