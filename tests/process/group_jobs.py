"""What the processes of test_groups.py run. Kept apart: children import it by name."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import mmap
import os
import random
import resource
import select
import signal
import struct
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from keepstep.training.groups import (
    Groups,
    GroupsBroken,
    decode_log,
    encode_log,
    merge_logs,
)
from keepstep.training.reset import reset_ddp
from tests.process.world import TIMEOUT, client

WORLD = 4
VICTIM = 1
STEPS = 5
FATAL_STEP = 2
OPTIONS = {
    "default": {},
    "bucket_view": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


def groups_of(store, rank, size, **more):
    groups = Groups()
    groups.init("gloo", rank, size, store, TIMEOUT, **more)
    return groups


def formed(store, size):
    """A rank that is ready must not tear the connections of one that is still connecting."""
    store.barrier("formed", size)


class Net(nn.Module):
    def __init__(self, unused):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])
        self.norm = nn.BatchNorm1d(64)
        self.extra = nn.Linear(64, 64) if unused else None

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.norm(x)


def build(option):
    torch.manual_seed(7)
    model = DistributedDataParallel(Net(option == "unused"), bucket_cap_mb=0.02, **OPTIONS[option])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    return model, optimizer


def one_step(model, optimizer, rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 64, generator=generator)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def state_of(model, optimizer):
    tensors = [p.data for p in model.parameters()]
    for p in model.parameters():
        if "momentum_buffer" not in optimizer.state[p]:
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        tensors.append(optimizer.state[p]["momentum_buffer"])
    return tensors


def weights(model):
    whole = hashlib.sha256()
    for p in model.parameters():
        whole.update(p.detach().numpy().tobytes())
    return whole.hexdigest()


def watch(port, groups, told):
    """The news of a new generation, from outside the data plane."""

    def wait():
        own = client(port)
        own.wait(["generation/1"], timedelta(seconds=60))
        groups.abort(1)
        told.set()

    threading.Thread(target=wait, daemon=True).start()


def recover(store, groups, model, optimizer, step, rank):
    """Re-form and bring the newcomer to the survivors' boundary."""
    if rank != VICTIM:
        store.set(f"log/{rank}", encode_log(groups.log()))
    survivors = [r for r in range(WORLD) if r != VICTIM]
    groups.replay(merge_logs([decode_log(store.get(f"log/{r}").decode()) for r in survivors]))
    groups.reform(lambda: store, "job", 1, connect_seconds_max=20)
    reset_ddp(model)
    at = torch.tensor([step])
    if rank == survivors[0]:
        for tensor in [at, *state_of(model, optimizer)]:
            groups.side.send([tensor], VICTIM, 1).wait()
    elif rank == VICTIM:
        for tensor in [at, *state_of(model, optimizer)]:
            groups.side.recv([tensor], survivors[0], 1).wait()
    return int(at)


def kill_me():
    os.kill(os.getpid(), signal.SIGKILL)


def stop_me():
    os.kill(os.getpid(), signal.SIGSTOP)


def member(store, rank, option, end):
    """One rank of the first generation; `end` is how the victim ends: kill, stop or never."""
    groups = groups_of(store, rank, WORLD)
    told = threading.Event()
    watch(store.port, groups, told)
    model, optimizer = build(option)
    step = 0
    while step < STEPS:
        groups.reset_backward()
        if end != "never" and rank == VICTIM and step == FATAL_STEP:
            groups.before_nth(2, kill_me if end == "kill" else stop_me)
        try:
            one_step(model, optimizer, rank, step)
        except RuntimeError:
            assert told.wait(30), "no news of a new generation"
            store.set(f"out/{rank}", "1")
            step = recover(store, groups, model, optimizer, step, rank)
            continue
        step += 1
    return weights(model)


