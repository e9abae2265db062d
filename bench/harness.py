"""One run of one arm under one scenario: start, strike, watch the truth, stop, evaluate.

    outcome = Run(arm, scenario, plan, launch).go(limits)

What the run is worth is decided by the truth alone: it is complete when the ranks' own files say
that the last step is finished. An arm that ends early, stands still or takes too long has failed;
its figures are kept all the same.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import truth
from bench.arms.arm import Arm, last_words, placeless
from bench.launch import Launch
from bench.plan import Plan
from bench.scenario import Scenario, schedule
from bench.strikes import Ground, Striker
from bench.watch import watch_of
from bench.workload.order import Order
from keepstep.errors import KeepstepError

LOOK_SECONDS = 0.1
END_SECONDS = 5.0
"""After the last step: for the ranks to write their ends."""


@dataclass(frozen=True, slots=True)
class Limits:
    nominal_seconds: float
    """Of the fault-free run."""
    start_seconds_max: float = 180.0
    still_seconds_max: float = 90.0
    """No new step for this long: it has failed. More than an operator takes to kill what hangs."""

    @property
    def seconds_max(self) -> float:
        return 3.0 * self.nominal_seconds + self.still_seconds_max


Told = Callable[[str, int, int], None]
"""(phase, steps finished, steps wanted)"""


class Follower:
    """Reads what is new in the ranks' files."""

    def __init__(self, directory: Path, world: int) -> None:
        self.logs = truth.Logs()
        self._paths = [directory / f"rank-{rank}.jsonl" for rank in range(world)]
        self._read = [0] * world
        self._world = world
        self._counted = 0
        self._by_step: dict[int, set[int]] = {}
        self.front = 0
        """Steps that are finished, for the bar and for knowing that something moves."""

    def look(self) -> None:
        for rank, path in enumerate(self._paths):
            try:
                with path.open("rb") as file:
                    file.seek(self._read[rank])
                    data = file.read()
            except FileNotFoundError:
                continue
            # Only whole lines: the rest is being written.
            whole = data[: data.rfind(b"\n") + 1]
            self._read[rank] += len(whole)
            self.logs.add(rank, whole.decode(errors="replace"))
        # Only what is new: to look must cost next to nothing, on the ranks' own cores.
        for line in self.logs.lines[self._counted :]:
            ranks = self._by_step.setdefault(line.step, set())
            ranks.add(line.rank)
            done = line.step + 1 if len(ranks) == self._world else line.step
            self.front = max(self.front, done)
        self._counted = len(self.logs.lines)

    def victim(self, rank: int) -> truth.Start | None:
        mine = [start for start in list(self.logs.starts) if start.rank == rank]
        return max(mine, key=lambda start: start.at) if mine else None


def unsound(found: truth.Truth, striker: Striker) -> str:
    """Why a run that came to its end counts for nothing; "" if it does."""
    if found.seconds is None:
        return f"an end was written, and only {found.steps} steps are finished"
    if striker.broken:
        return f"strikes ended early: {striker.broken}"
    return ""


