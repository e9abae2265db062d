"""Decisions as server-sent events, for whoever listens: as much of each as they may see."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from typing import Any

from keepstep import codec
from keepstep.orchestrator.run import Orchestrator

Seen = Callable[[dict[str, Any]], dict[str, Any] | None]
"""What a listener may see of a decision; None: nothing."""


async def events(orchestrator: Orchestrator, last: str, seen: Seen) -> AsyncIterator[bytes]:
    """From the decision after `last` on. Without a place to go on from, what comes from now on."""
    newest = orchestrator.history[-1]["seq"] if orchestrator.history else 0
    # Not isdigit(): that takes a superscript two, which int() does not.
    after = int(last) if re.fullmatch("[0-9]{1,18}", last) else newest
    yield b": connected\n\n"
    async for record in orchestrator.told(after):
        if record is None:
            yield b": alive\n\n"
        elif shown := seen(record):
            yield b"id: %d\ndata: %s\n\n" % (shown["seq"], codec.dumps(shown))
