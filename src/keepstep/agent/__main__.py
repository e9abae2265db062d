"""`python -m keepstep.agent`: the agent of one node, as a process.

It ends on SIGTERM and SIGINT and leaves its workers training; started again with the same room, it
adopts them. To end everything that lives in a room, see keepstep.agent.room.clear.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from keepstep import logs, open_files
from keepstep.agent.room import clear
from keepstep.agent.run import AgentConfig, run
from keepstep.agent.stream import is_secure, parse_endpoints
from keepstep.config import AgentSettings, load
from keepstep.errors import ConfigError
from keepstep.model import NodeId


def main() -> int:
    try:
        config = parse(sys.argv[1:], dict(os.environ))
        logs.configure(config.settings.log_format)
    except ConfigError as error:
        return _wrong(error)
    # For the workers above all, who inherit it: a recovery needs several times their usual files.
    open_files.allow_many()
    try:
        asyncio.run(_until_told(config))
    except ConfigError as error:
        return _wrong(error)
    except ExceptionGroup as group:
        wrong, others = group.split(ConfigError)
        if wrong is None or others is not None:
            raise
        # Refused for good, with nothing that lives here: nothing is left behind either.
        clear(config.room)
        return _wrong(_first(wrong))
    return 0


def _wrong(error: BaseException) -> int:
    print(f"keepstep agent: {error}", file=sys.stderr)
    return 2


def _first(group: BaseExceptionGroup[ConfigError]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def parse(arguments: list[str], environment: dict[str, str]) -> AgentConfig:
    """The command line, with the token from the environment where it does not show in `ps`."""
    parser = argparse.ArgumentParser(prog="python -m keepstep.agent")
    parser.add_argument("--node", required=True, help="this node's name, unique in the cluster")
    parser.add_argument("--slots", type=int, default=1, help="workers that fit here")
    parser.add_argument("--orchestrator", required=True, help="https://HOST:PORT[,https://…]")
    parser.add_argument("--address", default="127.0.0.1", help="where other nodes reach this one")
    parser.add_argument("--room", type=Path, required=True, help="a directory on tmpfs")
    parser.add_argument("--token", default=environment.get("KEEPSTEP_TOKEN", ""))
    parser.add_argument("--labels", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--no-store", action="store_true", help="host no rendezvous store")
    parser.add_argument("--config", type=Path, metavar="TOML", help="settings: section [agent]")
    parser.add_argument("--health-program", metavar="COMMAND", help="says whether the node is well")
    parser.add_argument("--metrics-listen", metavar="HOST:PORT", help="answer GET /metrics there")
    parser.add_argument("--log-format", choices=logs.FORMATS, help="json: an object per line")
    told = parser.parse_args(arguments)
    settings = load(AgentSettings, told.config, environment)
    asked = ("health_program", "metrics_listen", "log_format")
    given = {name: getattr(told, name) for name in asked if getattr(told, name) is not None}
    settings = replace(settings, **given)
    secure = is_secure(told.orchestrator)
    directory = settings.tls_directory or environment.get("KEEPSTEP_TLS_DIRECTORY", "")
    if secure and not directory:
        raise ConfigError(
            "https:// needs this node's certificate: set tls_directory in [agent], or "
            "$KEEPSTEP_TLS_DIRECTORY, to a directory with tls.crt, tls.key and ca.crt"
        )
    labels = {}
    for label in ",".join(told.labels).split(",") if told.labels else ():
        key, equals, value = label.partition("=")
        if not equals:
            raise ConfigError(f"--labels {label!r} has no value; write {label}=VALUE")
        labels[key] = value
    return AgentConfig(
        node=NodeId(told.node),
        slots=told.slots,
        orchestrators=parse_endpoints(told.orchestrator),
        address=told.address,
        room=told.room.absolute(),
        token=told.token,
        labels=labels,
        host_store=not told.no_store,
        settings=settings,
        tls_directory=Path(directory).absolute() if secure else None,
    )


async def _until_told(config: AgentConfig) -> None:
    task = asyncio.ensure_future(run(config))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


if __name__ == "__main__":
    sys.exit(main())
