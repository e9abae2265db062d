"""An orchestrator that does not lead: it listens, reads along, and leads when nobody else does.

    look at the lease --> read what is new --> the lease is over? --> begin a term, and lead
           ^                                        | no
           '----------------------------------------'

It says who leads to everybody who asks, and sends agents and operators there. Its state is the
leader's of a moment ago, so that a takeover has only the last entries to read. It takes over only
what it can read: a journal of a newer Keepstep is left to one who understands it. Agents that keep
coming do not reach the leader: it offers to lead, and one that has no agent lets go of its lease
(stepping_down.py).

Calls to the journal wait in a thread: who is asked for its health answers, database or not.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import quote, urlencode

from keepstep import exposition, logs
from keepstep.errors import KeepstepError, Transient
from keepstep.model import Term
from keepstep.orchestrator import metrics, replica, watching
from keepstep.orchestrator.access import UNKNOWN, Gate
from keepstep.orchestrator.http import Reply, Request, Response, error_response, json_response
from keepstep.orchestrator.journal import Look, SharedJournal
from keepstep.orchestrator.run import Log
from keepstep.orchestrator.stepping_down import Knocks

LOOK_SECONDS_MAX = 0.5
"""Between two looks: what a takeover has left to read, and how soon a lease that was let go of is
seen. The end of a lease is known, and looked at when it comes."""
LEASE_OVER_SECONDS = 0.02
"""After the end of a lease, by our own clock: the database's decides."""

METRICS = next(route for route in watching.ROUTES if route.path == "/metrics")
AGENTS = "/v1/agent"
"""Where an agent asks for its stream."""

T = TypeVar("T")


