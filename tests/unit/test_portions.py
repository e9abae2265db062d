"""State in portions: the vote, the moves, the writers, who may leave, and who catches up."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from keepstep import portion
from keepstep.model import JobId, JobSpec, JobState, Move, NodeId, Rank, Seat
from keepstep.orchestrator import catching_up, portions, roster
from keepstep.orchestrator.state import Job
from keepstep.wire import Cover, SeatReport

KINDS = ("new", "new", "new", "old", "torn", "joiner", "corrupt", "half")


def meshes() -> st.SearchStrategy[tuple[int, list[str]]]:
    """R x S ranks: what all hold, and a shard per column."""
    return st.tuples(st.integers(1, 4), st.integers(1, 4)).map(
        lambda mesh: (
            mesh[0] * mesh[1],
            [portion.name_of(range(c, mesh[0] * mesh[1], mesh[1])) for c in range(mesh[1])]
            + ([portion.name_of(range(mesh[0] * mesh[1]))] if mesh[1] > 1 else []),
        )
    )


@st.composite
def quiesced(draw):
    """Seats, reports and portions of a quiesced job: S, S-1, torn, empty, wrong all or in part."""
    size, names = draw(meshes())
    seats = [Seat(Rank(r), NodeId(draw(st.sampled_from("abc"))), 0, 0) for r in range(size)]
    held = portions.index(portions.listed(names), size)
    reports = {}
    for rank in range(size):
        kind = draw(st.sampled_from(KINDS))
        if kind == "joiner":
            reports[Rank(rank)] = SeatReport(Rank(rank))
            continue
        at = 8 if kind == "old" else 9
        digests = dict.fromkeys(held[rank], f"d{at}")
        if kind == "corrupt":
            digests = dict.fromkeys(digests, f"bad{rank}")
        if kind == "half":
            digests[draw(st.sampled_from(held[rank]))] = f"bad{rank}"
        reports[Rank(rank)] = SeatReport(Rank(rank), at, kind != "torn", digests)
    return seats, reports, names


def judged(case) -> roster.Verdict:
    _, reports, names = case
    return roster.judge(reports, len(reports), names)


@given(quiesced())
def test_each_portion_is_won_by_a_strict_majority_of_its_holders_at_the_boundary(case):
    _, reports, names = case
    verdict = judged(case)
    at = [r for r in reports.values() if r.intact and r.boundary == verdict.boundary]
    ties = [n for n in names if 2 * most(at, n) <= sum(n in r.digests for r in at)]
    assert verdict.problem == bool(ties), verdict.why
    if verdict.problem:
        assert verdict.winners == {}
        return
    assert sorted(verdict.winners) == sorted(names)
    for name, winners in verdict.winners.items():
        assert {reports[rank].digests[name] for rank in winners} == {verdict.digests[name]}
        assert len(winners) == most(at, name)


def most(reports: list[SeatReport], name: str) -> int:
    found = [report.digests[name] for report in reports if name in report.digests]
    return max(map(found.count, found), default=0)


@given(quiesced())
def test_who_did_not_win_a_portion_receives_it_once_and_from_winners_only(case):
    seats, reports, names = case
    verdict = judged(case)
    if verdict.problem:
        return
    moves = roster.moves(verdict, reports, seats, {})
    wave_of = {move.target: move.wave for move in moves}
    assert all(move.wave == wave_of[move.target] for move in moves), "whole after one wave"
    for name in names:
        mine = [move for move in moves if move.portion == name]
        losers = portions.holders(name, len(seats)) - set(verdict.winners[name])
        assert sorted(move.target for move in mine) == sorted(losers)
        for move in mine:
            assert set(move.sources) <= set(verdict.winners[name])
            assert 1 <= len(set(move.sources)) == len(move.sources)
            assert len(move.sources) <= roster.SOURCES_PER_MOVE_MAX


@given(quiesced())
def test_no_last_home_of_a_portion_is_received_into_in_place(case):
    """Older whole state is overwritten once two nodes hold the newer, a winner's never."""
    seats, reports, _ = case
    verdict = judged(case)
    if verdict.problem:
        return
    moves = roster.moves(verdict, reports, seats, {})
    won = {rank for winners in verdict.winners.values() for rank in winners}
    homes = {n: {seats[r].node for r in winners} for n, winners in verdict.winners.items()}
    for wave in (0, 1):
        now = [move for move in moves if move.wave == wave]
        for move in now:
            whole = reports[move.target].intact and reports[move.target].boundary >= 0
            if move.target in won:
                assert move.staged, "it would be torn, and it is a home of something else"
            if whole and not move.staged:
                for mine in (m for m in moves if m.target == move.target):
                    assert safe(mine.portion, moves, homes, seats), mine
        for move in now:
            homes[move.portion].add(seats[move.target].node)


