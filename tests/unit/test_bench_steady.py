"""Turns of the steady bench: how long a block is, what counts in it, and what is kept of it."""

from __future__ import annotations

import argparse
import re
import threading
from pathlib import Path

import pytest

from bench import documents, overhead, record, steady, truth
from bench.arms.arm import able, load
from bench.plan import Plan
from keepstep.errors import ConfigError, Permanent, Unreachable

OPTIONS = steady.options
ROOT = Path(__file__).resolve().parents[2]


def timed_saves(block, lead, every, turns, first):
    """Of saves after every so many steps, those between the stamps of so many turns.

    As the gate has it: the clock starts at the end of the last step that does not count, and stops
    at the end of the last one. After that one a rank waits for its next turn, and saves then.
    """
    step, timed = first, 0
    for _ in range(turns):
        for place in range(1, lead + block + 1):
            step += 1
            timed += step % every == 0 and lead <= place < lead + block
    return timed


@pytest.mark.parametrize("every", [5, 20, 80])
@pytest.mark.parametrize("step_ms", [20, 33, 36, 50, 61, 65, 79, 110, 150, 199, 250, 300, 445])
def test_timed_steps_have_their_share_of_saves_wherever_the_first_one_falls(step_ms, every):
    block, lead = steady.spread_block(step_ms / 1000, every, overhead.STILL_SECONDS_MAX)
    wanted = 100 * block / every
    for first in range(every):
        found = timed_saves(block, lead, every, 100, first)
        assert abs(found - wanted) <= max(0.05 * wanted, lead + 1)
    whole = [timed_saves(block, lead, every, every, first) for first in range(every)]
    assert set(whole) == {block}, "as soon as every place of a turn has had its save"


def test_blocks_of_the_old_length_had_more_or_less_than_their_share():
    """What is mended: 20 steps in a turn, a save after each 20th; and 30 of them."""
    for block, lead, worst in ((18, 2, 1.0), (28, 2, 0.05)):
        wanted = 100 * block / 20
        found = [timed_saves(block, lead, 20, 100, first) for first in range(20)]
        assert max(abs(n - wanted) / wanted for n in found) > worst - 0.01


def test_who_is_not_at_turn_stands_still_for_less_than_agents_bear():
    for step_ms in range(5, 730, 5):
        block, lead = overhead.block_of(step_ms / 1000)
        assert block >= 1
        assert 2 * (block + lead) * step_ms / 1000 < 3.0, step_ms
    assert overhead.block_of(0.05) == (22, 2), "as long as it may be, it is as it was"
    with pytest.raises(Permanent, match="make steps shorter"):
        overhead.block_of(0.8)


def test_an_arm_that_allows_less_silence_gets_shorter_blocks():
    """What is mended: TorchFT gives up who is silent for 5 s, stood still for 2.6 s by plan, and
    for 5.1 s when the machine was slow for a moment."""
    patient, torchft = (steady.may_stand_still(load(spec)) for spec in ("keepstep", "torchft"))
    assert (patient, torchft) == (overhead.STILL_SECONDS_MAX, pytest.approx(5.0 / 3))
    for step in (0.05, 0.11, 0.2, 0.3):
        block, lead = steady.spread_block(step, 1, torchft)
        assert overhead.still_seconds(block, lead, step) < 5.0 / 3
        assert steady.spread_block(step, 1, patient)[0] > block


def logs_of(*lines, starts=(0, 1)):
    logs = truth.Logs()
    for rank, step, marks in lines:
        logs.lines.append(truth.Line(rank, step, 0.0, 1.0, (1,), marks, 2.0))
    logs.starts += [truth.Start(rank, 7, "h", 0.0) for rank in starts]
    return logs


def test_steps_without_a_replica_and_ranks_started_again_are_alarms():
    clean = logs_of((0, 0, (5, 6)), (1, 0, (5, 6)))
    assert steady.uneven(clean, 2) == []
    away = logs_of((0, 0, (5, 6)), (0, 1, (5, 0)), (1, 1, (5, 0)), (0, 2, ()))
    assert steady.uneven(away, 2) == ["2 steps without all ranks"]
    again = logs_of((0, 0, (5, 6)), starts=(0, 1, 1, 0))
    assert steady.uneven(again, 2) == ["ranks were started 2 times more"]


