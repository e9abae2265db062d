"""Fixtures that more than one directory needs."""

from __future__ import annotations

from hypothesis import settings

from tests.postgres import postgres

__all__ = ["postgres"]

# Examples have no deadline: a shared machine may stand still for any of them, and none of these
# tests is about time. What hangs ends by the limit that every test has.
settings.register_profile("keepstep", deadline=None)
settings.load_profile("keepstep")