def safe(name: str, moves: tuple[Move, ...], homes: dict[str, set[NodeId]], seats) -> bool:
    wanted = {seats[move.target].node for move in moves if move.portion == name}
    return len(homes[name]) > 1 or not wanted - homes[name]


@given(quiesced())
def test_ranks_that_walk_the_list_one_move_after_another_never_wait_in_a_circle(case):
    seats, reports, _ = case
    verdict = judged(case)
    if verdict.problem:
        return
    todo = list(roster.moves(verdict, reports, seats, {}))
    assert [move.wave for move in todo] == sorted(move.wave for move in todo)
    queues = {seat.rank: [m for m in todo if seat.rank in (m.target, *m.sources)] for seat in seats}
    while todo:
        able = [m for m in todo if all(queues[r][0] == m for r in (m.target, *m.sources))]
        assert able, "everybody waits for somebody"
        for move in able:
            todo.remove(move)
            for rank in (move.target, *move.sources):
                queues[rank].remove(move)


@given(quiesced(), st.sets(st.integers(0, 15)))
def test_each_portion_has_one_writer_that_holds_it(case, suspected):
    verdict = judged(case)
    if verdict.problem:
        return
    writers = roster.writers(verdict, {Rank(rank): 1 for rank in suspected})
    assert writers.keys() == verdict.winners.keys()
    for name, writer in writers.items():
        assert writer in verdict.winners[name]
        assert writer not in suspected or suspected.issuperset(verdict.winners[name])


def test_no_rank_writes_twice_where_others_could():
    names = ["0-2/2", "1-3/2", "0-3"]
    reports = {
        Rank(r): SeatReport(Rank(r), 9, True, {names[r % 2]: "s", "0-3": "a"}) for r in range(4)
    }
    writers = roster.writers(roster.judge(reports, 4, names), {})
    assert writers == {"0-2/2": 0, "0-3": 2, "1-3/2": 1}


# ---------------------------------------------------------------- what nobody speaks of


def two_by_two(*ranks: int, at: int = 9) -> dict[Rank, SeatReport]:
    held = portions.index("0-2/2;0-3;1-3/2", 4)
    told = {r: SeatReport(Rank(r), at, True, dict.fromkeys(held[r], "d")) for r in ranks}
    return {Rank(r): told.get(r, SeatReport(Rank(r))) for r in range(4)}


def test_a_portion_without_a_holder_at_the_boundary_is_named_with_those_who_held_it():
    verdict = roster.judge(two_by_two(0, 2), 4, ("0-2/2", "0-3", "1-3/2"))
    assert verdict.problem
    assert verdict.why == "nobody holds portion 1-3/2 at boundary 9: it was with rank 1, 3"


def test_who_died_before_it_told_is_missed_unless_a_twin_speaks_for_it():
    lost = roster.judge(two_by_two(0, 2), 4, told=False)
    assert lost.why == "rank 1 was lost before it said what it holds"
    assert not roster.judge(two_by_two(0, 2, 3), 4, told=False).problem


def test_a_name_that_makes_no_sense_never_resumes():
    for name in ("rubbish", "0-9", "0-99999999999999", "0;1"):
        reports = two_by_two(0, 1, 2, 3)
        assert "no portion" in roster.judge(reports, 4, (name,)).why
        reports[Rank(0)] = replace(reports[Rank(0)], digests={name: "d"})
        assert "no portion" in roster.judge(reports, 4).why


def test_what_all_completed_in_part_is_completed_by_all_though_nobody_told_of_it():
    lost = SeatReport(Rank(1))
    half = [SeatReport(Rank(r), 9, True, {str(r): "d"}, unsynced=("0-2",)) for r in (0, 2)]
    cover = replace(half[1], covers=(Cover("1", 4, 9),))
    reports = {report.rank: report for report in (half[0], lost, cover)}
    verdict = roster.judge(reports, 3, ("0", "1", "2"))
    assert (verdict.synced, verdict.rebuilt) == ({"0-2"}, {"1"})
    assert verdict.winners["0-2"] == (0, 2)
    seats = [Seat(Rank(r), NodeId(f"n{r}"), 0, 0) for r in range(3)]
    # The rebuilt rank's own parameters are newer than what it is sent of everybody's.
    assert [m.portion for m in roster.moves(verdict, reports, seats, {})] == ["0-2", "1"]
    without = roster.judge({r.rank: r for r in (*half, lost)}, 3, ("0", "1", "2"))
    assert without.why == "nobody holds portion 1 at boundary 9: it was with rank 1"


