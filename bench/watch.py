"""What a run uses, seen from outside: memory of all its processes, bytes, and what others took.

Memory is the sum of proportional set sizes: pages that several processes share count once. The
bytes are the counters of the network interface; on loopback that is everything this machine says to
itself, so nothing else should run. What went to others on the machine, its host among them, is
told with each run: a comparison in which that met one arm and not the other says nothing.

    watch = watch_of(directory, interface, launch)   here, or on every host of a hostfile

    python -m bench.watch DIRECTORY INTERFACE        what a host does: a line for each look
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from bench import figures, quiet
from bench.arms.arm import Processes
from bench.launch import Launch, marked, python_path
from bench.record import ROOT

LOOK_SECONDS = 2.0
PROBES = 8
"""Of the pace, from one look to the next. On a rented machine it may be twice as slow in the next
millisecond, and only the mean of hundreds is good to a few percent."""
BUSY_SHARE_MIN = 0.7
ALONE_LOOKS_MAX = 600
"""A host's watcher whose run is over, and whom nobody told to end."""


@dataclass(frozen=True, slots=True)
class Look:
    """Of one machine at one moment."""

    memory_bytes: int
    """Of the run's processes."""
    sent_bytes: int
    """By the interface, since the machine was started."""
    others: float | None
    """The share of the machine that other processes had since the look before; None at the first.
    """
    pace: float | None
    """What the same work costs now (quiet.pace); None while the machine is idle, because then it
    always costs less."""
    stolen: float | None = None
    """The share that the machine's host kept; None at the first look."""


class Watch(Protocol):
    @property
    def memory_bytes_max(self) -> int: ...

    def start(self) -> None: ...

    def begin_counting(self) -> None:
        """From the first step on."""
        ...

    def others_share(self) -> float | None:
        """What the host kept, on average, and what other processes had, by the median: starts and
        deaths of our own ones are outliers in it. None: nobody could look, because nothing of the
        run was there."""
        ...

    def pace_seconds(self) -> float | None:
        """The mean. None: the machine was never busy."""
        ...

    def moved_bytes(self) -> int: ...

    def stop(self) -> None: ...


def watch_of(directory: str, interface: str, launch: Launch) -> Watch:
    if launch.hosts:
        return FarWatch(directory, interface, launch)
    return NearWatch(directory, interface)


class Looking:
    """Look after look at the processes that bear a run's mark."""

    def __init__(self, directory: str, interface: str) -> None:
        self._directory, self._interface = directory, interface
        self._known: list[int] = []
        self._before = quiet.look(())
        self._paces: list[float] = []

    def probe(self) -> None:
        self._paces.append(quiet.pace())

    def look(self) -> Look:
        others = pace = stolen = None
        if self._known:
            # Of the same processes as before: one that was started or ended in between counts
            # as others', which is on the safe side.
            now = quiet.look(self._known)
            stolen = quiet.stolen(self._before, now)
            others = max(0.0, quiet.others(self._before, now) - stolen)
            if self._paces and quiet.busy(self._before, now) >= BUSY_SHARE_MIN:
                pace = sum(self._paces) / len(self._paces)
        self._paces.clear()
        self._known = list(marked(self._directory))
        self._before = quiet.look(self._known)
        memory = sum(map(memory_bytes, self._known))
        return Look(memory, interface_bytes(self._interface), others, pace, stolen)


class NearWatch(threading.Thread):
    """This machine."""

    def __init__(self, directory: str, interface: str) -> None:
        super().__init__(name="watch", daemon=True)
        self.memory_bytes_max = 0
        self._looks: list[Look] = []
        self._looking = Looking(directory, interface)
        self._interface = interface
        self._sent_before = interface_bytes(interface)
        self._over = threading.Event()

    def run(self) -> None:
        probes = 0
        while not self._over.wait(LOOK_SECONDS / PROBES):
            self._looking.probe()
            probes += 1
            if probes % PROBES:
                continue
            look = self._looking.look()
            self.memory_bytes_max = max(self.memory_bytes_max, look.memory_bytes)
            self._looks.append(look)

    def begin_counting(self) -> None:
        self._looks.clear()
        self._sent_before = interface_bytes(self._interface)

    def others_share(self) -> float | None:
        return others_in(self._looks)

    def pace_seconds(self) -> float | None:
        return pace_in(self._looks)

    def moved_bytes(self) -> int:
        return interface_bytes(self._interface) - self._sent_before

    def stop(self) -> None:
        self._over.set()
        if self.is_alive():
            self.join(10.0)


