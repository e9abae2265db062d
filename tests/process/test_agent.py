"""The agent as a real process, against a small orchestrator that speaks the stream.

Workers are plain scripts without torch, and the preload server imports nothing, so each test takes
a second. Every wait has a deadline; nothing sleeps in the hope that something has happened.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepstep import wire
from keepstep.agent import room as rooms
from keepstep.agent.store import backoff_seconds
from keepstep.detect import process
from keepstep.model import (
    Endpoint,
    Generation,
    JobId,
    JobSpec,
    NodeId,
    OrderId,
    Policy,
    Rank,
    Seat,
    Severity,
    Sign,
    Term,
)
from keepstep.orchestrator import admission
from keepstep.orchestrator.http import BadRequest
from keepstep.orchestrator.tokens import Caller, Role
from keepstep.page import Mark, Page, Ring, page_path, ring_path

pytestmark = pytest.mark.process

SRC = Path(__file__).resolve().parents[2] / "src"
NODE = NodeId("n1")
JOB = JobId("job")
SECONDS_MAX = 20.0
MEMBERSHIP = wire.Membership(2, "secret-1", Endpoint("127.0.0.1", 29500), 1)


class FakeOrchestrator:
    """Accepts agents, keeps what they say, and sends what the test wants."""

    def __init__(self) -> None:
        self.heard: list[tuple[float, wire.Message]] = []
        self.changed = asyncio.Condition()
        self.writer: asyncio.StreamWriter | None = None
        self.heads: list[bytes] = []
        self.pulse: asyncio.Task[None] | None = None
        self.term = Term(1)
        self.journal_heads: dict[str, str] = {}
        self._orders = 0

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append(await reader.readuntil(b"\r\n\r\n"))
        offer = f"{wire.OFFER}: {wire.OLDEST}-{wire.VERSION}".encode()
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\n" + offer + b"\r\n\r\n")
        self.writer = writer
        pulse = self.pulse = asyncio.create_task(self._pulse(writer))
        try:
            while True:
                message = await wire.read(reader)
                async with self.changed:
                    self.heard.append((time.monotonic(), message))
                    self.changed.notify_all()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            pulse.cancel()
            writer.close()

    async def _pulse(self, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(wire.encode(wire.Pulse(self.term, dict(self.journal_heads))))
            await asyncio.sleep(0.2)

    async def until(
        self,
        kind: type,
        where: Callable[[Any], bool] = lambda _: True,
        *,
        since: int = 0,
        seconds_max: float = SECONDS_MAX,
    ) -> tuple[float, Any]:
        """The first such message, and when it came."""
        async with asyncio.timeout(seconds_max), self.changed:
            while True:
                for at, message in self.heard[since:]:
                    if isinstance(message, kind) and where(message):
                        return at, message
                await self.changed.wait()

    seq = 0
    """Where the journal stands."""

    def order(self, action: Any, *, generation: int = 1, order_id: str = "", term: int = 1) -> str:
        assert self.writer is not None
        self._orders += 1
        name = OrderId(order_id or f"o{self._orders}")
        ids = (Term(term), Generation(generation), name)
        order = wire.Order(*ids, JOB, (NODE,), action, self.seq)
        self.writer.write(wire.encode(order))
        return name


class World:
    """One node's agent, its room, and the orchestrator it talks to."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.room = directory / "room"
        self.logs = directory / "logs"
        self.orchestrator = FakeOrchestrator()
        self.agents: list[asyncio.subprocess.Process] = []
        self.tee = directory / "agent.out"
        self.flags = ["--no-store"]
        self.environment = {"KEEPSTEP_PRELOAD": ""}

    async def start_agent(self) -> wire.Hello:
        env = {k: v for k, v in os.environ.items() if not k.startswith("KEEPSTEP_")}
        env.update(PYTHONPATH=str(SRC), SOME_SETTING="inherited", **self.environment)
        command = [sys.executable, "-m", "keepstep.agent", "--node", NODE, "--slots", "4"]
        command += ["--orchestrator", f"http://127.0.0.1:{self.orchestrator.port}"]
        command += ["--room", str(self.room), "--token", "T", "--labels", "rack=r1", *self.flags]
        hellos = len(self.orchestrator.heard)
        with self.tee.open("ab") as out, (self.directory / "agent.err").open("ab") as err:
            agent = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=err, env=env)
        self.agents.append(agent)
        _, hello = await self.orchestrator.until(wire.Hello, since=hellos)
        return hello

    async def kill_agent(self) -> None:
        self.agents[-1].kill()
        await self.agents[-1].wait()

    def spec(self, text: str, **more: Any) -> JobSpec:
        script = self.directory / f"script{len(list(self.directory.glob('script*')))}.py"
        script.write_text(text, encoding="utf-8")
        settled: dict[str, Any] = {"ranks_per_node": 2, "log_directory": str(self.logs), **more}
        return JobSpec(JOB, str(script), directory=str(self.directory), **settled)

    def start(self, text: str, *ranks: int, generation: int = 1, **more: Any) -> str:
        seats = tuple(Seat(Rank(rank), NODE, rank, 0) for rank in ranks or (0,))
        action = wire.StartWorkers(self.spec(text, **more), seats, MEMBERSHIP)
        return self.orchestrator.order(action, generation=generation)

    def log(self, rank: int) -> Path:
        return self.logs / JOB / f"rank_{rank}.log"

    def records(self) -> list[dict[str, Any]]:
        state = json.loads((self.room / "agent-state.json").read_text(encoding="utf-8"))
        return list(state["workers"])

    async def pid_of(self, rank: int) -> int:
        """The pid that a running script printed as its first word."""
        words = await eventually(lambda: self.log(rank).read_text(encoding="utf-8").split())
        return int(words[0])


