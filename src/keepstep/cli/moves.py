"""`keepstep migrate`, `drain`, `undrain`: ranks leave while all is well, without losing a step."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from keepstep import codec
from keepstep.cli import common_options
from keepstep.cli.client import Client, from_environment
from keepstep.cli.show import only_job
from keepstep.errors import Transient

LOOK_SECONDS = 0.2


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    migrate = commands.add_parser("migrate", help="move a rank to a spare, live")
    migrate.add_argument("--job", default="", help="default: the only one that runs")
    migrate.add_argument(
        "--rank", type=int, action="append", required=True, help="may be given several times"
    )
    migrate.add_argument("--to", default="", metavar="NODE", help="default: the best spare")
    _options(migrate, run_migrate)
    drain = commands.add_parser("drain", help="empty a node, to switch it off or to repair it")
    drain.add_argument("node")
    _options(drain, run_drain)
    undrain = commands.add_parser("undrain", help="let a drained node be used again")
    undrain.add_argument("node")
    undrain.add_argument("--dry-run", action="store_true", help="say what would happen")
    common_options(undrain)
    undrain.set_defaults(run=run_undrain)


def _options(command: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> None:
    command.add_argument("--why", default="", help="the reason, for the record")
    command.add_argument("--wait", action="store_true", help="until it is done; exit 0 then")
    command.add_argument(
        "--wait-seconds", type=float, default=900.0, metavar="S", help="exit 1 after so long"
    )
    command.add_argument("--dry-run", action="store_true", help="say what would happen")
    common_options(command)
    command.set_defaults(run=run)


def run_migrate(asked: argparse.Namespace) -> int:
    client = from_environment(asked.orchestrator, asked.token_file)
    job = asked.job or only_job(client.cluster())
    before = {seat["rank"]: seat["incarnation"] for seat in client.job(job)["seats"]}
    body: dict[str, Any] = {"ranks": asked.rank, "dry_run": asked.dry_run}
    body |= {"why": asked.why or "keepstep migrate", "to": asked.to}
    answer = client.migrate(job, body)

    def moved() -> str:
        found = client.job(job)
        if found["over"]:
            return f"{job} is over ({found['state']}): nothing is left to move"
        now = {seat["rank"]: seat for seat in found["seats"]}
        wanted = [now[rank] for rank in asked.rank]
        same = [seat for seat in wanted if seat["incarnation"] == before[seat["rank"]]]
        if same or found["migration"] is not None:
            _tell_progress(asked, found)
            return ""
        where = ", ".join(f"rank {seat['rank']} is on {seat['node']}" for seat in wanted)
        return f"{where}; no step was lost"

    return _conclude(asked, answer, moved)


def run_drain(asked: argparse.Namespace) -> int:
    client = from_environment(asked.orchestrator, asked.token_file)
    body = {"why": asked.why or "keepstep drain", "dry_run": asked.dry_run}
    answer = client.drain(asked.node, body)
    return _conclude(asked, answer, lambda: _emptied(asked, client))


def _emptied(asked: argparse.Namespace, client: Client) -> str:
    picture = client.cluster()
    node = picture["nodes"][asked.node]
    if node["empty"]:
        return f"{asked.node} is empty, safe to power off"
    for name in sorted({use["job"] for use in node["uses"] if use["job"]}):
        _tell_progress(asked, picture["jobs"][name])
    return ""


def run_undrain(asked: argparse.Namespace) -> int:
    client = from_environment(asked.orchestrator, asked.token_file)
    answer = client.undrain(asked.node, {"dry_run": asked.dry_run})
    return _conclude(asked, answer, None)


# ---------------------------------------------------------------- telling and waiting


_told: set[str] = set()


def _tell_progress(asked: argparse.Namespace, job: dict[str, Any]) -> None:
    """Each new phase or reason to wait, once, on stderr."""
    moving = job["migration"]
    if moving is not None:
        text = f"{job['id']}: {moving['phase']} ({moving['kind']} {moving['id']})"
    else:
        waits = [wish["waits"] for wish in job["leaving"] if wish["waits"]]
        text = f"{job['id']}: {waits[0]}" if waits else ""
    if text and text not in _told:
        _told.add(text)
        print(text, file=sys.stderr, flush=True)


def _conclude(
    asked: argparse.Namespace, answer: dict[str, Any], done: Callable[[], str] | None
) -> int:
    if done is not None and asked.wait and not asked.dry_run:
        for why in answer["why"]:
            print(why, file=sys.stderr)
        answer["done"] = _wait(done, asked.wait_seconds)
        if not answer["done"]:
            print(
                f"keepstep: not done after {asked.wait_seconds:g} s; it goes on (see "
                "`keepstep status`), and `keepstep undrain` takes it back",
                file=sys.stderr,
            )
    if asked.output == "json":
        print(codec.dumps(answer).decode())
    elif answer.get("done"):
        print(answer["done"])
    elif not asked.dry_run and "done" in answer:
        pass
    else:
        would = "would: " if answer["dry_run"] else ""
        print("\n".join(f"{would}{why}" for why in answer["why"]))
    return 1 if answer.get("done") == "" else 0


def _wait(done: Callable[[], str], seconds_max: float) -> str:
    deadline = time.monotonic() + seconds_max
    while time.monotonic() < deadline:
        try:
            if text := done():
                return text
        except Transient:
            # A new orchestrator is on its way.
            pass
        time.sleep(LOOK_SECONDS)
    return ""
