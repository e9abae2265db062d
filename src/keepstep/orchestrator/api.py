"""HTTP for agents and operators: which path means what. Reading shows the brain's own view.

    POST /v1/agent                 upgrade to an agent's framed stream
    GET  /v1/cluster               everything: jobs, nodes, incidents, pulses
    GET  /v1/jobs                  GET /v1/jobs/{job}
    GET  /v1/nodes                 GET /v1/nodes/{node}
    GET  /v1/incidents             GET /v1/incidents/{incident}
    GET  /v1/loans                 who lent what to whom for how long
    GET  /v1/jobs/{job}/journal    the job's hash chain, one link per line, and a signature
    GET  /v1/jobs/{job}/policy     its policy and budgets; ?fault=rank:2 (or node:N, domain:NAME,
                                   drain:N): what would happen then
    POST /v1/jobs                  submit a JobSpec; the same one again changes nothing
    POST /v1/jobs/{job}/stop       {"save": true} writes a checkpoint of the boundary first
    POST /v1/jobs/{job}/migrate    {"ranks": [2], "to": "n4", "why": …}: move ranks that are well;
                                   {"ranks": [2], "cancel": true} takes it back
    POST /v1/nodes/{node}/drain    {"why": …}: nothing new comes here, and what is here moves away
    POST /v1/nodes/{node}/undrain  the node may be used again
    GET  /v1/taints                POST /v1/taints   {"node": "n3", "slot": 1, "reason": …,
                                   "severity": "avoid" | "leave" | "imminent", "seconds": 3600}
    POST /v1/taints/remove         {"node": "n3", "slot": 1}; without a slot: the whole node
    POST /v1/freeze                {"why": …}: nothing is decided in the whole cluster …
    POST /v1/unfreeze              … until now
    POST /v1/webhooks/alertmanager alerts that mean taints, by the mapping of alerts.py
    GET  /v1/events                server-sent events: each decision and its reason
    GET  /v1/openapi.json          all this for programs; the same as docs/openapi.json
    GET  /healthz                  no token needed

Everything but /healthz and the agents' stream (whose Hello carries the token) needs
`Authorization: Bearer <token>`. Errors are {"error": what is wrong, "fix": what to do}.

The POSTs that migrate, drain, undrain, taint, remove, freeze and unfreeze take `"dry_run": true`
(what would happen is told, and does not) and a header `Idempotency-Key` (the same key again changes
nothing, even if a new leader gets it).

A new path is one entry of ROUTES, at the end of this file; `make openapi` writes it down.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

from keepstep import codec
from keepstep.errors import ConfigError, KeepstepError, WireError
from keepstep.ledger.signing import Signer
from keepstep.model import (
    REASON_CHARS_MAX,
    TAINT_SECONDS,
    TAINT_SECONDS_MAX,
    JobId,
    JobSpec,
    NodeId,
    Rank,
    Severity,
)
from keepstep.orchestrator import alerts, events, forecast, openapi, planned, state, view
from keepstep.orchestrator.exporting import exported
from keepstep.orchestrator.http import (
    BadRequest,
    Reply,
    Request,
    Streamed,
    Upgraded,
    error_response,
    json_response,
)
from keepstep.orchestrator.journal import Journal
from keepstep.orchestrator.routes import Call, Field, Route, read_fields, served_at
from keepstep.orchestrator.run import Log, Orchestrator

PROTOCOL = "keepstep-stream"
JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""A job's name becomes part of paths and of URLs."""


