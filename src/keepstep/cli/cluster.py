"""A whole cluster of real processes on one machine: for `keepstep run`, the demo, the lab, tests.

    with LocalCluster(run_dir, [NodePlan("n0", slots=2), NodePlan("n1", slots=2)]) as cluster:
        cluster.client.submit(spec)
        cluster.kill_agent("n0")          # restarted at once; adopts its workers
        cluster.lose_node("n1")           # agent, workers and memory gone together
        cluster.return_node("n1")         # comes back empty
        job = cluster.wait("job", seconds_max=60)

Each node has an agent of its own and a room of its own on tmpfs; with a command prefix such as
`ip netns exec NS` it also has a network of its own. Everything that dies unasked is restarted.

    <run_dir>/token  orchestrator.port  orchestrator.url  journal.db  *.log
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from keepstep import private
from keepstep.agent import offspring
from keepstep.agent import room as agent_room
from keepstep.agent.environment import SECRETS
from keepstep.agent.forks import preload_environment, preload_modules
from keepstep.cli.client import Client
from keepstep.cli.supervise import Program, Supervisor
from keepstep.config import LauncherConfig, OrchestratorConfig, load
from keepstep.errors import ConfigError, KeepstepError, Permanent, Transient, Unreachable

ORCHESTRATOR = "orchestrator"
NODES_SECONDS_MAX = 120.0
"""An agent joins once its preload server has imported torch: many on few cores take long."""
SYNCHRONOUS = "KEEPSTEP_ORCHESTRATOR_JOURNAL_SYNCHRONOUS"
JOURNAL = "KEEPSTEP_ORCHESTRATOR_JOURNAL"
TLS = "KEEPSTEP_ORCHESTRATOR_TLS_DIRECTORY"
HOLDER = "KEEPSTEP_ORCHESTRATOR_JOURNAL_HOLDER"
MARK = "KEEPSTEP_NODE_ROOM"
"""In the environment of what is started on a node, so that losing it misses nothing. What is forked
on it has the room in its command line."""


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node to be."""

    name: str
    slots: int
    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    """Put before the agent's command: `ip netns exec NS`, `taskset -c 1`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    """What it shares with other nodes: rack, switch, nvlink_domain."""
    speaks: bool = False
    """The workers' lines go to our standard output instead of the agent's log."""


@dataclass(frozen=True, slots=True)
class Further:
    """One more orchestrator to be."""

    listen: str = "127.0.0.1:0"
    prefix: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """What the nodes have in common."""

    listen: str = "127.0.0.1:0"
    advertise: str = ""
    """The host under which agents and we reach the orchestrator, if it is not the one it listens
    on (0.0.0.0)."""
    prefix: tuple[str, ...] = ()
    """Put before the orchestrator's command."""
    followers: tuple[Further, ...] = ()
    """Further orchestrators on the same journal, which then has to be a database."""
    join: str = ""
    """URL of an orchestrator that is already there; then none is started."""
    token_file: Path | None = None
    """Of the cluster that is joined; a new one is made otherwise."""
    config_file: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    launcher: LauncherConfig = LauncherConfig()
    common_preload: bool = False
    """Torch is imported once for all nodes. Where that is measured, each has to do it by itself."""


