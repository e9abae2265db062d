"""HTTP for agents and operators: which path means what. Reading shows the brain's own view.

    POST /v1/agent                 upgrade to an agent's framed stream
    GET  /v1/cluster               everything: jobs, nodes, incidents, pulses
    GET  /v1/jobs                  GET /v1/jobs/{job}            GET /v1/nodes
    GET  /v1/incidents             GET /v1/incidents/{id}
    GET  /v1/loans                 who lent what to whom for how long
    GET  /v1/jobs/{job}/journal    the job's hash chain, one link per line
    POST /v1/jobs                  submit a JobSpec; the same one again changes nothing
    POST /v1/jobs/{job}/stop       {"save": true} writes a checkpoint of the boundary first
    POST /v1/jobs/{job}/migrate    {"ranks": [2], "to": "n4", "why": …}: move ranks that are well;
                                   {"home": true}: all go back to where they started
    POST /v1/nodes/{node}/drain    {"why": …}: nothing new comes here, and what is here moves away
    POST /v1/nodes/{node}/undrain  the node may be used again
    GET  /v1/taints                POST /v1/taints   {"node": "n3", "slot": 1, "reason": …,
                                   "severity": "avoid" | "leave" | "imminent", "seconds": 3600}
    POST /v1/taints/remove         {"node": "n3", "slot": 1}; without a slot: the whole node
    GET  /v1/events                server-sent events: each decision and its reason
    GET  /healthz                  no token needed

Everything but /healthz and the agents' stream (whose Hello carries the token) needs
`Authorization: Bearer <token>`. Errors are {"error": what is wrong, "fix": what to do}.

The last five POSTs take `"dry_run": true` (what would happen is told, and does not) and a header
`Idempotency-Key` (the same key again changes nothing, even if a new leader gets it).
"""

from __future__ import annotations

import hmac
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

from keepstep import codec
from keepstep.errors import KeepstepError, WireError
from keepstep.model import TAINT_SECONDS, JobId, JobSpec, NodeId, Rank, Severity
from keepstep.orchestrator import events, planned, state, view
from keepstep.orchestrator.http import (
    BadRequest,
    Reply,
    Request,
    Streamed,
    Upgraded,
    error_response,
    json_response,
)
from keepstep.orchestrator.journal import Journal, json_lines
from keepstep.orchestrator.run import Orchestrator

PROTOCOL = "keepstep-stream"
JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""A job's name becomes part of paths and of URLs."""
TAINT_SECONDS_MAX = 365 * 24 * 3600.0
REASON_CHARS_MAX = 500


