"""Which orchestrator an agent tries next, and when."""

from __future__ import annotations

import pytest

from keepstep.agent.endpoints import (
    FAILED_SECONDS,
    ROUND_SECONDS_MAX,
    Endpoints,
    leader_of,
)
from keepstep.model import Endpoint

A, B, C = (Endpoint("host", port) for port in (1, 2, 3))


def test_who_is_lost_is_tried_last():
    known = Endpoints((A, B, C))
    assert known.next() == A
    known.failed(B, 0.0, held=True)
    assert known.next() == C
    known.failed(C, 0.0, held=False)
    assert known.next() == A


def test_a_leader_that_a_follower_names_is_tried_at_once_even_if_nobody_listed_it():
    known = Endpoints((A, B))
    assert known.named(C, 0.0)
    assert known.next() == C
    known.failed(C, 0.0, held=False)
    assert known.next() == B


def test_a_leader_that_has_just_failed_us_is_not_believed_in():
    known = Endpoints((A, B))
    known.failed(A, 10.0, held=True)
    assert known.next() == B
    assert not known.named(A, 11.0)
    assert known.named(A, 10.0 + FAILED_SECONDS), "it may be back"


def test_followers_that_name_each_other_do_not_keep_us_busy():
    known = Endpoints((A, B))
    believed = [known.named(leader, 0.0) for leader in (B, A, B, A)]
    assert believed == [True, True, False, True]


def test_pauses_double_up_to_a_bound_and_who_has_news_waits_a_tenth():
    known = Endpoints((A, B))
    rounds = []
    for number in range(40):
        known.failed((A, B)[number % 2], 0.0, held=False)
        rounds.append(2 * known.pause(1.0, urgent=False))
        assert known.pause(1.0, urgent=True) == pytest.approx(rounds[-1] / 20)
    assert rounds == sorted(rounds)
    assert rounds[-1] == ROUND_SECONDS_MAX
    known.failed(A, 0.0, held=True)
    assert 2 * known.pause(1.0, urgent=False) == rounds[0], "a good stream ends the count"
    assert known.pause(0.0, urgent=False) == 0.0, "spread from the first moment on"


@pytest.mark.parametrize(
    ("location", "leader"),
    [
        (" http://host:1/v1/agent", A),
        ("http://host/", None),
        ("http://host:x/", None),
        ("", None),
    ],
)
def test_a_location_names_a_leader_or_nobody(location: str, leader: Endpoint | None):
    assert leader_of(location) == leader
