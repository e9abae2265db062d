"""What a rank did, written by the workload itself and by no system under test. No torch here.

One file per rank, appended by whoever has that rank at the time; one write per line, so that a
death cuts at most the last line short. Times are this machine's monotonic clock, in nanoseconds;
where ranks are on several machines (KSBENCH_CLOCK=wall), the time of day, which those have to keep
alike.

    {"k": "start", "pid": 4711, "host": "a", "t": …}
    {"k": "step", "s": 12, "b": began, "t": applied, "ids": […], "w": [marks by rank], "loss": 2.31}
    {"k": "end", "s": 100, "t": …, "digest": "…", "loss": 2.1, "windows": 7264}

bench.steady sets KSBENCH_GATE, the path of a socket: then each step also passes a gate, at which
the driver lets arms run in turns. bench.turns does the same by KSBENCH_TURN, where ranks may die in
between. Without either there is none.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.workload.turn import Pause, Turn

GATE, TURN = "KSBENCH_GATE", "KSBENCH_TURN"
CLOCK, HOST = "KSBENCH_CLOCK", "KSBENCH_HOST"
WALL = "wall"


def now_ns() -> int:
    """The clock of the truth, and of nothing else."""
    return time.time_ns() if os.environ.get(CLOCK) == WALL else time.monotonic_ns()


class TruthLog:
    """This process's hand in the file of its rank. `pause`: around a wait at the gate."""

    def __init__(self, directory: Path, rank: int, pause: Pause = contextlib.nullcontext) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(directory / f"rank-{rank}.jsonl", flags, 0o644)
        self._gate: Any = None
        if path := os.environ.get(GATE):
            # It lives beside torch; a run without a gate does not need it.
            from bench.overhead_worker import Gate

            self._gate = Gate(path, rank, pause)
        self._turn = Turn(path, rank, pause) if (path := os.environ.get(TURN)) else None

    def start(self) -> None:
        # A line that a dead predecessor left unfinished must not swallow ours.
        os.write(self._file, b"\n")
        # By the name under which it was started: by that one it can be reached.
        host = os.environ.get(HOST) or socket.gethostname()
        self._say({"k": "start", "pid": os.getpid(), "host": host, "t": now_ns()})

    def step(
        self, number: int, began: int, ids: Sequence[int], marks: Sequence[int], loss: float
    ) -> None:
        """The update of this step is in on this rank."""
        self._say(
            {
                "k": "step",
                "s": number,
                "b": began,
                "t": now_ns(),
                "ids": list(ids),
                "w": list(marks),
                "loss": round(loss, 6),
            }
        )
        if self._gate is not None:
            self._gate.passed()
        if self._turn is not None:
            self._turn.passed(number + 1)

    def end(self, steps: int, digest: str, loss: float, windows: int) -> None:
        """Training is over here."""
        self._say(
            {
                "k": "end",
                "s": steps,
                "t": now_ns(),
                "digest": digest,
                "loss": loss,
                "windows": windows,
            }
        )

    def _say(self, plain: dict[str, Any]) -> None:
        os.write(self._file, json.dumps(plain, separators=(",", ":")).encode() + b"\n")
