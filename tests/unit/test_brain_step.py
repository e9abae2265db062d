from __future__ import annotations

from collections.abc import Container

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep import wire
from keepstep.errors import WireError
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
    Term,
)
from keepstep.orchestrator import brain, events, placing, policy, portions, slots, state, view
from keepstep.orchestrator.state import Cause, Death, Taint

JOB = JobId("train")


def hello(cluster: state.Cluster, count: int, slots: int = 2, now: float = 0.0) -> None:
    for i in range(count):
        brain.step(cluster, wire.Hello(NodeId(f"n{i}"), f"a{i}", slots, 1, 2, "b"), now)


def running(nodes: int = 3, spare_count: int = 1, extra: int = 1) -> state.Cluster:
    cluster = state.new_cluster("test")
    hello(cluster, nodes + extra)
    spec = JobSpec(JOB, "train.py", nodes=nodes, spares=spare_count)
    brain.step(cluster, events.Submitted(spec), 0.0)
    report(cluster, Phase.RESUME, 1)
    assert cluster.jobs[JOB].state is JobState.RUNNING
    return cluster


def report(cluster: state.Cluster, phase: Phase, at: int, now: float = 1.0) -> None:
    job = cluster.jobs[JOB]
    world = portions.of_all(len(job.roster.seats))
    for seat in job.roster.seats:
        seat_report = wire.SeatReport(
            seat.rank, at, True, {world: f"d{at}"}, entries=(at,), step=at, step_seconds=3.0
        )
        brain.step(
            cluster, wire.PhaseReport(seat.node, JOB, job.generation, phase, (seat_report,)), now
        )


def death(cluster: state.Cluster, rank: int, code: int = -9, step: int = 5) -> wire.Observed:
    job = cluster.jobs[JOB]
    seat = job.roster.seats[rank]
    return wire.Observed(
        seat.node, JOB, Sign.EXIT, seat.rank, seat.incarnation, job.generation, step, code
    )


