"""Child processes that are put back when they die: the launcher's half of "each may die".

A killed orchestrator replays its journal and a killed agent adopts its workers, but somebody has
to start them again. The first restart is at once; a child that keeps dying is started ever more
slowly, and given up with its last words when it dies too often. Each child has a session of its
own, so that a Ctrl-C meant for the launcher does not reach it.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.config import LauncherConfig
from keepstep.errors import Permanent

STARTED_WRONGLY = 2
LOOK_SECONDS = 0.25
"""How often children are looked at on a kernel without pidfds; with them, deaths show at once."""


@dataclass(frozen=True, slots=True)
class Program:
    """What to start."""

    name: str
    command: tuple[str, ...]
    log: Path
    """Its standard error, appended to; its standard output too unless `speaks`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    speaks: bool = False
    """True: its standard output is ours (workers' lines on the terminal)."""
    optional: bool = False
    """The others can do without it: they go on when it is given up."""
    final_codes: frozenset[int] = frozenset({STARTED_WRONGLY, 3})
    """Exit codes after which another start would be wrong: started wrongly (the first time: what
    worked once is tried again, for healthy workers depend on us), deposed. Leaving in good order is
    not one of them: whoever asked a child to leave did not ask us."""


class Child:
    """One program and the process that runs it at the moment."""

    def __init__(self, program: Program, config: LauncherConfig) -> None:
        self.program = program
        self.starts: list[float] = []
        """Moments of its starts, on our monotonic clock."""
        self.given_up = ""
        """Why it is not started again; empty while it is."""
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._due = 0.0

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.program.name} was never started"
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        assert not self.alive, f"{self.program.name} already runs"
        self.program.log.parent.mkdir(parents=True, exist_ok=True)
        with self.program.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.program.command,
                stdin=subprocess.DEVNULL,
                stdout=None if self.program.speaks else log,
                stderr=log,
                env={**os.environ, **self.program.environment},
                start_new_session=True,
            )
        self.given_up = ""
        self.starts = [*self.starts[-self._config.restarts_max :], time.monotonic()]

    def look(self, now: float) -> None:
        """Start it again if it is dead and the time has come."""
        if self._process is None or self.alive or self.given_up:
            return
        code = self._process.returncode
        if code in self.program.final_codes and (code != STARTED_WRONGLY or len(self.starts) == 1):
            # Who was started wrongly says so in one sentence.
            alone = re.sub(r"^keepstep \w+: ", "", self.last_words(1))
            words = f"{self.program.name} ended with {code}: {self.last_words()}"
            self.given_up = alone if code == STARTED_WRONGLY else words
            return
        recent = [start for start in self.starts if now - start < 60.0]
        if len(recent) >= self._config.restarts_max:
            self.given_up = f"{self.program.name} died {len(recent)} times in a minute: " + (
                self.last_words()
            )
            return
        if now >= restart_due(recent, self._config):
            self.start()

    def stop(self, seconds_max: float) -> None:
        """Ask it to leave, then make it."""
        if self._process is None:
            return
        self.given_up = self.given_up or "stopped"
        if self.alive:
            self._process.terminate()
            try:
                self._process.wait(seconds_max)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal the process without any farewell; with SIGKILL, wait until it is gone."""
        if self.alive:
            assert self._process is not None
            self._process.send_signal(number)
            if number is signal.SIGKILL:
                self._process.wait()

    def last_words(self, lines_max: int = 5) -> str:
        """The end of its log, for the message that somebody will read."""
        try:
            text = self.program.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "no log"
        return " | ".join(text.splitlines()[-lines_max:]) or "its log is empty"


def restart_due(starts: Sequence[float], config: LauncherConfig) -> float:
    """When to start again, from the moments of the recent starts: at once, then doubling."""
    if len(starts) < 2:
        return 0.0
    # A child that lived longer than the longest wait starts anew, without back-off.
    streak = 0
    for earlier, later in zip(reversed(starts[:-1]), reversed(starts[1:]), strict=True):
        if later - earlier > 2 * config.restart_seconds_max:
            break
        streak += 1
    if streak == 0:
        return 0.0
    wait = min(config.restart_seconds_max, config.restart_seconds_min * 2.0 ** (streak - 1))
    return float(starts[-1] + wait)


class Supervisor:
    """Looks after children in a thread of its own, until it is closed."""

    def __init__(self, config: LauncherConfig) -> None:
        self._config = config
        self._children: dict[str, Child] = {}
        self._paused: set[str] = set()
        self._lock = threading.RLock()
        self._wake_read, self._wake_write = os.pipe()
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="keepstep-supervisor", daemon=True)
        self._thread.start()

    def start(self, program: Program) -> Child:
        """Start a program, in place of an ended one of the same name."""
        with self._lock:
            child = Child(program, self._config)
            child.start()
            self._children[program.name] = child
            self._paused.discard(program.name)
        self._wake()
        return child

    def child(self, name: str) -> Child:
        with self._lock:
            return self._children[name]

    def kill(self, name: str, *, restart: bool, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill a child; with restart=False it stays down until `resume`."""
        with self._lock:
            if not restart:
                self._paused.add(name)
            self._children[name].kill(number)
        self._wake()

    def resume(self, name: str) -> None:
        """Start a child that was killed for good."""
        with self._lock:
            self._paused.discard(name)
            if not self._children[name].alive:
                self._children[name].start()
        self._wake()

    def forget(self, name: str) -> None:
        with self._lock:
            child = self._children.pop(name, None)
        if child is not None:
            child.stop(self._config.stop_seconds_max)

    def check(self) -> None:
        """Raise Permanent if a child was given up."""
        with self._lock:
            for name, child in self._children.items():
                if child.given_up and name not in self._paused and not child.program.optional:
                    raise Permanent(child.given_up)

    def close(self) -> None:
        """Stop every child, the newest first."""
        with self._lock:
            self._closed = True
            children = list(self._children.values())
        self._wake()
        self._thread.join(5.0)
        for child in reversed(children):
            child.stop(self._config.stop_seconds_max)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wake(self) -> None:
        os.write(self._wake_write, b"x")

    def _watch(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                now = time.monotonic()
                for name, child in self._children.items():
                    if name not in self._paused:
                        child.look(now)
                alive = [child.pid for child in self._children.values() if child.alive]
                all_up = len(alive) + len(self._paused) >= len(self._children)
            self._wait_for_a_death(alive, LOOK_SECONDS if all_up else 0.01)

    def _wait_for_a_death(self, pids: Sequence[int], seconds_max: float) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        opened: list[int] = []
        for pid in pids:
            try:
                opened.append(os.pidfd_open(pid))
            except OSError:
                # Gone already, or a kernel without pidfds: the next look will tell.
                continue
            poll.register(opened[-1], select.POLLIN)
        try:
            ready = poll.poll(seconds_max * 1000)
        finally:
            for descriptor in opened:
                os.close(descriptor)
        if any(descriptor == self._wake_read for descriptor, _ in ready):
            os.read(self._wake_read, 4096)
