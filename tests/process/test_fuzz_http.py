"""A small part of `python -m bench.fuzz` against a real orchestrator: every route, every caller."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("schemathesis")

from bench import fuzz_http

pytestmark = pytest.mark.process


def test_generated_requests_break_nothing_leak_nothing_and_do_nothing_unasked(tmp_path: Path):
    found = fuzz_http.attack(tmp_path, examples=2, seed=3)
    assert found["failures"] == []
    assert found["requests"] > 300
    # The attack gets through where it may: else it would prove nothing.
    assert found["statuses"]["admin"]["200"] > 20
    assert found["statuses"]["operator"]["200"] > 10
    assert set(found["statuses"]["nobody"]) <= {"200", "101", "400", "401", "426"}