def test_nobody_votes_on_what_it_does_not_hold():
    reports = two_by_two(0, 1, 2, 3)
    reports[Rank(0)] = replace(reports[Rank(0)], digests={"1-3/2": "d", "0-3": "d"})
    assert roster.judge(reports, 4).why == "rank 0 speaks of portion 1-3/2, which it does not hold"


def test_where_nobody_told_of_portions_all_state_is_one():
    reports = {Rank(r): SeatReport(Rank(r), 9, True) for r in range(2)}
    assert roster.judge(reports, 2).winners == {"0-1": (0, 1)}


# ---------------------------------------------------------------- a job's portions


def job_with(*names: str, size: int = 4) -> Job:
    job = Job(JobSpec(JobId("j"), "t.py", nodes=size), JobState.RUNNING, 0.0)
    portions.note(job, [SeatReport(Rank(0), portions=names)])
    return job


def test_the_names_that_are_kept_are_bounded_and_one_too_many_is_noticed(monkeypatch):
    monkeypatch.setattr(portions, "PORTIONS_MAX", 3)
    job = job_with("0", "1", "2", "3", "0-1")
    assert len(job.portions) == 4
    assert job.portions[portions.TOO_MANY] == 0
    reports = {Rank(r): SeatReport(Rank(r), 9, True, {str(r): "d"}) for r in range(4)}
    assert portions.TOO_MANY in roster.judge(reports, 4, tuple(job.portions)).why


def test_what_nobody_holds_any_more_is_forgotten_once_all_have_told():
    job = job_with("0-1", "0-3")
    some = [SeatReport(Rank(r), portions=("0-3",)) for r in range(3)]
    portions.settle(job, [*some, SeatReport(Rank(3))])
    assert (sorted(job.portions), job.portions_told) == (["0-1", "0-3"], False)
    portions.settle(job, [*some, SeatReport(Rank(3), portions=("0-3", "3"))])
    assert (job.portions, job.portions_told) == ({"0-3": 4, "3": 1}, True)


def test_until_all_have_told_a_sharded_job_is_in_the_dark_and_a_plain_one_is_not():
    assert portions.in_the_dark(job_with("0-2/2", "0-3"))
    assert not portions.in_the_dark(job_with("0-3"))
    assert not portions.in_the_dark(job_with())
    told = job_with("0-2/2", "0-3")
    portions.settle(told, [SeatReport(Rank(0), portions=("0-2/2", "0-3"))])
    assert not portions.in_the_dark(told)


def test_of_each_portion_somebody_stays():
    job = job_with("0-2/2", "1-3/2", "0-3")
    assert portions.leavable(job, map(Rank, (3, 1, 0))) == [3, 0]
    assert portions.leavable(job_with("0-3"), map(Rank, range(4))) == [0, 1, 2]
    assert portions.leavable(job_with("0", "1-3"), map(Rank, range(4))) == [1, 2]
    assert portions.leavable(job_with("0;1", "x", "0-3"), map(Rank, range(4))) == [0, 1, 2]


def test_what_is_left_without_some_ranks():
    job = job_with("0-2/2", "1-3/2", "0-3")
    assert portions.bereft(job, {Rank(0), Rank(1)}) == ""
    assert portions.bereft(job, {Rank(1), Rank(3)}) == "1-3/2"
    assert portions.alone(job, map(Rank, range(4))) == {}
    assert portions.alone(job_with("0-2", "3"), map(Rank, range(4))) == {3: "3"}


# ---------------------------------------------------------------- catching up


def at(rank: int, boundary: int, *, ready: bool = False, intact: bool = True) -> SeatReport:
    return SeatReport(Rank(rank), boundary, intact, ready=ready)


def test_only_who_stands_right_before_an_update_that_was_made_makes_it():
    made = [at(0, 10), at(1, 9, ready=True), at(2, 9), at(3, 8, ready=True), at(4, -1)]
    torn = at(5, 9, ready=True, intact=False)
    reports = {report.rank: report for report in (*made, torn)}
    assert catching_up.behind(reports) == (10, (1,))


def test_an_update_that_nobody_made_is_made_by_nobody():
    reports = {Rank(r): at(r, 9, ready=r > 0) for r in range(4)}
    assert catching_up.behind(reports) == (9, ())
    assert catching_up.behind({Rank(0): at(0, -1)}) == (-1, ())