def joiner(store, option, tentative):
    """A spare: rehearses alone under a tentative rank, then takes the victim's seat."""
    groups = groups_of(store, tentative, WORLD, rehearse=True)
    model, optimizer = build(option)
    # Two iterations rebuild the buckets, a static graph needs three.
    for warm in range(3 if option == "static" else 2):
        one_step(model, optimizer, tentative, warm)
    store.set("rehearsed", "1")
    store.wait(["generation/1"], timedelta(seconds=60))
    groups.reseat(VICTIM)
    groups.adopt(model)
    step = recover(store, groups, model, optimizer, -1, VICTIM)
    while step < STEPS:
        one_step(model, optimizer, VICTIM, step)
        step += 1
    return weights(model)


# ---------------------------------------------------------------- smaller claims


def blocked_collective(store, rank, size, full=False):
    """Not even a file is to be had at the abort, if `full`."""
    groups = groups_of(store, rank, size)
    if rank == 1:
        store.wait(["freed"], timedelta(seconds=30))
        return 0.0
    entered = threading.Event()
    began = []

    def abort():
        entered.wait(30)
        if full:
            fill_table()
        began.append(time.monotonic())
        groups.abort()

    threading.Thread(target=abort, daemon=True).start()
    work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
    entered.set()
    try:
        work.wait()
    except RuntimeError:
        seconds = time.monotonic() - began[0]
        store.set("freed", "1")
        return seconds
    return -1.0


