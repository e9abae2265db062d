"""A journal that is behind its agents: it is seen, and nobody pays for what it has forgotten."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from keepstep import belonging, wire
from keepstep.agent.run import Agent, AgentConfig
from keepstep.model import (
    Endpoint,
    Generation,
    JobId,
    JobSpec,
    JobState,
    NodeId,
    Phase,
    Rank,
    Sign,
    Term,
)
from keepstep.orchestrator import brain, events, nodes, reconcile, rules, state

JOB = JobId("train")


def hello(
    node: str,
    *workers: wire.WorkerFact,
    term: int = 0,
    seq: int = 0,
    obeyed: dict[str, Generation] | None = None,
) -> wire.Hello:
    told = {
        job: belonging.word(secret_of(JobId(job), generation), JobId(job), generation, NodeId(node))
        for job, generation in (obeyed or {}).items()
    }
    return wire.Hello(
        NodeId(node),
        node,
        2,
        1,
        2,
        "boot",
        workers,
        term_seen=Term(term),
        seq_seen=seq,
        obeyed=obeyed or {},
        belongs=told,
    )


def secret_of(job: JobId, generation: Generation) -> str:
    return state.generation_secret(state.new_cluster("test"), job, generation)


def worker(rank: int, job: JobId = JOB, generation: int = 1) -> wire.WorkerFact:
    return wire.WorkerFact(job, Rank(rank), 0, 0, Generation(generation))


def step(cluster: state.Cluster, event: events.Event, now: float) -> brain.Decision:
    return brain.step(cluster, event, now)


def begin(cluster: state.Cluster, term: int, seq: int, now: float = 10.0) -> None:
    step(cluster, events.TermBegan(Term(term), seq=seq, rules=rules.NEWEST), now)


def with_a_job_that_waits() -> state.Cluster:
    """A second term began. Of the nodes of the first one n0 has yet to come; n2 is new."""
    cluster = state.new_cluster("test")
    step(cluster, hello("n0"), 0.0)
    step(cluster, events.Submitted(JobSpec(JOB, "train.py", nodes=2)), 0.0)
    begin(cluster, 2, 50)
    step(cluster, hello("n2"), 10.1)
    return cluster


def test_a_pulse_of_a_later_term_takes_back_nothing_that_an_agent_obeyed(tmp_path: Path):
    leader = Endpoint("127.0.0.1", 1)
    agent = Agent(AgentConfig(NodeId("n0"), 1, (leader,), "127.0.0.1", tmp_path / "room"))
    agent.room.open()
    with agent.room._lock:
        _pulses_and_orders(agent)


def _pulses_and_orders(agent: Agent) -> None:
    assert agent._current(Term(3), "order", 100)
    assert agent._current(Term(4), "pulse")
    assert (agent.room.term, agent.room.seq) == (4, 100)
    # A leader whose journal was restored counts from a lower number; from its first order on that
    # is what was obeyed.
    assert agent._current(Term(5), "pulse")
    assert agent._current(Term(5), "order", 40)
    assert (agent.room.term, agent.room.seq) == (5, 40)
    assert not agent._current(Term(4), "order", 200)
    assert agent.room.seq == 40


def test_what_a_full_room_could_not_keep_was_not_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Else the next order of the same entry passes, and a restarted agent knows of neither."""

    def full() -> None:
        raise OSError(28, "No space left on device")

    leader = Endpoint("127.0.0.1", 1)
    agent = Agent(AgentConfig(NodeId("n0"), 1, (leader,), "127.0.0.1", tmp_path / "room"))
    agent.room.open()
    with agent.room._lock:
        assert agent._current(Term(3), "order", 100)
        with monkeypatch.context() as no_space:
            no_space.setattr(agent.room, "save", full)
            for _ in range(2):
                with pytest.raises(OSError, match="No space left"):
                    agent._current(Term(4), "order", 101)
        assert (agent.room.term, agent.room.seq) == (3, 100)
        assert agent._current(Term(4), "order", 101)


