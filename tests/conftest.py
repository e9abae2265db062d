"""Fixtures that more than one directory needs."""

from __future__ import annotations

from tests.postgres import postgres

__all__ = ["postgres"]
