"""Where processes are started and struck: here, or over ssh on the hosts of a hostfile.

Four verbs. A scheduler that starts processes itself is one more implementation of them.

    hosts = read_hostfile(path)        one host per line: NAME [slots=N]; `#` begins a comment
    launch = Ssh(directory, hosts) if hosts else Local()

    python -m bench.launch DIRECTORY   end what bears this mark on this machine, and say how many

Every process of a system bears a mark in its environment, the run's directory. By it processes are
found that a system started on its own, to add up their memory and to end what it left behind.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.workload.log import CLOCK, HOST, WALL
from keepstep.detect import process
from keepstep.errors import ConfigError, Permanent, Unreachable

KEPT = {"MALLOC_TRIM_THRESHOLD_": str(1 << 32), "MALLOC_MMAP_THRESHOLD_": str(1 << 32)}
"""glibc's own variables: freed memory is kept, in all arms alike. As it comes, it is given back by
limits that move with what a process freed before, and two with the same steps differ."""

MARK = "KSBENCH_RUN"
LOCAL = "localhost"
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
SSH_FAILED = 255
"""Its exit code for troubles of its own; any other is the command's."""


@dataclass(frozen=True, slots=True)
class Host:
    name: str
    slots: int = 1


def free_port() -> int:
    """Free here, and most likely on other hosts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Launch(Protocol):
    @property
    def hosts(self) -> tuple[Host, ...]:
        """None: everything is on this machine."""
        ...

    def start(
        self, host: str, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Begin a process on a host; what it says goes to the log here."""
        ...

    def signal(self, host: str, pid: int, number: int) -> bool:
        """False if there is no such process any more. Number 0 only asks."""
        ...

    def now(self) -> float:
        """The clock of the truth: one that all hosts share."""
        ...

    def clear(self, mark: str) -> int:
        """End what a system left behind, on every host; how many there were."""
        ...


class Local:
    """Everything on this machine, whatever the host's name."""

    hosts: tuple[Host, ...] = ()

    def start(
        self, host: str, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            return subprocess.Popen(
                list(command), env=clean(environment), stdout=file, stderr=file, cwd=log.parent
            )

    def signal(self, host: str, pid: int, number: int) -> bool:
        if is_zombie(pid):
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def now(self) -> float:
        return time.monotonic()

    def clear(self, mark: str) -> int:
        return end_marked(mark)


@dataclass(frozen=True, slots=True)
class Ssh:
    """The same directory, environment and Python under the same paths on every host."""

    directory: str
    hosts: tuple[Host, ...] = ()

    def start(
        self, host: str, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        around = {**environment, HOST: host, CLOCK: WALL}
        with log.open("ab") as file:
            return subprocess.Popen(
                self.line(host, command, around),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )

    def signal(self, host: str, pid: int, number: int) -> bool:
        # Who is dead and not buried is hit by nobody.
        line = [*SSH, host, f"! grep -qs ') Z ' /proc/{pid}/stat && kill -{int(number)} {pid}"]
        # Who is gone already is no news.
        try:
            done = subprocess.run(line, check=False, timeout=30, stderr=subprocess.DEVNULL)
        except (OSError, subprocess.SubprocessError) as error:
            raise Unreachable(f"{host}: {type(error).__name__}: {error}") from error
        if done.returncode == SSH_FAILED:
            raise Unreachable(f"{host} cannot be reached by ssh")
        return done.returncode == 0

    def now(self) -> float:
        return time.time()

    def clear(self, mark: str) -> int:
        found, failed = 0, []
        for host in self.hosts:
            command = [sys.executable, "-m", "bench.launch", mark]
            line = self.line(host.name, command, {"PYTHONPATH": python_path(self.directory)})
            try:
                done = subprocess.run(
                    line, timeout=60, capture_output=True, text=True, stdin=subprocess.DEVNULL
                )
                found += int(done.stdout.split()[-1])
            except (subprocess.SubprocessError, ValueError, IndexError) as error:
                # The other hosts all the same.
                failed.append(f"{host.name}: {type(error).__name__}: {error}")
        if failed:
            raise Unreachable(f"hosts could not be cleared: {'; '.join(failed)}")
        return found

    def line(self, host: str, command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        """With a terminal (-tt), so that the far end hangs up when ssh is ended here."""
        around = [f"{name}={value}" for name, value in sorted(environment.items())]
        far = shlex.join(["env", *around, *command])
        return [*SSH, "-tt", host, f"cd {shlex.quote(self.directory)} && exec {far}"]


def python_path(checkout: str | Path) -> str:
    """Where a checkout's own modules are."""
    return os.pathsep.join((str(checkout), str(Path(checkout) / "src")))


def read_hostfile(text: str) -> tuple[Host, ...]:
    """The form of MPI and DeepSpeed."""
    hosts = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, *rest = words
        slots = 1
        for word in rest:
            key, _, value = word.partition("=")
            if key != "slots" or not value.isdigit() or int(value) < 1:
                raise ConfigError(f"hostfile, line {number}: {word!r} is not slots=N")
            slots = int(value)
        hosts.append(Host(name, slots))
    if len({host.name for host in hosts}) < len(hosts):
        raise ConfigError("hostfile: a host is named twice")
    return tuple(hosts)


def seats(hosts: Sequence[Host], world: int) -> tuple[str, ...]:
    """The host of each rank: filled one host after another."""
    if not hosts:
        return (LOCAL,) * world
    places = [host.name for host in hosts for _ in range(host.slots)]
    if len(places) < world:
        raise ConfigError(f"{world} ranks need as many slots; the hostfile has {len(places)}")
    return tuple(places[:world])


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """Ours, without what a launcher around the bench left in it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KEEPSTEP_", "TORCHELASTIC_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        kept.pop(name, None)
    return {**kept, **environment}


def marked(directory: str) -> Iterator[int]:
    """Living processes of this machine that bear a run's mark."""
    wanted = f"{MARK}={directory}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            around = (entry / "environ").read_bytes().split(b"\0")
            if wanted in around and not is_zombie(int(entry.name)):
                yield int(entry.name)
        except OSError:
            continue  # It ended while we looked, or is somebody else's.


def end_marked(directory: str, seconds_max: float = 10.0) -> int:
    """Kill what a system left behind; how many there were."""
    found: set[int] = set()
    deadline = time.monotonic() + seconds_max
    while pids := list(marked(directory)):
        found.update(pids)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise Permanent(f"processes {pids} survive SIGKILL")
        time.sleep(0.02)
    return len(found)


def is_zombie(pid: int) -> bool:
    """Dead and not buried, or gone."""
    reading = process.probe(pid)
    return reading is None or reading.state == "Z"


def is_stopped(pid: int) -> bool:
    reading = process.probe(pid)
    return reading is not None and reading.state == "T"


if __name__ == "__main__":
    print(end_marked(sys.argv[1]))