class Api:
    """The paths of one orchestrator."""

    def __init__(self, orchestrator: Orchestrator, journal: Journal, token: str) -> None:
        self._orchestrator = orchestrator
        self._journal = journal
        self._token = token

    async def handle(self, request: Request) -> Reply:
        parts = tuple(part for part in request.path.split("/") if part)
        if parts == ("healthz",):
            return json_response({"status": "leading", "term": self._orchestrator.term})
        if parts == ("v1", "agent"):
            return self._agent(request)
        if not self._authorized(request):
            return error_response(
                401, "no token, or a wrong one", "send Authorization: Bearer <the cluster's token>"
            )
        if parts[:1] != ("v1",):
            return _not_found(request)
        try:
            if request.method == "GET":
                return self._get(request, parts[1:])
            if request.method == "POST":
                return await self._post(request, parts[1:])
        except WireError as error:
            raise BadRequest(400, str(error), "see the JobSpec in keepstep/model.py") from error
        except KeepstepError as error:
            if isinstance(error, BadRequest):
                raise
            raise BadRequest(503, str(error), "ask the orchestrator that leads now") from error
        return error_response(405, f"{request.method} is not served", "use GET or POST")

    def _authorized(self, request: Request) -> bool:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(
            token.strip().encode(), self._token.encode()
        )

    def _agent(self, request: Request) -> Reply:
        if request.method != "POST" or "upgrade" not in request.headers:
            return error_response(
                426, "this path is the agents' stream", f"POST with Upgrade: {PROTOCOL}"
            )
        return Upgraded(PROTOCOL, self._orchestrator.serve_agent)

    def _get(self, request: Request, parts: tuple[str, ...]) -> Reply:
        if parts == ("events",):
            last = request.headers.get("last-event-id") or request.query.get("after", "")
            return Streamed(self._events(last), "text/event-stream")
        if len(parts) == 3 and parts[0] == "jobs" and parts[2] == "journal":
            self._known_job(parts[1])
            return Streamed(self._export(parts[1]), "application/jsonl")
        if len(parts) == 2 and parts[0] == "jobs":
            # The launcher's own question: not the whole cluster's work.
            self._known_job(parts[1])
            return json_response(view.job_view(self._orchestrator.cluster.jobs[JobId(parts[1])]))
        picture = self._orchestrator.picture()
        match parts:
            case ("cluster",):
                return json_response(picture)
            case ("jobs" | "nodes" | "incidents" | "taints" | "loans" as what,):
                return json_response({what: picture[what]})
            case ("nodes" | "incidents" as what, name):
                return _one(picture[what], what, name)
            case _:
                return _not_found(request)

    async def _post(self, request: Request, parts: tuple[str, ...]) -> Reply:
        match parts:
            case ("jobs",):
                return await self._submit(request)
            case ("jobs", job, "stop"):
                return await self._stop(request, job)
            case ("jobs", job, "migrate"):
                return await self._migrate(request, job)
            case ("nodes", node, "drain" | "undrain" as verb):
                return await self._drain(request, node, verb)
            case ("taints",):
                return await self._taint(request)
            case ("taints", "remove"):
                return await self._untaint(request)
            case _:
                return _not_found(request)

    async def _submit(self, request: Request) -> Reply:
        spec = codec.from_plain(JobSpec, request.json())
        if not JOB_NAME.fullmatch(spec.job):
            raise BadRequest(
                400,
                f"{spec.job[:80]!r} cannot be a job's name",
                "use up to 64 letters, digits, dots, dashes and underscores",
            )
        known = self._orchestrator.cluster.jobs.get(spec.job)
        if known is not None and not known.state.over and known.spec != spec:
            raise BadRequest(
                409,
                f"job {spec.job} is already there with another specification",
                "give the new job another name (--job)",
            )
        decision = await self._orchestrator.decide(events.Submitted(spec))
        return json_response({"job": spec.job, "why": decision.why, "new": decision.changed})

    async def _stop(self, request: Request, job: str) -> Reply:
        self._known_job(job)
        body = request.json()
        if not isinstance(body, dict) or not isinstance(body.get("save", False), bool):
            raise BadRequest(400, "save is true or false", 'send {"save": true}')
        why = str(body.get("why") or "an operator asked for it")
        event = events.StopAsked(JobId(job), why, save=body.get("save", False))
        decision = await self._orchestrator.decide(event)
        return json_response({"job": job, "why": decision.why})

    async def _migrate(self, request: Request, name: str) -> Reply:
        self._known_job(name)
        kinds = {"ranks": list, "to": str, "home": bool, "why": str, "dry_run": bool}
        body = _fields(request, kinds)
        ranks, to, home = body.get("ranks", []), body.get("to", ""), body.get("home", False)
        if home and (ranks or to):
            raise BadRequest(400, "home is for all ranks", 'send {"home": true} and no more')
        if not home and (not ranks or not all(type(rank) is int for rank in ranks)):
            raise BadRequest(400, "ranks is a list of numbers", 'send {"ranks": [2]}')
        job = self._orchestrator.cluster.jobs[JobId(name)]
        if job.roster is None or job.state.over:
            raise BadRequest(409, f"{name} does not run", "see GET /v1/jobs")
        if bad := [rank for rank in ranks if not 0 <= rank < len(job.roster.seats)]:
            last = len(job.roster.seats) - 1
            raise BadRequest(404, f"{name} has no rank {bad[0]}", f"its ranks are 0 to {last}")
        if to:
            self._known_node(to)
        if why := planned.refusal(job):
            raise BadRequest(409, why, "nothing was changed")
        asked = tuple(Rank(rank) for rank in sorted(set(ranks)))
        why = body.get("why") or "an operator asked for it"
        event = events.MigrateAsked(JobId(name), asked, why, NodeId(to), home, _key(request))
        return await self._follow(event, body)

    async def _drain(self, request: Request, name: str, verb: str) -> Reply:
        self._known_node(name)
        body = _fields(request, {"why": str, "dry_run": bool})
        event: events.Event = events.UndrainAsked(NodeId(name), _key(request))
        if verb == "drain":
            why = body.get("why") or "an operator asked for it"
            event = events.DrainAsked(NodeId(name), why, _key(request))
        return await self._follow(event, body)

    async def _taint(self, request: Request) -> Reply:
        kinds = {"node": str, "slot": int, "severity": str, "reason": str, "source": str}
        body = _fields(request, {**kinds, "seconds": (int, float), "dry_run": bool})
        node, slot = self._place(body)
        if not body.get("reason"):
            raise BadRequest(400, "a taint needs a reason", 'send "reason": what is wrong with it')
        severity = body.get("severity", Severity.AVOID)
        if severity not in tuple(Severity):
            known = ", ".join(Severity)
            raise BadRequest(400, f"no severity is called {severity!r}", f"known are: {known}")
        seconds = float(body.get("seconds", TAINT_SECONDS))
        if not 0 < seconds <= TAINT_SECONDS_MAX:
            raise BadRequest(
                400, "seconds is out of range", f"give more than 0, up to {TAINT_SECONDS_MAX:g}"
            )
        event = events.TaintAsked(
            node,
            body["reason"][:REASON_CHARS_MAX],
            Severity(severity),
            slot,
            body.get("source") or "operator",
            seconds,
            _key(request),
        )
        return await self._follow(event, body)

    async def _untaint(self, request: Request) -> Reply:
        body = _fields(request, {"node": str, "slot": int, "dry_run": bool})
        node, slot = self._place(body)
        event = events.UntaintAsked(node, slot, _key(request))
        return await self._follow(event, body)

    def _place(self, body: Mapping[str, Any]) -> tuple[NodeId, int]:
        node, slot = NodeId(body.get("node", "")), body.get("slot", -1)
        self._known_node(node)
        slots = self._orchestrator.cluster.nodes[node].slots
        if not -1 <= slot < slots:
            raise BadRequest(404, f"{node} has no slot {slot}", f"its slots are 0 to {slots - 1}")
        return node, slot

    async def _follow(self, event: events.Event, body: Mapping[str, Any]) -> Reply:
        """Do it, or with `dry_run` only say what would be done."""
        dry = body.get("dry_run", False)
        if dry:
            decision = self._orchestrator.consider(event)
        else:
            decision = await self._orchestrator.decide(event)
        told = [note.why for note in decision.notes] or [decision.why]
        return json_response({"changed": decision.changed, "dry_run": dry, "why": told})

    def _known_node(self, node: str) -> None:
        if NodeId(node) not in self._orchestrator.cluster.nodes:
            known = ", ".join(sorted(self._orchestrator.cluster.nodes, key=state.natural)[:8])
            raise BadRequest(404, f"no node is called {node}", f"there are: {known or 'none'}")

    def _known_job(self, job: str) -> None:
        if JobId(job) not in self._orchestrator.cluster.jobs:
            raise BadRequest(404, f"no job is called {job}", "see GET /v1/jobs")

    async def _events(self, last: str) -> AsyncIterator[bytes]:
        # Without a place to go on from, a client gets what comes from now on.
        newest = self._orchestrator.history[-1]["seq"] if self._orchestrator.history else 0
        after = int(last) if last.isdigit() else newest
        yield b": connected\n\n"
        async for record in self._orchestrator.told(after):
            if record is None:
                yield b": alive\n\n"
            else:
                yield b"id: %d\ndata: %s\n\n" % (record["seq"], codec.dumps(record))

    async def _export(self, job: str) -> AsyncIterator[bytes]:
        for line in json_lines(self._journal.export(job)):
            yield line.encode()


