from __future__ import annotations

import pytest

from keepstep.config import OrchestratorConfig
from keepstep.model import Generation, JobId, NodeId
from keepstep.orchestrator.liveness import (
    Liveness,
    Witness,
    beat_seconds,
    last_known,
    own_lateness,
)
from keepstep.orchestrator.patience import Patience
from keepstep.orchestrator.ticking import TICK_SECONDS_MIN, until_tick
from keepstep.wire import JobPulse


def heard(**at: float) -> dict[NodeId, float]:
    return {NodeId(name): moment for name, moment in at.items()}


def silent_nodes(
    last_heard: dict[NodeId, float],
    now: float,
    seconds_max: float,
    vouched: dict[NodeId, float] | None = None,
) -> tuple[NodeId, ...]:
    alive = Liveness(last_heard=dict(last_heard), vouched=vouched or {})
    return tuple(node for node, _, _ in alive.fall_silent(now, Patience(seconds_max)))


def quiet_nodes(last_heard: dict[NodeId, float], now: float, others: int = 0) -> set[NodeId]:
    """`others`: who were just heard; the more there are, the less often they speak."""
    well = {NodeId(f"other{number}"): now for number in range(others)}
    return Liveness(last_heard={**last_heard, **well}).quiet(now, Patience(3.5))


def test_a_node_is_silent_only_after_its_time():
    assert silent_nodes(heard(a=10.0, b=6.0), 13.5, 3.5) == ("b",)
    assert silent_nodes(heard(a=10.0), 13.5, 3.5) == ()
    assert silent_nodes(heard(a=10.0), 13.51, 3.5) == ("a",)


def test_the_one_that_fell_silent_first_is_named_first():
    assert silent_nodes(heard(a=2.0, b=1.0), 100.0, 3.5) == ("b", "a")


def test_a_small_cluster_may_lose_all_its_nodes_at_once():
    assert silent_nodes(heard(a=0.0, b=0.0), 4.0, 3.5) == ("a", "b")


def test_most_that_fall_silent_at_once_are_told_as_soon_as_one_would_be():
    most = heard(a=0.0, b=0.0, c=0.0, d=4.0)
    assert silent_nodes(most, 4.0, 3.5) == ("a", "b", "c")
    alive = Liveness(last_heard=most)
    assert [crowd for _, _, crowd in alive.fall_silent(4.0, Patience(3.5))] == [2, 1, 0]


def test_a_lost_rack_of_a_large_cluster_is_no_doubt_of_ours():
    cluster = {NodeId(f"n{i}"): 0.0 if i < 10 else 4.0 for i in range(100)}
    assert len(silent_nodes(cluster, 4.0, 3.5)) == 10


def test_who_falls_silent_brings_the_number_of_those_who_are_about_to():
    at = {NodeId(f"n{i}"): 0.04 * i for i in range(10)}
    well = {NodeId(f"w{i}"): 3.5 for i in range(20)}
    alive = Liveness(last_heard={**at, **well})
    assert alive.fall_silent(3.5, Patience(3.5)) == []
    told = alive.fall_silent(3.55, Patience(3.5))
    assert told == [("n0", 3.55, 9), ("n1", pytest.approx(3.51), 8)]
    assert "n0" not in alive.last_heard
    assert len(alive.fall_silent(3.9, Patience(3.5))) == 8


def test_ordinary_jitter_is_not_lateness_but_starvation_is():
    assert own_lateness(10.0, 10.4, 0.5) == 0.0
    assert own_lateness(10.0, 12.0, 0.5) == 2.0


QUIET = {NodeId("n1"): [JobId("train")]}


def pulse(step: int, generation: int = 1, job: str = "train") -> JobPulse:
    return JobPulse(JobId(job), Generation(generation), step, step - 1, 0.1)


def test_steps_that_others_make_vouch_for_a_node_that_says_nothing():
    witness = Witness()
    witness.hear(pulse(10))
    assert witness.vouches(QUIET) == ()
    witness.hear(pulse(12))
    assert witness.vouches(QUIET) == (), "two steps may have been under way when it died"
    witness.hear(pulse(13))
    assert witness.vouches(QUIET) == ("n1",)
    assert witness.vouches(QUIET) == (), "each proof counts once"


