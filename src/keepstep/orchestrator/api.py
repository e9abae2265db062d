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
    POST /v1/jobs/{job}/stop       {"save": true}: at a saved boundary; {"rewind": true}: go back
    POST /v1/jobs/{job}/migrate    {"ranks": [2], "to": "n4", "why": …}: move ranks that are well;
                                   {"ranks": [2], "cancel": true} takes it back
    POST /v1/nodes/{node}/drain    {"why": …}: nothing new comes here, and what is here moves away
    POST /v1/nodes/{node}/undrain  the node may be used again
    POST /v1/nodes/{node}/forget   the node is gone, and need not be remembered
    GET  /v1/taints                POST /v1/taints   {"node": "n3", "slot": 1, "reason": …,
                                   "severity": "avoid" | "leave" | "imminent", "seconds": 3600}
    POST /v1/taints/remove         {"node": "n3", "slot": 1}; without a slot: the whole node
    POST /v1/freeze                {"why": …}: nothing is decided until POST /v1/unfreeze
    POST /v1/webhooks/alertmanager alerts that mean taints, by the mapping of alerts.py
    GET  /v1/events                server-sent events: each decision and its reason
    GET  /v1/openapi.json          all this for programs; the same as docs/openapi.json
    GET  /v1/orchestrator          what it says of itself: release, journal, files, clock
    GET  /healthz                  GET /readyz   whether it serves; leads with its journal; open
    GET  /metrics                  everything in numbers, for Prometheus
    GET  /v1/board                 what the live page shows; the page asks for the token
    GET  /                         the live page itself, with its files, which hold no data:
    GET  /page/page.css            GET /page/page.js   GET /page/map.js   GET /page/icon.svg

Everything but /healthz, /readyz, the page's files and the agents' stream (whose Hello carries the
token) needs `Authorization: Bearer <token>`. Errors: {"error": what is wrong, "fix": what to do}.

The POSTs that migrate, drain, undrain, forget, taint, remove, freeze and unfreeze take `dry_run`
(if true, what would happen is told, and does not) and a header `Idempotency-Key` (the same key
again changes nothing, even if a new leader gets it).

A new path is one entry of ROUTES, at the end of this file; `make openapi` writes it down.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable

from keepstep import codec, wire
from keepstep.errors import ConfigError, KeepstepError, WireError
from keepstep.ledger.signing import Signer
from keepstep.model import (
    REASON_CHARS_MAX,
    TAINT_SECONDS,
    TAINT_SECONDS_MAX,
    JobSpec,
    NodeId,
    Rank,
    Severity,
)
from keepstep.orchestrator import (
    admission,
    alerting,
    alerts,
    brain,
    events,
    forecast,
    names,
    openapi,
    own,
    state,
    telling,
    view,
    watching,
)
from keepstep.orchestrator.access import EVENTS, EXPORT, UNKNOWN, Gate, Sight, told_to
from keepstep.orchestrator.accounts import Accounts
from keepstep.orchestrator.exporting import exported, in_parts
from keepstep.orchestrator.http import (
    BadRequest,
    Reply,
    Request,
    Response,
    Streamed,
    Upgraded,
    error_response,
    json_response,
)
from keepstep.orchestrator.journal import Journal
from keepstep.orchestrator.pictures import Pictures
from keepstep.orchestrator.routes import Call, Field, Route, of_node, read_body, served_at
from keepstep.orchestrator.run import Log, Orchestrator
from keepstep.orchestrator.tokens import Caller, Role

PROTOCOL = "keepstep-stream"
NOBODY = Caller("", Role.VIEWER)
"""Who asks for what is open to all."""
SMALL_BYTES = 1024
"""Of a body that is read in no time: to stop a job is never refused for what was asked before."""


def _part(what: str) -> Callable[[Api, Call], Awaitable[Reply]]:
    async def answer(api: Api, call: Call) -> Reply:
        return Response(200, api._pictures.of(api._sight(call)).part(what))

    return answer


