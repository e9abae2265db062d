"""How many agents one orchestrator carries: connections, heartbeats, incidents, a failover.

    python -m bench.agents [--agents 12500] [--seconds 120] [--quick]

Two real orchestrator processes on one PostgreSQL, one leads and one follows, and in a process of
its own the load: that many connections with mutual TLS, each an agent of 8 slots that shows its own
node's certificate (bench/agents_load.py). One job of 2,048 nodes and 60 jobs of 16 run on them.

    1  all connect
    2  an incident each second in one of the small jobs, for two minutes
    3  incidents in the large job: how long until its generation order is with 2,048 agents
    4  nodes that fall silent with their connections open
    5  both orchestrators are stopped for 20 s and woken: nobody may be fenced for it
    6  the leader is killed, the follower takes over: how long until all are back

Processor time and memory of the leader are read from /proc, in each of 2, 3 and 4; of the two
orchestrators the larger memory counts. The load, the follower and the database share the machine:
what the load measures is no better than its own loop, whose worst delay is shown too. Exit 0 only
if all limits hold at the size that was asked for, every incident was answered, and the generation
order was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import resource
import secrets
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import agents_certs, record, rig
from keepstep.chaos.database import DURABLE, PostgresServer, programs
from keepstep.cli.client import TLS_DIRECTORY, Client
from keepstep.errors import KeepstepError
from keepstep.model import JobId, JobSpec

SLOTS = 8
LARGE = "large"
LARGE_NODES = 2048
SMALL_NODES = 16
SMALL_JOBS = 60
LARGE_STRIKES = 5
HUSHES = 3
FROZEN_SECONDS = 20.0
SETTLED_SECONDS = 15.0
"""After all are back: whoever is taken for lost is fenced by then."""
SECONDS_MAX = 60.0
TLS = "KEEPSTEP_ORCHESTRATOR_TLS_DIRECTORY"
LIMITS = {
    "ordered_p99": 0.25,
    "reform_p99": 1.0,
    "silent_most": 5.0,
    "frozen_fences": 0.0,
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


class Orchestrator:
    """One process that leads or follows."""

    def __init__(self, bench: Bench, name: str, journal: str) -> None:
        self._port_file = bench.directory / f"{name}.port"
        self._token = bench.token_file.read_text(encoding="utf-8").strip()
        command = [sys.executable, "-m", "keepstep.orchestrator", "--listen", "127.0.0.1:0"]
        command += ["--journal", journal, "--token-file", str(bench.token_file)]
        command += ["--port-file", str(self._port_file)]
        environment = {**os.environ, TLS: str(bench.certificates / "orchestrator")}
        with bench.log.open("ab") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._port_file.read_text(encoding='utf-8').strip()}"

    def client(self) -> Client:
        return Client(self.url, self._token)

    def status(self) -> str:
        assert self.process.poll() is None, "an orchestrator ended; see its log"
        try:
            return str(self.client().health()["status"]) if self._port_file.exists() else ""
        except (KeepstepError, OSError):
            return ""

    def memory_gib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) / 2**20


@dataclass
class Bench:
    """The processes, and what the load has told."""

    directory: Path
    agents: int
    kept: Path | None = None
    """Where certificates are, or are to be for the next run."""
    orchestrators: list[Orchestrator] = field(default_factory=list)
    """Who leads is the first."""
    load: subprocess.Popen[str] | None = None
    news: queue.Queue[dict[str, Any]] = field(default_factory=queue.Queue)

    @property
    def token_file(self) -> Path:
        return self.directory / "token"

    @property
    def certificates(self) -> Path:
        return self.kept or self.directory / "pki"

    @property
    def log(self) -> Path:
        return self.directory / "orchestrator.log"

    def client(self) -> Client:
        return self.orchestrators[0].client()

    def prepare(self) -> None:
        self.token_file.write_text(secrets.token_hex(16), encoding="utf-8")
        nodes = [f"n{number:05d}" for number in range(self.agents)]
        say(f"{self.agents} certificates, 10 to 40 ms for each that is missing")
        agents_certs.make(self.certificates, nodes)
        os.environ[TLS_DIRECTORY] = str(self.certificates / f"operator-{agents_certs.OPERATOR}")

    def start_orchestrators(self, journal: str) -> None:
        for name, status in (("one", "leading"), ("two", "following")):
            self.orchestrators.append(Orchestrator(self, name, journal))
            self.until(self.orchestrators[-1], status)

    def until(self, orchestrator: Orchestrator, status: str) -> None:
        deadline = time.monotonic() + SECONDS_MAX
        while orchestrator.status() != status:
            assert time.monotonic() < deadline, f"nobody is {status}; see the log"
            time.sleep(0.05)

    def start_load(self, seed: int) -> None:
        command = [sys.executable, "-m", "bench.agents_load", "--agents", str(self.agents)]
        command += ["--endpoints", ",".join(one.url for one in self.orchestrators)]
        command += ["--token-file", str(self.token_file), "--seed", str(seed)]
        command += ["--certificates", str(self.certificates / "nodes")]
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
        return max(one.memory_gib() for one in self.orchestrators)

    def usage(self) -> Usage:
        return Usage.of(self.orchestrators[0].process.pid)

    def close(self) -> None:
        for process in (self.load, *(one.process for one in self.orchestrators)):
            if process is not None:
                process.kill()
                process.wait()


def main() -> int:
    asked = options()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    where = programs()
    assert where is not None, "install the Debian package postgresql"
    with rig.scratch("agents") as directory:
        bench = Bench(directory, asked.agents, asked.certificates)
        bench.prepare()
        with PostgresServer(where, settings=DURABLE) as server:
            try:
                bench.start_orchestrators(server.database())
                result = measure(bench, asked)
            finally:
                bench.close()
        path = record.keep(
            "agents-quick" if asked.quick else "agents",
            {"asked": {**vars(asked), "certificates": ""}, **result},
        )
        print(f"raw: {path.name}")
        if code := conclude(result["figures"], asked):
            # Its logs are left behind.
            raise SystemExit(code)
    return 0


def measure(bench: Bench, asked: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, float] = {}
    raw: dict[str, Any] = {}
    heard: list[dict[str, Any]] = []
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
    busy = ("incident_cores", "large_cores", "silent_cores")
    figures["cores"] = max(figures[name] for name in busy if name in figures)
    figures["memory_gib"] = bench.memory_gib()
    frozen(bench, figures)
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
    figures["incident_cores"] = bench.usage().cores_since(before)
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
        f"leader {figures['incident_cores']:.2f} cores, load {figures['load_cores']:.2f}"
    )
    return [news for news in heard if news["event"] in ("ordered", "reformed", "refused")]


def large(bench: Bench, figures: dict[str, float]) -> list[dict[str, Any]]:
    """A generation order to all nodes of the large job."""
    told = []
    heard: list[dict[str, Any]] = []
    before = bench.usage()
    for _ in range(LARGE_STRIKES):
        bench.tell(do="kill", job=LARGE)
        told.append(bench.wait("ordered", 30.0, heard))
        while (news := bench.wait("reformed", 60.0, heard))["job"] != LARGE:
            pass
        told.append(news)
        bench.drain(5.0, heard)
    figures["large_cores"] = bench.usage().cores_since(before)
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
    before = bench.usage()
    for number in range(HUSHES):
        bench.tell(do="hush", job=jobs[number])
        told.append(bench.wait("ordered", 30.0, heard))
        bench.drain(2.0, heard)
    figures["silent_cores"] = bench.usage().cores_since(before)
    figures["silent_most"] = max(news["seconds"] for news in told)
    say(f"a silent node is known after {figures['silent_most']:.1f} s at most")
    return told


def frozen(bench: Bench, figures: dict[str, float]) -> None:
    """Nobody hears anybody for a while: the silence is the orchestrators' own."""
    heard: list[dict[str, Any]] = []
    bench.tell(do="count")
    before = bench.wait("counted", 60.0, heard)["fences"]
    for one in bench.orchestrators:
        one.process.send_signal(signal.SIGSTOP)
    time.sleep(FROZEN_SECONDS)
    for one in bench.orchestrators:
        one.process.send_signal(signal.SIGCONT)
    began = time.monotonic()
    deadline = began + SECONDS_MAX
    # One that wakes takes itself for the leader until its next write.
    while sorted(one.status() for one in bench.orchestrators) != ["following", "leading"]:
        assert time.monotonic() < deadline, "nobody leads; see the log"
        time.sleep(0.05)
    bench.orchestrators.sort(key=lambda one: one.status() != "leading")
    all_back(bench, began + 180.0)
    figures["frozen_back_seconds"] = time.monotonic() - began
    bench.drain(SETTLED_SECONDS, heard)
    bench.tell(do="count")
    figures["frozen_fences"] = bench.wait("counted", 60.0, heard)["fences"] - before
    say(
        f"stopped for {FROZEN_SECONDS:g} s and woken: all are back in "
        f"{figures['frozen_back_seconds']:.1f} s, {figures['frozen_fences']:.0f} fences"
    )


