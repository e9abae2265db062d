"""The catalogue and its schedule: broad first, complete later, the same for the same seed."""

from __future__ import annotations

import json

import pytest

from keepstep.chaos import flips, report
from keepstep.chaos.campaign import Plan, Record
from keepstep.chaos.faults import (
    AT_REST,
    CATALOGUE,
    COMPARED,
    MIRROR_WINDOW,
    NOT_SHARDED,
    Mix,
    Outcome,
    choose_cells,
    matrix,
    schedule,
)
from keepstep.chaos.inject import Away, Injector
from keepstep.chaos.proof import StepLogCheck, check_lines, contaminated_only
from keepstep.chaos.strike import Flip
from keepstep.errors import ConfigError

UNPLANNED = choose_cells(Mix.UNPLANNED, (), network=True)


def test_the_same_seed_gives_the_same_faults():
    assert schedule(UNPLANNED, 50, 3, 4) == schedule(UNPLANNED, 50, 3, 4)
    assert schedule(UNPLANNED, 50, 3, 4) != schedule(UNPLANNED, 50, 4, 4)


def test_a_longer_campaign_begins_like_the_shorter_one():
    assert schedule(UNPLANNED, 80, 3, 4)[:20] == schedule(UNPLANNED, 20, 3, 4)


def test_every_kind_comes_before_any_kind_comes_twice():
    kinds = [fault.cell.kind for fault in schedule(UNPLANNED, 400, 5, 4)]
    distinct = len(set(kinds))
    assert len(set(kinds[:distinct])) == distinct


def test_three_hundred_faults_hit_every_cell_at_least_twice():
    struck = [fault.cell for fault in schedule(UNPLANNED, 300, 1, 4)]
    counts = [c for windows in matrix(UNPLANNED, struck).values() for c in windows.values()]
    assert min(counts) >= 2
    assert sum(counts) == 300


def test_every_cell_has_an_expected_outcome_and_a_way_to_strike(tmp_path):
    injector = Injector(None, None, tmp_path, None, control=object())
    for cell in CATALOGUE:
        assert cell.expected is not Outcome.STUCK
        assert cell.kind in injector._kinds, cell.name
    assert len({cell.name for cell in CATALOGUE}) == len(CATALOGUE)


def test_sharded_campaigns_strike_around_the_vote_and_never_both_holders_of_a_shard():
    cells = choose_cells(Mix.UNPLANNED, (), network=True, parallel="hsdp")
    assert {"vote", "voted"} <= {cell.window for cell in cells if cell.kind == "sigkill"}
    assert not NOT_SHARDED & {cell.kind for cell in cells}
    assert not {"vote", "voted"} & {cell.window for cell in UNPLANNED}
    for fault in schedule(cells, 300, 7, 4, parallel="hsdp"):
        assert fault.other not in (fault.rank, (fault.rank + 2) % 4), fault
    with pytest.raises(ConfigError, match="corrupt_source"):
        choose_cells(Mix.UNPLANNED, ("corrupt_source",), network=True, parallel="hsdp")


def test_full_shard_campaigns_strike_before_the_mirror_and_never_two_neighbours():
    cells = choose_cells(Mix.ALL, (), network=True, parallel="fsdp")
    assert {cell.kind for cell in cells if cell.window == MIRROR_WINDOW} >= {"sigkill", "sigstop"}
    for fault in schedule(cells, 300, 7, 4, parallel="fsdp"):
        assert (fault.other - fault.rank) % 4 == 2
    others = choose_cells(Mix.ALL, (), network=True, parallel="tp")
    assert not [cell for cell in others if cell.window == MIRROR_WINDOW]


def test_a_sharded_world_is_a_mesh_of_two_replicas():
    with pytest.raises(ConfigError, match="--world"):
        Plan(world=3, nodes=3, parallel="hsdp")
    assert Plan(parallel="tp").sharded
    assert not Plan().sharded