def a_round(**more):
    names = ("bare", "arm", "control", "bare_processor", "arm_processor", "control_processor")
    return {**dict.fromkeys(names, 1.0), "steps": 40.0, "others": 0.0, **more}


def rounds_of(**more):
    """Of 40 steps, together."""
    return [a_round(steps=20.0, **more) for _ in range(2)]


@pytest.fixture
def kept(monkeypatch, capsys):
    """What the command keeps, instead of a file."""
    files = []

    def keep(name, result):
        files.append({**result, "at": "t", "commit": "c", "machine": {}, "versions": {}})
        return "steady.json.gz"

    monkeypatch.setattr(record, "keep", keep)
    monkeypatch.setattr(record, "read", lambda path: files[-1])
    return files


def commanded(monkeypatch, segment, *line):
    args = OPTIONS(["--arms", "bare,checkpoint_restart:sync@20", "--steps", "80", *line])
    monkeypatch.setattr(steady, "options", lambda: args)
    monkeypatch.setattr(steady, "segment", segment)
    return steady.main()


@pytest.mark.parametrize(
    "error", [Unreachable("the lighthouse"), TimeoutError("timed out"), ConfigError("no")]
)
def test_trouble_with_one_arm_costs_neither_the_others_nor_its_own_segments(
    monkeypatch, kept, error
):
    trouble = type(error)(*error.args)

    def segment(spec, args, progress, limit):
        if spec == "bare" and progress.rounds:
            trouble.add_note("arm, rank-0.log: why")
            raise trouble
        progress.rounds += rounds_of()

    assert commanded(monkeypatch, segment) == 2
    runs = kept[-1]["runs"]
    assert str(trouble) in runs["bare"]["failed"]
    assert runs["bare"]["said"] == ["arm, rank-0.log: why"]
    assert [(spec, run["steps_per_arm"], run["valid"]) for spec, run in runs.items()] == [
        ("bare", 40, False),
        ("checkpoint_restart:sync@20", 80, True),
    ]


def test_a_single_round_has_no_interval(monkeypatch, kept, capsys):
    def segment(spec, args, progress, limit):
        progress.rounds.append(a_round())

    line = ("--arms", "bare", "--segments", "1", "--steps", "40")
    assert commanded(monkeypatch, segment, *line) == 2
    assert "bare: fewer than 2 quiet rounds" in capsys.readouterr().out
    assert not kept[-1]["runs"]["bare"]["valid"]


def test_steps_that_are_all_in_one_round_are_not_enough():
    limit = overhead.Limit(40, 1e9, threading.Event())
    assert not steady.is_enough([a_round()], limit)
    assert not steady.is_enough([a_round(steps=19.0)] * 2, limit)
    assert steady.is_enough(rounds_of(), limit)


def test_an_arm_that_had_no_time_for_a_round_is_told(monkeypatch, kept, capsys):
    assert commanded(monkeypatch, lambda *_: None, "--minutes", "1") == 2
    assert set(kept[-1]["runs"]) == {"bare", "checkpoint_restart:sync@20"}
    assert "bare: not one round in 1.0 min" in capsys.readouterr().out


def test_an_arm_whose_jobs_made_no_timed_step_costs_the_others_nothing(monkeypatch, kept, capsys):
    def segment(spec, args, progress, limit):
        for job in ("bare", "arm", "control"):
            # As the real one does when its time is over before the first round.
            progress.steps_us.setdefault(job, [])
        if spec == "bare":
            progress.rounds += rounds_of()

    assert commanded(monkeypatch, segment, "--minutes", "1") == 2
    assert kept[-1]["runs"]["bare"]["steps_per_arm"] > 0
    assert "checkpoint_restart:sync@20: not one round in 1.0 min" in capsys.readouterr().out