async def eventually(look: Callable[[], Any], seconds_max: float = SECONDS_MAX) -> Any:
    """What `look` returns once it is true. For files, which nobody announces."""
    deadline = time.monotonic() + seconds_max
    while True:
        with contextlib.suppress(FileNotFoundError):
            if found := look():
                return found
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def world() -> AsyncIterator[World]:
    # Short paths: a Unix socket's name has at most 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="ks", dir="/dev/shm"))
    here = World(directory)
    await here.orchestrator.start()
    try:
        yield here
    except BaseException:
        for name in ("agent.err", "agent.out", "room/preload.log", "room/store.log"):
            if (path := directory / name).exists():
                print(f"--- {name}\n{path.read_text(encoding='utf-8', errors='replace')}")
        raise
    finally:
        for agent in here.agents:
            if agent.returncode is None:
                agent.kill()
                await agent.wait()
        here.orchestrator.server.close()
        rooms.clear(here.room)
        shutil.rmtree(directory, ignore_errors=True)


def scene(test: Callable[[World], Awaitable[None]]) -> Callable[[], None]:
    """A test in a world of its own, with the agent already greeting."""

    def run() -> None:
        async def body() -> None:
            async with asyncio.timeout(90), world() as here:
                await test(here)

        asyncio.run(body())

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


WAITS = """
import os, sys, time
print(os.getpid(), flush=True)
time.sleep(600)
"""
SHOWS = """
import json, os, sys
print(json.dumps({"env": dict(os.environ), "argv": sys.argv, "path": sys.path[0],
                  "cwd": os.getcwd(), "name": __name__, "pid": os.getpid()}), flush=True)
"""


@scene
async def test_the_agent_greets_with_token_and_labels(here: World) -> None:
    hello = await here.start_agent()
    assert (hello.node, hello.slots, hello.labels) == (NODE, 4, {"rack": "r1"})
    assert hello.peer_port > 0
    assert hello.boot
    head = here.orchestrator.heads[0].decode()
    assert head.startswith("POST /v1/agent HTTP/1.1\r\n")
    assert "Authorization: Bearer T\r\n" in head
    assert "Upgrade: keepstep-stream\r\n" in head


