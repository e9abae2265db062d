"""Keepstep: an orchestrator, an agent per node, one rank per node, warm spares.

    keepstep              spares parked after `keepstep.session(build)` (level 2)
    keepstep:level1       spares that have only imported their modules

Each rank has a node of its own, so that what it alone holds has its second home elsewhere, as in
production. With a hostfile, each host is a node.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from bench import launch as launching
from bench import rig
from bench.arms.arm import ROOT, environment_of
from bench.launch import Launch
from bench.plan import Plan, read
from keepstep.cli.cluster import ClusterPlan, NodePlan, find_job
from keepstep.errors import ConfigError, KeepstepError, Transient
from keepstep.model import JobState

SPARES = 2
GATE_SECONDS_MAX = 3600.0
LEVELS = {"": 2, "level1": 1}


def arm(variant: str) -> Keepstep:
    if variant not in LEVELS:
        raise ConfigError(f"keepstep has no variant {variant!r}: {', '.join(filter(None, LEVELS))}")
    return Keepstep(variant)


class Keepstep:
    def __init__(self, variant: str = "") -> None:
        self.name = f"keepstep:{variant}" if variant else "keepstep"
        self.settings: dict[str, Any] = {"spares": SPARES, "standby_level": LEVELS[variant]}
        self.hosts: tuple[launching.Host, ...] = ()
        self._stack = ExitStack()
        self._rig: rig.Rig | None = None
        self._drained: list[str] = []

    def refuses(self, plan: Plan) -> str:
        if self.hosts:
            return "agents are started by `keepstep run` on each host, not by the bench (yet)"
        return ""

    def start(self, plan: Plan, launch: Launch) -> None:
        level = int(self.settings["standby_level"])
        spec = rig.spec_of(
            plan.room,
            ROOT,
            (str(plan.file),),
            world=plan.world,
            spares=int(self.settings["spares"]),
        )
        around = environment_of(plan)
        spec = replace(
            spec,
            script="bench.arms.keepstep",
            module=True,
            standby_level=level,
            preload=("bench.workload.model",),
            environment={**spec.environment, **around},
        )
        names = rig.node_names(plan.world + int(self.settings["spares"]))
        nodes = [NodePlan(name, 1) for name in names]
        cluster = ClusterPlan(environment=around)
        self._rig = self._stack.enter_context(rig.running(spec, nodes, plan.room, cluster))

    def ended(self) -> str:
        if self._rig is None:
            return "not started"
        try:
            job = find_job(self._rig.cluster.client.cluster(), rig.JOB) or {}
        except Transient:
            return ""
        except KeepstepError as error:
            return f"the orchestrator is gone: {error}"
        if not job.get("over"):
            return ""
        return (
            "all processes ended"
            if job["state"] == JobState.FINISHED
            else f"{job['state']}: {job['detail']}"
        )

    def drain(self, rank: int, pid: int) -> None:
        assert self._rig is not None, "started"
        client = self._rig.cluster.client
        # Who was drained before is through with its maintenance, and may serve again.
        for node in self._drained:
            client.undrain(node, {"why": "bench"})
        self._drained = [self._rig.node_of(rank)]
        client.drain(self._drained[0], {"why": "bench"})

    def stop(self) -> None:
        self._stack.close()
        self._rig = None


# ---------------------------------------------------------------- inside the workers


def train(plan: Plan) -> None:
    import torch
    import torch.distributed as dist

    import keepstep
    from bench.workload import model as made
    from bench.workload.log import TruthLog

    torch.set_num_threads(1)
    data = made.Windows(plan)

    def build(seat: keepstep.Seat) -> dict[str, Any]:
        model = made.spread(made.bare_model(plan, data), plan)
        optimizer = made.optimizer_of(model, plan)
        loader = made.loader_of(plan, data, seat.rank)

        def rehearse(batches: list[Any]) -> None:
            optimizer.zero_grad(set_to_none=True)
            made.forward_backward(model, batches[0], seat.rank, plan)
            made.marks_in(model)
            optimizer.step()

        return {"model": model, "optimizer": optimizer, "loader": loader, "rehearse": rehearse}

    session = keepstep.session(build)
    model, optimizer = session.parts["model"], session.parts["optimizer"]
    rank = dist.get_rank()
    log = TruthLog(plan.truth, rank, lambda: session.busy("gate", seconds_max=GATE_SECONDS_MAX))
    log.start()
    loss = 0.0
    passes = plan.steps // (data.windows // (plan.world * plan.batch)) + 1
    for batch in session.steps(passes=passes, max_steps=plan.steps):
        step, began, marks = session.step, time.monotonic_ns(), []
        with session.attempt():
            optimizer.zero_grad(set_to_none=True)
            loss = float(made.forward_backward(model, batch, rank, plan))
            marks = made.marks_in(model)
            optimizer.step()
        # A failed attempt comes again. One that others finished is in, and so are its samples.
        if session.step > step and not session.rehearsing:
            log.step(step, began, batch[2].tolist(), marks, loss)
    log.end(session.step, made.digest_of(model), loss, data.windows)
    dist.barrier()


if __name__ == "__main__":
    train(read(sys.argv[1]))
