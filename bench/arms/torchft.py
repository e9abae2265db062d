"""TorchFT: a lighthouse, replica groups under torchrun, a commit per step among those present.

    torchft           timeouts of its own example (group 5 s, manager 30 s) and of its README's
                      lighthouse (join 10 s; heartbeats by default 5 s)
    torchft:tuned     1 s for heartbeats and joining
    torchft:2-1000-500   2 s for groups, 1000 ms for heartbeats, 500 ms for joining

DDP: each rank is a replica group of its own. hsdp: two replica groups, FSDP2 within each, the
manager's allreduce between them. It lives in an environment of its own, made by
`make torchft-venv`: its dependencies are not ours.

In one thing it is treated better than its example does: the place in the data follows the manager's
step, so a discarded attempt is repeated with the same samples and a returning replica goes on where
the others are. What remains lost are the samples of a replica while it is away.

With hsdp its quorum is synchronous. Asynchronous, its default, it asks for the state in a thread
beside the forward pass, and FSDP2 puts its parameters back into shards when it is asked: healthy
replicas then die with each one that joins.

Within a replica group torch's own collectives have torch's own limit, 30 minutes. As in
checkpoint_restart they end after 10 s once the first step is in: a shard that is stopped would hold
its partner, whom TorchFT's timeouts do not reach.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from bench import launch as launching
from bench.arms.arm import Processes, environment_of
from bench.arms.checkpoint_restart import COLLECTIVE_SECONDS, end_hangs
from bench.launch import Launch
from bench.plan import Plan, read
from bench.record import ROOT
from bench.workload.log import HOST
from keepstep.errors import ConfigError

VENV = ROOT / "build" / "torchft-venv"
REPLICAS = 2
"""Replica groups with hsdp."""
RESTARTS_MAX = 1000
GROUP, REPLICA = "KSBENCH_GROUP_SECONDS", "REPLICA_GROUP_ID"
READY_SECONDS_MAX = 180.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    group_seconds: float = 5.0
    heartbeat_ms: int = 5000
    join_ms: int = 10_000
    tick_ms: int = 100


TUNED = "tuned"
VARIANTS = {"": Timeouts(), TUNED: Timeouts(5.0, 1000, 1000)}
"""Tuned: the best of six in bench/results/run-20261117T100907Z.json.gz, where it is 5-1000-1000 and
"tuned" is 1-1000-1000, its predecessor."""
TUNED_UNDER = ("kills", "ddp", "3m")
"""Scenario, workload and size of that sweep."""


def arm(variant: str) -> Torchft:
    return Torchft(variant, timeouts_of(variant))


def tuned_for(arm: str, scenario: str, workload: str, size: str) -> str:
    """Where this arm's timeouts were tuned; "" if it was here, or nowhere."""
    if arm != f"torchft:{TUNED}" or (scenario, workload, size) == TUNED_UNDER:
        return ""
    return f"{TUNED_UNDER[0]}, {TUNED_UNDER[1]} {TUNED_UNDER[2]}"


def collective_seconds(group_seconds: float) -> float:
    """Within a replica group. A healthy shard waits for its partner while that one's group between
    replicas runs out of time."""
    return max(COLLECTIVE_SECONDS, 2 * group_seconds)


def timeouts_of(variant: str) -> Timeouts:
    if variant in VARIANTS:
        return VARIANTS[variant]
    try:
        group, heartbeat, join = map(int, variant.split("-"))
    except ValueError:
        group = heartbeat = join = 0
    if min(group, heartbeat, join) < 1:
        raise ConfigError(f"torchft:{variant}: none, tuned, or GROUP_SECONDS-HEARTBEAT_MS-JOIN_MS")
    return Timeouts(float(group), heartbeat, join)


