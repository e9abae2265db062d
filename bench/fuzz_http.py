"""The whole HTTP interface under generated requests, against a real orchestrator process.

schemathesis makes requests from docs/openapi.json, those that fit and those that do not. Each
operation is asked by nobody, by a stranger, by a project's viewer and operator, and by an admin.
Another project's job is there, with a word in all its fields that must never come back to the first
project. Whatever changes something is in the journal with its name: it is read afterwards.

    no 5xx, no broken answer; nothing for those without a token; nothing done by those who may not;
    nothing of the other project's; the orchestrator alive, in its first term, without a failed step
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.record import ROOT
from keepstep import wire
from keepstep.cli.client import Client
from keepstep.model import JobId, JobSpec, NodeId, Phase, Sign
from keepstep.orchestrator import tokens
from keepstep.orchestrator.tokens import Role

DOCUMENT = ROOT / "docs" / "openapi.json"
OWN = "the-clusters-own-token-here"
MARKER = "zebra"
"""In all that is the other project's."""
MINE = "mine"
SECONDS_MAX = 20.0
FAILURES_MAX = 20
STREAM = "text/event-stream"
ASKED = (
    *("Submitted", "StopAsked", "MigrateAsked", "DrainAsked", "UndrainAsked", "ForgetAsked"),
    *("TaintAsked", "UntaintAsked", "FreezeAsked", "UnfreezeAsked"),
)


@dataclass
class Found:
    """What became of the requests."""

    statuses: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    asked: dict[str, Counter[str]] = field(default_factory=dict)
    """By operation and caller."""

    def note(self, caller: str, operation: str, status: int) -> None:
        self.statuses.setdefault(caller, Counter())[str(status)] += 1
        self.asked.setdefault(operation, Counter())[caller] += 1

    def fail(self, why: str, **facts: object) -> None:
        if len(self.failures) < FAILURES_MAX:
            self.failures.append({"why": why, **{name: repr(f)[:400] for name, f in facts.items()}})


class Target:
    """An orchestrator with two nodes, two projects and a token of each kind."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        path = directory / "tokens.json"
        self.callers = {"nobody": "", "stranger": tokens.PREFIX + "x" * 43}
        for name, role, project in (
            ("viewer", Role.VIEWER, "a"),
            ("operator", Role.OPERATOR, "a"),
            ("webhook", Role.WEBHOOK, ""),
            ("admin", Role.ADMIN, ""),
        ):
            self.callers[name] = tokens.new(path, name, role, project=project)[0]
        self._other = tokens.new(path, "other", Role.OPERATOR, project="b")[0]
        (directory / "token").write_text(OWN, encoding="utf-8")
        self._stop = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        port = self.directory / "port"
        settings = {
            "KEEPSTEP_ORCHESTRATOR_TOKENS_FILE": str(self.directory / "tokens.json"),
            "KEEPSTEP_ORCHESTRATOR_JOURNAL_SYNCHRONOUS": "normal",
            "PYTHONPATH": str(ROOT / "src"),
        }
        line = ["--journal", str(self.directory / "journal.db"), "--port-file", str(port)]
        line += ["--token-file", str(self.directory / "token")]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "keepstep.orchestrator", *line],
                env={**os.environ, **settings},
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + SECONDS_MAX
        while not port.exists():
            assert self._process.poll() is None, self.log.read_text(encoding="utf-8")
            assert time.monotonic() < deadline, "the orchestrator does not listen"
            time.sleep(0.02)
        self.port = int(port.read_text(encoding="utf-8"))
        self.url = f"http://127.0.0.1:{self.port}"
        for node in ("n0", "n1"):
            threading.Thread(target=self._be_agent, args=(node,), daemon=True).start()
        while len(Client(self.url, OWN).cluster()["connected"]) < 2:
            assert time.monotonic() < deadline, "the agents do not join"
            time.sleep(0.02)
        self._populate()

    def _populate(self) -> None:
        secret = {MARKER.upper(): MARKER}
        Client(self.url, self._other).submit(
            JobSpec(JobId(MARKER), f"{MARKER}.py", (MARKER,), environment=secret)
        )
        Client(self.url, self.callers["operator"]).submit(JobSpec(JobId(MINE), "mine.py"))
        deadline = time.monotonic() + SECONDS_MAX
        while not Client(self.url, OWN).cluster()["incidents"]:
            assert time.monotonic() < deadline, "the other project has no incident"
            time.sleep(0.02)

    def _be_agent(self, node: str) -> None:
        """A node that says hello and lives. Its ranks start; the other project's die at once."""
        decoder = wire.Decoder()
        with socket.create_connection(("127.0.0.1", self.port), SECONDS_MAX) as stream:
            stream.sendall(b"POST /v1/agent HTTP/1.1\r\nUpgrade: keepstep-stream\r\n\r\n")
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += stream.recv(1)
            hello = wire.Hello(NodeId(node), "127.0.0.1", 4, 1, 2, f"boot-{node}", token=OWN)
            stream.sendall(wire.encode(hello))
            stream.settimeout(0.25)
            with contextlib.suppress(OSError):
                while not self._stop.is_set():
                    stream.sendall(wire.encode(wire.Heartbeat(NodeId(node))))
                    with contextlib.suppress(TimeoutError):
                        for message in decoder.feed(stream.recv(1 << 20)):
                            for answer in _answers(NodeId(node), message):
                                stream.sendall(wire.encode(answer))
                    self._stop.wait(0.25)

    @property
    def log(self) -> Path:
        return self.directory / "orchestrator.log"

    def stop(self) -> int:
        self._stop.set()
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(SECONDS_MAX)

    def asked(self) -> list[dict[str, Any]]:
        """What the journal holds of what anybody asked for."""
        uri = f"file:{self.directory / 'journal.db'}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as store:
            rows = store.execute("SELECT body FROM entries ORDER BY seq").fetchall()
        found = [json.loads(body)["entry"]["event"] for (body,) in rows]
        return [event for event in found if event["kind"] in ASKED]