class Run:
    def __init__(self, arm: Arm, scenario: Scenario, plan: Plan, launch: Launch) -> None:
        self.arm, self.scenario, self.plan, self.launch = arm, scenario, plan, launch
        self._follower = Follower(plan.truth, plan.world)

    def go(self, limits: Limits, told: Told) -> dict[str, Any]:
        """Everything about the run, for the raw result."""
        struck = self.arm.name != "bare"
        strikes = schedule(
            self.scenario, self.plan.world, limits.nominal_seconds, limits.seconds_max
        )
        striker = Striker(
            self.scenario,
            strikes if struck else (),
            self.arm,
            Ground(self.launch, self._follower.victim, self.plan.room / "slowing.log"),
        )
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        watch = watch_of(self.plan.directory, interface, self.launch)
        self.plan.write()
        began = time.monotonic()
        moved, others, pace = 0, None, None
        left: list[int] = []
        with ExitStack() as ends:
            # Whatever fails on the way out, what is left behind is ended: it would disturb others.
            ends.callback(lambda: left.append(self.launch.clear(self.plan.directory)))
            for end in (self.arm.stop, watch.stop, striker.stop):
                ends.callback(end)
            try:
                watch.start()
                self.arm.start(self.plan, self.launch)
                outcome = self._wait_first(limits, told)
                start_seconds = time.monotonic() - began
                if not outcome:
                    watch.begin_counting()
                    zero = self._zero()
                    assert zero is not None, "waited for"
                    striker.begin(zero)
                    outcome = self._wait_last(limits, told)
                    moved, others = watch.moved_bytes(), watch.others_share()
                    pace = watch.pace_seconds()
                    striker.stop()
                    if not outcome:
                        self._wait_ends()
            except KeepstepError as error:
                outcome = f"{type(error).__name__}: {error}"
                start_seconds = time.monotonic() - began
        self._follower.look()
        found = self._evaluate(striker)
        outcome = placeless(outcome or unsound(found, striker), self.plan.room)
        return {
            "arm": self.arm.name,
            "settings": self.arm.settings,
            "outcome": outcome or "completed",
            "start_seconds": round(start_seconds, 3),
            "nominal_seconds": round(limits.nominal_seconds, 3),
            "planned": [asdict(strike) for strike in strikes if struck],
            "strikes": striker.plain(),
            "striker_failed": placeless(striker.failed, self.plan.room),
            "starts": self._starts(),
            "memory_bytes_max": watch.memory_bytes_max,
            "moved_bytes": moved,
            "others_share": None if others is None else round(others, 4),
            "pace_seconds": None if pace is None else round(pace, 7),
            "processes_left": sum(left),
            "said": last_words(self.plan) if outcome else {},
            "truth": asdict(found),
            "lines": self._lines(),
        }

    def clear(self) -> None:
        shutil.rmtree(self.plan.room, ignore_errors=True)

    # ------------------------------------------------------------ inside

    def _wait_first(self, limits: Limits, told: Told) -> str:
        """Until every rank has finished the first step; says what went wrong, or nothing."""
        deadline = time.monotonic() + limits.start_seconds_max
        while time.monotonic() < deadline:
            told("starting", 0, self.plan.steps)
            self._follower.look()
            if self._follower.front > 0 and self._zero() is not None:
                return ""
            if why := self.arm.ended():
                return f"ended before the first step: {why}"
            time.sleep(LOOK_SECONDS)
        return f"no first step within {limits.start_seconds_max:.0f} s"

    def _wait_last(self, limits: Limits, told: Told) -> str:
        deadline = time.monotonic() + limits.seconds_max
        high, moved, asked = 0, time.monotonic(), 0.0
        while time.monotonic() < deadline:
            self._follower.look()
            if any(end.steps >= self.plan.steps for end in self._follower.logs.ends):
                return ""
            now = time.monotonic()
            if self._follower.front > high:
                high, moved = self._follower.front, now
            told("training", high, self.plan.steps)
            if now - moved > limits.still_seconds_max:
                return f"no new step for {limits.still_seconds_max:.0f} s, at {high}"
            if now - asked > 1.0:
                asked = now
                if why := self.arm.ended():
                    return f"ended at step {high}: {why}"
            time.sleep(LOOK_SECONDS)
        return f"not done within {limits.seconds_max:.0f} s, at {high}"

    def _wait_ends(self) -> None:
        deadline = time.monotonic() + END_SECONDS
        while len(self._follower.logs.ends) < self.plan.world and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            self._follower.look()

    def _zero(self) -> float | None:
        """When the first step was finished, as the truth sees it."""
        return truth.finish_times(self._follower.logs.lines, self.plan.world).get(0)

    def _evaluate(self, striker: Striker) -> truth.Truth:
        logs = self._follower.logs
        windows = max((end.windows for end in logs.ends), default=0) or self._windows()
        order = Order(windows, self.plan.world, self.plan.batch, self.plan.seed)
        struck = sorted(done.at for done in striker.done if done.pid)
        return truth.evaluate(logs, truth.Asked(order, self.plan.steps), struck)

    def _starts(self) -> list[list[Any]]:
        """Rank, and seconds since the first start: more of them than ranks and strikes explain are
        deaths that nobody meant."""
        starts = sorted(self._follower.logs.starts, key=lambda start: start.at)
        return [[start.rank, round(start.at - starts[0].at, 3)] for start in starts]

    def _windows(self) -> int:
        """If no rank came to its end, it is counted here."""
        from pydoc_data.topics import topics

        from bench.workload.order import whole_windows

        characters = sum(map(len, topics.values()))
        return whole_windows(characters, self.plan.context, self.plan.world, self.plan.batch)

    def _lines(self) -> list[list[Any]]:
        """The truth itself, compact: rank, step, began and ended in ms since the first, marks."""
        lines = self._follower.logs.lines
        zero = min((line.began for line in lines), default=0.0)
        return [
            [
                line.rank,
                line.step,
                round(1000 * (line.began - zero)),
                round(1000 * (line.ended - zero)),
                list(line.marks),
            ]
            for line in lines
        ]
