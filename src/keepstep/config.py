"""One config object per process, read once: defaults, then a TOML file, then KEEPSTEP_* variables.

    [orchestrator]                     KEEPSTEP_ORCHESTRATOR_SILENT_SECONDS_MAX=5
    silent_seconds_max = 5.0

Each process reads its own section. A key that nobody knows is refused, with the nearest one that
is known; timeouts that only make sense together are checked together, here, so that a bad pair is
found when a process starts and not when a node dies. `python -m keepstep.config` prints every
setting with its default and its reason.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import os
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_type_hints

from keepstep.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OrchestratorConfig:
    """Settings of the orchestrator."""

    SECTION: ClassVar[str] = "orchestrator"

    silent_seconds_max: float = 3.5
    """A node that says nothing for this long is lost, unless the policy of a job that has something
    there asks for less. Seven heartbeats up to 1,000 nodes, two from 3,000 on: a loaded machine
    misses a few, and 5 s is what detection may take in all."""
    pulse_seconds: float = 1.0
    """Our own heartbeat to each agent. An agent that hears nothing for 4 s looks for another
    orchestrator; its ranks train on, so half as often as theirs is enough."""
    tick_seconds: float = 1.0
    """How often budgets are looked at while nothing is going on; with a pulse, in one wake-up. At
    least four times per lease, and once a second on a file: it may have another leader."""
    tick_busy_seconds: float = 0.1
    """The longest time between two looks while some budget is running. The brain says when its
    next deadline is, so a look is on time; this is the net below that."""
    late_seconds_max: float = 0.5
    """If our own loop was late by more, every node's deadline moves back by as much: a starved
    orchestrator must suspect itself before it suspects the cluster."""
    hello_seconds_max: float = 5.0
    """A connection that has not said who it is by then is closed."""
    journal: str = ""
    """Where the journal is, unless --journal says it: a file, or postgresql://USER@HOST/DATABASE,
    with one database per cluster. A password belongs here, or in libpq's own PGPASSFILE: a command
    line shows in `ps`. `keepstep run` takes a file in its run directory if there is none."""
    journal_holder: str = ""
    """Under which name the lease of a journal in PostgreSQL is taken; empty: the URL under which
    this orchestrator is reached. One that comes back under the same name need not wait for its own
    lease to end. Each orchestrator of a cluster needs a name of its own."""
    lease_seconds: float = 2.0
    """How long nobody else may begin a term after this leader's last write to a journal in
    PostgreSQL, on the database's clock. An idle leader writes every quarter of it. It is most
    of what a takeover takes when a leader dies. A leader that was merely slow keeps its term for as
    long."""
    advertise: str = ""
    """Under which URL agents and operators reach this orchestrator, for the other ones to say;
    empty: where it listens, by the host's name if that is everywhere (0.0.0.0)."""
    journal_synchronous: str = "full"
    """full: an order leaves only after its step is on the platter (0.2 ms on an idle disk, 10 ms
    at p95 on a starved machine). normal: survives a killed orchestrator but not a power cut, which
    is enough where the cluster is this one machine: `keepstep run` on its own chooses it. For a
    file; PostgreSQL has settings of its own."""
    snapshot_entries: int = 1000
    """Events between two snapshots: a restart replays at most about this many."""
    batch_events_max: int = 256
    """Events that share one write to the journal when many wait; one alone is handled at once."""
    inbox_events_max: int = 20_000
    """Events that may wait for the brain; beyond it the agents' streams are read more slowly.
    Room for one from every agent of the largest cluster."""
    outbox_bytes_max: int = 32 * 1024 * 1024
    """What may wait for one agent; one that falls further behind is dropped, reconnects, and is
    told again what it needs. The largest order of a job of 16,384 ranks fits thirty times."""
    connections_max: int = 16_384
    """Open connections: 12,500 agents and some operators. Beyond it a client is told to wait."""
    migrations_max: int = 32
    """Jobs that may be moved at once. A switch that fails hits many jobs together; more at a time
    share the same fabric, storage and spares. The others wait in the order in which they came."""
    forget_nodes_seconds: float = 7 * 86_400.0
    """A node that has left or was lost is forgotten after so long: pods come back under other
    names, and old ones would stay in every snapshot. Not one that a job refers to, or that is
    drained or tainted. Its faults are forgiven after a week, too."""
    history_entries_max: int = 1000
    """Recent decisions kept in memory for a client of /v1/events that reconnects."""
    account_key_file: str = ""
    """What signs the jobs' exported chains: 64 hexadecimal digits, made by `keepstep admin keys
    --new`. Empty: `account.key` beside a journal that is a file, made with it; a journal in a
    database needs this setting, the same key on every orchestrator, or exports are not signed."""
    tls_directory: str = ""
    """Where this orchestrator's tls.crt, tls.key and ca.crt are; renewed files serve from the next
    handshake on. Then it speaks https:// only, and an agent's certificate must name its node.
    Without it all is plain text: for loopback, and for networks that are encrypted below."""
    tls_certificates: str = "agents"
    """Who must show a certificate: agents, or all. Alertmanager, browsers and the probes of
    Kubernetes often have none; what they may do is their token's business."""
    tokens_file: str = ""
    """Tokens with roles and projects, by digest: made by `keepstep admin token new`, read again
    when it changes. The cluster's own token (--token-file) may do everything in any case."""
    requests_per_second_max: float = 2000.0
    """Requests that one token may make, on average; twice as many at once. Beyond it: 429. All the
    launchers of a large job share a token, and ask within a moment when something was decided."""
    project_open_jobs_max: int = 1000
    """Jobs that tokens of one project may have open: waiting, running or parked. Beyond it: 429.
    Each is in every snapshot, and in every look through the open jobs."""
    open_jobs_max: int = 10_000
    """The same for all projects together, and for tokens without one."""
    event_streams_max: int = 4096
    """Clients of /v1/events at a time: one launcher per node of a job, `watch`, pages. Beyond it:
    429. Each holds a connection and a task."""
    alerts_file: str = ""
    """Which alerts of Alertmanager mean which taints: a TOML file, read and checked at the start;
    see docs/examples/alerts.toml. Without one no alert means anything here."""
    log_format: str = "text"
    """text: a line for people. json: one object per line, for a collector of logs."""

    def __post_init__(self) -> None:
        need(self.tls_certificates in ("agents", "all"), "tls_certificates: agents or all")
        need(self.journal_synchronous in ("full", "normal"), "journal_synchronous: full or normal")
        need(self.log_format in ("text", "json"), "log_format: text or json")
        ordered(self, "tick_busy_seconds", "tick_seconds")
        ordered(self, "late_seconds_max", "silent_seconds_max")
        need(
            3 * self.pulse_seconds <= self.silent_seconds_max,
            f"pulse_seconds ({self.pulse_seconds}) must fit three times into silent_seconds_max "
            f"({self.silent_seconds_max}): one lost message must not look like a lost node",
        )
        positive(self)