def _answers(node: NodeId, message: wire.Message) -> Iterator[wire.Message]:
    """So that there is a job that trains, and one of another project with an incident."""
    if not isinstance(message, wire.Order) or not isinstance(message.action, wire.StartWorkers):
        return
    job, generation = message.job, message.generation
    for seat in message.action.seats:
        told = (wire.SeatReport(seat.rank, boundary=1, step=1),)
        yield wire.PhaseReport(node, job, generation, Phase.RESUME, told)
        if job == MARKER:
            facts = (seat.rank, seat.incarnation, generation, 1, -9, f"{MARKER} is gone")
            yield wire.Observed(node, job, Sign.EXIT, *facts)


def attack(directory: Path, *, examples: int, seed: int) -> dict[str, Any]:
    """Every operation, by every caller; what became of it."""
    found, target = Found(), Target(directory)
    target.start()
    try:
        # The admin comes last: it may freeze the cluster.
        for caller, token in target.callers.items():
            for operation, strategy in strategies():
                _ask(target, found, (caller, token), operation, strategy, examples, seed)
            _listen(target, found, caller, token)
        for operation, _ in strategies():
            for caller in target.callers:
                if not found.asked.get(_named(operation), Counter())[caller]:
                    found.fail("never asked", caller=caller, operation=_named(operation))
        _check_effects(target, found)
        health = Client(target.url, OWN).health()
        if (health["status"], health["term"]) != ("leading", 1):
            found.fail("the orchestrator does not lead as before", health=health)
    finally:
        code = target.stop()
    log = target.log.read_text(encoding="utf-8")
    for word in ("step.failed", "Traceback", "exception was never retrieved"):
        if word in log:
            found.fail(f"the log says {word}", log=log[log.index(word) :][:400])
    for text in (OWN, *filter(None, target.callers.values())):
        if text in log:
            found.fail("a token is in the log")
    if code:
        found.fail("the orchestrator did not end in good order", code=code)
    statuses = {caller: dict(sorted(known.items())) for caller, known in found.statuses.items()}
    requests = sum(sum(known.values()) for known in statuses.values())
    asked = {operation: dict(known) for operation, known in sorted(found.asked.items())}
    return {
        "requests": requests,
        "statuses": statuses,
        "asked": asked,
        "failures": found.failures,
    }


def strategies() -> Iterator[tuple[dict[str, Any], Any]]:
    """How to make requests of each operation: with names of its own making, and with real ones."""
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.core.result import Ok

    document = json.loads(DOCUMENT.read_text(encoding="utf-8"))
    schema = schemathesis.openapi.from_dict(document)
    for result in schema.get_all_operations():
        assert isinstance(result, Ok), "our own document is well formed"
        operation = result.ok()
        plain = document["paths"][operation.path][operation.method.lower()]
        told = {"method": operation.method.upper(), "path": operation.path, **plain}
        if STREAM in str(plain["responses"].get("200", {}).get("content", {})):
            continue
        named = {"job": MINE, "node": "n0", "incident": "i1"}
        names = {name: known for name, known in named.items() if f"{{{name}}}" in operation.path}
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            with contextlib.suppress(NotImplementedError):
                yield told, operation.as_strategy(generation_mode=mode)
            if names and mode is GenerationMode.POSITIVE:
                yield told, operation.as_strategy(generation_mode=mode, path_parameters=names)