def fill_table():
    """From now on every number of a file is in use."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    with contextlib.suppress(OSError):
        while True:
            os.open(os.devnull, os.O_RDONLY)


def blocked_construction(store, rank, size):
    """Rank 1 of the next generation is here, and then never connects."""
    groups = groups_of(store, rank, size)
    if rank == 1:
        dist.PrefixStore("p/1/here", store).add("count", 1)
    formed(store, size)
    if rank == 1:
        store.wait(["cancelled"], timedelta(seconds=30))
        return 0.0
    began = []

    def abort():
        until = time.monotonic() + 30
        while groups.prepared(1) is None and time.monotonic() < until:
            time.sleep(0.01)
        # From there to the connecting, of which nobody tells.
        time.sleep(0.3)
        began.append(time.monotonic())
        groups.abort()

    threading.Thread(target=abort, daemon=True).start()
    try:
        groups.reform(lambda: store, "p", 1, connect_seconds_max=20)
    except GroupsBroken:
        seconds = time.monotonic() - began[0]
        store.set("cancelled", "1")
        return seconds
    return -1.0


def broken_until_reform(store, rank, size):
    groups = groups_of(store, rank, size)
    formed(store, size)
    tensor = torch.ones(1)
    groups.abort()
    groups.abort()
    refused = 0
    for attempt in (
        lambda: dist.all_reduce(tensor),
        dist.barrier,
        lambda: dist.send(tensor, 1 - rank),
        lambda: dist.new_group([0, 1]),
        lambda: groups.side,
    ):
        try:
            attempt()
        except GroupsBroken:
            refused += 1
    groups.reform(lambda: store, "p", 1, connect_seconds_max=30)
    dist.all_reduce(tensor)
    return [refused, tensor.item(), len(groups.log())]


def late_abort(store, rank, size):
    groups = groups_of(store, rank, size)
    formed(store, size)
    groups.abort(3)
    refused = False
    try:
        groups.reform(lambda: store, "p", 2)
    except GroupsBroken:
        refused = True
    groups.reform(lambda: store, "p", 3, connect_seconds_max=30)
    groups.abort(3)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return [refused, groups.broken, tensor.item()]


def prepared_ahead(store, rank, size):
    """Generations are begun while the one before is in use; some are given up, some come late."""
    groups = groups_of(store, rank, size)
    opened = []

    def opens(name):
        def open_store():
            opened.append(name)
            return client(store.port)

        return open_store

    def total(group=None):
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        return tensor.item()

    formed(store, size)
    groups.prepare(opens("first"), "p", 1)
    totals = {total() for _ in range(100)}
    groups.abort(1)
    groups.reform(opens("again"), "p", 1)
    totals.add(total())
    # One rank is never told of generation 2: the others wait for it in vain, until 3 comes.
    if rank > 0:
        groups.prepare(opens("in vain"), "p", 2)
    totals.add(total())
    groups.abort(3)
    began = time.monotonic()
    refused = False
    try:
        groups.reform(opens("refused"), "p", 2)
    except GroupsBroken:
        refused = True
    freed = time.monotonic() - began
    if rank > 0:
        groups.prepare(opens("early"), "p", 3)
    groups.reform(opens("late"), "p", 3)
    totals.add(total())
    # A group made since then: what was prepared does not know it.
    groups.prepare(opens("other groups"), "p", 4)
    later = dist.new_group(list(range(size)))
    totals.add(total(later))
    differs = groups.prepared(4) != groups.log_digest()
    groups.abort(4)
    groups.reform(opens("met"), "p/met", 4)
    totals |= {total(), total(later)}
    return [sorted(totals), refused, freed < 5.0, differs, sorted(opened)]


def lazy_group(store, rank, size):
    """Ranks 0 and 1 made groups that rank 2, a joiner, has not heard of."""
    if rank == 2:
        groups = groups_of(store, rank, size, rehearse=True)
        early = dist.new_group([0, 2])
        dist.all_reduce(torch.ones(1), group=early)
        groups.replay(decode_log(store.get("log").decode()))
        groups.replay(decode_log(store.get("log").decode()))
    else:
        groups = groups_of(store, rank, 2)  # a world of two stands for the old generation
        groups.close()
        groups = groups_of(dist.PrefixStore("again", store), rank, size, rehearse=True)
        early = dist.new_group([0, 2])
        lazy = dist.new_group([1, 2])
        temporary = dist.new_group([0, 1, 2])
        dist.destroy_process_group(temporary)
        if rank == 0:
            store.set("log", encode_log(merge_logs([groups.log()])))
    groups.reform(lambda: store, "p", 1, connect_seconds_max=20)
    if rank == 2:
        lazy = dist.new_group([1, 2])  # the user's code comes to it only now
        dist.new_group([0, 1, 2])
    after = dist.new_group([0, 1, 2])  # lazily made after the reform, everywhere
    total = torch.ones(1)
    if rank in (1, 2):
        dist.all_reduce(total, group=lazy)
    everyone = torch.ones(1)
    dist.all_reduce(everyone, group=after)
    return [total.item(), everyone.item(), after.group_name, [r.name for r in groups.log()]]


def interrupted_new_group(store, rank, size):
    """Rank 0 is inside new_group when the generation ends; rank 1 has not come to it."""
    groups = groups_of(store, rank, size)
    formed(store, size)
    if rank == 0:

        def abort():
            store_of_thread = client(store.port)
            store_of_thread.wait(["inside"], timedelta(seconds=30))
            groups.abort(1)

        threading.Thread(target=abort, daemon=True).start()
        store.set("inside", "1")
        try:
            dist.new_group([0, 1])
        except GroupsBroken:
            pass
        store.set("log", encode_log(groups.log()))
    else:
        store.wait(["log"], timedelta(seconds=30))
        groups.abort(1)
        groups.replay(decode_log(store.get("log").decode()))
    groups.reform(lambda: store, "p", 1, connect_seconds_max=20)
    group = dist.new_group([0, 1])
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return [group.group_name, total.item(), len(groups.log())]


def fifty_reforms(store, rank, size):
    groups = groups_of(store, rank, size)
    dist.new_group([0, 1])
    seconds = []

    def held():
        return len(list(Path("/proc/self/fd").iterdir())), len(
            list(Path("/proc/self/task").iterdir())
        )

    for generation in range(1, 51):
        if generation % 2:
            # The last allreduce is over on both sides: an abort would tear it from the slower one.
            store.barrier(f"over/{generation}", size)
            groups.abort(generation)
        began = time.monotonic()
        groups.reform(lambda: store, "p", generation, connect_seconds_max=30)
        seconds.append(time.monotonic() - began)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == size
        groups.drop_retired()  # as the session does after its first step
        if generation == 5:
            settle()
            early = held()
    settle()
    return [early, held(), sorted(seconds)[25]]


def settle():
    deadline = time.monotonic() + 10
    while any(t.name.startswith("keepstep-") for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def hooks(store, rank, size):
    groups = groups_of(store, rank, size)
    memory = mmap.mmap(-1, 64)
    groups.bind_counter(memory, 16)
    model, _ = build("default")
    seen = []
    groups.on_backward(lambda: seen.append("first"))
    groups.before_nth(2, lambda: seen.append("second"))
    x = torch.ones(8, 64)
    model(x).sum().backward()  # one bucket in torch's first iteration
    per_step = []
    for _ in range(2):
        groups.reset_backward()
        seen.append("step")
        model(x).sum().backward()
        per_step.append(groups.launched_in_backward)
    before = groups.launched
    dist.all_reduce(torch.ones(1))
    groups.side.allreduce([torch.ones(1)]).wait()
    counted = groups.launched - before
    shared = struct.unpack_from("=Q", memory, 16)[0]

    def refuse():
        raise ValueError("the mirror is late")

    groups.on_backward(refuse)
    groups.reset_backward()
    try:
        model(x).sum().backward()
        raised = ""
    except ValueError as error:
        raised = str(error)
    # Both have left their last collective: an abort would tear it from the slower one.
    store.barrier("over", size)
    groups.abort()
    groups.close()
    return [seen, per_step, counted, shared == before + 1, raised]


def rehearsal(store):
    groups_of(store, 2, 4, rehearse=True)
    found = {}
    for option in OPTIONS:
        model, optimizer = build(option)
        for step in range(3):
            one_step(model, optimizer, 2, step)
        found[option] = all(bool(p.isfinite().all()) for p in model.parameters())
    gathered = [torch.zeros(2) for _ in range(4)]
    dist.all_gather(gathered, torch.ones(2))
    flat = torch.zeros(8)
    dist.all_gather_into_tensor(flat, torch.ones(2))
    mine = torch.zeros(2)
    dist.reduce_scatter_tensor(mine, torch.arange(8.0))
    objects = [None] * 4
    dist.all_gather_object(objects, "me")
    theirs = ["mine"]
    dist.broadcast_object_list(theirs, src=0)
    dist.barrier()
    dist.send(torch.ones(1), 0)
    dist.recv(torch.ones(1), 0)
    dist.monitored_barrier()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    norm = nn.SyncBatchNorm(4)
    found["norm"] = norm.num_features == 4 and mesh.size() == 4
    return [
        found,
        sum(map(sum, gathered)).item(),
        flat.sum().item(),
        mine.tolist(),
        objects,
        theirs,
    ]


def reach_of_timeouts(store, rank, size):
    """The short limit on connecting must not become the limit of later operations."""
    groups = groups_of(store, rank, size)
    store.barrier("ready", size)
    groups.reform(lambda: store, "p", 1, connect_seconds_max=2.0)
    tensor = torch.ones(1)
    if rank == 0:
        time.sleep(2.5)
        dist.send(tensor, 1)
        time.sleep(2.5)
    else:
        dist.recv(tensor, 0)
    dist.all_reduce(tensor)
    return tensor.item()


def aborts_amid_launches(store, rank, size, rounds):
    """Collectives as fast as they go, and an abort at some moment of one of them, again and again.

    Returns the longest time from an abort until the training thread was free.
    """
    groups = groups_of(store, rank, size)
    formed(store, size)
    moment = random.Random(rank)
    buffer = torch.zeros(256)
    slowest = 0.0
    for generation in range(1, rounds + 1):
        store.barrier(f"round/{generation}", size)
        struck = []

        def abort(generation=generation, struck=struck):
            time.sleep(moment.uniform(0.002, 0.006))
            struck.append(time.monotonic())
            groups.abort(generation)

        aborter = threading.Thread(target=abort, daemon=True)
        aborter.start()
        try:
            while True:
                dist.broadcast(buffer, 0)
        except RuntimeError:
            freed = time.monotonic()
        aborter.join()
        slowest = max(slowest, freed - struck[0])
        store.barrier(f"out/{generation}", size)
        groups.reform(lambda: store, "again", generation)
    return slowest


def death_amid_launches(store, rank, size, seed):
    """Collectives as fast as they go, every rank the root in turn, until one of them is killed.

    Returns the time from the abort that follows until the training thread was free.
    """
    groups = groups_of(store, rank, size)
    store.set(f"pid/{rank}", str(os.getpid()))
    formed(store, size)
    victim = os.pidfd_open(int(store.get(f"pid/{VICTIM}")))
    chance = random.Random(seed)
    fatal, launches, late = chance.randrange(3, 30), chance.randrange(size), chance.uniform(0, 4e-4)
    struck = []

    def abort():
        select.select([victim], [], [])
        time.sleep(0.01)
        struck.append(time.monotonic())
        groups.abort(1)

    aborter = threading.Thread(target=abort, daemon=True)
    aborter.start()
    buffers = [torch.zeros(2048) for _ in range(size)]
    try:
        for step in itertools.count():
            works = []
            for root in range(size):
                works.append(dist.broadcast(buffers[root], root, async_op=True))
                if rank == VICTIM and (step, root) == (fatal, launches):
                    time.sleep(late)
                    os.kill(os.getpid(), signal.SIGKILL)
            for work in works:
                work.wait()
    except RuntimeError:
        freed = time.monotonic()
    aborter.join()
    return freed - struck[0]


def lost_operation(store, rank, size, kind):
    """An abort that ends no socket: as if Gloo had lost the operation that this rank waits for.

    Returns how long rank 0 waited on, with which words it was freed, and what all add up to then.
    """
    groups = groups_of(store, rank, size)
    model = DistributedDataParallel(nn.Linear(4, 4))
    buffer = torch.zeros(4)
    formed(store, size)
    freed, why = 0.0, ""
    if rank == 0:
        groups._formation.cancel = lambda: None
        struck = []

        def abort():
            time.sleep(0.3)
            struck.append(time.monotonic())
            groups.abort(1)

        threading.Thread(target=abort, daemon=True).start()
        try:
            if kind == "backward":
                model(buffer).sum().backward()
            else:
                dist.broadcast(buffer, 1)
        except RuntimeError as error:
            freed, why = time.monotonic() - struck[0], str(error)
        store.set("freed", "")
    store.wait(["freed"])
    # The operation is still where it was: nobody waits for it, and it holds nothing up.
    groups.reform(lambda: store, "again", 1)
    began = time.monotonic()
    groups.drop_retired()
    for _ in range(100):
        time.sleep(0.01)
        buffer.fill_(rank + 1.0)
        dist.all_reduce(buffer)
    return freed, why, buffer.tolist(), time.monotonic() - began


def works(store, rank, size):
    """What collectives give back: by wait, by future and by result; and whether it is let go."""
    groups_of(store, rank, size)
    whole, part = torch.arange(4.0), torch.zeros(2)
    dist.reduce_scatter_tensor(part, whole)
    gathered = torch.zeros(4)
    dist.all_gather_into_tensor(gathered, part)
    summed = torch.ones(2)
    work = dist.all_reduce(summed, async_op=True)
    work.wait(timedelta(seconds=20))
    found = [gathered.tolist(), work.result()[0].tolist(), work.is_completed(), work.is_success()]
    sparse = torch.sparse_coo_tensor([[0]], [1.0], (2,))
    dist.all_reduce(sparse)
    found.append(sparse.to_dense().tolist())
    future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
    found.append([tensor.tolist() for tensor in future.wait()])
    kept = weakref.ref(summed)
    del work, summed
    # Gloo's own thread may be about to let go of it.
    deadline = time.monotonic() + 20.0
    while kept() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    found.append(kept() is None)
    formed(store, size)
    return found