EVENTS = [
    wire.Hello(NodeId("n"), "a", 2, 1, 2, "b"),
    wire.Observed(NodeId("n"), JOB, Sign.EXIT, Rank(1), 2, Generation(3), 4, -9, "x"),
    wire.Stalled(NodeId("n"), JOB, Generation(1), (wire.StallFact(Rank(0), 0, 1, 2),), 4.0),
    wire.PhaseReport(NodeId("n"), JOB, Generation(1), Phase.VERIFY, (wire.SeatReport(Rank(0)),)),
    wire.StandbyReport(NodeId("n"), JOB, 0, 1, True),
    wire.Publish(NodeId("n"), JOB, Generation(1), Rank(0), 5, "p", "r"),
    wire.Health(NodeId("n"), Severity.LEAVE, "hot", 1, 300.0),
    wire.Health(NodeId("n"), None),
    events.Submitted(JobSpec(JOB, "t.py")),
    events.StopAsked(JOB, "why", True),
    events.NodeSilent(NodeId("n")),
    events.LinkLost(NodeId("n")),
    events.FreezeAsked("why", "r1"),
    events.UnfreezeAsked("r2"),
    events.Tick(),
    events.Tick(0.7),
    events.TermBegan(Term(2)),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_every_event_survives_the_journal(event: events.Event):
    assert events.from_plain(events.to_plain(event)) == event


def test_an_unknown_event_is_refused():
    with pytest.raises(WireError, match="unknown event"):
        events.from_plain({"kind": "Shutdown", "body": {}})


@given(st.lists(st.sampled_from(EVENTS), max_size=30))
def test_any_order_of_events_is_survived_and_replays_to_the_same_state(sequence):
    cluster = state.new_cluster("test")
    kept = []
    for number, event in enumerate(sequence):
        before = state.fingerprint(cluster)
        decision = brain.step(cluster, event, float(number))
        if decision.changed:
            kept.append((event, float(number)))
        else:
            assert state.fingerprint(cluster) == before
    replayed = state.new_cluster("test")
    for event, now in kept:
        brain.step(replayed, event, now)
    assert state.fingerprint(replayed) == state.fingerprint(cluster)


def test_a_snapshot_is_the_state():
    cluster = running()
    brain.step(cluster, death(cluster, 1), 2.0)
    again = state.from_plain(state.to_plain(cluster))
    assert state.fingerprint(again) == state.fingerprint(cluster)
    one = brain.step(cluster, events.Tick(), 3.0)
    other = brain.step(again, events.Tick(), 3.0)
    assert one.orders == other.orders
    assert state.fingerprint(again) == state.fingerprint(cluster)


def test_each_generation_has_a_secret_of_its_own():
    cluster = running()
    first = cluster.jobs[JOB].roster.secret
    brain.step(cluster, death(cluster, 1), 2.0)
    assert cluster.jobs[JOB].roster.secret != first


def test_orders_have_unique_ids_and_the_same_ones_when_told_again():
    cluster = running()
    told = brain.step(cluster, death(cluster, 1), 2.0).orders
    again = brain.step(cluster, events.TermBegan(Term(9)), 2.1).orders
    assert len({order.order_id for order in told}) == len(told)
    assert {order.order_id for order in told} <= {order.order_id for order in again}
    assert {order.term for order in again} == {9}


def best_spare(cluster):
    job = cluster.jobs[JOB]
    return placing.place(placing.Search(cluster, job, 1.0), job.roster.seats[:1]).get(0)


def test_a_tainted_device_is_never_chosen():
    cluster = running(nodes=2, spare_count=0, extra=1)
    for slot in range(2):
        state.put_taint(cluster, f"n2/{slot}", Taint("bad memory", 0.0, 1e9))
    choice = best_spare(cluster)
    assert choice is not None
    assert choice.node != "n2"


@given(st.sets(st.integers(0, 7)))
def test_whatever_is_tainted_the_choice_is_not(tainted):
    cluster = running(nodes=3, spare_count=0, extra=1)
    for number in tainted:
        state.put_taint(cluster, f"n{number // 2}/{number % 2}", Taint("bad", 0.0, 1e9))
    choice = best_spare(cluster)
    if choice is not None:
        assert choice.slot not in cluster.nodes[choice.node].uses
        assert choice.node[1:].isdigit()
        assert int(choice.node[1:]) * 2 + choice.slot not in tainted


def test_a_standby_is_kept_on_a_node_without_ranks():
    cluster = running(nodes=2, spare_count=2, extra=2)
    homes = {standby.node for standby in cluster.jobs[JOB].standbys.values()}
    assert homes == {"n2", "n3"}


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["operator", "alertmanager/Hot", "health"]),
            st.none() | st.sampled_from(Severity),
        ),
        max_size=8,
    )
)
def test_each_source_has_its_own_word_and_the_worst_comes_first(words):
    cluster, place, holds = state.new_cluster("test"), "n0/1", {}
    hello(cluster, 1)
    for now, (source, severity) in enumerate(words):
        event = events.UntaintAsked(NodeId("n0"), 1, source=source)
        holds.pop(source, None)
        if source == "health":
            event = wire.Health(NodeId("n0"), severity, "bad", 1, 1e6)
        elif severity is not None:
            event = events.TaintAsked(NodeId("n0"), "bad", severity, 1, source, 1e6)
        if severity is not None:
            holds[source] = severity
        brain.step(cluster, event, float(now))
    found = cluster.taints.get(place, ())
    assert {taint.source: taint.severity for taint in found} == holds
    severities = [list(Severity).index(taint.severity) for taint in found]
    assert severities == sorted(severities, reverse=True)
    assert slots.tainted(cluster, NodeId("n0"), 1, 100.0) == bool(holds)
    shown = view.node_view(cluster, cluster.nodes[NodeId("n0")])["uses"][1]["taint"]
    assert shown == ("bad" if holds else None)


def test_a_place_keeps_a_bounded_number_of_taints_and_the_worst_of_them():
    cluster = state.new_cluster("test")
    for number in range(40):
        severity = Severity.IMMINENT if number == 20 else Severity.AVOID
        state.put_taint(cluster, "n0", Taint("bad", 0.0, 1.0, severity, f"s{number:02}"))
    kept = cluster.taints["n0"]
    assert len(kept) == state.TAINTS_PER_PLACE_MAX
    assert kept[0].source == "s20"


def test_a_lost_standby_is_replaced_after_a_while():
    cluster = running()
    (parked,) = cluster.jobs[JOB].standbys.values()
    lost = wire.StandbyReport(parked.node, JOB, parked.slot, 1, False)
    assert brain.step(cluster, lost, 5.0).orders == ()
    decision = brain.step(cluster, events.Tick(), 6.0)
    assert [type(order.action) for order in decision.orders] == [wire.StartStandby]