def failover(bench: Bench, figures: dict[str, float]) -> None:
    """The leader dies; at the end of its lease the follower leads, and everybody goes there."""
    old = bench.orchestrators.pop(0)
    old.process.send_signal(signal.SIGKILL)
    old.process.wait()
    began = time.monotonic()
    bench.until(bench.orchestrators[0], "leading")
    figures["takeover_seconds"] = time.monotonic() - began
    all_back(bench, began + 180.0)
    figures["back_seconds"] = time.monotonic() - began
    say(
        f"after a failover ({figures['takeover_seconds']:.1f} s to lead) all are back in "
        f"{figures['back_seconds']:.1f} s"
    )


def all_back(bench: Bench, deadline: float) -> None:
    heard: list[dict[str, Any]] = []
    wanted = bench.agents - HUSHES
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


def alive(bench: Bench) -> list[str]:
    return list(bench.client().cluster()["connected"])


def at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("inf")


def conclude(figures: dict[str, float], asked: argparse.Namespace) -> int:
    print(f"\n{'figure':<24}{'measured':>12}{'limit':>10}")
    good = True
    if figures["incidents"] < asked.seconds:
        good = False
        print(f"only {figures['incidents']:.0f} of {asked.seconds} incidents were answered in time")
    if figures.get("reform_nodes", 0) < LARGE_NODES and not asked.quick:
        good = False
        print(f"no generation order to {LARGE_NODES} agents: it takes {2 * LARGE_NODES} of them")
    for name, value in figures.items():
        limit = LIMITS.get(name)
        mark = "" if limit is None else f"{limit:>10g}" + ("" if value <= limit else "  OVER")
        good = good and (limit is None or value <= limit)
        print(f"{name:<24}{value:>12.3f}{mark}")
    size = f"with {asked.agents} agents"
    print(f"{size}: {'holds' if good else 'DOES NOT HOLD'}{' (a try-out)' if asked.quick else ''}")
    return 0 if good else 1


def say(text: str) -> None:
    print(text, flush=True)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.agents", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--agents", type=int, default=12_500)
    parser.add_argument("--seconds", type=int, default=120, help="of incidents, one each second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--certificates", type=Path, metavar="DIR", help="keep them for next time")
    parser.add_argument("--quick", action="store_true", help="a try-out; proves nothing")
    asked = parser.parse_args()
    if asked.quick:
        asked.agents, asked.seconds = min(asked.agents, 500), min(asked.seconds, 10)
    return asked


if __name__ == "__main__":
    sys.exit(main())
