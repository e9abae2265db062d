"""The training script that campaigns, the demo and the benches run: an ordinary user's loop.

It is started by `keepstep run` (or plain torchrun) like anybody's script and never imported. It
holds what breaks naive recovery: dropout, BatchNorm, gradient accumulation, clipping, a learning
rate schedule and loader workers; an `order` buffer hashes each sample as it is used, so a sample
used twice or out of order shows in the final state. At its end every rank writes SHA-256 sums of
all its state for comparison with a fault-free run.

    --parallel ddp    every rank holds everything
               hsdp   FSDP2 on a mesh of 2 replicas x half the world of shards
               fsdp   full shard over the world: everything lives once, and in a mirror
               zero1  DDP, and the optimizer's state cut by ZeroRedundancyOptimizer
               tp     2 replicas by DDP x tensor parallel over half the world
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import hashlib
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import keepstep
from keepstep import failpoint
from keepstep.chaos.faults import PARALLEL

FEATURES = 32
REPLICAS = 2
"""Of each piece of state, where the model is sharded."""
ROTTEN_BIT = 1 << 22
"""The highest bit of a float's mantissa: a flip there does not get lost in rounding."""
SMALL = 1e-12

_session: list[keepstep.Session] = []
"""Set once training begins: a standby's rehearsal must not walk into somebody else's failpoint."""


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Deterministic samples: each is a function of its index alone."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(FEATURES, generator=generator)
        return x, x.roll(1).tanh(), index


class Net(nn.Module):
    """A small net with everything that makes a retried step differ if anything is forgotten."""

    order: torch.Tensor

    def __init__(self, width: int, frozen_mb: int, layers: int) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.1)
        self.body = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
        )
        self.leave = nn.Linear(width, FEATURES)
        self.register_buffer("order", torch.zeros((), dtype=torch.int64))
        if frozen_mb:
            frozen = torch.rand(frozen_mb * 1024 * 1024 // 4)
            self.frozen = nn.Parameter(frozen, requires_grad=False)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        raise_if_asked()
        reach("forward")
        for value in index.tolist():
            self.order.mul_(1_000_003).add_(value + 1)
        h = self.drop(torch.tanh(self.norm(self.enter(x))))
        h = h + 0.01 * torch.randn_like(h) + 0.001 * random.random()
        if h.requires_grad:
            h.register_hook(_in_backward)
        out: torch.Tensor = self.leave(self.body(h))
        return out


def reach(point: str) -> None:
    """Where a campaign may strike this rank."""
    if _session and not _session[0].rehearsing:
        failpoint.reach(f"rank-{os.environ.get('RANK', '0')}-{point}")


def asked_for(point: str) -> Path | None:
    """The file by which a campaign asks this rank for something, if it is there."""
    directory = os.environ.get("KEEPSTEP_FAILPOINTS", "")
    if not directory or not _session or _session[0].rehearsing:
        return None
    path = Path(directory) / f"rank-{os.environ.get('RANK', '0')}-{point}"
    return path if path.exists() else None


def rot(parameter: torch.Tensor) -> None:
    """One bit of a weight flips at rest, as bad memory would have it."""
    if (path := asked_for("flip")) is not None:
        path.rename(path.with_name(path.name + ".hit"))
        parameter.detach().view(torch.int32).view(-1)[0] ^= ROTTEN_BIT


def rot_at_rest(session: keepstep.Session) -> None:
    """One bit of anything flips between two steps; by address, so that torch sees no change."""
    if (path := asked_for("rest")) is None:
        return
    wanted = json.loads(path.read_text())
    if session.step < wanted["at"]:
        return
    chance = random.Random(wanted["seed"])
    name, held = chance.choice(resting(session.parts, wanted["what"]))
    bit = chance.randrange(*wanted["bits"])
    numbers = held.view(-1).tolist()
    # What is nothing, or nearly, has no mantissa to speak of.
    some = [i for i, number in enumerate(numbers) if abs(number) > SMALL] or [0]
    at = chance.choice(some) * held.element_size() + bit // 8
    ctypes.c_uint8.from_address(held.data_ptr() + at).value ^= 1 << bit % 8
    path.write_text(json.dumps({"step": session.step, "name": name, "bit": bit}))
    path.rename(path.with_name(path.name + ".hit"))


def resting(parts: dict[str, Any], what: str) -> list[tuple[str, torch.Tensor]]:
    """What this rank holds of a kind, by the names that Keepstep gives it."""
    model, optimizer = parts["model"], parts["optimizer"]
    model = model.module if isinstance(model, DistributedDataParallel) else model
    found: list[tuple[str, Any]]
    if what == "parameter":
        found = [(n, p.detach()) for n, p in model.named_parameters()]
    elif what == "buffer":
        found = list(model.named_buffers())
    else:
        found = [
            (f"{i}.{k}", v)
            for i, p in enumerate(parameters_of(optimizer))
            for k, v in optimizer.state[p].items()
        ]
    local = [(n, t.to_local() if hasattr(t, "to_local") else t) for n, t in found]
    # Of an uneven cut a rank may hold nothing.
    return [(n, t) for n, t in local if t.numel()]


def raise_if_asked() -> None:
    """A mistake of the user's that comes again on every worker."""
    if asked_for("always") is not None:
        raise ValueError("a user's mistake that no spare can mend")


def publish_if_asked(session: keepstep.Session) -> None:
    """Publish a checkpoint out of turn: what a worker that was fenced meanwhile must not do."""
    if asked_for("save") is not None:
        reach("save")
        path = session.save()
        if path is not None:
            session.publish(path)


def _in_backward(gradient: torch.Tensor) -> torch.Tensor:
    reach("backward")
    return gradient


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--frozen-mb", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="idle time per step")
    parser.add_argument("--finish-file", default="", help="the last step, once somebody writes it")
    parser.add_argument("--parallel", choices=PARALLEL, default="ddp")
    parser.add_argument("--result", default="")
    parser.add_argument("--looks", default="", help="write here how often each rank looked")
    parser.add_argument("--times", default="", help="write each step's duration here (rank 0)")
    return parser.parse_args()


def build_with(args: argparse.Namespace) -> Any:
    def build(seat: keepstep.Seat) -> dict[str, Any]:
        torch.manual_seed(1234)
        random.seed(1234)
        net = Net(args.width, args.frozen_mb, args.layers)
        model = spread(net, args)
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = optimize(trainable, args)
        optimizer.register_step_pre_hook(lambda *_: reach("optimizer"))
        optimizer.register_step_post_hook(lambda *_: rot(trainable[0]))
        optimizer.register_step_post_hook(lambda *_: reach("updated"))
        next(reversed(trainable)).register_post_accumulate_grad_hook(lambda _: reach("allreduce"))
        data = Numbers(args.samples)
        reader, readers = share(args, seat.rank, seat.world_size)
        sampler: DistributedSampler[Any] = DistributedSampler(
            data, readers, reader, shuffle=True, seed=7, drop_last=True
        )
        loader = DataLoader(
            data, args.batch, sampler=sampler, num_workers=args.workers, drop_last=True
        )
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}

        def rehearse(batches: list[Any]) -> None:
            train_step(parts, batches, args.parallel)

        rehearse.accumulate = args.accumulate  # type: ignore[attr-defined]
        return {**parts, "loader": loader, "rehearse": rehearse}

    return build


