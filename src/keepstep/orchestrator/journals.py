"""Which journal a place means: a path is an SQLite file, postgresql://… a database."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from keepstep.config import OrchestratorConfig
from keepstep.errors import ConfigError
from keepstep.orchestrator.journal import Journal
from keepstep.orchestrator.journal_postgres import PostgresJournal
from keepstep.orchestrator.journal_sqlite import SqliteJournal

_DATABASE = r"postgres(ql)?://"
_SCHEME = r"[A-Za-z][\w+.-]*:/+"
_CONNINFO = r"(^|\s)(host|hostaddr|port|dbname|user|password|passfile|service)\s*="
"""How libpq's other notation begins. A file of such a name would be one by mistake."""
_PASSWORD = _DATABASE + r"([^@/?]*:[^?]*@|.*[?&](ssl)?password=)"


def open_journal(where: str, config: OrchestratorConfig) -> Journal:
    """The journal at a place. A database is connected to at the first use.

    A place that is refused is not quoted: it may hold a password.
    """
    if is_database(where):
        return PostgresJournal(
            where, holder=config.journal_holder, lease_seconds=config.lease_seconds
        )
    if scheme := re.match(_SCHEME, where):
        raise ConfigError(
            f"no journal is known for {scheme[0]}…; give a file, or postgresql://HOST/DATABASE"
        )
    if re.search(_CONNINFO, where, re.IGNORECASE):
        raise ConfigError(
            "the journal's place looks like libpq's host=… dbname=…; write it as "
            "postgresql://HOST/DATABASE, or a file as ./FILE"
        )
    if not where:
        raise ConfigError(
            "there is no journal; give --journal FILE, or a file or postgresql://HOST/DATABASE "
            "as `journal` of the section [orchestrator]"
        )
    return SqliteJournal(Path(where), synchronous=config.journal_synchronous)


def is_database(where: str) -> bool:
    return re.match(_DATABASE, where) is not None


def measured(journal: Journal, *, away: bool) -> dict[str, Any]:
    """What kind of store it is, how large it has grown, and what is left; null: nobody knows."""
    match journal:
        case PostgresJournal() if away:
            # It would be waited for in vain. A disk that is full can be asked how full it is.
            size, free = None, None
        case SqliteJournal() | PostgresJournal():
            size, free = journal.size()
        case _:
            size, free = None, None
    kind = "postgresql" if isinstance(journal, PostgresJournal) else "sqlite"
    return {"kind": kind, "bytes": size, "free_bytes": free}


def refuse_password(where: str) -> None:
    """For a place from a command line, which everybody on the machine can read."""
    if re.match(_PASSWORD, where):
        raise ConfigError(
            "--journal has a password in it, and a command line shows in `ps`; put the URL into "
            "$KEEPSTEP_ORCHESTRATOR_JOURNAL or the file of --config, or the password into libpq's "
            "passfile"
        )