def test_a_failover_after_which_only_pulses_came_hides_no_gap_and_makes_none_up():
    cluster = state.new_cluster("test")
    begin(cluster, 4, 120)
    begin(cluster, 5, 150)
    assert reconcile.gap(cluster, Term(5), 160, hello("n0", term=5, seq=110)) is None
    assert reconcile.gap(cluster, Term(5), 160, hello("n0", term=4, seq=110)) is None
    restored = state.new_cluster("test")
    begin(restored, 6, 50)
    gap = reconcile.gap(restored, Term(6), 51, hello("n0", term=5, seq=110))
    assert gap is not None
    assert (gap.first, gap.seq_seen) == (51, 110)
    step(restored, gap, 11.0)
    again = hello("n0", term=6, seq=110)
    assert reconcile.gap(restored, Term(6), 60, again) is None, "it is written down once"
    older = state.new_cluster("test")
    begin(older, 7, 20)
    assert reconcile.gap(older, Term(7), 21, again) is not None


def test_workers_that_the_journal_forgot_are_left_alone_on_however_many_nodes():
    cluster = state.new_cluster("test")
    begin(cluster, 2, 50)
    nodes = [f"n{i}" for i in range(state.GAPS_MAX + 50)]
    for node in nodes:
        gap = reconcile.gap(cluster, Term(2), 50, hello(node, term=1, seq=90))
        assert gap is not None
        step(cluster, gap, 11.0)
    for node in nodes:
        assert step(cluster, hello(node, worker(0, JobId("other"))), 12.0).orders == ()
    assert state.fingerprint(state.from_plain(state.to_plain(cluster))) == state.fingerprint(
        cluster
    )


def behind(cluster: state.Cluster, node: str, now: float) -> None:
    """A node shows that it has obeyed entries of the first term that this journal lacks."""
    gap = reconcile.gap(cluster, Term(2), 50, hello(node, term=1, seq=90))
    assert gap is not None
    step(cluster, gap, now)


def test_what_is_left_of_a_job_that_ended_after_a_gap_is_ended():
    cluster = running()
    behind(cluster, "n0", 10.1)
    known = {str(JOB): Generation(1)}
    step(cluster, hello("n0", worker(0), term=1, seq=90, obeyed=known), 10.2)
    step(cluster, hello("n1", worker(1), obeyed=known), 10.3)
    step(cluster, events.StopAsked(JOB, "enough"), 20.0)
    assert cluster.jobs[JOB].state is JobState.STOPPED
    assert "n0" in cluster.ahead
    # A stop that did not reach it; it comes back, as the same or with orders of this history.
    for seq, term, now in ((90, 1, 25.0), (60, 2, 30.0)):
        told = step(cluster, hello("n0", worker(0), term=term, seq=seq), now)
        (order,) = told.orders
        assert isinstance(order.action, wire.Fence)
    assert "n0" not in cluster.ahead, "it has obeyed what is here"
    ((_, answer),) = step(cluster, publish("n0", 1), 31.0).answers
    assert not answer.accepted
    for number in range(state.JOBS_OVER_MAX):
        name = JobId(f"other{number}")
        step(cluster, events.Submitted(JobSpec(name, "t.py", nodes=9)), 40.0 + number)
        step(cluster, events.StopAsked(name, "enough"), 40.0 + number)
    assert JOB not in cluster.jobs
    (order,) = step(cluster, hello("n0", worker(0), term=2, seq=61), 900.0).orders
    assert isinstance(order.action, wire.Fence), "also when the job is forgotten"


def test_what_a_job_that_had_ended_before_a_gap_runs_is_left_alone_also_later():
    cluster = running()
    step(cluster, events.StopAsked(JOB, "enough"), 11.0)
    step(cluster, hello("n0"), 11.1)
    behind(cluster, "n0", 12.0)
    # It was submitted again in what the journal lacks; and one was that it has never seen.
    there = (worker(0, generation=2), replace(worker(0, JobId("other")), slot=1))
    assert step(cluster, hello("n0", *there, term=1, seq=90), 12.1).orders == ()
    assert step(cluster, hello("n0", *there, term=2, seq=60), 90.0).orders == ()
    assert step(cluster, publish("n0", 2), 91.0).answers == ()
    assert step(cluster, publish("n0", 2, JobId("other")), 91.0).answers == ()


