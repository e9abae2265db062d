"""A real orchestrator on a file: the same command typed twice, and a disk without room."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.cli.client import Refusal
from tests.process.test_orchestrator import SECONDS_MAX, Process, spec

pytestmark = pytest.mark.process


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path).start()
    yield process
    process.stop()


def test_the_same_command_typed_while_it_runs_leaves_it_leading(one: Process):
    line = ["--listen", f"127.0.0.1:{one.port}", "--journal", one.journal]
    line += ["--token-file", str(one.directory / "token")]
    second = subprocess.run(
        [sys.executable, "-m", "keepstep.orchestrator", *line],
        capture_output=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert second.returncode == 2
    assert b"cannot listen on" in second.stderr
    assert one.client.submit(spec())["new"]
    assert one.client.health()["term"] == 1
    assert one.process is not None
    assert one.process.poll() is None


def test_an_orchestrator_on_a_full_disk_waits_for_room(one: Process):
    """No file of its may grow for a while, as on a disk that is full."""
    assert one.process is not None
    pid, endless = one.process.pid, resource.RLIM_INFINITY
    full = Path(f"{one.journal}-wal").stat().st_size
    client, answers = one.client, []
    large = spec(arguments=("x" * 4000,) * 60)
    assert full < 240_000
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (full, endless))
    asks = threading.Thread(target=lambda: answers.append(client.submit(large)))
    asks.start()
    try:
        deadline = time.monotonic() + SECONDS_MAX
        while readiness(one) == 200:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert "journal.away" in one.log.read_text(encoding="utf-8")
        assert answers == []
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (endless, endless))
        asks.join(SECONDS_MAX)
    assert answers[0]["new"]
    assert readiness(one) == 200
    assert (one.process.poll(), one.client.health()["term"]) == (None, 1)


def readiness(one: Process) -> int:
    try:
        one.client.ready()
    except Refusal as refused:
        return refused.status
    return 200
