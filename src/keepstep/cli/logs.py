"""`keepstep logs --rank R`: a seat's output, whichever worker and node it is on.

Workers of one rank append to one file in the job's log directory, so following the file follows
the seat. Over many nodes that directory is on shared storage; where it is not, the command says on
which node to look.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from keepstep import codec
from keepstep.cli import common_options
from keepstep.cli.client import from_environment
from keepstep.cli.show import only_job
from keepstep.errors import ConfigError, Transient

LOOK_SECONDS = 0.25


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("logs", help="a rank's output, from its log directory")
    command.add_argument("job", nargs="?", default="", help="default: the only one that runs")
    command.add_argument("--rank", type=int, required=True, metavar="R")
    command.add_argument("-f", "--follow", action="store_true", help="go on until the job is over")
    command.add_argument("-n", "--lines", type=int, default=0, metavar="N", help="only the last N")
    command.add_argument("--log-dir", type=Path, metavar="DIR", help="instead of asking for it")
    common_options(command)
    command.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    directory, over = _directory(asked)
    path = directory / f"rank_{asked.rank}.log"
    if not path.exists():
        told = (
            f"there is no {path}; look for it on the node of the rank (keepstep status), or put "
            "--log-dir on shared storage"
        )
        if not asked.follow:
            raise ConfigError(told)
        # It may be about to be written.
        print(f"keepstep: {told}", file=sys.stderr)
    for line in tail(path, asked.lines, over if asked.follow else (lambda: True)):
        if asked.output == "json":
            _json_line(line)
        else:
            sys.stdout.write(line)
        sys.stdout.flush()
    return 0


def _directory(asked: argparse.Namespace) -> tuple[Path, Callable[[], bool]]:
    """The job's log directory, and how to learn that the job is over."""
    if asked.log_dir:
        return asked.log_dir, lambda: False
    client = from_environment(asked.orchestrator, asked.token_file)
    job = asked.job or only_job(client.cluster(), over_too=True)

    def over() -> bool:
        try:
            return bool(client.job(job)["over"])
        except Transient:
            return True

    found = client.job(job)
    if not 0 <= asked.rank < found["world"]:
        raise ConfigError(
            f"{job} has no rank {asked.rank}; its ranks are 0 to {found['world'] - 1}"
        )
    return Path(found["log_directory"]) / job, over


def tail(path: Path, lines_max: int, over: Callable[[], bool]) -> Iterator[str]:
    """The file's lines (its last ones, if asked), then what is appended until `over()`."""
    offset, rest, last = 0, "", False
    if lines_max > 0 and path.exists():
        text = path.read_text(encoding="utf-8", errors="replace")
        offset = len(text.encode())
        yield from (line + "\n" for line in text.splitlines()[-lines_max:])
    while True:
        # Ask first, read then: the lines written just before the end are the ones that matter.
        last = over()
        if path.exists() and path.stat().st_size > offset:
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
            offset += len(data)
            *whole, rest = (rest + data.decode(errors="replace")).split("\n")
            yield from (line + "\n" for line in whole)
        if last:
            if rest:
                yield rest + "\n"
            return
        time.sleep(LOOK_SECONDS)


def _json_line(line: str) -> None:
    sys.stdout.write(codec.dumps({"line": line.rstrip("\n")}).decode() + "\n")