@pytest.mark.parametrize("name", [JOB, JobId("other")])
def test_a_name_that_ran_in_what_was_forgotten_does_not_get_its_numbers_again(name: JobId):
    cluster = running()
    step(cluster, events.StopAsked(JOB, "enough"), 11.0)
    behind(cluster, "n0", 12.0)
    ran = {str(name): Generation(2)}
    step(cluster, hello("n0", term=1, seq=90, obeyed=ran), 12.1)
    step(cluster, hello("n1"), 12.2)
    started = step(cluster, events.Submitted(JobSpec(name, "t.py")), 20.0).orders
    (order,) = [order for order in started if isinstance(order.action, wire.StartWorkers)]
    assert isinstance(order.action, wire.StartWorkers)
    assert order.generation > 2
    assert order.action.seats[0].incarnation >= reconcile.INCARNATIONS_SKIPPED
    assert cluster.jobs[name].unsure is None


def test_nobody_uses_up_the_numbers_without_having_been_told_of_them():
    cluster = running()
    behind(cluster, "n0", 12.0)
    lie = replace(hello("n0", term=1, seq=90), obeyed={"other": Generation(2**52)})
    step(cluster, replace(lie, belongs={"other": f"{2**52}/{'0' * 64}"}), 12.1)
    assert cluster.past_number == 0


def test_a_stray_on_a_node_that_is_not_ahead_is_fenced():
    cluster = state.new_cluster("test")
    (order,) = step(cluster, hello("n0", worker(0, JobId("other"))), 12.0).orders
    assert isinstance(order.action, wire.Fence)


def test_a_job_that_waits_in_the_journal_and_runs_on_nodes_is_not_started_again():
    cluster = with_a_job_that_waits()
    # n0 has yet to come, and may know more than the journal; n1 does.
    assert step(cluster, hello("n3"), 10.2).orders == ()
    obeyed = {str(JOB): Generation(1)}
    assert step(cluster, hello("n1", worker(1), obeyed=obeyed), 10.3).orders == ()
    step(cluster, events.Tick(), 17.0)
    job = cluster.jobs[JOB]
    assert (job.state, job.roster) == (JobState.WAITING, None)
    step(cluster, hello("n0", worker(0), obeyed=obeyed), 17.1)
    assert (job.state, job.unsure) == (JobState.MIGRATING, None)
    assert job.roster is not None
    assert [(seat.node, seat.incarnation) for seat in job.roster.seats] == [("n0", 0), ("n1", 0)]


def test_a_node_of_a_job_in_doubt_that_has_no_seats_here_may_be_lost():
    cluster = state.new_cluster("test")
    step(cluster, events.Submitted(JobSpec(JOB, "train.py", nodes=2)), 0.0)
    begin(cluster, 2, 50)
    known = hello("n1", worker(1), obeyed={str(JOB): Generation(1)})
    step(cluster, known, 10.1)
    step(cluster, replace(known, boot="another", workers=()), 10.2)
    unsure = cluster.jobs[JOB].unsure
    assert unsure is not None
    assert unsure.claims == {"n1": ()}


def test_a_waiting_job_of_an_earlier_term_waits_for_agents_a_little_and_a_new_one_does_not():
    cluster = with_a_job_that_waits()
    step(cluster, hello("n3"), 10.2)
    new = JobId("new")
    step(cluster, events.Submitted(JobSpec(new, "train.py", nodes=1)), 10.3)
    assert cluster.jobs[new].state is JobState.STARTING
    assert cluster.jobs[JOB].state is JobState.WAITING
    step(cluster, events.Tick(), 15.1)
    assert cluster.jobs[JOB].state is JobState.STARTING


