"""A real PostgreSQL server for the tests: one for the whole session, a database for each test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from keepstep.chaos.database import PostgresServer, programs

__all__ = ["PostgresServer", "postgres", "programs"]


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    where = programs()
    if where is None:
        why = "there is no PostgreSQL server; install the Debian package postgresql"
        # Where CI may install packages it did: a server that is not found then is a fault here.
        assert not (os.environ.get("CI") and os.geteuid() == 0), why
        pytest.skip(why)
    with PostgresServer(where) as server:
        yield server