@dataclass(frozen=True, slots=True)
class LauncherConfig:
    """Settings of `keepstep run`, which starts and supervises the other processes."""

    SECTION: ClassVar[str] = "launcher"

    ready_seconds_max: float = 30.0
    """From the start of an orchestrator or agent to its first answer, on a loaded machine."""
    restart_seconds_min: float = 0.05
    """The wait before the second restart in a row; the first is at once. Doubled each time."""
    restart_seconds_max: float = 5.0
    """The longest wait between two restarts of a child that keeps dying."""
    restarts_max: int = 50
    """Restarts within one minute after which the launcher gives up on a child and says so."""
    stop_seconds_max: float = 10.0
    """How long a child may take to leave after SIGTERM before it is killed."""
    unreachable_seconds_max: float = 60.0
    """How long the orchestrator may not answer while no worker lives here. With workers it is tried
    for ever: training needs no orchestrator."""

    def __post_init__(self) -> None:
        positive(self)
        ordered(self, "restart_seconds_min", "restart_seconds_max")
        ordered(self, "restart_seconds_max", "ready_seconds_max")


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Settings of the agents, beside what their command line says of each node."""

    SECTION: ClassVar[str] = "agent"

    health_program: str = ""
    """A command of yours that says whether its node is well: exit code 0 well, 1 avoid, 2 leave,
    3 imminent. It is split as a shell would, and run without one."""
    health_seconds: float = 30.0
    """From one start of it to the next. A device that announces its end does so minutes before."""
    health_seconds_max: float = 20.0
    """One that runs longer is killed with its children, and has said nothing: a probe that hangs
    proves no fault of the devices that train."""
    tls_directory: str = ""
    """Where this node's tls.crt, tls.key and ca.crt are, for orchestrators at https://; else
    $KEEPSTEP_TLS_DIRECTORY. Renewed files are taken at the next connect."""
    metrics_listen: str = ""
    """HOST:PORT where this agent answers GET /metrics, for Prometheus; empty: nowhere. A port alone
    is of this machine only. It asks for no token: it tells numbers, and the node's name."""
    log_format: str = "text"
    """text: a line for people. json: one object per line, for a collector of logs."""

    def __post_init__(self) -> None:
        positive(self)
        need(self.log_format in ("text", "json"), "log_format: text or json")
        self.health_command()

    def health_command(self) -> tuple[str, ...]:
        """The program and its arguments; empty without one."""
        try:
            words = tuple(shlex.split(self.health_program))
        except ValueError as error:
            raise ConfigError(f"health_program: {error}; close each quotation mark") from error
        need(all("\0" not in word for word in words), "health_program: leave out the zero byte")
        return words


