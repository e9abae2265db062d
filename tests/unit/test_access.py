"""Who may do what, and that one customer never sees another: every route, every role."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from keepstep import codec, wire
from keepstep.clock import RealClock
from keepstep.config import OrchestratorConfig
from keepstep.model import (
    Generation,
    JobId,
    JobSpec,
    JobState,
    NodeId,
    Phase,
    Policy,
    Rank,
    Severity,
    Sign,
)
from keepstep.orchestrator import access, admission, brain, events, forecast, launch, names, state
from keepstep.orchestrator.access import EVENTS, WITHHELD, Gate, Sight, refusal
from keepstep.orchestrator.api import ROUTES, Api
from keepstep.orchestrator.http import BadRequest, Request, Response, Streamed, Upgraded
from keepstep.orchestrator.journal import Link
from keepstep.orchestrator.journal_sqlite import SqliteJournal
from keepstep.orchestrator.remedies import ADD
from keepstep.orchestrator.routes import Call, Route
from keepstep.orchestrator.run import Orchestrator
from keepstep.orchestrator.stepped import Waiting
from keepstep.orchestrator.tokens import CLUSTER, Caller, Role, Tokens, new
from keepstep.orchestrator.turn import Note, Turn

OWN = "the-clusters-own-token"
SECRET = "zebra"
"""In everything that is B's: it must not be in anything that A gets."""
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "security.md"


class Served:
    """A real orchestrator with two customers, without sockets."""

    def __init__(self, directory: Path) -> None:
        self.journal = SqliteJournal(directory / "journal.db")
        quiet: Any = lambda *_, **__: None  # noqa: E731
        self.orchestrator = Orchestrator(
            self.journal, OrchestratorConfig(), RealClock(), OWN, quiet
        )
        path = directory / "tokens.json"
        self.texts = {
            f"{role}{project}": new(path, f"{role}{project}", role, project=project)[0]
            for role in Role
            for project in ("", "a", "b")
            if not project or role in (Role.VIEWER, Role.OPERATOR)
        }
        self.texts["own"] = OWN
        self.gate = Gate(Tokens(OWN, path))
        self.api = Api(self.orchestrator, self.journal, self.gate, {}, quiet)

    def feed(self, *given: events.Event) -> None:
        self.orchestrator._handle([Waiting(event) for event in given])

    async def ask(self, who: str, method: str, path: str, body: object = None) -> tuple[int, str]:
        headers = {"authorization": f"Bearer {self.texts.get(who, who)}"}
        data = b"" if body is None else codec.dumps(body)
        path, _, query = path.partition("?")
        asked = dict(pair.split("=", 1) for pair in query.split("&")) if query else {}
        try:
            reply = await self.api.handle(Request(method, path, asked, headers, data))
        except BadRequest as error:
            return error.status, f"{error} {error.fix}"
        if isinstance(reply, Streamed):
            return 200, await self.read(reply)
        assert isinstance(reply, Response)
        return reply.status, reply.body.decode()

    async def read(self, reply: Streamed) -> str:
        """A stream to its end, or until nothing comes."""
        parts = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                while part := await anext(aiter(reply.parts), b""):
                    parts.append(part.decode())
        return "".join(parts)


@contextlib.asynccontextmanager
async def served(directory: Path) -> AsyncIterator[Served]:
    made = Served(directory)
    working = asyncio.create_task(made.orchestrator._work())
    try:
        async with asyncio.timeout(60):
            yield made
    finally:
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working
        made.journal.close()


