"""The operator's own health program: run it now and then, and tell what it says of this node.

    exit code   0 well   1 avoid   2 leave   3 imminent   any other: it failed, and said nothing
    its last line of output is the reason; with `slot=1` in front, of that slot alone

`judge` is pure. A program that hangs, fails or cannot be started is logged and means nothing: the
detector is broken then, not the node. What it said before holds for ten runs and ends by itself, so
that a word does not outlive the agent or the setting that it came from. Nothing here may hold up
the agent: its output is bounded, and so is its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from keepstep import wire
from keepstep.agent import log
from keepstep.agent.environment import without_secrets
from keepstep.agent.room import ProcessRecord, Room, end_group, kill_group
from keepstep.config import AgentSettings
from keepstep.detect import process
from keepstep.errors import KeepstepError, Permanent, Transient
from keepstep.model import REASON_CHARS_MAX, NodeId, Severity

HOLD_RUNS = 10
"""For how many runs its word holds, if it is not said again."""
RENEW_RUNS = 3
"""How often a word that stands is said again: two may get lost."""
OUTPUT_BYTES_MAX = 1 << 20
"""A program that writes more is not read any further, and so comes to its time limit."""
DRAIN_SECONDS_MAX = 1.0
"""How long we wait for the last output of one that has ended; a child of it may keep the pipe."""

SEVERITIES: Mapping[int, Severity | None] = {
    0: None,
    1: Severity.AVOID,
    2: Severity.LEAVE,
    3: Severity.IMMINENT,
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one run says of the node."""

    severity: Severity | None
    slot: int = -1
    reason: str = ""


def judge(code: int, output: str, slots: int) -> Verdict:
    """What a run means. Raises Permanent, which says why it means nothing."""
    if code not in SEVERITIES:
        how = f"by signal {-code}" if code < 0 else f"with {code}"
        raise Permanent(f"it ended {how}; 0, 1, 2 and 3 have a meaning")
    severity = SEVERITIES[code]
    if severity is None:
        return Verdict(None)
    lines = [line.strip() for line in output.splitlines()]
    reason = next((line for line in reversed(lines) if line), "")
    slot = -1
    if named := re.match(r"slot=(\S*)\s*", reason):
        reason = reason[named.end() :]
        slot = int(named[1]) if re.fullmatch(r"[0-9]{1,6}", named[1]) else slots
        if slot >= slots:
            raise Permanent(f"it said slot={named[1]}; the slots here are 0 to {slots - 1}")
    reason = reason or f"the health program ended with {code}"
    return Verdict(severity, slot, reason[:REASON_CHARS_MAX])


class Health:
    """One node's health program, run over and over."""

    def __init__(
        self,
        node: NodeId,
        slots: int,
        settings: AgentSettings,
        room: Room,
        send: Callable[[wire.Message], object],
    ) -> None:
        self._node = node
        self._slots = slots
        self._settings = settings
        self._room = room
        self._send = send
        self._period = max(settings.health_seconds, settings.health_seconds_max)
        self._said: wire.Health | None = None
        self._said_at = 0.0
        self._told_at = 0.0

    async def run(self) -> None:
        """For ever: run it, judge it, tell it."""
        loop = asyncio.get_running_loop()
        if (left := self._room.health) is not None:
            # An earlier agent died while it ran.
            await end_group(left)
        while True:
            due = loop.time() + self._settings.health_seconds
            try:
                verdict = judge(*await self._run_once(), self._slots)
            except (OSError, KeepstepError) as error:
                log.warning("health.failed", command=self._settings.health_program, why=error)
            else:
                self._hear(verdict, loop.time())
            await asyncio.sleep(max(0.0, due - loop.time()))

    def standing(self, now: float) -> list[wire.Message]:
        """What it said last, for an orchestrator that may not have heard it."""
        holds = self._said is not None and now < self._said_at + HOLD_RUNS * self._period
        return [self._said] if holds else []

    def _hear(self, verdict: Verdict, now: float) -> None:
        before, self._said_at = self._said, now
        changed = before is None or (before.severity, before.slot) != (
            verdict.severity,
            verdict.slot,
        )
        wearing = verdict.severity is not None and now >= self._told_at + RENEW_RUNS * self._period
        if not changed and not wearing:
            return
        hold = HOLD_RUNS * self._period
        self._said = wire.Health(self._node, verdict.severity, verdict.reason, verdict.slot, hold)
        self._told_at = now
        if changed:
            well = verdict.severity is None
            what = "well" if well else f"{verdict.severity}: {verdict.reason}"
            log.info("health.changed", slot=verdict.slot, why=what)
        self._send(self._said)

    # ------------------------------------------------------------ one run

    async def _run_once(self) -> tuple[int, str]:
        """Its exit code and its output. Raises OSError if it cannot be started, Transient if it
        does not end."""
        loop = asyncio.get_running_loop()
        ours, its = os.pipe()
        pipe, output = await loop.connect_read_pipe(_Output, os.fdopen(ours, "rb", buffering=0))
        try:
            try:
                # A group of its own, so that what it started can be ended with it.
                child = await asyncio.create_subprocess_exec(
                    *self._settings.health_command(),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=its,
                    env=self._environment(),
                    start_new_session=True,
                )
            finally:
                os.close(its)
            code = await self._end_of(child, output)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_SECONDS_MAX):
                    await output.ended.wait()
            return code, output.text()
        finally:
            pipe.close()

    async def _end_of(self, child: asyncio.subprocess.Process, output: _Output) -> int:
        reading = process.probe(child.pid)
        record = ProcessRecord(child.pid, reading.start) if reading is not None else None
        self._record(record)
        limit = self._settings.health_seconds_max
        try:
            async with asyncio.timeout(limit):
                return await child.wait()
        except TimeoutError:
            why = f"more than {OUTPUT_BYTES_MAX} bytes of output" if output.full else "killed"
            raise Transient(f"it did not end within {limit:g} s: {why}") from None
        finally:
            if child.returncode is None:
                # Over its time, or the agent is leaving. Alone, where its group cannot be told.
                if record is None or not kill_group(record.pid, record.start, signal.SIGKILL):
                    child.kill()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DRAIN_SECONDS_MAX):
                        await child.wait()
            self._record(None)

    def _record(self, record: ProcessRecord | None) -> None:
        """The next agent must find what this one may leave behind."""
        self._room.health = record
        self._room.save_if_possible()

    def _environment(self) -> dict[str, str]:
        inherited = without_secrets(os.environ)
        return {**inherited, "KEEPSTEP_NODE": self._node, "KEEPSTEP_SLOTS": str(self._slots)}


class _Output(asyncio.Protocol):
    """What the program writes, up to a bound."""

    def __init__(self) -> None:
        self.full = False
        self.ended = asyncio.Event()
        self._kept = bytearray()
        self._pipe: asyncio.ReadTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.ReadTransport)
        self._pipe = transport

    def data_received(self, data: bytes) -> None:
        self._kept += data
        if len(self._kept) > OUTPUT_BYTES_MAX and self._pipe is not None:
            self.full = True
            self._pipe.pause_reading()

    def connection_lost(self, _: Exception | None) -> None:
        self.ended.set()

    def text(self) -> str:
        return self._kept.decode(errors="replace")