class Api:
    """The paths of one orchestrator."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        journal: Journal,
        gate: Gate,
        rules: alerts.Rules,
        log: Log,
        signer: Signer | None = None,
    ) -> None:
        self._orchestrator = orchestrator
        self._journal = journal
        self._gate = gate
        self._signer = signer
        self.watching = watching.Watching(orchestrator, Accounts(journal))
        self.own = own.Own(orchestrator, journal)
        self.alerting = alerting.Alerting(orchestrator, rules, gate, log)
        self._pictures = Pictures(orchestrator)
        self._telling = telling.Telling(orchestrator, self._sight_of)

    async def handle(self, request: Request) -> Reply:
        served = served_at(ROUTES, request.path)
        route, names = served.get(request.method, (None, {}))
        caller = self._gate.caller(request)
        if (route is None or not route.open) and caller is None:
            return UNKNOWN
        if route is None and served:
            return error_response(
                405, f"{request.method} is not served here", f"use {' or '.join(sorted(served))}"
            )
        if route is None:
            return error_response(
                404, f"nothing is served at {request.path[:200]}", "see GET /v1/openapi.json"
            )
        if caller is not None and not route.open:
            self._gate.check(route, caller)
        return await self._serve(route, Call(request, names, {}, caller or NOBODY))

    async def _serve(self, route: Route, call: Call) -> Reply:
        began, spent = time.thread_time(), -1.0
        try:
            if len(call.request.body) > SMALL_BYTES:
                # A large one takes long to read, whatever it says, and also if it is refused.
                self._gate.afford(call.caller)
            call = dataclasses.replace(call, body=read_body(call.request, route))
            if route.method == "GET" or (route.fields and call.body.get("dry_run")):
                self._gate.afford(call.caller)
            else:
                # What waits for a decision is not measured: others are served meanwhile.
                spent = time.thread_time() - began
            return await route.handler(self, call)
        except WireError as error:
            where = f"see {route.method} {route.path} in GET /v1/openapi.json"
            raise BadRequest(400, str(error), where) from error
        except BadRequest:
            raise
        except KeepstepError as error:
            raise BadRequest(503, told_to(call.caller, error), "ask who leads now") from error
        finally:
            took = spent if spent >= 0 else time.thread_time() - began
            self._gate.charge(call.caller, took)

    def _sight(self, call: Call) -> Sight:
        return self._sight_of(call.caller.project)

    def _sight_of(self, project: str) -> Sight:
        """What callers of this project may see, of the jobs that there are now, and were."""
        return Sight(project, self._owners(), self._orchestrator.cluster.nodes)

    def _owners(self) -> names.Owners:
        return names.Owners(self._orchestrator.cluster)

    # ---------------------------------------------------------------- reading

    async def _openapi(self, _: Call) -> Reply:
        return json_response(openapi.document(ROUTES))

    async def _cluster(self, call: Call) -> Reply:
        return Response(200, self._pictures.of(self._sight(call)).whole)

    # Parts of the same picture, each with a path of its own.
    _jobs, _nodes, _incidents = _part("jobs"), _part("nodes"), _part("incidents")
    _taints, _loans = _part("taints"), _part("loans")

    async def _job(self, call: Call) -> Reply:
        # The launcher's own question: not the whole cluster's work.
        job = self._known_job(call.names["job"], call)
        return Response(200, self._pictures.job(self._sight(call), job))

    async def _policy(self, call: Call) -> Reply:
        job = self._known_job(call.names["job"], call).spec.job
        asked = tuple(filter(None, call.request.query.get("fault", "").split(",")))
        cluster, sight = self._orchestrator.cluster, self._sight(call)
        seen = None if sight.all else forecast.Seen(sight.places(cluster), sight.job)
        try:
            plain = forecast.policy_view(cluster, job, asked, self._orchestrator.now(), seen)
        except ConfigError as error:
            raise BadRequest(400, str(error), forecast.KINDS) from error
        return json_response(sight.cleaned(plain))

    async def _node(self, call: Call) -> Reply:
        node = self._known_node(call.names["node"], call)
        plain = view.node_view(self._orchestrator.cluster, node)
        return json_response(self._sight(call).node(plain))

    async def _incident(self, call: Call) -> Reply:
        name, sight = call.names["incident"], self._sight(call)
        known = [one for one in view.incidents(self._orchestrator.cluster) if sight.job(one.job)]
        for record in known:
            if record.incident == name:
                return json_response(sight.cleaned(view.incident_view(record)))
        newest = ", ".join(record.incident for record in known[-8:])
        fix = f"the newest are: {newest}" if newest else "there are none"
        raise BadRequest(404, f"no incident is called {name[:80]}", fix)

    async def _export(self, call: Call) -> Reply:
        job, sight = self._known_job(call.names["job"], call).spec.job, self._sight(call)
        if self._orchestrator.keeping()["away"]:
            # Each try would hold up the loop.
            raise BadRequest(503, "the journal is away", "ask again when it is back")
        links = sight.links(job, self._journal.export(job), call.caller.project)
        lines = in_parts(exported(links, job, self._signer))
        return Streamed(self._gate.counted(lines, EXPORT, call.request, call.caller), EXPORT)

    async def _events(self, call: Call) -> Reply:
        last = call.request.headers.get("last-event-id") or call.request.query.get("after", "")
        spent = functools.partial(self._gate.charge, call.caller)
        told = self._telling.events(last, call.caller.project, spent)
        return Streamed(self._gate.counted(told, EVENTS, call.request, call.caller), EVENTS)

    # ---------------------------------------------------------------- jobs

    async def _agent(self, call: Call) -> Reply:
        if "upgrade" not in call.request.headers:
            return error_response(
                426, "this path is the agents' stream", f"POST with Upgrade: {PROTOCOL}"
            )
        offer = {wire.OFFER: f"{wire.OLDEST}-{wire.VERSION}"}
        shown = admission.shows_an_agent(call.request.certificate, self._gate.caller(call.request))
        most = wire.HELLO_BYTES_MAX if shown else wire.STRANGER_BYTES_MAX
        serve = functools.partial(self._orchestrator.serve_agent, hello_bytes_max=most)
        return Upgraded(PROTOCOL, serve, offer)

    async def _submit(self, call: Call) -> Reply:
        with self._gate.charged(call.caller):
            spec = codec.from_plain(JobSpec, call.body)
            admission.check(spec)
        cluster, whose = self._orchestrator.cluster, self._owners().get(spec.job)
        admission.check_name(spec, call.caller, cluster.nodes, whose)
        spec = admission.owned(spec, call.caller, cluster.jobs.get(spec.job), whose)
        with self._orchestrator.intake.room_for(spec, call.caller, cluster):
            decision = await self._decide(events.Submitted(spec), call)
        # Again: one that was on its way, and came first, was not there to be compared with before.
        known = self._orchestrator.cluster.jobs.get(spec.job)
        admission.owned(spec, call.caller, known, self._owners().get(spec.job))
        why = "; ".join(self._sight(call).told(decision))
        return json_response({"job": spec.job, "why": why, "new": decision.changed})

    async def _stop(self, call: Call) -> Reply:
        job = self._known_job(call.names["job"], call).spec.job
        why = call.body.get("why") or "an operator asked for it"
        save, rewind = (call.body.get(name, False) for name in ("save", "rewind"))
        event = events.StopAsked(job, why[:REASON_CHARS_MAX], save=save, rewind=rewind)
        decision = await self._decide(event, call)
        return json_response({"job": job, "why": "; ".join(self._sight(call).told(decision))})

    async def _migrate(self, call: Call) -> Reply:
        job, body = self._known_job(call.names["job"], call), call.body
        name, ranks, to = job.spec.job, body.get("ranks", []), body.get("to", "")
        home, cancel = body.get("home", False), body.get("cancel", False)
        admission.check_migrate(job, ranks, to=to, home=home, cancel=cancel)
        if to:
            self._known_node(to, call)
        asked = tuple(Rank(rank) for rank in sorted(set(ranks)))
        why = (body.get("why") or "an operator asked for it")[:REASON_CHARS_MAX]
        event = events.MigrateAsked(name, asked, why, NodeId(to), home, call.key, cancel)
        return await self._follow(event, call)

    # ---------------------------------------------------------------- nodes and taints

    async def _drain(self, call: Call) -> Reply:
        node = self._known_node(call.names["node"], call).node
        why = (call.body.get("why") or "an operator asked for it")[:REASON_CHARS_MAX]
        return await self._follow(events.DrainAsked(node, why, call.key), call)

    async def _undrain(self, call: Call) -> Reply:
        node = self._known_node(call.names["node"], call).node
        return await self._follow(events.UndrainAsked(node, call.key), call)

    async def _forget(self, call: Call) -> Reply:
        # Asked again with its key, the node is not there any more, and that is what was wanted.
        known = call.key in self._orchestrator.cluster.requests
        node = NodeId(call.names["node"])
        node = node if known else self._known_node(node, call).node
        return await self._follow(events.ForgetAsked(node, call.key), call)

    async def _taint(self, call: Call) -> Reply:
        node, slot = self._place(call)
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
        node, slot = self._place(call)
        event = events.UntaintAsked(node, slot, call.key, call.body.get("source", ""))
        return await self._follow(event, call)

    async def _freeze(self, call: Call) -> Reply:
        why = call.body.get("why") or "an operator asked for it"
        return await self._follow(events.FreezeAsked(why[:REASON_CHARS_MAX], call.key), call)

    async def _unfreeze(self, call: Call) -> Reply:
        return await self._follow(events.UnfreezeAsked(call.key), call)

    def _place(self, call: Call) -> tuple[NodeId, int]:
        node, slot = self._known_node(call.body["node"], call), call.body.get("slot", -1)
        if not -1 <= slot < node.slots:
            raise BadRequest(
                404, f"{node.node} has no slot {slot}", f"its slots are 0 to {node.slots - 1}"
            )
        return node.node, slot

    # ---------------------------------------------------------------- what they share

    async def _decide(self, event: events.Asked, call: Call) -> brain.Decision:
        """Whoever asked is named in the journal."""
        named = dataclasses.replace(event, by=call.caller.name)
        with self._gate.waits(call.caller):
            return await self._orchestrator.decide(named)

    async def _follow(self, event: events.Asked, call: Call) -> Reply:
        """Do it, or with `dry_run` only say what would be done."""
        dry = call.body.get("dry_run", False)
        decision = self._orchestrator.consider(event) if dry else await self._decide(event, call)
        told = self._sight(call).told(decision)
        return json_response({"changed": decision.changed, "dry_run": dry, "why": told})

    def _known_node(self, name: str, call: Call) -> state.NodeState:
        return self._sight(call).known_node(self._orchestrator.cluster, name)

    def _known_job(self, name: str, call: Call) -> state.Job:
        return self._sight(call).known_job(self._orchestrator.cluster, name)


# ---------------------------------------------------------------- the table

VIEWER, OPERATOR = Role.VIEWER, Role.OPERATOR
_WHY = Field((str,), "the reason, for the record")
_DRY_RUN = Field((bool,), "only say what would happen")
_SAVE = Field((bool,), "write a checkpoint of the boundary first")
_REWIND = Field((bool,), "not to end it: go back to the newest checkpoint, and on from there")
_NODE = Field((str,), "the node's name", required=True)
_SLOT = Field((int,), "one of its slots; without it the whole node")

ROUTES: tuple[Route, ...] = (
    *own.ROUTES,
    Route(
        "POST",
        "/v1/agent",
        Api._agent,
        "Upgrade to an agent's framed stream; its Hello carries the token",
        PROTOCOL,
        headers={"Upgrade": f"Always {PROTOCOL}"},
        open=True,
    ),
    Route("GET", "/v1/openapi.json", Api._openapi, "This document", "OpenApi", role=VIEWER),
    Route("GET", "/v1/cluster", Api._cluster, "Everything", "Cluster", role=VIEWER),
    Route(
        "GET",
        "/v1/events",
        Api._events,
        "Each decision and its reason, as they happen",
        EVENTS,
        query={
            "after": "Go on after the decision with this seq; without it, from now on. An event "
            '`gap`, {"asked", "from"}, says that some since are not kept here; 0: all that are'
        },
        headers={"Last-Event-ID": "The same, as browsers send it"},
        role=VIEWER,
    ),
    Route("GET", "/v1/jobs", Api._jobs, "All jobs", "Jobs", role=VIEWER),
    Route(
        "POST",
        "/v1/jobs",
        Api._submit,
        "Submit a job; the same one again changes nothing",
        "Submitted",
        body="JobSpec",
        conflicts=True,
        role=OPERATOR,
    ),
    Route("GET", "/v1/jobs/{job}", Api._job, "One job", "Job", role=VIEWER),
    Route(
        "GET",
        "/v1/jobs/{job}/journal",
        Api._export,
        "The job's hash chain, one link per line",
        EXPORT,
        role=VIEWER,
    ),
    Route(
        "GET",
        "/v1/jobs/{job}/policy",
        Api._policy,
        "Its policy, its budgets, and what a fault would lead to",
        "Policy",
        query={"fault": "rank:2, node:n3, domain:NAME or drain:n3; several with commas"},
        role=VIEWER,
    ),
    Route(
        "POST",
        "/v1/jobs/{job}/stop",
        Api._stop,
        "End a job, or send it back to its newest checkpoint",
        "Stopped",
        {"save": _SAVE, "rewind": _REWIND, "why": _WHY},
        role=OPERATOR,
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
        role=OPERATOR,
    ),
    Route("GET", "/v1/nodes", Api._nodes, "All nodes", "Nodes", role=VIEWER),
    Route("GET", "/v1/nodes/{node}", Api._node, "One node", "Node", role=VIEWER),
    of_node(
        "drain",
        Api._drain,
        "Nothing new comes to a node, and what is there moves away",
        {"why": _WHY, "dry_run": _DRY_RUN},
    ),
    of_node("undrain", Api._undrain, "A drained node may be used again", {"dry_run": _DRY_RUN}),
    of_node("forget", Api._forget, "A node that is gone is forgotten", {"dry_run": _DRY_RUN}),
    Route(
        "GET", "/v1/incidents", Api._incidents, "Incidents, oldest first", "Incidents", role=VIEWER
    ),
    Route(
        "GET", "/v1/incidents/{incident}", Api._incident, "One incident", "Incident", role=VIEWER
    ),
    Route(
        "GET", "/v1/loans", Api._loans, "Who lent what to whom for how long", "Loans", role=VIEWER
    ),
    Route(
        "GET", "/v1/taints", Api._taints, "What is not to be used, and why", "Taints", role=VIEWER
    ),
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
        role=OPERATOR,
        shared=True,
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
        role=OPERATOR,
        shared=True,
    ),
    Route(
        "POST",
        "/v1/freeze",
        Api._freeze,
        "From now on nothing is decided in the whole cluster",
        "Followed",
        {"why": _WHY, "dry_run": _DRY_RUN},
        keyed=True,
        role=OPERATOR,
        shared=True,
    ),
    Route(
        "POST",
        "/v1/unfreeze",
        Api._unfreeze,
        "What waited is taken up again",
        "Followed",
        {"dry_run": _DRY_RUN},
        keyed=True,
        role=OPERATOR,
        shared=True,
    ),
    *alerting.ROUTES,
    *watching.ROUTES,
)
"""Everything that is served. The tests hold docs/openapi.json and the text above against it."""