def populate(made: Served) -> None:
    """Two customers on shared nodes; B's job is in trouble, and A's would have to lend."""
    for name in ("n0", "n1", "n2", "n3"):
        made.feed(wire.Hello(NodeId(name), "127.0.0.1", 2, 1, 2, f"boot-{name}"))
    specs = [
        JobSpec(JobId("mine"), "mine.py", nodes=2, ranks_per_node=2, project="a"),
        JobSpec(
            JobId(SECRET),
            f"{SECRET}.py",
            (f"--{SECRET}",),
            nodes=2,
            ranks_per_node=2,
            priority=5,
            project="b",
            environment={SECRET.upper(): SECRET},
            log_directory=f"/logs/{SECRET}",
        ),
    ]
    for spec in specs:
        made.feed(events.Submitted(spec))
    for spec in specs:
        job = made.orchestrator.cluster.jobs[spec.job]
        assert job.roster is not None
        for seat in job.roster.seats:
            done = wire.SeatReport(seat.rank, 1, step=1)
            report = wire.PhaseReport(seat.node, spec.job, job.generation, Phase.RESUME, (done,))
            made.feed(report)
        made.orchestrator._alive.heartbeats[seat.node] = wire.Heartbeat(
            seat.node, (wire.JobPulse(spec.job, job.generation, 5, 4, 0.1),)
        )
    job = made.orchestrator.cluster.jobs[JobId(SECRET)]
    assert job.roster is not None
    seat = job.roster.seats[0]
    made.feed(events.TaintAsked(seat.node, f"the {SECRET} job melts it", Severity.AVOID))
    made.feed(events.NodeSilent(seat.node))
    # And a node of A's, once more, with a worker of B's that it should not have.
    mine = made.orchestrator.cluster.jobs[JobId("mine")]
    assert mine.roster is not None
    there = mine.roster.seats[0]
    stray = wire.WorkerFact(JobId(SECRET), there.rank, 1, 1, job.generation)
    made.feed(wire.Hello(there.node, "127.0.0.1", 2, 1, 2, f"boot-{there.node}", (stray,)))
    made.feed(wire.Observed(there.node, JobId("mine"), Sign.BROKEN, there.rank))


def in_two_projects(test: Any) -> Any:
    def run(tmp_path: Path) -> None:
        async def body() -> None:
            async with served(tmp_path) as made:
                populate(made)
                await test(made)

        asyncio.run(body())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def paths(made: Served, job: str) -> list[tuple[Route, str]]:
    """Every route, with the names of somebody's things."""
    cluster = made.orchestrator.cluster
    known = cluster.jobs[JobId(job)]
    incident = known.incident.incident if known.incident else "none"
    assert known.roster is not None
    names = {"job": job, "node": str(known.roster.seats[1].node), "incident": incident}
    return [
        (route, re.sub(r"\{(\w+)\}", lambda named: names[named[1]], route.path))
        for route in ROUTES
        if not route.open
    ]


# --- one customer never sees another --------------------------------------------------------------


@in_two_projects
async def test_nothing_that_a_project_can_read_names_another_projects_job(made: Served):
    for who in ("viewera", "operatora"):
        for job in ("mine", SECRET):
            for route, path in paths(made, job):
                if route.method != "GET":
                    continue
                if route.answer == "text/event-stream":
                    path = f"{path}?after=0"
                if route.path.endswith("/policy"):
                    path = f"{path}?fault=rank:0,rank:1"
                status, text = await made.ask(who, "GET", path)
                asked = "" if job == "mine" else f"no job is called {SECRET}"
                assert SECRET not in text.lower().replace(asked, ""), (who, path)
                assert status == (404 if "{job}" in route.path and job == SECRET else status)
                # What shows the whole cluster is not for a token of a project.
                assert status in ((403,) if route.shared else (200, 404))


@in_two_projects
async def test_the_same_reader_sees_all_of_its_own(made: Served):
    status, text = await made.ask("viewera", "GET", "/v1/cluster")
    picture = json.loads(text)
    assert status == 200
    assert list(picture["jobs"]) == ["mine"]
    assert picture["jobs"]["mine"]["seats"]
    own = {seat["node"] for seat in picture["jobs"]["mine"]["seats"]}
    assert set(picture["nodes"]) == own
    assert {p["job"] for pulse in picture["pulses"] for p in pulse["jobs"]} <= {"mine"}
    _, text = await made.ask("viewera", "GET", "/v1/jobs/mine/journal")
    assert any('"Submitted"' in json.loads(line)["body"] for line in text.splitlines())
    _, text = await made.ask("viewera", "GET", "/v1/events?after=0")
    assert '"jobs":["mine"]' in text
    _, all_of_it = await made.ask("own", "GET", "/v1/cluster")
    assert set(json.loads(all_of_it)["jobs"]) == {"mine", SECRET}
    assert SECRET in (await made.ask("own", "GET", "/v1/events?after=0"))[1]


