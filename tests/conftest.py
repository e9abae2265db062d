"""Fixtures that more than one directory needs."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.postgres import postgres

__all__ = ["postgres"]

# Examples have no deadline: a shared machine may stand still for any of them, and none of these
# tests is about time. What hangs ends by the limit that every test has.
settings.register_profile("keepstep", deadline=None)
settings.load_profile("keepstep")

ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(autouse=True)
def signals_stay_what_they_are() -> Iterator[None]:
    """A handler that a test leaves behind meets a later one, and its children: in another order,
    or on another machine, hours later."""
    before = [signal.getsignal(each) for each in ENDS]
    yield
    after = [signal.getsignal(each) for each in ENDS]
    for each, handler in zip(ENDS, before, strict=True):
        signal.signal(each, handler)
    assert after == before, "a handler was left behind"


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A failure is told when it happens: a run that is ended from outside has no summary."""
    if report.failed:
        print(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}\n", flush=True)