def _ask(
    target: Target,
    found: Found,
    who: tuple[str, str],
    operation: dict[str, Any],
    strategy: Any,
    examples: int,
    seed: int,
) -> None:
    import hypothesis
    import requests
    from hypothesis.errors import HypothesisException

    caller, token = who
    is_open = operation.get("security") == []
    headers = {"Authorization": f"Bearer {token}"} if token else {}

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=strategy)
    def each(case: Any) -> None:
        facts: dict[str, Any] = {"caller": caller, "operation": _named(operation)}
        # What it made up for the header is not what is asked here.
        case.headers = {
            k: v for k, v in (case.headers or {}).items() if k.lower() != "authorization"
        }
        try:
            answer = case.call(base_url=target.url, headers=headers, timeout=SECONDS_MAX)
        except requests.exceptions.InvalidHeader:
            return
        except requests.exceptions.RequestException as error:
            found.note(caller, facts["operation"], 0)
            found.fail("no whole answer", error=error, case=_told(case), **facts)
            return
        found.note(caller, facts["operation"], answer.status_code)
        facts |= {"status": answer.status_code, "case": _told(case)}
        if answer.status_code >= 500:
            found.fail("a server error", answer=answer.text, **facts)
        if (
            caller in ("nobody", "stranger")
            and not is_open
            and answer.status_code not in (401, 400)
        ):
            found.fail("an answer without a token", **facts)
        shows = MARKER in answer.text.lower() and MARKER not in _told(case).lower()
        if caller in ("viewer", "operator") and shows:
            found.fail("another project shows", answer=answer.text, **facts)
        if caller == "viewer" and operation["method"] != "GET" and answer.status_code == 200:
            found.fail("a viewer acts", **facts)

    with contextlib.suppress(HypothesisException):
        each()


def _named(operation: dict[str, Any]) -> str:
    return f"{operation['method']} {operation['path']}"


def _told(case: Any) -> str:
    return f"{case.path_parameters} {case.query} {case.headers} {case.body!r}"[:400]


def _listen(target: Target, found: Found, caller: str, token: str) -> None:
    """The stream of events, which has no end: its beginning, with places to go on from."""
    for after in ("", "0", "-1", "9" * 5000, "\xb2", "x", "1e3", "0x1", "\x00"):
        connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=SECONDS_MAX)
        try:
            connection.putrequest("GET", "/v1/events")
            connection.putheader("Last-Event-ID", after.encode("latin-1"))
            if token:
                connection.putheader("Authorization", f"Bearer {token}")
            connection.endheaders()
            answer = connection.getresponse()
            # An event stream sends its first line at once, and then as much history as it may.
            said = answer.read1(1 << 16) if answer.status == 200 else answer.read()
        except (OSError, http.client.HTTPException) as error:
            found.fail("no whole answer", error=error, caller=caller, after=after)
            continue
        finally:
            connection.close()
        found.note(caller, "GET /v1/events", answer.status)
        allowed = {"viewer": 200, "operator": 200, "admin": 200, "webhook": 403}.get(caller, 401)
        if answer.status != allowed or (answer.status == 200 and b": connected" not in said):
            found.fail("a wrong answer", status=answer.status, caller=caller, after=after)
        if caller in ("viewer", "operator") and MARKER.encode() in said:
            found.fail("another project shows", said=said, caller=caller)


def _check_effects(target: Target, found: Found) -> None:
    """Who did what, by the journal."""
    projects = {MARKER: "b", MINE: "a"}
    for event in target.asked():
        kind, body = event["kind"], event["body"]
        if kind == "Submitted":
            projects.setdefault(body["spec"]["job"], body["spec"]["project"])
        by, job = body["by"], body.get("job") or body.get("spec", {}).get("job")
        if by not in ("operator", "other", "webhook", "admin"):
            found.fail("done by who may not", by=by, kind=kind)
        if by == "operator" and (job is None or projects.get(job) != "a"):
            found.fail("done to another project", kind=kind, job=job)
        if by == "webhook" and kind not in ("TaintAsked", "UntaintAsked"):
            found.fail("done by a webhook", kind=kind)
