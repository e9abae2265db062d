"""steps.jsonl: one line per committed step, and one where a fallback went back to an earlier one.

Only rank 0 writes, but every rank remembers its last few records: whoever takes rank 0's seat
writes the lines that its predecessor did not get to, and reads the file's tail so that no line is
written twice. A line quotes the journal's head now and then; whoever keeps this file can tell if
the journal was rewritten.

Must never: break training because a disk is full. Lines that cannot be written are kept and follow
later; beyond a bound they are missing, and `keepstep verify` names the first step that is.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

RECORDS_KEPT = 8
"""Ranks differ by one step and a commit trails by one more; the rest is slack."""
HEAD_EVERY_STEPS = 100
"""The journal's head is quoted when it moved, and this often in any case."""
CLOSE_EVERY_LINES = RECORDS_KEPT // 2
"""A network file system writes through when a file is closed, and what a lost node had not written
must be what others still remember."""
LINES_OWED_MAX = 20_000
"""A night's worth for a disk that is full, in about 10 MB of memory."""
SLOW_SECONDS = 0.1
WAIT_TIMES = 50
"""A disk that takes long to say no is asked again after so many times as long: a fiftieth of the
training's time at most goes into asking."""
_TAIL_BYTES = 65536


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What a committed step's line says."""

    step: int
    generation: int
    samples: tuple[int, int]
    """Range of sample positions in the job's global order: [first, past the last)."""
    digest: str
    """Of a slice of the state that moves on with each step (see docs/concepts.md)."""
    at: float = 0.0
    """When it was applied, by the clock of the rank that wrote the line; 0: not known."""
    busy: dict[str, float] = field(default_factory=dict)
    """Declared slowness since the step before it: what for, and how many seconds."""
    work: dict[str, float] = field(default_factory=dict)
    """What the job reports of a step, over all ranks: `flops`, `tokens`."""


