"""Turns of a bench: who is waited for, and who is not."""

from __future__ import annotations

import gzip
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from bench import documents, scenario, steady, turn_report, turns
from bench.arms.arm import load
from bench.plan import Plan
from bench.turn_line import Seats
from bench.workload.turn import Turn
from keepstep.errors import Permanent
from tests.raw_results import committed

ROOT = Path(__file__).resolve().parents[2]
SECONDS_MAX = 10.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "turn"


@pytest.fixture
def seats(path: Path) -> Iterator[Seats]:
    with Seats(path, 2) as made:
        yield made


class Rank:
    """A rank that makes steps from some number on, as fast as it is let."""

    def __init__(self, path: Path, rank: int, first: int = 0) -> None:
        self.made = first
        self._turn = Turn(str(path), rank, nullcontext)
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def _train(self) -> None:
        try:
            while True:
                self.made += 1
                self._turn.passed(self.made)
        except OSError:
            self._turn.close()

    def die(self) -> None:
        with suppress(OSError):
            self._turn._line.shutdown(socket.SHUT_RDWR)
        self._thread.join(SECONDS_MAX)
        assert not self._thread.is_alive()


def hear_until(seats: Seats, holds: Callable[[], bool], what: str) -> None:
    for _ in range(int(SECONDS_MAX / 0.01)):
        if holds():
            return
        seats.hear(0.01)
    raise AssertionError(f"waited {SECONDS_MAX} s for {what}")


def there(seats: Seats) -> bool:
    return seats.all_there() is not None


def test_all_stop_where_they_may_go_and_go_on_when_they_are_let(seats: Seats, path: Path):
    ranks = [Rank(path, 0), Rank(path, 1)]
    hear_until(seats, seats.all_began, "both to begin")
    assert [rank.made for rank in ranks] == [1, 1]
    for until in (5, 6, 20):
        seats.let_until(until)
        assert not there(seats)
        hear_until(seats, lambda: there(seats), "both")
        assert [rank.made for rank in ranks] == [until, until]
    for rank in ranks:
        rank.die()


def test_who_takes_over_a_rank_stops_with_the_others(seats: Seats, path: Path):
    ranks = [Rank(path, 0), Rank(path, 1)]
    hear_until(seats, seats.all_began, "both to begin")
    ranks[1].die()
    hear_until(seats, lambda: not seats.pid_of(1), "the end of rank 1")
    seats.let_until(9)
    heir = Rank(path, 1, first=3)
    hear_until(seats, lambda: there(seats) and bool(seats.pid_of(1)), "both")
    assert (ranks[0].made, heir.made) == (9, 9)
    for rank in (ranks[0], heir):
        rank.die()


def test_one_that_is_still_being_started_holds_nobody_up(seats: Seats, path: Path):
    ranks = [Rank(path, 0), Rank(path, 1)]
    hear_until(seats, seats.all_began, "both to begin")
    ranks[1].die()
    late = Turn(str(path), 1, nullcontext)
    hear_until(seats, lambda: 1 in seats._seats, "the one that comes late")
    seats.let_until(4)
    hear_until(seats, lambda: there(seats), "rank 0 alone")
    assert not seats.pid_of(1), "nobody to be struck"
    late.close()
    ranks[0].die()


def test_steps_that_are_made_again_are_waited_for(seats: Seats, path: Path):
    ranks = [Rank(path, 0), Rank(path, 1)]
    hear_until(seats, seats.all_began, "both to begin")
    seats.let_until(8)
    hear_until(seats, lambda: there(seats), "both")
    for rank in ranks:
        rank.die()
    hear_until(seats, lambda: not there(seats), "their end")
    again = [Rank(path, rank, first=2) for rank in (0, 1)]
    hear_until(seats, lambda: there(seats) and seats.all_began(), "both again")
    assert [rank.made for rank in again] == [8, 8]
    for rank in again:
        rank.die()


def test_a_block_lasts_until_whoever_was_struck_is_replaced(
    seats: Seats, path: Path, monkeypatch: Any
):
    struck, pause = threading.Event(), 0.05
    survivor, victim = (Turn(str(path), rank, nullcontext) for rank in (0, 1))

    def survive() -> None:
        survivor.passed(1)
        assert struck.wait(SECONDS_MAX)
        time.sleep(pause)
        heirs.append(Rank(path, 1, first=3))
        survivor.passed(6)

    def kill(_: int, number: int) -> None:
        assert number == signal.SIGKILL
        victim.close()
        struck.set()

    heirs: list[Rank] = []
    ranks = [threading.Thread(target=survive, daemon=True)]
    ranks.append(threading.Thread(target=victim.passed, args=(1,), daemon=True))
    for rank in ranks:
        rank.start()
    hear_until(seats, seats.all_began, "both to begin")
    monkeypatch.setattr(turns.os, "kill", kill)
    job = turns.Job("arm", load("bare"), Plan(), seats, done=1)
    assert job.go(5, scenario.Strike(0.0, "kill", 1)) >= pause, "it is in its time"
    assert [strike.rank for strike in job.strikes] == [1]
    seats.let_until(7)
    for rank in ranks:
        rank.join(SECONDS_MAX)
    survivor.close()
    heirs[0].die()


