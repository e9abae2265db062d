"""The orchestrator's process: `python -m keepstep.orchestrator --journal … --token-file …`.

It prints nothing but its log. It ends with 0 when told to leave, with 3 when another leader has
taken over (do not restart it then), and with 2 when it was started wrongly. Where the journal is a
database that another orchestrator has a lease of, it waits until that lease ends.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import signal
import ssl
import sys
from pathlib import Path

from keepstep import codec, logs, tls
from keepstep.clock import RealClock
from keepstep.config import OrchestratorConfig, load
from keepstep.errors import ConfigError, Deposed, Transient
from keepstep.orchestrator import alerts
from keepstep.orchestrator.access import Gate
from keepstep.orchestrator.api import Api
from keepstep.orchestrator.exporting import signer_of
from keepstep.orchestrator.http import HttpServer
from keepstep.orchestrator.journal import Journal
from keepstep.orchestrator.journals import open_journal, refuse_password
from keepstep.orchestrator.run import Orchestrator
from keepstep.orchestrator.tokens import Tokens

EXIT_USAGE = 2
EXIT_DEPOSED = 3


def main(arguments: list[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    _allow_many_files()
    try:
        config = load(OrchestratorConfig, asked.config, os.environ)
        logs.configure(asked.log_format or config.log_format)
        token = _token(asked.token_file)
        mapping = asked.alerts or config.alerts_file
        rules = alerts.load(Path(mapping)) if mapping else {}
        return asyncio.run(_lead(asked, config, token, rules))
    except ConfigError as error:
        print(f"keepstep orchestrator: {error}", file=sys.stderr)
        return EXIT_USAGE
    except Deposed as error:
        print(f"keepstep orchestrator: {error}", file=sys.stderr)
        return EXIT_DEPOSED


async def _lead(
    asked: argparse.Namespace, config: OrchestratorConfig, token: str, rules: alerts.Rules
) -> int:
    refuse_password(asked.journal)
    gate, secure = _gate(config, token), _secure(config)
    where = asked.journal or config.journal
    journal = open_journal(where, config)
    signer = signer_of(where, config)
    orchestrator = await _take_over(journal, config, token)
    server = HttpServer(
        Api(orchestrator, journal, gate, rules, log, signer).handle,
        connections_max=config.connections_max,
    )
    host, wanted = _host_and_port(asked.listen)
    port = await _listen(server, (host, wanted), asked.port_file, secure)
    log("listening", host=host, port=port, term=orchestrator.term, tls=secure is not None)
    leading = asyncio.create_task(orchestrator.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leading.cancel)
    try:
        await leading
    except asyncio.CancelledError:
        log("leaving", why="asked to by a signal")
    finally:
        await server.close()
        journal.close()
    return 0


async def _take_over(journal: Journal, config: OrchestratorConfig, token: str) -> Orchestrator:
    """Lead as soon as the journal lets us: its database may be away, or another may have a lease.

    Nobody is listened to before: agents go to the one that leads.
    """
    told = ""
    while True:
        try:
            return Orchestrator(journal, config, RealClock(), token, log)
        except Transient as error:
            if str(error) != told:
                told = str(error)
                log("waiting", why=told)
            seconds = error.retry_after_seconds
        await asyncio.sleep(seconds)


def _gate(config: OrchestratorConfig, token: str) -> Gate:
    return Gate(
        Tokens(token, Path(config.tokens_file) if config.tokens_file else None),
        requests_per_second_max=config.requests_per_second_max,
        event_streams_max=config.event_streams_max,
        problem=lambda why: log("tokens.unusable", why=why),
    )


def _secure(config: OrchestratorConfig) -> ssl.SSLContext | None:
    if not config.tls_directory:
        return None
    tls.small_buffers()
    return tls.server(
        Path(config.tls_directory),
        everybody=config.tls_certificates == "all",
        problem=lambda why: log("certificate.unusable", why=why),
    )


async def _listen(
    server: HttpServer,
    where: tuple[str, int],
    port_file: Path | None,
    secure: ssl.SSLContext | None,
) -> int:
    """Any free port means: the one we had before, if it is still free, for the agents know it."""
    host, wanted = where
    port = 0
    if wanted == 0 and port_file is not None and port_file.exists():
        before = port_file.read_text(encoding="utf-8").strip()
        try:
            port = await server.listen(host, int(before), secure)
        except (OSError, ValueError) as error:
            log("port.lost", port=before, why=str(error))
    if not port:
        try:
            port = await server.listen(host, wanted, secure)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{wanted}: {error.strerror}") from error
    if port_file is not None:
        fresh = port_file.with_suffix(".new")
        fresh.write_text(f"{port}\n", encoding="utf-8")
        fresh.replace(port_file)
    return port


def log(event: str, **facts: object) -> None:
    """One line per event: its name, then what is known about it, as JSON."""
    facts = {name: value for name, value in facts.items() if value not in (None, "", [], {})}
    line = f"{event} {codec.dumps(facts).decode()}"
    logs.tell("keepstep.orchestrator", logging.INFO, event, line, facts)


def _allow_many_files() -> None:
    """One connection per agent; what a shell allows by default is made for other programs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _token(path: Path) -> str:
    try:
        token = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"cannot read the token file {path}: {error.strerror}") from error
    if len(token) < 16:
        raise ConfigError(f"the token in {path} is too short; write at least 16 random characters")
    return token


def _host_and_port(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit():
        raise ConfigError(f"--listen is {listen!r}; give HOST:PORT, with port 0 for any free one")
    return host.strip("[]"), int(port)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m keepstep.orchestrator")
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    parser.add_argument(
        "--journal",
        default="",
        metavar="PLACE",
        help="a file, or postgresql://HOST/DATABASE (default: the setting `journal`)",
    )
    parser.add_argument("--token-file", type=Path, required=True, metavar="FILE")
    parser.add_argument("--port-file", type=Path, metavar="FILE", help="written once we listen")
    parser.add_argument("--config", type=Path, metavar="TOML")
    parser.add_argument("--alerts", metavar="TOML", help="which alerts mean which taints")
    parser.add_argument("--log-format", choices=logs.FORMATS, help="json: an object per line")
    return parser


if __name__ == "__main__":
    sys.exit(main())
