"""The agent's side of the preload server: start it or adopt it, ask it for forks, hear of exits.

The server is started in a session of its own, or forked from a common one (offspring.py), and found
again through its socket, so it outlives the agent. If it dies, a new one takes its place; its
children go on, watched by their pidfds, and only their exit statuses are lost. A request without an
answer is sent to the next server: the key of a request makes that safe.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

from keepstep.agent import log, offspring
from keepstep.agent.environment import without_secrets
from keepstep.agent.preload import (
    LINE_BYTES_MAX,
    Exited,
    Fork,
    Forked,
    Ready,
    Seen,
    command,
    from_line,
    to_line,
)
from keepstep.agent.room import ProcessRecord, Room, end_group, kill_group
from keepstep.detect import process
from keepstep.errors import Unreachable, WireError

DEFAULT_MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    # Two seconds in each worker and each spare, at an optimizer's first step, unless it is here.
    "torch._dynamo",
    "numpy",
    "keepstep.training.session",
)
CONNECT_SECONDS_MAX = 10.0
"""From the server's start to its socket: an interpreter's start, before any import."""
FORK_SECONDS_MAX = 300.0
"""The first fork waits for the server's imports, which a cold file system makes slow."""
NO_FILES = (errno.EMFILE, errno.ENFILE)


def preload_environment(known: Mapping[str, str]) -> dict[str, str]:
    """The server's own. One thread per library: a forked child keeps no pool of its parent's."""
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return without_secrets(known) | dict.fromkeys(threads, "1")


def preload_modules(environment: dict[str, str]) -> tuple[str, ...]:
    """What the server imports: KEEPSTEP_PRELOAD (comma-separated, may be empty), or the default."""
    chosen = environment.get("KEEPSTEP_PRELOAD")
    if chosen is None:
        return DEFAULT_MODULES
    return tuple(name.strip() for name in chosen.split(",") if name.strip())


class Forks:
    """One preload server, whichever process it is at the moment."""

    def __init__(
        self, room: Room, modules: Sequence[str], on_exit: Callable[[Exited], None]
    ) -> None:
        self.connected = False
        self._room = room
        self._modules = tuple(modules)
        self._on_exit = on_exit
        self._pending: dict[str, tuple[Fork, asyncio.Future[Forked]]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._own: subprocess.Popen[bytes] | None = None
        self._common = os.environ.get(offspring.COMMON, "")
        """The socket of the machine's common server; empty: there is none, or none to rely on."""
        self._on_trial = ""
        """The same, while nobody has seen the fork that it gave us serve."""

    async def run(self) -> None:
        """Keep a server and a connection to it, for ever."""
        while True:
            try:
                reader, self._writer = await self._connect()
                await self._listen(reader)
            except (OSError, Unreachable, WireError) as error:
                log.warning("preload.lost", why=error)
            self.connected = False
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            if self._own is not None and self._own.poll() is not None:
                self._own = None
            await asyncio.sleep(0.02)

    async def fork(self, fork: Fork) -> ProcessRecord:
        """Start a process; waits for the server's imports if it has only just started."""
        future = asyncio.get_running_loop().create_future()
        self._pending[fork.key] = (fork, future)
        if self._writer is not None:
            self._writer.write(to_line(fork))
        try:
            async with asyncio.timeout(FORK_SECONDS_MAX):
                forked = await future
        except TimeoutError:
            raise Unreachable(f"the preload server did not start {fork.key}") from None
        finally:
            self._pending.pop(fork.key, None)
        return ProcessRecord(forked.pid, forked.start)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        await self._ensure_server()
        deadline = loop.time() + CONNECT_SECONDS_MAX
        while True:
            try:
                streams = await asyncio.open_unix_connection(
                    str(self._room.preload_socket), limit=LINE_BYTES_MAX
                )
                # The one after it may come from there too: this one came to life.
                self._common, self._on_trial = self._common or self._on_trial, ""
                return streams
            except OSError as error:
                known = self._room.preload
                alive = known is not None and (
                    process.life(known.pid, known.start) is not process.Life.GONE
                )
                if not alive or loop.time() > deadline:
                    self._on_trial = ""
                    # That we have no file to reach it with is no fault of the server's.
                    if known is not None and error.errno not in NO_FILES:
                        kill_group(known.pid, known.start, signal.SIGKILL)
                    raise Unreachable(f"the preload server cannot be reached: {error}") from error
            await asyncio.sleep(0.01)

    async def _ensure_server(self) -> None:
        known = self._room.preload
        if known is not None and process.life(known.pid, known.start) is not process.Life.GONE:
            return
        self._room.preload_socket.unlink(missing_ok=True)
        arguments = ["--socket", str(self._room.preload_socket)]
        for name in self._modules:
            arguments += ["--import", name]
        record = await self._forked(arguments) if self._common else None
        how = "started" if record is None else "forked"
        self._room.preload = record or self._started(arguments)
        self._room.save_if_possible()
        modules = ",".join(self._modules) or "none"
        log.info(f"preload.{how}", pid=self._room.preload.pid, modules=modules)

    def _started(self, arguments: Sequence[str]) -> ProcessRecord:
        with self._room.preload_log.open("ab") as out:
            self._own = subprocess.Popen(
                command(arguments),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=preload_environment(os.environ),
                start_new_session=True,
            )
        try:
            reading = process.look(self._own.pid)
        except OSError:
            # Nobody would find it again.
            self._own.kill()
            raise
        assert reading is not None, "a child that was not waited for has its entry in /proc"
        return ProcessRecord(reading.pid, reading.start)

    async def _forked(self, arguments: Sequence[str]) -> ProcessRecord | None:
        """From the common server; None: a server of our own has to be started."""
        common, self._common = self._common, ""
        try:
            around = preload_environment(os.environ)
            record = await offspring.ask(common, self._room, arguments, around)
        except (OSError, Unreachable, WireError) as error:
            log.warning("preload.not_forked", why=error)
            return None
        self._on_trial = common
        return record

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        assert self._writer is not None
        for fork, _ in list(self._pending.values()):
            self._writer.write(to_line(fork))
        while line := await reader.readline():
            message = from_line(line)
            if isinstance(message, Ready):
                self.connected = True
                await self._disown_strangers(message)
            elif isinstance(message, Forked) and message.key in self._pending:
                future = self._pending[message.key][1]
                if not future.done():
                    future.set_result(message)
            elif isinstance(message, Exited):
                self._on_exit(message)
                self._writer.write(to_line(Seen(message.pid, message.start)))
        raise Unreachable("the preload server closed its socket")

    async def _disown_strangers(self, ready: Ready) -> None:
        """A fork that no agent recorded was reported to nobody: end it; its order comes again."""
        store = self._room.store
        known = {(w.pid, w.start) for w in self._room.workers.values()}
        if store is not None:
            known.add((store.pid, store.start))
        for child in ready.children:
            if (child.pid, child.start) not in known and child.key not in self._pending:
                log.warning("preload.stranger", key=child.key, pid=child.pid)
                await end_group(ProcessRecord(child.pid, child.start))
