"""Is a process alive, stopped or gone: what the kernel says, without the process's help.

A pid alone names nobody: pids are used again. A process is its pid together with its start time
(field 22 of /proc/<pid>/stat, in clock ticks since boot), and every signal is sent only after both
were compared.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """One look at /proc/<pid>/stat."""

    pid: int
    start: int
    """Ticks since boot: with the pid, the process's name for good."""
    state: str
    """The kernel's letter: R, S, D, T, t, Z, X."""
    status: int = 0
    """A zombie's wait status, if we may know it; 0 otherwise."""


class Life(StrEnum):
    """What a reading means for the process that was expected under its pid."""

    ALIVE = "alive"
    STOPPED = "stopped"
    """By SIGSTOP or a debugger: it does nothing, and says nothing either."""
    GONE = "gone"
    UNKNOWN = "unknown"
    """It cannot be looked at now, as where no file is to be had: it may live, so nobody may take it
    for gone; and it may be another process, so nobody may signal it."""


def probe(pid: int) -> ProcessReading | None:
    """Read the process under this pid, if there is one and if it can be read."""
    try:
        return look(pid)
    except OSError:
        return None


def look(pid: int) -> ProcessReading | None:
    """The same, but None means for sure that there is none: raises OSError if it cannot be read,
    as where no file is to be had. That says nothing about the process."""
    try:
        raw = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name is in parentheses and may hold spaces and parentheses itself.
    fields = raw[raw.rfind(")") + 2 :].split()
    return ProcessReading(pid, int(fields[19]), fields[0], int(fields[49]))


def judge(reading: ProcessReading | None, start: int) -> Life:
    """Whether the process that started at `start` lives. A zombie does not."""
    if reading is None or reading.start != start or reading.state in ("Z", "X", "x"):
        return Life.GONE
    return Life.STOPPED if reading.state in ("T", "t") else Life.ALIVE


def exit_code(reading: ProcessReading | None, start: int) -> int | None:
    """How a process ended that its parent has not reaped yet; None where the kernel does not say.

    Only a failure counts: zero is also what we read about a process that we may not inspect.
    """
    if reading is None or reading.start != start or reading.state != "Z" or not reading.status:
        return None
    return os.waitstatus_to_exitcode(reading.status)


def life(pid: int, start: int) -> Life:
    """Look and judge in one go."""
    try:
        return judge(look(pid), start)
    except OSError:
        return Life.UNKNOWN
