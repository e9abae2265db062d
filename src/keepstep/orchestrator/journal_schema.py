"""The tables of a journal in PostgreSQL, as numbered steps from nothing to the present version.

A step is never edited once it is out: the next one changes what it made. All that are missing are
applied in one transaction under an advisory lock, so that two orchestrators that start together
make the tables once, and a failed upgrade leaves the version that was there. A step only adds:
a leader of the version before it may still be writing.

All tables are in a schema of their own: one database holds the journal of one cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, LiteralString

from keepstep.errors import ConfigError

if TYPE_CHECKING:
    import psycopg

MIGRATIONS: tuple[LiteralString, ...] = (
    # 1: the chains. The cluster's head is in the one row that each write locks and compares: a
    # look at another table would not be repeated after a wait for that lock.
    """
    CREATE TABLE keepstep.standing (
        one integer PRIMARY KEY CHECK (one = 1),
        term bigint NOT NULL, seq bigint NOT NULL, head text NOT NULL
    );
    CREATE TABLE keepstep.entries (seq bigint PRIMARY KEY, body text NOT NULL);
    CREATE TABLE keepstep.links (
        chain text NOT NULL, number bigint NOT NULL, hash text NOT NULL,
        seq bigint, body text, PRIMARY KEY (chain, number)
    );
    CREATE TABLE keepstep.heads (
        chain text PRIMARY KEY, number bigint NOT NULL, hash text NOT NULL
    );
    CREATE TABLE keepstep.snapshots (
        seq bigint PRIMARY KEY, link bigint NOT NULL, body text NOT NULL
    );
    INSERT INTO keepstep.standing
        VALUES (1, 0, 0, encode(sha256('keepstep journal 1'), 'hex'));
    """,
    # 2: the lease, in that same row. A writer of version 1 has none and can be replaced at once.
    """
    ALTER TABLE keepstep.standing
        ADD COLUMN holder text NOT NULL DEFAULT '',
        ADD COLUMN expires_at timestamptz NOT NULL DEFAULT '-infinity';
    """,
    # 3: where the leader is reached, for followers to say, and when it last wrote. A leader of
    # version 2 writes neither: its endpoint is not believed, because the term beside it is older.
    """
    ALTER TABLE keepstep.standing
        ADD COLUMN endpoint text NOT NULL DEFAULT '',
        ADD COLUMN endpoint_term bigint NOT NULL DEFAULT 0,
        ADD COLUMN written_at timestamptz NOT NULL DEFAULT '-infinity';
    """,
)
LOCK = 0x6B656570_73746570
"""The advisory lock's key, "keepstep" in ASCII."""


def migrate(
    connection: psycopg.Connection[Any],
    wanted: int = len(MIGRATIONS),
    *,
    newer_serves: bool = False,
) -> None:
    """Bring the tables to the wanted version, or raise ConfigError with the reason.

    `newer_serves`: for one who used them before they were upgraded.
    """
    found = _version(connection)
    if found == wanted or (newer_serves and found > wanted):
        return
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK,))
        # Looked at again: whoever had the lock before us may have done it all.
        found = _version(connection)
        if found > wanted and newer_serves:
            return
        if found > wanted:
            raise ConfigError(
                f"the journal's tables have version {found}, and this Keepstep knows {wanted}: "
                "a newer one has upgraded them; install that one here too"
            )
        if found == 0:
            connection.execute(
                "CREATE SCHEMA IF NOT EXISTS keepstep; CREATE TABLE keepstep.migrations ("
                "version integer PRIMARY KEY, "
                "applied_at timestamptz NOT NULL DEFAULT clock_timestamp())"
            )
        for number in range(found + 1, wanted + 1):
            connection.execute(MIGRATIONS[number - 1])
            connection.execute("INSERT INTO keepstep.migrations VALUES (%s)", (number,))


def _version(connection: psycopg.Connection[Any]) -> int:
    """0: there is nothing."""
    # By a query, which sees what was committed before it: a look-up by name may be answered from
    # the server process's memory of the time before it waited for the lock.
    found = connection.execute(
        "SELECT FROM pg_tables WHERE schemaname = 'keepstep' AND tablename = 'migrations'"
    )
    if found.fetchone() is None:
        return 0
    row = connection.execute("SELECT max(version) FROM keepstep.migrations").fetchone()
    return int(row[0]) if row is not None and row[0] is not None else 0