class FarWatch:
    """Every host of a hostfile, each by a watcher of its own.

    They look every two seconds: bytes are good to two seconds of traffic. The memory is the sum of
    the hosts' maxima, which may have come at different times.
    """

    def __init__(self, directory: str, interface: str, launch: Launch) -> None:
        self._directory, self._interface, self._launch = directory, interface, launch
        self._watchers = Processes()
        self._logs = [Path(directory) / f"watch-{host.name}.log" for host in launch.hosts]
        self._skipped = [0] * len(self._logs)

    def start(self) -> None:
        # Without the run's mark: it is none of the system's processes.
        around = {"PYTHONPATH": python_path(ROOT)}
        command = [sys.executable, "-m", "bench.watch", self._directory, self._interface]
        for host, log in zip(self._launch.hosts, self._logs, strict=True):
            self._watchers.start(self._launch, host.name, command, around, log)

    def begin_counting(self) -> None:
        # The last look before it is where the bytes are counted from.
        self._skipped = [max(0, len(looks) - 1) for looks in self._looks()]

    @property
    def memory_bytes_max(self) -> int:
        return sum(max((look.memory_bytes for look in looks), default=0) for looks in self._looks())

    def others_share(self) -> float | None:
        """Of the host that had most taken away: all wait for the slowest. None if any host has
        nobody who looked, or nothing of the run."""
        return _worst([others_in(looks[1:]) for looks in self._counted()])

    def pace_seconds(self) -> float | None:
        """Of the slowest host."""
        return _worst([pace_in(looks[1:]) for looks in self._counted()])

    def moved_bytes(self) -> int:
        counted = [looks for looks in self._counted() if looks]
        return sum(looks[-1].sent_bytes - looks[0].sent_bytes for looks in counted)

    def stop(self) -> None:
        self._watchers.stop()

    def _counted(self) -> list[list[Look]]:
        return [looks[n:] for looks, n in zip(self._looks(), self._skipped, strict=True)]

    def _looks(self) -> list[list[Look]]:
        return [read_looks(log) for log in self._logs]


def others_in(looks: Sequence[Look]) -> float | None:
    processes = [look.others for look in looks if look.others is not None]
    host = [look.stolen for look in looks if look.stolen is not None]
    if not processes:
        return None
    return figures.median(processes) + (sum(host) / len(host) if host else 0.0)


def pace_in(looks: Sequence[Look]) -> float | None:
    """On average: a machine that was fast for one half and slow for the other was neither."""
    paces = [look.pace for look in looks if look.pace is not None]
    return sum(paces) / len(paces) if paces else None


def _worst(hosts: Sequence[float | None]) -> float | None:
    """The largest; None if one of the hosts has nothing to tell."""
    known = [value for value in hosts if value is not None]
    return max(known) if hosts and len(known) == len(hosts) else None


def read_looks(log: Path) -> list[Look]:
    """The whole lines that a watcher wrote; what ssh says besides, or into one, is no look."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    looks = []
    for line in text[: text.rfind("\n") + 1].splitlines():
        try:
            looks.append(Look(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return looks


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


if __name__ == "__main__":
    looking = Looking(sys.argv[1], sys.argv[2])
    alone = 0
    while alone < ALONE_LOOKS_MAX:
        for _ in range(PROBES):
            time.sleep(LOOK_SECONDS / PROBES)
            looking.probe()
        look = looking.look()
        alone = 0 if look.memory_bytes else alone + 1
        print(json.dumps(asdict(look)), flush=True)
