"""The engine alone: torch.distributed with nothing around it. Never struck; the rest's measure.

bare      one process per rank
"""

from __future__ import annotations

import sys
from typing import Any

from bench import launch as launching
from bench.arms.arm import Processes, environment_of, module_command
from bench.launch import Launch
from bench.plan import Plan, read
from keepstep.errors import ConfigError


def arm(variant: str) -> Bare:
    if variant:
        raise ConfigError(f"bare has no variant {variant!r}")
    return Bare()


class Bare:
    def __init__(self) -> None:
        self.name = "bare"
        self.settings: dict[str, Any] = {}
        self.hosts: tuple[launching.Host, ...] = ()
        self._processes = Processes()

    def refuses(self, plan: Plan) -> str:
        return ""

    def start(self, plan: Plan, launch: Launch) -> None:
        places = launching.seats(self.hosts, plan.world)
        master = "127.0.0.1" if places[0] == launching.LOCAL else places[0]
        around = {
            "MASTER_ADDR": master,
            "MASTER_PORT": str(launching.free_port()),
            "WORLD_SIZE": str(plan.world),
        }
        for rank, host in enumerate(places):
            own = environment_of(plan, {**around, "RANK": str(rank)})
            command = module_command("bench.arms.bare", plan)
            self._processes.start(launch, host, command, own, plan.room / f"rank-{rank}.log")

    def ended(self) -> str:
        return self._processes.ended()

    def drain(self, rank: int, host: str, pid: int) -> bool:
        raise AssertionError("the bare engine is never struck")

    def stop(self) -> None:
        self._processes.stop()


# ---------------------------------------------------------------- inside the workers


def train(plan: Plan) -> None:
    import torch
    import torch.distributed as dist

    from bench.workload import model as made
    from bench.workload.log import TruthLog, now_ns

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = made.Windows(plan)
    model = made.spread(made.bare_model(plan, data), plan)
    optimizer = made.optimizer_of(model, plan)
    log = TruthLog(plan.truth, rank)
    log.start()
    loss = 0.0
    batches = made.batches_from(made.loader_of(plan, data, rank), 0)
    for step in range(plan.steps):
        began = now_ns()
        batch = next(batches)
        optimizer.zero_grad(set_to_none=True)
        loss = float(made.forward_backward(model, batch, rank, plan))
        marks = made.marks_in(model)
        optimizer.step()
        log.step(step, began, batch[2].tolist(), marks, loss)
    log.end(plan.steps, made.digest_of(model), loss, data.windows)
    dist.barrier()


if __name__ == "__main__":
    train(read(sys.argv[1]))
