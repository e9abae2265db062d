"""`keepstep status`, `nodes` and `explain`: one look at the cluster."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from keepstep import codec
from keepstep.cli import common_options, view
from keepstep.cli.client import from_environment
from keepstep.cli.fit import columns, fit
from keepstep.errors import ConfigError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    status = commands.add_parser("status", help="what runs where, and what is wrong")
    common_options(status)
    status.set_defaults(run=run_status)
    nodes = commands.add_parser("nodes", help="every node and who uses it")
    common_options(nodes)
    nodes.set_defaults(run=run_nodes)
    loans = commands.add_parser("loans", help="which job lent devices to which, and for how long")
    common_options(loans)
    loans.set_defaults(run=run_loans)
    explain = commands.add_parser("explain", help="the story of an incident, with reasons")
    explain.add_argument("incident", nargs="?", default="", help="default: the newest")
    common_options(explain)
    explain.set_defaults(run=run_explain)


def run_status(asked: argparse.Namespace) -> int:
    picture = from_environment(asked.orchestrator, asked.token_file).cluster()
    show(asked, picture, view.status_lines(picture, painter(), columns()))
    return 0


def run_nodes(asked: argparse.Namespace) -> int:
    picture = from_environment(asked.orchestrator, asked.token_file).cluster()
    show(asked, {"nodes": picture["nodes"]}, view.node_lines(picture, painter(), columns()))
    return 0


def run_loans(asked: argparse.Namespace) -> int:
    picture = from_environment(asked.orchestrator, asked.token_file).cluster()
    show(asked, {"loans": picture["loans"]}, view.loan_lines(picture, painter(), columns()))
    return 0


def run_explain(asked: argparse.Namespace) -> int:
    client = from_environment(asked.orchestrator, asked.token_file)
    if asked.incident:
        incident = client.incident(asked.incident)
    else:
        incidents = client.cluster()["incidents"]
        if not incidents:
            print("no incidents: nothing has gone wrong yet", file=sys.stderr)
            return 0
        incident = incidents[-1]
    show(asked, incident, view.incident_lines(incident, painter(), columns()))
    return 0


def show(asked: argparse.Namespace, plain: object, lines: Sequence[str]) -> None:
    if asked.output == "json":
        print(codec.dumps(plain).decode())
    else:
        print("\n".join(fit(lines, columns())))


def painter() -> view.Painter:
    """Colours on a terminal, plain text in a pipe."""
    return view.ansi if sys.stdout.isatty() else view.plain


def only_job(picture: Mapping[str, Any], *, over_too: bool = False) -> str:
    """The job that is meant when none is named."""
    jobs = picture["jobs"]
    running = [name for name, job in jobs.items() if not job["over"]]
    if len(running) == 1:
        return str(running[0])
    if over_too and not running and jobs:
        return str(max(jobs, key=lambda name: jobs[name]["since"]))
    names = ", ".join(running or jobs) or "none"
    raise ConfigError(f"say which job is meant; there are: {names}")
