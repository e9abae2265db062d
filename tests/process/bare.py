"""A job without Keepstep and without faults: what the others are compared with.

Its ranks find what torchrun would give them. They are forked from the tests' common preload server,
because importing torch would take most of their time; test_real_loops.py has plain torchrun.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keepstep.agent import offspring
from keepstep.agent.preload import Exited, Fork, Seen, from_line, to_line

SECONDS_MAX = 120.0


def results(directory: Path, world: int) -> list[dict[str, Any]]:
    """What a script of the tests leaves, by rank."""
    return [json.loads((directory / f"result/rank-{r}.json").read_text()) for r in range(world)]


def run(script: str, world: int, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """The results of all ranks. The same script is run once."""
    return _run(script, world, tuple(sorted(environment.items())))


@functools.cache
def _run(script: str, world: int, environment: tuple[tuple[str, str], ...]) -> list[dict[str, Any]]:
    directory = Path(tempfile.mkdtemp(prefix="ks-bare-"))
    (directory / "script.py").write_text(script)
    ours = {k: v for k, v in os.environ.items() if not k.startswith("KEEPSTEP_")}
    around = {**ours, "OMP_NUM_THREADS": "1", **dict(environment), **_meeting(world)}
    token = secrets.token_hex(4)
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(SECONDS_MAX)
        server.connect(os.environ[offspring.COMMON])
        keys = [f"bare/{token}-{rank}" for rank in range(world)]
        for rank, key in enumerate(keys):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            log = str(directory / f"rank-{rank}.log")
            entry = f"{__name__}:main"
            fork = Fork(key, entry, (), {**around, **own}, str(directory), log)
            server.sendall(to_line(fork))
        codes = _ends(server, keys)
    said = "".join((directory / f"rank-{rank}.log").read_text() for rank in range(world))
    assert codes == dict.fromkeys(keys, 0), said
    found = results(directory, world)
    shutil.rmtree(directory)
    return found


def _meeting(world: int) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**where, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}


def _ends(server: socket.socket, keys: list[str]) -> dict[str, int]:
    codes: dict[str, int] = {}
    with server.makefile("rb") as lines:
        while len(codes) < len(keys):
            message = from_line(lines.readline())
            if isinstance(message, Exited) and message.key in keys:
                codes[message.key] = message.code
                server.sendall(to_line(Seen(message.pid, message.start)))
    return codes


def main() -> int:
    """In the fork."""
    sys.path.insert(0, os.getcwd())
    sys.argv = ["script.py"]
    runpy.run_path("script.py", run_name="__main__")
    return 0
