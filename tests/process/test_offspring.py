"""Preload servers that are forked from a common one instead of being started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from keepstep.agent import offspring
from keepstep.cli.cluster import ClusterPlan, LocalCluster, NodePlan
from keepstep.detect import process

pytestmark = pytest.mark.process

SECONDS_MAX = 60.0
NAMESPACE = f"keepstep-{os.getpid()}-offspring"
LAST_PROCESSOR = max(os.sched_getaffinity(0))


@contextmanager
def clustered(run_dir: Path, nodes: list[NodePlan]) -> Iterator[LocalCluster]:
    """With a common server of its own, unlike the other tests' clusters."""
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv(offspring.COMMON)
        patched.setenv("KEEPSTEP_PRELOAD", "torch.distributed")
        with LocalCluster(run_dir, nodes, ClusterPlan(common_preload=True)) as cluster:
            yield cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    pinned = ("taskset", "-c", str(LAST_PROCESSOR))
    nodes = [NodePlan("n0", slots=1), NodePlan("n1", slots=1, prefix=pinned)]
    with clustered(tmp_path / "run", nodes) as cluster:
        cluster.wait_nodes(SECONDS_MAX)
        yield cluster


def common_of(cluster: LocalCluster) -> int:
    return cluster.supervisor.child("preload").pid


def pid_of(cluster: LocalCluster, node: str, what: str = "preload") -> int:
    """Of a node's preload server or store; 0 while it has none."""
    try:
        state = json.loads((cluster.room(node) / "agent-state.json").read_text())
    except FileNotFoundError:
        return 0
    return int(state[what]["pid"]) if state[what] else 0


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def until(holds: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    reading = process.probe(pid)
    return reading is None or reading.state == "Z"


def test_every_node_has_a_server_of_its_own_and_all_were_forked_from_one(
    cluster: LocalCluster,
) -> None:
    common = common_of(cluster)
    servers = {node: pid_of(cluster, node) for node in cluster.nodes}
    assert len({common, *servers.values()}) == 3
    assert {parent_of(pid) for pid in servers.values()} == {common}
    # By their rooms they are found when a node is to be lost, and not the common one.
    for node, pid in servers.items():
        assert {pid, pid_of(cluster, node, "store")} <= set(cluster.processes(node))
        assert common not in cluster.processes(node)
    # Where the agent was put, its server is too.
    assert os.sched_getaffinity(servers["n1"]) == {LAST_PROCESSOR}
    assert os.sched_getaffinity(servers["n0"]) == os.sched_getaffinity(0)


def test_a_node_that_is_lost_leaves_nothing_and_comes_back_by_another_fork(
    cluster: LocalCluster,
) -> None:
    before = [pid_of(cluster, "n0"), pid_of(cluster, "n0", "store")]
    cluster.lose_node("n0")
    assert all(gone(pid) for pid in before)
    cluster.return_node("n0")
    until(lambda: pid_of(cluster, "n0", "store"), "the store of n0")
    assert pid_of(cluster, "n0") not in before
    assert parent_of(pid_of(cluster, "n0")) == common_of(cluster)


def test_without_the_common_server_an_agent_starts_one_by_itself(cluster: LocalCluster) -> None:
    before = pid_of(cluster, "n0")
    cluster.supervisor.kill("preload", restart=False)
    os.kill(before, signal.SIGKILL)
    until(lambda: pid_of(cluster, "n0") != before, "another preload server")
    assert parent_of(pid_of(cluster, "n0")) == cluster.pid_of("n0")
    # The other node's is an orphan now, and serves on.
    orphan, store = pid_of(cluster, "n1"), pid_of(cluster, "n1", "store")
    os.kill(store, signal.SIGKILL)
    until(lambda: pid_of(cluster, "n1", "store") not in (0, store), "another store")
    assert pid_of(cluster, "n1") == orphan
    assert parent_of(pid_of(cluster, "n1", "store")) == orphan


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root and network namespaces")
def test_a_fork_lives_in_its_agents_network(tmp_path: Path) -> None:
    subprocess.run(["ip", "netns", "add", NAMESPACE], check=True, timeout=10)
    try:
        prefix = ("ip", "netns", "exec", NAMESPACE)
        # It does not reach its orchestrator from there, and has a server all the same.
        with clustered(tmp_path / "run", [NodePlan("n0", slots=1, prefix=prefix)]) as cluster:
            until(lambda: (cluster.room("n0") / "preload.sock").exists(), "a preload server")
            server, agent = pid_of(cluster, "n0"), cluster.pid_of("n0")
            assert parent_of(server) == common_of(cluster)
            for kind in ("net", "mnt"):
                assert namespace(server, kind) == namespace(agent, kind)
                assert namespace(server, kind) != namespace(os.getpid(), kind)
    finally:
        subprocess.run(["ip", "netns", "delete", NAMESPACE], check=True, timeout=10)


def namespace(pid: int, kind: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{kind}")


def run(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**os.environ, "PYTHONPATH": str(Path(offspring.HOME).parent)},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )


def test_a_fork_that_comes_too_late_ends(tmp_path: Path) -> None:
    """As after an agent's death, or when it has given up and started a server by itself."""
    (tmp_path / "preload.wanted").write_text("newer")
    us = process.probe(os.getpid())
    assert us is not None
    code = "import sys; from keepstep.agent import offspring; sys.exit(offspring.main())"
    for token, start in (("older", us.start), ("newer", us.start + 1)):
        words = [str(tmp_path), token, f"{us.pid}/{start}", offspring.HOME]
        ended = run(code, *words, "--socket", str(tmp_path / "preload.sock"))
        assert (ended.returncode, ended.stderr) == (0, "")
        assert not (tmp_path / "preload.sock").exists()


ASK = """
import asyncio, os, sys
from pathlib import Path
from keepstep.agent import offspring
from keepstep.agent.room import Room
os.nice(int(sys.argv[2]))
room = Room(Path(sys.argv[1]), "127.0.0.1")
asked = offspring.ask(os.environ[offspring.COMMON], room, ["--socket", sys.argv[3]], {})
print(asyncio.run(asked).pid)
"""


def test_who_has_another_priority_gets_no_fork_and_takes_its_wish_back(tmp_path: Path) -> None:
    """A child of the common server would not be what a child of the agent's is."""
    asked = run(ASK, str(tmp_path), "0", str(tmp_path / "s"))
    assert asked.stdout, asked.stderr
    os.kill(int(asked.stdout), signal.SIGKILL)
    refused = run(ASK, str(tmp_path), "1", str(tmp_path / "s"))
    assert "another priority" in refused.stderr
    assert not (tmp_path / "preload.wanted").exists()