def test_the_arm_is_judged_by_the_bare_job_of_its_rounds():
    args = turns.options([])
    rounds = [{"bare": 2.0, "arm": 2.2, "control": 2.0 + n % 2 * 0.02} for n in range(10)]
    weights = {"digests": {0: "a", 1: "b"}, "unmeant_starts": 0}
    truths = {"bare": weights, "arm": weights, "control": weights}
    found = turns.judged(rounds, truths, [], args)
    assert found["ratio"][0] == pytest.approx(1.1)
    assert (found["valid"], found["weights_equal"]) == (True, True)
    died = weights | {"unmeant_starts": 1}
    assert not turns.judged(rounds, {**truths, "arm": died}, [], args)["valid"]
    rounds = [one | {"control": 2.1} for one in rounds]
    other = weights | {"digests": {0: "a", 1: "c"}}
    found = turns.judged(rounds, {**truths, "arm": other}, [], args)
    assert (found["valid"], found["weights_equal"]) == (False, False)


def test_who_bears_less_silence_has_shorter_turns_or_none():
    usual, tuned = (turns.sized(load(spec), 0.03, 500) for spec in ("torchft", "torchft:tuned"))
    assert tuned.block < usual.block
    for size, heartbeat in ((usual, 5.0), (tuned, 1.0)):
        assert 2 * (size.block + size.lead) * 0.03 < heartbeat / 3
    with pytest.raises(Permanent, match=r"still for 0\.3 s or more"):
        turns.sized(load("torchft:tuned"), 0.2, 500)


def test_who_cannot_take_the_plan_says_so_before_anything_is_started(monkeypatch: Any):
    """A trial takes most of a minute."""

    def started(name: str, *_: Any) -> Any:
        raise AssertionError(f"{name} was started")

    monkeypatch.setattr(turns, "started", started)
    monkeypatch.setattr(steady, "gated", started)
    with pytest.raises(Permanent, match="full shard has no replica"):
        turns.measure("torchft", turns.options(["--workload", "fsdp"]))
    with pytest.raises(Permanent, match="only kill can be struck"):
        turns.measure("keepstep", turns.options(["--scenario", "hangs"]))
    args, progress = steady.options(["--parallel", "zero1"]), steady.Progress()
    with pytest.raises(Permanent, match="DCP does not save"):
        steady.measure("checkpoint_restart:sync@20", args, progress, threading.Event())


def test_the_arm_does_not_stand_still_while_others_start_and_end(monkeypatch: Any):
    """It would be longer than its system bears."""
    did: list[str] = []

    class Idle:
        done, seconds, leads = 0, 1.0, 0.0

        def __init__(self, name: str) -> None:
            self.name = name
            self.strikes: list[Any] = []

        def processes(self) -> list[int]:
            return []

        def go(self, steps: int, *_: Any) -> float:
            return 0.1

        turn = go

        def freeze(self) -> None:
            did.append(f"{self.name} stops")

        def finish(self) -> dict[str, Any]:
            did.append(f"{self.name} ends")
            return {"unmeant_starts": 0, "digests": {"0": "a"}}

    def started(name: str, *_: Any) -> Any:
        did.append(f"{name} starts")
        return nullcontext(Idle(name))

    monkeypatch.setattr(turns, "started", started)
    monkeypatch.setattr(turns, "size_of", lambda *_: turns.Size(2, 1, 3))
    found = turns.measure("bare", turns.options([]))
    assert found["valid"]
    assert found["weights_equal"]
    first_stop, last_start = did.index("arm stops"), did.index("arm starts")
    assert first_stop > last_start > max(did.index(f"{n} starts") for n in ("bare", "control"))
    assert [line for line in did if line.endswith("ends")] == [
        "arm ends",
        "bare ends",
        "control ends",
    ]


MACHINE = {"cores": 2, "cpu": "c", "memory": "m", "kernel": "k"}
UNUSUAL = {"steps": 24, "quick": True, "seed": 2, "ranks": 8, "size": "10m", "scenario": "hangs"}
HERE, THERE = ({"machine": {"boot": name}} for name in ("here", "there"))