class Torchft:
    def __init__(self, variant: str, timeouts: Timeouts) -> None:
        self.name = f"torchft:{variant}" if variant else "torchft"
        self.timeouts = timeouts
        self.settings: dict[str, Any] = {
            **asdict(self.timeouts),
            "collective_seconds": collective_seconds(timeouts.group_seconds),
            **versions(),
        }
        self.hosts: tuple[launching.Host, ...] = ()
        self._lighthouse = Processes()
        self._replicas = Processes()

    def refuses(self, plan: Plan) -> str:
        if self.hosts and self._torn(plan):
            return "a replica group has to fit on one host"
        if plan.parallel == "fsdp":
            return "full shard has no replica: TorchFT works across replicas"
        if plan.parallel == "zero1":
            return "ZeroRedundancyOptimizer has collectives of its own inside the step"
        if not (VENV / "bin" / "torchft_lighthouse").exists():
            return f"no {VENV.relative_to(ROOT)}: make it with `make torchft-venv`"
        return ""

    def _torn(self, plan: Plan) -> bool:
        """Whether a replica group would be on more than one host."""
        places = launching.seats(self.hosts, plan.world)
        size = plan.world // groups_of(plan)
        return any(
            len(set(places[first : first + size])) > 1 for first in range(0, plan.world, size)
        )

    def start(self, plan: Plan, launch: Launch) -> None:
        places = launching.seats(self.hosts, plan.world)
        groups = groups_of(plan)
        size = plan.world // groups
        home = "localhost" if places[0] == launching.LOCAL else places[0]
        port = launching.free_port()
        waits = self.timeouts
        lighthouse = [str(VENV / "bin" / "torchft_lighthouse"), "--min_replicas", "1"]
        lighthouse += ["--bind", f"[::]:{port}", "--quorum_tick_ms", str(waits.tick_ms)]
        lighthouse += ["--join_timeout_ms", str(waits.join_ms)]
        lighthouse += ["--heartbeat_timeout_ms", str(waits.heartbeat_ms)]
        around = environment_of(
            plan,
            {
                "TORCHFT_LIGHTHOUSE": f"http://{home}:{port}",
                "NUM_REPLICA_GROUPS": str(groups),
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                GROUP: str(waits.group_seconds),
            },
        )
        log = plan.room / "lighthouse.log"
        self._lighthouse.start(launch, places[0], lighthouse, around, log)
        for group in range(groups):
            host = places[group * size]
            command = [str(VENV / "bin" / "python"), "-m", "torch.distributed.run"]
            command += ["--nnodes", "1", "--nproc-per-node", str(size)]
            command += ["--max-restarts", str(RESTARTS_MAX), "--rdzv-backend", "c10d"]
            command += ["--rdzv-endpoint", f"localhost:{launching.free_port()}"]
            command += ["--rdzv-id", f"{plan.room.name}-{group}"]
            command += ["-m", "bench.arms.torchft", str(plan.file)]
            own = {**around, REPLICA: str(group)}
            log = plan.room / f"replica-{group}.log"
            self._replicas.start(launch, host, command, own, log)

    def ended(self) -> str:
        if any(code is not None for code in self._lighthouse.codes()):
            return "the lighthouse ended"
        return self._replicas.ended()

    def drain(self, rank: int, host: str, pid: int) -> bool:
        # Nothing for it is documented: the process is told to go, and torchrun starts it again.
        return self._replicas.tell_to_go(host, pid)

    def stop(self) -> None:
        self._replicas.stop()
        self._lighthouse.stop()


def groups_of(plan: Plan) -> int:
    return plan.world if plan.parallel == "ddp" else REPLICAS


def versions() -> dict[str, str]:
    """Of what is in its environment; read from the names of the installed packages."""
    found = {}
    for path in VENV.glob("lib/python*/site-packages/*.dist-info"):
        name, _, version = path.name.removesuffix(".dist-info").partition("-")
        if name in ("torch", "torchft_nightly"):
            found[name] = version
    return found


# ---------------------------------------------------------------- inside the workers