@in_two_projects
async def test_a_project_cannot_touch_anothers_job_nor_what_all_share(made: Served):
    bodies: dict[str, Any] = {
        "/v1/jobs/{job}/migrate": {"ranks": [0]},
        "/v1/taints": {"node": "n0", "reason": "x"},
        "/v1/taints/remove": {"node": "n0"},
        "/v1/webhooks/alertmanager": {"version": "4", "alerts": []},
    }
    before = made.orchestrator._standing.seq
    for route, path in paths(made, SECRET):
        if route.method == "POST" and route.path != "/v1/jobs":
            status, _ = await made.ask("operatora", "POST", path, bodies.get(route.path, {}))
            assert status == (403 if route.shared else 404), path
    other = codec.to_plain(JobSpec(JobId("fresh"), "t.py", project="b"))
    assert (await made.ask("operatora", "POST", "/v1/jobs", other))[0] == 403
    taken = codec.to_plain(JobSpec(JobId(SECRET), "t.py"))
    status, text = await made.ask("operatora", "POST", "/v1/jobs", taken)
    assert (status, "taken" in text) == (409, True)
    assert made.orchestrator._standing.seq == before, "nothing of it was decided"


@in_two_projects
async def test_a_job_belongs_to_the_project_of_its_token(made: Served):
    plain = codec.to_plain(JobSpec(JobId("fresh"), "t.py"))
    assert (await made.ask("operatora", "POST", "/v1/jobs", plain))[0] == 200
    assert made.orchestrator.cluster.jobs[JobId("fresh")].spec.project == "a"
    assert (await made.ask("operatora", "POST", "/v1/jobs", plain))[0] == 200, "and again"
    assert (await made.ask("viewerb", "GET", "/v1/jobs/fresh"))[0] == 404
    assert (await made.ask("viewera", "GET", "/v1/jobs/fresh"))[0] == 200


def test_one_projects_keys_are_none_of_anothers():
    request = Request("POST", "/", {}, {"idempotency-key": "k"})
    keys = [Call(request, {}, {}, Caller("x", Role.OPERATOR, of)).key for of in ("", "a", "b")]
    assert keys == ["k", "a:k", "b:k"]
    long = Request("POST", "/", {}, {"idempotency-key": "k" * 201})
    with pytest.raises(BadRequest, match="long"):
        _ = Call(long, {}, {}, Caller("x", Role.OPERATOR)).key
    assert Call(Request("POST", "/", {}, {}), {}, {}, Caller("x", Role.OPERATOR, "a")).key == ""


# --- roles ----------------------------------------------------------------------------------------


@in_two_projects
async def test_every_route_asks_for_its_role(made: Served):
    for route, path in paths(made, "mine"):
        for role in Role:
            status, text = await made.ask(str(role), route.method, path, {"node": "?"})
            caller = Caller(str(role), role)
            assert (status == 403) == bool(refusal(route, caller)), (role, path, text)
        for nobody in ("", "wrong", "kst_"):
            assert (await made.ask(nobody, route.method, path))[0] == 401


def test_what_changes_something_is_not_for_viewers_and_alerts_are_for_webhooks():
    for route in ROUTES:
        if route.method == "POST" and not route.open:
            assert route.role is not Role.VIEWER
    webhook = Caller("w", Role.WEBHOOK)
    assert [r.path for r in ROUTES if not r.open and not refusal(r, webhook)] == [
        "/v1/webhooks/alertmanager"
    ]


@in_two_projects
async def test_the_journal_names_who_asked(made: Served):
    await made.ask("operator", "POST", "/v1/nodes/n3/drain", {"why": "to clean it"})
    await made.ask("operatora", "POST", "/v1/jobs/mine/stop", {})
    asked = {}
    for body in made.journal.load().entries:
        event = events.from_plain(body["event"])
        if isinstance(event, events.DrainAsked | events.StopAsked):
            asked[type(event).__name__] = event.by
    assert asked == {"DrainAsked": "operator", "StopAsked": "operatora"}
    told = [record for record in made.orchestrator.history if record["kind"] == "DrainAsked"]
    assert told[-1]["by"] == "operator"


