"""One picture for all who ask, never an old one after a change, and what an answer costs."""

from __future__ import annotations

import itertools
import json
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest

from keepstep import codec, wire
from keepstep.model import JobId, JobSpec, NodeId, Sign
from keepstep.orchestrator import access, api, events, pictures
from keepstep.orchestrator.access import Rates, Sight
from keepstep.orchestrator.http import BadRequest
from keepstep.orchestrator.pictures import Pictures
from keepstep.orchestrator.tokens import CLUSTER, Caller, Role
from tests.unit.test_access import SECRET, Served, in_two_projects

ALL = Sight("", {})


class Counted:
    """The pictures of an orchestrator, and how often one was made."""

    def __init__(self, made: Served) -> None:
        self.made = 0
        self.here = made.orchestrator
        self._picture = made.orchestrator.picture
        made.orchestrator.picture = self._counted  # type: ignore[method-assign]
        self.pictures = Pictures(made.orchestrator)
        self.at = made.orchestrator.now()
        made.orchestrator.now = lambda: self.at  # type: ignore[method-assign]

    def _counted(self) -> dict[str, Any]:
        self.made += 1
        return self._picture()


def sight(made: Served, project: str) -> Sight:
    jobs = made.orchestrator.cluster.jobs
    return Sight(project, {str(name): job.spec.project for name, job in jobs.items()})


@in_two_projects
async def test_a_picture_is_made_once_for_all_who_ask_before_anything_changes(made: Served):
    counted = Counted(made)
    first = counted.pictures.of(ALL)
    assert counted.pictures.of(ALL) is first
    assert counted.made == 1
    assert first.whole == codec.dumps(made.orchestrator.picture()) + b"\n"
    for name, value in json.loads(first.whole).items():
        assert first.part(name) == codec.dumps({name: value}) + b"\n"


@in_two_projects
async def test_whoever_has_changed_something_sees_it_at_once(made: Served):
    counted = Counted(made)
    counted.pictures.of(ALL)
    made.feed(events.DrainAsked(NodeId("n3"), "to clean it"))
    assert b"to clean it" in counted.pictures.of(ALL).part("nodes")
    made.feed(events.Submitted(JobSpec(JobId("later"), "t.py", project="a")))
    assert b'"later"' in counted.pictures.of(sight(made, "a")).part("jobs")
    about: Any = type("Stream", (), {"about": {"wire": wire.VERSION}})()
    made.orchestrator._streams[NodeId("n3")] = about
    assert b'["n3"]' in counted.pictures.of(ALL).part("connected")


@in_two_projects
async def test_what_changes_without_a_decision_is_a_moment_old_at_most(made: Served):
    counted = Counted(made)
    with patch.object(pictures.time, "thread_time", lambda: 0.0):
        counted.pictures.of(ALL)
        pulse = wire.JobPulse(JobId("mine"), 1, 5, 4321, 0.1)
        beat = wire.Heartbeat(NodeId("n0"), (pulse,))
        made.orchestrator._alive.heartbeats[NodeId("n0")] = beat
        assert b"4321" not in counted.pictures.of(ALL).whole
        counted.at += pictures.BOARD_SECONDS_MIN
        assert b"4321" in counted.pictures.of(ALL).whole


@in_two_projects
async def test_a_picture_that_takes_long_is_made_less_often(made: Served):
    counted = Counted(made)
    with patch.object(pictures.time, "thread_time", itertools.count(0.0, 1.0).__next__):
        counted.pictures.of(ALL)
        counted.at += 0.9 / pictures.BOARD_SHARE_MAX
        counted.pictures.of(ALL)
        assert counted.made == 1
        counted.at += 0.2 / pictures.BOARD_SHARE_MAX
        counted.pictures.of(ALL)
        assert counted.made == 2


@in_two_projects
async def test_projects_share_the_work_and_not_the_picture(made: Served):
    counted = Counted(made)
    seen = [counted.pictures.of(sight(made, of)).whole for of in ("a", "b", "a", "b")]
    assert counted.made == 1
    assert [list(json.loads(whole)["jobs"]) for whole in seen] == [["mine"], [SECRET]] * 2
    assert len(json.loads(counted.pictures.of(ALL).whole)["jobs"]) == 2


