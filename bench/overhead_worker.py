"""The script that bench.overhead runs in both arms: an ordinary loop that steps in blocks.

Started by Keepstep it trains under a session; started with nothing but torch's own variables it
does not even import Keepstep. Both ways run the same build, the same step and the same loader, so
the kernels are the same. Between blocks it waits in a read, without using the processor.

    driver -> {"lead": 2, "steps": 25}        worker -> {"stamps": [start, end of step 1, …]}

    --parallel ddp     every rank holds everything
               hsdp    FSDP2 on a mesh of 2 replicas x half the world of shards
               fsdp    full shard over the world: everything lives once, and in a mirror
               zero1   DDP, with the optimizer's state spread by ZeroRedundancyOptimizer
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

IN, WIDTH, OUT, LAYERS = 256, 1024, 640, 4
SAMPLES = 8192
PASSES = 1_000_000
WAIT_SECONDS_MAX = 3600.0
PARALLEL = ("ddp", "hsdp", "fsdp", "zero1")
REPLICAS = 2
"""Of each shard, with hsdp."""

Pause = Callable[[], contextlib.AbstractContextManager[None]]


class Gate:
    """Counts steps, stamps their ends, and waits for the driver when a block is over."""

    def __init__(self, path: str, rank: int, pause: Pause) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._lines = self._socket.makefile("r", encoding="utf-8")
        self._pause = pause
        self._left = 0
        self._lead = 0
        self._stamps: list[int] = []
        self._say({"rank": rank, "pid": os.getpid()})

    def passed(self) -> None:
        """A step is over."""
        now = time.monotonic_ns()
        if self._lead > 0:
            # Steps that warm the caches after the other arm ran; the last one's end starts us.
            self._lead -= 1
            self._stamps = [now]
            if self._lead > 0:
                return
        else:
            self._stamps.append(now)
            self._left -= 1
        if self._left <= 0:
            self._wait()

    def _wait(self) -> None:
        if len(self._stamps) > 1:
            self._say({"stamps": self._stamps})
        with self._pause():
            line = self._lines.readline()
        if not line:
            raise SystemExit(0)
        wanted = json.loads(line)
        self._lead, self._left = int(wanted["lead"]), int(wanted["steps"])
        self._stamps = []

    def _say(self, plain: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(plain).encode() + b"\n")


def build(rank: int, world_size: int, args: argparse.Namespace) -> dict[str, Any]:
    """More than five million parameters; dropout and BatchNorm make each rank's own state."""
    torch.manual_seed(1234)
    layers: list[nn.Module] = [nn.Linear(IN, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)]
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    model = spread(nn.Sequential(*layers, nn.Linear(WIDTH, OUT)), args.parallel)
    optimizer = optimizer_of(model, args.parallel)
    data = TensorDataset(torch.randn(SAMPLES, IN), torch.randn(SAMPLES, OUT))
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, world_size, rank, shuffle=True, seed=7, drop_last=True
    )
    loader = DataLoader(data, args.batch, sampler=sampler, drop_last=True)
    return {"model": model, "optimizer": optimizer, "loader": loader}


def spread(net: nn.Sequential, parallel: str) -> nn.Module:
    """The model over the ranks."""
    if parallel in ("ddp", "zero1"):
        return DistributedDataParallel(net)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world = dist.get_world_size()
    if parallel == "hsdp":
        shape, names = (REPLICAS, world // REPLICAS), ("replicate", "shard")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def optimizer_of(model: nn.Module, parallel: str) -> torch.optim.Optimizer:
    if parallel != "zero1":
        return torch.optim.AdamW(model.parameters(), lr=1e-4)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-4)


def train_step(parts: dict[str, Any], batch: Any) -> None:
    x, y = batch
    parts["optimizer"].zero_grad(set_to_none=True)
    nn.functional.mse_loss(parts["model"](x), y).backward()
    parts["optimizer"].step()


def train_bare(args: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    parts = build(dist.get_rank(), dist.get_world_size(), args)
    torch.manual_seed(1000 + dist.get_rank())
    gate = Gate(args.gate, dist.get_rank(), contextlib.nullcontext)
    for number in range(PASSES):
        parts["loader"].sampler.set_epoch(number)
        for batch in parts["loader"]:
            train_step(parts, batch)
            gate.passed()


def train_protected(args: argparse.Namespace) -> None:
    import keepstep

    def build_seat(seat: keepstep.Seat) -> dict[str, Any]:
        parts = build(seat.rank, seat.world_size, args)
        return {**parts, "rehearse": lambda batches: train_step(parts, batches[0])}

    session = keepstep.session(build_seat)
    torch.manual_seed(1000 + dist.get_rank())

    @contextlib.contextmanager
    def declared() -> Iterator[None]:
        with session.busy("between blocks", seconds_max=WAIT_SECONDS_MAX):
            yield

    gate = Gate(args.gate, dist.get_rank(), declared)
    for batch in session.steps(passes=PASSES):
        with session.attempt():
            train_step(session.parts, batch)
        gate.passed()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gate", required=True, help="the driver's Unix socket")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--parallel", choices=PARALLEL, default="ddp")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if os.environ.get("KEEPSTEP_SOCKET"):
        train_protected(args)
    else:
        train_bare(args)


if __name__ == "__main__":
    main()