@in_two_projects
async def test_no_token_is_in_the_journal_or_in_any_answer(made: Served):
    await made.ask("operator", "POST", "/v1/nodes/n3/drain", {})
    found = codec.dumps([link.body for link in made.journal.export("")]).decode()
    found += codec.dumps(list(made.journal.load().entries)).decode()
    for route, path in paths(made, "mine"):
        if route.method == "GET":
            found += (await made.ask("admin", "GET", path))[1]
    for text in made.texts.values():
        assert text not in found


@in_two_projects
async def test_haste_is_refused_per_token_and_told_so(made: Served):
    made.api._gate = Gate(Tokens(OWN), requests_per_second_max=1.0)
    statuses = [(await made.ask("own", "GET", "/v1/jobs"))[0] for _ in range(4)]
    assert statuses == [200, 200, 429, 429]
    assert (await made.ask("own", "GET", "/healthz"))[0] == 200


@in_two_projects
async def test_listeners_are_counted_for_as_long_as_they_listen(made: Served):
    made.api._gate = Gate(Tokens(OWN), event_streams_max=1)
    headers = {"authorization": f"Bearer {OWN}"}
    reply = await made.api.handle(Request("GET", "/v1/events", {}, headers))
    assert isinstance(reply, Streamed)
    parts = reply.parts
    assert await anext(parts) == b": connected\n\n"
    assert (await made.ask("own", "GET", "/v1/events"))[0] == 429
    await parts.aclose()  # type: ignore[attr-defined]
    assert (await made.ask("own", "GET", "/v1/events"))[0] == 200


@in_two_projects
async def test_one_caller_leaves_streams_to_others(made: Served):
    made.api._gate = gate = Gate(made.gate._tokens, event_streams_max=8)
    route = next(route for route in ROUTES if route.path == "/v1/events")
    caller = Caller("vieweraa", Role.VIEWER, "a")
    listening = gate.streams[EVENTS].open
    listening[caller.name] = 1
    gate.check(route, caller)
    listening[caller.name] = 2
    with pytest.raises(BadRequest, match="too many clients"):
        gate.check(route, caller)
    gate.check(route, Caller("another", Role.VIEWER, "b"))


@in_two_projects
async def test_a_stream_ends_with_its_token(made: Served):
    headers = {"authorization": f"Bearer {made.texts['viewera']}"}
    request = Request("GET", "/v1/events", {}, headers)
    caller = made.gate.caller(request)
    assert caller is not None

    async def told() -> AsyncIterator[bytes]:
        while True:
            yield b": alive"

    parts = made.gate.counted(told(), EVENTS, request, caller)
    assert await anext(parts) == b": alive"
    made.gate._tokens._known.clear()
    with patch.object(access, "AGAIN_SECONDS", -1.0), pytest.raises(StopAsyncIteration):
        await anext(parts)
    assert not made.gate.streams[EVENTS].open


BEGIN, END = "<!-- roles: written by tests/unit/test_access.py -->\n", "<!-- end of roles -->\n"


def table() -> str:
    """Roles and routes, as the document has them."""
    rows = ["| route | viewer | operator | webhook | admin | a project's token |"]
    rows.append("|---|---|---|---|---|---|")
    for route in ROUTES:
        if route.open:
            about = "anybody" if route.method == "GET" else "by certificate, or in its Hello"
            rows.append(f"| `{route.method} {route.path}` | {about} | | | | |")
            continue
        may = ["yes" if not refusal(route, Caller("x", role)) else "" for role in Role]
        scoped = "" if route.shared else "its own jobs"
        rows.append(f"| `{route.method} {route.path}` | {' | '.join(may)} | {scoped} |")
    return "\n".join(rows) + "\n"


def test_the_document_has_the_roles_of_every_route():
    whole = DOCUMENT.read_text(encoding="utf-8")
    before, rest = whole.split(BEGIN)
    found, after = rest.split(END)
    if os.environ.get("KEEPSTEP_REWRITE"):
        DOCUMENT.write_text(before + BEGIN + table() + END + after, encoding="utf-8")
        return
    assert found == table(), "run this test with KEEPSTEP_REWRITE=1, and review the diff"


# --- the pure parts -------------------------------------------------------------------------------


def link(number: int, event: dict[str, Any], why: str = "") -> Link:
    body = {"entry": {"event": event, "now": 0.0, "orders": [], "why": why}, "seq": 1, "term": 1}
    return Link(number, f"hash{number}", codec.dumps(body).decode())