def test_the_two_bare_jobs_take_turns_in_being_started_first():
    rounds = []
    assert not steady.control_is_next(rounds)
    rounds += [a_round()] * 3
    assert steady.control_is_next(rounds), "older ones do not tell: it was always the bare one"
    rounds += [a_round(control_first=1.0)] * 2
    assert steady.control_is_next(rounds)
    rounds += [a_round(control_first=1.0)] * 1
    assert not steady.control_is_next(rounds)


def test_longer_turns_of_an_arm_are_not_added_to_shorter_ones(monkeypatch, kept, capsys):
    seconds = 2.1

    def segment(spec, args, progress, limit):
        progress.rounds += rounds_of(bare=seconds, arm=seconds, control=seconds)

    def line(arms, steps):
        return ("--arms", arms, "--segments", "1", "--steps", steps)

    assert commanded(monkeypatch, segment, *line("bare,torchft", "40")) == 0
    assert commanded(monkeypatch, segment, *line("bare,torchft", "80"), "--onto", "f") == 2
    assert "torchft has shorter turns now" in capsys.readouterr().err
    seconds = 1.1
    assert commanded(monkeypatch, segment, *line("bare,torchft", "40")) == 0
    assert commanded(monkeypatch, segment, *line("bare,torchft", "80"), "--onto", "f") == 0


def test_an_arm_that_is_none_is_told_before_the_first_one_is_measured(monkeypatch, kept, capsys):
    def segment(*_):
        raise AssertionError("measured")

    assert commanded(monkeypatch, segment, "--arms", "bare,tochft") == 2
    assert "tochft" in capsys.readouterr().err
    assert not kept


def test_a_run_that_is_short_is_gone_on_with(monkeypatch, kept):
    asked = []

    def segment(spec, args, progress, limit):
        asked.append((spec, limit.steps))
        if spec != "bare" and not kept:
            limit.told_to_end.set()
        progress.rounds += rounds_of()

    assert commanded(monkeypatch, segment, "--segments", "1", "--steps", "40") == 0
    assert commanded(monkeypatch, segment, "--segments", "1", "--onto", "f") == 0
    assert asked == [("bare", 40), ("checkpoint_restart:sync@20", 40)] * 2
    assert {run["steps_per_arm"] for run in kept[-1]["runs"].values()} == {80}
    assert [part["commit"] for part in kept[-1]["onto"]] == ["c"]
    for run in kept[-1]["runs"].values():
        run |= {"failed": "it did", "said": ["why"]}
    assert commanded(monkeypatch, segment, "--arms", "bare", "--steps", "120", "--onto", "f") == 0
    runs = kept[-1]["runs"].values()
    assert [(r["failed"], r["said"]) for r in runs] == [("", []), ("it did", ["why"])]
    assert commanded(monkeypatch, segment, "--onto", "f", "--size", "10m") == 2
    kept[-1]["method"] = 1
    assert commanded(monkeypatch, segment, "--onto", "f") == 2
    assert len(kept) == 3, "rounds that were made in another way are not mixed with these"


def test_a_raw_result_is_told_again_with_its_failures(monkeypatch, kept, capsys):
    def segment(spec, args, progress, limit):
        if spec != "bare":
            raise Unreachable("the lighthouse")
        progress.rounds += rounds_of(arm=1.1)

    assert commanded(monkeypatch, segment, "--segments", "1", "--steps", "40") == 2
    said = capsys.readouterr().out
    assert commanded(monkeypatch, segment, "--read", "f") == 2
    told = capsys.readouterr().out
    assert "bare: 40 steps per arm, ratio 1.1000" in told
    assert "Unreachable: the lighthouse" in told
    assert all(line in said for line in told.splitlines())
    assert len(kept) == 1
    del kept[-1]["runs"]["checkpoint_restart:sync@20"]
    assert commanded(monkeypatch, segment, "--read", "f") == 0
    kept[-1]["method"] = 1
    assert commanded(monkeypatch, segment, "--read", "f") == 2