def optimize(trainable: list[nn.Parameter], args: argparse.Namespace) -> torch.optim.Optimizer:
    if args.parallel != "zero1":
        return torch.optim.AdamW(trainable, lr=1e-3)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(trainable, torch.optim.AdamW, lr=1e-3)


def spread(net: Net, args: argparse.Namespace) -> nn.Module:
    """The model over the ranks."""
    bucket_mb = 0.05 if args.width <= 256 else 4
    if args.parallel in ("ddp", "zero1"):
        return DistributedDataParallel(net, bucket_cap_mb=bucket_mb)
    # Only now: a job without meshes does not pay for these imports.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import parallel

    replicas = 1 if args.parallel == "fsdp" else REPLICAS
    shape = (replicas, dist.get_world_size() // replicas)
    if args.parallel in ("hsdp", "fsdp"):
        names = ("replicate", "shard") if args.parallel == "hsdp" else ("shard",)
        mesh = init_device_mesh("cpu", shape[-len(names) :], mesh_dim_names=names)
        for layer in net.body:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        return net
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "tensor"))
    before_last = f"body.{args.layers - 1}.0"
    cut = {before_last: parallel.ColwiseParallel(), "leave": parallel.RowwiseParallel()}
    parallel.parallelize_module(net, mesh["tensor"], cut)
    return DistributedDataParallel(net, device_mesh=mesh["replicate"], bucket_cap_mb=bucket_mb)


