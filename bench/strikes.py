"""Carries out a schedule against whoever has the rank at that moment, and keeps what was done.

A thread of its own, beside the harness's watching. The victim is the newest process that wrote a
start into the truth of its rank. If it is dead or not there yet, the strike waits until somebody
has the rank, at most until the next one is due: a fault that hits nobody would be a gift.
Everything that was done is recorded, with the time at which it was.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.arms.arm import Arm
from bench.launch import Launch, python_path
from bench.record import ROOT
from bench.scenario import Scenario, Strike
from bench.slowing import NOBODY
from bench.truth import Start
from keepstep.errors import KeepstepError, Unreachable

LOOK_SECONDS = 0.02
START_SECONDS_MAX, END_SECONDS_MAX = 10.0, 5.0
"""Of a helper beside a victim, also behind ssh."""


@dataclass(frozen=True, slots=True)
class Done:
    """One strike as it was carried out."""

    at: float
    """On the clock of the truth."""
    planned: float
    kind: str
    rank: int
    pid: int
    """0 if nobody had the rank before the next strike was due, or nobody was hit: it was gone by
    then, its host out of reach, the drain refused, or it hung and was to be slow."""


@dataclass(frozen=True, slots=True)
class Ground:
    """Where it strikes, and whom."""

    launch: Launch
    victim: Callable[[int], Start | None]
    """The newest process of a rank."""
    log: Path
    """For what helpers beside a victim say."""


class Striker(threading.Thread):
    """Strikes from `zero` on until it is stopped."""

    def __init__(
        self,
        scenario: Scenario,
        schedule: Sequence[Strike],
        arm: Arm,
        ground: Ground,
    ) -> None:
        super().__init__(name="striker", daemon=True)
        self.done: list[Done] = []
        self.failed = ""
        """What a system or a helper refused."""
        self.broken = ""
        """Why there are no more strikes, though they were due: the run says nothing."""
        self._scenario, self._schedule = scenario, list(schedule)
        self._arm, self._ground = arm, ground
        self._launch, self._victim = ground.launch, ground.victim
        self._zero = 0.0
        self._over = threading.Event()
        self._stopped: list[tuple[float, Start]] = []
        """Whom an operator kills, and when."""
        self._beside: list[threading.Thread] = []
        """Slow ranks take their time: the next strike does not wait for that."""
        self._slowing: dict[int, subprocess.Popen[bytes]] = {}
        """By the victim's pid."""

    def begin(self, zero: float) -> None:
        self._zero = zero
        self.start()

    def stop(self) -> None:
        self._over.set()
        for thread in (self, *self._beside):
            if thread.is_alive():
                thread.join(10.0)

    def plain(self) -> list[dict[str, Any]]:
        return [asdict(done) for done in sorted(self.done, key=lambda done: done.at)]

    def run(self) -> None:
        # Whatever ends it before its time: without its strikes a run looks good, and is not.
        self.broken = "an error of its own, see the terminal"
        try:
            self._strike_until_over()
        except (OSError, subprocess.SubprocessError) as error:
            self.broken = f"{type(error).__name__}: {error}"
        else:
            self.broken = ""

    def _strike_until_over(self) -> None:
        for number, strike in enumerate(self._schedule):
            later = self._schedule[number + 1 :]
            due = self._zero + strike.at
            until = self._zero + later[0].at if later else due + 60.0
            if not self._sleep_until(due):
                return
            self._carry_out(strike, until)
        while not self._over.is_set():
            self._sleep_until(self._launch.now() + 1.0)

    def _carry_out(self, strike: Strike, until: float) -> None:
        victim = self._living(strike.rank, until)
        now = self._launch.now()
        if strike.kind != "slow":
            self._hit(strike, victim, now)
            return
        beside = threading.Thread(target=self._hit, args=(strike, victim, now), daemon=True)
        self._beside.append(beside)
        beside.start()

    def _hit(self, strike: Strike, victim: Start | None, now: float) -> None:
        hit = False
        try:
            hit = victim is not None and self._strike(strike.kind, victim, now)
        except KeepstepError as error:
            # The system refused; that is part of the result, and the next one comes.
            self.failed += f"{strike.kind} of rank {strike.rank}: {error}; "
        finally:
            pid = victim.pid if hit and victim is not None else 0
            self.done.append(Done(now, strike.at, strike.kind, strike.rank, pid))

    def _strike(self, kind: str, victim: Start, now: float) -> bool:
        """False: it has hit nobody after all."""
        match kind:
            case "kill":
                return self._launch.signal(victim.host, victim.pid, signal.SIGKILL)
            case "hang":
                due = (now + self._scenario.operator_seconds, victim)
                self._stopped.append(due)
                if (slowing := self._slowing.get(victim.pid)) is not None:
                    # It would wake whom this one stops.
                    _exit_of(slowing)
                hit = self._launch.signal(victim.host, victim.pid, signal.SIGSTOP)
                if not hit:
                    self._stopped.remove(due)
                return hit
            case "slow":
                # Who hangs is not woken by being slowed down.
                return not self._hangs(victim) and self._slow(victim)
            case "drain":
                return self._arm.drain(victim.rank, victim.host, victim.pid)
            case other:
                raise AssertionError(other)

    def _hangs(self, victim: Start) -> bool:
        return any(stopped == victim for _, stopped in list(self._stopped))

    def _slow(self, victim: Start) -> bool:
        """By a process beside the victim, until its time is over or the run is."""
        seconds = self._scenario.slow_seconds
        command = [sys.executable, "-m", "bench.slowing", str(victim.pid)]
        command += [str(seconds), str(self._scenario.stopped_share)]
        around = {"PYTHONPATH": python_path(ROOT)}
        slowing = self._launch.start(victim.host, command, around, self._ground.log)
        self._slowing[victim.pid] = slowing
        began = self._launch.now()
        while slowing.poll() is None and self._launch.now() < began + seconds + END_SECONDS_MAX:
            if self._over.wait(LOOK_SECONDS):
                break
        code = _exit_of(slowing)
        if code in (0, NOBODY):
            return code == 0
        if not self._over.is_set():
            self.failed += f"slowing rank {victim.rank} ended with {code}, see its log; "
        # By then it had begun, whatever ended it.
        return self._launch.now() - began > START_SECONDS_MAX

    def _reaches(self, victim: Start, number: int) -> bool | None:
        """False: it is gone. None: nobody knows, its host is out of reach; which is told."""
        try:
            return self._launch.signal(victim.host, victim.pid, number)
        except Unreachable as error:
            self.failed += f"signal {int(number)} to rank {victim.rank}: {error}; "
            return None

    def _living(self, rank: int, until: float) -> Start | None:
        while not self._over.is_set():
            found = self._victim(rank)
            if found is not None and self._reaches(found, 0):
                return found
            if self._launch.now() >= until:
                break
            self._sleep_until(self._launch.now() + LOOK_SECONDS)
        return None

    def _end(self, stopped: Start) -> None:
        """An operator's kill. One that could not be told is tried again."""
        if self._reaches(stopped, signal.SIGKILL) is None:
            self._stopped.append((self._launch.now() + 1.0, stopped))

    def _sleep_until(self, moment: float) -> bool:
        """Does an operator's work meanwhile. False if all is over."""
        while (left := moment - self._launch.now()) > 0:
            due = [s for s in self._stopped if s[0] <= self._launch.now()]
            for entry in due:
                self._stopped.remove(entry)
                # Only who still has the rank: of who was replaced, the pid may be another's now.
                if self._victim(entry[1].rank) == entry[1]:
                    self._end(entry[1])
            if self._over.wait(min(left, 0.2)):
                return False
        return not self._over.is_set()


def _exit_of(process: subprocess.Popen[bytes]) -> int:
    """Its exit; one that is still there is told to go, and has a moment for it."""
    if process.poll() is None:
        process.terminate()
    try:
        return process.wait(END_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