def test_a_false_alarm_makes_an_arm_invalid():
    args = argparse.Namespace(quick=False, seed=1, steps=40)
    progress = steady.Progress(rounds_of())
    assert steady.summed_up("bare", args, progress)["valid"]
    progress.alarms.append("arm: 3 steps without all ranks")
    assert not steady.summed_up("bare", args, progress)["valid"]


def test_the_fastest_steps_stand_beside_the_sums_and_are_carried_on(monkeypatch, kept, capsys):
    def segment(spec, args, progress, limit):
        progress.rounds += rounds_of()
        for job, micros in (("bare", 100), ("arm", 103), ("control", 101)):
            # One of two was disturbed, and none of the fastest is.
            progress.steps_us.setdefault(job, []).extend([micros, 7 * micros] * 10)

    line = ("--arms", "bare", "--segments", "1")
    assert commanded(monkeypatch, segment, *line, "--steps", "40") == 0
    assert "fastest steps 1.0300 (control 1.0100)" in capsys.readouterr().out
    assert commanded(monkeypatch, segment, *line, "--onto", "f") == 0
    assert len(kept[-1]["runs"]["bare"]["rank0_steps_us"]["arm"]) == 40
    del kept[-1]["runs"]["bare"]["rank0_steps_us"]
    assert commanded(monkeypatch, segment, *line, "--onto", "f", "--steps", "120") == 0
    assert len(kept[-1]["runs"]["bare"]["rank0_steps_us"]["arm"]) == 20, "an older file has none"


def test_who_cannot_run_a_plan_is_told_so_before_anything_is_started(tmp_path):
    plan = Plan("fsdp", "3m", 2, 10, directory=str(tmp_path))
    with pytest.raises(Permanent, match="no replica"):
        able("torchft", plan)
    assert able("bare", plan).name == "bare"


def test_the_documents_table_is_that_of_its_raw_result():
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    told = documents.between(text, steady.MARKS)
    (name,) = re.findall(r"bench/results/[\w.-]+\.json\.gz", told)
    kept = record.read(ROOT / name)
    assert steady.markdown(kept["options"], kept["runs"], name) == told
    assert "+changes" not in kept["commit"]
    assert not kept["options"]["quick"]


def test_a_table_says_what_does_not_count_and_what_there_is_nothing_of():
    figure = [1.1, 1.13, 1.05, 1.15]
    run = {
        "ratio": figure,
        "control": figure,
        "processor": figure,
        "processor_control": figure,
        "fastest_us": {},
        "steps_per_arm": 1500,
        "valid": False,
        "failed": "",
    }
    runs = {
        "none": {"failed": "", "valid": False},
        "gone": {"failed": "it ended", "valid": False},
        "off": run,
        "good": run | {"ratio": [1.0, 1.0, 1.0, 1.0], "valid": True},
    }
    asked = {"parallel": "ddp", "size": "3m", "ranks": 2}
    text = steady.markdown(asked, runs, "f")
    assert text.startswith("**ddp 3m x2 ranks**, nobody struck; in brackets, what does not count:")
    assert text.splitlines()[4:8] == [
        "| good | 1,500 | 1.000 [1.000, 1.000] | 1.100 | 1.100 (1.100) | - |",
        "| (off) | (1,500) | (1.100 [1.050, 1.150]) | (1.100) | (1.100 (1.100)) | (-) |",
        "| none | fewer than 2 quiet rounds | - | - | - | - |",
        "| gone | it ended | - | - | - | - |",
    ]


def test_a_table_is_written_of_a_result_that_is_read_again(tmp_path, capsys):
    with pytest.raises(SystemExit):
        OPTIONS(["--write", "d.md"])
    assert "--write goes with --read FILE" in capsys.readouterr().err
    document = tmp_path / "d.md"
    document.write_text("a\n<!-- steady:begin -->\n<!-- steady:end -->\nb\n", encoding="utf-8")
    # An old one, which has neither processor times nor single steps of all jobs.
    old = ROOT / "bench" / "results" / "steady-20261119T053500Z.json.gz"
    assert steady.tell_again(old, [document]) == 2
    told = document.read_text(encoding="utf-8")
    assert f"`bench/results/{old.name}`" in told
    assert "| (keepstep) |" in told