def test_an_older_generation_cannot_publish():
    cluster = running()
    brain.step(cluster, death(cluster, 1), 2.0)
    stale = wire.Publish(NodeId("n0"), JOB, Generation(1), Rank(0), 9, "p", "r")
    ((_, answer),) = brain.step(cluster, stale, 2.1).answers
    assert not answer.accepted
    assert "fenced" in answer.why


def test_an_older_step_cannot_replace_a_newer_checkpoint():
    cluster = running()
    for step, accepted in ((9, True), (8, False), (9, True)):
        event = wire.Publish(NodeId("n0"), JOB, Generation(1), Rank(0), step, "p", "r")
        ((_, answer),) = brain.step(cluster, event, 2.0).answers
        assert answer.accepted is accepted


@pytest.mark.parametrize(("code", "allowed"), [(-11, 1), (-6, 1), (-9, 4), (1, 2)])
def test_a_rank_that_keeps_dying_alike_at_one_step_is_the_users(code: int, allowed: int):
    cluster = running()
    job = cluster.jobs[JOB]
    cause = Cause(Sign.EXIT, Rank(1), NodeId("n1"), 0, 5, code)
    job.deaths[Rank(1)] = Death(5, code, allowed - 1)
    assert policy.respond(job, cause).response is policy.Response.REPLACE
    job.deaths[Rank(1)] = Death(5, code, allowed)
    assert policy.respond(job, cause).response is policy.Response.STOP


def test_a_death_at_another_step_starts_a_new_count():
    cause = Cause(Sign.EXIT, Rank(1), NodeId("n1"), 0, 6, -11)
    assert policy.counted(Death(5, -11, 1), cause).count == 1


def test_when_most_nodes_fall_silent_the_brain_suspects_itself():
    cluster = running(nodes=3, extra=1)
    for i in range(3):
        brain.step(cluster, events.NodeSilent(NodeId(f"n{i}")), 5.0)
    assert brain.step(cluster, events.Tick(), 6.0).orders == ()
    brain.step(cluster, events.Tick(), 25.0)
    assert cluster.jobs[JOB].state is JobState.RUNNING, "time alone proves nothing"


def test_a_busy_survivor_is_waited_for():
    cluster = running()
    job = cluster.jobs[JOB]
    brain.step(cluster, death(cluster, 1), 2.0)
    busy = wire.SeatReport(Rank(0), busy_seconds=300.0)
    event = wire.PhaseReport(NodeId("n0"), JOB, job.generation, Phase.QUIESCE, (busy,))
    brain.step(cluster, event, 2.1)
    brain.step(cluster, events.Tick(), 100.0)
    assert job.migration.fences == {}
    brain.step(cluster, events.Tick(), 303.0)
    assert set(job.migration.fences) | set(job.migration.gone) or job.generation > 2


def test_closed_incidents_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("keepstep.orchestrator.launch.CLOSED_MAX", 5)
    cluster = running()
    for number in range(12):
        brain.step(cluster, death(cluster, number % 3, step=number), 10.0 + number)
        for phase in (Phase.QUIESCE, Phase.VERIFY, Phase.RESUME):
            report(cluster, phase, number + 2, 10.5 + number)
    assert len(cluster.closed) == 5
    assert {incident.outcome for incident in cluster.closed} == {"resumed"}


def test_the_view_tells_the_story():
    cluster = running()
    brain.step(cluster, death(cluster, 1), 2.0)
    picture = view.describe(cluster)
    assert picture["jobs"]["train"]["migration"]["phase"] == "quiesce"
    assert picture["jobs"]["train"]["seats"][1]["phase"] == "joining"
    (incident,) = picture["incidents"]
    assert incident["outcome"] == "open"
    assert "exited with signal 9" in incident["story"][0][2]
    assert picture["nodes"]["n0"]["alive"] is True


def test_what_stood_still_before_the_last_step_is_no_hang_after_it():
    cluster = running()
    job = next(iter(cluster.jobs.values()))
    assert job.roster is not None
    name, generation = job.spec.job, job.generation
    for seat in job.roster.seats[1:]:
        facts = (wire.StallFact(seat.rank, seat.incarnation, 30, 5),)
        stalled = wire.Stalled(seat.node, name, generation, facts, 5.0)
        assert not brain.step(cluster, stalled, 10.0).orders
    first = job.roster.seats[0]
    ended = wire.Observed(
        first.node, name, Sign.FINISHED, first.rank, first.incarnation, generation, 60
    )
    brain.step(cluster, ended, 10.2)
    for moment in (10.3, 10.8, 11.5):
        brain.step(cluster, events.Tick(), moment)
    assert job.migration is None
    assert job.incident is None


