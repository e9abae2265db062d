"""`keepstep migrate`, `drain`, `taint` and their opposites: ranks leave, and no step is lost. And
`forget`, for nodes that are gone."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from keepstep import codec
from keepstep.cli import common_options, view
from keepstep.cli.client import Client, from_environment
from keepstep.cli.fit import columns, fit
from keepstep.cli.show import only_job, painter, show
from keepstep.errors import ConfigError, Permanent, Transient
from keepstep.model import Severity

LOOK_SECONDS = 0.2
MIGRATE_ABOUT = """\
Move ranks that are well to spares, live. The target is made warm while training
goes on; then all ranks pause for a moment, and no step is lost. Without room
the rank waits, and `keepstep status` says what would help."""
MIGRATE_EPILOG = """\
examples:
  keepstep migrate --rank 3                  to the best spare
  keepstep migrate --rank 3 --to n7 --wait   to a free slot of n7; wait for it
  keepstep migrate --rank 3 --cancel         it stays, if it has not paused yet
  keepstep migrate --home                    all back to where they started
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    migrate = commands.add_parser(
        "migrate",
        help="move a rank to a spare, live",
        description=MIGRATE_ABOUT,
        epilog=MIGRATE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    migrate.add_argument("--job", default="", help="default: the only one that runs")
    which = migrate.add_mutually_exclusive_group(required=True)
    which.add_argument("--rank", type=int, action="append", help="may be given several times")
    which.add_argument(
        "--home", action="store_true", help="all ranks, back to the nodes they started on"
    )
    migrate.add_argument("--to", default="", metavar="NODE", help="default: the best spare")
    migrate.add_argument(
        "--cancel", action="store_true", help="take it back: the ranks stay where they are"
    )
    _options(migrate, run_migrate)
    drain = commands.add_parser(
        "drain",
        help="empty a node, to switch it off or to repair it",
        description="Nothing new comes to the node, and its ranks move to spares, live: those of "
        "a job in one migration with one pause. It stays drained, over reboots too, until "
        "`keepstep undrain`. With --wait the last line says that it can be switched off.",
    )
    drain.add_argument("node")
    _options(drain, run_drain)
    undrain = commands.add_parser(
        "undrain",
        help="let a drained node be used again",
        description="The node may be used again. Ranks that left it stay where they are, until "
        "`keepstep migrate --home`, or by themselves if the job's policy says move_home.",
    )
    undrain.add_argument("node")
    undrain.add_argument("--dry-run", action="store_true", help="say what would happen")
    common_options(undrain)
    undrain.set_defaults(run=run_undrain)
    forget = commands.add_parser(
        "forget",
        help="take a node that will not come back out of the books",
        description="The node must have left or be lost, and no job may have a seat, a mirror or a "
        "standby there. Its drain and its taints go with it; if it ever comes back, it is met as a "
        "new one. After some days (forget_nodes_seconds) it happens without this, too.",
    )
    forget.add_argument("node")
    forget.add_argument("--dry-run", action="store_true", help="say what would happen")
    common_options(forget)
    forget.set_defaults(run=run_forget)
    _add_taints(commands)


def _add_taints(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    taint = commands.add_parser(
        "taint",
        help="a reason not to use a node or a device",
        description="Record a reason not to use a node, or one of its slots, for some time.",
    )
    taint.add_argument("place", metavar="NODE[/SLOT]")
    taint.add_argument("--reason", required=True, help="what is wrong with it")
    taint.add_argument(
        "--severity",
        choices=[severity.value for severity in Severity],
        default=Severity.AVOID.value,
        help="avoid: nothing new there; leave: ranks move away; imminent: now (default: avoid)",
    )
    taint.add_argument(
        "--for", dest="duration", default="24h", metavar="TIME", help="90s, 30m, 24h, 7d"
    )
    taint.add_argument("--dry-run", action="store_true", help="say what would happen")
    common_options(taint)
    taint.set_defaults(run=run_taint)
    untaint = commands.add_parser("untaint", help="the reason does not hold any more")
    untaint.add_argument("place", metavar="NODE[/SLOT]")
    untaint.add_argument("--dry-run", action="store_true", help="say what would happen")
    common_options(untaint)
    untaint.set_defaults(run=run_untaint)
    taints = commands.add_parser("taints", help="what is not to be used, why, and for how long")
    common_options(taints)
    taints.set_defaults(run=run_taints)


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
    if asked.cancel:
        return _cancel(asked, client, job)
    then = client.job(job)
    before = {seat["rank"]: seat["incarnation"] for seat in then["seats"]}
    body: dict[str, Any] = {"why": asked.why or "keepstep migrate", "dry_run": asked.dry_run}
    body |= {"home": True} if asked.home else {"ranks": asked.rank, "to": asked.to}
    answer = client.migrate(job, body)
    ranks = sorted(map(int, then["away"])) if asked.home else asked.rank
    if asked.home and not ranks:
        return _conclude(asked, answer, None)

    def moved() -> str:
        found = client.job(job)
        if found["over"]:
            return f"{job} is over ({found['state']}): nothing is left to move"
        now = {seat["rank"]: seat for seat in found["seats"]}
        wanted = [now[rank] for rank in ranks]
        same = [seat for seat in wanted if seat["incarnation"] == before[seat["rank"]]]
        if asked.home:
            # Whoever cannot go home stays, and is not waited for.
            same = [seat for seat in same if seat["rank"] in {w["rank"] for w in found["leaving"]}]
        if same or found["migration"] is not None:
            _tell_progress(found)
            return ""
        where = ", ".join(f"rank {seat['rank']} is on {seat['node']}" for seat in wanted)
        if found["fallbacks"] > then["fallbacks"]:
            return f"{where}, after a fallback: see `keepstep explain`"
        return f"{where}; no step was lost"

    return _conclude(asked, answer, moved)


def _cancel(asked: argparse.Namespace, client: Client, job: str) -> int:
    if asked.home or asked.to:
        raise ConfigError("--cancel takes --rank only; name the ranks that shall stay")
    body = {"ranks": asked.rank, "cancel": True, "dry_run": asked.dry_run}
    answer = client.migrate(job, body)
    _conclude(asked, answer, None)
    return 0 if answer["changed"] or asked.dry_run else 1


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
    if frozen := picture["frozen"]:
        _tell_once(f"the cluster is frozen ({frozen['why']}): nothing moves until it is unfrozen")
    for name in sorted({use["job"] for use in node["uses"] if use["job"]}):
        job = picture["jobs"][name]
        if job["world"] == 1:
            raise Permanent(
                f"{asked.node} cannot become empty: {name} has one rank and nobody else holds its "
                f"state; `keepstep stop --save {name}`, and run it again elsewhere"
            )
        if job["mode"] == "observe":
            raise Permanent(
                f"{asked.node} cannot become empty: {name} runs with mode = observe, so its ranks "
                f"are not moved; `keepstep stop --save {name}`, and run it again with mode = act"
            )
        _tell_progress(job)
    return ""


def run_undrain(asked: argparse.Namespace) -> int:
    client = from_environment(asked.orchestrator, asked.token_file)
    answer = client.undrain(asked.node, {"dry_run": asked.dry_run})
    return _conclude(asked, answer, None)


def run_forget(asked: argparse.Namespace) -> int:
    client = from_environment(asked.orchestrator, asked.token_file)
    answer = client.forget(asked.node, {"dry_run": asked.dry_run})
    _conclude(asked, answer, None)
    return 0 if answer["changed"] else 1


# ---------------------------------------------------------------- taints


def run_taint(asked: argparse.Namespace) -> int:
    client = from_environment(asked.orchestrator, asked.token_file)
    body = {**place_of(asked.place), "reason": asked.reason, "severity": asked.severity}
    body |= {"seconds": seconds_of(asked.duration), "dry_run": asked.dry_run}
    return _conclude(asked, client.taint(body), None)


def run_untaint(asked: argparse.Namespace) -> int:
    client = from_environment(asked.orchestrator, asked.token_file)
    body = {**place_of(asked.place), "dry_run": asked.dry_run}
    return _conclude(asked, client.untaint(body), None)


def run_taints(asked: argparse.Namespace) -> int:
    picture = from_environment(asked.orchestrator, asked.token_file).cluster()
    show(asked, {"taints": picture["taints"]}, view.taint_lines(picture, painter(), columns()))
    return 0


def place_of(text: str) -> dict[str, Any]:
    """`n3` is a node, `n3/1` one of its slots."""
    node, slash, slot = text.partition("/")
    if not node or (slash and not slot.isdigit()):
        raise ConfigError(f"{text!r} is no place; write NODE or NODE/SLOT, for example n3/1")
    return {"node": node, "slot": int(slot)} if slash else {"node": node}


def seconds_of(text: str) -> float:
    """`90s`, `30m`, `24h`, `7d`."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    number, unit = text[:-1], text[-1:]
    if unit not in units or not number.replace(".", "", 1).isdigit():
        raise ConfigError(f"{text!r} is no time; write for example 90s, 30m, 24h or 7d")
    return float(number) * units[unit]


# ---------------------------------------------------------------- telling and waiting


_told: set[str] = set()


def _tell_progress(job: dict[str, Any]) -> None:
    """Each new phase or reason to wait, once, on stderr."""
    moving = job["migration"]
    if moving is not None:
        text = f"{job['id']}: {moving['phase']} ({moving['kind']} {moving['id']})"
    else:
        waits = [wish["waits"] for wish in job["leaving"] if wish["waits"]]
        text = f"{job['id']}: {waits[0]}" if waits else ""
    if text:
        _tell_once("\n".join([text, *view.remedy_lines(job)]))


def _tell_once(text: str) -> None:
    if text not in _told:
        _told.add(text)
        _print(text, sys.stderr)


def _print(text: str, where: TextIO) -> None:
    """Wrapped for people; in a pipe one sentence is one line."""
    lines = text.splitlines()
    print("\n".join(fit(lines, columns()) if where.isatty() else lines), file=where, flush=True)


def _conclude(
    asked: argparse.Namespace, answer: dict[str, Any], done: Callable[[], str] | None
) -> int:
    if done is not None and asked.wait and not asked.dry_run:
        for why in answer["why"]:
            _print(why, sys.stderr)
        answer["done"] = _wait(done, asked.wait_seconds)
        if not answer["done"]:
            print(
                f"keepstep: not done after {asked.wait_seconds:g} s; it goes on: see "
                "`keepstep status`",
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
        for why in answer["why"]:
            _print(f"{would}{why}", sys.stdout)
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