class Follower:
    """Reads along until it may lead."""

    def __init__(self, journal: SharedJournal, endpoint: str, log: Log, gate: Gate) -> None:
        self._journal = journal
        self._endpoint = endpoint
        self._log, self._gate = log, gate
        self._replica: replica.Replica | None = None
        self._seen: Look | None = None
        self._read_seq, self._looked_at = 0, time.monotonic()
        self._told = ""
        self._away = ""
        """Why the journal cannot be read; empty: it can."""
        self._knocks = Knocks()

    # ---------------------------------------------------------------- reading along

    async def until_leading(
        self, above: Term = Term(0), wait_seconds: float = 0.0
    ) -> replica.Begun:
        """Wait for the lease, and take it; not before others had so much time to do so. The term is
        above all that were seen here: a database that was put back must not begin one twice."""
        clock = asyncio.get_running_loop().time
        first, not_before = wait_seconds <= 0, clock() + wait_seconds
        while True:
            try:
                pause = await self._look()
                assert self._seen is not None
                above = max(above, self._seen.term)
                # The first time in any case: the lease may be our own, of before a restart.
                if (pause <= 0 or first) and clock() >= not_before:
                    first = False
                    return await self._take_over(above)
                self._away, pause = "", pause or LOOK_SECONDS_MAX
            except Transient as error:
                # The database is away, or somebody else was quicker.
                # Whoever asks is told no more: the driver's words name hosts and users.
                self._away = "the journal does not answer, or somebody else was quicker"
                self._say("waiting", str(error))
                pause = error.retry_after_seconds
            await asyncio.sleep(pause)

    async def _look(self) -> float:
        """Read what is new; seconds until the next look, 0: take over."""
        # Who cannot read the journal could not lead.
        offers = not self._away and self._knocks.stay(asyncio.get_running_loop().time())
        seen = await _in_thread(lambda: self._journal.look(offers=offers))
        self._seen, self._looked_at = seen, time.monotonic()
        if seen.lease_seconds_left > 0:
            self._say("following", f"{seen.holder} leads term {seen.term}", leader=seen.endpoint)
        try:
            await self._read_along()
        except Transient:
            raise
        except (KeepstepError, AssertionError, KeyError, TypeError, ValueError) as error:
            # Never lead what we cannot read. Somebody else may.
            self._replica = None
            raise Transient(f"this journal cannot be read here: {error!r}", 5.0) from error
        left = seen.lease_seconds_left
        return min(left + LEASE_OVER_SECONDS, LOOK_SECONDS_MAX) if left > 0 else 0.0

    async def _read_along(self) -> None:
        known, self._replica = self._replica, None
        if known is None:
            self._replica = await _in_thread(lambda: replica.read(self._journal))
        else:
            self._replica = await _in_thread(lambda: replica.follow(known, self._journal))
        self._read_seq = self._replica.seq if self._replica is not None else 0

    async def _take_over(self, above: Term) -> replica.Begun:
        standing = await _in_thread(lambda: self._journal.begin_term(self._endpoint, above))
        # From here on nobody else writes: this is the end of the journal.
        await self._read_along()
        seq = self._replica.seq if self._replica is not None else 0
        if seq != standing.seq:
            self._replica = None
            await self._read_along()
        return replica.Begun(standing, self._replica, self._endpoint)

    def _say(self, event: str, why: str, **facts: object) -> None:
        if why != self._told:
            self._told = why
            self._log(event, why=why, **facts)

    # ---------------------------------------------------------------- answering

    async def handle(self, request: Request) -> Reply:
        """Who leads, and how it fares itself: no more than that."""
        seen = self._seen
        known = seen is not None and seen.lease_seconds_left > 0
        leader = seen.endpoint if seen is not None and known else ""
        # Our own lease, of before: we are about to lead, or somebody else is.
        leader = leader if leader != self._endpoint else ""
        if request.path == "/healthz" and request.method == "GET":
            term = seen.term if seen is not None else 0
            return json_response({"status": "following", "term": term, "leader": leader or None})
        if request.path == "/readyz" and request.method == "GET":
            # No redirect: a probe would follow it, and find us ready.
            fix = f"ask {leader}" if leader else "wait for a takeover"
            return error_response(503, "this orchestrator follows", fix)
        if request.path == METRICS.path and request.method == "GET":
            # No redirect either: a scrape would follow it, and count the leader's numbers twice.
            return self._metrics(request)
        if request.path in watching.PARTS and request.method == "GET":
            # A page that was opened here asks for the rest of itself, and may ask nobody else.
            return watching.file(request.path)
        if request.path == AGENTS:
            self._knocks.hear(asyncio.get_running_loop().time())
        return elsewhere(leader, self._away, request)

    def _metrics(self, request: Request) -> Reply:
        caller = self._gate.caller(request)
        if caller is None:
            return UNKNOWN
        self._gate.check(METRICS, caller)
        facts = metrics.Following(
            behind=max(0, self._seen.seq - self._read_seq) if self._seen is not None else 0,
            look_age_seconds=time.monotonic() - self._looked_at,
            readable=self._seen is not None and not self._away,
            lines_told=logs.lines_told,
            events_told=logs.events_told,
        )
        told = [*metrics.of_follower(facts), *exposition.of_process()]
        return Response(200, exposition.text(told).encode(), exposition.CONTENT_TYPE)


def elsewhere(leader: str, why: str, request: Request | None = None) -> Response:
    """The answer of one who does not lead to all who want something."""
    if leader:
        plain = {"error": "this orchestrator follows", "fix": f"ask {leader}", "leader": leader}
        path = quote(request.path) if request is not None else "/"
        query = f"?{urlencode(request.query)}" if request is not None and request.query else ""
        return _with(json_response(plain, 307), {"Location": f"{leader}{path}{query}"})
    error = f"this orchestrator follows, and nobody leads: {why or 'a takeover is under way'}"
    plain = {"error": error, "fix": "try again in a second, here or at another one"}
    return _with(json_response(plain, 503), {"Retry-After": "1"})


def _with(response: Response, headers: dict[str, str]) -> Response:
    return Response(response.status, response.body, response.content_type, headers)


def reached_at(advertise: str, host: str, port: int, *, secure: bool = False) -> str:
    """The URL under which others reach who listens there."""
    if advertise:
        return advertise.rstrip("/")
    if host in ("", "0.0.0.0", "::"):
        host = socket.gethostname()
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"https://{place}" if secure else f"http://{place}"


async def _in_thread(call: Callable[[], T]) -> T:
    return await asyncio.to_thread(call)
