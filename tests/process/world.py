"""A small world of real processes for the process tests: start, wait, collect, never hang."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait as wait_any
from pathlib import Path

import torch
import torch.distributed as dist

CONTEXT = mp.get_context("forkserver")
# An optimizer's first step imports torch._dynamo: seconds per process, unless the server has it.
CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.device_mesh", "torch.nn.parallel", "torch.optim"]
)
TIMEOUT = timedelta(seconds=30)


def client(port, seconds=60):
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
    )


def _entry(fn, uid, port, implementation, args):
    os.environ["KEEPSTEP_GROUPS"] = implementation
    torch.set_num_threads(1)
    try:
        result = fn(client(port), *args)
        store = client(port, seconds=600)
        store.set(f"result/{uid}", json.dumps({"value": result}))
        # A peer may still be connecting to this process: it has to outlive their last collective.
        store.wait([f"leave/{uid}"])
    except BaseException:
        client(port).set(f"result/{uid}", json.dumps({"error": traceback.format_exc()}))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class World:
    """Processes that share a store which outlives each of them."""

    def __init__(self, implementation="cpp"):
        self.implementation = implementation
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.store = client(self.server.port)
        self.processes = {}

    def start(self, uid, fn, *args):
        process = CONTEXT.Process(
            target=_entry, args=(fn, uid, self.server.port, self.implementation, args)
        )
        process.start()
        self.processes[uid] = process
        return process

    def wait_key(self, key, seconds=60.0):
        self.store.wait([key], timedelta(seconds=seconds))
        return self.store.get(key).decode()

    def wait_death(self, uid, seconds=60.0):
        assert wait_any([self.processes[uid].sentinel], timeout=seconds), f"{uid} did not die"

    def wait_stopped(self, uid, seconds=60.0):
        stat = Path(f"/proc/{self.processes[uid].pid}/stat")
        deadline = time.monotonic() + seconds
        while stat.read_text().rsplit(")", 1)[1].split()[0] != "T":
            assert time.monotonic() < deadline, f"{uid} did not stop"
            time.sleep(0.002)

    def results(self, *uids, seconds=90.0):
        """What each of them returned. None of them ends before all of them have returned."""
        deadline = time.monotonic() + seconds
        values = []
        for uid in uids:
            left = max(0.1, deadline - time.monotonic())
            answer = json.loads(self.wait_key(f"result/{uid}", left))
            assert "error" not in answer, f"process {uid}:\n{answer['error']}"
            values.append(answer["value"])
        for uid in uids:
            self.store.set(f"leave/{uid}", "")
            self.processes[uid].join(max(0.1, deadline - time.monotonic()))
        return values

    def run(self, size, fn, *args, seconds=90.0):
        for rank in range(size):
            self.start(rank, fn, rank, size, *args)
        return self.results(*range(size), seconds=seconds)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
            process.join(5)