def running() -> state.Cluster:
    """Two ranks in generation 1, whose leader has just changed."""
    cluster = state.new_cluster("test")
    for node in ("n0", "n1"):
        step(cluster, hello(node), 0.0)
    step(cluster, events.Submitted(JobSpec(JOB, "train.py", nodes=2)), 0.0)
    for rank, node in enumerate(("n0", "n1")):
        told = wire.SeatReport(Rank(rank), 1, True, {"0-1": "d"}, step=1, step_seconds=0.5)
        step(
            cluster, wire.PhaseReport(NodeId(node), JOB, Generation(1), Phase.RESUME, (told,)), 1.0
        )
    assert cluster.jobs[JOB].state is JobState.RUNNING
    begin(cluster, 2, 50)
    return cluster


def publish(node: str, generation: int, job: JobId = JOB) -> wire.Publish:
    return wire.Publish(NodeId(node), job, Generation(generation), Rank(0), 9, "path", "request")


def test_a_worker_that_the_journal_is_behind_is_not_told_that_it_is_fenced():
    cluster = running()
    known = hello("n0", worker(0, generation=2), obeyed={str(JOB): Generation(2)})
    step(cluster, known, 10.1)
    assert cluster.jobs[JOB].unsure is not None
    waits = step(cluster, publish("n0", 2), 10.2)
    assert (waits.answers, waits.changed) == ((), False)
    ((_, refused),) = step(cluster, publish("n0", 1, JobId("other")), 10.3).answers
    assert not refused.accepted
    gap = reconcile.gap(cluster, Term(2), 50, hello("n0", term=1, seq=90))
    assert gap is not None
    step(cluster, gap, 10.4)
    assert step(cluster, publish("n0", 1, JobId("other")), 10.5).answers == ()


def test_who_came_before_the_doubt_does_not_have_to_come_again():
    cluster = running()
    step(cluster, hello("n0", worker(0), obeyed={str(JOB): Generation(1)}), 10.1)
    late = hello("n1", worker(1, generation=2), obeyed={str(JOB): Generation(2)})
    assert "as 2 agents list them" in step(cluster, late, 10.2).why
    job = cluster.jobs[JOB]
    assert (job.unsure, job.generation) == (None, 3)


# ---------------------------------------------------------------- what agents tell in a doubt


def with_a_job_in_doubt() -> state.Cluster:
    """Two ranks on n0 and n1; after a restore n0 has obeyed a later generation."""
    cluster = state.new_cluster("test")
    for node in ("n0", "n1"):
        step(cluster, hello(node), 0.0)
    step(cluster, events.Submitted(JobSpec(JOB, "train.py", nodes=2)), 0.0)
    begin(cluster, 2, 50)
    obeyed = {"train": Generation(3)}
    step(cluster, hello("n0", worker(0, generation=3), obeyed=obeyed), 10.1)
    assert cluster.jobs[JOB].unsure is not None
    return cluster


def with_a_job_that_trains() -> tuple[state.Cluster, state.Job]:
    """Two ranks, on n0 and n1, which have room for nobody else."""
    cluster = state.new_cluster("test")
    for node in ("n0", "n1"):
        step(cluster, replace(hello(node), slots=1), 0.0)
    step(cluster, events.Submitted(JobSpec(JOB, "train.py", nodes=2)), 0.0)
    job = cluster.jobs[JOB]
    for node, rank in (("n0", 0), ("n1", 1)):
        seat = wire.SeatReport(Rank(rank), 1, True, step=1)
        report = wire.PhaseReport(NodeId(node), JOB, job.generation, Phase.RESUME, (seat,))
        step(cluster, report, 1.0)
    return cluster, job


def an_end(
    rank: int, sign: Sign = Sign.EXIT, node: str = "n0", incarnation: int = 0
) -> wire.Observed:
    return wire.Observed(
        NodeId(node), JOB, sign, Rank(rank), incarnation, Generation(3), 9, exit_code=-9
    )


def ticks(cluster: state.Cluster, *moments: float) -> None:
    for moment in moments:
        step(cluster, events.Tick(), moment)


