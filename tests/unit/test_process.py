from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from keepstep.detect import process


def ended(how: int | signal.Signals) -> process.ProcessReading:
    """A child that has ended and is not reaped yet, as the kernel shows it."""
    child = os.fork()
    if child == 0:
        if isinstance(how, signal.Signals):
            if how is not signal.SIGKILL:
                # Whatever this process does with it.
                signal.signal(how, signal.SIG_DFL)
            os.kill(os.getpid(), how)
        os._exit(how)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    reading = process.probe(child)
    os.waitpid(child, 0)
    assert reading is not None
    return reading


@pytest.mark.parametrize(("how", "code"), [(3, 3), (signal.SIGKILL, -9), (signal.SIGTERM, -15)])
def test_the_kernel_says_how_a_process_ended_before_its_parent_does(how, code):
    reading = ended(how)
    assert process.judge(reading, reading.start) is process.Life.GONE
    assert process.exit_code(reading, reading.start) == code


def test_zero_is_no_answer_because_it_may_mean_that_we_must_not_know():
    reading = ended(0)
    assert process.exit_code(reading, reading.start) is None


def test_another_process_under_the_same_pid_says_nothing():
    reading = ended(3)
    assert process.exit_code(reading, reading.start + 1) is None
    assert process.exit_code(None, 1) is None


def test_a_living_process_has_no_exit_code():
    own = process.probe(os.getpid())
    assert own is not None
    assert process.exit_code(own, own.start) is None
    assert process.judge(own, own.start) is process.Life.ALIVE


def test_who_cannot_be_looked_at_is_neither_alive_nor_gone(monkeypatch: pytest.MonkeyPatch):
    own = process.probe(os.getpid())
    assert own is not None

    def none_left(*_: object, **__: object) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as short:
        short.setattr(Path, "read_text", none_left)
        assert process.life(own.pid, own.start) is process.Life.UNKNOWN
    assert process.life(own.pid, own.start) is process.Life.ALIVE
    assert process.life(own.pid, own.start + 1) is process.Life.GONE
