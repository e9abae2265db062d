"""How long ago something was seen, for orchestrators that could not be told at once.

Only this process's own clock counts, so an agent that restarts begins to count anew. Without I/O.
"""

from __future__ import annotations

from dataclasses import replace

from keepstep.model import JobId, Sign
from keepstep.wire import Observed

SEEN_MAX = 4096
JUST_NOW_SECONDS = 0.1

_Key = tuple[JobId, Sign, int, int, int]


class Ages:
    """When each observation was first heard of here."""

    def __init__(self) -> None:
        self._at: dict[_Key, float] = {}

    def aged(self, observed: Observed, now: float) -> Observed:
        """The observation with its age; a new one has none."""
        key = (
            observed.job,
            observed.sign,
            int(observed.rank),
            observed.incarnation,
            int(observed.generation),
        )
        age = now - self._at.setdefault(key, now)
        while len(self._at) > SEEN_MAX:
            del self._at[next(iter(self._at))]
        return replace(observed, age_seconds=age) if age > JUST_NOW_SECONDS else observed