@scene
async def test_a_worker_finds_torchruns_environment_and_its_output_is_logged_and_shown(
    here: World,
) -> None:
    await here.start_agent()
    here.start(SHOWS, 0, 1, arguments=("--lr", "1"), environment={"MINE": "yes"})
    for rank in (0, 1):
        _, observed = await here.orchestrator.until(
            wire.Observed, lambda m, rank=rank: m.rank == rank
        )
        assert (observed.sign, observed.exit_code) == (Sign.FINISHED, 0)
    shown = json.loads(here.log(1).read_text(encoding="utf-8"))
    env = shown["env"]
    expected = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "job",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "KEEPSTEP_SOCKET": str(here.room / "agent.sock"),
        "KEEPSTEP_ROOM": str(here.room / "job"),
        "KEEPSTEP_JOB": "job",
        "KEEPSTEP_SLOT": "1",
        "KEEPSTEP_INCARNATION": "0",
        "KEEPSTEP_GENERATION": "1",
        "KEEPSTEP_ROLE": "worker",
        "KEEPSTEP_SECRET": "secret-1",
        "KEEPSTEP_STORE": "127.0.0.1:29500",
        "KEEPSTEP_MIRROR_STRIDE": "1",
        "MINE": "yes",
        "SOME_SETTING": "inherited",
    }
    assert {name: env.get(name) for name in expected} == expected
    assert "KEEPSTEP_PRELOAD" not in env, "the agent's own settings are not the worker's"
    assert shown["argv"][1:] == ["--lr", "1"]
    assert (shown["path"], shown["cwd"]) == (str(here.directory), str(here.directory))
    assert shown["name"] == "__main__"
    line = "[rank1]: " + here.log(1).read_text(encoding="utf-8")
    await eventually(lambda: line in here.tee.read_text(encoding="utf-8"))


async def report_seconds(here: World, pids: list[int]) -> float:
    """From a kill to its report, the best of several: what else runs here is not the agent's."""
    delays = []
    for rank, pid in enumerate(pids):
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        at, observed = await here.orchestrator.until(
            wire.Observed, lambda m, rank=rank: m.rank == rank
        )
        delays.append(at - killed)
        assert (observed.sign, observed.exit_code) == (Sign.EXIT, -9)
        assert observed.detail == "ended by SIGKILL"
    return min(delays)


@scene
async def test_a_death_is_reported_within_100_ms(here: World) -> None:
    await here.start_agent()
    here.start(WAITS, 0, 1, 2, ranks_per_node=3)
    seconds = await report_seconds(here, [await here.pid_of(rank) for rank in range(3)])
    assert seconds < 0.1, f"{seconds * 1000:.0f} ms"


@scene
async def test_an_exception_is_told_with_its_traceback_and_without_our_frames(here: World) -> None:
    await here.start_agent()
    here.start("def f():\n    raise ValueError('the user is wrong')\nf()\n")
    _, observed = await here.orchestrator.until(wire.Observed)
    assert (observed.sign, observed.exit_code) == (Sign.EXCEPTION, 1)
    assert "ValueError: the user is wrong" in observed.detail
    assert "in f" in observed.detail
    assert "entry.py" not in observed.detail
    assert "runpy" not in observed.detail
    assert observed.detail in here.log(0).read_text(encoding="utf-8")


@scene
async def test_no_job_can_be_called_like_a_file_of_the_room(here: World) -> None:
    await here.start_agent()
    here.start(WAITS)
    await here.pid_of(0)
    files = {entry.name for entry in here.room.iterdir()} - {JOB}
    assert {"agent-state.json", "boot", "preload.sock"} <= files
    # And what they are called before they are whole.
    caller = Caller("launcher", Role.OPERATOR)
    for name in (*files, *(f"{name}.new" for name in files), "preload.new"):
        with pytest.raises(BadRequest):
            admission.check_name(replace(here.spec(WAITS), job=JobId(name)), caller, ())


@scene
async def test_exit_codes_and_exit_handlers_are_honoured(here: World) -> None:
    await here.start_agent()
    here.start("import atexit, sys\natexit.register(print, 'farewell')\nsys.exit(75)\n")
    _, observed = await here.orchestrator.until(wire.Observed)
    assert (observed.sign, observed.exit_code) == (Sign.EXIT, 75)
    assert "farewell" in here.log(0).read_text(encoding="utf-8")


@scene
async def test_a_repeated_start_starts_nothing_and_tells_a_death_again(here: World) -> None:
    await here.start_agent()
    spec = here.spec(WAITS)
    action = wire.StartWorkers(spec, (Seat(Rank(0), NODE, 0, 0),), MEMBERSHIP)
    here.orchestrator.order(action, order_id="same")
    pid = await here.pid_of(0)
    here.orchestrator.order(action, order_id="same")
    here.orchestrator.order(wire.Fence((Seat(Rank(0), NODE, 0, 7),)), order_id="other")
    # The other incarnation is not here; the answer also shows that the repeat was dealt with.
    await here.orchestrator.until(wire.Observed, lambda m: m.incarnation == 7)
    assert [record["pid"] for record in here.records()] == [pid]
    os.kill(pid, signal.SIGKILL)
    await here.orchestrator.until(wire.Observed, lambda m: m.incarnation == 0)
    before = len(here.orchestrator.heard)
    here.orchestrator.order(action, order_id="same")
    _, again = await here.orchestrator.until(wire.Observed, since=before)
    assert again.exit_code == -9
    assert here.records() == []


