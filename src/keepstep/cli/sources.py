"""Where an account comes from: files that were handed over, a run directory, an orchestrator.

A run directory is read without its orchestrator, so the account of a job that is over can still
be made; reading takes nothing over and writes nothing.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep import codec
from keepstep.cli.client import find as find_client
from keepstep.cli.client import newest_run
from keepstep.cli.show import only_job
from keepstep.errors import ConfigError, Permanent
from keepstep.ledger import signing, verify
from keepstep.orchestrator.exporting import KEY, exported
from keepstep.orchestrator.journal import CLUSTER
from keepstep.orchestrator.journal_sqlite import SqliteJournal


@dataclass(frozen=True, slots=True)
class Source:
    """A chain that fits, the step log beside it, and the export as it came."""

    chain: verify.Chain
    steps: tuple[dict[str, Any], ...]
    export: tuple[str, ...]


def add_source(command: argparse.ArgumentParser) -> None:
    option = command.add_argument
    option("job", nargs="?", default="", help="default: the only one")
    option("--export", type=Path, metavar="FILE", help="an exported chain")
    option("--steps", type=Path, metavar="FILE", help="steps.jsonl (default: where the job says)")
    option("--run-dir", type=Path, metavar="DIR", help="default: the newest one here")
    option("--orchestrator", default="", metavar="URL", help="http://HOST:PORT")
    option("--token-file", default="", metavar="FILE", help="the cluster's token")


def find(asked: argparse.Namespace) -> Source:
    """What a command line means."""
    return _source(_export(asked), asked.steps)


def from_run(run: Path, job: str = "") -> Source:
    """Of a run directory's journal."""
    return _source(_from_file(run / "journal.db", job), None)


def _source(export: Iterable[str], steps: Path | None) -> Source:
    lines = tuple(export)
    try:
        chain = verify.read_chain(lines)
        return Source(chain, tuple(verify.read_steps(_step_lines(steps, chain))), lines)
    except verify.Broken as error:
        raise Permanent(str(error)) from error
    except verify.WRONG as error:
        raise Permanent(f"the export is not as it was written: {error!r}") from error


def run_key(run: Path | None) -> Path:
    """The signing key of a run directory's journal."""
    run = run or newest_run(os.environ, Path.cwd())
    if run is None:
        raise ConfigError("no run found here; give --key-file FILE or --run-dir DIR")
    return run / KEY


def _export(asked: argparse.Namespace) -> Iterable[str]:
    if asked.export is not None:
        return _read(asked.export)
    run = asked.run_dir
    if run is None and not (asked.orchestrator or os.environ.get("KEEPSTEP_ORCHESTRATOR")):
        run = newest_run(os.environ, Path.cwd())
    if run is not None and (run / "journal.db").exists():
        return _from_file(run / "journal.db", asked.job)
    if asked.run_dir is not None:
        raise ConfigError(f"{asked.run_dir} holds no journal.db")
    client = find_client(asked.orchestrator, asked.token_file, os.environ, Path.cwd())
    job = asked.job or only_job(client.cluster(), over_too=True)
    return [*client.journal(job)]


def _from_file(path: Path, job: str) -> list[str]:
    key = path.parent / KEY
    journal = SqliteJournal(path)
    try:
        vouched = (codec.loads(link.body) for link in journal.export(CLUSTER))
        jobs = list(dict.fromkeys(str(said["job"]) for said in vouched if "job" in said))
        if job not in jobs and (job or len(jobs) != 1):
            raise ConfigError(f"say which job is meant; there are: {', '.join(jobs) or 'none'}")
        signer = signing.load(key) if key.exists() else None
        name = job or jobs[0]
        return [*exported(journal.export(name), name, signer)]
    finally:
        journal.close()


def _step_lines(given: Path | None, chain: verify.Chain) -> list[str]:
    if given is not None:
        return _read(given)
    spec = chain.bodies[0]["entry"]["event"]["body"].get("spec", {})
    path = Path(str(spec.get("state_directory") or "/nowhere")) / "steps.jsonl"
    return _read(path) if path.is_file() else []


def _read(path: Path) -> list[str]:
    try:
        return verify.lines_of(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
