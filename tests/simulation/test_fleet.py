"""A month of a whole fleet holds every invariant, and the referee is no yes-man."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from keepstep import wire
from keepstep.chaos import fleet, fleet_checks, fleet_report
from keepstep.chaos.fleet_compare import checkpoint_restart, interval
from keepstep.chaos.fleet_faults import Strike
from keepstep.chaos.fleet_jobs import Machine, Trainee, all_but
from keepstep.chaos.fleet_report import Month
from keepstep.chaos.fleet_setting import MIX, Plan, jobs_of, read_mttf
from keepstep.chaos.simulated_checks import Violation
from keepstep.errors import ConfigError
from keepstep.model import Generation, JobId, JobSpec, JobState, NodeId, Phase, Rank, Term
from keepstep.orchestrator import admission, portions, suspicion
from keepstep.portion import holders_of

SEEDS = range(10)


@functools.cache
def month(seed: int) -> Month:
    return fleet.run_month(Plan(gpus=8000, days=30.0, seed=seed))


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_month_of_8000_gpus_holds_every_invariant(seed: int):
    told = month(seed)
    assert told.broken == ""
    assert 600 < told.failures < 820
    assert told.outcomes["resumed"] > 300
    assert told.ettr > told.ettr_restart


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_months_are_worth_their_name():
    """Leaders died and were stopped, the database went away, and the brain doubted itself."""
    told = [month(seed) for seed in SEEDS]
    control = {name for one in told for name in one.control}
    assert control >= {"leader killed", "leader stopped", "database away", "many machines deaf"}
    assert sum(one.replayed for one in told) > 10_000
    assert sum(one.deposed for one in told) > 3
    assert sum(one.self_doubts for one in told) > 5
    assert sum(one.turns_waited for one in told) > 5


def test_the_same_seed_gives_the_same_month():
    plan = Plan(gpus=1024, days=3.0, seed=5)
    first, second = (replace(fleet.run_month(plan), cpu_seconds=0.0) for _ in range(2))
    assert first == second


def begin(told: fleet.Fleet) -> None:
    """An hour of it, with all its jobs and before any fault."""
    told.lead()
    told.connect(told.machines.values())
    for spec, _ in told._specs:
        told._submit(spec)
    told._fleet = list(told.machines.values())
    told.run_until(3600.0)


def test_machines_that_all_lost_power_get_their_names_back(monkeypatch: pytest.MonkeyPatch):
    """All nodes of some jobs at once: nobody is left to testify, and only their boots can."""

    def fares(reboot_seconds: float, leader_dies: bool) -> tuple[set[JobState], int]:
        told = fleet.Fleet(Plan(gpus=1024, days=1.0, mttf_hours=1e6, seed=3))
        monkeypatch.setattr(told, "_repair_seconds", lambda: reboot_seconds)
        begin(told)
        assert told.leader is not None
        running = [job for job in told.leader.cluster.jobs.values() if job.roster is not None]
        hit = {seat.node for job in running for seat in job.roster.seats}
        assert len(hit) > 0.1 * len(told.machines)
        for node in sorted(hit):
            told._lose(told.machines[node])
        told.run_until(3610.0)
        if leader_dies:
            told._kill_leader()
        told.run_until(2 * 3600.0)
        boots = {told.leader.cluster.nodes[node].boot for node in hit}
        assert boots == {"b2"}, "all are known as what they are now"
        return {told.leader.cluster.jobs[job.spec.job].state for job in running}, told.sent_away

    states, _ = fares(60.0, leader_dies=False)
    assert states <= {JobState.RUNNING, JobState.FINISHED}
    states, sent_away = fares(12.0, leader_dies=True)
    assert states <= {JobState.RUNNING, JobState.FINISHED}
    assert sent_away > 0, "a new leader waits for those whom it believes in"

    def until_it_is_lost(hello: wire.Hello, holder: admission.Holder, *_: float) -> object:
        known = holder.known
        taken = known is not None and known.alive and known.boot != hello.boot
        return admission.Away("taken") if taken else None

    monkeypatch.setattr(admission, "why_not_name", until_it_is_lost)
    with pytest.raises(AssertionError, match="known as what they are now"):
        fares(60.0, leader_dies=False)


def test_a_fleet_that_believes_its_own_ears_is_caught(monkeypatch: pytest.MonkeyPatch):
    """Without self-doubt the machines that only we cannot hear are fenced."""

    def fences(seed: int) -> int:
        told = fleet.Fleet(Plan(gpus=2048, days=0.1, mttf_hours=1e6, seed=seed))
        begin(told)
        told._deafen(64, vouched=False)
        told.run_until(7200.0)
        assert told.leader is not None
        return sum(job.incidents for job in told.leader.cluster.jobs.values())

    assert fences(1) == 0
    monkeypatch.setattr(suspicion, "MASS_NODES_MIN", 10_000)
    with pytest.raises(Violation, match="was given up, deaf with many, for its silence"):
        fences(1)


def test_a_step_that_is_lost_without_a_word_is_noticed():
    referee = fleet_checks.Referee()
    job = Trainee(JobSpec(JobId("job"), "train.py", nodes=4), 5.0)
    referee.accounts[JobId("job")] = fleet_checks.Account(0.0, 0.0)
    job.train(0.0, 99)
    referee.book(job, None, 50.0, led=True)
    job.train(60.0, 42)
    with pytest.raises(Violation, match="was at step 110 and is at 43"):
        referee.book(job, None, 60.0, led=True)


def test_time_that_nobody_accounts_for_is_noticed():
    referee = fleet_checks.Referee()
    job = Trainee(JobSpec(JobId("job"), "train.py", nodes=4), 5.0)
    account = referee.accounts[JobId("job")] = fleet_checks.Account(0.0, 0.0)
    job.train(0.0, 0)
    referee.book(job, None, 0.0, led=True)
    referee.book(job, None, 100.0, led=True)
    referee.settle({JobId("job"): job}, 100.0)
    account.seconds["training"] -= 10.0
    with pytest.raises(Violation, match="are booked of"):
        referee.settle({JobId("job"): job}, 100.0)


def test_an_order_of_a_deposed_term_is_refused_and_obeying_it_would_be_noticed():
    world = fleet.Fleet(Plan(gpus=1024, days=1.0))
    world.lead()
    world.connect(world.machines.values())
    spec = world._specs[0][0]
    node = NodeId("n0")
    action = wire.StartStandby(spec, 0)
    old = wire.Order(Term(0), 1, "late", spec.job, (node,), action)  # type: ignore[arg-type]
    world.obey(old, Term(1))
    assert (world.refused, world.machines[node].standby) == (1, None)
    world.machines[node].term_seen = Term(0)
    with pytest.raises(Violation, match="obey late of term 0"):
        world.obey(old, Term(1))


def test_all_but_some_ranks_have_a_name_that_can_be_read_back():
    for excluded in ((), (0,), (9,), (3, 4, 7), tuple(range(1, 10)), tuple(range(9))):
        named = holders_of(all_but(10, excluded))
        assert named == [rank for rank in range(10) if rank not in excluded]
    assert all_but(3, (0, 1, 2)) == ""


def test_one_report_for_many_ranks_says_what_each_would_say():
    job = Trainee(JobSpec(JobId("job"), "train.py", nodes=8), 5.0)
    job.train(0.0, 41)
    told = job.report(Phase.QUIESCE, Rank(0), all_but(8, (3,)), 0.0)
    assert told.digests == {portions.of_all(8): "job@42"}
    report = wire.PhaseReport(NodeId("n0"), JobId("job"), Generation(1), Phase.QUIESCE, (told,))
    assert wire.decode(wire.encode(report)[4:]) == report


def test_the_mix_is_the_published_one():
    assert sum(kind.count for kind in MIX) == 419


@pytest.mark.parametrize("gpus", [1024, 8000, 100_000])
def test_jobs_fill_the_fleet_and_leave_spares(gpus: int):
    plan = Plan(gpus=gpus)
    jobs = [spec for spec, _ in jobs_of(plan, fleet.Fleet(Plan(gpus=1024)).random)]
    used = sum(spec.world_size + spec.spares for spec in jobs)
    assert 0.9 * plan.nodes < used < plan.nodes
    assert max(spec.world_size for spec in jobs) * 12 > plan.nodes
    assert len({spec.priority for spec in jobs}) > 1


def test_checkpoint_restart_loses_the_work_since_the_last_checkpoint():
    plan = Plan(gpus=8000, days=1.0)
    spec = JobSpec(JobId("job"), "train.py", nodes=128)
    quiet = checkpoint_restart(plan, spec, ())
    strike = Strike(40_000.0, "GPU", "device", (JobId("job"),))
    hit = checkpoint_restart(plan, spec, (strike,))
    other = checkpoint_restart(plan, spec, (replace(strike, jobs=(JobId("other"),)),))
    assert other == quiet
    assert 0 < hit.lost_seconds <= hit.interval_seconds
    cost = quiet.useful_seconds - hit.useful_seconds
    assert cost == pytest.approx(hit.lost_seconds + 1200.0, abs=2 * hit.interval_seconds)


def test_the_interval_is_youngs():
    assert interval(Plan(), 128) == pytest.approx((2 * 30 * 7.9 * 3600) ** 0.5 - 30)


def test_mttf_is_hours_at_a_number_of_gpus():
    assert read_mttf("7.9h@1024") == (7.9, 1024)
    with pytest.raises(ConfigError, match=r"like 7\.9h@1024"):
        read_mttf("8 hours")
    assert Plan(gpus=100_000).faults_per_second * 30 * 86_400 == pytest.approx(8900, rel=0.01)


def test_a_broken_month_names_its_invariant_and_its_seed():
    told = Month(Plan(gpus=1024, seed=77), broken="Violation: two seats")
    assert "BROKEN, seed 77: Violation: two seats" in fleet_report.lines(told)[-1]


def test_a_machine_is_reachable_only_if_nothing_is_in_the_way():
    machine = Machine(NodeId("n0"), 0, linked=True)
    assert machine.reachable
    for fault in ("cut", "deaf"):
        setattr(machine, fault, True)
        assert not machine.reachable
        setattr(machine, fault, False)
    machine.up = False
    assert not machine.reachable
