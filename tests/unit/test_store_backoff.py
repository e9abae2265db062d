"""How long an agent waits before it starts another store."""

from __future__ import annotations

from keepstep.agent.store import BACKOFF_SECONDS_MAX, backoff_seconds


def test_one_death_is_mended_at_once_and_many_ever_later():
    waits = [backoff_seconds(count) for count in range(12)]
    assert waits[:5] == [0.0, 0.0, 1.0, 2.0, 4.0]
    assert waits == sorted(waits)
    assert waits[-1] == BACKOFF_SECONDS_MAX