def result(
    arm: list[float], *, strikes: int, workload: str = "ddp", size: str = "3m", batch: int = 2
) -> Any:
    """A raw result: the last round is the one with the strikes."""
    struck = [0.0] * (len(arm) - 1) + [float(strikes)]
    rounds = [
        {"bare": 2.0, "arm": seconds, "control": 2.0, "strikes": so_far}
        for seconds, so_far in zip(arm, struck, strict=True)
    ]
    found = {"digests": {"0": "a"}, "recomputed": 0, "lost": 0, "unmeant_starts": 0}
    truths = dict.fromkeys(("bare", "arm", "control"), found)
    run = {"rounds": rounds, "strikes": [{}] * strikes, "truths": truths}
    options = {"scenario": "kills", "size": size, "ranks": 4, "workload": workload}
    options |= {"quick": False, "seed": 1, "batch": batch, "steps": 500}
    return {"options": options, "runs": {"keepstep": run, "torchft": {"failed": "it did"}}}


def test_rounds_of_several_runs_are_told_together():
    first, second = result([2.1, 2.1, 3.1], strikes=1), result([2.3, 2.3, 2.3], strikes=0)
    lines = turn_report.table([first, second, result([2.0, 2.5], strikes=1, workload="fsdp")])
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    assert [row[0] for row in cells] == ["ddp, keepstep", "fsdp, keepstep"]
    calm = (2.1 * 2 + 2.3 * 3) / 10
    ddp = dict(zip(turn_report.HEAD, cells[0], strict=True))
    assert (ddp["runs"], ddp["strikes"]) == ("2", "1")
    assert ddp["time, by the bare engine"].startswith(f"{14.2 / 12:.3f} [")
    assert ddp["calm"] == f"{calm:.3f}"
    pause = 3.1 - calm * 2
    assert ddp["pauses, s"] == f"{pause:.1f} to {pause:.1f}"
    assert ddp["weights"] == "equal"


def off(found: Any) -> Any:
    """With a control that is off by more than a valid run may be."""
    for one in found["runs"]["keepstep"]["rounds"]:
        one["control"] = 2.05
    return found


def test_a_row_whose_control_is_off_is_in_brackets():
    assert "(1.050 [" in turn_report.table([off(result([2.1, 2.1], strikes=1))])[2]


def test_an_invalid_run_does_not_become_valid_beside_others():
    good = [result([2.2, 2.2], strikes=0) for _ in range(3)]
    rows = turn_report.table([*good, off(result([9.0, 9.0], strikes=0))])[2:]
    assert len(rows) == 2
    assert rows[0].startswith("| ddp, keepstep | 3 | 0 | 1.100 [")
    assert rows[1].startswith("| (ddp, keepstep) | (1) | (0) | (4.500 [")
    told = result([2.2, 2.2], strikes=0)
    told["runs"]["keepstep"]["valid"] = False
    assert turn_report.table([told])[2].startswith("| (ddp, keepstep)"), "by its own word, too"


def test_an_invalid_run_is_compared_with_nobodys():
    good, bad = result([2.2, 2.2], strikes=0), off(result([2.2, 2.2], strikes=0))
    found = turn_report.compared([good | HERE], [bad | THERE])
    assert found.lines[0] == "ddp, keepstep: no valid run in the second: times not compared"
    assert found.code == 2


def test_runs_that_do_not_train_the_same_are_not_told_together():
    with pytest.raises(Permanent, match="not one scenario, size"):
        turn_report.table([result([2.1], strikes=1), result([2.1], strikes=1, size="100m")])


def test_the_readmes_table_of_turns_is_that_of_its_raw_results():
    told = documents.between((ROOT / "README.md").read_text(encoding="utf-8"), turn_report.MARKS)
    names = re.findall(r"bench/results/[\w.-]+\.json\.gz", told)
    kept = turn_report.fit_results()
    assert [ROOT / name for name in names] == committed(list(kept))
    assert turn_report.markdown([kept[ROOT / name] for name in names], names) == told


def test_a_table_of_turns_takes_what_is_of_a_commit_and_of_the_usual_size_however_it_came_out():
    ours = {"kills": "d"}
    fit = result([9.0, 9.0], strikes=1) | {"commit": "a"}
    assert turn_report.why_unfit(fit, ours) == "", "older ones do not tell the scenario's digest"
    assert turn_report.why_unfit(off(fit) | {"scenario_digest": "d"}, ours) == ""
    assert turn_report.why_unfit(fit | {"runs": {"torchft": {"failed": "it did"}}}, ours) == ""
    for other in ({"commit": "a+changes"}, {"scenario_digest": "e"}):
        assert turn_report.why_unfit(fit | other, ours)
    for name, value in UNUSUAL.items():
        assert turn_report.why_unfit(fit | {"options": fit["options"] | {name: value}}, ours), name