def share(args: argparse.Namespace, rank: int, world: int) -> tuple[int, int]:
    """Which share of the samples, and of the randomness, is this rank's: of how many.

    The ranks of one tensor-parallel group compute one thing together, from the same samples.
    """
    if args.parallel == "tp":
        return rank // (world // REPLICAS), REPLICAS
    return rank, world


def without_sync(model: Any, last: bool) -> contextlib.AbstractContextManager[None]:
    """Gradients are reduced with the last batch of a step only."""
    if isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext() if last else model.no_sync()
    model.set_requires_gradient_sync(last)
    return contextlib.nullcontext()


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def train_step(parts: dict[str, Any], batches: list[Any], parallel: str = "ddp") -> float:
    model, optimizer = parts["model"], parts["optimizer"]
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for number, (x, y, index) in enumerate(batches):
        last = number == len(batches) - 1
        with without_sync(model, last):
            loss = nn.functional.mse_loss(model(x, index), y) / len(batches)
            loss.backward()
            total += float(loss.detach())
    if parallel == "tp":
        # Each rank sees its own slices: a norm over those would differ within one group.
        torch.nn.utils.clip_grad_value_(parameters_of(optimizer), 0.05)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    parts["scheduler"].step()
    return total


def main() -> None:
    args = options()
    # `kill -USR1` shows where a rank stands that does not move.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    session = keepstep.session(build_with(args))
    torch_seed_for_this_rank(args)
    _session.append(session)
    ends: list[float] = []
    passes = 1 + args.steps * args.accumulate * args.batch * dist.get_world_size() // args.samples
    for batches in session.steps(
        accumulate=args.accumulate, passes=passes + 1, max_steps=lambda: last_step(args)
    ):
        with session.attempt():
            train_step(session.parts, batches, args.parallel)
            if args.step_seconds:
                time.sleep(args.step_seconds)
        if args.times and not session.rehearsing:
            ends.append(time.monotonic())
        if args.save_every and session.step % args.save_every == 0 and not session.rehearsing:
            session.save()
        publish_if_asked(session)
        rot_at_rest(session)
    if args.times and dist.get_rank() == 0:
        Path(args.times).write_text(json.dumps(ends))
    if args.looks:
        Path(args.looks, f"looks-{dist.get_rank()}.json").write_text(json.dumps(session.looks))
    if args.result:
        write_result(Path(args.result), session.parts, session.step)
    dist.barrier()


def last_step(args: argparse.Namespace) -> int:
    """The campaign says when to end, well ahead, so that all ranks read it in time."""
    with contextlib.suppress(OSError, ValueError):
        if args.finish_file:
            return int(Path(args.finish_file).read_text())
    return int(args.steps)


def torch_seed_for_this_rank(args: argparse.Namespace) -> None:
    reader, _ = share(args, dist.get_rank(), dist.get_world_size())
    torch.manual_seed(1000 + reader)
    random.seed(1000 + reader)


def write_result(directory: Path, parts: dict[str, Any], steps: int) -> None:
    """Sums of everything that must be the same as without faults."""
    model, optimizer = parts["model"], parts["optimizer"]
    model = model.module if isinstance(model, DistributedDataParallel) else model
    weights = {n: p.detach() for n, p in model.named_parameters()}
    # Once more by number: DDP over a mesh hides those that it cuts.
    weights |= {str(i): p.detach() for i, p in enumerate(parameters_of(optimizer))}
    # Of ZeRO: the optimizer inside, which has the state of this rank's parameters.
    state = getattr(optimizer, "optim", optimizer).state
    moments = {
        f"{i}.{k}": v if isinstance(v, torch.Tensor) else torch.tensor(v)
        for i, p in enumerate(parameters_of(optimizer))
        for k, v in sorted(state.get(p, {}).items())
    }
    result = {
        "steps": steps,
        "weights": digest_of(weights),
        "optimizer": digest_of(moments),
        "scheduler": json.dumps(parts["scheduler"].state_dict(), sort_keys=True),
        "buffers": digest_of(dict(model.named_buffers())),
        "order": int(model.order),
        "rng": hashlib.sha256(raw_bytes(torch.get_rng_state())).hexdigest(),
        "python_rng": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
    }
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"rank-{dist.get_rank()}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.replace(path)


def digest_of(tensors: dict[str, torch.Tensor]) -> str:
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(name.encode())
        total.update(raw_bytes(tensor))
    return total.hexdigest()


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """By address: torch's own way needs NumPy, which it does not bring."""
    local: Any = tensor.detach()
    flat = (local.to_local() if hasattr(local, "to_local") else local).contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size())


if __name__ == "__main__":
    main()
