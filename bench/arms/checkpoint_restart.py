"""torchrun and checkpoints: everybody dies with the first, and all start again at the last save.

    checkpoint_restart               a save every 20 steps, training waits for it
    checkpoint_restart:async         the same, written beside training (DCP's async_save)
    checkpoint_restart:sync@5        another interval, in steps

One torchrun with --max-restarts, and torch.distributed.checkpoint. The variable
TORCH_DISABLE_SHARE_RDZV_TCP_STORE is set: without it restarts fail on torch 2.13 (stale keys in the
shared store). Restarts are on the same node and at once, so waiting for a new node is not in the
figure: that favours this arm.

After the first step its collectives end after 10 s, as a user would have it who knows his steps:
torch's own 30 minutes would leave a rank that hangs to whoever watches. torchrun then waits 30 s
for a stopped process to go before it kills it; for restarts that is fixed in its code.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

from bench import launch as launching
from bench.arms.arm import Processes, environment_of
from bench.launch import Launch
from bench.plan import Plan, read
from keepstep.errors import ConfigError

EVERY_STEPS = 20
RESTARTS_MAX = 1000
KEPT = 2
"""Saves that stay: the newest may not be whole."""
EVERY, MODE = "KSBENCH_EVERY", "KSBENCH_MODE"
COLLECTIVE_SECONDS = 10.0
"""More than any wait of a healthy rank for another, a save's included."""


def arm(variant: str) -> CheckpointRestart:
    mode, _, every = variant.partition("@")
    if mode not in ("", "sync", "async") or (every and not every.isdigit()):
        raise ConfigError(f"checkpoint_restart:{variant}: sync or async, then @STEPS")
    return CheckpointRestart(mode or "sync", int(every or EVERY_STEPS))


class CheckpointRestart:
    def __init__(self, mode: str, every: int) -> None:
        self.name = f"checkpoint_restart:{mode}@{every}"
        self.settings: dict[str, Any] = {
            "save": mode,
            "every_steps": every,
            "collective_seconds": COLLECTIVE_SECONDS,
        }
        self.hosts: tuple[launching.Host, ...] = ()
        self._processes = Processes()

    def refuses(self, plan: Plan) -> str:
        return "" if plan.parallel != "zero1" else "DCP does not save ZeroRedundancyOptimizer"

    def start(self, plan: Plan, launch: Launch) -> None:
        places = launching.seats(self.hosts, plan.world)
        hosts = list(dict.fromkeys(places))
        first = "127.0.0.1" if hosts[0] == launching.LOCAL else hosts[0]
        around = environment_of(
            plan,
            {
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                EVERY: str(self.settings["every_steps"]),
                MODE: str(self.settings["save"]),
            },
        )
        port = launching.free_port()
        for host in hosts:
            command = [sys.executable, "-m", "torch.distributed.run"]
            command += ["--nnodes", str(len(hosts)), "--nproc-per-node", str(places.count(host))]
            command += ["--max-restarts", str(RESTARTS_MAX), "--rdzv-backend", "c10d"]
            command += ["--rdzv-endpoint", f"{first}:{port}", "--rdzv-id", plan.room.name]
            command += ["-m", "bench.arms.checkpoint_restart", str(plan.file)]
            self._processes.start(launch, host, command, around, plan.room / f"torchrun-{host}.log")

    def ended(self) -> str:
        return self._processes.ended()

    def drain(self, rank: int, host: str, pid: int) -> bool:
        # torchrun knows no drain: the worker is told to go, and that is a failure like any other.
        return self._processes.tell_to_go(host, pid)

    def stop(self) -> None:
        self._processes.stop()


# ---------------------------------------------------------------- inside the workers


class Saves:
    """Checkpoints of one run."""

    def __init__(self, directory: Path, mode: str, rank: int) -> None:
        import torch.distributed as dist

        self.directory = directory
        self.mode = mode
        self.rank = rank
        # An asynchronous save talks while training does: it needs a group of its own.
        self.group = dist.new_group(backend="gloo") if mode == "async" else None
        self._under_way: Any = None

    def newest(self) -> tuple[int, Path] | None:
        """A save is whole once its metadata is there: DCP writes that last."""
        whole = [path.parent for path in self.directory.glob("step-*/.metadata")]
        found = [(int(path.name.split("-")[1]), path) for path in whole]
        return max(found) if found else None

    def load(self, model: Any, optimizer: Any) -> int:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        found = self.newest()
        if found is None:
            return 0
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=str(found[1]))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return found[0]

    def save(self, step: int, model: Any, optimizer: Any) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        path = str(self.directory / f"step-{step}")
        if self.mode == "sync":
            dcp.save(state, checkpoint_id=path)
        else:
            self.wait()
            self._under_way = dcp.async_save(state, checkpoint_id=path, process_group=self.group)
        self._forget(step)

    def wait(self) -> None:
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    def _forget(self, step: int) -> None:
        if self.rank == 0:
            whole = sorted(self.directory.glob("step-*"), key=lambda p: int(p.name.split("-")[1]))
            for old in [p for p in whole if int(p.name.split("-")[1]) < step][:-KEPT]:
                shutil.rmtree(old, ignore_errors=True)


def end_hangs(seconds: float, groups: Iterable[Any]) -> None:
    """From now on a collective of these groups fails after so long. Not before the first step:
    ranks start at different times. Groups of a mesh do not take the world's limit: each is told."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    for group in groups:
        _set_pg_timeout(timedelta(seconds=seconds), group)


def train(plan: Plan) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    from bench.workload import model as made
    from bench.workload.log import TruthLog, now_ns

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    log = TruthLog(plan.truth, rank)
    # Who is about to load can be struck. Keepstep's joiner has its rank once it has state.
    log.start()
    data = made.Windows(plan)
    model = made.spread(made.bare_model(plan, data), plan)
    optimizer = made.optimizer_of(model, plan)
    saves = Saves(plan.room / "checkpoints", os.environ[MODE], rank)
    first, every, loss = saves.load(model, optimizer), int(os.environ[EVERY]), 0.0
    batches = made.batches_from(made.loader_of(plan, data, rank), first)
    for step in range(first, plan.steps):
        began = now_ns()
        batch = next(batches)
        optimizer.zero_grad(set_to_none=True)
        loss = float(made.forward_backward(model, batch, rank, plan))
        marks = made.marks_in(model)
        optimizer.step()
        log.step(step, began, batch[2].tolist(), marks, loss)
        if step == first:
            # Not the saves' own: writing beside training may take as long as it likes.
            end_hangs(COLLECTIVE_SECONDS, [g for g in _world.pg_map if g is not saves.group])
        if (step + 1) % every == 0 and step + 1 < plan.steps:
            saves.save(step + 1, model, optimizer)
    log.end(plan.steps, made.digest_of(model), loss, data.windows)
    saves.wait()
    dist.barrier()


if __name__ == "__main__":
    train(read(sys.argv[1]))