@scene
async def test_a_restarted_agent_adopts_the_living_worker_and_reports_its_death(
    here: World,
) -> None:
    await here.start_agent()
    here.start(WAITS, 0, 1, 2, ranks_per_node=3)
    pids = [await here.pid_of(rank) for rank in range(3)]
    await here.kill_agent()
    hello = await here.start_agent()
    facts = [wire.WorkerFact(JOB, Rank(rank), rank, 0, Generation(1)) for rank in range(3)]
    assert sorted(hello.workers, key=lambda fact: fact.rank) == facts
    assert sorted(record["pid"] for record in here.records()) == sorted(pids)
    assert await report_seconds(here, pids) < 0.1
    for rank in range(3):
        assert len(here.log(rank).read_text(encoding="utf-8").split()) == 1, "started once"


@scene
async def test_a_death_without_an_agent_is_reported_by_the_next_one_with_its_status(
    here: World,
) -> None:
    await here.start_agent()
    here.start(WAITS, 0, 1)
    pids = [await here.pid_of(0), await here.pid_of(1)]
    await here.kill_agent()
    os.kill(pids[0], signal.SIGSEGV)
    await eventually(lambda: process.probe(pids[0]) is None)
    hello = await here.start_agent()
    assert [fact.rank for fact in hello.workers] == [1]
    _, observed = await here.orchestrator.until(wire.Observed)
    assert (observed.rank, observed.exit_code) == (0, -11)


@scene
async def test_last_words_reach_the_next_agent_through_the_room(here: World) -> None:
    await here.start_agent()
    gate = here.directory / "gate"
    here.start(
        "import os, time\nprint(os.getpid(), flush=True)\n"
        f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
        "raise RuntimeError('alone')\n"
    )
    pid = await here.pid_of(0)
    await here.kill_agent()
    gate.touch()
    await eventually(lambda: process.probe(pid) is None)
    await here.start_agent()
    _, observed = await here.orchestrator.until(wire.Observed)
    assert observed.sign is Sign.EXCEPTION
    assert "RuntimeError: alone" in observed.detail


