from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.model import Generation, JobId, NodeId, Rank, Roster, Seat
from keepstep.orchestrator import portions, roster
from keepstep.orchestrator.state import NodeState, Settled
from keepstep.wire import SeatReport


def test_labels_decide_where_mirrors_are():
    def node(number: int, **labels: str) -> NodeState:
        state = NodeState(NodeId(f"n{number}"), "a", 1, 7, 8, "b", serial=number)
        state.shares = roster.shares(labels)
        return state

    listed = [node(i, rack=f"r{i}", switch=f"s{i // 2}") for i in range(4)]
    nodes = {state.node: state for state in listed}
    seats = [Seat(Rank(i), state.node, 0, 0) for i, state in enumerate(listed)]
    made = roster.build(JobId("j"), Generation(1), "x", listed[0].node, seats, nodes)
    assert made.mirror_stride == 2, "neighbours have racks of their own, and one switch"

    nodes[NodeId("n1")].shares = roster.shares({"rack": "r1"})
    made = roster.build(JobId("j"), Generation(1), "x", listed[0].node, seats, nodes)
    assert made.mirror_stride == 2, "one says nothing of its switch: the others still share theirs"


@st.composite
def quiesced(draw):
    """Reports of a quiesced job: ranks at S or S-1, torn ones, joiners, on a few nodes."""
    size = draw(st.integers(1, 12))
    seats = [Seat(Rank(r), NodeId(draw(st.sampled_from("abc"))), 0, 0) for r in range(size)]
    reports = {}
    for rank in range(size):
        kind = draw(st.sampled_from(["new", "new", "old", "torn", "joiner", "corrupt"]))
        boundary = {"new": 9, "corrupt": 9, "old": 8, "torn": 9, "joiner": -1}[kind]
        digests = {portions.of_all(size): "bad" if kind == "corrupt" else f"d{boundary}"}
        intact = kind in ("new", "old", "corrupt")
        reports[Rank(rank)] = SeatReport(Rank(rank), boundary, intact, digests)
    return seats, reports


@given(quiesced())
def test_only_intact_ranks_of_a_strict_majority_win(case):
    _, reports = case
    verdict = roster.judge(reports, len(reports))
    if verdict.problem:
        assert verdict.winners == {}
        return
    (winners,) = verdict.winners.values()
    holders = [r for r in reports.values() if r.intact and r.boundary == verdict.boundary]
    assert all(reports[rank].intact for rank in winners)
    assert 2 * len(winners) > len(holders)
    assert {*winners, *verdict.corrupt} == {r.rank for r in holders}


@given(quiesced())
def test_everybody_who_did_not_win_receives_from_winners_only(case):
    seats, reports = case
    verdict = roster.judge(reports, len(reports))
    if verdict.problem:
        return
    (winners,) = verdict.winners.values()
    moves = roster.moves(verdict, reports, seats, {})
    assert {move.target for move in moves} == set(reports) - set(winners)
    for move in moves:
        assert set(move.sources) <= set(winners)
        assert 1 <= len(move.sources) <= roster.SOURCES_PER_MOVE_MAX
        assert len(set(move.sources)) == len(move.sources)


@given(quiesced())
def test_the_last_home_of_a_boundary_is_never_received_into_in_place(case):
    """An older whole state is overwritten only when two nodes hold the newer one."""
    seats, reports = case
    verdict = roster.judge(reports, len(reports))
    if verdict.problem:
        return
    (winners,) = verdict.winners.values()
    homes = {seats[rank].node for rank in winners}
    moves = roster.moves(verdict, reports, seats, {})
    elsewhere = {seats[move.target].node for move in moves} - homes
    for wave in (0, 1):
        now = [move for move in moves if move.wave == wave]
        for move in now:
            whole = reports[move.target].intact and reports[move.target].boundary >= 0
            if whole and not move.staged:
                assert len(homes) > 1 or not elsewhere
        homes |= {seats[move.target].node for move in now}


@given(quiesced(), st.sets(st.integers(0, 11)))
def test_suspected_sources_are_used_only_when_no_other_is_left_and_then_alone(case, suspected):
    seats, reports = case
    verdict = roster.judge(reports, len(reports))
    if verdict.problem:
        return
    suspicion = {Rank(rank): 1 for rank in suspected}
    for move in roster.moves(verdict, reports, seats, suspicion):
        (winners,) = verdict.winners.values()
        if set(winners) - suspected:
            assert not set(move.sources) & suspected
        else:
            assert len(move.sources) == 1


def test_a_tie_has_no_winner():
    reports = {
        Rank(0): SeatReport(Rank(0), 9, True, {"0-1": "a"}),
        Rank(1): SeatReport(Rank(1), 9, True, {"0-1": "b"}),
    }
    assert roster.judge(reports, 2).problem


def test_a_single_holder_wins():
    reports = {
        Rank(0): SeatReport(Rank(0), 9, True, {"0-1": "a"}),
        Rank(1): SeatReport(Rank(1), 8, True, {"0-1": "b"}),
    }
    assert roster.judge(reports, 2).winners == {"0-1": (0,)}


def test_a_node_that_lost_its_memory_is_no_home():
    seats = tuple(Seat(Rank(r), NodeId(f"n{r}"), 0, 0) for r in range(3))
    old = Roster(JobId("j"), Generation(1), "s", NodeId("n0"), 1, seats)
    nodes = {
        NodeId(f"n{r}"): NodeState(NodeId(f"n{r}"), f"a{r}", 1, 7, 8, "b", serial=r)
        for r in range(3)
    }
    nodes[NodeId("n1")].serial = 50
    (home,) = roster.homes([Rank(0)], [Settled(old, 10)], nodes)
    assert [endpoint.host for endpoint in home.endpoints] == ["a0", "a2"]


def test_groups_are_alike_only_if_all_say_the_same() -> None:
    def said(*groups: str) -> bool:
        return roster.groups_alike(SeatReport(Rank(0), groups=text) for text in groups)

    assert said("a", "a", "a")
    assert not said("a", "b", "a")
    assert not said("a", "")
    assert not said("", "")