def test_unplanned_faults_end_live_or_unnoticed():
    assert {cell.expected for cell in UNPLANNED} == {Outcome.LIVE, Outcome.UNTOUCHED}
    assert {c.expected for c in choose_cells(Mix.HOLD, (), network=True)} == {
        Outcome.HELD,
        Outcome.SAVED,
    }
    assert {c.expected for c in choose_cells(Mix.FALLBACK, (), network=True)} == {Outcome.FALLBACK}


def test_aims_are_within_the_world_and_never_twice_at_one_rank():
    for fault in schedule(UNPLANNED, 300, 9, 4):
        assert 0 <= fault.rank < 4
        assert fault.other in range(4)
        assert fault.other != fault.rank
        assert fault.rank == 0 or not fault.cell.kind.startswith("rank0")


def test_without_namespaces_the_silent_kinds_are_left_out_or_refused_by_name():
    cells = choose_cells(Mix.UNPLANNED, (), network=False)
    assert not any(cell.needs_network for cell in cells)
    with pytest.raises(ConfigError, match="run as root"):
        choose_cells(Mix.UNPLANNED, ("silent_node",), network=False)


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="sigkill"):
        choose_cells(Mix.UNPLANNED, ("sigkil",), network=True)


@pytest.mark.parametrize(
    "wrong",
    [{"world": 5, "nodes": 4}, {"spares": 1}, {"faults": 0}, {"sabotage": "everything"}],
)
def test_a_plan_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ConfigError):
        Plan(**wrong)


# ---------------------------------------------------------------- flips


def test_flips_are_drawn_by_how_they_are_looked_for():
    def drawn(every, parallel="ddp"):
        cells = choose_cells(Mix.FLIPS, (), network=True, parallel=parallel, check_steps=every)
        return {cell.kind for cell in cells}, {cell.window for cell in cells}

    state = {"flip_parameter", "flip_moment", "flip_buffer"}
    assert drawn(1) == (state, {AT_REST})
    assert drawn(1, "fsdp") == (state | {"flip_mirror"}, {AT_REST})
    assert drawn(20) == (state - {"flip_buffer"}, {COMPARED})
    assert not Plan(mix=Mix.FLIPS, check_steps=20).exact
    assert Plan(mix=Mix.FLIPS, check_steps=1).exact
    for wrong in (
        {"mix": Mix.FLIPS},
        {"mix": Mix.FLIPS, "check_steps": 5, "parallel": "fsdp"},
        {"mix": Mix.FLIPS, "check_steps": 5, "world": 2, "nodes": 2},
        {"check_steps": 5},
    ):
        with pytest.raises(ConfigError, match="check-steps"):
            Plan(**wrong)


def found(rank=2, step=40, detail="0.exp_avg changed between two steps", sign="corrupt"):
    return {"causes": [{"sign": sign, "rank": rank, "step": step, "detail": detail}]}


@pytest.mark.parametrize(
    ("incidents", "every", "problem"),
    [
        ([found()], 1, ""),
        ([], 1, "0 incidents"),
        ([found(), found()], 1, "2 incidents"),
        ([found(sign="exit")], 1, "nobody said"),
        ([found(rank=1)], 1, "rank 1 was named"),
        ([found(step=41)], 1, "after 1 steps"),
        ([found(detail="1.exp_avg changed")], 1, "0.exp_avg was flipped"),
        ([found(step=60, detail="x; steps 40 to 59 are contaminated")], 20, ""),
        ([found(step=60, detail="x; steps 41 to 59 are contaminated")], 20, "used it"),
        ([found(step=60)], 20, "used it"),
        ([found(step=61, detail="x; steps 40 to 60 are contaminated")], 20, "after 21 steps"),
    ],
)
def test_a_flip_counts_only_if_the_right_one_is_named_in_time(incidents, every, problem):
    flip = Flip(2, "n2/0", 40, "0.exp_avg")
    result = flips.judge(flip, incidents, {"taints": [{"place": "n2/0"}]}, every)
    assert problem in result.problem
    assert bool(problem) == bool(result.problem)
    assert flips.judge(flip, incidents, {"taints": []}, every).problem