class StepLog:
    """The job's step log, as this rank sees it."""

    def __init__(self, path: Path | None, now: Callable[[], float] = time.time) -> None:
        self.path = path
        """None on ranks other than 0, and where no state directory is set."""
        self._now = now
        self._busy: dict[str, float] = {}
        self.work: dict[str, float] = {}
        """Of each step from now on."""
        self._records: deque[StepRecord] = deque(maxlen=RECORDS_KEPT)
        self._written: int | None = None
        self._head, self._head_due = "", 0
        self._file, self._unclosed = -1, 0
        self._starts_at: int | None = None
        """The boundary of a start that the file does not know of yet."""
        self._owed: deque[StepRecord] = deque(maxlen=LINES_OWED_MAX)
        """Of committed steps, while the file cannot be written."""
        self._retry_at = 0.0
        self._said: set[str] = set()

    def remember(self, record: StepRecord) -> None:
        """A step was applied here, now; it is not committed yet."""
        busy, self._busy = self._busy, {}
        stamped = replace(record, at=round(self._now(), 6), busy=busy, work=self.work)
        self._records.append(stamped)

    def spend(self, name: str, seconds: float) -> None:
        """Time that was declared before the coming step: no part of it, and no gap either."""
        self._busy[name] = round(self._busy.get(name, 0.0) + seconds, 6)

    def amend(self, digest: Callable[[int], str]) -> None:
        """A step was remembered before its state was complete: now it is."""
        whole = [r if r.digest else replace(r, digest=digest(r.step)) for r in self._records]
        self._records.clear()
        self._records.extend(whole)

    def forget_after(self, step: int) -> None:
        """An uncommitted step is retried: its record goes. Somebody else may have written."""
        self._written = None
        kept = [r for r in self._records if r.step < step]
        self._records.clear()
        self._records.extend(kept)

    def records(self) -> list[dict[str, Any]]:
        return [_plain(record) for record in self._records]

    def adopt(self, records: list[dict[str, Any]]) -> None:
        """A joiner takes its source's memory of the last steps."""
        self._records.clear()
        for r in records:
            first, past = r["samples"]
            more = {name: r[name] for name in ("at", "busy", "work") if name in r}
            known = StepRecord(r["step"], r["generation"], (first, past), r["digest"], **more)
            self._records.append(known)
        self._written = None

    def commit(self, step: int, head: str) -> None:
        """Write every remembered line up to `step`, or keep it for later."""
        if self.path is None:
            return
        begun = time.monotonic()
        if begun >= self._retry_at:
            try:
                self._write(step, head)
            except (OSError, ValueError) as error:
                # What is there is read anew before the next try: a line may have been cut short.
                self._written = None
                with contextlib.suppress(OSError):
                    self._close()
                took = time.monotonic() - begun
                self._retry_at = begun + took * WAIT_TIMES if took > SLOW_SECONDS else 0.0
                self._say(
                    f"{self.path} cannot be written: {error}; training goes on, and the lines "
                    "wait in the memory of rank 0 until it can"
                )
            else:
                if self._owed:
                    self._owed.clear()
                    self._say(f"{self.path} can be written again")
                return
        kept = self._owed[-1].step if self._owed else -1
        self._owed.extend(r for r in self._records if kept < r.step <= step)

    def _write(self, step: int, head: str) -> None:
        assert self.path is not None, "only who has a path writes"
        if self._written is None:
            self._written = last_step(self.path)
        if self._starts_at is not None:
            if self._written >= self._starts_at:
                self._append([{"fallback_to": self._starts_at}])
                self._written = self._starts_at - 1
            self._starts_at = None
        known = self._records
        if self._owed:
            known = deque({r.step: r for r in (*self._owed, *self._records)}.values())
        fresh = [r for r in known if self._written < r.step <= step]
        if fresh:
            lines = [_plain(r) for r in fresh]
            quotes = head and (head != self._head or fresh[-1].step >= self._head_due)
            if quotes:
                lines[-1]["head"] = head
            self._append(lines)
            self._written = fresh[-1].step
            if quotes:
                self._head, self._head_due = head, fresh[-1].step + HEAD_EVERY_STEPS

    def _append(self, lines: list[dict[str, Any]]) -> None:
        """In one write, so that a death leaves at most the last line cut short."""
        assert self.path is not None, "only who has a path writes"
        if self._file < 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._file = os.open(self.path, flags, 0o644)
        left = memoryview("".join(json.dumps(line) + "\n" for line in lines).encode())
        while left:
            left = left[os.write(self._file, left) :]
        self._unclosed += len(lines)
        if self._unclosed >= CLOSE_EVERY_LINES:
            self._close()

    def _close(self) -> None:
        # Forgotten first: also a close that fails has closed it.
        file, self._file, self._unclosed = self._file, -1, 0
        if file >= 0:
            os.close(file)

    def start_at(self, boundary: int) -> None:
        """A first generation, or one after a fallback: say so if lines of later steps exist."""
        self._written, self._starts_at = None, boundary
        self.commit(boundary - 1, "")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            # What is said may go to the same disk.
            with contextlib.suppress(OSError):
                sys.stderr.write(f"keepstep: {text}\n")
                sys.stderr.flush()


def last_step(path: Path) -> int:
    """The step of the last whole line; -1 for none. A line cut short by a death is cut off."""
    if not path.exists():
        return -1
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        tail = file.read()
        whole, newline, rest = tail.rpartition(b"\n")
        if rest:
            file.truncate(size - len(rest))
    if not newline:
        return -1
    last = json.loads(whole.rpartition(b"\n")[2])
    return int(last["step"]) if "step" in last else int(last["fallback_to"]) - 1


def _plain(record: StepRecord) -> dict[str, Any]:
    plain = {
        "step": record.step,
        "generation": record.generation,
        "samples": list(record.samples),
        "digest": record.digest,
    }
    more = {"at": record.at, "busy": record.busy, "work": record.work}
    return plain | {name: value for name, value in more.items() if value}