def submitted(job: str, project: str) -> dict[str, Any]:
    spec = codec.to_plain(JobSpec(JobId(job), "t.py", project=project))
    return {"kind": "Submitted", "body": {"spec": spec, "by": ""}}


def test_a_chain_withholds_who_had_the_name_before_and_what_tells_of_others():
    sight = Sight("a", {"j": "a", "xlm": "b", "n7": "b"}, ["n7"])
    facts = [{"job": "gone", "rank": 0}]
    chain = [
        link(1, submitted("j", "b")),
        link(2, {"kind": "StopAsked", "body": {"job": "j"}}),
        link(3, submitted("j", "a")),
        link(4, {"kind": "Hello", "body": {"node": "n", "workers": facts}}),
        link(5, submitted("xlm", "b")),
        link(6, {"kind": "NodeSilent", "body": {"node": "n"}}, why="xlm and j lose a rank"),
        link(7, {"kind": "StopAsked", "body": {"job": "j"}}, why="j ends"),
        link(8, {"kind": "Hello", "body": {"node": "n", "obeyed": {"j": 2, "forgotten": 1}}}),
        link(9, {"kind": "Hello", "body": {"node": "n", "keeps": ["j"]}}),
        # Called like a node, or known to nobody: found by no look at words.
        link(10, {"kind": "Hello", "body": {"node": "n", "keeps": ["j", "n7"]}}),
        link(11, {"kind": "Hello", "body": {"node": "n", "keeps": ["forgotten"]}}),
    ]
    seen = list(sight.links("j", chain, "a"))
    assert [one.hash for one in seen] == [one.hash for one in chain]
    assert [one.number for one in seen if WITHHELD not in one.body] == [3, 7, 9]
    assert list(Sight("", {}).links("j", chain, "")) == chain


def test_a_job_called_like_a_token_hides_nothing_that_the_token_did():
    sight = Sight("a", {"j": "a", "alice": "b"})
    done = link(1, {"kind": "StopAsked", "body": {"job": "j", "by": "alice", "why": "enough"}})
    told = link(2, {"kind": "StopAsked", "body": {"job": "j", "by": "bob", "why": "alice asked"}})
    chain = [link(0, submitted("j", "a")), done, told]
    seen = [WITHHELD in one.body for one in sight.links("j", chain, "a")]
    assert seen == [False, False, True]


@pytest.mark.parametrize(
    ("text", "withheld"),
    [
        ("job bert lends", True),
        ("what bert: lends", True),
        ("as of bert. And", True),
        ("(bert) is there", True),
        ("see /logs/bert/rank_0.log now", True),
        ("job bert-2 lends", False),
        ("job a.bert lends", False),
        ("nbert lends", False),
        ("bert", False),
    ],
)
def test_a_sentence_that_names_another_projects_job_is_withheld_whole(text: str, withheld: bool):
    sight = Sight("a", {"bert": "b", "a.bert": "a", "bert-2": "a"})
    assert sight.cleaned({"x": [text]})["x"] == [WITHHELD if withheld else text]


def test_a_decision_tells_a_project_what_becomes_of_its_own_jobs():
    notes = (Note("rank 1 moves", JobId("j")), Note("rank 9 moves", JobId("x")), Note("frozen"))
    decision = brain.Decision(state.new_cluster("s"), (), (), notes, "all of it", True)
    assert Sight("a", {"j": "a", "x": "b"}).told(decision) == ["rank 1 moves", "frozen"]
    assert Sight("", {}).told(decision) == ["rank 1 moves", "rank 9 moves", "frozen"]


def test_what_would_help_is_told_to_owners_as_far_as_they_can_do_it():
    help_ = "no room; what would help: keepstep undrain n9: 2 free slots (xlm); or add a node"
    told = ["keepstep undrain n9: 2 free slots (xlm)", "keepstep stop --save j: 2 slots", ADD]
    plain = {"remedies": [*told, "keepstep stop --save xlm: 2 slots"], "why": help_}
    for others in ({"xlm": "b"}, {}):
        shown = Sight("a", {"j": "a", **others}).cleaned(plain)
        assert shown["why"] == "no room; what would help: whoever runs the cluster can make room"
        assert shown["remedies"][:2] == told[1:]
        assert len(shown["remedies"]) == (2 if others else 3)
    assert Sight("", {}).cleaned(plain) == plain


