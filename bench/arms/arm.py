"""What the harness asks of a system, in five verbs, and what arms share.

    refuses   why it cannot run this plan; "" if it can
    start     begin to train; returns at once
    ended     how it ended by itself; "" while it runs
    drain     this rank's place is wanted: leave it in the system's own way; False: nobody was there
    stop      end everything that was started

An arm starts processes and nothing else. Who is struck, when, and what came of it is the harness's
business: ranks are found by the pid that the workload wrote into the truth, not by asking the arm.

`load("torchft:tuned")` finds bench/arms/torchft.py and calls its `arm("tuned")`.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from bench.launch import KEPT, MARK, Host, Launch, python_path
from bench.plan import Plan
from bench.record import ROOT
from bench.workload.log import GATE, TURN
from keepstep.errors import ConfigError, KeepstepError, Permanent

GRACE_SECONDS = 8.0
SAID_CHARACTERS = 1500


class Arm(Protocol):
    name: str
    settings: dict[str, Any]
    """What was chosen for this system: recorded with the result."""
    hosts: tuple[Host, ...]
    """Of a hostfile; none: this machine."""

    def refuses(self, plan: Plan) -> str: ...

    def start(self, plan: Plan, launch: Launch) -> None: ...

    def ended(self) -> str: ...

    def drain(self, rank: int, host: str, pid: int) -> bool: ...

    def stop(self) -> None: ...


def load(spec: str) -> Arm:
    """An arm by its name, with a variant behind a colon."""
    name, _, variant = spec.partition(":")
    try:
        module = importlib.import_module(f"bench.arms.{name}")
        made: Arm = module.arm(variant)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigError(f"no arm {spec!r} (bench/arms/{name}.py): {error}") from None
    return made


def able(spec: str, plan: Plan) -> Arm:
    """The same, if it can run this: told now, and not once others stand beside it."""
    made = load(spec)
    if why := made.refuses(plan):
        raise Permanent(why)
    return made


class Processes:
    """The processes of one arm: started through a Launch, ended by their mark."""

    def __init__(self) -> None:
        self._started: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._launch: Launch | None = None

    def start(
        self,
        launch: Launch,
        host: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        self._launch = launch
        log.parent.mkdir(parents=True, exist_ok=True)
        self._started.append((host, launch.start(host, command, environment, log)))

    def tell_to_go(self, host: str, pid: int) -> bool:
        """A worker that these processes started there: what stands for a drain where none is."""
        assert self._launch is not None, "started"
        return self._launch.signal(host, pid, signal.SIGTERM)

    def codes(self) -> list[int | None]:
        return [process.poll() for _, process in self._started]

    def ended(self) -> str:
        """Once the first has ended badly, or all have ended well."""
        codes = self.codes()
        bad = [code for code in codes if code]
        if bad:
            return f"a process ended with {bad[0]}"
        return "all processes ended" if codes and all(code == 0 for code in codes) else ""

    def stop(self) -> None:
        """SIGTERM first, so that launchers take their workers with them."""
        for _, process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        for _, process in self._started:
            try:
                process.wait(max(0.05, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._started = []


def environment_of(plan: Plan, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """What every process of a run has around it, whatever the arm."""
    return {
        "PYTHONPATH": python_path(ROOT),
        "OMP_NUM_THREADS": "1",
        **KEPT,
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        MARK: plan.directory,
        **{name: os.environ[name] for name in (GATE, TURN) if name in os.environ},
        **(more or {}),
    }


def last_words(plan: Plan) -> dict[str, str]:
    """The ends of the logs of a run that failed, so that the raw result says why."""
    said = {}
    # A walk that bears what vanishes meanwhile: who fails here would hide why the run did.
    for folder, _, names in sorted(os.walk(plan.room)):
        for path in (Path(folder, name) for name in sorted(names) if name.endswith(".log")):
            with suppress(OSError):
                text = placeless(path.read_text(errors="replace"), plan.room)
                said[str(path.relative_to(plan.room))] = text[-SAID_CHARACTERS:]
    return said


def placeless(text: str, room: Path | None = None) -> str:
    """Where things lie on this machine is nobody's business, and in no raw result."""
    places = {"ROOT": ROOT, "ENV": Path(sys.prefix), "PYTHON": Path(sys.base_prefix)}
    places |= {"HOME": Path.home(), "TMP": Path(tempfile.gettempdir())}
    if room is not None:
        places |= {"ROOM": room, "ROOMS": room.parent}
    # What lies in another one goes first.
    for name, place in sorted(places.items(), key=lambda item: -len(str(item[1]))):
        for form in {str(place), str(place.resolve())} - {"/", "."}:
            text = text.replace(form, name)
    return text


@contextmanager
def noted(name: str, plan: Plan) -> Iterator[None]:
    """What fails in here bears the ends of this job's logs: its room is gone when anybody asks.
    Around all that ends the job, so that they are whole."""
    try:
        yield
    except (KeepstepError, OSError) as error:
        for log, end in last_words(plan).items():
            error.add_note(f"{name}, {log}: {end}")
        raise


def notes_of(error: BaseException) -> list[str]:
    """Of all jobs that it went through."""
    return list(getattr(error, "__notes__", []))


def module_command(module: str, plan: Plan, python: str = sys.executable) -> list[str]:
    """`python -m bench.arms.X train plan.json`: the arm's own half inside the workers."""
    return [python, "-m", module, str(plan.file)]
