"""Whether the kernel ended a process for lack of memory: a kill alone does not say by whom.

The kernel counts such kills per control group. The count of the group that this process is in,
where its limit is a pod's or a Slurm step's, is compared with what was seen before; where no group
tells, the whole machine's is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_MACHINE = Path("/proc/vmstat")
_KEY = "oom_kill"


class Shortages:
    """Kills for lack of memory, each of which explains one death."""

    def __init__(self, count: Callable[[], int] | None = None) -> None:
        self._count = count or kills
        self._explained = self._count()

    def explains_a_death(self) -> bool:
        """Was there a kill that explains no other death yet?"""
        if self._count() <= self._explained:
            return False
        self._explained += 1
        return True

    def forget(self) -> None:
        """What was killed so far was none of ours: a loader's worker, somebody else's program."""
        self._explained = self._count()


def kills() -> int:
    """How many processes of our group, or of the machine, were killed for lack of memory so far."""
    for path in (*_own_counters(), _MACHINE):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(" ")
            if name == _KEY and value.strip().isdigit():
                return int(value)
    return 0


def _own_counters() -> list[Path]:
    """Where the count of this process's group may be: version 2 of control groups, then 1."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        inside = path.lstrip("/")
        if number == "0":
            # In a container the tree may begin at our own group, whatever the path says.
            found += [_GROUPS / inside / "memory.events", _GROUPS / "memory.events"]
        elif "memory" in controllers.split(","):
            found += [_GROUPS / "memory" / inside / "memory.oom_control"]
            found += [_GROUPS / "memory" / "memory.oom_control"]
    return found
