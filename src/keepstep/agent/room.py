"""The node's room: a directory on tmpfs, owned by no process, that lets an agent die and come back.

    <room>/agent-state.json       who lives here, the highest term and entry, what jobs were told
    <room>/agent.sock             where workers and standbys talk to the agent
    <room>/preload.sock  .log     the preload server, which forks and reaps them
    <room>/store.port  store.log  the store process
    <room>/agent.lock             one agent per room
    <room>/boot                   changes when the room was lost: rings of an older boot are gone
    <room>/<job>/                 pages, rings, mirrors and last words of one job (keepstep.page)

The state is written whole and renamed into place: a reader sees the old one or the new one. A
record in it is believed only if a process with that pid *and* that start time lives.

A room is memory, so what a job leaves in it has to go, and nothing that somebody may still need:

    covers              of use to the rank that wrote them only: a joiner gets its own anew. They
                        are most of it, and go with the job's last rank here, whoever comes next.
    rings, mirrors,     a recovery, also one of a journal that is behind, asks this node for them
    pages, last words   after its ranks are dead. They go at a Stop: the job is over, or saved and
                        parked. Its rerun begins at a checkpoint, and would remove them itself.

So an agent that starts removes nothing by its own judgement: it tells with each Hello of which jobs
it keeps something (`kept_jobs`), and is told again to stop those that are over. Of a job that the
journal does not have, or that this node knows more of than the journal, it is not told.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from keepstep import codec, private, wire
from keepstep.agent import log
from keepstep.detect import process
from keepstep.errors import ConfigError, WireError
from keepstep.model import Generation, JobId, JobSpec, Rank, Term

SECRETS_MAX = 16
"""How many generations back a joiner may still ask for private state."""
FORWARDED_MAX = 64
"""Orders of one generation kept for a worker that has yet to connect."""
ENDINGS_MAX = 256
"""Deaths per job that are reported again after a reconnect."""
LOOK_SECONDS = 0.1
"""Between two looks at a process that cannot be looked at, or of whose end the kernel cannot tell
us, at present."""
SOCKET_PATH_BYTES_MAX = 107
KEPT_JOBS_MAX = 256
"""Told in one Hello; the others in the next ones."""
_COVERS = ("cover-*.kept", "cover-*.new")
_LEFT = (
    *_COVERS,
    *("seat-*.page", "seat-*.ring", "seat-*.new", "mirror-*.ring", "mirror-*.new"),
    *("ending-*.json", "ending-*.new"),
)
"""All that Keepstep writes into a job's directory. What else is there is not ours to remove."""


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """A process, named for good: its pid and its start time."""

    pid: int
    start: int


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """The node's store process and where it listens."""

    pid: int
    start: int
    port: int


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker on a slot; with rank -1 a standby."""

    job: JobId
    slot: int
    pid: int
    start: int
    rank: Rank = Rank(-1)
    incarnation: int = 0
    generation: Generation = Generation(0)
    level: int = 1
    ready: bool = False
    """A standby that is warm to its level."""
    log: str = ""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """What this node was told about a job."""

    spec: JobSpec
    generation: Generation = Generation(0)
    """The highest one obeyed: older orders are refused."""
    secrets: tuple[str, ...] = ()
    belongs: str = ""
    """The word of the newest generation whose secret was told here."""
    forwarded: tuple[str, ...] = ()
    """Orders of this generation for the workers, as JSON: replayed to one that (re)connects."""
    endings: tuple[wire.Observed, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentState:
    """All that a restarted agent must know."""

    term: Term = Term(0)
    peer_port: int = 0
    preload: ProcessRecord | None = None
    store: StoreRecord | None = None
    workers: tuple[WorkerRecord, ...] = ()
    jobs: tuple[JobRecord, ...] = ()
    health: ProcessRecord | None = None
    """The health program, while it runs."""
    seq: int = 0


class Room:
    """The room's files, and the state that the agent keeps in them."""

    def __init__(self, directory: Path, address: str) -> None:
        self.directory = directory
        self.address = address
        """Where other nodes reach this one."""
        self.agent_socket = directory / "agent.sock"
        self.preload_socket = directory / "preload.sock"
        self.preload_log = directory / "preload.log"
        self.store_port_file = directory / "store.port"
        self.store_log = directory / "store.log"
        self.term = Term(0)
        self.peer_port = 0
        self.preload: ProcessRecord | None = None
        self.store: StoreRecord | None = None
        self.workers: dict[int, WorkerRecord] = {}
        """By pid."""
        self.jobs: dict[JobId, JobRecord] = {}
        self.health: ProcessRecord | None = None
        self.seq = 0
        """The newest entry of the journal whose order was obeyed here, in whatever term."""
        self._kept_told = ""
        """The last job of which a Hello told that something is kept."""

    def open(self) -> None:
        """Make the room, or read what an earlier agent left in it."""
        if len(os.fsencode(self.preload_socket)) > SOCKET_PATH_BYTES_MAX:
            raise ConfigError(
                f"the room {self.directory} makes socket paths of more than"
                f" {SOCKET_PATH_BYTES_MAX} bytes; choose a shorter --room, such as /dev/shm/ks-n1"
            )
        private.make(self.directory)
        self._lock_out_others()
        boot = self.directory / "boot"
        if not boot.exists():
            _write_whole(boot, secrets.token_hex(8).encode())
        self.boot = boot.read_text(encoding="utf-8")
        state = _read_state(self.directory)
        self.term, self.peer_port = state.term, state.peer_port
        self.preload, self.store, self.health = state.preload, state.store, state.health
        self.seq = state.seq
        self.workers = {worker.pid: worker for worker in state.workers}
        self.jobs = {job.spec.job: job for job in state.jobs}

    def _lock_out_others(self) -> None:
        """One agent per room; the kernel frees the lock when its holder dies, however it dies."""
        self._lock = (self.directory / "agent.lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"another agent serves {self.directory}; stop it, or choose another --room"
            ) from None

    def save(self) -> None:
        """Write the state. Called after each change and before its news leaves the node. Raises
        OSError in a full room: an order that could not be written down is not obeyed."""
        state = AgentState(
            self.term,
            self.peer_port,
            self.preload,
            self.store,
            tuple(self.workers.values()),
            tuple(self.jobs.values()),
            self.health,
            self.seq,
        )
        _write_whole(_state_path(self.directory), codec.dumps(codec.to_plain(state)))

    def save_if_possible(self) -> bool:
        """For what is so, written down or not: who lives here, who died, where we listen. None of
        it is what orders are refused by, and the next save has it, too."""
        try:
            self.save()
        except OSError as error:
            log.error("room.not_saved", path=_state_path(self.directory), why=error)
            return False
        return True

    def job_room(self, job: JobId) -> Path:
        """Where a job's pages, rings and last words are."""
        assert "/" not in job and job not in ("", ".", ".."), f"job id {job!r} is no file name"
        return self.directory / job

    def ending_path(self, record: WorkerRecord) -> Path:
        seated = f"{record.rank}-{record.incarnation}"
        name = seated if record.rank >= 0 else f"standby-{record.slot}"
        return self.job_room(record.job) / f"ending-{name}.json"

    def meet_job(self, spec: JobSpec) -> JobRecord:
        """The job's record, made at the first order that brings its spec."""
        known = self.jobs.get(spec.job)
        record = JobRecord(spec) if known is None else replace(known, spec=spec)
        self.jobs[spec.job] = record
        self.job_room(spec.job).mkdir(parents=True, exist_ok=True)
        return record

    def sweep_job(self, job: JobId) -> None:
        """Forget the private state of an earlier run: a fresh start must not find old entries."""
        for path in _left(self.job_room(job), _LEFT):
            path.unlink(missing_ok=True)

    def sweep_covers(self, job: JobId) -> None:
        """The last rank of a job here is gone: what it kept of others nobody else can use."""
        for path in _left(self.job_room(job), _COVERS):
            path.unlink(missing_ok=True)

    def kept_jobs(self) -> tuple[str, ...]:
        """Jobs of which something is left here, whether or not there is a record of them. If they
        are too many, each time those behind the last: some of them may have to stay for long."""
        rooms = sorted(path for path in self.directory.iterdir() if path.is_dir())
        rooms.sort(key=lambda path: path.name <= self._kept_told)
        kept = (path.name for path in rooms if any(_left(path, _LEFT)))
        told = tuple(islice(kept, KEPT_JOBS_MAX))
        self._kept_told = told[-1] if told else ""
        return told

    def forget_job(self, job: JobId) -> None:
        """Without its record. Its directory goes if it is empty."""
        self.jobs.pop(job, None)
        with contextlib.suppress(OSError):
            self.job_room(job).rmdir()