def test_a_job_called_like_a_word_of_the_journal_hides_nothing_of_others():
    words = ("kind", "rank", "node", "job", "why", "StopAsked", "n1", "exit")
    sight = Sight("a", {"j": "a", **dict.fromkeys(words, "b")})
    seen = {"kind": "Observed", "body": {"job": "j", "node": "n1", "rank": 0, "sign": "exit"}}
    chain = [
        link(1, submitted("j", "a")),
        link(2, {"kind": "StopAsked", "body": {"job": "j"}}),
        link(3, seen),
        link(4, {"kind": "StopAsked", "body": {"job": "j"}}, why="rank is stopped for j"),
    ]
    assert all(WITHHELD not in one.body for one in sight.links("j", chain, "a"))


@in_two_projects
async def test_a_project_asks_about_the_nodes_that_it_uses(made: Served):
    cluster = made.orchestrator.cluster
    theirs = {n for n, s in cluster.nodes.items() if any(u.job == "mine" for u in s.uses.values())}
    other = next(node for node in cluster.nodes if node not in theirs)
    for fault in (f"node:{other}", f"drain:{other}", "node:zzz", "domain:zzz"):
        status, text = await made.ask("viewera", "GET", f"/v1/jobs/mine/policy?fault={fault}")
        assert status == 400
        text = text.replace(forecast.KINDS, "")
        assert not any(node in text for node in cluster.nodes.keys() - theirs - {other})
        assert f"there are: {other}" not in text
    own = f"/v1/jobs/mine/policy?fault=node:{min(theirs)}"
    assert (await made.ask("viewera", "GET", own))[0] == 200
    many = ",".join(["rank:0"] * 9)
    assert (await made.ask("own", "GET", f"/v1/jobs/mine/policy?fault={many}"))[0] == 400


@in_two_projects
async def test_a_job_cannot_be_called_like_a_node(made: Served):
    spec = codec.to_plain(JobSpec(JobId("n1"), "t.py"))
    assert (await made.ask("own", "POST", "/v1/jobs", spec))[0] == 400


@in_two_projects
async def test_a_job_keeps_its_name_when_a_node_takes_it_later(made: Served):
    cluster = made.orchestrator.cluster
    for name, project in (("gpu-7", ""), ("gpu-8", "a")):
        spec = codec.to_plain(JobSpec(JobId(name), "t.py", project=project))
        assert (await made.ask("operator", "POST", "/v1/jobs", spec))[0] == 200
        made.feed(wire.Hello(NodeId(name), "127.0.0.1", 1, 1, 2, "boot"))
        assert (await made.ask("operator", "POST", "/v1/jobs", spec))[0] == 200
        turn = Turn(cluster, 5.0)
        launch.finish(turn, cluster.jobs[JobId(name)], JobState.FINISHED, 0, "done")
        names.forget(cluster, cluster.jobs[JobId(name)])
        other = codec.to_plain(JobSpec(JobId(name), "t.py", project="b"))
        assert (await made.ask("operator", "POST", "/v1/jobs", other))[0] == 400
        assert (await made.ask("operator", "POST", "/v1/jobs", spec))[0] == 200


def test_a_taint_of_a_slot_is_for_those_on_the_slot():
    use = {"job": "j", "slot": 0}
    lists = ("incidents", "loans", "connected", "pulses")
    plain: dict[str, Any] = {
        "jobs": {},
        "nodes": {"n1": {"uses": [use, {"job": "x", "slot": 1}]}, "n2": {"uses": []}},
        "taints": [{"place": place} for place in ("n1", "n1/0", "n1/1", "n2", "n2/0")],
        "frozen": None,
        "self_doubt": None,
        "paces": {},
        "agents": {},
        "control_plane": {"outages": [], "gaps": [{"node": "n1"}, {"node": "n2"}]},
        **{name: [] for name in lists},
    }
    shown = Sight("a", {"j": "a", "x": "b"}).picture(plain)
    assert [taint["place"] for taint in shown["taints"]] == ["n1", "n1/0"]
    assert shown["control_plane"]["gaps"] == [{"node": "n1"}], "the others are on foreign nodes"


