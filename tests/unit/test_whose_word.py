"""A node speaks for what runs on it: what it says of others' ranks is not believed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep import belonging, wire
from keepstep.model import Generation, JobId, JobSpec, JobState, NodeId, Phase, Rank, Sign, Term
from keepstep.orchestrator import admission, brain, events, nodes, policy, reconcile, state
from keepstep.orchestrator.state import Cluster, NodeState, Occupant, generation_secret

JOB = JobId("train")
STRANGER = NodeId("n9")


def running() -> state.Cluster:
    """Two ranks on n0 and n1; n9 has nothing to do with them."""
    cluster = state.new_cluster("test")
    for name in ("n0", "n1", "n9"):
        brain.step(cluster, wire.Hello(NodeId(name), name, 1, 1, 2, "b"), 0.0)
    brain.step(cluster, events.Submitted(JobSpec(JOB, "train.py", nodes=2, spares=0)), 0.0)
    job = cluster.jobs[JOB]
    assert job.roster is not None
    for seat in job.roster.seats:
        told = (wire.SeatReport(seat.rank, 1, True, step=1),)
        report = wire.PhaseReport(seat.node, JOB, job.generation, Phase.RESUME, told)
        brain.step(cluster, report, 1.0)
    assert job.state is JobState.RUNNING
    return cluster


def test_a_node_cannot_have_another_nodes_rank_fenced():
    cluster = running()
    job = cluster.jobs[JOB]
    stopped = (wire.StallFact(Rank(0), 0, 1, 1, stopped=True),)
    lie = wire.Stalled(STRANGER, JOB, job.generation, stopped, 4.0)
    assert not brain.step(cluster, lie, 2.0).changed
    brain.step(cluster, events.Tick(), 60.0)
    assert job.state is JobState.RUNNING
    assert job.migration is None


def test_of_a_mixed_word_a_nodes_own_ranks_count():
    cluster = running()
    job = cluster.jobs[JOB]
    facts = tuple(wire.StallFact(Rank(rank), 0, 1, 1, stopped=True) for rank in (0, 1, 7, -1))
    brain.step(cluster, wire.Stalled(NodeId("n1"), JOB, job.generation, facts, 4.0), 2.0)
    assert list(job.stalls) == [Rank(1)]


def test_a_node_cannot_publish_for_another_nodes_rank():
    cluster = running()
    job = cluster.jobs[JOB]
    evil = wire.Publish(STRANGER, JOB, job.generation, Rank(0), 10**15, "/tmp/evil", "r")
    ((_, answer),) = brain.step(cluster, evil, 2.0).answers
    assert not answer.accepted
    assert answer.why == "rank 0 of train is not on n9"
    assert job.published_step == -1


def test_nobody_publishes_for_a_job_that_has_no_seats_yet():
    cluster = running()
    brain.step(cluster, events.Submitted(JobSpec(JobId("big"), "t.py", nodes=9, spares=0)), 2.0)
    early = wire.Publish(STRANGER, JobId("big"), Generation(0), Rank(0), 5, "/tmp/evil", "r")
    ((_, answer),) = brain.step(cluster, early, 2.0).answers
    assert not answer.accepted


def test_a_node_cannot_break_a_collective_that_it_has_no_part_in():
    cluster = running()
    job = cluster.jobs[JOB]
    for rank in (0, 1, 5, -1):
        lie = wire.Observed(STRANGER, JOB, Sign.BROKEN, Rank(rank), 0, job.generation, 1)
        assert not brain.step(cluster, lie, 2.0).changed
    brain.step(cluster, events.Tick(), 3.0 + policy.BROKEN_SECONDS_MAX)
    assert job.migration is None


def test_progress_counts_from_the_node_that_has_the_rank():
    cluster = running()
    job = cluster.jobs[JOB]
    broken = wire.Observed(NodeId("n1"), JOB, Sign.BROKEN, Rank(1), 0, job.generation, 1)
    brain.step(cluster, broken, 2.0)
    brain.step(cluster, events.Tick(), 3.0 + policy.BROKEN_SECONDS_MAX)
    assert job.migration is not None
    job.migration.phase = Phase.REFORM
    for node, ranks in ((STRANGER, (0, 1)), (NodeId("n1"), (0, -1, 99))):
        told = tuple(wire.SeatReport(Rank(rank)) for rank in ranks)
        lie = wire.PhaseReport(node, JOB, job.generation, Phase.TRANSFER, told)
        assert not brain.step(cluster, lie, 20.0).changed
    assert job.migration.progress == {}
    told = (wire.SeatReport(Rank(1)),)
    own = wire.PhaseReport(NodeId("n1"), JOB, job.generation, Phase.TRANSFER, told)
    assert brain.step(cluster, own, 20.0).changed
    assert job.migration.progress == {Rank(1): Phase.TRANSFER}


def test_a_heartbeat_tells_of_the_jobs_on_its_node():
    cluster = running()
    pulses = tuple(wire.JobPulse(JobId(job), Generation(1), 9, 9, 0.1) for job in (JOB, "other"))
    assert nodes.own_pulses(cluster, wire.Heartbeat(STRANGER, pulses)).jobs == ()
    assert nodes.own_pulses(cluster, wire.Heartbeat(NodeId("n1"), pulses)).jobs == pulses[:1]
    assert nodes.own_pulses(cluster, wire.Heartbeat(NodeId("new"), pulses)).jobs == ()


def test_doubt_about_a_job_is_raised_by_those_who_have_something_of_it():
    cluster = running()
    job = cluster.jobs[JOB]
    obeyed = {str(JOB): Generation(job.promised + 10)}
    brain.step(cluster, wire.Hello(STRANGER, "n9", 1, 1, 2, "b", obeyed=obeyed), 2.0)
    assert job.unsure is None
    cluster = running()
    brain.step(cluster, wire.Hello(NodeId("n1"), "n1", 1, 1, 2, "b", obeyed=obeyed), 2.0)
    assert cluster.jobs[JOB].unsure is not None


@pytest.mark.parametrize("doubted", [False, True])
@pytest.mark.parametrize("known", ["nothing", "an older secret", "another node's", "its own"])
def test_a_seat_is_taken_by_those_alone_who_were_told_of_its_generation(known: str, doubted: bool):
    cluster = running()
    job = cluster.jobs[JOB]
    later = Generation(job.generation + 5)
    if doubted:
        gap = events.JournalBehind(NodeId("n1"), Term(0), 99, 9, {str(JOB): later})
        brain.step(cluster, gap, 1.5)
    words = {
        "nothing": "",
        "an older secret": word_of(cluster, Generation(job.generation - 1), STRANGER),
        "another node's": word_of(cluster, later, NodeId("n1")),
        "its own": word_of(cluster, later, STRANGER),
    }
    worker = wire.WorkerFact(JOB, Rank(0), 0, 10**6, later)
    said = replace(
        wire.Hello(STRANGER, "n9", 1, 1, 2, "b", (worker,), seq_seen=10**6),
        obeyed={str(JOB): later},
        belongs={str(JOB): words[known]},
    )
    gap = reconcile.gap(cluster, Term(0), 5, said)
    assert (str(JOB) in gap.obeyed) == (known == "its own")
    before = job.roster.seats
    brain.step(cluster, said, 2.0)
    for seat in before:
        fact = wire.WorkerFact(JOB, seat.rank, seat.slot, seat.incarnation, Generation(1))
        brain.step(cluster, wire.Hello(seat.node, seat.node, 1, 1, 2, "b", (fact,)), 2.1)
    brain.step(cluster, events.Tick(), 40.0)
    taken = any(seat.node == STRANGER for seat in job.roster.seats)
    assert taken == (known == "its own")
    assert job.unsure is None


def word_of(cluster: Cluster, generation: Generation, node: NodeId) -> str:
    return belonging.word(generation_secret(cluster, JOB, generation), JOB, generation, node)


def test_a_word_says_of_which_generation_it_is_and_nothing_else_is_one():
    assert belonging.generation_of(belonging.word("s", JOB, Generation(7), STRANGER)) == 7
    for said in ("", "/", "x/1", "-1/a", "1" * 5000, "\u0661/a"):
        assert belonging.generation_of(said) is None


def test_a_name_is_free_once_its_stream_was_closed_with_no_rank_behind_it():
    def why_not(boot: str = "", **fields) -> admission.Away | None:
        state = replace(NodeState(NodeId("n0"), "a", 2, 1, 2, "old", 1), **fields)
        return admission.why_not_name(hello, admission.Holder(state, boot), 1.0, 3.5)

    hello = wire.Hello(NodeId("n0"), "a", 2, 1, 2, "new")
    rank, spare = Occupant(JobId("j"), Rank(0), 0), Occupant(JobId("j"), Rank(-1), 0)
    assert why_not(), "it may come back"
    assert why_not(linked=False, uses={0: rank})
    assert not why_not(linked=False, uses={0: spare})
    assert not why_not(linked=False), "a run that was over"
    assert why_not("old", linked=False), "somebody is connected"


def test_in_a_doubt_nobody_is_declared_dead_by_a_node_that_has_nothing_of_the_job():
    cluster = running()
    job = cluster.jobs[JOB]
    gap = events.JournalBehind(NodeId("n1"), Term(0), 99, 9, {str(JOB): Generation(6)})
    brain.step(cluster, gap, 1.5)
    assert job.unsure is not None
    before = job.unsure.dead
    for sign in (Sign.EXIT, Sign.FINISHED, Sign.BROKEN):
        lie = wire.Observed(STRANGER, JOB, sign, Rank(0), 99, Generation(6), 9, exit_code=-9)
        assert not brain.step(cluster, lie, 2.0).changed
    assert (job.unsure.dead, job.finished, job.broken_at) == (before, {}, -1.0)
