"""The script of test_real_loops.py: a training loop as people write it, features by switch.

    amp         bf16 autocast, a loss scaler that skips some steps, gradient clipping
    checkpoint  activation checkpointing of a block with BatchNorm and draws of Python's random
    two         two optimizers, with a scheduler each, one of which looks at the loss
    compile     torch.compile
    workers     torchdata's StatefulDataLoader, whose workers draw random numbers
    evaluate    an evaluation with collectives between attempts
    tail        a collective at the very end of an attempt
    save        torch.distributed.checkpoint's async_save between attempts

It runs under `keepstep run` and, for the reference, under plain torchrun. A rank dies where a file
`die-<rank>-<step>-<place>` asks for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import keepstep

FEATURES = set(os.environ["LOOP_FEATURES"].split(","))
STEPS = 36
GO_AT = 6
"""Here everybody waits until the test has its spares."""
SKIPPED = (11, 18)
SAMPLES, BATCH = 96, 4
WAIT_SECONDS_MAX = 60.0
UNDER_KEEPSTEP = "KEEPSTEP_SOCKET" in os.environ


class Augmented(Dataset[Any]):
    """Each sample is a function of its index, and of what the worker draws."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        if "workers" in FEATURES:
            x = x + 0.1 * torch.randn(8) + 0.1 * random.random() + 0.1 * numpy.random.rand()
        return x.float(), index


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.linear = nn.Linear(16, 16)
        self.drop = nn.Dropout(0.2)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.drop(torch.tanh(self.linear(self.norm(h))))
        # Checkpointing draws this twice: torch puts back its own generator only.
        return out if "compile" in FEATURES else out * (1.0 + 0.1 * random.random())


class Net(nn.Module):
    order: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 16)
        self.block = Block()
        self.leave = nn.Linear(16, 8)
        self.register_buffer("order", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.order.mul_(0.5).add_(x.double().sum())
        h = self.enter(x)
        if "checkpoint" in FEATURES and self.training:
            h = checkpoint(self.block, h, use_reentrant=False)
        else:
            h = self.block(h)
        out: torch.Tensor = self.leave(h)
        return out


def build() -> dict[str, Any]:
    torch.manual_seed(0)
    # Small buckets, several of them; a compiled model wants its first not to be the largest.
    bucket_mb = None if "compile" in FEATURES else 0.0005
    model: Any = DistributedDataParallel(Net(), bucket_cap_mb=bucket_mb)
    optimizers = [torch.optim.AdamW(model.module.leave.parameters(), lr=1e-2)]
    rest = [p for n, p in model.module.named_parameters() if not n.startswith("leave")]
    if "two" in FEATURES:
        optimizers.append(torch.optim.SGD(rest, lr=1e-2, momentum=0.9))
    else:
        optimizers[0].add_param_group({"params": rest})
    parts = {f"optimizer{i}": each for i, each in enumerate(optimizers)}
    parts["cosine"] = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[0], STEPS)
    # Changes in few steps, and the scaler of a loop without AMP in none.
    parts["plateau"] = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[-1], patience=2)
    parts["scaler"] = torch.amp.GradScaler("cpu", 1024.0, enabled="amp" in FEATURES)
    return {"model": model, **parts}


def make_loader(rank: int, world: int) -> Any:
    data: Any = Augmented()
    sampler: Any = DistributedSampler(data, world, rank, shuffle=True, seed=3, drop_last=True)
    if "workers" not in FEATURES:
        return DataLoader(data, BATCH, sampler=sampler)
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(keepstep.seeded(data, seed=9), BATCH, sampler=sampler, num_workers=2)


def die(session: keepstep.Session, place: str) -> None:
    path = Path(f"die-{dist.get_rank()}-{session.step}-{place}")
    if UNDER_KEEPSTEP and not session.rehearsing and path.exists():
        path.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def train(session: keepstep.Session, run: Any, batches: list[Any]) -> float:
    """One step: the body of an attempt."""
    parts = session.parts
    model, scaler = parts["model"], parts["scaler"]
    optimizers = [part for name, part in parts.items() if name.startswith("optimizer")]
    for optimizer in optimizers:
        optimizer.zero_grad()
    total = torch.zeros(())
    for number, (x, _) in enumerate(batches):
        last = number == len(batches) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            with torch.autocast("cpu", torch.bfloat16, enabled="amp" in FEATURES):
                loss = (run(x) - x).float().pow(2).mean() / len(batches)
            if "amp" in FEATURES and session.step in SKIPPED:
                loss = loss * torch.inf
            die(session, "forward")
            scaler.scale(loss).backward()
            total += loss.detach()
    die(session, "backward")
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    die(session, "updated")
    parts["cosine"].step()
    # A fault in a collective after this is survived only if all that is registered has changed.
    if "tail" in FEATURES or session.step % 5 == 4:
        parts["plateau"].step(float(session.step))
    if "tail" in FEATURES:
        dist.all_reduce(total)
    return float(total)