@in_two_projects
async def test_one_node_or_incident_is_not_the_whole_clusters_work(made: Served):
    counted = Counted(made)
    job = made.orchestrator.cluster.jobs[JobId(SECRET)]
    assert job.roster is not None
    seat = job.roster.seats[-1]
    death = (seat.rank, seat.incarnation, job.generation, 5, -9)
    made.feed(wire.Observed(seat.node, JobId(SECRET), Sign.EXIT, *death))
    assert job.incident is not None
    for path in (f"incidents/{job.incident.incident}", f"nodes/{seat.node}"):
        assert (await made.ask("viewerb", "GET", f"/v1/{path}"))[0] == 200
        assert (await made.ask("viewera", "GET", f"/v1/{path}"))[0] == 404
        assert (await made.ask("viewer", "GET", f"/v1/{path}"))[0] == 200
    assert (await made.ask("viewera", "GET", "/v1/nodes/none"))[0] == 404
    assert (await made.ask("viewera", "GET", "/v1/incidents/none"))[0] == 404
    assert counted.made == 0


@in_two_projects
async def test_a_jobs_launchers_share_its_answer_until_something_is_decided(made: Served):
    here = Counted(made).pictures
    job = made.orchestrator.cluster.jobs[JobId("mine")]
    first = here.job(sight(made, "a"), job)
    assert here.job(sight(made, "a"), job) is first
    assert here.job(ALL, job) is not first
    made.feed(events.StopAsked(JobId("mine"), "enough"))
    assert json.loads(here.job(sight(made, "a"), job))["over"]


# --- what an answer costs -------------------------------------------------------------------------


def test_costly_answers_are_paid_afterwards_and_time_gives_back():
    costs = Rates(0.25, 4.0)
    for _ in range(5):
        assert not costs.used_up("x", 0.0), "somebody who looks around asks for several"
        costs.charge("x", 0.9, 0.0)
    assert costs.used_up("x", 0.0)
    assert costs.used_up("x", 1.9)
    assert not costs.used_up("y", 0.0)
    assert not costs.used_up("x", 2.1)


@in_two_projects
async def test_what_is_played_on_a_copy_is_charged_by_its_cost(made: Served):
    path = "/v1/jobs/mine/policy?fault=rank:0"
    dry = {"ranks": [0], "dry_run": True}
    with patch.object(api.time, "thread_time", itertools.count(0.0, 5.0).__next__):
        assert (await made.ask("viewera", "GET", path))[0] == 200
        assert (await made.ask("viewera", "GET", path))[0] == 429
        status, _ = await made.ask("operatora", "POST", "/v1/jobs/mine/migrate", dry)
        assert status in (200, 409)
        assert (await made.ask("operatora", "POST", "/v1/jobs/mine/migrate", dry))[0] == 429
        for _ in range(3):
            assert (await made.ask("own", "GET", path))[0] == 200, "all the launchers have that one"
        stopped, _ = await made.ask("operatora", "POST", "/v1/jobs/mine/stop", {})
        assert stopped == 200, "what changes something is not refused for it"


@in_two_projects
async def test_what_waits_for_a_decision_is_not_charged(made: Served):
    with patch.object(api.time, "thread_time", itertools.count(0.0, 1.0).__next__):
        for node in ("n0", "n1", "n2"):
            assert (await made.ask("operator", "POST", f"/v1/nodes/{node}/undrain", {}))[0] == 200


@in_two_projects
async def test_a_large_body_is_charged_for_being_read_also_if_it_is_refused(made: Served):
    large = {"x": [[]] * api.SMALL_BYTES}
    with patch.object(api.time, "thread_time", itertools.count(0.0, 5.0).__next__):
        for who, path in (("operatora", "/v1/jobs/mine/stop"), ("operator", "/v1/jobs")):
            assert (await made.ask(who, "POST", path, large))[0] == 400
            assert (await made.ask(who, "POST", path, large))[0] == 429
            for _ in range(2):
                assert (await made.ask("own", "POST", path, large))[0] == 400
        stopped, _ = await made.ask("operatora", "POST", "/v1/jobs/mine/stop", {})
        assert stopped == 200, "a small one is never refused for it"


def test_the_clusters_own_token_is_not_charged():
    gate = access.Gate(tokens=None)  # type: ignore[arg-type]
    for name in (CLUSTER, f"{CLUSTER}/alice", "x/alice"):
        caller = Caller(name, Role.ADMIN)
        gate.charge(caller, 100.0)
        with pytest.raises(BadRequest) if name.startswith("x") else nullcontext():
            gate.afford(caller)
