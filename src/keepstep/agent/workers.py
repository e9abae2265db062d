"""Worker processes on slots: start them, watch them, end them, and adopt them after a restart.

A worker is a grandchild: the preload server forks and reaps it, the agent watches it through a
pidfd, which is readable the moment the process has ended. What is reported about a death is
decided by three witnesses, in this order: the worker's last words (a traceback, a good end), the
exit status from the preload server, and the pidfd alone.

Every record is in the room before its news leaves the node, so that an agent that dies at any
point finds its workers again. A full room gets it as soon as there is space: who lives is watched,
and who died is told of, all the same. But a standby takes no seat that is not written down.

No process is signalled unless pid and start time both fit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from keepstep import wire
from keepstep.agent import environment, log
from keepstep.agent.forks import Forks
from keepstep.agent.preload import Exited, Fork
from keepstep.agent.room import ENDINGS_MAX, LOOK_SECONDS, Room, WorkerRecord, kill_group
from keepstep.detect import process
from keepstep.detect.memory import Shortages
from keepstep.errors import Permanent, WireError
from keepstep.model import Generation, JobId, JobSpec, NodeId, Seat, Sign
from keepstep.page import Page, page_path

STATUS_SECONDS_MAX = 0.05
"""How long a death waits for its exit status; the news must be out within 100 ms."""
ADOPTED_STATUS_SECONDS_MAX = 1.0
"""The same for a worker that died while no agent was there."""
SAVE_SECONDS = 1.0
"""Between two tries to write down what a full room had no space for."""
UNKNOWN_EXIT_CODE = -9
"""When nobody could reap the process. Gone without a word is what SIGKILL looks like."""
SHORT_OF_MEMORY = (
    "the kernel killed it for lack of memory: give its pod, its Slurm step or its node more, "
    "or use less (the kernel's log says who used how much)"
)
ENTRY = "keepstep.training.entry:main"


class Worker:
    """A living process and what is known about it."""

    def __init__(self, record: WorkerRecord) -> None:
        self.record = record
        self.is_alive = True
        self.pidfd = -1
        """-1 also while it lives, if no descriptor is to be had."""
        self.is_condemned = False
        """To be killed, until it is dead."""
        self.exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()
        """Set once the death is recorded and reported."""
        self.words: wire.WorkerEnding | None = None
        self.page: Page | None = None
        self.status_seconds_max = STATUS_SECONDS_MAX

    @property
    def is_standby(self) -> bool:
        return self.record.rank < 0


class Workers:
    """Everything that runs on this node's slots."""

    def __init__(
        self,
        node: NodeId,
        room: Room,
        on_end: Callable[[Worker, wire.Observed], None],
    ) -> None:
        self.node = node
        self._room = room
        self._on_end = on_end
        self._living: dict[int, Worker] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._shortages = Shortages()
        self._saves_again = False
        self._exits: dict[tuple[int, int], int] = {}
        """Statuses of processes whose record is not made yet, or that are adopted later."""

    # ------------------------------------------------------------ who is there

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._living.values()))

    def of_job(self, job: JobId) -> list[Worker]:
        return [w for w in self if w.record.job == job]

    def seated(self, job: JobId) -> list[Worker]:
        return [w for w in self if w.record.job == job and not w.is_standby]

    def on_slot(self, slot: int) -> list[Worker]:
        return [w for w in self if w.record.slot == slot]

    def on_seat(self, job: JobId, rank: int, incarnation: int) -> Worker | None:
        for worker in self.seated(job):
            if (worker.record.rank, worker.record.incarnation) == (rank, incarnation):
                return worker
        return None

    def by_pid(self, pid: int) -> Worker | None:
        return self._living.get(pid)

    # ------------------------------------------------------------ starting

    async def start_worker(
        self, forks: Forks, around: environment.Surroundings, seat: Seat, start: wire.Order
    ) -> Worker:
        """Fork the worker of a seat, for StartWorkers or, as a joiner, for Assign."""
        action = start.action
        assert isinstance(action, wire.StartWorkers | wire.Assign)
        joiner = isinstance(action, wire.Assign)
        surrounded = environment.of_worker(
            around,
            seat,
            action.membership,
            start.generation,
            role="joiner" if joiner else "worker",
            resume_from="" if isinstance(action, wire.Assign) else action.resume_from,
        )
        if isinstance(action, wire.Assign):
            surrounded |= wire.joiner_environment(action)
        path = around.rank_log(seat.rank)
        key = f"{start.job}/rank{seat.rank}/{seat.incarnation}"
        record = WorkerRecord(
            job=start.job,
            slot=seat.slot,
            pid=0,
            start=0,
            rank=seat.rank,
            incarnation=seat.incarnation,
            generation=start.generation,
            log=str(path),
        )
        self._room.ending_path(record).unlink(missing_ok=True)
        return await self._fork(forks, _fork_request(around, key, surrounded, path), record)

    async def start_standby(
        self, forks: Forks, around: environment.Surroundings, slot: int, name: str
    ) -> Worker:
        """Fork a standby; it says itself when it is warm. `name` differs with each order."""
        spec = around.spec
        path = around.log_directory / f"standby_{self.node}_{slot}.log"
        record = WorkerRecord(
            job=spec.job, slot=slot, pid=0, start=0, level=spec.standby_level, log=str(path)
        )
        self._room.ending_path(record).unlink(missing_ok=True)
        key = f"{spec.job}/standby{slot}/{name}"
        request = _fork_request(around, key, environment.of_standby(around, slot), path)
        return await self._fork(forks, request, record)

    async def _fork(self, forks: Forks, request: Fork, record: WorkerRecord) -> Worker:
        named = await forks.fork(request)
        log.info(
            "worker.started", job=record.job, rank=record.rank, slot=record.slot, pid=named.pid
        )
        return self.watch(replace(record, pid=named.pid, start=named.start))

    # ------------------------------------------------------------ watching

    def adopt(self) -> None:
        """After a restart: watch what lives, report what died meanwhile."""
        for record in list(self._room.workers.values()):
            log.info("worker.adopted", job=record.job, rank=record.rank, pid=record.pid)
            # Who died unseen is in no hurry: the preload server may still have to be reached.
            self.watch(record).status_seconds_max = ADOPTED_STATUS_SECONDS_MAX

    def watch(self, record: WorkerRecord) -> Worker:
        """Record a process and hear of its end."""
        worker = Worker(record)
        self._living[record.pid] = worker
        self._room.workers[record.pid] = record
        if (code := self._exits.pop((record.pid, record.start), None)) is not None:
            worker.exit_code.set_result(code)
        if not self._heeds(worker):
            log.warning("worker.looked_at", job=record.job, rank=record.rank, pid=record.pid)
            self._spawn(self._look_at(worker))
        # One that a full room has no space for is watched all the same.
        self._save()
        return worker

    def _save(self) -> None:
        """Now or later: an agent that started before that would end who is not in the room."""
        if not self._room.save_if_possible() and not self._saves_again:
            self._saves_again = True
            self._spawn(self._save_again())

    async def _save_again(self) -> None:
        while self._saves_again:
            await asyncio.sleep(SAVE_SECONDS)
            with contextlib.suppress(OSError):
                self._room.save()
                self._saves_again = False

    def _heeds(self, worker: Worker) -> bool:
        """Whether the kernel will tell us of its end, or has. Nobody is dead for our own want of a
        file: only who is known to be gone."""
        record, pidfd = worker.record, -1
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(record.pid)
        # Looked at after the open: now the descriptor cannot name a later process of the same pid.
        life = process.life(record.pid, record.start)
        if life in (process.Life.ALIVE, process.Life.STOPPED) and pidfd >= 0:
            worker.pidfd = pidfd
            asyncio.get_running_loop().add_reader(pidfd, self._died, worker)
            return True
        if pidfd >= 0:
            os.close(pidfd)
        if life is process.Life.GONE:
            self._died(worker)
        return life is process.Life.GONE

    async def _look_at(self, worker: Worker) -> None:
        """Until the kernel tells us, or it has ended."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._heeds(worker):
                return

    def update(self, worker: Worker, record: WorkerRecord) -> None:
        """A worker took a seat, or a generation, as it was ordered. Raises OSError in a full room,
        and then it did not: the same order will find it as it was."""
        before = worker.record
        self._change(worker, record)
        try:
            self._room.save()
        except OSError:
            self._change(worker, before)
            raise

    def heard(self, worker: Worker, record: WorkerRecord) -> None:
        """A worker says that it is ready, or in which generation it is: it is so in any case."""
        self._change(worker, record)
        self._save()

    def _change(self, worker: Worker, record: WorkerRecord) -> None:
        worker.record = record
        if record.pid in self._room.workers:
            self._room.workers[record.pid] = record

    def heard_exit(self, exited: Exited) -> None:
        """The preload server reaped a process."""
        worker = self._living.get(exited.pid)
        if worker is None or worker.record.start != exited.start:
            self._exits[exited.pid, exited.start] = exited.code
            while len(self._exits) > ENDINGS_MAX:
                del self._exits[next(iter(self._exits))]
        elif not worker.exit_code.done():
            worker.exit_code.set_result(exited.code)

    def _died(self, worker: Worker) -> None:
        worker.is_alive = False
        if worker.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(worker.pidfd)
            os.close(worker.pidfd)
            worker.pidfd = -1
        if not _end_children(worker):
            self._spawn(_end_children_later(worker))
        self._spawn(self._conclude(worker))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _conclude(self, worker: Worker) -> None:
        """Collect the witnesses and report the death."""
        record = worker.record
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(worker.status_seconds_max):
                await asyncio.shield(worker.exit_code)
        code = worker.exit_code.result() if worker.exit_code.done() else UNKNOWN_EXIT_CODE
        words = worker.words or _last_words(self._room.ending_path(record))
        step, generation = _last_progress(self._room.job_room(record.job), record)
        sign, code, detail = self._judge(worker, words, code)
        observed = wire.Observed(
            node=self.node,
            job=record.job,
            sign=sign,
            rank=record.rank,
            incarnation=record.incarnation,
            generation=generation,
            step=max(step, words.step) if words else step,
            exit_code=code,
            detail=detail,
        )
        self._living.pop(record.pid, None)
        self._room.workers.pop(record.pid, None)
        job = self._room.jobs.get(record.job)
        if job is not None and record.rank >= 0:
            endings = (*job.endings, observed)[-ENDINGS_MAX:]
            self._room.jobs[record.job] = replace(job, endings=endings)
        if not self.seated(record.job):
            with contextlib.suppress(OSError):
                self._room.sweep_covers(record.job)
        self._save()
        if worker.page is not None:
            worker.page.close()
        log.info("worker.ended", job=record.job, rank=record.rank, sign=observed.sign, code=code)
        worker.gone.set()
        self._on_end(worker, observed)

    def _judge(
        self, worker: Worker, words: wire.WorkerEnding | None, code: int
    ) -> tuple[Sign, int, str]:
        known = worker.exit_code.done()
        if words is None:
            if code == -signal.SIGKILL and self._shortages.explains_a_death():
                return Sign.EXCEPTION, code, SHORT_OF_MEMORY
            return Sign.EXIT, code, _how(code, known=known)
        # It could still speak: what the kernel has killed, if anything, was a child of it.
        self._shortages.forget()
        # A kill after the traceback is no shortage of memory.
        raised = words.sign is Sign.EXCEPTION and code < 0
        return words.sign, code if known and not raised else _code_of(words), words.detail

    # ------------------------------------------------------------ ending

    def kill(self, worker: Worker) -> None:
        """SIGKILL, which a stopped process cannot put off. Tried again until its end is seen: who
        cannot be looked at for our own want of a file lives on otherwise, and who fenced waits."""
        struck = _strike(worker)
        if not worker.is_condemned:
            if not struck:
                log.warning("worker.not_looked_at", rank=worker.record.rank, pid=worker.record.pid)
            worker.is_condemned = True
            self._spawn(_strike_again(worker))

    async def fence(self, worker: Worker) -> None:
        """Kill and wait until the process is gone and its death is reported."""
        self.kill(worker)
        await worker.gone.wait()

    async def end(self, worker: Worker, grace_seconds: float, *, ask: bool) -> None:
        """Let a worker leave by itself, asked by SIGTERM or not, and kill it when time is up."""
        if ask:
            _ask(worker)
        try:
            async with asyncio.timeout(grace_seconds):
                await worker.gone.wait()
        except TimeoutError:
            await self.fence(worker)


def _strike(worker: Worker) -> bool:
    if kill_group(worker.record.pid, worker.record.start, signal.SIGKILL):
        return True
    # A descriptor that we have names it all the same. Its children follow when it is dead.
    _signal(worker, signal.SIGKILL)
    return False


async def _strike_again(worker: Worker) -> None:
    await asyncio.sleep(LOOK_SECONDS)
    while worker.is_alive:
        _strike(worker)
        await asyncio.sleep(LOOK_SECONDS)


def _ask(worker: Worker) -> None:
    record = worker.record
    life = process.life(record.pid, record.start)
    if life is process.Life.UNKNOWN:
        _signal(worker, signal.SIGTERM)
    elif life is not process.Life.GONE:
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGTERM)


def _signal(worker: Worker, number: signal.Signals) -> None:
    """Through its descriptor, which takes no look."""
    if worker.pidfd >= 0:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(worker.pidfd, number)


def _end_children(worker: Worker) -> bool:
    """The loader workers of a dead rank hold copies of its sockets: peers must see them closed now.
    False: it cannot be told whose group it is, for want of a file."""
    pid, start = worker.record.pid, worker.record.start
    try:
        reading = process.look(pid)
    except OSError:
        return False
    # Its parent will tell as well, but a rank's death is news that should not wait for it.
    code = process.exit_code(reading, start)
    if code is not None and not worker.exit_code.done():
        worker.exit_code.set_result(code)
    # As long as one of them lives the kernel gives the pid to nobody else; if somebody else has it,
    # the group is not ours.
    if reading is None or reading.start == start:
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
    return True


async def _end_children_later(worker: Worker) -> None:
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        if _end_children(worker):
            return


def surroundings(room: Room, spec: JobSpec) -> environment.Surroundings:
    """What the workers of this job find around them on this node."""
    base = Path(spec.log_directory).absolute() if spec.log_directory else room.directory / "logs"
    return environment.Surroundings(
        spec=spec,
        agent_socket=room.agent_socket,
        address=room.address,
        job_room=room.job_room(spec.job),
        log_directory=base / spec.job,
        inherited=os.environ,
    )


def _fork_request(
    around: environment.Surroundings, key: str, surrounded: dict[str, str], path: Path
) -> Fork:
    spec = around.spec
    target = ("-m", spec.script) if spec.module else (spec.script,)
    return Fork(
        key=key,
        entry=ENTRY,
        arguments=(*target, *spec.arguments),
        environment=surrounded,
        directory=str(Path(spec.directory).absolute()),
        log=str(path),
        preload=spec.preload,
    )


def _last_words(path: Path) -> wire.WorkerEnding | None:
    try:
        words = wire.decode(path.read_bytes())
    except (OSError, WireError):
        return None
    return words if isinstance(words, wire.WorkerEnding) else None


def _last_progress(job_room: Path, record: WorkerRecord) -> tuple[int, Generation]:
    """Where the page stands: shared memory tells it after the process is gone."""
    page = open_page(job_room, record.rank, record.incarnation)
    if page is None:
        return -1, record.generation
    progress = page.read()
    page.close()
    return progress.step, Generation(max(progress.generation, record.generation))


def open_page(job_room: Path, rank: int, incarnation: int) -> Page | None:
    """A worker's page, if it has made one and it is whole."""
    try:
        page = Page(page_path(job_room, rank, incarnation))
        page.read()
    except (OSError, ValueError, Permanent):
        return None
    return page


def _how(code: int, *, known: bool) -> str:
    if not known:
        return "gone; nobody could reap it"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"


def _code_of(words: wire.WorkerEnding) -> int:
    return 0 if words.sign is Sign.FINISHED else 1