def test_the_end_of_a_rank_that_an_earlier_and_larger_run_had_is_nobodys():
    cluster = with_a_job_in_doubt()
    step(cluster, an_end(5), 10.2)
    step(cluster, hello("n1", worker(1, generation=3), worker(7, generation=3)), 10.3)
    ticks(cluster, 16.0, 41.0, 42.0)
    job = cluster.jobs[JOB]
    assert job.unsure is None
    assert job.generation == 4
    assert {seat.rank for seat in job.roster.seats} == {0, 1}


def test_a_worker_of_an_earlier_and_larger_run_is_ended_when_all_are_found():
    cluster = with_a_job_in_doubt()
    stray = wire.WorkerFact(JOB, Rank(7), 1, 0, Generation(1))
    told = step(cluster, hello("n1", worker(1, generation=3), stray), 10.3).orders
    fences = [order.action for order in told if isinstance(order.action, wire.Fence)]
    assert cluster.jobs[JOB].unsure is None
    assert [seat.rank for fence in fences for seat in fence.seats] == [7]


def test_the_end_of_an_earlier_worker_says_nothing_of_the_one_that_the_journal_has():
    cluster = with_a_job_in_doubt()
    job = cluster.jobs[JOB]
    job.roster = replace(
        job.roster,
        seats=tuple(replace(seat, incarnation=1) for seat in job.roster.seats),
    )
    step(cluster, an_end(1, incarnation=0), 10.2)
    step(cluster, an_end(1, Sign.FINISHED, incarnation=0), 10.2)
    assert not job.unsure.dead
    assert not job.finished


def test_a_job_that_finished_in_what_was_forgotten_has_finished():
    cluster = with_a_job_in_doubt()
    step(cluster, hello("n0", obeyed={"train": Generation(3)}), 10.2)
    # Its last agent comes late, and says how its ranks ended behind its hello.
    ticks(cluster, 16.0, 39.0)
    step(cluster, an_end(0, Sign.FINISHED), 39.1)
    step(cluster, hello("n1", obeyed={"train": Generation(3)}), 41.0)
    ticks(cluster, 41.1)
    assert not cluster.jobs[JOB].state.over
    step(cluster, an_end(1, Sign.FINISHED, "n1"), 41.2)
    ticks(cluster, 41.3)
    assert cluster.jobs[JOB].state is JobState.FINISHED


def test_a_save_that_the_journal_knows_is_not_forgotten_for_a_later_entry():
    cluster, job = with_a_job_that_trains()
    step(cluster, events.StopAsked(JOB, "SIGTERM", save=True), 2.0)
    assert job.migration is not None
    assert job.migration.saves
    begin(cluster, 2, 50)
    obeyed = {"train": job.generation}
    gap = events.JournalBehind(NodeId("n0"), Term(1), 60, 51, obeyed)
    step(cluster, gap, 10.1)
    assert job.unsure is None
    assert job.migration.saves
    # Of a later generation it stands still, nobody is blamed meanwhile, and then it is saved.
    step(cluster, hello("n0", worker(0, generation=7), obeyed={"train": Generation(7)}), 10.2)
    assert job.unsure is not None
    ticks(cluster, 30.0, 50.0)
    assert not job.migration.fences
    step(cluster, hello("n1", worker(1, generation=7), obeyed={"train": Generation(7)}), 50.1)
    ticks(cluster, 50.2)
    assert job.unsure is None
    assert job.migration.saves
    assert job.generation > 7


def test_who_comes_late_and_lives_is_not_given_up_for_those_who_died():
    cluster = with_a_job_in_doubt()
    step(cluster, hello("n0", obeyed={"train": Generation(3)}), 10.2)
    step(cluster, an_end(0), 10.2)
    step(cluster, an_end(1, incarnation=0), 10.2)
    ticks(cluster, 16.0)
    assert cluster.jobs[JOB].unsure is not None, "all that is known of is dead"
    alive = wire.WorkerFact(JOB, Rank(1), 0, 1, Generation(3))
    step(cluster, hello("n1", alive, obeyed={"train": Generation(3)}), 16.1)
    ticks(cluster, 16.2)
    job = cluster.jobs[JOB]
    assert job.unsure is None
    assert job.roster.seats[1].incarnation == 1
    assert not job.fallbacks