def _key(request: Request) -> str:
    return request.headers.get("idempotency-key", "")


def _fields(request: Request, kinds: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """The request's object, with these fields at most, each of its kind."""
    body = request.json() if request.body else {}
    if not isinstance(body, dict):
        raise BadRequest(400, "the body is no object", f"send {{…}} with {', '.join(kinds)}")
    for name, value in body.items():
        if name not in kinds:
            raise BadRequest(400, f"unknown field {name!r}", f"known are: {', '.join(kinds)}")
        kind = kinds[name]
        fits = kind if isinstance(kind, tuple) else (kind,)
        if type(value) not in fits:
            wanted = " or ".join(one.__name__ for one in fits)
            raise BadRequest(400, f"{name} is {type(value).__name__}", f"give {wanted}")
    return body


def _one(found: Any, what: str, name: str) -> Reply:
    """One of a view's records, by its name."""
    if isinstance(found, dict):
        record = found.get(name)
    else:
        record = next((item for item in found if item["id"] == name), None)
    if record is None:
        return error_response(404, f"{what} has no {name}", f"see GET /v1/{what}")
    return json_response(record)


def _not_found(request: Request) -> Reply:
    return error_response(
        404, f"nothing is served at {request.path}", "see the list in keepstep/orchestrator/api.py"
    )
