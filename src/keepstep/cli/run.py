"""`keepstep run`: torchrun's command line, with live replacement behind it.

Alone on one machine it starts an orchestrator and an agent of its own, submits the job, puts back
whichever of the two dies, and ends with the job's exit code. With --orchestrator it starts only
this node's agent and joins.

    0 finished    75 saved at a boundary: run it again and it goes on there (also after SIGTERM)
    1 failed, with the user's traceback    130 stopped by Ctrl-C    2 started wrongly
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from keepstep import policy_file
from keepstep.cli.client import RUNS, read_token
from keepstep.cli.cluster import ClusterPlan, LocalCluster, NodePlan
from keepstep.cli.follow import follow_to_the_end
from keepstep.config import LauncherConfig, load
from keepstep.errors import ConfigError
from keepstep.ledger import guarantee
from keepstep.model import CHECK_STEPS, JobId, JobSpec

IGNORED = (
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-conf",
    "master-addr",
    "master-port",
    "node-rank",
    "max-restarts",
    "monitor-interval",
    "start-method",
    "role",
    "redirects",
    "event-log-handler",
    "local-ranks-filter",
    "logs-specs",
    "signals-to-handle",
    "shutdown-timeout",
    "numa-binding",
    "duplicate-stdout-filters",
    "duplicate-stderr-filters",
)
"""torchrun's options with a value that have no meaning here: taken, and noted once."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line, settled."""

    spec: JobSpec
    node: NodePlan
    run_dir: Path
    orchestrator: str
    token_file: Path | None
    config_file: Path | None
    notes: tuple[str, ...]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "run",
        help="run a training script (in place of torchrun)",
        description="Run a training script. Takes torchrun's options and a few of its own.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="example:\n  keepstep run --nproc-per-node 4 --spares 1 train.py --lr 0.1",
    )
    _torchrun_options(parser)
    _own_options(parser)
    parser.add_argument("script", help="the training script, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    parser.set_defaults(run=run)


def _torchrun_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("as in torchrun")

    def option(name: str, **how: object) -> None:
        spellings = {f"--{name}", f"--{name.replace('-', '_')}"}
        group.add_argument(*sorted(spellings), **how)  # type: ignore[arg-type]

    option("nproc-per-node", default="1", metavar="N", help="ranks per node: a number, cpu, gpu")
    option("nnodes", default="1", metavar="N", help="nodes that hold ranks; of MIN:MAX, MAX")
    option("log-dir", default="", metavar="DIR", help="workers' logs (default: in the run dir)")
    group.add_argument("-t", "--tee", default="3", metavar="N", help="0: no workers' lines here")
    option("rdzv-id", default="", metavar="NAME", help="the job's name, if --job is not given")
    option("local-addr", default="", help=argparse.SUPPRESS)
    group.add_argument("-m", "--module", action="store_true", help="the script is a module")
    option("no-python", action="store_true", help=argparse.SUPPRESS)
    option("run-path", action="store_true", help=argparse.SUPPRESS)
    option("standalone", action="store_true", help=argparse.SUPPRESS)
    option("virtual-local-rank", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("-r", dest="redirects", default=None, help=argparse.SUPPRESS)
    for name in IGNORED:
        option(name, default=None, help=argparse.SUPPRESS)


def _own_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Keepstep's own")
    option = group.add_argument
    option("--spares", type=int, default=0, metavar="N", help="warm standbys to keep (default 0)")
    option("--priority", type=int, default=0, metavar="N", help="higher jobs get spares first")
    option(
        "--standby-level",
        type=int,
        choices=(1, 2),
        default=1,
        help="1: imports done; 2: also the script's declared build()",
    )
    option("--preload", default="", metavar="MODULES", help="imported before workers are forked")
    option(
        "--hold-seconds", type=float, default=None, metavar="S", help="wait for a spare, then save"
    )
    option(
        "--policy",
        type=Path,
        metavar="TOML",
        help="what to do about faults; see `keepstep admin policy show`",
    )
    option("--terms", type=Path, metavar="TOML", help="the guarantee it runs under, by digest")
    option(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="a variable for the workers on all nodes; no secrets: it is recorded",
    )
    option(
        "--check-steps",
        type=int,
        default=0,
        metavar="K",
        help="look for corrupt state every K steps; 1 keeps the run exact (default: never)",
    )
    option("--project", default="", metavar="NAME", help="whose job it is; see docs/security.md")
    option("--job", default="", metavar="NAME", help="the job's name (default: from the script)")
    option("--run-dir", type=Path, metavar="DIR", help=f"journal and logs (default ./{RUNS}/JOB)")
    option("--state-dir", default="", metavar="DIR", help="steps.jsonl, saved boundaries (run dir)")
    option("--orchestrator", default="", metavar="URL", help="join this one instead of an own one")
    option("--token-file", type=Path, metavar="FILE", help="the token of that orchestrator")
    option("--node", default="", metavar="NAME", help="this node's name (default: the host's)")
    option("--address", default="", metavar="IP", help="where other nodes reach this one")
    option("--slots", type=int, metavar="N", help="processes this node may hold")
    option(
        "--label",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="what this node shares with others: rack, switch, nvlink_domain",
    )
    option("--config", type=Path, metavar="TOML", help="settings; see python -m keepstep.config")


def run(asked: argparse.Namespace) -> int:
    launch = settle(asked, os.environ, Path.cwd())
    for note in launch.notes:
        print(f"keepstep: {note}", file=sys.stderr)
    config = load(LauncherConfig, launch.config_file, os.environ)
    plan = ClusterPlan(
        join=launch.orchestrator,
        token_file=launch.token_file,
        config_file=launch.config_file,
        launcher=config,
    )
    cluster = LocalCluster(launch.run_dir, [launch.node], plan)
    return follow_to_the_end(cluster, launch.spec, config)


def settle(asked: argparse.Namespace, environ: Mapping[str, str], here: Path) -> Launch:
    """What a command line means. Raises ConfigError, which says the fix. Starts nothing."""
    notes = _notes(asked)
    ranks = ranks_per_node(asked.nproc_per_node, environ)
    nodes, more = node_count(asked.nnodes)
    notes += more
    joining = bool(asked.orchestrator)
    if nodes > 1 and not joining:
        raise ConfigError(
            f"--nnodes {nodes} needs an orchestrator that all nodes can reach: start one with "
            "`python -m keepstep.orchestrator --listen HOST:PORT …`, then give --orchestrator "
            "http://HOST:PORT and --token-file FILE on each node"
        )
    if joining and not (asked.job or asked.rdzv_id):
        raise ConfigError("give --job NAME, the same on each node, so that they join one job")
    token_file = _token_file(asked, environ) if joining else None
    job = asked.job or asked.rdzv_id or _name_for(asked.script)
    run_dir = (asked.run_dir or here / RUNS / job).resolve()
    spec = _spec(asked, JobId(job), nodes, ranks, run_dir, here)
    variables = _environment(asked.env, environ)
    if asked.check_steps:
        variables[CHECK_STEPS] = str(asked.check_steps)
    terms = guarantee.load(asked.terms)[1] if asked.terms else ""
    spec = replace(spec, environment=variables, terms=terms)
    name = asked.node or re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
    address = asked.address or asked.local_addr or "127.0.0.1"
    if joining and not (asked.address or asked.local_addr):
        address = address_towards(asked.orchestrator)
        if address.startswith("127."):
            notes.append(
                f"only nodes on this machine reach {address}; for others give --address IP"
            )
    slots = asked.slots or (ranks if joining else ranks + asked.spares)
    node = NodePlan(name, slots, address, labels=labels_of(asked.label), speaks=spec.tee)
    return Launch(spec, node, run_dir, asked.orchestrator, token_file, asked.config, tuple(notes))


def _environment(told: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Variables by name, with their values here or the given ones."""
    found = {}
    for text in told:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or not (equals or name in environ):
            raise ConfigError(f"--env {text!r} has no value; write NAME=VALUE, or set it here")
        found[name] = value if equals else environ[name]
    return found


def labels_of(told: Sequence[str]) -> dict[str, str]:
    labels = {}
    for text in told:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise ConfigError(f"--label {text!r} has no value; write for example rack=r12")
        labels[key] = value
    return labels


def _notes(asked: argparse.Namespace) -> list[str]:
    if asked.no_python:
        raise ConfigError(
            "--no-python is not supported: workers are forked from a warm interpreter; give the "
            "Python script itself, or -m module"
        )
    if asked.virtual_local_rank:
        raise ConfigError("--virtual-local-rank is not supported; use LOCAL_RANK for the device")
    if asked.spares < 0:
        raise ConfigError(f"--spares is {asked.spares}; give 0 or more")
    given = [f"--{n}" for n in IGNORED if getattr(asked, n.replace("-", "_")) is not None]
    given += [f"--{n}" for n in ("standalone", "run-path") if getattr(asked, n.replace("-", "_"))]
    if not given:
        return []
    return [f"{', '.join(given)}: not needed here, ignored"]


def ranks_per_node(text: str, environ: Mapping[str, str]) -> int:
    """torchrun's --nproc-per-node: a number, cpu, gpu or auto."""
    if text.isdigit() and int(text) > 0:
        return int(text)
    gpus = _gpu_count(environ)
    if text == "cpu" or (text == "auto" and not gpus):
        return os.cpu_count() or 1
    if text in ("gpu", "auto") and gpus:
        return gpus
    raise ConfigError(f"--nproc-per-node is {text!r}; give a number above 0, cpu, gpu or auto")


def _gpu_count(environ: Mapping[str, str]) -> int:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip()])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def node_count(text: str) -> tuple[int, list[str]]:
    """torchrun's --nnodes: N, or MIN:MAX. A live job does not shrink, so MAX is meant."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise ConfigError(f"--nnodes is {text!r}; give N, or MIN:MAX")
    if low == high:
        return high, []
    return high, [f"--nnodes {text}: {high} nodes are used; lost ranks move to spares instead"]


def _token_file(asked: argparse.Namespace, environ: Mapping[str, str]) -> Path:
    named = asked.token_file or environ.get("KEEPSTEP_TOKEN_FILE")
    if not named:
        raise ConfigError("--orchestrator needs --token-file FILE (or $KEEPSTEP_TOKEN_FILE)")
    read_token(Path(named))
    return Path(named)


def _spec(
    asked: argparse.Namespace, job: JobId, nodes: int, ranks: int, run_dir: Path, here: Path
) -> JobSpec:
    script = asked.script
    if not asked.module:
        if not (here / script).is_file():
            raise ConfigError(
                f"there is no script {script}; check the path, or use -m for a module"
            )
        script = str((here / script).resolve())
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", job):
        raise ConfigError(f"{job!r} cannot be a job's name; use letters, digits, dots and dashes")
    explicit = {} if asked.hold_seconds is None else {"hold_seconds_max": asked.hold_seconds}
    return JobSpec(
        job=job,
        script=script,
        arguments=tuple(_without_separator(asked.arguments)),
        module=asked.module,
        nodes=nodes,
        ranks_per_node=ranks,
        spares=asked.spares,
        priority=asked.priority,
        standby_level=asked.standby_level,
        preload=tuple(name for name in asked.preload.split(",") if name),
        directory=str(here),
        log_directory=str((here / asked.log_dir).resolve() if asked.log_dir else run_dir / "logs"),
        state_directory=str(
            (here / asked.state_dir).resolve() if asked.state_dir else run_dir / "state"
        ),
        tee=asked.tee not in ("0", ""),
        project=asked.project,
        policy=policy_file.read(asked.policy, job, explicit),
    )


def _without_separator(arguments: Sequence[str]) -> Sequence[str]:
    return arguments[1:] if arguments[:1] == ["--"] else arguments


def _name_for(script: str) -> str:
    stem = re.sub(r"[^A-Za-z0-9_-]", "-", Path(script).stem).strip("-_") or "job"
    return f"{stem[:48]}-{secrets.token_hex(3)}"


def address_towards(url: str) -> str:
    """Our address on the way to the orchestrator: whoever reaches that can reach us."""
    first = url.split(",")[0].strip()
    parts = urlsplit(first if "//" in first else f"//{first}")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Nothing is sent: the kernel only looks up the route.
            probe.connect((parts.hostname or "", parts.port or 1))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"no way to {url} is known ({error.strerror or error}); check --orchestrator, or give "
            "this node's --address IP"
        ) from error
