"""A name that is used again, however long ago: its numbers go on, and it stays its owner's."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from keepstep import codec, wire
from keepstep.model import Generation, JobId, JobSpec, JobState, NodeId, Phase, Rank, Sign
from keepstep.orchestrator import brain, events, launch, names, state
from keepstep.orchestrator.access import WITHHELD, Sight
from keepstep.orchestrator.snapshots import Texts
from keepstep.orchestrator.state import JOBS_OVER_MAX, Cluster, Incident, Job, Loan
from keepstep.orchestrator.turn import Turn
from tests.unit.test_access import Served, served

NODE, JOB = NodeId("n0"), JobId("llama-7")


def a_node() -> Cluster:
    cluster = state.new_cluster("test")
    brain.step(cluster, wire.Hello(NODE, "127.0.0.1", 1, 1, 2, "boot"), 0.0)
    return cluster


def started(cluster: Cluster, name: JobId = JOB) -> wire.Order:
    """Submit it; the order that starts it."""
    found = brain.step(cluster, events.Submitted(JobSpec(name, "t.py")), 1.0).orders
    (order,) = [order for order in found if isinstance(order.action, wire.StartWorkers)]
    return order


def run(cluster: Cluster, name: JobId = JOB, checkpoint: str = "") -> wire.Order:
    """A whole run, from its submission to its good end."""
    order = started(cluster, name)
    assert isinstance(order.action, wire.StartWorkers)
    (seat,) = order.action.seats
    done = (wire.SeatReport(Rank(0), 1, step=1),)
    brain.step(cluster, wire.PhaseReport(NODE, name, order.generation, Phase.RESUME, done), 2.0)
    if checkpoint:
        told = wire.Publish(NODE, name, order.generation, Rank(0), 9, checkpoint, "r")
        brain.step(cluster, told, 3.0)
    end = wire.Observed(
        NODE, name, Sign.FINISHED, Rank(0), seat.incarnation, order.generation, step=9
    )
    brain.step(cluster, end, 4.0)
    assert cluster.jobs[name].state is JobState.FINISHED
    return order


def others_end(cluster: Cluster, count: int = JOBS_OVER_MAX, project: str = "") -> None:
    """So many later ends, of whomever."""
    turn = Turn(cluster, 5.0)
    for number in range(count):
        name = JobId(f"other{number}")
        job = cluster.jobs[name] = Job(JobSpec(name, "x.py", project=project), JobState.RUNNING, 5)
        turn.now += 1.0
        launch.finish(turn, job, JobState.FINISHED, 0, "done")


def numbers(order: wire.Order) -> tuple[int, int]:
    assert isinstance(order.action, wire.StartWorkers)
    return int(order.generation), order.action.seats[0].incarnation


def test_a_fresh_name_begins_with_the_first_numbers():
    assert numbers(started(a_node())) == (1, 0)


def test_a_name_whose_job_is_forgotten_goes_on_above_all_that_agents_remember_of_it():
    cluster = a_node()
    assert numbers(run(cluster, checkpoint="/ckpt/9")) == (1, 0)
    assert numbers(run(cluster)) == (2, 1)
    others_end(cluster)
    assert JOB not in cluster.jobs
    again = state.from_plain(state.to_plain(cluster))
    assert numbers(started(again)) == (3, 2), "an agent tells how a number's worker ended"
    job = again.jobs[JOB]
    assert (job.published_step, job.published_path) == (9, "/ckpt/9")
    # And nobody is taken for one who knows more than the journal.
    known = wire.Hello(NODE, "127.0.0.1", 1, 1, 2, "boot", obeyed={str(JOB): Generation(2)})
    brain.step(again, known, 600.0)
    assert again.jobs[JOB].unsure is None


def test_a_name_that_is_gone_altogether_begins_above_all_that_are(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(names, "PAST_MAX", 20)
    cluster = a_node()
    for _ in range(3):
        run(cluster)
    cluster.closed = (Incident(state.IncidentId("i1"), JOB, 1.0, 2.0),)
    cluster.loans = (Loan(JOB, JobId("other0"), 1, 1, 1.0),)
    others_end(cluster, JOBS_OVER_MAX + 20)
    assert JOB not in cluster.past
    assert 18 <= len(cluster.past) <= 20
    assert (cluster.closed, cluster.loans) == ((), ()), "whoever takes the name has nothing of it"
    for name in (JOB, JobId("new")):
        # Ended, so that the next one finds the slot free.
        assert numbers(run(cluster, name)) == (4, 3)


def test_the_text_of_names_is_kept_as_long_as_they_are():
    cluster, texts = a_node(), Texts()
    others_end(cluster, JOBS_OVER_MAX + 5)
    assert len(cluster.past) == 5
    for _ in range(2):
        assert texts.of(cluster) == codec.dumps(state.to_plain(cluster)).decode()
    before = dict(texts._past)
    others_end(cluster, 1)
    assert texts.of(cluster) == codec.dumps(state.to_plain(cluster)).decode()
    assert all(texts._past[name] is kept for name, kept in before.items() if name in texts._past)


# --- whose a name is ------------------------------------------------------------------------------


def in_a_cluster(test: Any) -> Any:
    def run_it(tmp_path: Path) -> None:
        async def body() -> None:
            async with served(tmp_path) as made:
                await test(made)

        asyncio.run(body())

    run_it.__name__, run_it.__doc__ = test.__name__, test.__doc__
    return run_it


async def submit(made: Served, who: str, project: str = "") -> int:
    plain = codec.to_plain(JobSpec(JOB, "t.py", project=project))
    return (await made.ask(who, "POST", "/v1/jobs", plain))[0]


@in_a_cluster
async def test_nobody_gets_to_see_anothers_incidents_by_taking_a_forgotten_name(made: Served):
    cluster = made.orchestrator.cluster
    made.feed(wire.Hello(NODE, "127.0.0.1", 1, 1, 2, "boot"))
    assert await submit(made, "operatora") == 200
    turn, job = Turn(cluster, 5.0), cluster.jobs[JOB]
    launch.open_incident(turn, job)
    turn.note("a secret of a's", job)
    launch.finish(turn, job, JobState.FAILED, 1, "failed")
    cluster.loans = (Loan(JOB, JobId("x"), 1, 1, 1.0, 2.0, 3.0),)
    others_end(cluster, project="b")
    assert JOB not in cluster.jobs
    assert await submit(made, "operatorb") == 409
    assert await submit(made, "operatorb", "b") == 409
    assert await submit(made, "operator", "b") == 409, "and nobody gives it away by mistake"
    for who, sees in (("viewerb", 0), ("viewera", 1)):
        for path, part in (("/v1/incidents", "incidents"), ("/v1/loans", "loans")):
            assert len(json.loads((await made.ask(who, "GET", path))[1])[part]) == sees
        _, told = await made.ask(who, "GET", "/v1/events?after=0")
        assert (str(JOB) in told) == bool(sees)
    said = f"the node of {JOB} melts"
    owners = names.Owners(cluster)
    assert Sight("a", owners).cleaned(said) == said
    assert Sight("b", owners).cleaned(said) == WITHHELD, "also in an old sentence"
    # Whoever runs the cluster may run it again for its owner.
    assert await submit(made, "operator", "a") == 200
    assert cluster.jobs[JOB].generation == 2


@in_a_cluster
async def test_of_two_submissions_at_the_same_instant_the_second_is_judged_by_the_first(
    made: Served,
):
    """Neither was there when the other was looked at: both came to be decided."""

    async def at_once(name: str, *given: tuple[str, str]) -> list[tuple[int, str]]:
        specs = [(who, codec.to_plain(JobSpec(JobId(name), script))) for who, script in given]
        asked = (made.ask(who, "POST", "/v1/jobs", plain) for who, plain in specs)
        return list(await asyncio.gather(*asked))

    first, second = await at_once("llama-1", ("operatora", "t.py"), ("operatora", "other.py"))
    assert (first[0], second[0]) == (200, 409)
    assert "already there with another script" in second[1]
    first, second = await at_once("llama-2", ("operatora", "t.py"), ("operatorb", "t.py"))
    assert (first[0], second[0]) == (200, 409)
    assert "the name llama-2 is taken" in second[1]
    assert "t.py" not in second[1]
    first, second = await at_once("llama-3", ("operatora", "t.py"), ("operatora", "t.py"))
    assert (first[0], second[0]) == (200, 200)
    assert [json.loads(told)["new"] for _, told in (first, second)] == [True, False]