class LocalCluster:
    """Starts the processes, puts back what dies, and can break any part on purpose."""

    def __init__(
        self, run_dir: Path, nodes: Sequence[NodePlan], plan: ClusterPlan = ClusterPlan()
    ) -> None:
        self.run_dir = run_dir.resolve()
        self.plan = plan
        self.nodes = {node.name: node for node in nodes}
        self._rooms = rooms_directory(self.run_dir)
        self._supervisor: Supervisor | None = None
        self._locks: dict[Path, BinaryIO] = {}
        self._url = plan.join
        self._client: Client | None = None
        self._common: Path | None = None
        """The socket of the server that imports for all nodes; None: each does it by itself, or
        asks a server that somebody else has told it of."""

    # ---------------------------------------------------------------- life

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Orchestrator first, then all agents at once; returns when the orchestrator answers."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._lock_rooms()
        if self.plan.token_file is None:
            _make_token(self.token_file)
        self._supervisor = Supervisor(self.plan.launcher)
        try:
            if not self.plan.join:
                for name in self.orchestrators:
                    self._supervisor.start(self._orchestrator_program(name))
                self._wait_for_ports()
            self._wait_for_health()
            if self.plan.common_preload and offspring.COMMON not in os.environ:
                self._start_common()
            for node in self.nodes.values():
                self._supervisor.start(self._agent_program(node))
        except (KeepstepError, OSError, KeyboardInterrupt):
            self.stop()
            raise

    def stop(self) -> None:
        """End everything that was started here, and remove the rooms."""
        if self._supervisor is None:
            return
        self._supervisor.close()
        self._supervisor = None
        for name in self.nodes:
            _kill_all(self.room(name))
            shutil.rmtree(self.room(name), ignore_errors=True)
        if self._common is not None:
            self._common.unlink(missing_ok=True)
            self._common = None
        self._unlock_rooms()

    def _lock_rooms(self) -> None:
        """One launcher per room: a second one would end the first one's workers with its own."""
        private.make(self._rooms)
        for name in self.nodes:
            path = self._rooms / f"{name}.lock"
            lock = path.open("ab")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                self._unlock_rooms()
                raise ConfigError(
                    f"node {name} is run from {self.run_dir} by another process already; choose "
                    "another name with --node, or another --job or --run-dir"
                ) from None
            self._locks[path] = lock
            if _agent_lives(self.room(name)):
                self._unlock_rooms()
                raise ConfigError(
                    f"an agent of an earlier launcher still serves {self.room(name)}, and its "
                    "ranks may train: end them with `keepstep stop`, or choose another --job"
                )

    def _unlock_rooms(self) -> None:
        for path, lock in self._locks.items():
            path.unlink(missing_ok=True)
            lock.close()
        self._locks = {}
        # Rooms of other launchers of this run may be beside ours.
        with contextlib.suppress(OSError):
            self._rooms.rmdir()

    @property
    def client(self) -> Client:
        if self._client is None or self._client.url != self._url:
            token = self.token_file.read_text(encoding="utf-8").strip()
            self._client = Client(self._url, token)
        return self._client

    @property
    def orchestrators(self) -> tuple[str, ...]:
        """Their names; the first one's is ORCHESTRATOR."""
        further = range(2, 2 + len(self.plan.followers))
        return (ORCHESTRATOR, *(f"{ORCHESTRATOR}-{number}" for number in further))

    def leader(self) -> str:
        """The name of the orchestrator that leads; empty while none says so."""
        known = zip(self.orchestrators, self.client.urls, strict=True)
        return next((name for name, url in known if _leads(url)), "")

    @property
    def token_file(self) -> Path:
        return self.plan.token_file or self.run_dir / "token"

    @property
    def supervisor(self) -> Supervisor:
        assert self._supervisor is not None, "the cluster was not started"
        return self._supervisor

    def room(self, node: str) -> Path:
        return self._rooms / node

    # ---------------------------------------------------------------- waiting

    def wait_nodes(self, seconds_max: float | None = None) -> None:
        """Until every agent is connected."""
        wanted = set(self.nodes)
        self.wait_until(
            lambda picture: wanted <= set(picture["connected"]),
            seconds_max or NODES_SECONDS_MAX,
            f"the agents {', '.join(sorted(wanted))}",
        )

    def wait(self, job: str, seconds_max: float) -> dict[str, Any]:
        """Until the job is over; its view."""
        found: dict[str, Any] = {}

        def over(picture: dict[str, Any]) -> bool:
            found.update(find_job(picture, job) or {})
            return bool(found.get("over"))

        self.wait_until(over, seconds_max, f"the end of job {job}")
        return found

    def wait_until(
        self, holds: Callable[[dict[str, Any]], bool], seconds_max: float, what: str
    ) -> dict[str, Any]:
        """Until `holds(picture)`; the picture that satisfied it. Outlasts a dying orchestrator."""
        deadline = time.monotonic() + seconds_max
        while time.monotonic() < deadline:
            self.supervisor.check()
            try:
                picture = self.client.cluster()
                if holds(picture):
                    return picture
            except Transient:
                pass
            time.sleep(0.02)
        raise Unreachable(f"waited {seconds_max:.0f} s for {what}; see the logs in {self.run_dir}")

    # ---------------------------------------------------------------- breaking things

    def kill_orchestrator(self, name: str = ORCHESTRATOR, *, restart: bool = True) -> None:
        self.supervisor.kill(name, restart=restart)

    def start_orchestrator(self, name: str = ORCHESTRATOR) -> None:
        """Put back an orchestrator that was killed with restart=False."""
        self.supervisor.resume(name)

    def kill_agent(self, node: str, *, restart: bool = True) -> None:
        """The agent alone: its workers train on."""
        self.supervisor.kill(_agent(node), restart=restart)

    def lose_node(self, node: str) -> None:
        """Agent, preload server, store and workers die together, and so does their memory."""
        # The agent first: it must not live to tell of the others' deaths.
        self.supervisor.kill(_agent(node), restart=False)
        _kill_all(self.room(node))
        shutil.rmtree(self.room(node), ignore_errors=True)

    def return_node(self, node: str) -> None:
        """A lost node comes back, empty."""
        self.supervisor.resume(_agent(node))

    def remove_node(self, node: str) -> None:
        """A machine that is lost, and does not come back."""
        self.lose_node(node)
        del self.nodes[node]

    def freeze_node(self, node: str) -> None:
        """Every process of the node stops where it is: silence without an end of stream."""
        for pid in self.processes(node):
            _signal(pid, signal.SIGSTOP)

    def thaw_node(self, node: str) -> None:
        for pid in self.processes(node):
            _signal(pid, signal.SIGCONT)

    def add_node(self, node: NodePlan) -> None:
        """A machine that was not there before."""
        self.nodes[node.name] = node
        self.supervisor.start(self._agent_program(node))

    def working(self) -> bool:
        """Whether any worker or standby lives on our nodes. Needs no orchestrator."""
        return any(agent_room.workers(self.room(name)) for name in self.nodes)

    def ranks(self) -> list[tuple[str, int]]:
        """The jobs and ranks whose workers live on our nodes. Needs no orchestrator."""
        living = [worker for name in self.nodes for worker in agent_room.workers(self.room(name))]
        return [(worker.job, worker.rank) for worker in living if worker.rank >= 0]

    def processes(self, node: str) -> tuple[int, ...]:
        """The pids of everything on a node: agent, preload server, store, workers, loaders."""
        return _marked(self.room(node))

    def pid_of(self, name: str) -> int:
        """Of an orchestrator (ORCHESTRATOR), or of a node's agent."""
        return self.supervisor.child(name if name in self.orchestrators else _agent(name)).pid

    # ---------------------------------------------------------------- the programs

    def _orchestrator_program(self, name: str = ORCHESTRATOR) -> Program:
        where = self._place_of(name)
        command = [*where.prefix, sys.executable, "-m", "keepstep.orchestrator"]
        command += ["--listen", where.listen]
        told = {**os.environ, **self.plan.environment}
        config = load(OrchestratorConfig, self.plan.config_file, told)
        if not config.journal:
            command += ["--journal", str(self.run_dir / "journal.db")]
        command += ["--token-file", str(self.token_file)]
        command += ["--port-file", str(self._port_file(name))]
        if self.plan.config_file is not None:
            command += ["--config", str(self.plan.config_file)]
        # All of it is on this machine: loopback needs no certificates, but a plan may have some.
        environment = {TLS: "", **self._environment()}
        if not config.journal_holder:
            # Another run that is given the same database waits; it does not depose this one.
            own = "" if name == ORCHESTRATOR else f":{name}"
            environment[HOLDER] = f"{socket.gethostname()}:{self.run_dir}{own}"
        if self.plan.config_file is None and SYNCHRONOUS not in os.environ:
            # All our nodes are on this machine: a power cut leaves nobody with orders that the
            # journal has lost, so an append need not wait for the platter.
            environment = {SYNCHRONOUS: "normal", **environment}
        log = self.run_dir / f"{name}.log"
        return Program(name, tuple(command), log, environment)

    def _place_of(self, name: str) -> Further:
        first = Further(self.plan.listen, self.plan.prefix)
        return (first, *self.plan.followers)[self.orchestrators.index(name)]

    def _agent_program(self, node: NodePlan) -> Program:
        command = [*node.prefix, sys.executable, "-m", "keepstep.agent"]
        command += ["--orchestrator", self._url]
        command += ["--node", node.name, "--address", node.address, "--slots", str(node.slots)]
        for name, value in sorted(node.labels.items()):
            command += ["--labels", f"{name}={value}"]
        command += ["--room", str(self.room(node.name))]
        if self.plan.config_file is not None:
            command += ["--config", str(self.plan.config_file)]
        # The token goes by environment: a command line shows in `ps`. With TLS the certificate is
        # what an agent needs, and an operator's token has no business with it.
        token = "" if self._url.startswith("https:") else self.client.token
        own = {MARK: str(self.room(node.name)), "KEEPSTEP_TOKEN": token}
        # Passwords of the orchestrator's: no agent needs them.
        own |= dict.fromkeys({JOURNAL, "PGPASSWORD"} & os.environ.keys(), "")
        common = {offspring.COMMON: str(self._common)} if self._common is not None else {}
        return Program(
            _agent(node.name),
            tuple(command),
            self.run_dir / f"agent-{node.name}.log",
            {**self._environment(), **common, **node.environment, **own},
            speaks=node.speaks,
        )

    def _start_common(self) -> None:
        # By our pid: other launchers of this run may be beside us.
        self._common = self._rooms / f"preload-{os.getpid()}.sock"
        known = {**os.environ, **self._environment()}
        command = offspring.command(self._common, preload_modules(known))
        own = preload_environment(self._environment()) | dict.fromkeys(SECRETS, "")
        log = self.run_dir / "preload.log"
        self.supervisor.start(Program("preload", command, log, own, optional=True))
        # An agent that found nobody there would not ask again.
        deadline = time.monotonic() + self.plan.launcher.ready_seconds_max
        while not self._common.exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _environment(self) -> dict[str, str]:
        """The package is found by our children where we found it ourselves."""
        source = str(Path(__file__).resolve().parents[2])
        known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        paths = known if source in known else [source, *known]
        return {"PYTHONPATH": os.pathsep.join(paths), **self.plan.environment}

    def _port_file(self, name: str) -> Path:
        return self.run_dir / f"{name}.port"

    def _wait_for_ports(self) -> None:
        """Until all orchestrators listen; then everybody can be told where."""
        deadline = time.monotonic() + self.plan.launcher.ready_seconds_max
        scheme = "https" if self.plan.environment.get(TLS) else "http"
        urls = []
        for name in self.orchestrators:
            while not self._port_file(name).exists():
                self.supervisor.check()
                if time.monotonic() > deadline:
                    said = self.supervisor.child(name).last_words()
                    raise Permanent(f"the orchestrator did not start to listen: {said}")
                time.sleep(0.01)
            port = self._port_file(name).read_text(encoding="utf-8").strip()
            host = self._place_of(name).listen.rpartition(":")[0]
            if name == ORCHESTRATOR:
                host = self.plan.advertise or host
            urls.append(f"{scheme}://{host}:{port}")
        self._url = ",".join(urls)
        (self.run_dir / "orchestrator.url").write_text(f"{self._url}\n", encoding="utf-8")

    def _wait_for_health(self) -> None:
        deadline = time.monotonic() + self.plan.launcher.ready_seconds_max
        while True:
            self.supervisor.check()
            try:
                if any(_leads(url) for url in self.client.urls):
                    return
                raise Unreachable(f"nobody leads at {self._url}; see the logs of orchestrators")
            except Unreachable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)