@scene
async def test_a_killed_preload_server_is_replaced_and_its_children_stay_watched(
    here: World,
) -> None:
    await here.start_agent()
    here.start(WAITS)
    pid = await here.pid_of(0)
    state = json.loads((here.room / "agent-state.json").read_text(encoding="utf-8"))
    os.kill(state["preload"]["pid"], signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    _, observed = await here.orchestrator.until(wire.Observed)
    assert (observed.sign, observed.exit_code) == (Sign.EXIT, -9)
    # The next start needs a server, and gets a new one.
    seat = Seat(Rank(0), NODE, 0, 1)
    here.orchestrator.order(wire.StartWorkers(here.spec(SHOWS), (seat,), MEMBERSHIP))
    _, ended = await here.orchestrator.until(wire.Observed, lambda m: m.incarnation == 1)
    assert ended.sign is Sign.FINISHED


@scene
async def test_a_fence_kills_even_a_stopped_worker_and_its_children(here: World) -> None:
    await here.start_agent()
    here.start(
        "import os, time\nchild = os.fork()\n"
        "if child: print(os.getpid(), child, flush=True)\ntime.sleep(600)\n"
    )
    pid = await here.pid_of(0)
    child = int(here.log(0).read_text(encoding="utf-8").split()[1])
    os.kill(pid, signal.SIGSTOP)
    fence = wire.Fence((Seat(Rank(0), NODE, 0, 0),))
    here.orchestrator.order(fence)
    _, observed = await here.orchestrator.until(wire.Observed)
    assert (observed.sign, observed.rank, observed.exit_code) == (Sign.EXIT, 0, -9)
    reading = await eventually(lambda: _gone(child))
    assert reading
    before = len(here.orchestrator.heard)
    here.orchestrator.order(fence)
    _, again = await here.orchestrator.until(wire.Observed, since=before)
    assert again == observed


def _gone(pid: int) -> bool:
    reading = process.probe(pid)
    return reading is None or reading.state in "ZX"


@scene
async def test_a_standby_takes_a_seat_as_a_joiner_in_the_same_process(here: World) -> None:
    await here.start_agent()
    spec = here.spec(SHOWS)
    here.orchestrator.order(wire.StartStandby(spec, 3))
    _, ready = await here.orchestrator.until(wire.StandbyReport)
    assert (ready.slot, ready.level, ready.ready) == (3, 1, True)
    [standby] = here.records()
    membership = wire.Membership(2, "secret-2", Endpoint("127.0.0.1", 29501), 1)
    assign = wire.Assign(spec, Seat(Rank(1), NODE, 3, 4), membership)
    here.orchestrator.order(assign, generation=2)
    _, observed = await here.orchestrator.until(wire.Observed)
    assert (observed.rank, observed.incarnation, observed.generation) == (1, 4, 2)
    assert observed.sign is Sign.FINISHED
    shown = json.loads(here.log(1).read_text(encoding="utf-8"))
    assert shown["pid"] == standby["pid"]
    told = {name: shown["env"][name] for name in ("RANK", "KEEPSTEP_ROLE", "KEEPSTEP_SECRET")}
    assert told == {"RANK": "1", "KEEPSTEP_ROLE": "joiner", "KEEPSTEP_SECRET": "secret-2"}
    assert shown["env"]["MASTER_PORT"] == "29501"
    assert shown["env"]["KEEPSTEP_INCARNATION"] == "4"


@scene
async def test_an_assign_finds_a_standby_that_outlived_its_agent(here: World) -> None:
    await here.start_agent()
    spec = here.spec(SHOWS)
    here.orchestrator.order(wire.StartStandby(spec, 2))
    await here.orchestrator.until(wire.StandbyReport)
    await here.kill_agent()
    hello = await here.start_agent()
    assert hello.standbys == (wire.StandbyFact(JOB, 2, 1, True),)
    [standby] = here.records()
    here.orchestrator.order(wire.Assign(spec, Seat(Rank(0), NODE, 2, 1), MEMBERSHIP))
    await here.orchestrator.until(wire.Observed, lambda m: m.sign is Sign.FINISHED)
    assert json.loads(here.log(0).read_text(encoding="utf-8"))["pid"] == standby["pid"]


@scene
async def test_without_a_standby_a_joiner_is_forked(here: World) -> None:
    await here.start_agent()
    here.orchestrator.order(wire.Assign(here.spec(SHOWS), Seat(Rank(1), NODE, 2, 1), MEMBERSHIP))
    await here.orchestrator.until(wire.Observed, lambda m: m.sign is Sign.FINISHED)
    env = json.loads(here.log(1).read_text(encoding="utf-8"))["env"]
    assert (env["KEEPSTEP_ROLE"], env["RANK"], env["LOCAL_RANK"]) == ("joiner", "1", "2")


@scene
async def test_a_lost_standby_is_reported(here: World) -> None:
    await here.start_agent()
    here.orchestrator.order(wire.StartStandby(here.spec(SHOWS), 1))
    await here.orchestrator.until(wire.StandbyReport, lambda m: m.ready)
    here.orchestrator.order(wire.DropStandby(1))
    await here.orchestrator.until(wire.StandbyReport, lambda m: not m.ready)
    assert here.records() == []


@scene
async def test_older_terms_are_refused_also_by_a_restarted_agent(here: World) -> None:
    await here.start_agent()
    here.orchestrator.term, here.orchestrator.seq = Term(5), 150
    here.orchestrator.order(wire.DropStandby(0), term=5)
    await eventually(lambda: '"term":5' in (here.room / "agent-state.json").read_text())
    here.orchestrator.order(wire.StartStandby(here.spec(WAITS), 0), term=4)
    _, refused = await here.orchestrator.until(wire.Refused)
    assert "term 4; 5 has been seen" in refused.why
    await here.kill_agent()
    hello = await here.start_agent()
    assert (hello.term_seen, hello.seq_seen) == (5, 150), "a leader without it must hear of it"
    before = len(here.orchestrator.heard)
    here.orchestrator.order(wire.StartStandby(here.spec(WAITS), 0), term=4)
    await here.orchestrator.until(wire.Refused, since=before)
    assert here.records() == []


@scene
async def test_older_generations_are_refused(here: World) -> None:
    await here.start_agent()
    here.start(WAITS, generation=3)
    await here.pid_of(0)
    here.orchestrator.order(wire.Stop(0, "late"), generation=2)
    _, refused = await here.orchestrator.until(wire.Refused)
    assert "generation 2" in refused.why
    assert len(here.records()) == 1


TALKS = """
import os, sys, time
from pathlib import Path
from keepstep import wire
from keepstep.model import JobId, Phase, Rank, Generation
from keepstep.training.link import Link
rank = int(os.environ["RANK"])
def hello():
    return wire.WorkerHello(JobId("job"), int(os.environ["KEEPSTEP_SLOT"]), os.getpid(),
                            Rank(rank), int(os.environ["KEEPSTEP_INCARNATION"]), Generation(1))
def heard(message):
    print(type(message.action).__name__, message.order_id, flush=True)
    if isinstance(message.action, wire.Quiesce):
        seat = wire.SeatReport(Rank(rank), boundary=7, intact=True)
        link.send(wire.WorkerReport(message.job, message.generation, Phase.QUIESCE, seat))
link = Link(os.environ["KEEPSTEP_SOCKET"], hello, heard)
link.start()
print("up", flush=True)
time.sleep(600)
"""


def for_both(report: wire.PhaseReport) -> bool:
    return [seat.alike for seat in report.seats] == ["0-1"]


@scene
async def test_orders_reach_the_workers_and_their_reports_come_back_as_one(here: World) -> None:
    await here.start_agent()
    here.start(TALKS, 0, 1)
    for rank in (0, 1):
        await eventually(lambda rank=rank: here.log(rank).read_text(encoding="utf-8"))
    here.orchestrator.order(wire.Quiesce("test"), generation=2, order_id="q2")
    _, report = await here.orchestrator.until(wire.PhaseReport, for_both)
    # The same is true of both, and it is said once.
    (seat,) = report.seats
    assert (report.generation, seat.rank, seat.alike) == (2, 0, "0-1")
    # The same order again: the report again, and nothing new for the workers.
    before = len(here.orchestrator.heard)
    here.orchestrator.order(wire.Quiesce("test"), generation=2, order_id="q2")
    _, again = await here.orchestrator.until(wire.PhaseReport, since=before)
    assert again == report
    assert here.log(0).read_text(encoding="utf-8").count("q2") == 1


@scene
async def test_an_order_that_comes_before_its_worker_waits_for_it(here: World) -> None:
    await here.start_agent()
    here.start(TALKS, generation=2)
    here.orchestrator.order(wire.Quiesce("at once"), generation=2, order_id="early")
    _, report = await here.orchestrator.until(wire.PhaseReport)
    assert [seat.rank for seat in report.seats] == [0]


@scene
async def test_a_seat_wins_its_slot_over_a_standby_of_the_same_moment(here: World) -> None:
    await here.start_agent()
    spec = here.spec(WAITS)
    here.orchestrator.order(wire.StartStandby(spec, 2))
    here.orchestrator.order(wire.Assign(spec, Seat(Rank(0), NODE, 2, 1), MEMBERSHIP))
    pid = await here.pid_of(0)
    await eventually(lambda: [record["pid"] for record in here.records()] == [pid])


@scene
async def test_a_second_agent_is_kept_out_of_the_room(here: World) -> None:
    await here.start_agent()
    first = here.agents[0]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3):
            await here.start_agent()
    assert await asyncio.wait_for(here.agents[1].wait(), SECONDS_MAX) == 2
    assert first.returncode is None
    assert "another agent serves" in (here.directory / "agent.err").read_text(encoding="utf-8")


