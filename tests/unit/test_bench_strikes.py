"""Strikes of a schedule: what is recorded is what was done."""

from __future__ import annotations

import signal
import subprocess
import time
from dataclasses import replace

import pytest

from bench.launch import Local, Ssh
from bench.scenario import Scenario, Strike
from bench.strikes import Striker
from bench.truth import Start
from keepstep.errors import Permanent, Unreachable

SCENARIO = Scenario("mixed", "by hand")


class Scripted:
    """A launch whose answers are given; the clock is the machine's."""

    def __init__(self, *answers: bool | Exception) -> None:
        self.answers = [True, *answers]
        """To the question whether the victim is alive, and then to the strike."""
        self.sent: list[int] = []

    def signal(self, host: str, pid: int, number: int) -> bool:
        self.sent.append(number)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def now(self) -> float:
        return time.monotonic()


class Drained:
    def drain(self, rank: int, host: str, pid: int) -> None:
        raise Permanent("no spare for it")


def struck(
    kind: str, launch: Scripted, seconds: float = 0.0, operator_seconds: float = 60.0
) -> Striker:
    """One strike, and for so long an operator after it, or until there is nothing more to say."""
    striker = Striker(
        replace(SCENARIO, operator_seconds=operator_seconds),
        [Strike(0.0, kind, 1)],
        Drained(),  # type: ignore[arg-type]
        launch,  # type: ignore[arg-type]
        lambda rank: Start(rank, 4711, "h1", 0.0),
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
        ("slow", False, 0, ""),
        ("drain", True, 0, "no spare for it"),
    ],
)
def test_a_strike_counts_as_one_if_it_hit_somebody(
    kind: str, answer: bool | Exception, pid: int, told: str
):
    striker = struck(kind, Scripted(answer))
    (done,) = striker.done
    assert (done.kind, done.rank, done.pid) == (kind, 1, pid)
    assert told in striker.failed


def test_a_host_that_cannot_be_reached_once_gets_its_strike_a_little_later():
    away = Unreachable("h1 cannot be reached by ssh")
    launch = Scripted(True, True)
    launch.answers.insert(0, away)
    striker = struck("kill", launch)
    (done,) = striker.done
    assert (done.pid, launch.sent) == (4711, [0, 0, signal.SIGKILL])
    assert "cannot be reached" in striker.failed


def test_a_rank_that_was_slowed_down_is_woken_whatever_it_takes():
    away = Unreachable("h1 cannot be reached by ssh")
    launch = Scripted(True, away, away, True, False)
    began = time.monotonic()
    striker = struck("slow", launch)
    (done,) = striker.done
    assert done.pid == 4711
    assert launch.sent == [0, signal.SIGSTOP, *[signal.SIGCONT] * 3, signal.SIGSTOP]
    assert time.monotonic() - began < 10.0, "who is gone is not waited for"


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
