"""`keepstep admin token`: make, list and take back the tokens of people and programs."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from keepstep import codec
from keepstep.errors import ConfigError
from keepstep.orchestrator import tokens

TOKENS_FILE = "KEEPSTEP_ORCHESTRATOR_TOKENS_FILE"


def add(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    token = groups.add_parser("token", help="who may see and do what: roles and projects")
    verbs = token.add_subparsers(title="commands", metavar="COMMAND", required=True)
    new = verbs.add_parser("new", help="make one; it is printed once, and kept by digest")
    new.add_argument("name", help="whose it is: the journal says so of what it does")
    new.add_argument("--role", required=True, choices=tuple(tokens.Role))
    new.add_argument("--project", default="", metavar="NAME", help="only this project's jobs")
    new.add_argument("--days", type=float, default=0.0, metavar="N", help="default: no end")
    _file_option(new)
    new.set_defaults(run=run_new)
    known = verbs.add_parser("list", help="names, roles, projects; never the tokens themselves")
    known.add_argument("-o", "--output", choices=("text", "json"), default="text")
    _file_option(known)
    known.set_defaults(run=run_list)
    revoke = verbs.add_parser("revoke", help="take one back: refused within a second")
    revoke.add_argument("name")
    _file_option(revoke)
    revoke.set_defaults(run=run_revoke)


def _file_option(command: argparse.ArgumentParser) -> None:
    about = "the orchestrator's setting tokens_file"
    command.add_argument("--file", default="", metavar="FILE", help=about)


def run_new(asked: argparse.Namespace) -> int:
    role, seconds = tokens.Role(asked.role), 86_400 * asked.days
    if asked.days < 0:
        raise ConfigError(f"--days is {asked.days:g}; give a number above 0")
    text, _ = tokens.new(_file(asked), asked.name, role, project=asked.project, seconds=seconds)
    where = f"project {asked.project}" if asked.project else "all projects"
    print(f"keepstep: {asked.name} is {role} of {where}; its token, only now:", file=sys.stderr)
    print(text)
    return 0


def run_list(asked: argparse.Namespace) -> int:
    known = tokens.read(_file(asked)).tokens
    if asked.output == "json":
        plain = [codec.to_plain(token) for token in known]
        for one in plain:
            del one["sha256"]
        print(codec.dumps({"tokens": plain}).decode())
        return 0
    for token in known:
        until = time.strftime("%Y-%m-%d", time.gmtime(token.expires_at))
        ends = f"until {until}" if token.expires_at else ""
        print(f"{token.name:24} {token.role:9} {token.project or '(all)':16} {ends}".rstrip())
    return 0


def run_revoke(asked: argparse.Namespace) -> int:
    tokens.revoke(_file(asked), asked.name)
    print(f"keepstep: {asked.name} is taken back", file=sys.stderr)
    return 0


def _file(asked: argparse.Namespace) -> Path:
    named = asked.file or os.environ.get(TOKENS_FILE, "")
    if not named:
        raise ConfigError(f"give --file FILE, or set ${TOKENS_FILE}")
    return Path(named)