def test_a_rank_that_is_listed_is_not_dead_because_the_journal_had_lost_it():
    cluster, job = with_a_job_that_trains()
    step(cluster, replace(hello("n1"), boot="another", slots=0), 2.0)
    assert job.migration is not None
    assert 1 in job.migration.gone
    begin(cluster, 2, 50)
    obeyed = {"train": Generation(5)}
    step(cluster, replace(hello("n0", worker(0, generation=5), obeyed=obeyed), slots=1), 10.1)
    assert [seat.rank for seat in job.unsure.dead] == [1]
    back = replace(hello("n1", worker(1, generation=5), obeyed=obeyed), boot="another", slots=1)
    step(cluster, back, 10.2)
    ticks(cluster, 16.0)
    assert job.unsure is None
    assert 1 not in job.migration.gone


def test_a_report_of_a_move_is_no_sign_that_nobody_trains():
    cluster = with_a_job_in_doubt()
    job = cluster.jobs[JOB]
    for phase, boundary in ((Phase.AGREE, 9), (Phase.QUIESCE, -1), (Phase.RESUME, 9)):
        seat = wire.SeatReport(Rank(0), boundary)
        report = wire.PhaseReport(NodeId("n0"), JOB, Generation(3), phase, (seat,))
        assert not step(cluster, report, 10.2).changed
    assert job.broken_at < 0


def test_room_that_comes_first_is_not_used_before_those_who_may_know_more():
    """In a HOLD seats are filled in the same generation: whoever comes may have one already."""
    cluster, job = with_a_job_that_trains()
    rebooted = replace(hello("n1"), boot="another", slots=0)
    step(cluster, rebooted, 2.0)
    assert job.migration is not None
    assert job.migration.phase is Phase.HOLD
    begin(cluster, 2, 50)
    assert not any(
        isinstance(order.action, wire.Assign) for order in step(cluster, hello("n9"), 10.1).orders
    ), "n0 has yet to come"
    told = step(cluster, replace(hello("n0", worker(0, generation=2)), slots=1), 10.2).orders
    assert any(isinstance(order.action, wire.Assign) for order in told)


def test_a_worker_of_an_earlier_and_larger_run_holds_up_neither_the_doubt_nor_the_clock():
    """Its rank has no seat: whose steps vouch for its node must be found all the same."""
    cluster, job = with_a_job_that_trains()
    begin(cluster, 2, 50)
    later = Generation(job.generation + 2)
    old = wire.WorkerFact(JOB, Rank(7), 1, 0, Generation(1))
    for node, rank in (("n0", 0), ("n1", 1)):
        facts = (worker(rank, generation=later), *([old] if rank == 0 else []))
        step(cluster, hello(node, *facts, obeyed={str(JOB): later}), 10.1)
        assert nodes.jobs_on(cluster, [NodeId(node)])
    assert job.unsure is None
    orders = step(cluster, hello("n0", worker(0), old), 11.0).orders
    assert any(isinstance(order.action, wire.Fence) for order in orders)


def test_a_job_in_doubt_keeps_room_from_nobody_though_it_was_about_to_look_for_spares():
    """Its node may never come back, and nobody would start on this cluster again."""
    cluster, job = with_a_job_that_trains()
    hangs = replace(an_end(1, Sign.HANG, "n1"), generation=job.generation)
    step(cluster, hangs, 2.0)
    begin(cluster, 2, 50, now=2.1)
    step(cluster, hello("n0", worker(0, generation=7), obeyed={"train": Generation(7)}), 2.2)
    other = JobId("other")
    step(cluster, events.Submitted(JobSpec(other, "train.py", spares=1)), 3.0)
    for node in ("n8", "n9"):
        step(cluster, replace(hello(node), slots=1), 60.0)
    assert job.unsure is not None
    assert job.migration is not None
    assert job.migration.phase is Phase.ALLOCATE
    assert cluster.jobs[other].state is JobState.STARTING
    assert cluster.jobs[other].standbys, "nor does it keep standbys from those that start"