C = TypeVar("C", OrchestratorConfig, LauncherConfig, AgentSettings)
SECTIONS: tuple[type[Any], ...] = (OrchestratorConfig, LauncherConfig, AgentSettings)


def load(kind: type[C], path: Path | None, environ: Mapping[str, str]) -> C:
    """The settings of one process. Raises ConfigError, which says the fix."""
    values: dict[str, Any] = {}
    if path is not None:
        values.update(_from_file(kind, path))
    values.update(_from_environ(kind, environ))
    return kind(**values)


def _from_file(kind: type[C], path: Path) -> dict[str, Any]:
    document = read_toml(path, "--config")
    known = [section.SECTION for section in SECTIONS]
    for section in document:
        if section not in known:
            raise ConfigError(f"{path}: unknown section [{section}]; {nearest(section, known)}")
    table = document.get(kind.SECTION, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {kind.SECTION} is a section: write [{kind.SECTION}]")
    return {key: checked(kind, key, value, str(path)) for key, value in table.items()}


def read_toml(path: Path, option: str) -> dict[str, Any]:
    """A TOML file that was named by a command line's option."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; check {option}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _from_environ(kind: type[C], environ: Mapping[str, str]) -> dict[str, Any]:
    prefix = f"KEEPSTEP_{kind.SECTION.upper()}_"
    found: dict[str, Any] = {}
    for name, text in environ.items():
        if name.startswith(prefix):
            key = name.removeprefix(prefix).lower()
            found[key] = checked(kind, key, text, name)
    return found


def checked(kind: type[Any], key: str, value: object, where: str) -> object:
    """The value in its field's type. Text from the environment is read as the field's type."""
    known = [field.name for field in dataclasses.fields(kind)]
    if key not in known:
        raise ConfigError(f"{where}: unknown setting {key!r}; {nearest(key, known)}")
    wanted: Any = get_type_hints(kind)[key]
    if issubclass(wanted, Enum):
        return _choice(wanted, key, value, where)
    if wanted is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{where}: {key} is {value!r}; give true or false")
        return value
    if isinstance(value, str):
        try:
            return wanted(value)
        except ValueError:
            name = wanted.__name__
            raise ConfigError(f"{where}: {key} is {value!r}; give a number ({name})") from None
    fits = isinstance(value, int | float) and not isinstance(value, bool) and wanted is not str
    if not fits or (wanted is int and isinstance(value, float)):
        raise ConfigError(f"{where}: {key} is {value!r}; give {wanted.__name__}")
    return wanted(value)


def _choice(wanted: type[Enum], key: str, value: object, where: str) -> Enum:
    known = [str(member.value) for member in wanted]
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"{where}: {key} is {value!r}; give one of: {', '.join(known)}")
    return wanted(value)


def nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(sorted(known))}"


def need(holds: bool, fix: str) -> None:
    if not holds:
        raise ConfigError(fix)


def positive(config: object) -> None:
    assert dataclasses.is_dataclass(config)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            need(value > 0, f"{field.name} is {value}; it must be above zero")


def ordered(config: object, smaller: str, larger: str) -> None:
    low, high = getattr(config, smaller), getattr(config, larger)
    need(low <= high, f"{smaller} ({low}) must not be above {larger} ({high})")


def explanations(kind: type[Any]) -> dict[str, str]:
    """Each field's reason, read from the text under it in this file."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def explain() -> str:
    """Every setting as a commented TOML file."""
    lines: list[str] = []
    for kind in SECTIONS:
        reasons = explanations(kind)
        lines += [f"# {kind.__doc__}", f"[{kind.SECTION}]", ""]
        for field in dataclasses.fields(kind):
            lines += commented(field.name, field.default, reasons[field.name])
    return "\n".join(lines)


def commented(name: str, value: object, reason: str) -> list[str]:
    """One setting with its reason, as lines of TOML."""
    return [*(f"# {line}" for line in textwrap.wrap(reason, 96)), f"{name} = {toml(value)}", ""]


def toml(value: object) -> str:
    """A plain value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    sys.stdout.write(explain() + os.linesep)