BAD_SPECS: list[dict[str, Any]] = [
    {"job": ""},
    {"job": "a/b"},
    {"job": "x" * 65},
    {"nodes": 0},
    {"nodes": -1},
    {"nodes": 10**9},
    {"ranks_per_node": 0},
    {"ranks_per_node": 10**6},
    {"spares": -1},
    {"priority": 10**12},
    {"standby_level": 3},
    {"script": ""},
    {"script": "a\0b"},
    {"project": "a b"},
    {"arguments": ("x" * 5000,)},
    {"arguments": ("x",) * 5000},
    {"environment": {"A=B": "c"}},
    {"environment": {"": "c"}},
    {"policy": Policy(hold_seconds_max=-1.0)},
    {"policy": Policy(budget_steps=1e300)},
]


@pytest.mark.parametrize("more", BAD_SPECS, ids=lambda more: next(iter(more)))
def test_a_job_that_nobody_can_mean_is_refused_before_it_is_decided(more: dict[str, Any]):
    good = {"job": JobId("j"), "script": "t.py"}
    admission.check(JobSpec(**good))
    with pytest.raises(BadRequest) as refused:
        admission.check(JobSpec(**(good | more)))
    assert refused.value.status == 400
    assert refused.value.fix


@pytest.mark.parametrize("project", ["", "a"])
def test_no_job_is_called_like_a_file_of_the_agents_unless_it_was_before(project: str):
    caller = Caller("who", Role.OPERATOR, project)
    kept = ("boot", "agent.lock", "agent.sock.new", "preload.new", "store.port.new", "logs")
    for name in (*kept, "store.2", "logs.old"):
        spec = JobSpec(JobId(name), "t.py", project=project)
        with pytest.raises(BadRequest, match="a file of the agents'"):
            admission.check_name(spec, caller, ())
        # It was open when this release came: its launchers say the same again.
        admission.check(spec)
        admission.check_name(spec, caller, (), whose=project)


@in_two_projects
async def test_a_job_that_is_open_under_a_name_that_is_taken_since_is_submitted_again(made: Served):
    spec = JobSpec(JobId("store.2"), "t.py", project="a")
    await made.orchestrator.decide(events.Submitted(spec))
    plain = codec.to_plain(spec)
    assert (await made.ask("operatora", "POST", "/v1/jobs", plain))[0] == 200
    plain["job"] = "store.3"
    assert (await made.ask("operatora", "POST", "/v1/jobs", plain))[0] == 400


def test_an_agent_is_let_in_by_token_without_tls_and_by_certificate_with_it():
    hello = wire.Hello(NodeId("n1"), "h", 1, 1, 2, "boot", token=OWN)
    shown = {"subjectAltName": (("URI", "keepstep://node/n1"),)}
    assert admission.why_not_agent(hello, OWN, None, secure=False) == ""
    assert admission.why_not_agent(hello, "other", None, secure=False)
    assert admission.why_not_agent(hello, OWN, None, secure=True), "a token is no certificate"
    assert admission.why_not_agent(hello, "other", shown, secure=True) == ""
    assert admission.why_not_agent(wire.Heartbeat(NodeId("n1")), OWN, shown, secure=True)


@pytest.mark.parametrize(
    "more",
    [
        {"slots": 0},
        {"slots": 10**9},
        {"node": ""},
        {"node": "a\nb"},
        {"boot": "x" * 300},
        {"release": "x" * 300},
        {"workers": (wire.WorkerFact(JobId("j"), Rank(-1), 0, 0, Generation(1)),)},
        {"workers": (wire.WorkerFact(JobId("j"), Rank(0), -1, 0, Generation(1)),)},
        {"workers": (wire.WorkerFact(JobId("a b"), Rank(0), 0, 0, Generation(1)),)},
        {"workers": (wire.WorkerFact(JobId("j"), Rank(0), 0, 0, Generation(1)),) * 5000},
        {"standbys": (wire.StandbyFact(JobId("j"), 10**6, 1, True),)},
        {"obeyed": {"j": Generation(2**60)}},
        {"obeyed": {f"j{i}": Generation(1) for i in range(20_000)}},
        {"belongs": {"j": "x" * 300}},
    ],
)
def test_an_agent_of_no_sense_is_refused(more: dict[str, Any]):
    facts = {"node": "n1", "address": "h", "slots": 1, "peer_port": 1, "store_port": 2, "boot": "b"}
    hello = wire.Hello(**{**facts, **more}, token=OWN)
    assert admission.why_not_agent(hello, OWN, None, secure=False)


