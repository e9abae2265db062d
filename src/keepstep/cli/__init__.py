"""The `keepstep` command. One file per group of commands; each adds itself to the parser.

Commands import what they need when they are used, so that `keepstep status` is quick.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence

from keepstep.errors import ConfigError, KeepstepError

GROUPS = (
    *("run", "join", "show", "watch", "logs", "moves", "freeze", "stop"),
    *("report", "cost", "admin"),
)
"""Modules of this package with an `add(commands)`, in the order of the help."""
OPTIONAL_GROUPS = ("demo", "lab")
"""Groups that a smaller install may lack."""

EPILOG = """\
at 3 a.m.:
  keepstep status                what runs where, and what is wrong
  keepstep watch                 the same, live, with reasons as they happen
  keepstep explain               the story of the newest incident
  keepstep logs --rank 3 -f      a rank's output, if its log directory is here
  keepstep drain n3 --wait       empty a node, live; then it can be switched off
  keepstep undrain n3            use it again
  keepstep migrate --home        ranks go back to the nodes they started on
  keepstep freeze --why TEXT     decide nothing until `keepstep unfreeze`
  keepstep stop --save JOB       end a job at a saved boundary
  keepstep rewind JOB            go back to its newest checkpoint
  keepstep report                where the time went, was the promise kept

Commands find the orchestrator by --orchestrator, by $KEEPSTEP_ORCHESTRATOR, or
in the newest run directory below the current one; `run` joins one only by the
first. All that show something take `-o json`. Clusters: `keepstep join --help`.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parser().parse_args(arguments)
    try:
        return int(asked.run(asked))
    except ConfigError as error:
        print(f"keepstep: {error}", file=sys.stderr)
        return 2
    except KeepstepError as error:
        print(f"keepstep: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # `keepstep status | head`: the reader has what it wanted.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="keepstep",
        description="Keepstep: distributed PyTorch training that keeps every step through faults.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in (*GROUPS, *OPTIONAL_GROUPS):
        module = f"{__name__}.{name}"
        if name in GROUPS or importlib.util.find_spec(module):
            importlib.import_module(module).add(commands)
    _describe(commands)
    return top


def _describe(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """A command's own help begins with what the list of commands says of it, at least."""
    for known in commands._choices_actions:
        command = commands.choices[known.dest]
        if command.description is None and known.help:
            command.description = f"{known.help[0].upper()}{known.help[1:]}."


def common_options(command: argparse.ArgumentParser, *, output: bool = True) -> None:
    """Where the orchestrator is, and how to answer."""
    command.add_argument("--orchestrator", default="", metavar="URL", help="http://HOST:PORT")
    command.add_argument("--token-file", default="", metavar="FILE", help="the cluster's token")
    if output:
        command.add_argument(
            "-o", "--output", choices=("text", "json"), default="text", help="default: text"
        )