def test_after_contaminated_steps_replicas_are_equal_and_nothing_else_differs(tmp_path):
    def write(*, odd=""):
        for rank in range(3):
            parts = {"weights": "w", "optimizer": "o", "scheduler": "s", "rng": f"r{rank}"}
            parts |= {odd: "odd"} if rank == 1 else {}
            (tmp_path / f"rank-{rank}.json").write_text(json.dumps(parts))

    reached = [f"rank {rank}: weights differs" for rank in range(3)]
    write()
    assert contaminated_only(3, tmp_path, reached) == ""
    assert "rng" in contaminated_only(3, tmp_path, [*reached, "rank 1: rng differs"])
    write(odd="optimizer")
    assert contaminated_only(3, tmp_path, reached) == "the replicas' optimizer differ"


# ---------------------------------------------------------------- the step log's proof


def line(step, first, past):
    return json.dumps({"step": step, "generation": 1, "samples": [first, past], "digest": "x"})


def test_a_whole_step_log_is_sound():
    check = check_lines([line(0, 0, 8), line(1, 8, 16), line(2, 16, 24)], 3)
    assert check == StepLogCheck(3, 0, 0, 0, 0)
    assert check.sound


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ([line(0, 0, 8), line(2, 16, 24)], "lost"),
        ([line(0, 0, 8), line(1, 8, 16)], "lost"),
        ([line(0, 0, 8), line(1, 8, 16), line(1, 8, 16), line(2, 16, 24)], "repeated"),
        ([line(0, 0, 8), line(1, 9, 17), line(2, 17, 25)], "broken_ranges"),
    ],
)
def test_a_missing_a_doubled_and_a_shifted_step_are_each_noticed(lines, wrong):
    check = check_lines(lines, 3)
    assert getattr(check, wrong) == 1
    assert not check.sound


def test_a_declared_fallback_may_make_steps_again():
    lines = [line(0, 0, 8), line(1, 8, 16), json.dumps({"fallback_to": 1}), line(1, 8, 16)]
    check = check_lines(lines, 2)
    assert check.sound
    assert check.fallbacks == 1


# ---------------------------------------------------------------- the words at the end


def record(number, outcome, pause, expected="live"):
    return Record(
        number,
        "sigkill",
        "forward",
        1,
        7,
        expected,
        outcome,
        outcome == expected,
        pause_seconds=pause,
    )


def test_the_last_line_counts_and_measures():
    records = [record(n, "live", 0.1 * (n + 1)) for n in range(20)]
    log = StepLogCheck(100, 0, 0, 0, 0)
    stated = report.Verdict(False, log, ("rank 0: weights differs",), 100, "")
    assert stated.good
    assert "outcome as stated yes (replicas equal" in report.last_line(records, stated)
    assert not report.Verdict(False, log, (), 100, "the replicas' weights differ").good
    assert not report.Verdict(False, log, ("rank 0: weights differs",), 100).good
    verdict = report.Verdict(True, log, (), 100)
    assert report.last_line(records, verdict) == (
        "20 faults, 20 as expected, 20 live, bit-exact yes, 0 committed steps lost, "
        "pause p50 1.0 s p95 1.9 s"
    )


def test_a_bad_outcome_is_named_in_its_line():
    text = report.fault_line(record(0, "stuck", None), 5)
    assert text.startswith("BAD   1/5 sigkill/forward")
    assert "stuck (expected live)" in text


def test_a_node_that_was_taken_out_does_not_come_back():
    """It would be started after the cluster has forgotten it, and nobody would end it."""
    came: list[str] = []
    injector = object.__new__(Injector)
    injector.away = [Away(node, 0.0, came.append) for node in ("n1", "n2", "n2")]
    injector.forget("n2")
    injector.tend(now=1.0)
    assert came == ["n1"]
