"""`keepstep admin backup` and `restore`: a journal that is a file, copied while it is in use.

Which journal is meant is said, by an option or by the setting. A copy of the newest run's here may
be asked for without a word, and says whose it is; nothing is put in the place of a journal that was
not named.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from keepstep.cli.client import newest_run
from keepstep.config import OrchestratorConfig, load
from keepstep.errors import ConfigError
from keepstep.orchestrator import backups
from keepstep.orchestrator.journals import is_database, refuse_password


def add(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    made = groups.add_parser("backup", help="copy the journal to a file, while it is in use")
    made.add_argument("file", type=Path, metavar="FILE")
    _where(made)
    made.set_defaults(run=run_backup)
    back = groups.add_parser(
        "restore", help="make a backup the journal; its orchestrator must be stopped"
    )
    back.add_argument("file", type=Path, metavar="FILE")
    _where(back)
    back.set_defaults(run=run_restore)


def run_backup(asked: argparse.Namespace) -> int:
    journal = _named(asked)
    if journal is None:
        journal = _newest()
        print(f"no journal was named: this is the newest run's here; --journal {journal} says so")
    copied = backups.copy(journal, asked.file)
    print(f"{copied.path}, a copy of {journal}: {_told(copied)}; every link was checked")
    return 0


def run_restore(asked: argparse.Namespace) -> int:
    journal = _named(asked)
    if journal is None:
        raise ConfigError(
            "say which journal the backup takes the place of: --journal FILE, --run-dir DIR, or "
            "the setting `journal`"
        )
    copied, aside = backups.put_back(asked.file, journal)
    print(f"{copied.path}: {_told(copied)}; every link was checked")
    if aside is not None:
        print(f"what was there is now {aside}")
    print("start the orchestrator; docs/operating.md says what happens to what came later")
    return 0


def _told(copied: backups.Copied) -> str:
    return (
        f"{copied.entries} entries of {copied.jobs} jobs up to term {copied.term}, "
        f"head {copied.head[:16]}"
    )


def _where(command: argparse.ArgumentParser) -> None:
    command.add_argument("--journal", default="", metavar="FILE", help="default: the setting")
    command.add_argument("--run-dir", type=Path, metavar="DIR", help="with a journal.db")
    command.add_argument("--config", type=Path, metavar="TOML", help="with the setting `journal`")


def _named(asked: argparse.Namespace) -> Path | None:
    """The journal that options or the setting mean; None: none of them does."""
    refuse_password(asked.journal)
    where = asked.journal
    if not where and asked.run_dir is None:
        where = load(OrchestratorConfig, asked.config, os.environ).journal
    if is_database(where):
        raise ConfigError(
            "this journal is in PostgreSQL: copy it with `pg_dump -Fc -n keepstep` and put it back "
            "with pg_restore, or use point-in-time recovery; see docs/operating.md"
        )
    if where:
        return Path(where)
    return None if asked.run_dir is None else Path(asked.run_dir) / "journal.db"


def _newest() -> Path:
    run = newest_run(os.environ, Path.cwd())
    if run is None:
        raise ConfigError("no run found here; give --journal FILE or --run-dir DIR")
    return run / "journal.db"
