"""Process tests run in a network of their own where that is possible.

torch's store looks up the name of every client. Where a name server is slow or drops queries, each
lookup may take seconds, which is no property of what is tested here. As root the tests move into a
fresh network namespace that has a loopback and nothing else; elsewhere they run where they are.

Torch is imported once for most of them: an agent's preload server is forked from a common one,
which has what the tests' scripts import. Else most of their time would be imports. The launcher's
tests and those of an agent alone do without it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.agent import offspring
from keepstep.agent.forks import DEFAULT_MODULES, preload_environment

CLONE_NEWNET = 0x40000000
OF_SCRIPTS = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.optim")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before any test or fixture: everything started later inherits the namespace."""
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    ip = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if os.geteuid() != 0 or ip is None:
        return
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) == 0:
        subprocess.run([ip, "link", "set", "lo", "up"], check=True, timeout=10)


@pytest.fixture(scope="session", autouse=True)
def common_preload() -> Iterator[None]:
    """In the environment, where agents find it that a test starts with its own environment."""
    # A short path: that of a socket ends at 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="ks-", dir="/tmp"))
    path, log = directory / "preload.sock", directory / "preload.log"
    # Ours, and what bare.py runs there.
    paths = (Path(offspring.HOME).parent, Path(__file__).parents[2])
    own = {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    with log.open("wb") as out:
        server = subprocess.Popen(
            offspring.command(path, (*DEFAULT_MODULES, *OF_SCRIPTS)),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=preload_environment(os.environ) | own,
            start_new_session=True,
        )
    _wait_for_imports(path, server)
    os.environ[offspring.COMMON] = str(path)
    yield
    del os.environ[offspring.COMMON]
    # Else each agent did without it, and nobody would have noticed.
    assert server.poll() is None, f"the common preload server died: {log.read_text()}"
    server.kill()
    server.wait(10)
    shutil.rmtree(directory)


def _wait_for_imports(path: Path, server: subprocess.Popen[bytes]) -> None:
    """They take all of a core, and some tests are about milliseconds."""
    deadline = time.monotonic() + 120.0
    while not path.exists():
        assert server.poll() is None, "the common preload server ended"
        assert time.monotonic() < deadline, "no common preload server"
        time.sleep(0.02)
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(deadline - time.monotonic())
        asking.connect(str(path))
        assert asking.recv(1), "the common preload server ended"
