"""We suspect ourselves before we give up many nodes, or any node right after taking the lead."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep import wire
from keepstep.model import JobId, JobSpec, JobState, NodeId, Phase, Rank, Severity, Sign, Term
from keepstep.orchestrator import brain, events, liveness, portions, state, suspicion, view
from keepstep.orchestrator.patience import Patience
from keepstep.orchestrator.turn import Turn

JOB = JobId("train")


def cluster_of(nodes: int, seats: int, spares: int = 1) -> state.Cluster:
    cluster = state.new_cluster("test")
    for i in range(nodes):
        step(cluster, wire.Hello(NodeId(f"n{i}"), f"a{i}", 1, 1, 2, "b"), 0.0)
    step(cluster, events.Submitted(JobSpec(JOB, "train.py", nodes=seats, spares=spares)), 0.0)
    report(cluster, Phase.RESUME, 1, 1.0)
    assert cluster.jobs[JOB].state is JobState.RUNNING
    return cluster


def step(cluster: state.Cluster, event: events.Event, now: float) -> brain.Decision:
    return brain.step(cluster, event, now)


def stopped(cluster: state.Cluster, first: int, now: float) -> None:
    """All ranks from this one on say that they are at the boundary."""
    job = cluster.jobs[JOB]
    assert job.roster is not None
    world = portions.of_all(len(job.roster.seats))
    for seat in job.roster.seats[first:]:
        told = wire.SeatReport(seat.rank, 5, True, {world: "d"}, entries=(5,), step_seconds=0.5)
        message = wire.PhaseReport(seat.node, JOB, job.generation, Phase.QUIESCE, (told,))
        step(cluster, message, now)


def report(cluster: state.Cluster, phase: Phase, at: int, now: float, without: int = -1) -> None:
    job = cluster.jobs[JOB]
    assert job.roster is not None
    world = portions.of_all(len(job.roster.seats))
    for seat in job.roster.seats:
        if seat.rank != without:
            told = wire.SeatReport(
                seat.rank, at, True, {world: "d"}, entries=(at,), step=at, step_seconds=0.5
            )
            message = wire.PhaseReport(seat.node, JOB, job.generation, phase, (told,))
            step(cluster, message, now)


def silence(cluster: state.Cluster, count: int, now: float, apart: float = 0.0) -> None:
    for i in range(count):
        step(cluster, events.NodeSilent(NodeId(f"n{i}")), now + i * apart)


def observed(cluster: state.Cluster, rank: int, sign: Sign) -> wire.Observed:
    job = cluster.jobs[JOB]
    assert job.roster is not None
    seat = job.roster.seats[rank]
    return wire.Observed(
        seat.node, JOB, sign, seat.rank, seat.incarnation, job.generation, 5, detail="reset"
    )


def lost(cluster: state.Cluster) -> int:
    return sum(1 for node in cluster.nodes.values() if not node.alive)


@pytest.mark.parametrize(("nodes", "silent"), [(2, 1), (4, 1), (4, 2), (10, 2), (40, 4)])
def test_a_few_silent_nodes_are_given_up_at_once_whatever_the_cluster(nodes: int, silent: int):
    cluster = cluster_of(nodes, seats=nodes)
    silence(cluster, silent, 10.0)
    step(cluster, events.Tick(), 10.3)
    assert lost(cluster) == silent
    assert not cluster.self_doubt


@pytest.mark.parametrize(("nodes", "silent"), [(4, 3), (10, 3), (40, 5), (100, 11), (100, 100)])
def test_if_over_a_tenth_fall_silent_at_once_nobody_is_fenced_however_long_it_lasts(
    nodes: int, silent: int
):
    cluster = cluster_of(nodes, seats=nodes)
    silence(cluster, silent, 10.0)
    told = [step(cluster, events.Tick(), 10.3 + i) for i in range(0, 3000, 97)]
    share = f"{100 * silent / nodes:.0f} % of nodes fell silent within 5 s"
    assert told[0].why == f"{share}: we suspect ourselves; waiting for second evidence"
    assert not any(decision.changed for decision in told[1:]), "it is said once"
    assert not any(decision.orders for decision in told)
    assert lost(cluster) == 0
    assert view.describe(cluster)["self_doubt"]["since"] == 10.3
    for i in range(silent):
        step(cluster, wire.Hello(NodeId(f"n{i}"), f"a{i}", 1, 1, 2, "b", _there(cluster, i)), 4e3)
    assert "do not suspect ourselves any more" in step(cluster, events.Tick(), 4e3).why
    assert view.describe(cluster)["self_doubt"] is None
    assert cluster.jobs[JOB].generation == 1, "and nothing happened"


def _there(cluster: state.Cluster, rank: int) -> tuple[wire.WorkerFact, ...]:
    job = cluster.jobs[JOB]
    return (wire.WorkerFact(JOB, Rank(rank), 0, 0, job.generation),)


def test_those_who_fall_silent_one_after_another_are_not_put_down_to_ourselves():
    cluster = cluster_of(100, seats=100)
    for i in range(12):
        step(cluster, events.NodeSilent(NodeId(f"n{i}")), 10.0 + i)
        step(cluster, events.NodeVouched(NodeId(f"n{i}")), 10.0 + i)
    assert suspicion.doubted(Turn(cluster, 22.0)) == frozenset()


def test_the_first_of_many_is_not_given_up_before_the_others_are_missed():
    """Heartbeats come every half second: of many that fall silent at once some are missed first."""
    cluster = cluster_of(100, seats=100)
    for i in range(5):
        step(cluster, events.NodeSilent(NodeId(f"n{i}"), crowd=20), 10.0)
    step(cluster, events.Tick(), 10.3)
    assert lost(cluster) == 0
    assert "we suspect ourselves" in cluster.self_doubt


def test_nobody_in_the_middle_of_a_crowd_is_given_up():
    """Missed one by one: half of them were told of, half are to come, and both are a few."""
    cluster = cluster_of(100, seats=100)
    for i in range(12):
        step(cluster, events.NodeSilent(NodeId(f"n{i}"), crowd=11 - i), 10.0 + 0.03 * i)
        step(cluster, events.Tick(), 10.01 + 0.03 * i)
    step(cluster, events.Tick(), 10.7)
    assert lost(cluster) == 0
    assert {f"n{i}" for i in range(12)} == suspicion.doubted(Turn(cluster, 10.7))


def test_a_crowd_of_a_tenth_is_none_of_ours():
    cluster = cluster_of(100, seats=100)
    for i in range(5):
        step(cluster, events.NodeSilent(NodeId(f"n{i}"), crowd=9 - i), 10.0)
    step(cluster, events.Tick(), 10.3)
    assert lost(cluster) == 5


def test_only_those_in_the_crowded_window_are_doubted():
    cluster = cluster_of(100, seats=100)
    step(cluster, events.NodeSilent(NodeId("n99")), 2.0)
    silence(cluster, 12, 10.0, apart=0.1)
    doubted = suspicion.doubted(Turn(cluster, 12.0))
    assert doubted == {f"n{i}" for i in range(12)}


def test_the_last_ones_of_many_stay_doubted_when_the_others_are_heard_or_given_up():
    cluster = cluster_of(40, seats=36, spares=0)
    silence(cluster, 5, 10.0)
    for i in (36, 37):
        step(cluster, events.NodeSilent(NodeId(f"n{i}")), 10.0)
    step(cluster, events.Tick(), 10.3)
    for i in range(3):
        back = wire.Hello(NodeId(f"n{i}"), f"a{i}", 1, 1, 2, "b", _there(cluster, i))
        step(cluster, back, 12.0)
    for i in range(30):
        step(cluster, events.Tick(), 13.0 + i)
    gone = [name for name, node in cluster.nodes.items() if not node.alive]
    assert gone == ["n36", "n37"], "nobody is fenced by giving up those without a seat"
    assert cluster.self_doubt


@pytest.mark.parametrize("kind", ["broken", "stalled", "tainted"])
def test_second_evidence_ends_the_doubt_for_real_losses(kind: str):
    cluster = cluster_of(40, seats=36, spares=4)
    silence(cluster, 5, 10.0)
    step(cluster, events.Tick(), 10.3)
    assert lost(cluster) == 0
    if kind == "broken":
        step(cluster, observed(cluster, 20, Sign.BROKEN), 10.4)
        step(cluster, events.Tick(), 10.5)
        assert lost(cluster) == 0, "somebody may turn out to be dead"
    elif kind == "stalled":
        fact = wire.StallFact(Rank(20), 0, 5, 3, False)
        stalled = wire.Stalled(NodeId("n20"), JOB, cluster.jobs[JOB].generation, (fact,), 4.0)
        step(cluster, stalled, 10.9)
    else:
        for i in range(5):
            taint = events.TaintAsked(NodeId(f"n{i}"), "no power", Severity.IMMINENT)
            step(cluster, taint, 10.9)
    decision = step(cluster, events.Tick(), 11.0)
    assert lost(cluster) == 5
    assert "its heartbeats stopped, and " in decision.why
    assert cluster.jobs[JOB].state in (JobState.MIGRATING, JobState.HELD)


def test_a_death_that_explains_the_broken_collective_is_no_evidence_against_the_silent():
    cluster = cluster_of(40, seats=36, spares=4)
    silence(cluster, 5, 10.0)
    step(cluster, events.Tick(), 10.3)
    step(cluster, observed(cluster, 20, Sign.BROKEN), 10.4)
    step(cluster, observed(cluster, 30, Sign.EXIT), 10.45)
    for i in range(20):
        step(cluster, events.Tick(), 11.0 + i)
    assert lost(cluster) == 0


def test_one_of_a_rack_that_falls_silent_later_is_lost_with_the_others():
    cluster = cluster_of(40, seats=36, spares=6)
    silence(cluster, 5, 10.0)
    step(cluster, observed(cluster, 20, Sign.BROKEN), 10.0)
    step(cluster, events.Tick(), 10.6)
    assert lost(cluster) == 5
    for i in range(5, 10):
        step(cluster, events.NodeSilent(NodeId(f"n{i}")), 11.0)
    decision = step(cluster, events.Tick(), 11.3)
    assert lost(cluster) == 10
    assert "train lost n0 at that time" in decision.why


def test_nodes_that_were_lost_for_their_silence_alone_speak_against_nobody():
    """Our own network fades: two are too few for a doubt, and thirty more follow."""
    cluster = cluster_of(100, seats=90, spares=6)
    silence(cluster, 2, 10.0)
    step(cluster, events.Tick(), 10.3)
    assert lost(cluster) == 2
    assert cluster.jobs[JOB].state is JobState.MIGRATING
    for i in range(2, 32):
        step(cluster, events.NodeSilent(NodeId(f"n{i}")), 13.0)
    for i in range(30):
        step(cluster, events.Tick(), 13.3 + i)
    assert lost(cluster) == 2
    assert "we suspect ourselves" in cluster.self_doubt
    step(cluster, events.TaintAsked(NodeId("n2"), "no power", Severity.IMMINENT), 44.0)
    for i in range(3):
        step(cluster, events.Tick(), 44.1 + i)
    assert lost(cluster) == 3, "what somebody says of one is said of no other"


def test_a_real_loss_that_goes_on_is_one_where_peers_missed_the_first():
    cluster = cluster_of(14, seats=14)
    step(cluster, observed(cluster, 13, Sign.BROKEN), 9.0)
    step(cluster, events.NodeSilent(NodeId("n0")), 10.0)
    step(cluster, events.Tick(), 10.3)
    assert lost(cluster) == 1
    for i in (1, 2, 3):
        step(cluster, events.NodeSilent(NodeId(f"n{i}"), crowd=3 - i), 12.0)
    decision = step(cluster, events.Tick(), 12.5)
    assert lost(cluster) == 4
    assert "train lost n0 at that time" in decision.why


def test_a_network_that_fades_loses_no_more_than_a_tenth_within_a_window():
    cluster = cluster_of(100, seats=100)
    for i in range(40):
        step(cluster, events.NodeSilent(NodeId(f"n{i}")), 10.0 + 0.2 * i)
        step(cluster, events.Tick(), 10.0 + 0.2 * i + 0.19)
    for i in range(20):
        step(cluster, events.Tick(), 20.0 + i)
    assert lost(cluster) <= 10
    assert "we suspect ourselves" in cluster.self_doubt


@pytest.mark.parametrize("rack", ["r1\nx", "r1\u2028x", "=", "a=b"])
def test_a_label_may_hold_anything(rack: str):
    cluster = state.new_cluster("test")
    for i in range(3):
        hello = wire.Hello(NodeId(f"n{i}"), f"a{i}", 1, 1, 2, "b", labels={"rack": rack + str(i)})
        step(cluster, hello, 0.0)
    step(cluster, events.Submitted(JobSpec(JOB, "train.py", nodes=3)), 0.0)
    assert cluster.jobs[JOB].roster is not None


def test_a_collective_that_broke_before_the_silence_speaks_against_the_silent():
    cluster = cluster_of(40, seats=36, spares=6)
    step(cluster, observed(cluster, 20, Sign.BROKEN), 7.0)
    step(cluster, events.Tick(), 9.1)
    assert cluster.jobs[JOB].generation == 2, "formed anew: nobody was to blame yet"
    silence(cluster, 5, 10.0)
    decision = step(cluster, events.Tick(), 10.3)
    assert lost(cluster) == 5
    assert "broke at that time, and nobody else is to blame" in decision.why


def test_within_30_s_of_taking_the_lead_one_silent_node_needs_evidence_too():
    cluster = cluster_of(4, seats=3)
    step(cluster, events.TermBegan(Term(2)), 100.0)
    for i in (0, 2, 3):
        back = wire.Hello(NodeId(f"n{i}"), f"a{i}", 1, 1, 2, "b", _there(cluster, i)[: i < 3])
        step(cluster, back, 101.0)
    waits = step(cluster, events.Tick(), 109.0)
    assert "a node fell silent within 30 s of our taking the lead" in waits.why
    assert lost(cluster) == 0
    step(cluster, observed(cluster, 2, Sign.BROKEN), 110.0)
    step(cluster, events.Tick(), 110.6)
    assert lost(cluster) == 1


def test_30_s_after_taking_the_lead_who_did_not_come_back_is_lost():
    cluster = cluster_of(4, seats=3)
    step(cluster, events.TermBegan(Term(2)), 100.0)
    for i in (0, 2, 3):
        back = wire.Hello(NodeId(f"n{i}"), f"a{i}", 1, 1, 2, "b", _there(cluster, i)[: i < 3])
        step(cluster, back, 101.0)
    step(cluster, events.Tick(), 129.9)
    assert lost(cluster) == 0
    step(cluster, events.Tick(), 130.1)
    assert lost(cluster) == 1


@pytest.mark.parametrize("sent_away", [True, False])
def test_an_outage_in_which_all_were_sent_away_ends_like_a_change_of_leader(sent_away: bool):
    """One agent of four takes longer than the others to find its way back: it is no lost node."""
    cluster = cluster_of(4, seats=4)
    plain = events.to_plain(events.ControlPlaneBack(60.0, "the journal was away", sent_away))
    step(cluster, events.from_plain(plain), 100.0)
    for i in range(1, 4):
        hello = wire.Hello(NodeId(f"n{i}"), f"a{i}", 1, 1, 2, "b", _there(cluster, i))
        step(cluster, hello, 101.0)
    step(cluster, events.NodeSilent(NodeId("n0")), 108.5)
    for tenths in range(1086, 1290):
        step(cluster, events.Tick(), tenths / 10)
    assert lost(cluster) == (0 if sent_away else 1)
    replayed = state.from_plain(state.to_plain(cluster))
    assert state.fingerprint(replayed) == state.fingerprint(cluster)
    hello = wire.Hello(NodeId("n0"), "a0", 1, 1, 2, "b", _there(cluster, 0))
    step(cluster, hello, 129.0)
    step(cluster, events.Tick(), 131.0)
    assert (lost(cluster), cluster.jobs[JOB].incidents) == ((0, 0) if sent_away else (0, 1))


def test_who_does_not_come_back_after_an_outage_is_lost_at_last():
    cluster = cluster_of(4, seats=4)
    step(cluster, events.ControlPlaneBack(60.0, "the journal was away", sent_away=True), 100.0)
    for i in range(1, 4):
        hello = wire.Hello(NodeId(f"n{i}"), f"a{i}", 1, 1, 2, "b", _there(cluster, i))
        step(cluster, hello, 101.0)
    for tenths in range(1010, 1310):
        step(cluster, events.Tick(), tenths / 10)
    assert not cluster.nodes[NodeId("n0")].alive


def test_an_outage_as_an_older_version_wrote_it_is_read():
    plain = {"kind": "ControlPlaneBack", "body": {"seconds": 2.0, "why": "away"}, "v": 2}
    assert events.from_plain(plain) == events.ControlPlaneBack(2.0, "away", sent_away=False)


def test_the_first_leader_of_an_empty_cluster_took_nobody_over():
    cluster = state.new_cluster("test")
    step(cluster, events.TermBegan(Term(1)), 0.0)
    for i in range(3):
        step(cluster, wire.Hello(NodeId(f"n{i}"), f"a{i}", 1, 1, 2, "b"), 1.0)
    step(cluster, events.NodeSilent(NodeId("n0")), 5.0)
    step(cluster, events.Tick(), 5.3)
    assert lost(cluster) == 1


def test_silent_nodes_without_a_seat_are_given_up_without_evidence_but_later():
    cluster = cluster_of(40, seats=10, spares=0)
    for i in range(30, 40):
        step(cluster, events.LinkLost(NodeId(f"n{i}")), 10.0)
    step(cluster, events.Tick(), 14.0)
    assert lost(cluster) == 0
    decision = step(cluster, events.Tick(), 25.1)
    assert lost(cluster) == 10
    assert "has left" in decision.why
    step(cluster, events.Tick(), 25.2)
    assert not cluster.self_doubt


def test_ranks_whose_nodes_we_cannot_hear_are_not_blamed_for_a_late_phase():
    cluster = cluster_of(40, seats=36, spares=4)
    job = cluster.jobs[JOB]
    step(cluster, observed(cluster, 20, Sign.EXIT), 10.0)
    assert job.migration is not None
    silence(cluster, 5, 10.1)
    step(cluster, events.Tick(), 10.4)
    stopped(cluster, 5, 10.5)
    for i in range(11, 500, 3):
        step(cluster, events.Tick(), float(i))
    assert (job.generation, job.migration.fences, lost(cluster)) == (2, {}, 0)
    assert brain.due(cluster) is None, "nothing spins meanwhile"
    step(cluster, events.Tick(), 10.0 + job.spec.policy.hold_seconds_max)
    assert set(job.migration.fences) == {0, 1, 2, 3, 4}, "not for ever: the others wait"


def test_a_rank_that_we_can_hear_is_blamed_even_while_we_doubt_ourselves():
    cluster = cluster_of(40, seats=36, spares=4)
    job = cluster.jobs[JOB]
    step(cluster, observed(cluster, 20, Sign.EXIT), 10.0)
    silence(cluster, 5, 10.1)
    step(cluster, events.Tick(), 10.4)
    stopped(cluster, 6, 10.5)
    step(cluster, events.Tick(), 20.0)
    assert job.migration is not None
    assert set(job.migration.fences) == {5}


def test_most_nodes_silent_while_a_job_stops_are_heard_of_in_time_and_nobody_is_fenced():
    cluster = cluster_of(10, seats=9)
    job = cluster.jobs[JOB]
    step(cluster, observed(cluster, 8, Sign.EXIT), 10.0)
    assert job.migration is not None
    assert job.migration.phase is Phase.QUIESCE
    heard = {NodeId(f"n{i}"): 10.0 if i < 6 else 13.6 for i in range(10)}
    alive = liveness.Liveness(last_heard=heard)
    for node, _, crowd in alive.fall_silent(13.6, Patience(3.5)):
        step(cluster, events.NodeSilent(node, crowd), 13.6)
    stopped(cluster, 6, 13.7)
    for tenths in range(138, 1000, 5):
        step(cluster, events.Tick(), tenths / 10)
    assert (job.generation, job.migration.fences, lost(cluster)) == (2, {}, 0)
    assert "we suspect ourselves" in cluster.self_doubt


@pytest.mark.parametrize("nodes", [1, 5, 29, 30, 31, 50, 101])
def test_too_many_is_decided_as_if_all_had_been_counted(nodes: int):
    cluster = state.new_cluster("test")
    for number in range(nodes):
        name = NodeId(f"n{number}")
        cluster.nodes[name] = state.NodeState(name, "", 1, 0, 0, "b", 0, alive=number % 7 > 0)
    alive = sum(node.alive for node in cluster.nodes.values())
    for silent in range(nodes + 1):
        usual = silent > max(suspicion.MASS_NODES_MIN - 1, int(alive * suspicion.MASS_SHARE_MAX))
        assert suspicion.too_many(cluster, silent) == usual


@given(
    st.sampled_from([2, 9, 29, 30, 31, 60]),
    st.lists(st.sampled_from(["well", "dead", "lately", "long ago", "unlinked"]), max_size=60),
    st.lists(st.sampled_from([-60.0, -1.0, 0.0]), max_size=6),
    st.integers(0, 8),
)
def test_who_falls_silent_in_a_crowd_is_found_as_by_counting(nodes, how, given_up, coming):
    now, cluster = 100.0, state.new_cluster("test")
    for i in range(nodes):
        step(cluster, wire.Hello(NodeId(f"n{i}"), f"a{i}", 1, 1, 2, "b"), 0.0)
    for i, what in enumerate(how[:nodes]):
        node = cluster.nodes[NodeId(f"n{i}")]
        node.alive = what != "dead"
        if what in ("lately", "long ago", "unlinked"):
            cluster.doubtful[node.node] = 90.0
            node.silent_at = {"lately": 96.0, "long ago": 90.0, "unlinked": -1.0}[what]
    cluster.given_up = {NodeId(f"g{i}"): now + ago for i, ago in enumerate(given_up)}
    silent = coming + 1 + how[:nodes].count("lately")
    if nodes >= 30:
        silent += sum(ago >= -5.0 for ago in given_up)
    alive = nodes - how[:nodes].count("dead")
    many = silent > max(2, math.floor(alive * 0.10))
    assert suspicion.in_a_crowd(Turn(cluster, now), coming) is many


@pytest.mark.parametrize("nodes", [1, 2])
def test_where_nobody_at_all_is_heard_a_small_cluster_trains_on(nodes: int):
    """A cut between the orchestrator and all that there is: it heals, and nobody is fenced."""
    cluster = cluster_of(nodes, seats=nodes, spares=0)
    silence(cluster, nodes, 10.0)
    for now in (10.3, 14.0, 60.0, 600.0):
        step(cluster, events.Tick(), now)
    assert lost(cluster) == 0
    assert cluster.self_doubt.startswith("no node at all is heard: we suspect ourselves")
    job = cluster.jobs[JOB]
    for seat in job.roster.seats:
        fact = wire.WorkerFact(JOB, seat.rank, seat.slot, seat.incarnation, job.generation)
        back = wire.Hello(seat.node, f"a{seat.rank}", 1, 1, 2, "b", (fact,))
        assert step(cluster, back, 605.0).orders == ()
    assert (job.state, job.incidents) == (JobState.RUNNING, 0)
    step(cluster, events.Tick(), 606.0)
    assert not cluster.self_doubt


def test_nor_is_it_given_up_when_they_do_not_find_a_new_leader():
    cluster = cluster_of(2, seats=2, spares=0)
    step(cluster, events.TermBegan(Term(2)), 10.0)
    for now in (16.0, 41.0, 100.0):
        step(cluster, events.Tick(), now)
    assert lost(cluster) == 0


def test_but_not_for_ever_because_somebody_may_wait_for_its_end():
    cluster = cluster_of(2, seats=2, spares=0)
    silence(cluster, 2, 10.0)
    step(cluster, events.Tick(), 609.0)
    assert lost(cluster) == 0
    assert "nobody has been heard for 600 s" in step(cluster, events.Tick(), 611.0).why
    assert lost(cluster) == 2


def test_of_two_that_we_did_not_hear_the_one_that_is_missed_by_the_other_is_lost():
    cluster = cluster_of(2, seats=2, spares=0)
    silence(cluster, 2, 10.0)
    step(cluster, events.Tick(), 14.0)
    step(cluster, observed(cluster, 0, Sign.BROKEN), 20.0)
    step(cluster, events.Tick(), 20.1)
    assert lost(cluster) == 0, "it may come a moment later than the other"
    step(cluster, events.Tick(), 25.5)
    assert not cluster.nodes[NodeId("n1")].alive
    assert cluster.nodes[NodeId("n0")].alive


@pytest.mark.parametrize("linked", [True, False])
def test_a_dead_node_is_given_up_once_another_one_joins(linked: bool):
    cluster = cluster_of(1, seats=1, spares=0)
    gone = events.NodeSilent(NodeId("n0")) if linked else events.LinkLost(NodeId("n0"))
    step(cluster, gone, 10.0)
    step(cluster, events.Tick(), 20.0)
    assert lost(cluster) == 0
    step(cluster, wire.Hello(NodeId("n1"), "a1", 1, 1, 2, "b"), 60.0)
    step(cluster, events.Tick(), 64.0)
    assert lost(cluster) == 0
    step(cluster, events.Tick(), 69.0)
    assert lost(cluster) == 1
    assert not cluster.self_doubt
    assert cluster.jobs[JOB].roster.seats[0].node == "n1"
