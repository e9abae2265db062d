"""Fixtures that more than one directory needs."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.postgres import postgres

__all__ = ["postgres"]

# Examples have no deadline: a shared machine may stand still for any of them, and none of these
# tests is about time. What hangs ends by the limit that every test has.
settings.register_profile("keepstep", deadline=None)
settings.load_profile("keepstep")


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A failure is told when it happens: a run that is ended from outside has no summary."""
    if report.failed:
        print(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}\n", flush=True)
