"""Children that are put back, and those that are not: a sentence instead of a loop."""

from __future__ import annotations

from pathlib import Path

from keepstep.cli.supervise import Child, Program
from keepstep.config import LauncherConfig


def child(tmp_path: Path, script: str) -> Child:
    program = Program("agent-n0", ("sh", "-c", script), tmp_path / "log", {"T": str(tmp_path)})
    made = Child(program, LauncherConfig())
    made.start()
    return made


def ended(made: Child) -> Child:
    assert made._process is not None
    made._process.wait(10)
    return made


def test_who_was_started_wrongly_is_given_up_with_its_own_sentence(tmp_path: Path):
    made = ended(
        child(tmp_path, "echo noise; echo 'keepstep agent: choose another name' >&2; exit 2")
    )
    made.look(now=0.0)
    assert made.given_up == "choose another name"
    assert not made.alive


def test_what_worked_once_is_tried_again_whatever_it_says(tmp_path: Path):
    # Killed once, and then unable to start: its workers live, and need it back.
    script = 'test -e "$T/again" && exit 2; touch "$T/again"; kill -9 $$'
    made = ended(child(tmp_path, script))
    for _ in range(2):
        made.look(now=1e12)
        ended(made)
    assert len(made.starts) == 3
    assert made.given_up == ""


def test_a_deposed_one_is_not_started_again(tmp_path: Path):
    made = ended(child(tmp_path, "exit 3"))
    made.look(now=0.0)
    assert made.given_up.startswith("agent-n0 ended with 3")
