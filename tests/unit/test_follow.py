"""One who does not lead: what it remembers, and what it offers to whoever leads."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from keepstep.model import Term
from keepstep.orchestrator import replica
from keepstep.orchestrator.access import Gate
from keepstep.orchestrator.follow import Follower
from keepstep.orchestrator.http import BadRequest, Request, Response
from keepstep.orchestrator.journal import Loaded, Look, SharedJournal, Standing
from keepstep.orchestrator.stepping_down import SENT_ON_SECONDS
from keepstep.orchestrator.tokens import Role, Tokens, new

OWN = "the-clusters-own-token"
GATE = Gate(Tokens(OWN))


class Shared:
    """A database that one follower looks at, and that says what the test wants."""

    def __init__(self) -> None:
        self.looks: list[Look] = []
        self.offers = False
        self.term = Term(4)

    def look(self, *, offers: bool) -> Look:
        self.offers = offers
        return self.looks.pop(0)

    def load(self) -> Loaded:
        return Loaded(None, 0, ())

    def begin_term(self, endpoint: str, above: Term) -> Standing:
        return Standing(Term(max(self.term, above) + 1), 0, "", {})

    def follower(self) -> Follower:
        return Follower(cast("SharedJournal", self), "http://o1:1", lambda *_, **__: None, GATE)


@pytest.fixture
def shared() -> Shared:
    return Shared()


def seen(term: int, lease_seconds_left: float = 0.0) -> Look:
    return Look(Term(term), 0, "o2", "http://o2:1", lease_seconds_left)


def led(follower: Follower, above: int = 0, wait_seconds: float = 0.0) -> replica.Begun:
    async def until() -> replica.Begun:
        async with asyncio.timeout(10):
            return await follower.until_leading(Term(above), wait_seconds)

    return asyncio.run(until())


def test_a_follower_begins_a_term_above_all_that_it_saw(shared: Shared):
    """The leader of term 5 wrote, agents obeyed, and a replica without that term was promoted."""
    shared.looks = [seen(5, 0.001), seen(4)]
    begun = led(shared.follower(), wait_seconds=0.001)
    assert begun.standing.term == 6


def test_what_a_process_led_before_is_not_begun_again(shared: Shared):
    shared.looks = [seen(4)]
    assert led(shared.follower(), above=5).standing.term == 6


def test_where_nothing_was_put_back_the_next_term_is_the_next_number(shared: Shared):
    shared.looks = [seen(4)]
    assert led(shared.follower(), above=4).standing.term == 5


def test_a_follower_that_agents_come_to_again_and_again_says_so_where_its_leader_looks(
    shared: Shared,
):
    async def follow() -> list[bool]:
        follower, said = shared.follower(), []
        asked = Request("POST", "/v1/agent", {}, {})
        for knocks, away in ((0, ""), (1, ""), (1, "it cannot be read"), (1, "")):
            shared.looks = [seen(4, 5.0)]
            if knocks:
                await follower.handle(asked)
                follower._knocks.first -= SENT_ON_SECONDS
            follower._away = away
            await follower._look()
            said.append(shared.offers)
        return said

    assert asyncio.run(follow()) == [False, True, False, True]


def test_whoever_else_asks_a_follower_is_no_agent(shared: Shared):
    async def asked() -> bool:
        follower = shared.follower()
        for path in ("/healthz", "/v1/jobs", "/"):
            await follower.handle(Request("GET", path, {}, {}))
        return follower._knocks.come(asyncio.get_running_loop().time())

    assert not asyncio.run(asked())


# --- what it tells Prometheus ---------------------------------------------------------------------


def scraped(follower: Follower, token: str, looks: int = 1) -> Response:
    async def ask() -> Response:
        for _ in range(looks):
            await follower._look()
        headers = {"authorization": f"Bearer {token}"} if token else {}
        reply = await follower.handle(Request("GET", "/metrics", {}, headers))
        assert isinstance(reply, Response)
        return reply

    return asyncio.run(ask())


def test_a_scrape_of_a_follower_is_answered_by_itself_and_not_by_its_leader(shared: Shared):
    shared.looks = [Look(Term(4), 7, "o2", "http://o2:1", 5.0)]
    reply = scraped(shared.follower(), OWN)
    assert (reply.status, reply.headers) == (200, {}), "a scrape would follow a redirect"
    told = {line.split(" ")[0]: line.split(" ")[-1] for line in reply.body.decode().splitlines()}
    assert told["keepstep_leading"] == "0"
    assert told["keepstep_follower_entries_behind"] == "7"
    assert told["keepstep_follower_readable"] == "1"
    assert float(told["process_resident_memory_bytes"]) > 0
    others = ("keepstep_nodes", "keepstep_jobs", "keepstep_slots", "keepstep_incidents", "_term")
    assert not [name for name in told if any(other in name for other in others)]


def test_a_follower_that_has_not_seen_its_journal_says_so(shared: Shared):
    reply = scraped(shared.follower(), OWN, looks=0)
    assert reply.status == 200
    assert b"keepstep_follower_readable 0" in reply.body


def test_a_followers_numbers_need_the_token_that_a_leaders_need(shared: Shared, tmp_path: Path):
    assert scraped(shared.follower(), "", looks=0).status == 401
    assert scraped(shared.follower(), "another-token", looks=0).status == 401
    follower = shared.follower()
    text, _ = new(tmp_path / "tokens.json", "ours", Role.VIEWER, project="a")
    follower._gate = Gate(Tokens(OWN, tmp_path / "tokens.json"))
    with pytest.raises(BadRequest, match="what all share"):
        scraped(follower, text, looks=0)
