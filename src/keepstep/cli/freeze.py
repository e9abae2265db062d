"""`keepstep freeze` and `unfreeze`: for a while Keepstep decides nothing by itself."""

from __future__ import annotations

import argparse

from keepstep import codec
from keepstep.cli import common_options
from keepstep.cli.client import from_environment


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    freeze = commands.add_parser(
        "freeze",
        help="decide nothing until unfreeze: nobody is given up, blamed or moved",
        description="For the time in which, say, a switch is replaced. Training goes on; deaths "
        "are recorded, and survivors wait. Orders (stop, stop --save) are still followed.",
    )
    freeze.add_argument("--why", default="", help="the reason, for the record")
    freeze.add_argument("--dry-run", action="store_true", help="say what would happen")
    common_options(freeze)
    freeze.set_defaults(run=run_freeze)
    unfreeze = commands.add_parser("unfreeze", help="go on, with all that waited")
    unfreeze.add_argument("--dry-run", action="store_true", help="say what would happen")
    common_options(unfreeze)
    unfreeze.set_defaults(run=run_unfreeze)


def run_freeze(asked: argparse.Namespace) -> int:
    client = from_environment(asked.orchestrator, asked.token_file)
    body = {"why": asked.why or "keepstep freeze", "dry_run": asked.dry_run}
    return _tell(asked, client.freeze(body))


def run_unfreeze(asked: argparse.Namespace) -> int:
    client = from_environment(asked.orchestrator, asked.token_file)
    return _tell(asked, client.unfreeze({"dry_run": asked.dry_run}))


def _tell(asked: argparse.Namespace, answer: dict[str, object]) -> int:
    if asked.output == "json":
        print(codec.dumps(answer).decode())
        return 0
    would = "would: " if answer["dry_run"] else ""
    told = answer["why"]
    assert isinstance(told, list)
    print("\n".join(f"{would}{why}" for why in told))
    return 0
