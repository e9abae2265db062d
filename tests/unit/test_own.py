"""What an orchestrator says of itself costs those who ask next nothing."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.orchestrator import own
from keepstep.orchestrator.journal_postgres import PostgresJournal
from keepstep.orchestrator.own import MEASURED_SECONDS, Own


class Database(PostgresJournal):
    """Counts who wants to know its size."""

    asked = 0

    def size(self) -> tuple[int | None, None]:
        self.asked += 1
        return 7, None


@pytest.fixture
def journal() -> Database:
    return Database("postgresql://nowhere.invalid/none", holder="a", lease_seconds=2.0)


def journal_as_told_by(here: Own) -> dict[str, Any]:
    try:
        here.facts(SimpleNamespace()).send(None)  # type: ignore[arg-type]
    except StopIteration as answered:
        told: dict[str, Any] = json.loads(answered.value.body)["journal"]
        return told
    raise AssertionError("it waits for something")


def test_a_database_is_asked_for_its_size_now_and_then_and_not_while_it_is_away(
    journal: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"away": False}
    here = Own(SimpleNamespace(keeping=lambda: kept), journal)  # type: ignore[arg-type]
    now = 100.0
    monkeypatch.setattr(own, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: 0.0))
    assert [journal_as_told_by(here)["bytes"] for _ in range(3)] == [7, 7, 7]
    assert journal.asked == 1
    now += MEASURED_SECONDS + 1
    journal_as_told_by(here)
    assert journal.asked == 2
    kept["away"] = True
    assert journal_as_told_by(here) == {
        "away": True,
        "kind": "postgresql",
        "bytes": None,
        "free_bytes": None,
    }
    now += MEASURED_SECONDS + 1
    journal_as_told_by(here)
    assert journal.asked == 2
