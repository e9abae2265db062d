"""Strikes of a schedule: what is recorded is what was done."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench import truth
from bench.harness import unsound
from bench.launch import Host, Local, Ssh, is_stopped, python_path
from bench.record import ROOT
from bench.scenario import Scenario, Strike
from bench.slowing import NOBODY
from bench.strikes import Ground, Striker
from bench.truth import Start
from bench.watch import FarWatch
from bench.workload.order import Order
from keepstep.errors import Permanent, Unreachable

SCENARIO = Scenario("mixed", "by hand")


class Scripted:
    """A launch whose answers are given; the clock is the machine's."""

    def __init__(self, *answers: bool | int | Exception) -> None:
        self.answers = [True, *answers]
        """To the question whether the victim is alive, and then to the strike. Of a helper beside
        the victim: its exit."""
        self.sent: list[int] = []

    def signal(self, host: str, pid: int, number: int) -> bool:
        self.sent.append(number)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    def now(self) -> float:
        return time.monotonic()

    def start(
        self, host: str, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """A helper beside the victim: it ends as the next answer says."""
        return subprocess.Popen(["sh", "-c", f"exit {self.answers.pop(0)}"])


class Drained:
    """A drain that is refused, or comes when nobody is there any more."""

    def __init__(self, refuses: str = "no spare for it") -> None:
        self.refuses = refuses

    def drain(self, rank: int, host: str, pid: int) -> bool:
        if self.refuses:
            raise Permanent(self.refuses)
        return False


def struck(
    kind: str,
    launch: Scripted,
    seconds: float = 0.0,
    operator_seconds: float = 60.0,
    drained: Drained | None = None,
) -> Striker:
    """One strike, and for so long an operator after it, or until there is nothing more to say."""
    striker = Striker(
        replace(SCENARIO, operator_seconds=operator_seconds),
        [Strike(0.0, kind, 1)],
        drained or Drained(),  # type: ignore[arg-type]
        Ground(
            launch,  # type: ignore[arg-type]
            lambda rank: Start(rank, 4711, "h1", 0.0),
            Path("slowing.log"),
        ),
    )
    striker.begin(launch.now())
    deadline = time.monotonic() + 10.0
    while not striker.done and time.monotonic() < deadline:
        time.sleep(0.005)
    deadline = time.monotonic() + seconds
    while launch.answers and time.monotonic() < deadline:
        time.sleep(0.005)
    striker.stop()
    return striker


@pytest.mark.parametrize(
    ("kind", "answer", "pid", "told"),
    [
        ("kill", True, 4711, ""),
        ("kill", False, 0, ""),
        ("kill", Unreachable("h1 cannot be reached by ssh"), 0, "cannot be reached"),
        ("hang", False, 0, ""),
        ("slow", 0, 4711, ""),
        ("slow", NOBODY, 0, ""),
        ("slow", 1, 0, "ended with 1"),
        ("slow", 255, 0, "ended with 255"),
        ("drain", True, 0, "no spare for it"),
    ],
)
def test_a_strike_counts_as_one_if_it_hit_somebody(
    kind: str, answer: bool | int | Exception, pid: int, told: str
):
    striker = struck(kind, Scripted(answer))
    (done,) = striker.done
    assert (done.kind, done.rank, done.pid) == (kind, 1, pid)
    assert told in striker.failed
    assert bool(striker.failed) == bool(told)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_striker_that_breaks_is_told_and_makes_the_run_say_nothing():
    whole, torn = struck("kill", Scripted(True)), struck("kill", Scripted(ValueError("no such")))
    assert (whole.broken, torn.failed) == ("", "")
    assert "an error of its own" in torn.broken
    done = truth.evaluate(truth.Logs(), truth.Asked(Order(40, 2, 2, 1), 6), ())
    whole_run = replace(done, seconds=5.0)
    assert unsound(whole_run, whole) == ""
    assert "strikes ended early" in unsound(whole_run, torn)
    assert "only 0 steps are finished" in unsound(done, whole)


def test_who_hangs_is_not_slowed_down_and_so_not_woken():
    """The helper beside a victim stops it and wakes it, twenty times a second."""
    launch = Scripted(True, True, 0)
    striker = Striker(
        replace(SCENARIO, operator_seconds=60.0),
        [Strike(0.0, "hang", 1), Strike(0.05, "slow", 1)],
        Drained(),  # type: ignore[arg-type]
        Ground(
            launch,  # type: ignore[arg-type]
            lambda rank: Start(rank, 4711, "h1", 0.0),
            Path("slowing.log"),
        ),
    )
    striker.begin(launch.now())
    deadline = time.monotonic() + 10.0
    while len(striker.done) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    striker.stop()
    assert launch.sent == [0, signal.SIGSTOP, 0]
    assert launch.answers == [0], "no helper was started"
    assert [(done["kind"], done["pid"]) for done in striker.plain()] == [
        ("hang", 4711),
        ("slow", 0),
    ]


def test_a_process_that_somebody_else_has_stopped_is_left_stopped():
    child = subprocess.Popen(["sleep", "60"])
    try:
        child.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 10.0
        while not is_stopped(child.pid) and time.monotonic() < deadline:
            time.sleep(0.005)
        helper = [sys.executable, "-m", "bench.slowing", str(child.pid), "0.2", "0.5"]
        around = {**os.environ, "PYTHONPATH": python_path(ROOT)}
        assert subprocess.run(helper, env=around, timeout=30.0).returncode == NOBODY
        assert is_stopped(child.pid)
    finally:
        child.kill()
        child.wait()


def test_the_next_strike_does_not_wait_for_a_slow_rank():
    class Slow(Scripted):
        def start(self, *_: object) -> subprocess.Popen[bytes]:  # type: ignore[override]
            return subprocess.Popen(["sleep", "60"])

    launch = Slow(True, True)
    striker = Striker(
        replace(SCENARIO, slow_seconds=60.0),
        [Strike(0.0, "slow", 1), Strike(0.1, "kill", 0)],
        Drained(),  # type: ignore[arg-type]
        Ground(
            launch,  # type: ignore[arg-type]
            lambda rank: Start(rank, 4711 + rank, "h1", 0.0),
            Path("slowing.log"),
        ),
    )
    striker.begin(launch.now())
    deadline = time.monotonic() + 10.0
    while not striker.done and time.monotonic() < deadline:
        time.sleep(0.005)
    assert [done.kind for done in striker.done] == ["kill"]
    striker.stop()
    assert [done["kind"] for done in striker.plain()] == ["slow", "kill"]


def test_a_host_that_cannot_be_reached_once_gets_its_strike_a_little_later():
    away = Unreachable("h1 cannot be reached by ssh")
    launch = Scripted(True, True)
    launch.answers.insert(0, away)
    striker = struck("kill", launch)
    (done,) = striker.done
    assert (done.pid, launch.sent) == (4711, [0, 0, signal.SIGKILL])
    assert "cannot be reached" in striker.failed


def test_a_drain_that_came_too_late_is_no_hit():
    striker = struck("drain", Scripted(), drained=Drained(""))
    (done,) = striker.done
    assert (done.pid, striker.failed) == (0, "")


def test_what_the_hosts_watchers_saw_is_added_up(tmp_path):
    watch = FarWatch(str(tmp_path), "lo", Ssh("/srv", (Host("h1"), Host("h2"))))

    def sees(host: str, memory: int, sent: int, others: float | None) -> None:
        pace = None if others is None else others / 100
        look = {"memory_bytes": memory, "sent_bytes": sent, "others": others, "pace": pace}
        with (tmp_path / f"watch-{host}.log").open("a", encoding="utf-8") as file:
            file.write(json.dumps(look) + "\r\n")

    assert (watch.memory_bytes_max, watch.moved_bytes(), watch.others_share()) == (0, 0, None)
    (tmp_path / "watch-h1.log").write_text("Warning: added h1 to the known hosts.\n")
    for memory, sent, others in ((10, 1000, None), (50, 1050, 0.9), (20, 1100, 0.9)):
        sees("h1", memory, sent, others)
    sees("h2", 7, 500, None)
    watch.begin_counting()
    assert watch.others_share() is None, "nobody has looked since"
    for memory, sent, others in ((40, 1200, 0.3), (30, 1300, 0.1)):
        sees("h1", memory, sent, others)
    sees("h2", 9, 600, 0.1)
    with (tmp_path / "watch-h2.log").open("a", encoding="utf-8") as file:
        file.write('{"memory_bytes": 99client_loop: send disconnect\n{"memory_bytes": 99')
    assert watch.memory_bytes_max == 50 + 9
    assert watch.moved_bytes() == 200 + 100, "since the last look before the first step"
    assert watch.others_share() == 0.2, "the median of the host that had most taken away"
    assert watch.pace_seconds() == pytest.approx(0.002), "and that of the slowest"


def test_an_operators_kill_that_could_not_be_told_is_tried_again():
    away = Unreachable("h1 cannot be reached by ssh")
    launch = Scripted(True, away, True)
    striker = struck("hang", launch, seconds=3.0, operator_seconds=0.1)
    assert launch.sent == [0, signal.SIGSTOP, signal.SIGKILL, signal.SIGKILL]
    assert "cannot be reached" in striker.failed


def test_of_a_process_that_lives_and_of_one_that_nobody_has_buried():
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert Local().signal("", child.pid, 0)
        assert Local().signal("", child.pid, signal.SIGKILL), "it hit somebody who lived"
        deadline = time.monotonic() + 10.0
        while Local().signal("", child.pid, 0) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert not Local().signal("", child.pid, signal.SIGKILL), "it is dead, and not buried yet"
    finally:
        child.kill()
        child.wait()


def test_a_host_out_of_reach_is_not_taken_for_a_dead_process(tmp_path, monkeypatch):
    for code, expected in ((0, True), (1, False)):
        monkeypatch.setattr("bench.launch.SSH", ("sh", "-c", f"exit {code}"))
        assert Ssh("/srv").signal("h1", 1, 9) is expected
    monkeypatch.setattr("bench.launch.SSH", ("sh", "-c", "exit 255"))
    with pytest.raises(Unreachable, match="h1 cannot be reached"):
        Ssh("/srv").signal("h1", 1, 9)
    monkeypatch.setattr("bench.launch.SSH", (str(tmp_path / "no-ssh-here"),))
    with pytest.raises(Unreachable, match="h1"):
        Ssh("/srv").signal("h1", 1, 9)