def manager_of(group: Any, state: Any, load: Any, sharded: bool) -> Any:
    import torch
    from torchft import Manager
    from torchft.checkpointing.pg_transport import PGTransport

    transport = PGTransport(group, timeout=timedelta(seconds=10), device=torch.device("cpu"))
    return Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load,
        state_dict=state,
        replica_id=f"bench_{os.environ[REPLICA]}",
        timeout=timedelta(seconds=30),
        checkpoint_transport=transport,
        hostname=os.environ.get(HOST) or "localhost",
        use_async_quorum=not sharded,
        # Every replica makes the same weights from the seed; its documents then advise this.
        init_sync=False,
    )


def spread(net: Any, plan: Plan, manager: Any, size: int) -> Any:
    """DDP among all replicas; or FSDP2 within each, and the manager's allreduce between them."""
    if plan.parallel == "ddp":
        from torchft import DistributedDataParallel

        return DistributedDataParallel(manager, net)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule

    from bench.workload import model as made

    def between(reduced: Any) -> None:
        manager.allreduce(reduced).wait()

    made.shard(net, init_device_mesh("cpu", (size,), mesh_dim_names=("shard",)))
    for part in net.modules():
        if isinstance(part, FSDPModule):
            part.set_all_reduce_hook(between)
    return net


def wait_for_all(plan: Plan, rank: int) -> None:
    """At the beginning, so that the first quorum is whole. Who comes back does not wait. A start in
    the truth says less: that one is still building its model."""
    ready = plan.room / "ready"
    ready.mkdir(exist_ok=True)
    (ready / f"rank-{rank}").touch()
    deadline = time.monotonic() + READY_SECONDS_MAX
    while len(list(ready.iterdir())) < plan.world and time.monotonic() < deadline:
        time.sleep(0.02)


def train(plan: Plan) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world
    from torchft import Optimizer, ProcessGroupGloo

    from bench.workload import model as made
    from bench.workload.log import TruthLog, now_ns

    torch.set_num_threads(1)
    # The group's own store and, with hsdp, its shards' collectives.
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    rank = int(os.environ[REPLICA]) * size + dist.get_rank()
    log = TruthLog(plan.truth, rank)
    # Who is about to load can be struck. Keepstep's joiner has its rank once it has state.
    log.start()
    data = made.Windows(plan)
    parts: dict[str, Any] = {}

    def state() -> dict[str, Any]:
        return {name: part.state_dict() for name, part in parts.items()}

    def load(given: dict[str, Any]) -> None:
        for name, part in parts.items():
            part.load_state_dict(given[name])

    seconds = float(os.environ[GROUP])
    group = ProcessGroupGloo(timeout=timedelta(seconds=seconds))
    manager = manager_of(group, state, load, plan.parallel != "ddp")
    model = parts["model"] = spread(made.bare_model(plan, data), plan, manager, size)
    inner = parts["optimizer"] = made.optimizer_of(model, plan)
    optimizer = Optimizer(manager, inner)
    wait_for_all(plan, rank)
    loader, place, loss, limited = made.loader_of(plan, data, rank), -1, 0.0, False
    batches = made.batches_from(loader, 0)
    batch: Any = None
    while manager.current_step() < plan.steps:
        began = now_ns()
        # Who joins is healed here if the quorum is synchronous, and is at the others' step then.
        optimizer.zero_grad()
        step = manager.current_step()
        if step != place:
            if step != place + 1:
                batches = made.batches_from(loader, step)
            batch, place = next(batches), step
        loss = float(made.forward_backward(model, batch, rank, plan))
        marks = made.marks_in(model)
        # What Optimizer.step does, and it does not say what came of it. That the step has moved on
        # says nothing: who was healed and then did not commit is further, too.
        if manager.should_commit():
            inner.step()
            log.step(manager.current_step() - 1, began, batch[2].tolist(), marks, loss)
        if not limited:
            # Torch's own alone: the group between replicas is not among them, and has its limit.
            end_hangs(collective_seconds(seconds), list(_world.pg_map))
            limited = True
    log.end(manager.current_step(), made.digest_of(model), loss, data.windows)
    manager.shutdown(wait=False)
    # Threads of its own are left behind, and a barrier would wait for replicas that are away.
    os._exit(0)


if __name__ == "__main__":
    train(read(sys.argv[1]))
