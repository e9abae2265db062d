"""`keepstep admin export`, `keys` and `terms`: what is handed to whoever checks an account."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from keepstep.cli.sources import add_source, find, run_key
from keepstep.errors import ConfigError
from keepstep.ledger import guarantee, signing


def add(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    export = groups.add_parser(
        "export", help="a job's signed chain, for `keepstep verify` and `keepstep report`"
    )
    add_source(export)
    export.add_argument("--out", type=Path, metavar="FILE", help="default: standard output")
    export.set_defaults(run=run_export)
    keys = groups.add_parser("keys", help="the public key that exports are signed with")
    keys.add_argument("--key-file", type=Path, metavar="FILE", help="default: the run directory's")
    keys.add_argument("--run-dir", type=Path, metavar="DIR", help="default: the newest one here")
    keys.add_argument("--new", action="store_true", help="make the file if there is none")
    keys.set_defaults(run=run_keys)
    terms = groups.add_parser("terms", help="the guarantee's terms: the defaults, or sign a file")
    terms.add_argument("--sign", type=Path, metavar="TOML", help="write its signature beside it")
    terms.add_argument("--key-file", type=Path, metavar="FILE", help="default: the run directory's")
    terms.add_argument("--run-dir", type=Path, metavar="DIR", help="default: the newest one here")
    terms.set_defaults(run=run_terms)


def run_export(asked: argparse.Namespace) -> int:
    source = find(asked)
    text = "".join(source.export)
    if asked.out is None:
        sys.stdout.write(text)
    else:
        asked.out.write_text(text, encoding="utf-8")
    if not source.chain.key:
        print("keepstep: this export is not signed: its journal has no key", file=sys.stderr)
    return 0


def run_keys(asked: argparse.Namespace) -> int:
    if asked.new and asked.key_file is None:
        raise ConfigError("--new needs --key-file FILE")
    path = asked.key_file or run_key(asked.run_dir)
    signer = signing.load_or_make(path) if asked.new else signing.load(path)
    print(signer.public)
    return 0


def run_terms(asked: argparse.Namespace) -> int:
    if asked.sign is None:
        print(guarantee.DEFAULT, end="")
        return 0
    signer = signing.load(asked.key_file or run_key(asked.run_dir))
    print(f"{guarantee.sign(asked.sign, signer)}: signed by {signer.public}")
    return 0