def evaluate(session: keepstep.Session, run: Any, seen: list[str]) -> None:
    model = session.parts["model"]
    model.eval()
    die(session, "evaluation")
    with torch.no_grad():
        # Opened anew each time, it draws a seed for its workers from the global generator.
        for x, _ in DataLoader(Augmented(), 32, shuffle=True):
            total = run(x).pow(2).sum()
            dist.all_reduce(total)
    seen.append(f"{session.step} {total.item().hex()}")
    model.train()


def result(session: keepstep.Session, seen: list[str]) -> None:
    model = session.parts["model"].module
    sums: dict[str, Any] = {
        "steps": session.step,
        "weights": digest([p for _, p in sorted(model.named_parameters())]),
        "buffers": {n: digest([b]) for n, b in model.named_buffers()},
        "rng": digest([torch.get_rng_state()]),
        "python": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
        "mode": model.training,
    }
    for name, part in session.parts.items():
        if isinstance(part, torch.optim.Optimizer):
            parameters = [p for group in part.param_groups for p in group["params"]]
            state = [part.state[p][k] for p in parameters for k in sorted(part.state[p])]
            sums[name] = digest([s for s in state if isinstance(s, torch.Tensor)])
        elif name != "model":
            sums[name] = repr(part.state_dict())
    Path("result").mkdir(exist_ok=True)
    Path(f"result/rank-{dist.get_rank()}.json").write_text(json.dumps(sums))
    Path(f"result/seen-{dist.get_rank()}.json").write_text(json.dumps(seen))


def digest(tensors: list[torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().contiguous()
        whole.update(ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()))
    return whole.hexdigest()


def wait_to_go(session: keepstep.Session) -> None:
    if not UNDER_KEEPSTEP or session.rehearsing or session.step != GO_AT:
        return
    with session.busy("wait", seconds_max=WAIT_SECONDS_MAX):
        until(Path("go").exists)


class Writer(FileSystemWriter):
    """Where a test asks for it, rank 1 dies in the middle of a save, and rank 0 goes on with its
    part only after the groups have been re-formed."""

    def __init__(self, path: str, session: keepstep.Session) -> None:
        super().__init__(path)
        self.session, self.step = session, session.step
        self.generation = session.generation

    def write_data(self, plan: Any, planner: Any) -> Any:
        asked = Path(f"die-1-{self.step}-save")
        if UNDER_KEEPSTEP and asked.exists() and dist.get_rank() == 0:
            Path("writing").touch()
            until(lambda: self.session.generation > self.generation)
            Path("outlived").touch()
        elif UNDER_KEEPSTEP and asked.exists():
            until(Path("writing").exists)
            asked.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write_data(plan, planner)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not holds():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def main() -> None:
    torch.set_num_threads(1)
    keepstep.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    beside = dist.new_group(backend="gloo")
    parts = build()
    run = parts["model"]
    if "compile" in FEATURES:
        run = torch.compile(run, backend="aot_eager")
    session = keepstep.session(**parts)
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    save = None
    seen: list[str] = []
    passes = 1 + STEPS * 2 * BATCH * world // SAMPLES
    for batches in session.steps(
        make_loader(rank, world), accumulate=2, passes=passes, max_steps=STEPS
    ):
        wait_to_go(session)
        with session.attempt():
            train(session, run, batches)
        if "evaluate" in FEATURES and session.due(8):
            with session.evaluation(seconds_max=60):
                evaluate(session, run, seen)
        if "save" in FEATURES and session.due(6):
            if save is not None:
                save.wait()
            path = f"checkpoint-{session.step}"
            state = {"model": parts["model"].module.state_dict()}
            future = dcp.async_save(
                state, storage_writer=Writer(path, session), process_group=beside
            )
            save = session.saving(future, path)
    if save is not None:
        save.wait()
    result(session, seen)


if __name__ == "__main__":
    main()
