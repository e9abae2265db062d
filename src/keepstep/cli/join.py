"""`keepstep join`: this machine becomes a node of a cluster that is there, until it is told to go.

Its slots serve whoever needs them: a job that waits for nodes, ranks that leave another node,
standbys. It runs an agent and puts it back when it dies; a lost orchestrator is waited for.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import signal
import socket
import sys
import time
from pathlib import Path

from keepstep import private
from keepstep.cli.client import RUNS, Refusal, from_environment
from keepstep.cli.cluster import ClusterPlan, LocalCluster, NodePlan
from keepstep.cli.follow import Away
from keepstep.cli.run import address_towards, labels_of
from keepstep.config import LauncherConfig, load
from keepstep.errors import ConfigError, Transient

LOOK_SECONDS = 1.0
EPILOG = """\
a cluster of several machines, in this order:
  # a token, readable by you only; copy it to each machine
  (umask 077; head -c 32 /dev/urandom | base64 > token)
  # on one machine
  python -m keepstep.orchestrator --listen 10.0.0.1:7070 \\
      --journal journal.db --token-file token
  # the same on each machine that shall hold ranks: it joins, and runs the job;
  # the directories are on storage that all of them share
  keepstep run --orchestrator http://10.0.0.1:7070 --token-file token \\
      --job j --nnodes 2 --nproc-per-node 4 \\
      --state-dir /shared/j --log-dir /shared/logs train.py
  # on each further machine: a spare
  keepstep join --orchestrator http://10.0.0.1:7070 --token-file token \\
      --slots 4
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "join",
        help="make this machine a node of a running cluster: more room",
        description="Make this machine a node of a running cluster, until Ctrl-C or SIGTERM.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EPILOG,
    )
    option = parser.add_argument
    option("--orchestrator", default="", metavar="URL", help="http://HOST:PORT")
    option("--token-file", default="", metavar="FILE", help="the cluster's token")
    option("--node", default="", metavar="NAME", help="this node's name (default: the host's)")
    option("--slots", type=int, default=1, metavar="N", help="processes it may hold (default 1)")
    option("--address", default="", metavar="IP", help="where other nodes reach this one")
    option(
        "--label",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="what it shares with others: rack, switch, nvlink_domain",
    )
    option("--run-dir", type=Path, metavar="DIR", help=f"its logs (default ./{RUNS}/node-NAME)")
    option("--config", type=Path, metavar="TOML", help="settings; see python -m keepstep.config")
    parser.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    client = from_environment(asked.orchestrator, asked.token_file)
    client.cluster()  # A wrong address or token is an error now, not silence for ever.
    if asked.slots < 1:
        raise ConfigError(f"--slots is {asked.slots}; give 1 or more")
    name = asked.node or host_name()
    address = asked.address or address_towards(client.url)
    run_dir = (asked.run_dir or Path.cwd() / RUNS / f"node-{name}").resolve()
    run_dir.mkdir(parents=True, exist_ok=True)
    token_file = run_dir / "token"
    with private.replacing(token_file) as file:
        file.write(f"{client.token}\n".encode())
    config = load(LauncherConfig, asked.config, os.environ)
    node = NodePlan(name, asked.slots, address, labels=labels_of(asked.label))
    plan = ClusterPlan(
        join=client.url, token_file=token_file, config_file=asked.config, launcher=config
    )
    with LocalCluster(run_dir, [node], plan) as cluster:
        return _stay(cluster, name, config)


def host_name() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())


def _stay(cluster: LocalCluster, name: str, config: LauncherConfig) -> int:
    signals: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {n: signal.signal(n, lambda got, _: signals.put(signal.Signals(got))) for n in numbers}
    try:
        return _until_told(cluster, name, signals, config)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _until_told(
    cluster: LocalCluster,
    name: str,
    signals: queue.SimpleQueue[signal.Signals],
    config: LauncherConfig,
) -> int:
    away, joined, warned = Away(config.unreachable_seconds_max), False, False
    while True:
        cluster.supervisor.check()
        try:
            connected = _is_there(cluster, name)
            if text := away.answered():
                _say(text)
            if connected and not joined:
                joined = True
                _say(f"{name} has joined {cluster.client.url}; Ctrl-C leaves")
        except (Transient, Refusal) as error:
            # Never given up: a node that serves is there when the orchestrator is back.
            text, _ = away.missed(time.monotonic(), str(error), working=cluster.working())
            if text:
                _say(text)
        try:
            number = signals.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            continue
        held = _held(cluster)
        if not held or warned:
            _say(f"{number.name}: {name} leaves")
            return 0
        warned = True
        _say(
            f"{name} holds {held}: `keepstep drain {name} --wait` moves them away; then, or to "
            f"leave at once as after a fault, {number.name} again"
        )


def _is_there(cluster: LocalCluster, name: str) -> bool:
    """Whether it is we who are connected under this name: a stranger may have it."""
    picture = cluster.client.cluster()
    boot = cluster.room(name) / "boot"
    known = picture["nodes"].get(name, {}).get("boot")
    return name in picture["connected"] and boot.exists() and boot.read_text() == known


def _held(cluster: LocalCluster) -> str:
    """Which ranks live on our node, for people. Needs no orchestrator."""
    held = [f"rank {rank} of {job}" for job, rank in cluster.ranks()]
    return ", ".join(held[:4]) + (f" and {len(held) - 4} more" if len(held) > 4 else "")


def _say(text: str) -> None:
    print(f"keepstep: {text}", file=sys.stderr, flush=True)