def last_one(rank: int = 2, rules: int = 1) -> state.Cluster:
    """All ranks but the last have finished."""
    cluster = running()
    cluster.rules = rules
    for seat in cluster.jobs[JOB].roster.seats[:rank]:
        finish(cluster, seat.rank, 10.0)
    return cluster


def finish(cluster: state.Cluster, rank: int, now: float) -> brain.Decision:
    job = cluster.jobs[JOB]
    seat = job.roster.seats[rank]
    told = (seat.node, JOB, Sign.FINISHED, seat.rank, seat.incarnation, job.generation, 60)
    return brain.step(cluster, wire.Observed(*told), now)


def stand_still(cluster: state.Cluster, stopped: Container[int], now: float, *ranks: int) -> None:
    """As agents tell it again and again."""
    job = cluster.jobs[JOB]
    for again in range(4):
        for rank in ranks:
            seat = job.roster.seats[rank]
            facts = (wire.StallFact(seat.rank, seat.incarnation, 59, 5, rank in stopped),)
            stalled = wire.Stalled(seat.node, JOB, job.generation, facts, 5.0)
            brain.step(cluster, stalled, now + again / 2)
        brain.step(cluster, events.Tick(), now + again / 2 + 0.1)
        if job.migration is not None:
            return


def test_one_that_is_stopped_when_all_others_have_finished_is_an_incident():
    cluster = last_one()
    job = cluster.jobs[JOB]
    stand_still(cluster, {2}, 12.0, 2)
    assert job.migration is not None
    assert not job.migration.fences, "its state is the last: it gets time before it is killed"
    assert set(job.migration.gone) | set(job.migration.fresh) == {0, 1}
    assert "rank 2 on n2 is stopped, and all others have finished" in job.incident.story[0].why
    for moment in range(13, 400):
        brain.step(cluster, events.Tick(), float(moment))
    assert job.fallbacks or job.state.over, "it never woke: it is given up, by name"


def test_one_that_wakes_and_finishes_after_all_others_ends_the_job():
    cluster = last_one()
    stand_still(cluster, {2}, 12.0, 2)
    finish(cluster, 2, 14.0)
    job = cluster.jobs[JOB]
    assert (job.state, job.fallbacks) == (JobState.FINISHED, 0)


def test_one_that_is_busy_after_its_last_step_is_left_alone():
    cluster = last_one()
    stand_still(cluster, (), 12.0, 2)
    assert cluster.jobs[JOB].migration is None
    # Nor is anybody killed while somebody still does what follows the last step.
    cluster = last_one(rank=1)
    stand_still(cluster, {2}, 12.0, 2)
    assert cluster.jobs[JOB].migration is None
    # When that one stands still as well, it waits for the one that is stopped.
    stand_still(cluster, {2}, 14.0, 2, 1)
    assert set(cluster.jobs[JOB].migration.fences) == {2}


def test_one_that_dies_after_all_others_have_finished_begins_a_new_run():
    cluster = last_one()
    brain.step(cluster, death(cluster, 2, step=60), 12.0)
    job = cluster.jobs[JOB]
    assert (job.fallbacks, job.migration.phase) == (1, Phase.RESUME)
    assert not job.migration.through, "they finished the run before this one"


def test_by_the_rules_of_before_a_stop_after_the_last_step_is_ignored():
    cluster = last_one(rules=0)
    stand_still(cluster, {2}, 12.0, 2)
    assert cluster.jobs[JOB].migration is None
    brain.step(cluster, death(cluster, 2, step=60), 20.0)
    assert not cluster.jobs[JOB].migration.through


def told(decision: brain.Decision, kind: type) -> list:
    return [order.action for order in decision.orders if isinstance(order.action, kind)]


