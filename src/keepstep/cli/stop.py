"""`keepstep stop`: end a job, with --save at a boundary from which a rerun goes on.

`keepstep rewind`: not to end it, but to go back to its newest checkpoint.
"""

from __future__ import annotations

import argparse
import time

from keepstep import codec
from keepstep.cli import common_options
from keepstep.cli.client import Client, from_environment
from keepstep.cli.show import only_job
from keepstep.errors import Transient, Unreachable

WAIT_SECONDS_MAX = 120.0
"""A just-in-time checkpoint of a large model takes its time."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("stop", help="end a job; --save: at a saved boundary (exit 75)")
    command.add_argument("job", nargs="?", default="", help="default: the only one that runs")
    command.add_argument("--save", action="store_true", help="write the boundary to disk first")
    command.add_argument("--no-wait", action="store_true", help="return once it is ordered")
    common_options(command)
    command.set_defaults(run=run)
    back = commands.add_parser(
        "rewind",
        help="go back to the newest checkpoint, and on from there",
        description="For a job with contaminated steps (`keepstep status`): all ranks start anew "
        "from the newest checkpoint that was published before them. Steps since then are made "
        "again; it is recorded as a fallback.",
    )
    back.add_argument("job", nargs="?", default="", help="default: the only one that runs")
    back.add_argument("--why", default="keepstep rewind", help="for the record")
    common_options(back)
    back.set_defaults(run=run_rewind)


def run(asked: argparse.Namespace) -> int:
    client = from_environment(asked.orchestrator, asked.token_file)
    job = asked.job or only_job(client.cluster())
    answer = client.stop(job, save=asked.save, why="keepstep stop")
    if not asked.no_wait:
        answer = {**answer, **_wait_until_over(client, job)}
    if asked.output == "json":
        print(codec.dumps(answer).decode())
    else:
        print(f"{job}: {answer.get('state') or answer['why']}")
    return 0


def run_rewind(asked: argparse.Namespace) -> int:
    client = from_environment(asked.orchestrator, asked.token_file)
    job = asked.job or only_job(client.cluster())
    before = client.job(job)["fallbacks"]
    answer = client.stop(job, save=False, why=asked.why, rewind=True)
    done = client.job(job)["fallbacks"] > before
    if asked.output == "json":
        print(codec.dumps({**answer, "done": done}).decode())
    else:
        print(f"{job}: {answer['why']}")
    return 0 if done else 1


def _wait_until_over(client: Client, job: str) -> dict[str, object]:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while time.monotonic() < deadline:
        try:
            found = client.job(job)
        except Transient:
            # A run's own orchestrator leaves with its job.
            return {"state": "over"}
        if found["over"]:
            return {"state": found["state"], "exit_code": found["exit_code"]}
        time.sleep(0.2)
    raise Unreachable(f"{job} is not over after {WAIT_SECONDS_MAX:.0f} s; see `keepstep status`")