@scene
async def test_a_silent_orchestrator_is_left_and_found_again(here: World) -> None:
    await here.start_agent()
    here.start(WAITS)
    pid = await here.pid_of(0)
    before = len(here.orchestrator.heard)
    assert here.orchestrator.pulse is not None
    here.orchestrator.pulse.cancel()
    silent = time.monotonic()
    at, hello = await here.orchestrator.until(wire.Hello, since=before)
    assert 2.5 < at - silent < 8.0
    assert [fact.rank for fact in hello.workers] == [0]
    assert [record["pid"] for record in here.records()] == [pid], "training went on"


@scene
async def test_workers_and_their_reports_survive_agent_and_orchestrator(here: World) -> None:
    await here.start_agent()
    here.start(TALKS, 0, 1)
    for rank in (0, 1):
        await eventually(lambda rank=rank: here.log(rank).read_text(encoding="utf-8"))
    here.orchestrator.order(wire.Quiesce("test"), generation=2, order_id="q2")
    await here.orchestrator.until(wire.PhaseReport, for_both)
    # The stream breaks: the agent comes back by itself and says it again.
    before = len(here.orchestrator.heard)
    assert here.orchestrator.writer is not None
    here.orchestrator.writer.transport.abort()
    await here.orchestrator.until(wire.Hello, since=before)
    await here.orchestrator.until(wire.PhaseReport, for_both, since=before)
    # The agent dies: the workers' links come back and repeat their reports to the next one.
    before = len(here.orchestrator.heard)
    await here.kill_agent()
    await here.start_agent()
    await here.orchestrator.until(wire.PhaseReport, for_both, since=before)


