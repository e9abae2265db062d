"""The orchestrator's process: `python -m keepstep.orchestrator --journal … --token-file …`.

It prints nothing but its log. It ends with 0 when told to leave, with 2 when it was started
wrongly, and with 1 when it cannot go on. Where the journal is a database it follows whoever leads,
leads when nobody does, and follows again when it was deposed: see follow.py. Where it is a file, it
ends with 3 when another leader has taken over (do not restart it then). A start that cannot lead,
for its port is taken or the journal is a newer release's, leaves the one that leads alone.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import ssl
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from keepstep import codec, logs, open_files, tls
from keepstep.clock import RealClock
from keepstep.config import OrchestratorConfig, load
from keepstep.errors import Alone, Behind, ConfigError, Deposed, Permanent, Transient, of_disk
from keepstep.ledger.signing import Signer
from keepstep.model import Term
from keepstep.orchestrator import alerts, lease, replica
from keepstep.orchestrator.access import Gate
from keepstep.orchestrator.api import Api
from keepstep.orchestrator.exporting import signer_of
from keepstep.orchestrator.follow import Follower, elsewhere, reached_at
from keepstep.orchestrator.http import Handler, HttpServer, Reply, Request, json_response
from keepstep.orchestrator.journal import Journal
from keepstep.orchestrator.journal_postgres import PostgresJournal
from keepstep.orchestrator.journals import open_journal, refuse_password
from keepstep.orchestrator.run import Orchestrator
from keepstep.orchestrator.stepping_down import OTHERS_SECONDS, Past
from keepstep.orchestrator.tokens import Tokens

T = TypeVar("T")
EXIT_BROKEN = 1
EXIT_USAGE = 2
EXIT_DEPOSED = 3
SWITCH_SECONDS = 0.001
"""How long a thread keeps the interpreter from our loop: one that reads along in the journal must
not make every turn of a handshake 5 ms longer."""
FILES_BESIDES = 64
"""Open files that are no connection: the journal, logs, the loop's own."""


