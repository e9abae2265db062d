"""How many agents one orchestrator carries: connections, heartbeats, incidents, a failover.

    python -m bench.agents [--agents 12500] [--seconds 120] [--quick]

One real orchestrator process, and in a process of its own the load: that many connections, each an
agent of 8 slots (bench/agents_load.py). One job of 2,048 nodes and 60 jobs of 16 nodes run on them.

    1  all connect
    2  an incident each second in one of the small jobs, for two minutes
    3  incidents in the large job: how long until its generation order is with 2,048 agents
    4  nodes that fall silent with their connections open
    5  the leader is killed and another takes over: how long until all are back

Processor time and memory of the orchestrator are read from /proc. The load shares the machine: with
two cores it has one of them, and what it measures is no better than its own loop, whose worst delay
is shown too.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import record
from keepstep.cli.client import Client
from keepstep.errors import KeepstepError
from keepstep.model import JobId, JobSpec

SLOTS = 8
LARGE = "large"
LARGE_NODES = 2048
SMALL_NODES = 16
SMALL_JOBS = 60
LARGE_STRIKES = 5
HUSHES = 3
LIMITS = {
    "ordered_p99": 0.25,
    "reform_p99": 1.0,
    "silent_most": 5.0,
    "back_seconds": 60.0,
    "cores": 1.0,
    "memory_gib": 1.5,
}


@dataclass
class Usage:
    """What a process has used, by /proc."""

    seconds: float
    processor: float

    @staticmethod
    def of(pid: int) -> Usage:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return Usage(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"))

    def cores_since(self, before: Usage) -> float:
        return (self.processor - before.processor) / max(self.seconds - before.seconds, 1e-9)


@dataclass
class Bench:
    """The processes, and what the load has told."""

    directory: Path
    agents: int
    orchestrator: subprocess.Popen[bytes] | None = None
    load: subprocess.Popen[str] | None = None
    news: queue.Queue[dict[str, Any]] = field(default_factory=queue.Queue)
    port: int = 0

    @property
    def token_file(self) -> Path:
        return self.directory / "token"

    def client(self) -> Client:
        token = self.token_file.read_text(encoding="utf-8").strip()
        return Client(f"http://127.0.0.1:{self.port}", token)

    def start_orchestrator(self) -> None:
        """Ready when it answers; always on the same port, which the agents know."""
        port_file = self.directory / "port"
        command = [sys.executable, "-m", "keepstep.orchestrator"]
        command += ["--journal", str(self.directory / "journal.db")]
        command += ["--token-file", str(self.token_file), "--port-file", str(port_file)]
        command += ["--listen", f"127.0.0.1:{self.port}"]
        with (self.directory / "orchestrator.log").open("ab") as log:
            self.orchestrator = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 60.0
        while True:
            try:
                if port_file.exists():
                    self.port = int(port_file.read_text(encoding="utf-8"))
                    self.client().health()
                    return
            except (KeepstepError, ValueError):
                pass
            assert time.monotonic() < deadline, "no orchestrator; see its log"
            assert self.orchestrator.poll() is None, "the orchestrator ended; see its log"
            time.sleep(0.05)

    def start_load(self, seed: int) -> None:
        command = [sys.executable, "-m", "bench.agents_load", "--agents", str(self.agents)]
        command += ["--endpoints", f"http://127.0.0.1:{self.port}", "--seed", str(seed)]
        command += ["--token-file", str(self.token_file)]
        with (self.directory / "load.log").open("ab") as log:
            self.load = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.load is not None
        assert self.load.stdout is not None
        for line in self.load.stdout:
            self.news.put({"at": time.monotonic(), **json.loads(line)})

    def tell(self, **command: object) -> None:
        assert self.load is not None
        assert self.load.stdin is not None
        self.load.stdin.write(json.dumps(command) + "\n")
        self.load.stdin.flush()

    def wait(self, event: str, seconds_max: float, heard: list[dict[str, Any]]) -> dict[str, Any]:
        """The next news of this kind; all others are put into `heard`."""
        deadline = time.monotonic() + seconds_max
        while True:
            left = deadline - time.monotonic()
            try:
                news = self.news.get(timeout=max(left, 0.01))
            except queue.Empty:
                raise TimeoutError(f"no {event} within {seconds_max:g} s") from None
            if news["event"] == event:
                return news
            heard.append(news)

    def drain(self, seconds: float, heard: list[dict[str, Any]]) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                heard.append(self.news.get(timeout=left))
            except queue.Empty:
                return

    def memory_gib(self) -> float:
        assert self.orchestrator is not None
        status = Path(f"/proc/{self.orchestrator.pid}/status").read_text(encoding="utf-8")
        (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) / 2**20

    def usage(self) -> Usage:
        assert self.orchestrator is not None
        return Usage.of(self.orchestrator.pid)

    def close(self) -> None:
        for process in (self.load, self.orchestrator):
            if process is not None:
                process.kill()
                process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


def main() -> int:
    asked = options()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    directory = Path(tempfile.mkdtemp(prefix="ks-agents-"))
    bench = Bench(directory, asked.agents)
    bench.token_file.write_text(secrets.token_hex(16), encoding="utf-8")
    try:
        result = measure(bench, asked)
    except BaseException:
        tail = (directory / "orchestrator.log").read_text(encoding="utf-8")[-3000:]
        print(tail, file=sys.stderr)
        raise
    finally:
        bench.close()
    path = record.keep(
        "agents-quick" if asked.quick else "agents", {"asked": vars(asked), **result}
    )
    print(f"raw: {path.name}")
    return conclude(result["figures"], asked.quick)


def measure(bench: Bench, asked: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, float] = {}
    raw: dict[str, Any] = {}
    heard: list[dict[str, Any]] = []
    bench.start_orchestrator()
    began = time.monotonic()
    bench.start_load(asked.seed)
    bench.wait("all_connected", 300.0, heard)
    figures["connected_seconds"] = time.monotonic() - began
    say(f"{asked.agents} agents connected in {figures['connected_seconds']:.1f} s")
    jobs = submit(bench, asked.agents)
    bench.drain(5.0, heard)

    idle_from = bench.usage()
    bench.drain(10.0, heard)
    figures["idle_cores"] = bench.usage().cores_since(idle_from)
    say(f"idle, heartbeats only: {figures['idle_cores']:.2f} cores")

    raw["incidents"] = incidents(bench, asked.seconds, jobs, figures)
    if asked.agents >= 2 * LARGE_NODES:
        raw["large"] = large(bench, figures)
    raw["silent"] = silences(bench, jobs, figures)
    figures["memory_gib"] = bench.memory_gib()
    failover(bench, figures)
    figures["memory_gib"] = max(figures["memory_gib"], bench.memory_gib())
    return {"figures": figures, "raw": raw}


def submit(bench: Bench, agents: int) -> list[str]:
    client = bench.client()
    small = [f"j{i}" for i in range(min(SMALL_JOBS, agents // (2 * SMALL_NODES)))]
    sizes = dict.fromkeys(small, SMALL_NODES)
    if agents >= 2 * LARGE_NODES:
        sizes[LARGE] = LARGE_NODES
    for name, nodes in sizes.items():
        spec = JobSpec(JobId(name), "train.py", nodes=nodes, ranks_per_node=SLOTS, spares=2)
        client.submit(spec)
    say(f"{len(sizes)} jobs on {sum(sizes.values())} nodes")
    return small


def incidents(
    bench: Bench, seconds: int, jobs: list[str], figures: dict[str, float]
) -> list[dict[str, Any]]:
    """One a second: a worker of a small job dies."""
    heard: list[dict[str, Any]] = []
    bench.tell(do="count")
    counted = bench.wait("counted", 30.0, heard)
    before, began = bench.usage(), time.monotonic()
    for number in range(seconds):
        bench.tell(do="kill", job=jobs[number % len(jobs)])
        bench.drain(began + number + 1.0 - time.monotonic(), heard)
    bench.drain(3.0, heard)
    figures["cores"] = bench.usage().cores_since(before)
    bench.tell(do="count")
    after = bench.wait("counted", 30.0, heard)
    figures["load_cores"] = (after["processor"] - counted["processor"]) / (
        after["at"] - counted["at"]
    )
    figures["load_late_seconds"] = after["late_seconds"]
    figures["beat_seconds"] = after["beat_seconds"]
    ordered = sorted(news["seconds"] for news in heard if news["event"] == "ordered")
    figures["incidents"] = len(ordered)
    figures["ordered_p50"], figures["ordered_p99"] = at(ordered, 0.5), at(ordered, 0.99)
    say(
        f"{len(ordered)} of {seconds} incidents: observation to order p50 "
        f"{figures['ordered_p50'] * 1e3:.0f} ms, p99 {figures['ordered_p99'] * 1e3:.0f} ms; "
        f"orchestrator {figures['cores']:.2f} cores, load {figures['load_cores']:.2f}"
    )
    return [news for news in heard if news["event"] in ("ordered", "reformed", "refused")]


def large(bench: Bench, figures: dict[str, float]) -> list[dict[str, Any]]:
    """A generation order to all nodes of the large job."""
    told = []
    heard: list[dict[str, Any]] = []
    for _ in range(LARGE_STRIKES):
        bench.tell(do="kill", job=LARGE)
        told.append(bench.wait("ordered", 30.0, heard))
        while (news := bench.wait("reformed", 60.0, heard))["job"] != LARGE:
            pass
        told.append(news)
        bench.drain(5.0, heard)
    reformed = [news for news in told if news["event"] == "reformed"]
    figures["reform_nodes"] = min(news["nodes"] for news in reformed)
    figures["reform_p99"] = max(news["p99"] for news in reformed)
    figures["large_ordered_most"] = max(n["seconds"] for n in told if n["event"] == "ordered")
    say(
        f"generation order to {figures['reform_nodes']} agents: p99 at most "
        f"{figures['reform_p99'] * 1e3:.0f} ms over {len(reformed)} incidents; observation to "
        f"order at most {figures['large_ordered_most'] * 1e3:.0f} ms"
    )
    return told


def silences(bench: Bench, jobs: list[str], figures: dict[str, float]) -> list[dict[str, Any]]:
    told = []
    heard: list[dict[str, Any]] = []
    for number in range(HUSHES):
        bench.tell(do="hush", job=jobs[number])
        told.append(bench.wait("ordered", 30.0, heard))
        bench.drain(2.0, heard)
    figures["silent_most"] = max(news["seconds"] for news in told)
    say(f"a silent node is known after {figures['silent_most']:.1f} s at most")
    return told


def failover(bench: Bench, figures: dict[str, float]) -> None:
    """The leader dies; the next one reads the journal; everybody comes back."""
    heard: list[dict[str, Any]] = []
    assert bench.orchestrator is not None
    bench.orchestrator.send_signal(signal.SIGKILL)
    bench.orchestrator.wait()
    began = time.monotonic()
    bench.start_orchestrator()
    figures["takeover_seconds"] = time.monotonic() - began
    wanted = bench.agents - HUSHES
    deadline = began + 180.0
    while True:
        bench.tell(do="count")
        if bench.wait("counted", 60.0, heard)["connected"] >= wanted:
            break
        assert time.monotonic() < deadline, "not all came back"
        time.sleep(0.2)
    # Connected is not yet known: the leader must have stepped everybody's Hello.
    while len(alive(bench)) < wanted:
        assert time.monotonic() < deadline, "not all are known again"
        time.sleep(1.0)
    figures["back_seconds"] = time.monotonic() - began
    say(
        f"after a failover ({figures['takeover_seconds']:.1f} s to answer) all are back in "
        f"{figures['back_seconds']:.1f} s"
    )


def alive(bench: Bench) -> list[str]:
    return list(bench.client().cluster()["connected"])


def at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("inf")


def conclude(figures: dict[str, float], quick: bool) -> int:
    print(f"\n{'figure':<24}{'measured':>12}{'limit':>10}")
    good = True
    for name, value in figures.items():
        limit = LIMITS.get(name)
        mark = "" if limit is None else f"{limit:>10g}" + ("" if value <= limit else "  OVER")
        good = good and (limit is None or value <= limit)
        print(f"{name:<24}{value:>12.3f}{mark}")
    print("holds" if good else "DOES NOT HOLD", "(a try-out)" if quick else "")
    return 0 if good else 1


def say(text: str) -> None:
    print(text, flush=True)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.agents", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--agents", type=int, default=12_500)
    parser.add_argument("--seconds", type=int, default=120, help="of incidents, one each second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a try-out; proves nothing")
    asked = parser.parse_args()
    if asked.quick:
        asked.agents, asked.seconds = min(asked.agents, 500), min(asked.seconds, 10)
    return asked


if __name__ == "__main__":
    sys.exit(main())
