"""The node's store process: hosts a TCPStore that outlives workers and the agent.

Forked from the preload server, so that it starts in milliseconds. If it dies, a new one is started
on a new port, and the orchestrator hears of both: groups of the living generation have met already
and go on, but the next one must meet at the new place.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from keepstep.agent import log
from keepstep.agent.environment import without_secrets
from keepstep.agent.forks import Forks
from keepstep.agent.preload import Fork
from keepstep.agent.room import LOOK_SECONDS, Room, StoreRecord
from keepstep.detect import process
from keepstep.errors import Unreachable

ENTRY = "keepstep.training.store_host:main"
START_SECONDS_MAX = 60.0
"""With torch preloaded a few milliseconds; without, an import of torch."""
RETRY_SECONDS = 1.0
STEADY_SECONDS, BACKOFF_SECONDS_MAX = 60.0, 5.0
"""One that lived shorter than this has died young. After the first of those the next is started at
once; further ones wait, up to some seconds: each new store is a new generation for the jobs that
meet there, and meanwhile they cannot."""


class Store:
    """Keeps one store process alive."""

    def __init__(self, room: Room, on_replaced: Callable[[], None]) -> None:
        self._room = room
        self._on_replaced = on_replaced
        self.ready = asyncio.Event()

    @property
    def port(self) -> int:
        return self._room.store.port if self._room.store is not None else 0

    async def run(self, forks: Forks) -> None:
        """Adopt or start, wait for its death, start again, for ever."""
        had_one = self._room.store is not None and self._room.store.port > 0
        died_young = 0
        while True:
            record = self._room.store
            if record is None or process.life(record.pid, record.start) is process.Life.GONE:
                try:
                    record = await self._start(forks)
                except Unreachable as error:
                    log.error("store.not_started", why=error)
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                log.info("store.started", pid=record.pid, port=record.port)
                if had_one:
                    self._on_replaced()
            elif record.port == 0:
                # The agent before this one died while the store was starting.
                record = await self._settled(record)
                if record is None:
                    continue
            had_one = True
            self.ready.set()
            began = asyncio.get_running_loop().time()
            await _until_gone(record)
            lived = asyncio.get_running_loop().time() - began
            died_young = died_young + 1 if lived < STEADY_SECONDS else 0
            wait = backoff_seconds(died_young)
            log.warning("store.lost", pid=record.pid, port=record.port, again_in_seconds=wait)
            await asyncio.sleep(wait)

    async def _start(self, forks: Forks) -> StoreRecord:
        port_file = self._room.store_port_file
        port_file.unlink(missing_ok=True)
        inherited = without_secrets(os.environ)
        environment = {k: v for k, v in inherited.items() if not k.startswith("KEEPSTEP_")}
        named = await forks.fork(
            Fork(
                key=f"store/{secrets.token_hex(4)}",
                entry=ENTRY,
                arguments=("--port-file", str(port_file), "--address", self._room.address),
                environment=environment,
                directory=str(self._room.directory),
                log=str(self._room.store_log),
            )
        )
        # Recorded before it is ready: a stranger would be ended by the next agent, as one is of
        # which a full room has no record.
        self._room.store = StoreRecord(named.pid, named.start, 0)
        self._room.save_if_possible()
        port = await self._listening(port_file, self._room.store)
        self._room.store = StoreRecord(named.pid, named.start, port)
        self._room.save_if_possible()
        return self._room.store

    async def _settled(self, record: StoreRecord) -> StoreRecord | None:
        try:
            port = await self._listening(self._room.store_port_file, record)
        except Unreachable as error:
            log.error("store.not_started", why=error)
            await asyncio.sleep(RETRY_SECONDS)
            return None
        self._room.store = StoreRecord(record.pid, record.start, port)
        self._room.save_if_possible()
        return self._room.store

    async def _listening(self, port_file: Path, record: StoreRecord) -> int:
        deadline = asyncio.get_running_loop().time() + START_SECONDS_MAX
        while asyncio.get_running_loop().time() < deadline:
            if (port := _read_port(port_file)) is not None:
                return port
            if process.life(record.pid, record.start) is process.Life.GONE:
                raise Unreachable(f"the store process ended; see {self._room.store_log}")
            await asyncio.sleep(0.005)
        raise Unreachable(f"the store process did not listen within {START_SECONDS_MAX} s")


def backoff_seconds(died_young: int) -> float:
    """Before the next start, after so many in a row that died young."""
    if died_young < 2:
        return 0.0
    return float(min(BACKOFF_SECONDS_MAX, RETRY_SECONDS * 2.0 ** min(died_young - 2, 10)))


def _read_port(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text else None


async def _until_gone(record: StoreRecord) -> None:
    """Told by the kernel, or seen by looking while no descriptor is to be had, as with workers."""
    while True:
        pidfd = -1
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(record.pid)
        try:
            # Looked at after the open: now the descriptor cannot name a later process.
            life = process.life(record.pid, record.start)
            if life is process.Life.GONE:
                return
            if pidfd >= 0 and life is not process.Life.UNKNOWN:
                await _readable(pidfd)
                return
        finally:
            if pidfd >= 0:
                os.close(pidfd)
        await asyncio.sleep(LOOK_SECONDS)


async def _readable(pidfd: int) -> None:
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(pidfd)
