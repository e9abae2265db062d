"""What people and Prometheus look at: the live page, its board, and the metrics.

Reading only. Whoever watches must not slow down whoever is watched: a board is made at most a few
times a second however many pages are open, and it holds the fleet only for those who lack it. The
page's files are read once; they hold no data, so they need no token, and the browser is told to
load nothing from anywhere else.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from keepstep import codec, exposition, logs
from keepstep.orchestrator import metrics
from keepstep.orchestrator.accounts import Accounts
from keepstep.orchestrator.board import Around, Fleet, board, fleet
from keepstep.orchestrator.http import Reply, Response
from keepstep.orchestrator.routes import Call, Route
from keepstep.orchestrator.run import Orchestrator
from keepstep.orchestrator.tokens import Role

BOARD_SECONDS_MIN = 0.2
"""How old an answer may be: faster than anybody reads, and a phase takes longer."""
BOARD_SHARE_MAX = 0.1
"""Of the loop's time, what boards may take. In the largest clusters they are older for it."""
DIRECTORY = Path(__file__).parent / "page"
FILES = {
    "/": ("index.html", "text/html"),
    "/page/page.css": ("page.css", "text/css"),
    "/page/page.js": ("page.js", "text/javascript"),
    "/page/map.js": ("map.js", "text/javascript"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
PARTS = frozenset(FILES) - {"/"}
"""What an open page loads."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""No script, style or request but our own, in no frame, and no address of ours to anybody."""


@functools.cache
def file(path: str) -> Response:
    """One of the page's own files."""
    name, kind = FILES[path]
    return Response(200, (DIRECTORY / name).read_bytes(), f"{kind}; charset=utf-8", HEADERS)


class Watching:
    """What is kept between two looks."""

    def __init__(self, orchestrator: Orchestrator, accounts: Accounts) -> None:
        self._orchestrator = orchestrator
        self._accounts = accounts
        self._tally = metrics.Tally.after(orchestrator.cluster.closed)
        self._next_at = float("-inf")
        self._version = ""
        self._whole = self._rest = b""
        self._fleet: Fleet | None = None
        self._fleet_of: tuple[int, int] = (-1, 0)
        self._fleet_bytes = b""

    async def board(self, call: Call) -> Reply:
        """The newest board; without the fleet for those who have this one."""
        now = self._orchestrator.now()
        if now >= self._next_at:
            self._make(now)
            cost = self._orchestrator.now() - now
            self._next_at = now + max(BOARD_SECONDS_MIN, cost / BOARD_SHARE_MAX)
        known = call.request.query.get("fleet", "") == self._version
        body = self._rest if known else self._whole
        return Response(200, body, headers={"Cache-Control": "no-store"})

    def _make(self, now: float) -> None:
        here = self._orchestrator
        self._read_on()
        around = Around(
            now=now,
            seq=here.history[-1]["seq"] if here.history else 0,
            trouble=here.cut_off,
            heartbeats=here.heartbeats,
            account=lambda job: self._accounts.of(job, now),
            account_of_all=self._accounts.of_all(now),
        )
        made = board(here.cluster, around, self._current_fleet(around.seq), self._version)
        made = dataclasses.replace(made, term=here.term)
        self._rest = codec.dumps(codec.to_plain(made))
        # The fleet is most of it, and was written already.
        assert self._rest.count(b'"fleet":null,') == 1
        told = b'"fleet":' + self._fleet_bytes + b","
        self._whole = self._rest.replace(b'"fleet":null,', told)

    def _read_on(self) -> None:
        """Not while the journal is away: asking it again and again would hold up the loop."""
        here = self._orchestrator
        if not (here.cut_off or here.keeping()["away"]):
            self._accounts.look(here.cluster.jobs)

    def _current_fleet(self, seq: int) -> Fleet:
        """It changes with a decision, or with who is connected, and not otherwise."""
        here = self._orchestrator
        connected = frozenset(here.connected)
        if self._fleet is None or self._fleet_of != (seq, hash(connected)):
            self._fleet = fleet(here.cluster, connected)
            self._fleet_of = (seq, hash(connected))
            self._fleet_bytes = codec.dumps(codec.to_plain(self._fleet))
            self._version = f"{zlib.crc32(self._fleet_bytes):08x}"
        return self._fleet

    async def metrics(self, _: Call) -> Reply:
        """Everything in numbers, for Prometheus."""
        here = self._orchestrator
        now = here.now()
        self._tally.hear(here.cluster.closed)
        self._read_on()
        jobs = [job.spec.job for job in metrics.named_jobs(here.cluster)]
        known = {job: self._accounts.of(job, now) for job in jobs}
        facts = metrics.Facts(
            now=now,
            leading=not here.cut_off,
            connected=len(here.connected),
            heartbeats=here.heartbeats,
            decisions=here.history[-1]["seq"] if here.history else 0,
            lines_told=logs.lines_told,
            events_told=logs.events_told,
            accounts={job: account for job, account in known.items() if account is not None},
        )
        told = [*metrics.families(here.cluster, self._tally, facts), *exposition.of_process()]
        return Response(200, exposition.text(told).encode(), exposition.CONTENT_TYPE)


def _file(path: str) -> Callable[[Any, Call], Awaitable[Reply]]:
    """By the route's own path: a request may spell it with more slashes."""

    async def answer(api: Any, call: Call) -> Reply:
        return file(path)

    return answer


ROUTES: tuple[Route, ...] = (
    *(
        Route(
            "GET",
            path,
            _file(path),
            "The live page" if path == "/" else f"The live page: its {name}",
            kind,
            open=True,
        )
        for path, (name, kind) in FILES.items()
    ),
    Route(
        "GET",
        "/v1/board",
        lambda api, call: api.watching.board(call),
        "What the live page shows",
        "Board",
        query={"fleet": "The fleet_version that you have: the same fleet is not sent again"},
        role=Role.VIEWER,
        shared=True,
    ),
    Route(
        "GET",
        "/metrics",
        lambda api, call: api.watching.metrics(call),
        "Everything in numbers, in Prometheus' text format",
        "text/plain",
        role=Role.VIEWER,
        shared=True,
    ),
)