def test_groups_are_connected_ahead_only_when_every_seat_is_taken():
    cluster = running()
    decision = brain.step(cluster, death(cluster, 1), 2.0)
    (assign,), (quiesce,) = told(decision, wire.Assign), told(decision, wire.Quiesce)
    assert assign.forms
    assert quiesce.membership == assign.membership
    # The joiner looks ahead: it is told where the private state of its seat may be.
    assert [home.rank for home in assign.homes] == [1]
    assert assign.homes[0].endpoints

    cluster = running(extra=0, spare_count=0)
    for node in cluster.nodes:
        for slot in range(2):
            taint = Taint("kept free", 0.0, 1e9)
            state.put_taint(cluster, state.slot_key(node, slot), taint)
    (quiesce,) = told(brain.step(cluster, death(cluster, 1), 2.0), wire.Quiesce)
    assert cluster.jobs[JOB].migration.phase is Phase.HOLD
    assert quiesce.membership is None


def test_nobody_meets_if_all_ranks_have_made_the_same_groups():
    for said, alike in (("abc", True), ("", False)):
        cluster = running()
        brain.step(cluster, death(cluster, 1), 2.0)
        job = cluster.jobs[JOB]
        world = portions.of_all(len(job.roster.seats))
        decisions = []
        for seat in job.roster.seats:
            fresh = seat.rank in job.migration.fresh
            groups = said if seat.rank == 0 else "abc"
            told_here = (
                wire.SeatReport(seat.rank, groups=groups)
                if fresh
                else wire.SeatReport(seat.rank, 5, True, {world: "d5"}, entries=(5,), groups=groups)
            )
            whole = wire.PhaseReport(seat.node, JOB, job.generation, Phase.QUIESCE, (told_here,))
            decisions.append(brain.step(cluster, whole, 3.0))
        (reform,) = told(decisions[-1], wire.Reform)
        assert reform.groups_alike is alike


def unfound(recoveries_max: int) -> state.Cluster:
    """A job that holds for a spare, whose other agents have forgotten its workers, all at once."""
    cluster = state.new_cluster("test")
    hello(cluster, 6, slots=1)
    spec = JobSpec(JOB, "train.py", nodes=6, policy=Policy(recoveries_max=recoveries_max))
    brain.step(cluster, events.Submitted(spec), 0.0)
    report(cluster, Phase.RESUME, 1)
    brain.step(cluster, events.NodeSilent(NodeId("n5")), 2.0)
    brain.step(cluster, events.Tick(), 3.0)
    assert cluster.jobs[JOB].migration.phase is Phase.HOLD
    for i in range(1, 5):
        brain.step(cluster, wire.Hello(NodeId(f"n{i}"), f"a{i}", 1, 1, 2, "b"), 100.0)
    return cluster


def test_many_ranks_that_nobody_finds_are_one_fault():
    cluster = unfound(recoveries_max=1)
    brain.step(cluster, events.Tick(), 101.0)
    job = cluster.jobs[JOB]
    assert job.state is not JobState.SAVED
    assert (job.migration.recoveries, job.missing) == (1, {})


def test_a_job_that_ends_with_the_first_of_them_stays_ended():
    cluster = unfound(recoveries_max=0)
    brain.step(cluster, events.Tick(), 101.0)
    job = cluster.jobs[JOB]
    assert job.state.over
    assert job.migration is None
    assert not any(cluster.nodes[NodeId(f"n{i}")].uses for i in range(1, 5))


def test_deaths_of_one_moment_are_one_fault_however_old_the_incident_is():
    cluster = running(nodes=6, spare_count=0, extra=3)
    brain.step(cluster, death(cluster, 0), 2.0)
    job = cluster.jobs[JOB]
    for rank in (1, 2, 3):
        brain.step(cluster, death(cluster, rank), 10.0 + rank / 100)
    assert job.migration.recoveries == 1
    brain.step(cluster, death(cluster, 4), 12.5)
    assert job.migration.recoveries == 2


def test_a_joiner_that_crashes_on_its_way_is_not_the_programs_own_error():
    cluster = running(nodes=3, spare_count=2, extra=2)
    brain.step(cluster, death(cluster, 1, code=-6), 2.0)
    report(cluster, Phase.QUIESCE, 5, now=2.5)
    job = cluster.jobs[JOB]
    assert job.migration.phase is Phase.REFORM
    brain.step(cluster, death(cluster, 1, code=-6), 3.0)
    assert not job.state.over
    report(cluster, Phase.QUIESCE, 5, now=3.5)
    report(cluster, Phase.VERIFY, 5, now=4.0)
    assert job.migration.phase is Phase.RESUME
    brain.step(cluster, death(cluster, 1, code=-6), 5.0)
    assert job.state is JobState.FAILED, "it was told to train, and died as the first one did"
