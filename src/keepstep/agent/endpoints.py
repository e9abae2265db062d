"""Which orchestrator to try next, and how long to wait before. No I/O: chance and `now` come in.

    lost n2 --> n3 --> n1 --> n2 --> …      round the list, from the one after the lost one
           '--> whom a follower names       at once, unless that one has just failed us

A round over all endpoints takes at most a back-off that doubles, from 0.1 s to 2 s. A node that has
something to tell that others wait for (a death, a broken collective, a phase) comes first: its
rounds take a tenth of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from keepstep.model import Endpoint

ROUND_SECONDS_MIN = 0.1
ROUND_SECONDS_MAX = 2.0
URGENT_SHARE = 0.1
FAILED_SECONDS = 5.0
"""For so long an endpoint that failed us is not believed to lead, whoever says so: a follower may
not know yet that its leader is dead."""
SENT_ON_MAX = 2
"""Two followers may name each other for a moment: then we wait like everybody else."""


class Endpoints:
    """The list, where we are in it, and what is known of each."""

    def __init__(self, known: Sequence[Endpoint]) -> None:
        assert known, "an agent needs at least one endpoint"
        self._known = tuple(known)
        self._at = 0
        self._failures = 0
        self._failed_at: dict[Endpoint, float] = {}
        self._named: Endpoint | None = None
        self._sent_on = 0

    def next(self) -> Endpoint:
        """Whom to try now."""
        if self._named is not None:
            return self._named
        return self._known[self._at % len(self._known)]

    def named(self, leader: Endpoint | None, now: float) -> bool:
        """A follower says who leads; True: go there at once."""
        self._at += 1
        self._named = None
        self._sent_on += 1
        failed_at = self._failed_at.get(leader) if leader is not None else None
        lately = failed_at is not None and now < failed_at + FAILED_SECONDS
        if leader is None or lately or self._sent_on > SENT_ON_MAX:
            self._sent_on = 0
            self._failures += 1
            return False
        self._named = leader
        return True

    def failed(self, endpoint: Endpoint, now: float, *, held: bool) -> None:
        """It did not answer, or left us. `held`: it had served us well until then."""
        self._failed_at = {e: at for e, at in self._failed_at.items() if now < at + FAILED_SECONDS}
        self._failed_at[endpoint] = now
        self._named, self._sent_on = None, 0
        if endpoint in self._known:
            self._at = self._known.index(endpoint) + 1
        self._failures = 1 if held else self._failures + 1

    def pause(self, chance: float, *, urgent: bool) -> float:
        """Seconds to wait before the next try. Jitter: thousands of agents must not come back in
        the same millisecond."""
        size = len(self._known)
        rounds = max(0, self._failures - 1) // size
        longest = min(ROUND_SECONDS_MAX, ROUND_SECONDS_MIN * 2.0 ** min(rounds, 16))
        share = URGENT_SHARE if urgent else 1.0
        # The very first time nobody knows yet whether all were left at once.
        least = 0.5 if self._failures > 1 else 0.0
        return float(longest * share * (least + (1.0 - least) * chance) / size)


def leader_of(location: str) -> Endpoint | None:
    """Whom an answer's Location names."""
    try:
        url = urlsplit(location.strip())
        return Endpoint(url.hostname, url.port) if url.hostname and url.port else None
    except ValueError:
        return None