def processes(directory: Path) -> tuple[ProcessRecord, ...]:
    """Every process that a room's state names: workers, standbys, preload server, store, and the
    health program if it runs."""
    state = _read_state(directory)
    named = [ProcessRecord(worker.pid, worker.start) for worker in state.workers]
    named += [record for record in (state.preload, state.health) if record is not None]
    if state.store is not None:
        named.append(ProcessRecord(state.store.pid, state.store.start))
    return tuple(named)


def workers(directory: Path) -> tuple[WorkerRecord, ...]:
    """The living workers and standbys that a room's state names."""
    return tuple(
        worker
        for worker in _read_state(directory).workers
        if process.life(worker.pid, worker.start) is not process.Life.GONE
    )


def clear(directory: Path, seconds_max: float = 5.0) -> None:
    """Kill what lives in a room and remove it: the node's memory is gone. The agent goes first."""
    named = processes(directory)
    for record in named:
        kill_group(record.pid, record.start, signal.SIGKILL)
    deadline = time.monotonic() + seconds_max
    while any(_living(named)) and time.monotonic() < deadline:
        time.sleep(0.01)
        for record in named:
            kill_group(record.pid, record.start, signal.SIGKILL)
    shutil.rmtree(directory, ignore_errors=True)


def kill_group(pid: int, start: int, number: signal.Signals) -> bool:
    """Signal a process and its children, if it is still the process that was meant.

    False: it could not be told whether it is, for want of a file say. It may live: try again.

    The whole group: a loader's workers inherit the sockets of their rank, and as long as one of
    them lives the peers of a dead rank see no end of stream.
    """
    life = process.life(pid, start)
    if life in (process.Life.GONE, process.Life.UNKNOWN):
        return life is process.Life.GONE
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        # Between fork and setsid there is no such group yet.
        _kill_one(pid, number)
    return True