def test_steps_before_a_node_fell_quiet_prove_nothing():
    witness = Witness()
    witness.hear(pulse(10))
    witness.hear(pulse(50))
    assert witness.vouches(QUIET) == ()
    assert witness.vouches({}) == ()
    witness.hear(pulse(90))
    assert witness.vouches(QUIET) == (), "it was heard in between: the count begins anew"


def test_a_new_generation_may_do_without_the_node_that_says_nothing():
    witness = Witness()
    witness.hear(pulse(10))
    witness.vouches(QUIET)
    witness.hear(pulse(14, generation=2))
    assert witness.vouches(QUIET) == ()
    witness.hear(pulse(17, generation=2))
    assert witness.vouches(QUIET) == ("n1",)


def test_another_job_s_steps_prove_nothing():
    witness = Witness()
    witness.hear(pulse(10, job="other"))
    witness.vouches(QUIET)
    witness.hear(pulse(20, job="other"))
    assert witness.vouches(QUIET) == ()
    witness.forget_others([JobId("train")])
    assert witness.progress == {}


def test_a_job_s_steps_stand_in_for_an_agent_only_for_a_while():
    assert last_known(10.0, None) == 10.0
    assert last_known(10.0, 30.0) == 30.0
    assert last_known(10.0, 500.0) == 70.0
    assert last_known(10.0, 5.0) == 10.0


def test_a_vouched_node_is_not_silent_before_its_voucher_is_old():
    quiet = heard(a=0.0, b=0.0)
    assert silent_nodes(quiet, 10.0, 3.5, {NodeId("a"): 8.0}) == ("b",)
    assert silent_nodes(quiet, 12.0, 3.5, {NodeId("a"): 8.0}) == ("b", "a")


def test_two_missed_heartbeats_make_a_node_quiet_long_before_it_is_silent():
    assert quiet_nodes(heard(a=10.0, b=9.0, c=8.9), 10.0) == {"c"}


def test_thousands_of_quiet_nodes_are_not_looked_at_with_every_tick():
    alive = Liveness()
    alive.witness.hear(JobPulse(JobId("j"), Generation(1), 5, 5, 1.0))
    few, many = [NodeId("a")], [NodeId(f"n{i}") for i in range(5000)]
    assert [alive.asks_jobs(["j"], few, 10.0 + i / 100) for i in range(3)] == [True] * 3
    asked = [alive.asks_jobs(["j"], many, 20.0 + i / 10) for i in range(30)]
    assert [i for i, yes in enumerate(asked) if yes] == [0, 10, 20]


def test_many_agents_are_asked_to_speak_less_often_but_twice_before_they_count_as_silent():
    assert beat_seconds(10, 3.5) == 0.5
    assert beat_seconds(1000, 3.5) == 0.5
    assert beat_seconds(2000, 3.5) == 1.0
    assert 2 * beat_seconds(100_000, 3.5) < 3.5
    assert 2 * beat_seconds(100_000, 1.0) < 1.0


def test_a_node_is_quiet_after_two_heartbeats_or_one_that_is_late_by_the_shortest():
    known = heard(a=10.0, b=12.0)
    assert quiet_nodes(known, 12.5) == {"a"}
    assert quiet_nodes(known, 11.9, others=2998) == set(), "they speak every 1.5 s"
    assert quiet_nodes(known, 12.1, others=2998) == {"a"}


def test_ticks_come_less_often_while_thousands_are_in_doubt():
    config = OrchestratorConfig()
    overdue = [until_tick(0.0, 10.0, config, 2.0, doubtful) for doubtful in (0, 10, 5000)]
    assert overdue == [TICK_SECONDS_MIN, TICK_SECONDS_MIN, 0.5], "never beyond a lease's quarter"
    assert until_tick(0.0, 10.0, config, 0.0, 5000) == 1.0
    assert until_tick(10.05, 10.0, config, 2.0, 10) == pytest.approx(0.05)


def test_a_leader_on_a_file_looks_for_another_one_every_second_however_seldom_it_ticks():
    """There is no lease whose end it would notice: only the file says that somebody took over."""
    seldom = OrchestratorConfig(tick_seconds=60.0, tick_busy_seconds=30.0)
    assert until_tick(None, 10.0, seldom, 0.0) == 1.0
    assert until_tick(40.0, 10.0, seldom, 0.0) == 1.0
    assert until_tick(0.0, 10.0, seldom, 0.0, 50_000) == 1.0
    assert until_tick(40.0, 10.0, seldom, 2.0) == 0.5, "nor does it lose its lease for that"