class Api:
    """The paths of one orchestrator."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        journal: Journal,
        token: str,
        rules: alerts.Rules,
        log: Log,
        signer: Signer | None = None,
    ) -> None:
        self._orchestrator = orchestrator
        self._journal = journal
        self._token = token
        self._rules = rules
        self._log = log
        self._signer = signer

    async def handle(self, request: Request) -> Reply:
        served = served_at(ROUTES, request.path)
        route, names = served.get(request.method, (None, {}))
        if (route is None or not route.open) and not self._authorized(request):
            return error_response(
                401, "no token, or a wrong one", "send Authorization: Bearer <the cluster's token>"
            )
        if route is None and served:
            return error_response(
                405, f"{request.method} is not served here", f"use {' or '.join(sorted(served))}"
            )
        if route is None:
            return error_response(
                404, f"nothing is served at {request.path}", "see GET /v1/openapi.json"
            )
        try:
            body = read_fields(request, route.fields) if route.fields else {}
            return await route.handler(self, Call(request, names, body))
        except WireError as error:
            fix = f"see {route.method} {route.path} in GET /v1/openapi.json"
            raise BadRequest(400, str(error), fix) from error
        except KeepstepError as error:
            if isinstance(error, BadRequest):
                raise
            raise BadRequest(503, str(error), "ask the orchestrator that leads now") from error

    def _authorized(self, request: Request) -> bool:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(
            token.strip().encode(), self._token.encode()
        )

    # ---------------------------------------------------------------- reading

    async def _healthz(self, _: Call) -> Reply:
        status = "cut off" if self._orchestrator.cut_off else "leading"
        return json_response({"status": status, "term": self._orchestrator.term})

    async def _openapi(self, _: Call) -> Reply:
        return json_response(openapi.document(ROUTES))

    async def _cluster(self, _: Call) -> Reply:
        return json_response(self._orchestrator.picture())

    async def _jobs(self, _: Call) -> Reply:
        return self._part("jobs")

    async def _nodes(self, _: Call) -> Reply:
        return self._part("nodes")

    async def _incidents(self, _: Call) -> Reply:
        return self._part("incidents")

    async def _taints(self, _: Call) -> Reply:
        return self._part("taints")

    async def _loans(self, _: Call) -> Reply:
        return self._part("loans")

    def _part(self, what: str) -> Reply:
        return json_response({what: self._orchestrator.picture()[what]})

    async def _job(self, call: Call) -> Reply:
        # The launcher's own question: not the whole cluster's work.
        job = self._known_job(call.names["job"])
        return json_response(
            view.job_view(self._orchestrator.cluster, job, self._orchestrator.now())
        )

    async def _policy(self, call: Call) -> Reply:
        job = self._known_job(call.names["job"]).spec.job
        asked = tuple(filter(None, call.request.query.get("fault", "").split(",")))
        now, cluster = self._orchestrator.now(), self._orchestrator.cluster
        try:
            return json_response(forecast.policy_view(cluster, job, asked, now))
        except ConfigError as error:
            raise BadRequest(400, str(error), forecast.KINDS) from error

    async def _node(self, call: Call) -> Reply:
        node = self._known_node(call.names["node"])
        return json_response(view.node_view(self._orchestrator.cluster, node))

    async def _incident(self, call: Call) -> Reply:
        name = call.names["incident"]
        known = self._orchestrator.picture()["incidents"]
        for record in known:
            if record["id"] == name:
                return json_response(record)
        newest = ", ".join(str(record["id"]) for record in known[-8:])
        fix = f"the newest are: {newest}" if newest else "there are none"
        raise BadRequest(404, f"no incident is called {name}", fix)

    async def _export(self, call: Call) -> Reply:
        self._known_job(call.names["job"])
        return Streamed(self._chain(call.names["job"]), "application/jsonl")

    async def _chain(self, job: str) -> AsyncIterator[bytes]:
        for line in exported(self._journal, job, self._signer):
            yield line.encode()

    async def _events(self, call: Call) -> Reply:
        last = call.request.headers.get("last-event-id") or call.request.query.get("after", "")
        return Streamed(self._told(last), "text/event-stream")

    async def _told(self, last: str) -> AsyncIterator[bytes]:
        # Without a place to go on from, a client gets what comes from now on.
        newest = self._orchestrator.history[-1]["seq"] if self._orchestrator.history else 0
        after = int(last) if last.isdigit() else newest
        yield b": connected\n\n"
        async for record in self._orchestrator.told(after):
            if record is None:
                yield b": alive\n\n"
            else:
                yield b"id: %d\ndata: %s\n\n" % (record["seq"], codec.dumps(record))

    # ---------------------------------------------------------------- jobs

    async def _agent(self, call: Call) -> Reply:
        if "upgrade" not in call.request.headers:
            return error_response(
                426, "this path is the agents' stream", f"POST with Upgrade: {PROTOCOL}"
            )
        return Upgraded(PROTOCOL, self._orchestrator.serve_agent)

    async def _submit(self, call: Call) -> Reply:
        spec = codec.from_plain(JobSpec, call.request.json())
        if not JOB_NAME.fullmatch(spec.job):
            raise BadRequest(
                400,
                f"{spec.job[:80]!r} cannot be a job's name",
                "use up to 64 letters, digits, dots, dashes and underscores",
            )
        known = self._orchestrator.cluster.jobs.get(spec.job)
        if known is not None and not known.state.over and known.spec != spec:
            fields = [field.name for field in dataclasses.fields(JobSpec)]
            other = [name for name in fields if getattr(spec, name) != getattr(known.spec, name)]
            raise BadRequest(
                409,
                f"job {spec.job} is already there with another {', '.join(other)}",
                "give the same on each node, or another name (--job) to a new job",
            )
        decision = await self._orchestrator.decide(events.Submitted(spec))
        return json_response({"job": spec.job, "why": decision.why, "new": decision.changed})

    async def _stop(self, call: Call) -> Reply:
        job = self._known_job(call.names["job"]).spec.job
        why = call.body.get("why") or "an operator asked for it"
        event = events.StopAsked(job, why, save=call.body.get("save", False))
        decision = await self._orchestrator.decide(event)
        return json_response({"job": job, "why": decision.why})

    async def _migrate(self, call: Call) -> Reply:
        job, body = self._known_job(call.names["job"]), call.body
        name, ranks, to = job.spec.job, body.get("ranks", []), body.get("to", "")
        home, cancel = body.get("home", False), body.get("cancel", False)
        if home and (ranks or to):
            raise BadRequest(400, "home is for all ranks", 'send {"home": true} and no more')
        if cancel and (home or to):
            raise BadRequest(
                400, "cancel names ranks only", 'send {"ranks": [2], "cancel": true} and no more'
            )
        if not home and not ranks:
            raise BadRequest(400, "ranks is missing", 'send {"ranks": [2]} or {"home": true}')
        if job.roster is None or job.state.over:
            raise BadRequest(409, f"{name} does not run", "see GET /v1/jobs")
        if bad := [rank for rank in ranks if not 0 <= rank < len(job.roster.seats)]:
            last = len(job.roster.seats) - 1
            raise BadRequest(404, f"{name} has no rank {bad[0]}", f"its ranks are 0 to {last}")
        if to:
            self._known_node(to)
        why = "" if cancel else planned.refusal(job, [Rank(rank) for rank in ranks])
        if why:
            raise BadRequest(409, why, "nothing was changed")
        asked = tuple(Rank(rank) for rank in sorted(set(ranks)))
        why = body.get("why") or "an operator asked for it"
        event = events.MigrateAsked(name, asked, why, NodeId(to), home, call.key, cancel)
        return await self._follow(event, call)

    # ---------------------------------------------------------------- nodes and taints

    async def _drain(self, call: Call) -> Reply:
        node = self._known_node(call.names["node"]).node
        why = call.body.get("why") or "an operator asked for it"
        return await self._follow(events.DrainAsked(node, why, call.key), call)

    async def _undrain(self, call: Call) -> Reply:
        node = self._known_node(call.names["node"]).node
        return await self._follow(events.UndrainAsked(node, call.key), call)

    async def _taint(self, call: Call) -> Reply:
        node, slot = self._place(call.body)
        event = events.TaintAsked(
            node,
            call.body["reason"][:REASON_CHARS_MAX],
            Severity(call.body.get("severity", Severity.AVOID)),
            slot,
            call.body.get("source") or "operator",
            float(call.body.get("seconds", TAINT_SECONDS)),
            call.key,
        )
        return await self._follow(event, call)

    async def _untaint(self, call: Call) -> Reply:
        node, slot = self._place(call.body)
        event = events.UntaintAsked(node, slot, call.key, call.body.get("source", ""))
        return await self._follow(event, call)

    async def _freeze(self, call: Call) -> Reply:
        why = call.body.get("why") or "an operator asked for it"
        return await self._follow(events.FreezeAsked(why[:REASON_CHARS_MAX], call.key), call)

    async def _unfreeze(self, call: Call) -> Reply:
        return await self._follow(events.UnfreezeAsked(call.key), call)

    def _place(self, body: Mapping[str, Any]) -> tuple[NodeId, int]:
        node, slot = self._known_node(body["node"]), body.get("slot", -1)
        if not -1 <= slot < node.slots:
            raise BadRequest(
                404, f"{node.node} has no slot {slot}", f"its slots are 0 to {node.slots - 1}"
            )
        return node.node, slot

    async def _alertmanager(self, call: Call) -> Reply:
        """Each alert is followed or told why not; only a payload that is none is refused."""
        given = alerts.read(call.request.json())
        slots = {name: node.slots for name, node in self._orchestrator.cluster.nodes.items()}
        verdicts = alerts.judge(given, self._rules, slots)
        # All at once: they share one write to the journal.
        done = await asyncio.gather(*(self._follow_alert(verdict) for verdict in verdicts))
        return json_response({"alerts": done})

    async def _follow_alert(self, verdict: alerts.Verdict) -> dict[str, Any]:
        told = {"alert": verdict.alert.name, "place": verdict.place or None}
        told["status"] = "firing" if verdict.alert.firing else "resolved"
        if verdict.event is None:
            # Nobody reads the answer to a webhook: whoever wonders looks into our log.
            self._log("alert.ignored", **told, why=verdict.why)
            return {**told, "changed": False, "why": verdict.why}
        decision = await self._orchestrator.decide(verdict.event)
        return {**told, "changed": decision.changed, "why": decision.why}

    # ---------------------------------------------------------------- what they share

    async def _follow(self, event: events.Event, call: Call) -> Reply:
        """Do it, or with `dry_run` only say what would be done."""
        dry = call.body.get("dry_run", False)
        if dry:
            decision = self._orchestrator.consider(event)
        else:
            decision = await self._orchestrator.decide(event)
        told = [note.why for note in decision.notes] or [decision.why]
        return json_response({"changed": decision.changed, "dry_run": dry, "why": told})

    def _known_node(self, name: str) -> state.NodeState:
        nodes = self._orchestrator.cluster.nodes
        if NodeId(name) not in nodes:
            known = ", ".join(sorted(nodes, key=state.natural)[:8])
            raise BadRequest(404, f"no node is called {name}", f"there are: {known or 'none'}")
        return nodes[NodeId(name)]

    def _known_job(self, name: str) -> state.Job:
        jobs = self._orchestrator.cluster.jobs
        if JobId(name) not in jobs:
            known = ", ".join(sorted(jobs)[:8])
            raise BadRequest(404, f"no job is called {name}", f"there are: {known or 'none'}")
        return jobs[JobId(name)]


# ---------------------------------------------------------------- the table

_WHY = Field((str,), "the reason, for the record")
_DRY_RUN = Field((bool,), "only say what would happen")
_NODE = Field((str,), "the node's name", required=True)
_SLOT = Field((int,), "one of its slots; without it the whole node")

ROUTES: tuple[Route, ...] = (
    Route("GET", "/healthz", Api._healthz, "Whether this orchestrator leads", "Health", open=True),
    Route(
        "POST",
        "/v1/agent",
        Api._agent,
        "Upgrade to an agent's framed stream; its Hello carries the token",
        PROTOCOL,
        headers={"Upgrade": f"Always {PROTOCOL}"},
        open=True,
    ),
    Route("GET", "/v1/openapi.json", Api._openapi, "This document", "OpenApi"),
    Route("GET", "/v1/cluster", Api._cluster, "Everything", "Cluster"),
    Route(
        "GET",
        "/v1/events",
        Api._events,
        "Each decision and its reason, as they happen",
        "text/event-stream",
        query={"after": "Go on after the decision with this seq; without it, from now on"},
        headers={"Last-Event-ID": "The same, as browsers send it"},
    ),
    Route("GET", "/v1/jobs", Api._jobs, "All jobs", "Jobs"),
    Route(
        "POST",
        "/v1/jobs",
        Api._submit,
        "Submit a job; the same one again changes nothing",
        "Submitted",
        body="JobSpec",
        conflicts=True,
    ),
    Route("GET", "/v1/jobs/{job}", Api._job, "One job", "Job"),
    Route(
        "GET",
        "/v1/jobs/{job}/journal",
        Api._export,
        "The job's hash chain, one link per line",
        "application/jsonl",
    ),
    Route(
        "GET",
        "/v1/jobs/{job}/policy",
        Api._policy,
        "Its policy, its budgets, and what a fault would lead to",
        "Policy",
        query={"fault": "rank:2, node:n3, domain:NAME or drain:n3; several with commas"},
    ),
    Route(
        "POST",
        "/v1/jobs/{job}/stop",
        Api._stop,
        "End a job",
        "Stopped",
        {"save": Field((bool,), "write a checkpoint of the boundary first"), "why": _WHY},
    ),
    Route(
        "POST",
        "/v1/jobs/{job}/migrate",
        Api._migrate,
        "Move ranks that are well to spares, live",
        "Followed",
        {
            "ranks": Field((list,), "the ranks, such as [2]", items=int),
            "to": Field((str,), "only to this node; without it the best spare"),
            "home": Field((bool,), "instead of ranks: all go back to where they started"),
            "cancel": Field((bool,), "take it back: these ranks need not move any more"),
            "why": _WHY,
            "dry_run": _DRY_RUN,
        },
        keyed=True,
        conflicts=True,
    ),
    Route("GET", "/v1/nodes", Api._nodes, "All nodes", "Nodes"),
    Route("GET", "/v1/nodes/{node}", Api._node, "One node", "Node"),
    Route(
        "POST",
        "/v1/nodes/{node}/drain",
        Api._drain,
        "Nothing new comes to a node, and what is there moves away",
        "Followed",
        {"why": _WHY, "dry_run": _DRY_RUN},
        keyed=True,
    ),
    Route(
        "POST",
        "/v1/nodes/{node}/undrain",
        Api._undrain,
        "A drained node may be used again",
        "Followed",
        {"dry_run": _DRY_RUN},
        keyed=True,
    ),
    Route("GET", "/v1/incidents", Api._incidents, "Incidents, oldest first", "Incidents"),
    Route("GET", "/v1/incidents/{incident}", Api._incident, "One incident", "Incident"),
    Route("GET", "/v1/loans", Api._loans, "Who lent what to whom for how long", "Loans"),
    Route("GET", "/v1/taints", Api._taints, "What is not to be used, and why", "Taints"),
    Route(
        "POST",
        "/v1/taints",
        Api._taint,
        "There is a reason not to use a node or a slot; the worst of several sources counts",
        "Followed",
        {
            "node": _NODE,
            "slot": _SLOT,
            "severity": Field((str,), "default: avoid", one_of=tuple(Severity)),
            "reason": Field((str,), "what is wrong with it", required=True),
            "source": Field((str,), "who says so; one taint of a place each; default: operator"),
            "seconds": Field(
                (int, float),
                f"how long it lasts; default: {TAINT_SECONDS:g}",
                above=0,
                most=TAINT_SECONDS_MAX,
            ),
            "dry_run": _DRY_RUN,
        },
        keyed=True,
    ),
    Route(
        "POST",
        "/v1/taints/remove",
        Api._untaint,
        "The reason does not hold any more",
        "Followed",
        {
            "node": _NODE,
            "slot": _SLOT,
            "source": Field((str,), "only what this source said; without it, all"),
            "dry_run": _DRY_RUN,
        },
        keyed=True,
    ),
    Route(
        "POST",
        "/v1/freeze",
        Api._freeze,
        "From now on nothing is decided in the whole cluster",
        "Followed",
        {"why": _WHY, "dry_run": _DRY_RUN},
        keyed=True,
    ),
    Route(
        "POST",
        "/v1/unfreeze",
        Api._unfreeze,
        "What waited is taken up again",
        "Followed",
        {"dry_run": _DRY_RUN},
        keyed=True,
    ),
    Route(
        "POST",
        "/v1/webhooks/alertmanager",
        Api._alertmanager,
        "Alerts that mean taints, by the operator's mapping",
        "AlertsDone",
        body="AlertmanagerPayload",
    ),
)
"""Everything that is served. The tests hold docs/openapi.json and the text above against it."""
