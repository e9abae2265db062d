"""When a leader lets others lead."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep import wire
from keepstep.errors import Alone, Behind
from keepstep.model import Generation, JobId, JobSpec, NodeId, Term
from keepstep.orchestrator import __main__ as process
from keepstep.orchestrator import brain, events, state
from keepstep.orchestrator.stepping_down import (
    ALONE_SECONDS,
    HEED_SECONDS,
    KNOCK_SECONDS_MAX,
    OTHERS_SECONDS,
    SENT_ON_SECONDS,
    TERMS_AHEAD_MAX,
    UNHEARD_SECONDS,
    UNHEARD_SECONDS_MAX,
    Knocks,
    Leaving,
    Past,
    hears_nobody,
    heeds,
    of_another,
    why_not_term,
)

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def test_a_leader_that_hears_nobody_lets_others_lead():
    why = hears_nobody({A: 0.0, B: 1.0}, (A, B), 1.1 + ALONE_SECONDS)
    assert str(why) == "none of 2 nodes was heard for 2.6 s"


def test_one_voice_is_enough_to_go_on():
    assert hears_nobody({A: 0.0, B: 100.0}, (A, B), 100.0) is None


def test_who_has_left_or_has_yet_to_come_says_nothing_about_our_network():
    assert hears_nobody({A: 0.0, B: 0.0, C: 0.0}, (A,), 100.0) is None
    assert hears_nobody({A: 0.0, B: 0.0}, (), 100.0) is None


def let_go(leaving: Leaving, start: float, seconds: float, connected: tuple[NodeId, ...] = ()):
    """When a leader with these streams lets go, looked at every half second; -1: it does not."""
    for halves in range(round(2 * seconds)):
        now = start + halves / 2
        leaving.listen(dict.fromkeys(connected, now), connected, now, excused=False)
        if leaving.why is not None:
            return now
    return -1.0


def leader(begins: float, past: Past | None = None, *, offered: bool = True) -> Leaving:
    made = Leaving(begins)
    made.past, made.offered = past or Past(), lambda: offered
    return made


def test_a_leader_without_a_stream_lets_one_lead_that_agents_come_to():
    """It took over while its network was cut, or all its streams were reset."""
    unheard = leader(100.0)
    assert let_go(unheard, 100.0, 60.0) == 100.0 + UNHEARD_SECONDS
    assert isinstance(unheard.why, Alone)
    assert str(unheard.why).startswith("no agent came for 10.0 s, and they come to another")


def test_a_leader_without_a_stream_leads_on_where_nobody_else_is_or_could_do_better():
    assert let_go(leader(0.0, offered=False), 0.0, 3600.0) == -1.0
    assert let_go(Leaving(0.0), 0.0, 3600.0) == -1.0, "and where it cannot ask"


def test_a_leader_that_one_agent_reaches_leads_on_and_counts_from_the_end_of_that_stream():
    heard = leader(0.0)
    assert let_go(heard, 0.0, 60.0, (A,)) == -1.0
    assert let_go(heard, 60.0, 60.0) == 59.5 + UNHEARD_SECONDS


def test_time_in_which_the_journal_or_our_own_loop_was_away_is_not_held_against_our_network():
    excused = leader(0.0)
    for now in range(100):
        excused.listen({}, (), float(now), excused=True)
    assert excused.why is None
    assert let_go(excused, 100.0, 60.0) == 99.0 + UNHEARD_SECONDS


def test_two_leaders_that_agents_come_to_and_never_stay_with_take_longer_and_longer_turns():
    pasts, now, turns = (Past(), Past()), 0.0, []
    for number in range(16):
        left = let_go(leader(now, pasts[number % 2]), now, 1000.0)
        turns.append(left - now)
        now = left + 0.5
    assert turns[:2] == [UNHEARD_SECONDS] * 2
    # Each process lets go five minutes after its last time: the two of them in turn.
    assert sum(turns[-2:]) == pytest.approx(UNHEARD_SECONDS_MAX, abs=5.0)
    assert max(turns) <= UNHEARD_SECONDS_MAX
    later = now + 5 * UNHEARD_SECONDS_MAX
    let_go(leader(later, pasts[0]), later, 1000.0)
    assert pasts[0].wait_seconds == UNHEARD_SECONDS, "after a long time it is a new story"


def test_a_follower_offers_to_lead_while_agents_come_that_were_sent_on_before():
    knocks = Knocks()
    assert not knocks.stay(0.0)
    knocks.hear(100.0)
    assert not knocks.stay(100.0), "it has only been sent on"
    assert knocks.stay(100.0 + SENT_ON_SECONDS)
    knocks.hear(106.0)
    assert knocks.stay(106.0)
    assert not knocks.stay(106.1 + KNOCK_SECONDS_MAX), "they are where they were sent"
    knocks.hear(300.0)
    assert not knocks.stay(300.5)
    assert KNOCK_SECONDS_MAX < UNHEARD_SECONDS, "who was sent on, and stayed, is no reason"


def test_a_term_that_nobody_can_have_begun_is_refused_and_a_forgotten_one_is_not():
    assert why_not_term(seen(2**62), Term(5))
    assert why_not_term(seen(6 + TERMS_AHEAD_MAX), Term(5))
    assert why_not_term(seen(5 + TERMS_AHEAD_MAX), Term(5)) == ""
    assert why_not_term(seen(900), Term(5)) == ""
    assert why_not_term(seen(1), Term(5)) == ""


def seen(term: int, node: NodeId = A, boot: str = "boot", seq: int = 0) -> wire.Hello:
    return wire.Hello(node, "a", 1, 1, 2, boot, term_seen=Term(term), seq_seen=seq)


def test_a_term_that_was_seen_before_its_leader_greeted_anybody_was_begun_twice():
    assert of_another(seen(5), Term(5), {})
    assert of_another(seen(5), Term(5), {B: "another boot"})
    assert of_another(seen(6), Term(5), {A: "boot"}), "a later one was, whoever says so"


def test_who_was_greeted_in_this_term_may_know_it_and_who_knows_an_earlier_one_is_no_wonder():
    assert not of_another(seen(5), Term(5), {A: "boot"}), "its stream broke"
    assert not of_another(seen(5, boot="new"), Term(5), {A: "boot"})
    assert not of_another(seen(5, node=B), Term(5), {A: "boot"}), "renamed, with its room"
    assert not of_another(seen(4), Term(5), {})
    assert not of_another(seen(0), Term(5), {})


def test_before_it_leaves_a_leader_writes_down_what_the_first_one_of_its_term_had_ordered():
    """Entries 101 to 103 of the first term 5 are gone, and others have their numbers by now."""
    leaving = Leaving(0.0)
    word = leaving.heed(seen(5, seq=103), of_term(5), 100, 0.0)
    assert isinstance(word, events.JournalBehind)
    assert (word.node, word.term_seen, word.first, word.seq_seen) == (A, 5, 101, 103)
    assert isinstance(leaving.why, Behind)
    assert leaving.why.term == 5


def test_what_is_in_the_journal_of_a_term_begun_twice_is_no_gap():
    for told in (seen(5, seq=100), seen(6, seq=103)):  # The next leader tells of the second.
        assert Leaving(0.0).heed(told, of_term(5), 100, 0.0) == events.Tick()


def test_and_nothing_of_jobs_that_are_none_of_that_nodes_business():
    cluster = of_term(5)
    brain.step(cluster, wire.Hello(B, "b", 1, 1, 2, "boot"), 0.0)
    brain.step(cluster, events.Submitted(JobSpec(JobId("j"), "t.py")), 0.0)
    told = replace(seen(5, seq=103), obeyed={"j": Generation(9), "unknown": Generation(1)})
    word = Leaving(0.0).heed(told, cluster, 100, 0.0)
    assert isinstance(word, events.JournalBehind)
    assert word.obeyed == {"unknown": Generation(1)}


def of_term(term: int) -> state.Cluster:
    cluster = state.new_cluster("test")
    brain.step(cluster, events.TermBegan(Term(term), seq=100), 0.0)
    return cluster


def test_who_steps_down_for_a_forgotten_term_begins_the_next_one_itself(
    monkeypatch: pytest.MonkeyPatch,
):
    """In its own lease: another would not know above which term, nor whom it has heeded."""
    happened: list[object] = []

    class Journal:
        offered = None

        def begin_again(self) -> None:
            happened.append("begins again")

        def let_go(self) -> None:
            happened.append("lets go")

    class Follower:
        handle = None

        def __init__(self, *_: object) -> None:
            pass

        async def until_leading(self, above: Term, wait_seconds: float) -> object:
            happened.append((above, wait_seconds))
            return SimpleNamespace(standing=SimpleNamespace(term=Term(above + 1)))

    reasons = [Behind(9, "n3"), Alone("none of 2 nodes was heard"), asyncio.CancelledError()]

    class Leader:
        term, keeping = Term(1), None
        leaving = SimpleNamespace(offered=None)

        async def run(self) -> None:
            raise reasons.pop(0)

    async def cut() -> None:
        pass

    place: Any = SimpleNamespace(lead=lambda *_: Leader(), gate=None)
    door: Any = SimpleNamespace(handle_by=lambda _: None)
    server: Any = SimpleNamespace(cut=cut)
    logged: dict[str, Any] = {}
    monkeypatch.setattr(process, "Follower", Follower)
    monkeypatch.setattr(process.lease, "kept", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(process, "log", lambda event, **facts: logged.update({event: facts}))
    journal: Any = Journal()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(process._follow_and_lead(place, journal, door, server, "http://a:1"))
    assert happened == [(0, 0.0), "begins again", (9, 0.0), "lets go", (10, OTHERS_SECONDS)]
    assert "n3 has seen term 9" in logged["journal.behind"]["why"]


def test_one_node_deposes_one_leader_a_minute():
    heeded: dict[NodeId, float] = {}
    assert heeds(heeded, A, 100.0)
    assert not heeds(heeded, A, 101.0)
    assert heeds(heeded, B, 101.0)
    assert heeds(heeded, A, 100.0 + HEED_SECONDS)
    assert len(heeded) == 2
