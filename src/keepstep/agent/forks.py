"""The agent's side of the preload server: start it or adopt it, ask it for forks, hear of exits.

The server is started in a session of its own and found again through its socket, so it outlives
the agent. If it dies, a new one is started; its children go on, watched by their pidfds, and only
their exit statuses are lost. A request that got no answer is sent to the next server: the key of a
request makes that safe.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

from keepstep.agent import log
from keepstep.agent.environment import without_secrets
from keepstep.agent.preload import Exited, Fork, Forked, Ready, Seen, from_line, to_line
from keepstep.agent.room import ProcessRecord, Room, kill_group
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
LINE_BYTES_MAX = 16 * 1024 * 1024
CONNECT_SECONDS_MAX = 10.0
"""From the server's start to its socket: an interpreter's start, before any import."""
FORK_SECONDS_MAX = 300.0
"""The first fork waits for the server's imports, which a cold file system makes slow."""


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
            forked = await asyncio.wait_for(future, FORK_SECONDS_MAX)
        except TimeoutError:
            raise Unreachable(f"the preload server did not start {fork.key}") from None
        finally:
            self._pending.pop(fork.key, None)
        return ProcessRecord(forked.pid, forked.start)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CONNECT_SECONDS_MAX
        self._ensure_server()
        while True:
            try:
                return await asyncio.open_unix_connection(
                    str(self._room.preload_socket), limit=LINE_BYTES_MAX
                )
            except OSError as error:
                known = self._room.preload
                alive = known is not None and (
                    process.life(known.pid, known.start) is not process.Life.GONE
                )
                if not alive or loop.time() > deadline:
                    if known is not None:
                        kill_group(known.pid, known.start, signal.SIGKILL)
                    raise Unreachable(f"the preload server cannot be reached: {error}") from error
            await asyncio.sleep(0.01)

    def _ensure_server(self) -> None:
        known = self._room.preload
        if known is not None and process.life(known.pid, known.start) is not process.Life.GONE:
            return
        self._room.preload_socket.unlink(missing_ok=True)
        # -P: what lies in the agent's own directory is not on the workers' path.
        command = [sys.executable, "-P", "-m", "keepstep.agent.preload"]
        command += ["--socket", str(self._room.preload_socket)]
        for name in self._modules:
            command += ["--import", name]
        # One thread per library: a forked child keeps no pool of its parent's anyway.
        threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        environment = without_secrets(os.environ) | dict.fromkeys(threads, "1")
        with self._room.preload_log.open("ab") as out:
            self._own = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment,
                start_new_session=True,
            )
        reading = process.probe(self._own.pid)
        assert reading is not None, "a child that was not waited for has its entry in /proc"
        self._room.preload = ProcessRecord(reading.pid, reading.start)
        self._room.save()
        log.info("preload.started", pid=reading.pid, modules=",".join(self._modules) or "none")

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        assert self._writer is not None
        for fork, _ in list(self._pending.values()):
            self._writer.write(to_line(fork))
        while line := await reader.readline():
            message = from_line(line)
            if isinstance(message, Ready):
                self.connected = True
                self._disown_strangers(message)
            elif isinstance(message, Forked) and message.key in self._pending:
                future = self._pending[message.key][1]
                if not future.done():
                    future.set_result(message)
            elif isinstance(message, Exited):
                self._on_exit(message)
                self._writer.write(to_line(Seen(message.pid, message.start)))
        raise Unreachable("the preload server closed its socket")

    def _disown_strangers(self, ready: Ready) -> None:
        """A fork that no agent recorded was reported to nobody: end it; its order comes again."""
        store = self._room.store
        known = {(w.pid, w.start) for w in self._room.workers.values()}
        if store is not None:
            known.add((store.pid, store.start))
        for child in ready.children:
            if (child.pid, child.start) not in known and child.key not in self._pending:
                log.warning("preload.stranger", key=child.key, pid=child.pid)
                kill_group(child.pid, child.start, signal.SIGKILL)
