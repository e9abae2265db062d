"""The HTTP interface as an OpenAPI 3.1 document: `python -m keepstep.orchestrator.openapi`.

Paths and requests come from the table of routes, a JobSpec and other records from their types.
What answers hold is written down here, by name, beside view.py, which makes them; a test holds real
answers against it. `make openapi` writes docs/openapi.json, and a test compares the two.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from keepstep import __version__, codec, wire
from keepstep.config import explanations
from keepstep.model import JobSpec, JobState, Mode, Phase, Seat
from keepstep.orchestrator import alerts, board, shown, state
from keepstep.orchestrator.journal import Link
from keepstep.orchestrator.routes import Field, Route

Schema = dict[str, Any]

STREAMS: Mapping[str, str] = {"text/event-stream": "Decision", "application/jsonl": "Link"}
"""What each event, or each line, of a stream holds."""
ERRORS: Mapping[str, tuple[str, str]] = {
    "400": ("Senseless", "The request makes no sense"),
    "401": ("Unauthorized", "No token, or a wrong one"),
    "403": ("Forbidden", "Not with this token's role or project"),
    "404": ("Missing", "Something that it names is not there"),
    "409": ("Conflict", "It makes no sense as things stand"),
    "429": ("Hurried", "Too many requests of this token, or open jobs"),
    "503": ("Deposed", "Another orchestrator leads now"),
    "default": ("Failed", "Any other error"),
}


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """The whole document."""
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Keepstep's orchestrator",
            "version": __version__,
            "description": "Errors say what is wrong and what to do.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted({**_answers(), **_requests()}.items())),
            "responses": {
                name: {"description": about} | _json(_ref("Error"))
                for name, about in ERRORS.values()
            },
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "The cluster's token, or one of `keepstep admin token new`; "
                    "x-role says which role an operation needs, and x-shared whether it touches "
                    "what all projects share",
                }
            },
        },
    }


def text(routes: Iterable[Route]) -> str:
    """The document as it is committed."""
    return json.dumps(document(routes), indent=2, ensure_ascii=False) + "\n"


# ---------------------------------------------------------------- paths


def _operation(route: Route) -> Schema:
    operation: Schema = {
        "operationId": _name(route),
        "summary": route.about,
        "parameters": list(_parameters(route)),
        "responses": {**_good(route), **_bad(route)},
    }
    if route.fields:
        needed = any(field.required for field in route.fields.values())
        operation["requestBody"] = {"required": needed} | _json(_object_of(route.fields))
    elif route.body:
        operation["requestBody"] = {"required": True} | _json(_ref(route.body))
    if route.open:
        operation["security"] = []
    else:
        operation["x-role"] = route.role
        operation["x-shared"] = route.shared
    return operation


def _name(route: Route) -> str:
    """`post_jobs_job_migrate`."""
    words = re.findall(r"\w+", route.path.removeprefix("/v1"))
    return "_".join([route.method.lower(), *words])


def _parameters(route: Route) -> Iterable[Schema]:
    for name in re.findall(r"\{(\w+)\}", route.path):
        yield {"name": name, "in": "path", "required": True, "schema": STRING}
    for name, about in route.query.items():
        yield {"name": name, "in": "query", "description": about, "schema": STRING}
    for name, about in route.headers.items():
        yield {"name": name, "in": "header", "description": about, "schema": STRING}
    if route.keyed:
        yield {
            "name": "Idempotency-Key",
            "in": "header",
            "description": "The same key again changes nothing, even if a new leader gets it",
            "schema": STRING,
        }


def _good(route: Route) -> Schema:
    if route.answer in STREAMS:
        about = f"A stream without a known end; each holds a {STREAMS[route.answer]}"
        return {"200": {"description": about, "content": {route.answer: {"schema": STRING}}}}
    if route.answer in _answers():
        return {"200": {"description": "Done, or as it is"} | _json(_ref(route.answer))}
    if "/" in route.answer:
        return {"200": {"description": "A text", "content": {route.answer: {"schema": STRING}}}}
    return {"101": {"description": f"From here on the connection speaks {route.answer}"}}


def _bad(route: Route) -> Schema:
    holds = {
        "400": bool(route.fields or route.body),
        "401": not route.open,
        "403": not route.open,
        "404": "{" in route.path or "node" in route.fields,
        "409": route.conflicts,
        "429": not route.open,
        "503": route.method == "POST" and not route.open,
        "default": True,
    }
    return {
        status: {"$ref": f"#/components/responses/{name}"}
        for status, (name, _) in ERRORS.items()
        if holds[status]
    }


def _json(schema: Schema) -> Schema:
    return {"content": {"application/json": {"schema": schema}}}


def _object_of(fields: Mapping[str, Field]) -> Schema:
    needed = [name for name, field in fields.items() if field.required]
    return {
        "type": "object",
        "properties": {name: _field(field) for name, field in fields.items()},
        "additionalProperties": False,
        **({"required": needed} if needed else {}),
    }


def _field(field: Field) -> Schema:
    # An int is a number already.
    kind = float if float in field.kinds else field.kinds[0]
    found: Schema = {"type": JSON_TYPES[kind], "description": field.about}
    if field.items is not None:
        found["items"] = {"type": JSON_TYPES[field.items]}
    if field.one_of:
        found["enum"] = list(field.one_of)
    if field.required and kind in (str, list):
        found["minLength" if kind is str else "minItems"] = 1
    if field.above is not None:
        found["exclusiveMinimum"] = field.above
    if field.most is not None:
        found["maximum"] = field.most
    return found


# ---------------------------------------------------------------- schemas from types

JSON_TYPES: Mapping[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
}


def schema_of(kind: Any, *, asked: bool) -> Schema:
    """How keepstep.codec writes this type. `asked`: in a request, which may leave defaults out."""
    while isinstance(kind, typing.NewType):
        kind = kind.__supertype__
    if kind in JSON_TYPES:
        return {"type": JSON_TYPES[kind]}
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return _list(schema_of(arguments[0], asked=asked))
    if origin is dict:
        return _map(schema_of(arguments[1], asked=asked))
    if origin in (types.UnionType, typing.Union):
        (only,) = [option for option in arguments if option is not type(None)]
        return _or_null(schema_of(only, asked=asked))
    if issubclass(kind, Enum):
        return _one_of(kind)
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)
    properties = {field.name: schema_of(hints[field.name], asked=asked) for field in fields}
    if not asked:
        return _record(properties)
    about = explanations(kind)
    for field in fields:
        if field.name in about:
            properties[field.name] = {**properties[field.name], "description": about[field.name]}
        if field.default is not dataclasses.MISSING:
            properties[field.name]["default"] = codec.to_plain(field.default)
    missing = (dataclasses.MISSING, dataclasses.MISSING)
    needed = [f.name for f in fields if (f.default, f.default_factory) == missing]
    return _record(properties) | {"required": needed, "additionalProperties": False}


# ---------------------------------------------------------------- schemas by hand

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}


def _record(properties: Mapping[str, Schema]) -> Schema:
    """An object with all of these."""
    return {"type": "object", "properties": dict(properties), "required": list(properties)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _one_of(kind: Iterable[Any]) -> Schema:
    return {"type": "string", "enum": [member.value for member in kind]}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _requests() -> dict[str, Schema]:
    alert = {
        "status": {"type": "string", "enum": ["firing", "resolved"]},
        "labels": _map(STRING),
        "annotations": _map(STRING),
        "startsAt": STRING,
        "endsAt": STRING,
        "fingerprint": STRING,
    }
    alerts_given = _list(_record(alert) | {"required": ["status", "labels"]})
    payload = {
        "version": {"type": "string", "const": alerts.VERSION},
        "status": STRING,
        "alerts": alerts_given | {"maxItems": alerts.ALERTS_MAX},
    }
    return {
        "JobSpec": schema_of(JobSpec, asked=True),
        "AlertmanagerPayload": _record(payload)
        | {"required": ["version", "alerts"], "description": "What else it holds is ignored."},
    }


@functools.cache
def _answers() -> dict[str, Schema]:
    taint = {"place": STRING, **schema_of(state.Taint, asked=False)["properties"]}
    alert = {"alert": STRING, "place": _or_null(STRING), "status": STRING, "changed": BOOLEAN}
    control = {"down_seconds": NUMBER, "outages": _list(schema_of(state.Outage, asked=False))}
    control["gaps"] = _list(schema_of(state.Gap, asked=False))
    agent = {"wire": INTEGER, "release": STRING, "torch": STRING}
    leads = {"enum": ["leading", "cut off", "following"]}
    return {
        "Error": _record({"error": STRING, "fix": STRING}),
        "Health": _record({"status": leads, "term": INTEGER, "leader": _or_null(STRING)}),
        "Ready": _record({"ready": {"const": True}, "term": INTEGER}),
        "Own": _own(),
        "OpenApi": {"type": "object"},
        "Cluster": _record(
            {
                "term": INTEGER,
                "now": NUMBER,
                "jobs": _map(_ref("Job")),
                "nodes": _map(_ref("Node")),
                "incidents": _list(_ref("Incident")),
                "control_plane": _record(control),
                "taints": _list(_ref("Taint")),
                "loans": _list(_ref("Loan")),
                "frozen": _or_null(_record({"why": STRING, "since": NUMBER})),
                "self_doubt": _or_null(_record({"why": STRING, "since": NUMBER})),
                "connected": _list(STRING),
                "agents": _map(_record(agent) | {"description": "Maybe slowed, certificate_until"}),
                "pulses": _list(schema_of(wire.Heartbeat, asked=False)),
                "paces": _map(schema_of(shown.Pace, asked=False)),
            }
        ),
        "Board": schema_of(board.Board, asked=False),
        "Jobs": _record({"jobs": _map(_ref("Job"))}),
        "Nodes": _record({"nodes": _map(_ref("Node"))}),
        "Incidents": _record({"incidents": _list(_ref("Incident"))}),
        "Taints": _record({"taints": _list(_ref("Taint"))}),
        "Taint": _record(taint),
        "Policy": _policy(),
        "Loans": _record({"loans": _list(_ref("Loan"))}),
        "Loan": _loan(),
        "Job": _job(),
        "Migration": _migration(),
        "Node": _node(),
        "Incident": _incident(),
        "Decision": _decision(),
        "Link": schema_of(Link, asked=False),
        "Submitted": _record({"job": STRING, "why": STRING, "new": BOOLEAN}),
        "Stopped": _record({"job": STRING, "why": STRING}),
        "Followed": _record({"changed": BOOLEAN, "dry_run": BOOLEAN, "why": _list(STRING)}),
        "AlertsDone": _record({"alerts": _list(_record({**alert, "why": STRING}))}),
    }


def _job() -> Schema:
    seat = {"rank": INTEGER, "node": STRING, "slot": INTEGER, "incarnation": INTEGER}
    standbys = _list(schema_of(state.Standby, asked=False))
    leave = {"rank": INTEGER, "why": STRING, "to": _or_null(STRING), "waits": _or_null(STRING)}
    return _record(
        {
            "id": STRING,
            "state": _one_of(JobState),
            "mode": _one_of(Mode),
            "over": BOOLEAN,
            "since": NUMBER,
            "generation": INTEGER,
            "step": INTEGER,
            "world": INTEGER,
            "nodes": INTEGER,
            "ranks_per_node": INTEGER,
            "priority": INTEGER,
            "project": STRING,
            "script": STRING,
            "log_directory": STRING,
            "state_directory": STRING,
            "exit_code": INTEGER,
            "detail": STRING,
            "published": _record({"step": INTEGER, "path": STRING}),
            "contaminated": _list(INTEGER),
            "spares": _record({"wanted": INTEGER, "ready": INTEGER, "standbys": standbys}),
            "finished": INTEGER,
            "incidents": INTEGER,
            "fallbacks": INTEGER,
            "incident": _or_null(STRING),
            "migration": _or_null(_ref("Migration")),
            "leaving": _list(_record(leave)),
            "remedies": _list(STRING)
            | {"description": "What would make room, if ranks wait for some."},
            "unsure": _or_null(STRING)
            | {"description": "Why nothing is decided about it: its agents know more than we."},
            "uncovered": _list(INTEGER)
            | {"description": "Ranks that hold state which is nowhere else at present."},
            "loan": _or_null(_ref("Loan")),
            "away": _map(STRING) | {"description": "Rank -> the node it started on, if elsewhere."},
            "store_node": _or_null(STRING),
            "mirror_stride": _or_null(INTEGER),
            "seats": _list(_record({**seat, "phase": STRING})),
        }
    )


def _migration() -> Schema:
    seats = _list(_seat())
    return _record(
        {
            "id": STRING,
            "kind": STRING,
            "purpose": STRING,
            "phase": _one_of(Phase),
            "phase_at": NUMBER,
            "began_at": NUMBER,
            "reported": INTEGER,
            "empty_seats": _map(STRING),
            "fences": _list(INTEGER),
            "recoveries": INTEGER,
            "boundary": _or_null(INTEGER),
            "hold_since": _or_null(NUMBER),
            "coming": seats,
            "leavers": seats,
        }
    )


def _own() -> Schema:
    journal = {
        "kind": {"enum": ["sqlite", "postgresql"]},
        "away": BOOLEAN | {"description": "The last attempt to write failed."},
        "written_seconds_ago": NUMBER,
        "term": INTEGER,
        "lease_seconds": NUMBER,
        "seq": INTEGER,
        "snapshot_seq": INTEGER,
        "bytes": _or_null(INTEGER),
        "free_bytes": _or_null(INTEGER) | {"description": "What is left on its disk."},
    }
    return _record(
        {
            "release": STRING,
            "python": STRING,
            "wire": _list(INTEGER) | {"description": "The oldest version spoken, the newest."},
            "journal_version": INTEGER,
            "clock": NUMBER | {"description": "Of its machine, for people: used by nobody."},
            "files": _record({"limit": INTEGER, "open": INTEGER}),
            "journal": _record(journal),
        }
    )


def _node() -> Schema:
    use = {
        "slot": INTEGER,
        "job": _or_null(STRING),
        "rank": _or_null(INTEGER),
        "standby": BOOLEAN,
        "fenced": BOOLEAN,
        "taint": _or_null(STRING),
    }
    return _record(
        {
            "id": STRING,
            "alive": BOOLEAN,
            "left": BOOLEAN | {"description": "Not alive, but in good order: no fault."},
            "linked": BOOLEAN,
            "address": STRING,
            "peer_port": INTEGER,
            "store_port": INTEGER,
            "boot": STRING,
            "slots": INTEGER,
            "free": INTEGER,
            "store_good": BOOLEAN,
            "drained": _or_null(STRING),
            "taint": _or_null(STRING),
            "empty": BOOLEAN,
            "faults": INTEGER,
            "fault_at": _or_null(NUMBER),
            "labels": _map(STRING),
            "uses": _list(_record(use)),
        }
    )


def _policy() -> Schema:
    values: Schema = {"value": {}, "default": {}}
    move = {"rank": INTEGER, "from": _seat(), "to": _seat(), "why": STRING}
    forecast = {
        "fault": STRING,
        "outcome": STRING,
        "says": _list(STRING),
        "moves": _list(_record(move)),
        "without_spare": _list(INTEGER),
        "remedies": _list(STRING),
    }
    return _record(
        {
            "job": STRING,
            "state": _one_of(JobState),
            "frozen": _or_null(STRING),
            "policy": _map(_record(values)),
            "step_seconds": _or_null(NUMBER),
            "state_bytes": _or_null(INTEGER),
            "bytes_per_second": _or_null(NUMBER),
            "budgets": _map(_record({"seconds": NUMBER, "why": STRING})),
            "forecasts": _list(_record(forecast)),
        }
    )


def _seat() -> Schema:
    return schema_of(Seat, asked=False)


def _loan() -> Schema:
    properties = schema_of(state.Loan, asked=False)["properties"]
    return _record({**properties, "began_at": _or_null(NUMBER), "ended_at": _or_null(NUMBER)})


def _incident() -> Schema:
    line = {"type": "array", "prefixItems": [NUMBER, STRING, STRING], "minItems": 3, "maxItems": 3}
    return _record(
        {
            "id": STRING,
            "job": STRING,
            "opened_at": NUMBER,
            "closed_at": _or_null(NUMBER),
            "outcome": STRING,
            "generation": INTEGER,
            "boundary": INTEGER,
            "recoveries": INTEGER,
            "causes": _list(schema_of(state.Cause, asked=False)),
            "causes_count": INTEGER,
            "story": _list(line | {"description": "When, in which phase, and what."}),
            "seconds": _map(NUMBER),
            "pause_seconds": _or_null(NUMBER),
        }
    )


def _decision() -> Schema:
    note = _record({"job": STRING, "incident": STRING, "phase": STRING, "why": STRING})
    return _record(
        {
            "seq": INTEGER,
            "at": NUMBER,
            "kind": STRING,
            "by": STRING | {"description": "Whose token asked for it; empty: nobody did."},
            "jobs": _list(STRING),
            "node": _or_null(STRING),
            "why": STRING,
            "phases": _map(STRING),
            "notes": _list(note),
            "orders": _list(STRING),
        }
    )


def main() -> int:
    # Here, because api.py serves this document and so imports this module.
    from keepstep.orchestrator.api import ROUTES

    sys.stdout.write(text(ROUTES))
    return 0


if __name__ == "__main__":
    sys.exit(main())