@in_two_projects
async def test_of_whoever_shows_nothing_that_an_agent_has_little_is_read(made: Served):
    async def read_of(who: str, shown: dict[str, Any]) -> int:
        headers = {"upgrade": "x", "authorization": f"Bearer {made.texts.get(who, who)}"}
        reply = await made.api.handle(Request("POST", "/v1/agent", {}, headers, b"", shown))
        assert isinstance(reply, Upgraded)
        serve: Any = reply.serve
        return int(serve.keywords["hello_bytes_max"])

    node = {"subjectAltName": (("URI", "keepstep://node/n1"),)}
    assert await read_of("own", {}) == wire.HELLO_BYTES_MAX
    assert await read_of("nobody", node) == wire.HELLO_BYTES_MAX
    for who in ("nobody", "operatora", "admin"):
        assert await read_of(who, {}) == wire.STRANGER_BYTES_MAX


def fill(made: Served, waiting: contextlib.ExitStack, *names: str, project: str) -> None:
    for name in names:
        caller = Caller(name, Role.OPERATOR, project)
        while not made.gate.waiting.full(caller):
            waiting.enter_context(made.gate.waiting.taken(caller))


@in_two_projects
async def test_requests_that_wait_leave_room_for_others(made: Served):
    """While the journal is away they pile up."""
    with contextlib.ExitStack() as waiting:
        fill(made, waiting, "operatora", project="a")
        status, why = await made.ask("operatora", "POST", "/v1/jobs/mine/stop", {})
        assert (status, "too many requests wait" in why) == (429, True)
        assert (await made.ask("viewera", "GET", "/v1/jobs"))[0] == 200
        assert (await made.ask("own", "POST", "/v1/jobs/mine/stop", {}))[0] == 200
    assert not made.gate.waiting.open.total()


@in_two_projects
async def test_projects_that_wait_leave_places_to_those_who_run_the_cluster(made: Served):
    with contextlib.ExitStack() as waiting:
        fill(made, waiting, "p1", "p2", "p3", "p4", "p5", project="a")
        assert made.gate.waiting.open.total() == 512
        assert (await made.ask("operatorb", "POST", f"/v1/jobs/{SECRET}/stop", {}))[0] == 429
        assert (await made.ask("admin", "POST", "/v1/jobs/mine/stop", {}))[0] == 200
        fill(made, waiting, "o1", "o2", "o3", project="")
        assert made.gate.waiting.open.total() == 768
        assert (await made.ask("admin", "POST", "/v1/freeze", {}))[0] == 429
        assert (await made.ask("own", "POST", "/v1/freeze", {}))[0] == 200
    assert not made.gate.waiting.full(Caller("p1", Role.OPERATOR, "a"))


@in_two_projects
async def test_an_agents_stream_waits_for_no_decision_and_is_let_in(made: Served):
    headers = {"upgrade": "x", "authorization": f"Bearer {OWN}"}
    with contextlib.ExitStack() as waiting:
        fill(made, waiting, "p1", "p2", "p3", project="a")
        fill(made, waiting, "o1", "o2", project="")
        for _ in range(256):
            waiting.enter_context(made.gate.waiting.taken(Caller(CLUSTER, Role.ADMIN)))
        assert (await made.ask("own", "POST", "/v1/freeze", {}))[0] == 429
        for said in (headers, {"upgrade": "x"}):
            reply = await made.api.handle(Request("POST", "/v1/agent", {}, said))
            assert isinstance(reply, Upgraded)


def test_what_passes_is_told_apart_from_what_somebody_has_to_change():
    passes = BadRequest(429, "too many requests wait", "wait", passes=True).response
    assert (passes.status, passes.headers) == (429, {"Retry-After": "1"})
    assert BadRequest(429, "project a has 2 open jobs", "stop some").response.headers == {}