@scene
async def test_the_peer_port_serves_entries_to_those_who_know_a_secret(here: World) -> None:
    hello = await here.start_agent()
    here.start(WAITS)
    await here.pid_of(0)
    ring = Ring(ring_path(here.room / JOB, 0, 0), payload_bytes_max=64)
    ring.put(12, b"private")
    reader, writer = await asyncio.open_connection("127.0.0.1", hello.peer_port)

    async def ask(boundary: int, secret: str) -> wire.Entry:
        writer.write(wire.encode(wire.FetchEntry(JOB, Rank(0), boundary, secret)))
        answer = await asyncio.wait_for(wire.read(reader), SECONDS_MAX)
        assert isinstance(answer, wire.Entry)
        return answer

    found = await ask(12, "secret-1")
    assert base64.b64decode(found.payload) == b"private"
    assert not (await ask(13, "secret-1")).found
    stranger = await ask(12, "guess")
    assert (stranger.found, stranger.payload) == (False, "")
    writer.close()


@scene
async def test_a_still_page_is_told_as_a_stall_with_the_kernels_word(here: World) -> None:
    await here.start_agent()
    here.orchestrator.journal_heads = {JOB: "abc123"}
    policy = Policy(hang_seconds_min=0.3)
    here.start(WAITS, policy=policy)
    os.kill(await here.pid_of(0), signal.SIGSTOP)
    page = Page(page_path(here.room / JOB, 0, 0), create=True)
    page.set_generation(1)
    page.set_committed(4)
    page.mark(Mark.FORWARD, 5)
    _, stalled = await here.orchestrator.until(wire.Stalled)
    assert stalled.seconds >= 0.3
    assert stalled.ranks == (wire.StallFact(Rank(0), 0, 5, 0, stopped=True),)
    _, beat = await here.orchestrator.until(
        wire.Heartbeat, lambda m: m.jobs != () and m.jobs[0].step == 5
    )
    assert beat.jobs[0].committed == 4
    await eventually(lambda: page.head() == "abc123")
    page.mark(Mark.RECOVERING, 5)
    page.close()


@scene
async def test_a_stop_ends_everything_and_sweeps_the_rings(here: World) -> None:
    await here.start_agent()
    here.start(WAITS, 0, 1)
    pids = [await here.pid_of(rank) for rank in (0, 1)]
    here.orchestrator.order(wire.StartStandby(here.spec(WAITS), 2))
    await here.orchestrator.until(wire.StandbyReport, lambda m: m.ready)
    Ring(ring_path(here.room / JOB, 0, 0), payload_bytes_max=64)
    here.orchestrator.order(wire.Stop(0, "over"))
    for rank in (0, 1):
        _, observed = await here.orchestrator.until(
            wire.Observed, lambda m, rank=rank: m.rank == rank
        )
        assert observed.exit_code == -15
    await eventually(lambda: here.records() == [])
    await eventually(lambda: not ring_path(here.room / JOB, 0, 0).exists())
    # The agent reports a death when it sees it; the parent reaps a moment later.
    await eventually(lambda: all(process.probe(pid) is None for pid in pids))


PROBE = """#!/bin/sh
echo a run >> "$1/runs"
read code < "$1/code"
test "$code" = hang && { sleep 600 & echo $! > "$1/child"; echo $$ > "$1/hung"; wait; }
echo "of $KEEPSTEP_NODE"
echo "slot=1 ecc errors"
exit "$code"
"""


def install_probe(here: World) -> None:
    """A health program that ends with whatever the test wrote last."""
    probe = here.directory / "probe.sh"
    probe.write_text(PROBE, encoding="utf-8")
    probe.chmod(0o755)
    here.environment["KEEPSTEP_AGENT_HEALTH_PROGRAM"] = f"'{probe}' {here.directory}"
    here.environment["KEEPSTEP_AGENT_HEALTH_SECONDS"] = "0.05"