def main(arguments: list[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    try:
        config = load(OrchestratorConfig, asked.config, os.environ)
        logs.configure(asked.log_format or config.log_format)
        _allow_many_files(config.connections_max)
        sys.setswitchinterval(SWITCH_SECONDS)
        token = _token(asked.token_file)
        mapping = asked.alerts or config.alerts_file
        rules = alerts.load(Path(mapping)) if mapping else {}
        return asyncio.run(_serve(asked, config, token, rules))
    except ConfigError as error:
        print(f"keepstep orchestrator: {error}", file=sys.stderr)
        return EXIT_USAGE
    except Deposed as error:
        print(f"keepstep orchestrator: {error}", file=sys.stderr)
        return EXIT_DEPOSED
    except Permanent as error:
        print(f"keepstep orchestrator: {error}", file=sys.stderr)
        return EXIT_BROKEN


async def _serve(
    asked: argparse.Namespace, config: OrchestratorConfig, token: str, rules: alerts.Rules
) -> int:
    refuse_password(asked.journal)
    gate, secure = _gate(config, token), _secure(config)
    where = asked.journal or config.journal
    door, waits = Door(), Waits()
    server = HttpServer(door.handle, connections_max=config.connections_max)
    host, wanted = _host_and_port(asked.listen)
    journal: Journal | None = None
    try:
        # Before anybody is deposed: who cannot listen cannot lead. And whoever asks how we are has
        # an answer while a full disk is waited for.
        port = await _listen(server, (host, wanted), asked.port_file, secure)
        show_port = await waits.until(lambda: _written_port(asked.port_file, port))
        journal = await waits.until(lambda: open_journal(where, config))
        signer = await waits.until(lambda: signer_of(where, config))
        place = Place(journal, config, token, gate, rules, signer)

        def tell(term: Term | None = None) -> None:
            show_port()
            log("listening", host=host, port=port, term=term, tls=secure is not None)

        if isinstance(journal, PostgresJournal):
            tell()
            endpoint = reached_at(config.advertise, host, port, secure=secure is not None)
            work = _follow_and_lead(place, journal, door, server, endpoint)
        else:
            # Nobody else is on a file: whoever is told of us finds a leader.
            work = _lead_alone(place, door, server, tell)
        await _until_told(work)
    finally:
        await server.close()
        if journal is not None:
            journal.close()
    return 0


async def _until_told(work: Coroutine[Any, Any, None]) -> None:
    """Until a signal asks us to leave, or the work itself ends with an error."""
    working = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, working.cancel)
    try:
        await working
    except asyncio.CancelledError:
        log("leaving", why="asked to by a signal")


@dataclass(frozen=True, slots=True)
class Place:
    """What an orchestrator is made of, whether it leads or follows."""

    journal: Journal
    config: OrchestratorConfig
    token: str
    gate: Gate
    rules: alerts.Rules
    signer: Signer | None
    past: Past = field(default_factory=Past)

    def lead(self, door: Door, begun: replica.Begun) -> Orchestrator:
        """A term has begun: from now on its leader answers at the door."""
        leader = Orchestrator(self.journal, self.config, RealClock(), self.token, log, begun)
        leader.leaving.past = self.past
        api = Api(leader, self.journal, self.gate, self.rules, log, self.signer)
        door.handle_by(api.handle)
        return leader


class Door:
    """Who answers requests at the moment: the leader's interface, or the follower's."""

    def __init__(self) -> None:
        self._handler: Handler | None = None

    def handle_by(self, handler: Handler | None) -> None:
        self._handler = handler

    async def handle(self, request: Request) -> Reply:
        if self._handler is None:
            if request.path == "/healthz" and request.method == "GET":
                # It waits for its journal: nobody is to kill it for that.
                return json_response({"status": "following", "term": 0, "leader": None})
            return elsewhere("", "it is only starting")
        return await self._handler(request)


class Waits:
    """What a journal that is away is waited for with: one line per reason."""

    def __init__(self) -> None:
        self._told = ""

    async def out(self, error: Transient) -> None:
        if str(error) != self._told:
            self._told = str(error)
            log("waiting", why=self._told)
        await asyncio.sleep(error.retry_after_seconds)

    async def until(self, call: Callable[[], T]) -> T:
        """A file on a full disk is waited for, as a database is."""
        while True:
            try:
                return call()
            except Transient as error:
                await self.out(error)


async def _lead_alone(
    place: Place, door: Door, server: HttpServer, tell: Callable[[Term], None]
) -> None:
    """Lead until deposed, and tell so once. A journal that was put back to an earlier time gets a
    new term; one on a full disk is waited for."""
    above, waits, told = Term(0), Waits(), False
    while True:
        try:
            leader = place.lead(door, replica.begin(place.journal, above))
            if not told:
                tell(leader.term)
                told = True
            await leader.run()
        except Behind as error:
            log("journal.behind", why=str(error))
            above = Term(error.term)
            await _leave(door, server)
        except Transient as error:
            await _leave(door, server)
            await waits.out(error)


async def _leave(door: Door, server: HttpServer) -> None:
    """Whoever still waits for an answer of a leader that was gets none."""
    door.handle_by(None)
    await server.cut()


async def _follow_and_lead(
    place: Place, journal: PostgresJournal, door: Door, server: HttpServer, endpoint: str
) -> None:
    """Follow, lead, and follow again when somebody else has taken over: for ever."""
    above, wait_seconds = Term(0), 0.0
    while True:
        follower = Follower(journal, endpoint, log, place.gate)
        door.handle_by(follower.handle)
        begun = await follower.until_leading(above, wait_seconds)
        # Whatever becomes of the journal, this process begins no term twice.
        above, wait_seconds = begun.standing.term, 0.0
        try:
            leader = place.lead(door, begun)
            leader.leaving.offered = journal.offered
            with lease.kept(journal, leader.term, leader.keeping, log):
                await leader.run()
        except Deposed as error:
            log("following", why=str(error))
        except Behind as error:
            log("journal.behind", why=str(error))
            above = max(above, Term(error.term))
            journal.begin_again()
        except Alone as error:
            log("stepping_down", why=str(error))
            journal.let_go()
            wait_seconds = OTHERS_SECONDS
        except Transient as error:
            log("waiting", why=str(error))
        # Whoever still waits for an answer of that leader gets none.
        door.handle_by(follower.handle)
        await server.cut()


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
    return port


def _written_port(port_file: Path | None, port: int) -> Callable[[], None]:
    """What shows the port, once we serve: it finds room even if there is none left by then."""
    if port_file is None:
        return lambda: None
    fresh = port_file.with_suffix(".new")
    try:
        fresh.write_text(f"{port}\n", encoding="utf-8")
    except OSError as error:
        raise of_disk(error, f"cannot write {port_file}") from error

    def show() -> None:
        fresh.replace(port_file)

    return show


def log(event: str, **facts: object) -> None:
    """One line per event: its name, then what is known about it, as JSON."""
    facts = {name: value for name, value in facts.items() if value not in (None, "", [], {})}
    line = f"{event} {codec.dumps(facts).decode()}"
    logs.tell("keepstep.orchestrator", logging.INFO, event, line, facts)


def _allow_many_files(connections_max: int) -> None:
    """One connection per agent."""
    limit = open_files.allow_many()
    if limit < connections_max + FILES_BESIDES:
        fix = f"raise the hard limit (ulimit -Hn) to {connections_max + FILES_BESIDES}"
        log("files.few", hard=limit, connections_max=connections_max, fix=fix)


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
    parser.add_argument("--port-file", type=Path, metavar="FILE", help="written once we serve")
    parser.add_argument("--config", type=Path, metavar="TOML")
    parser.add_argument("--alerts", metavar="TOML", help="which alerts mean which taints")
    parser.add_argument("--log-format", choices=logs.FORMATS, help="json: an object per line")
    return parser


if __name__ == "__main__":
    sys.exit(main())