def test_what_failed_or_was_interrupted_is_told_beside_the_table():
    failed = result([2.1, 2.1], strikes=1) | {"machine": MACHINE}
    text = turn_report.markdown([failed], ["f"])
    assert "\n\nOne run of ddp, torchft, failed: it did.\n\n" in text
    assert "2 cores of c, m, kernel k (1 file)" in text
    assert text.startswith("**kills**, 3m x4 ranks, in turns")


def test_who_ends_a_run_of_turns_leaves_that_in_its_raw_result(monkeypatch: Any):
    kept: list[Any] = []
    args = turns.options(["--arms", "keepstep,torchft,bare"])

    def measure(spec: str, _: Any) -> Any:
        if spec == "torchft":
            raise KeyboardInterrupt
        error = Permanent("it ended")
        error.add_note("arm, agent.log: why")
        raise error

    monkeypatch.setattr(turns, "options", lambda: args)
    monkeypatch.setattr(turns, "measure", measure)
    monkeypatch.setattr(turns.record, "keep", lambda name, found: kept.append(found))
    assert turns.main() == 2
    (found,) = kept
    assert {arm: run["failed"] for arm, run in found["runs"].items()} == {
        "keepstep": "it ended",
        "torchft": "interrupted",
        "bare": "interrupted",
    }
    assert found["runs"]["keepstep"]["said"] == ["arm, agent.log: why"]
    assert found["scenario_digest"] == scenario.shipped()["kills"]


def test_a_table_of_turns_is_written_between_its_marks(capsys: Any, tmp_path: Path):
    raw, document = tmp_path / "turns-1.json.gz", tmp_path / "page.md"
    kept = result([2.2, 2.2], strikes=1) | {"machine": MACHINE}
    raw.write_bytes(gzip.compress(json.dumps(kept).encode()))
    begin, end = f"{turn_report.MARKS[0]} -->", turn_report.MARKS[1]
    document.write_text(f"a\n{begin}\nold\n{end}\nb\n", encoding="utf-8")
    assert turn_report.main([str(raw), "--write", str(document)]) == 0
    text = document.read_text(encoding="utf-8")
    assert text.startswith(f"a\n{begin}\n**kills**, 3m x4 ranks, in turns")
    assert text.endswith(f"\n{end}\nb\n")
    assert "| ddp, keepstep | 1 | 1 | 1.100 [" in capsys.readouterr().out
    assert "`bench/results/turns-1.json.gz`" in documents.between(text, turn_report.MARKS)
    document.write_text("nothing", encoding="utf-8")
    assert turn_report.main([str(raw), "--write", str(document)]) == 2
    raw.write_bytes(raw.read_bytes()[:40])
    assert turn_report.main([str(raw)]) == 2
    assert "turns-1.json.gz is no raw result" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        turn_report.main([str(raw), "--against", str(raw), "--write", str(document)])


def test_two_machines_agree_by_ranking_and_ratios(capsys: Any, tmp_path: Path):
    def kept(name: str, slow: float, other: float) -> str:
        found = result([slow] * 2, strikes=1)
        found["runs"]["torchft"] = result([other] * 2, strikes=1)["runs"]["keepstep"]
        found["machine"] = {"boot": name}
        path = tmp_path / name
        path.write_bytes(gzip.compress(json.dumps(found).encode()))
        return str(path)

    here, near, far = kept("here", 2.2, 2.7), kept("near", 2.3, 2.6), kept("far", 2.4, 2.1)
    assert turn_report.main([here, "--against", near]) == 0
    told = capsys.readouterr().out
    assert "ddp, keepstep: 1.100 and 1.150 x bare, +4.5%: same" in told
    assert "ranking keepstep, torchft: same" in told
    assert turn_report.main([here, "--against", far]) == 1
    told = capsys.readouterr().out
    assert "-22.2%: DIFFERS" in told
    assert "DIFFERS: torchft, keepstep" in told
    assert turn_report.main([here, "--against", here]) == 2
    assert "no second machine" in capsys.readouterr().out


def test_what_trains_with_larger_batches_is_another_row():
    usual, larger = result([2.1, 2.1], strikes=1), result([2.1, 2.1], strikes=1, batch=8)
    rows = turn_report.table([larger, usual])[2:]
    assert [row.split("|")[1].strip() for row in rows] == ["ddp, keepstep", "ddp batch 8, keepstep"]
