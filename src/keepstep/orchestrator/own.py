"""What an orchestrator says of itself: whether it leads, its release, its files, its journal.

For probes, and for `keepstep admin doctor`, which judges it (cli/findings.py). Nothing here judges,
and nothing is secret; the clock is told to be compared by people, and is used by nobody.
"""

from __future__ import annotations

import math
import os
import platform
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keepstep import __version__, wire
from keepstep.orchestrator import events
from keepstep.orchestrator.http import Reply, error_response, json_response
from keepstep.orchestrator.journal import Journal
from keepstep.orchestrator.journals import measured
from keepstep.orchestrator.routes import Call, Route
from keepstep.orchestrator.run import Orchestrator
from keepstep.orchestrator.tokens import Role

MEASURED_SECONDS = 10.0
"""How old the size of a journal may be. A database that does not answer holds up the loop for as
long as it is waited for: not for each who asks."""


class Own:
    """The answers about itself of one that leads; follow.py has those of one that does not."""

    def __init__(self, orchestrator: Orchestrator, journal: Journal) -> None:
        self._orchestrator = orchestrator
        self._journal = journal
        self._measured, self._measured_at = dict[str, Any](), -math.inf

    async def health(self, _: Call) -> Reply:
        here = self._orchestrator
        status = "cut off" if here.cut_off else "leading"
        return json_response({"status": status, "term": here.term, "leader": here.endpoint or None})

    async def ready(self, _: Call) -> Reply:
        # Nobody in particular asks: neither the journal's place nor its error is theirs to know.
        if self._orchestrator.cut_off or self._orchestrator.keeping()["away"]:
            fix = "see the orchestrator's log, and `keepstep admin doctor`"
            return error_response(503, "its journal is away", fix)
        return json_response({"ready": True, "term": self._orchestrator.term})

    async def facts(self, _: Call) -> Reply:
        kept = self._orchestrator.keeping()
        if time.monotonic() - self._measured_at > MEASURED_SECONDS or kept["away"]:
            self._measured = measured(self._journal, away=kept["away"])
            # From its end: what took long is not asked for again at once.
            self._measured_at = time.monotonic()
        return json_response(facts(self._measured, kept))


ROUTES: tuple[Route, ...] = (
    Route(
        "GET",
        "/healthz",
        lambda api, call: api.own.health(call),
        "Whether this orchestrator leads",
        "Health",
        open=True,
    ),
    Route(
        "GET",
        "/readyz",
        lambda api, call: api.own.ready(call),
        "Whether its journal is there too",
        "Ready",
        open=True,
    ),
    Route(
        "GET",
        "/v1/orchestrator",
        lambda api, call: api.own.facts(call),
        "What it says of itself",
        "Own",
        role=Role.VIEWER,
        shared=True,
    ),
)


def facts(size: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """All of it. `kept` is how the journal fares, as its writer sees it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "release": __version__,
        "python": platform.python_version(),
        "wire": [wire.OLDEST, wire.VERSION],
        "journal_version": events.VERSION,
        "clock": time.time(),
        "files": {"limit": limit, "open": len(os.listdir(Path("/proc/self/fd")))},
        "journal": {**kept, **size},
    }