async def end_group(record: ProcessRecord) -> None:
    """Kill a process and its children, as soon as it can be told whether it is still there."""
    while True:
        if kill_group(record.pid, record.start, signal.SIGKILL):
            return
        await asyncio.sleep(LOOK_SECONDS)


def _kill_one(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _living(records: tuple[ProcessRecord, ...]) -> Iterator[bool]:
    return (process.life(r.pid, r.start) is not process.Life.GONE for r in records)


def _left(job_room: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    return (p for pattern in patterns for p in job_room.glob(pattern) if p.is_file())


def _state_path(directory: Path) -> Path:
    return directory / "agent-state.json"


def _read_state(directory: Path) -> AgentState:
    try:
        raw = _state_path(directory).read_bytes()
    except FileNotFoundError:
        return AgentState()
    try:
        return codec.from_plain(AgentState, codec.loads(raw))
    except WireError as error:
        # Of another version. Living workers reconnect by themselves and are adopted then.
        log.error("room.state_unreadable", path=_state_path(directory), why=error)
        return AgentState()


def _write_whole(path: Path, data: bytes) -> None:
    fresh = path.with_name(path.name + ".new")
    try:
        fresh.write_bytes(data)
    except OSError:
        # A full room needs what half of it takes.
        fresh.unlink(missing_ok=True)
        raise
    fresh.replace(path)
