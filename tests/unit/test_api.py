"""The HTTP interface and its description: what is written down is what is served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep import codec, wire
from keepstep.clock import RealClock
from keepstep.config import OrchestratorConfig
from keepstep.model import JobId, JobSpec, NodeId, Phase, Policy, Severity, Sign
from keepstep.orchestrator import alerts, api, events, openapi
from keepstep.orchestrator.access import Gate
from keepstep.orchestrator.api import ROUTES, Api
from keepstep.orchestrator.http import BadRequest, Request, Response, Streamed, Upgraded
from keepstep.orchestrator.journal_sqlite import SqliteJournal
from keepstep.orchestrator.routes import Route, read_fields
from keepstep.orchestrator.run import Orchestrator
from keepstep.orchestrator.stepped import Waiting
from keepstep.orchestrator.tokens import Tokens

COMMITTED = Path(__file__).resolve().parents[2] / "docs" / "openapi.json"
DOCUMENT = json.loads(COMMITTED.read_text(encoding="utf-8"))
TOKEN = "a-token-for-tests-only"
JOB = JobId("job")
RULES = {"Hot": (alerts.Rule(Severity.AVOID, slot_label="gpu"),)}

# --- a small reader of JSON schemas: only what the document uses, and stricter --------------------

KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
READ = frozenset(
    {"$ref", "anyOf", "type", "enum", "const", "properties", "required", "additionalProperties"}
    | {"items", "prefixItems", "minItems", "maxItems", "minLength", "exclusiveMinimum", "maximum"}
    | {"description", "default"}
)


def complaints(schema: dict[str, Any], value: Any, path: str = "") -> Iterator[str]:
    """What does not fit. Unlike in JSON Schema, an object has no other keys than it is said."""
    assert schema.keys() <= READ, f"{path}: {schema.keys() - READ} are not understood here"
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/components/schemas/")
        yield from complaints(DOCUMENT["components"]["schemas"][name], value, f"{path}<{name}>")
        return
    if "anyOf" in schema:
        found = [list(complaints(option, value, path)) for option in schema["anyOf"]]
        if all(found):
            yield min(found, key=len)[0]
        return
    if "type" in schema and type(value) not in KINDS[schema["type"]]:
        yield f"{path}: {value!r} is no {schema['type']}"
        return
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        yield f"{path}: {value!r} is not one of those named"
    if isinstance(value, dict):
        yield from _in_object(schema, value, path)
    elif isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            yield f"{path}: {len(value)} items"
        fixed = schema.get("prefixItems", [])
        for number, item in enumerate(value):
            inner = fixed[number] if number < len(fixed) else schema["items"]
            yield from complaints(inner, item, f"{path}[{number}]")
    elif isinstance(value, str) and len(value) < schema.get("minLength", 0):
        yield f"{path}: too short"
    elif isinstance(value, int | float) and not isinstance(value, bool):
        low, high = schema.get("exclusiveMinimum", value - 1), schema.get("maximum", value)
        if not low < value <= high:
            yield f"{path}: {value} is out of range"


def _in_object(schema: dict[str, Any], value: dict[str, Any], path: str) -> Iterator[str]:
    known, others = schema.get("properties", {}), schema.get("additionalProperties", False)
    for name in schema.get("required", []):
        if name not in value:
            yield f"{path}.{name} is missing"
    for name, item in value.items():
        if name in known:
            yield from complaints(known[name], item, f"{path}.{name}")
        elif others:
            yield from complaints(others, item, f"{path}.{name}")
        elif known:
            yield f"{path}.{name} is not in the document"


# --- a real orchestrator, without sockets ---------------------------------------------------------


class Server:
    """Requests in, replies out, as HttpServer would."""

    def __init__(self, api: Api, orchestrator: Orchestrator) -> None:
        self.api = api
        self.orchestrator = orchestrator

    def feed(self, *given: events.Event) -> None:
        self.orchestrator._handle([Waiting(event) for event in given])

    async def reply(self, method: str, path: str, body: object = None, token: str = TOKEN) -> Any:
        data = b"" if body is None else codec.dumps(body)
        headers = {"authorization": f"Bearer {token}"}
        return await self.api.handle(Request(method, path, {}, headers, data))

    async def ask(
        self, method: str, path: str, body: object = None, **more: str
    ) -> tuple[int, Any]:
        try:
            reply = await self.reply(method, path, body, **more)
        except BadRequest as error:
            return error.status, {"error": str(error), "fix": error.fix}
        assert isinstance(reply, Response)
        if reply.content_type != "application/json":
            return reply.status, reply.body.decode()
        return reply.status, json.loads(reply.body)


@contextlib.asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[Server]:
    journal = SqliteJournal(directory / "journal.db")
    orchestrator = Orchestrator(
        journal, OrchestratorConfig(), RealClock(), TOKEN, lambda *_, **__: None
    )
    gate = Gate(Tokens(TOKEN))
    server = Server(Api(orchestrator, journal, gate, RULES, lambda *_, **__: None), orchestrator)
    working = asyncio.create_task(orchestrator._work())
    try:
        yield server
    finally:
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working
        journal.close()


def populate(server: Server) -> None:
    """A job that migrates, an incident, taints of two sources: something of everything."""
    for name in ("n0", "n1", "n2"):
        server.feed(wire.Hello(NodeId(name), "127.0.0.1", 2, 1, 2, "boot", labels={"rack": "r"}))
    server.feed(events.Submitted(JobSpec(JOB, "train.py", nodes=2, spares=1)))
    job = server.orchestrator.cluster.jobs[JOB]
    for seat in job.roster.seats:
        done = wire.SeatReport(seat.rank, 1, step=1)
        server.feed(wire.PhaseReport(seat.node, JOB, job.generation, Phase.RESUME, (done,)))
    server.feed(events.TaintAsked(NodeId("n1"), "hot", Severity.LEAVE, 0))
    server.feed(events.TaintAsked(NodeId("n1"), "hotter", Severity.AVOID, 0, "probe"))
    seat = job.roster.seats[0]
    death = (seat.rank, seat.incarnation, job.generation, 5, -9)
    server.feed(wire.Observed(seat.node, JOB, Sign.EXIT, *death))
    server.orchestrator._alive.heartbeats[NodeId("n0")] = wire.Heartbeat(
        NodeId("n0"), (wire.JobPulse(JOB, job.generation, 5, 4, 0.1),)
    )


def in_a_server(test: Any) -> Any:
    def run(tmp_path: Path) -> None:
        async def body() -> None:
            async with asyncio.timeout(60), serving(tmp_path) as server:
                populate(server)
                await test(server)

        asyncio.run(body())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


# --- the document ---------------------------------------------------------------------------------


def test_the_committed_document_is_the_one_that_the_routes_give():
    written = COMMITTED.read_text(encoding="utf-8")
    assert written == openapi.text(ROUTES), "run `make openapi`, and review the diff"


def documented() -> set[tuple[str, str]]:
    return {(verb.upper(), path) for path, item in DOCUMENT["paths"].items() for verb in item}


def test_every_route_is_in_the_document_and_in_the_text_above_the_code():
    served = {(route.method, route.path) for route in ROUTES}
    assert len(served) == len(ROUTES)
    assert documented() == served
    assert set(re.findall(r"\b(GET|POST) +(/\S*)", api.__doc__ or "")) == served


def test_every_reference_leads_somewhere_and_every_name_in_a_path_is_declared():
    text = COMMITTED.read_text(encoding="utf-8")
    for kind, name in set(re.findall(r"#/components/(\w+)/(\w+)", text)):
        assert name in DOCUMENT["components"][kind]
    operations = [(p, o) for p, item in DOCUMENT["paths"].items() for o in item.values()]
    assert len({operation["operationId"] for _, operation in operations}) == len(operations)
    for path, operation in operations:
        named = {p["name"] for p in operation["parameters"] if p["in"] == "path"}
        assert named == set(re.findall(r"\{(\w+)\}", path))


def test_what_changes_a_cluster_can_be_tried_and_repeated():
    for route in ROUTES:
        names = {p["name"] for p in operation_of(route)["parameters"]}
        assert ("dry_run" in route.fields) == ("Idempotency-Key" in names) == route.keyed


def operation_of(route: Route) -> dict[str, Any]:
    found: dict[str, Any] = DOCUMENT["paths"][route.path][route.method.lower()]
    return found


def body_of(route: Route) -> dict[str, Any]:
    found: dict[str, Any] = operation_of(route)["requestBody"]["content"]["application/json"]
    return found["schema"]


SAMPLES: tuple[Any, ...] = ("", "x", "leave", -1, 0, 1, 1e9, 1.5, True, None, [], [1], ["1"], {})


@pytest.mark.parametrize("route", [r for r in ROUTES if r.fields], ids=lambda r: r.path)
def test_a_request_is_accepted_exactly_if_the_document_says_so(route: Route):
    schema = body_of(route)
    good = {"ranks": [1], "node": "n0", "reason": "hot"}
    whole = {name: good[name] for name in schema.get("required", [])}
    bodies = [{**whole, name: s} for name in [*schema["properties"], "other"] for s in SAMPLES]
    bodies += [{k: v for k, v in whole.items() if k != left_out} for left_out in whole]
    verdicts = set()
    for body in bodies:
        fits = not list(complaints(schema, body))
        try:
            read_fields(Request("POST", route.path, {}, {}, codec.dumps(body)), route.fields)
            accepted = True
        except BadRequest:
            accepted = False
        assert accepted == fits, body
        verdicts.add(fits)
    assert verdicts == {True, False}


def test_a_job_is_described_as_it_is_read():
    schema = DOCUMENT["components"]["schemas"]["JobSpec"]
    spec = JobSpec(JOB, "t.py", ("--lr",), environment={"A": "b"}, policy=Policy(lend=False))
    plain = json.loads(codec.dumps(codec.to_plain(spec)))
    assert list(complaints(schema, plain)) == []
    assert set(plain) == set(schema["properties"])
    assert set(plain["policy"]) == set(schema["properties"]["policy"]["properties"])
    least = {name: plain[name] for name in schema["required"]}
    assert codec.from_plain(JobSpec, least) == JobSpec(JOB, "t.py")
    assert list(complaints(schema, {**plain, "other": 1}))
    assert list(complaints(schema, {**plain, "nodes": "1"}))


# --- what is served -------------------------------------------------------------------------------

BODIES: dict[str, Any] = {
    "/v1/jobs": codec.loads(codec.dumps(codec.to_plain(JobSpec(JobId("other"), "t.py")))),
    "/v1/jobs/{job}/migrate": {"ranks": [1], "dry_run": True},
    "/v1/taints": {"node": "n2", "reason": "hot", "seconds": 60, "severity": "avoid"},
    "/v1/taints/remove": {"node": "n2"},
    "/v1/webhooks/alertmanager": {
        "version": "4",
        "alerts": [
            {"status": "firing", "labels": {"alertname": "Hot", "node": "n2", "gpu": "1"}},
            {"status": "resolved", "labels": {"alertname": "Cold"}},
        ],
    },
}


@in_a_server
async def test_each_route_answers_as_the_document_says(server: Server):
    names = {"{job}": JOB, "{node}": "n1"}
    (incident,) = (await server.ask("GET", "/v1/incidents"))[1]["incidents"]
    names["{incident}"] = incident["id"]
    # The stop comes last: there is nothing to ask of a job that is over.
    for route in sorted(ROUTES, key=lambda route: route.path.endswith("/stop")):
        path = re.sub(r"\{\w+\}", lambda named: names[named[0]], route.path)
        body = BODIES.get(route.path, {}) if route.method == "POST" else None
        if body:
            assert list(complaints(body_of(route), body)) == [], route.path
        reply = await server.reply(route.method, path, body)
        responses = operation_of(route)["responses"]
        if isinstance(reply, Streamed):
            assert list(responses["200"]["content"]) == [reply.content_type]
        elif route.path == "/v1/agent":
            assert (reply.status, "101" in responses) == (426, True)
        elif "/" in route.answer:
            assert reply.status == 200
            assert reply.content_type.startswith(f"{route.answer};")
            assert list(responses["200"]["content"]) == [route.answer]
        else:
            assert reply.status == 200, reply.body
            schema = responses["200"]["content"]["application/json"]["schema"]
            if route.path != "/v1/openapi.json":
                assert list(complaints(schema, json.loads(reply.body))) == [], route.path


@in_a_server
async def test_streams_hold_what_the_document_says(server: Server):
    schemas = DOCUMENT["components"]["schemas"]
    events_told = [json.loads(codec.dumps(record)) for record in server.orchestrator.history]
    assert events_told
    assert [c for record in events_told for c in complaints(schemas["Decision"], record)] == []
    reply = await server.reply("GET", f"/v1/jobs/{JOB}/journal")
    parts = [part async for part in reply.parts]
    lines = [json.loads(line) for line in b"".join(parts).splitlines()]
    assert lines
    assert [c for line in lines for c in complaints(schemas["Link"], line)] == []


@in_a_server
async def test_an_agents_stream_needs_no_header_but_its_upgrade(server: Server):
    reply = await server.api.handle(Request("POST", "/v1/agent", {}, {"upgrade": "x"}))
    assert isinstance(reply, Upgraded)


@in_a_server
async def test_what_is_not_in_the_document_is_not_served(server: Server):
    for path in (
        "/page",
        "/page/other.js",
        "/v1",
        "/v1/other",
        "/v1/jobs/job/other",
        "/v1/taints/n0",
        "/healthz/x",
    ):
        status, answer = await server.ask("GET", path)
        assert (status, answer["fix"]) == (404, "see GET /v1/openapi.json")
    for path in DOCUMENT["paths"]:
        for method in {"GET", "POST", "PUT", "DELETE"} - {m for m, p in documented() if p == path}:
            status, answer = await server.ask(method, path.replace("{", "").replace("}", ""))
            assert status == 405
            assert answer["fix"].startswith("use ")


@in_a_server
async def test_an_orchestrator_is_ready_while_its_journal_is_there(server: Server):
    assert await server.ask("GET", "/readyz", token="") == (200, {"ready": True, "term": 1})
    server.orchestrator._away = True
    status, answer = await server.ask("GET", "/readyz", token="")
    assert (status, answer["error"]) == (503, "its journal is away")
    # It serves all the same: nobody is to kill it, which would help nobody.
    assert (await server.ask("GET", "/healthz", token=""))[0] == 200


@in_a_server
async def test_an_orchestrator_says_of_itself_what_the_doctor_asks(server: Server):
    _, own = await server.ask("GET", "/v1/orchestrator")
    assert own["journal"]["kind"] == "sqlite"
    assert own["journal"]["bytes"] > 0
    assert own["journal"]["free_bytes"] > 0
    assert own["journal"]["seq"] >= own["journal"]["snapshot_seq"]
    assert 0 < own["files"]["open"] <= own["files"]["limit"]
    assert own["wire"] == [wire.OLDEST, wire.VERSION]


@in_a_server
async def test_everything_but_what_the_document_leaves_open_needs_the_token(server: Server):
    for method, path in documented():
        is_open = DOCUMENT["paths"][path][method.lower()].get("security") == []
        status, answer = await server.ask(method, path, token="wrong")
        assert (status == 401) != is_open, path
        if not is_open:
            assert list(complaints(DOCUMENT["components"]["schemas"]["Error"], answer)) == []
    assert (await server.ask("GET", "/v1/other", token="wrong"))[0] == 401


@in_a_server
async def test_alerts_become_taints_and_repeating_them_only_renews(server: Server):
    path, payload = "/v1/webhooks/alertmanager", BODIES["/v1/webhooks/alertmanager"]
    _, first = await server.ask("POST", path, payload)
    assert [done["why"] for done in first["alerts"]] == [
        "n2/1 is tainted (avoid, by alertmanager/Hot): Hot, for 86400 s",
        "no mapping for Cold: ignored",
    ]
    until = server.orchestrator.cluster.taints["n2/1"][0].until
    _, again = await server.ask("POST", path, payload)
    assert "n2/1 stays tainted" in again["alerts"][0]["why"]
    (taint,) = server.orchestrator.cluster.taints["n2/1"]
    assert taint.until > until
    status, refused = await server.ask("POST", path, {"version": "3", "alerts": []})
    assert (status, refused["fix"]) == (400, f"see POST {path} in GET /v1/openapi.json")


@in_a_server
async def test_a_source_takes_back_its_own_word_only(server: Server):
    remove = {"node": "n1", "slot": 0}
    _, answer = await server.ask("POST", "/v1/taints/remove", {**remove, "source": "probe"})
    assert "still tainted by operator" in answer["why"][0]
    _, answer = await server.ask("POST", "/v1/taints/remove", {**remove, "source": "probe"})
    assert answer == {"changed": False, "dry_run": False, "why": ["n1/0 is not tainted by probe"]}
    _, answer = await server.ask("POST", "/v1/taints/remove", remove)
    assert answer["changed"]
    assert (await server.ask("GET", "/v1/taints"))[1] == {"taints": []}


def test_the_reader_of_schemas_finds_what_does_not_fit():
    record = openapi._record({"a": openapi.INTEGER, "b": openapi._or_null(openapi.STRING)})
    assert not list(complaints(record, {"a": 1, "b": None}))
    bad: list[Any] = [{"a": 1}, {"a": True, "b": ""}, {"a": 1, "b": 2}, {"a": 1, "b": "", "c": 1}]
    assert all(list(complaints(record, value)) for value in [*bad, [], None])
    assert list(complaints({"type": "array", "items": {"type": "string"}}, ["a", 1]))
