"""What a run uses, seen from outside: memory of all its processes, bytes, and what others took.

Memory is the sum of proportional set sizes: pages that several processes share count once. The
bytes are the counters of the network interface; on loopback that is everything this machine says to
itself, so nothing else should run. What went to others on the machine, its host among them, is
told with each run: a comparison in which that met one arm and not the other says nothing.
"""

from __future__ import annotations

import threading
from pathlib import Path

from bench import figures, quiet
from bench.launch import marked

LOOK_SECONDS = 2.0


class Watch(threading.Thread):
    """From `start` to `stop`."""

    def __init__(self, directory: str, interface: str) -> None:
        super().__init__(name="watch", daemon=True)
        self.memory_bytes_max = 0
        self.processes_max = 0
        self.others: list[float] = []
        """The share of the machine that went to others, look by look."""
        self._directory = directory
        self._interface = interface
        self._before = interface_bytes(interface)
        self._over = threading.Event()

    def run(self) -> None:
        known: list[int] = []
        before = quiet.look(known)
        while not self._over.wait(LOOK_SECONDS):
            if known:
                # Of the same processes as before: one that was started or ended in between counts
                # as others', which is on the safe side.
                self.others.append(quiet.others(before, quiet.look(known)))
            pids = known = list(marked(self._directory))
            before = quiet.look(known)
            self.memory_bytes_max = max(self.memory_bytes_max, sum(map(memory_bytes, pids)))
            self.processes_max = max(self.processes_max, len(pids))

    def begin_counting(self) -> None:
        """From the first step on."""
        self.others.clear()
        self._before = interface_bytes(self._interface)

    def others_share(self) -> float | None:
        """The median: starts and deaths of our own processes are outliers in it. None: nobody
        could look, because nothing of the run was on this machine."""
        return figures.median(self.others) if self.others else None

    def moved_bytes(self) -> int:
        return interface_bytes(self._interface) - self._before

    def stop(self) -> None:
        self._over.set()
        if self.is_alive():
            self.join(10.0)


def memory_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0  # It ended while we looked.
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def interface_bytes(name: str) -> int:
    """What an interface has sent since the machine was started."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        known, _, rest = line.partition(":")
        if known.strip() == name:
            return int(rest.split()[8])
    return 0
