"""Keepstep: an orchestrator, an agent per node, one rank per node, warm spares.

    keepstep              spares parked after `keepstep.session(build)` (level 2)
    keepstep:level1       spares that have only imported their modules

Each rank has a node of its own, so that what it alone holds has its second home elsewhere, as in
production. With a hostfile each host is a node with its slots, all alike; the hosts behind those
that the ranks take are spare. The orchestrator runs where the bench does.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import launch as launching
from bench import rig
from bench.arms.arm import Processes, environment_of
from bench.launch import Launch
from bench.plan import Plan, read
from bench.record import ROOT
from keepstep.agent.offspring import COMMON
from keepstep.cli.cluster import (
    NODES_SECONDS_MAX,
    SYNCHRONOUS,
    ClusterPlan,
    LocalCluster,
    NodePlan,
    find_job,
)
from keepstep.errors import ConfigError, KeepstepError, Transient
from keepstep.model import JobSpec, JobState

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
        self._agents = Processes()
        self._rig: rig.Rig | None = None
        self._drained: list[str] = []

    def refuses(self, plan: Plan) -> str:
        if not self.hosts:
            return ""
        slots = {host.slots for host in self.hosts}
        if len(slots) > 1 or plan.world % self.hosts[0].slots:
            return "all hosts need the same number of slots, and the ranks have to fill them"
        if plan.world // self.hosts[0].slots >= len(self.hosts):
            return "every host has ranks, and none is left as a spare"
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
        if self.hosts:
            self._rig = self._hosted(spec, plan, launch)
            return
        # What a cluster on one machine does by itself.
        self.settings["journal_synchronous"] = os.environ.get(SYNCHRONOUS, "normal")
        names = rig.node_names(plan.world + int(self.settings["spares"]))
        nodes = [NodePlan(name, 1) for name in names]
        cluster = ClusterPlan(environment=around)
        self._rig = self._stack.enter_context(rig.running(spec, nodes, plan.room, cluster))

    def _hosted(self, spec: JobSpec, plan: Plan, launch: Launch) -> rig.Rig:
        """An agent on every host, started as any other arm starts its processes."""
        slots = self.hosts[0].slots
        taken = plan.world // slots
        spares = min(spec.spares, (len(self.hosts) - taken) * slots)
        self.settings["spares"] = spares
        spec = replace(spec, nodes=taken, ranks_per_node=slots, spares=spares)
        # Each host imports torch by itself, as it would alone.
        around = environment_of(plan, {COMMON: ""})
        ours = address_towards([host.name for host in self.hosts])
        there = ClusterPlan(
            listen="0.0.0.0:0", advertise=ours, environment=orchestrators_own(around)
        )
        self.settings["journal_synchronous"] = there.environment[SYNCHRONOUS]
        cluster = self._stack.enter_context(LocalCluster(plan.room / "run", (), there))
        rooms = {host.name: str(cluster.room(host.name)) for host in self.hosts}
        self._stack.callback(self._leave, launch, plan, rooms)
        for name, room in rooms.items():
            command = [sys.executable, "-m", "keepstep.agent"]
            command += ["--orchestrator", cluster.client.url, "--node", name, "--room", room]
            command += ["--address", socket.gethostbyname(name), "--slots", str(slots)]
            command = with_token(cluster.token_file, command)
            self._agents.start(launch, name, command, around, plan.room / f"agent-{name}.log")
        wanted = {host.name for host in self.hosts}
        cluster.wait_until(
            lambda picture: wanted <= set(picture["connected"]), NODES_SECONDS_MAX, "the hosts"
        )
        cluster.client.submit(spec)
        return rig.Rig(cluster)

    def _leave(self, launch: Launch, plan: Plan, rooms: Mapping[str, str]) -> None:
        self._agents.stop()
        # Workers outlive their agent.
        launch.clear(plan.directory)
        for name, room in rooms.items():
            log = plan.room / f"agent-{name}.log"
            launch.start(name, ["rm", "-rf", room], {}, log).wait(30.0)

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

    @property
    def keeper(self) -> rig.Rig | None:
        """While it runs: for who asks whether it saw faults that nobody made."""
        return self._rig

    def drain(self, rank: int, host: str, pid: int) -> bool:
        assert self._rig is not None, "started"
        client = self._rig.cluster.client
        # Who was drained before is through with its maintenance, and may serve again.
        for node in self._drained:
            client.undrain(node, {})
        self._drained = [self._rig.node_of(rank)]
        client.drain(self._drained[0], {"why": "bench"})
        return True

    def stop(self) -> None:
        self._stack.close()
        self._rig = None


def orchestrators_own(around: Mapping[str, str]) -> dict[str, str]:
    """What it has around it beside several machines."""
    # Without the mark: it ends in good order, after everything that bears one.
    unmarked = {name: text for name, text in around.items() if name != launching.MARK}
    # A power cut may leave others with orders that the journal has lost: it waits for the disk.
    return {**unmarked, SYNCHRONOUS: "full"}


def address_towards(hosts: Sequence[str]) -> str:
    """Ours, as all these hosts see it. Nothing is sent."""
    found = set()
    for host in hosts:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((host, 9))
            except OSError as error:
                raise ConfigError(f"hostfile: {host} has no address here: {error}") from None
            found.add(str(probe.getsockname()[0]))
    far = {address for address in found if not address.startswith("127.")}
    if len(far or found) > 1 or (far and far != found):
        raise ConfigError(
            f"hostfile: this machine is {', '.join(sorted(found))} to its hosts, and needs one "
            "address for all of them: give it the name that the others know it by"
        )
    return found.pop()


def with_token(file: Path, command: Sequence[str]) -> list[str]:
    """Read from the storage that the hosts share: a command line shows in `ps`."""
    return ["sh", "-c", 'KEEPSTEP_TOKEN="$(cat "$0")" exec "$@"', str(file), *command]


# ---------------------------------------------------------------- inside the workers


def train(plan: Plan) -> None:
    import torch
    import torch.distributed as dist

    import keepstep
    from bench.workload import model as made
    from bench.workload.log import TruthLog, now_ns

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
        step, began, marks = session.step, now_ns(), []
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