def set_probe(here: World, code: str) -> None:
    fresh = here.directory / "code.new"
    fresh.write_text(f"{code}\n", encoding="utf-8")
    fresh.replace(here.directory / "code")


def ended(pid: int) -> bool:
    """Dead, whether or not somebody has reaped it."""
    reading = process.probe(pid)
    return reading is None or reading.state == "Z"


@scene
async def test_a_health_program_is_told_when_it_changes_and_after_a_reconnect(
    here: World,
) -> None:
    install_probe(here)
    set_probe(here, "0")
    await here.start_agent()
    await here.orchestrator.until(wire.Health, lambda m: m.severity is None)
    set_probe(here, "3")
    _, told = await here.orchestrator.until(wire.Health, lambda m: m.severity is not None)
    assert told == wire.Health(NODE, Severity.IMMINENT, "ecc errors", 1, told.seconds)
    assert told.seconds == 200.0
    # A program that fails says nothing, and so does not take its word back.
    set_probe(here, "9")
    await eventually(lambda: "it ended with 9" in (here.directory / "agent.err").read_text())
    runs = len((here.directory / "runs").read_text().split("\n"))
    await eventually(lambda: len((here.directory / "runs").read_text().split("\n")) > runs + 3)
    said = [m for _, m in here.orchestrator.heard if isinstance(m, wire.Health)]
    assert [m.severity for m in said] == [None, Severity.IMMINENT]
    # A new orchestrator hears it with the greeting.
    since = len(here.orchestrator.heard)
    assert here.orchestrator.writer is not None
    here.orchestrator.writer.close()
    _, again = await here.orchestrator.until(wire.Health, since=since)
    assert again == told
    set_probe(here, "0")
    await here.orchestrator.until(wire.Health, lambda m: m.severity is None, since=since)


@scene
async def test_a_health_program_that_hangs_is_killed_with_its_children_and_says_nothing(
    here: World,
) -> None:
    install_probe(here)
    here.environment["KEEPSTEP_AGENT_HEALTH_SECONDS_MAX"] = "1"
    set_probe(here, "hang")
    await here.start_agent()
    child = int(await eventually(lambda: (here.directory / "child").read_text()))
    await eventually(lambda: "did not end within 1 s" in (here.directory / "agent.err").read_text())
    await eventually(lambda: ended(child))
    # The next run is a new one, and the agent served its stream meanwhile.
    set_probe(here, "2")
    _, told = await here.orchestrator.until(wire.Health)
    assert told.severity is Severity.LEAVE


@scene
async def test_a_health_program_ends_with_its_agent_however_that_ends(here: World) -> None:
    install_probe(here)
    set_probe(here, "hang")
    hung = here.directory / "hung"

    async def start() -> int:
        hung.unlink(missing_ok=True)
        await here.start_agent()
        return int(await eventually(lambda: hung.read_text()))

    pid = await start()
    here.agents[-1].terminate()
    assert await here.agents[-1].wait() == 0
    await eventually(lambda: ended(pid))
    pid = await start()
    await here.kill_agent()
    # Nobody could end it; the next agent does.
    assert not ended(pid)
    await start()
    await eventually(lambda: ended(pid))


@pytest.mark.slow
@scene
async def test_a_lost_store_is_replaced_and_told(here: World) -> None:
    pytest.importorskip("torch")
    here.flags = []
    here.environment = {"KEEPSTEP_PRELOAD": "torch,torch.distributed"}
    hello = await here.start_agent()
    assert hello.store_port > 0
    await here.kill_agent()
    again = await here.start_agent()
    assert again.store_port == hello.store_port, "the store outlives the agent"

    async def lost() -> wire.Hello:
        state = json.loads((here.room / "agent-state.json").read_text(encoding="utf-8"))
        before, streams = len(here.orchestrator.heard), len(here.orchestrator.heads)
        os.kill(state["store"]["pid"], signal.SIGKILL)
        _, renewed = await here.orchestrator.until(wire.Hello, since=before)
        assert len(here.orchestrator.heads) == streams + 1, "told in a Hello, so in a new stream"
        _, writer = await asyncio.open_connection("127.0.0.1", renewed.store_port)
        writer.close()
        return renewed

    first = await lost()
    assert first.store_port != hello.store_port
    began = time.monotonic()
    assert (await lost()).store_port != first.store_port
    # The second to die young: what kills them may kill the next one as well.
    assert time.monotonic() - began >= backoff_seconds(2) == 1.0