def _leads(url: str) -> bool:
    try:
        return bool(Client(url, "", 2.0).health()["status"] != "following")
    except Transient:
        return False


def find_job(picture: Mapping[str, Any], job: str) -> dict[str, Any] | None:
    """One job of a cluster's picture."""
    jobs = picture["jobs"]
    found = jobs.get(job) if isinstance(jobs, dict) else None
    return found if isinstance(found, dict) else None


def rooms_directory(run_dir: Path) -> Path:
    """Where the nodes' memory of one run lives: tmpfs if there is one, and always a short path."""
    # Short, because Unix socket paths end at 107 bytes; by digest, because run dirs are long.
    cluster = hashlib.sha256(str(run_dir).encode()).hexdigest()[:10]
    shared = Path("/dev/shm")
    parent = shared if os.access(shared, os.W_OK) else Path(os.environ.get("TMPDIR") or "/tmp")
    return parent / f"keepstep-{os.getuid()}" / cluster


def _make_token(path: Path) -> None:
    if path.exists():
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32) + "\n")


def _agent(node: str) -> str:
    return f"agent-{node}"


def _agent_lives(room: Path) -> bool:
    """Somebody holds the room's lock: a launcher that died leaves its agents and workers behind."""
    try:
        with (room / "agent.lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _kill_all(room: Path, seconds_max: float = 5.0) -> None:
    """Kill whatever bears the room's mark, until nothing does, in two looks.

    A process that is about to run its program (an agent had just started a preload server) shows
    neither environment nor command line for a moment, and would be left behind.
    """
    deadline = time.monotonic() + seconds_max
    empty = 0
    while empty < 2:
        pids = _marked(room)
        empty = 0 if pids else empty + 1
        for pid in pids:
            _signal(pid, signal.SIGKILL)
        if pids and time.monotonic() > deadline:
            raise Permanent(f"processes {pids} of {room} survive SIGKILL")
        time.sleep(0.005 if pids else 0.02)


def _marked(room: Path) -> tuple[int, ...]:
    """Living processes with the room in their environment or command line.

    A forked child keeps the environment and command line of the server that forked it, and a
    process that was given away by a dead parent keeps them too.
    """
    # A following separator, so that node n1 does not take n10 for its own.
    marks = [f"{room}{end}".encode() for end in ("\0", "/")]
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if b") Z " in (entry / "stat").read_bytes():
                continue
            text = (entry / "environ").read_bytes() + b"\0" + (entry / "cmdline").read_bytes()
        except OSError:
            continue  # It ended while we looked, or is somebody else's.
        if any(mark in text for mark in marks):
            found.append(int(entry.name))
    return tuple(sorted(found))


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
