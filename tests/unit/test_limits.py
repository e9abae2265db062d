"""At most so many jobs migrate at once; the others wait in order, and none of them for ever."""

from __future__ import annotations

from keepstep import belonging, wire
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
    Sign,
    Term,
)
from keepstep.orchestrator import brain, events, limits, portions, rules, state, ticking
from keepstep.orchestrator.journal import Standing

NAMES = [JobId(name) for name in ("a", "b", "c", "d")]


def cluster_with(
    limit: int, *, ranks: int = 2, policy: Policy = Policy(), number: int = rules.NEWEST
) -> state.Cluster:
    cluster = state.new_cluster("test")
    brain.step(cluster, events.TermBegan(Term(1), limit, rules=number), 0.0)
    for i in range(len(NAMES) * ranks + 8):
        brain.step(cluster, wire.Hello(NodeId(f"n{i}"), f"a{i}", 1, 1, 2, "b"), 0.0)
    for name in NAMES:
        spec = JobSpec(name, "train.py", nodes=ranks, spares=0, policy=policy)
        brain.step(cluster, events.Submitted(spec), 0.0)
        report(cluster, name, Phase.RESUME, 1.0)
        assert cluster.jobs[name].state is JobState.RUNNING
    return cluster


def report(cluster: state.Cluster, name: JobId, phase: Phase, now: float) -> None:
    job = cluster.jobs[name]
    assert job.roster is not None
    world = portions.of_all(len(job.roster.seats))
    for seat in job.roster.seats:
        told = wire.SeatReport(
            seat.rank, 5, True, {world: "d"}, entries=(5,), step=5, step_seconds=0.5
        )
        message = wire.PhaseReport(seat.node, name, job.generation, phase, (told,))
        brain.step(cluster, message, now)


def kill(cluster: state.Cluster, name: JobId, now: float, rank: int = 1) -> brain.Decision:
    job = cluster.jobs[name]
    assert job.roster is not None
    seat = job.roster.seats[rank]
    died = wire.Observed(
        seat.node, name, Sign.EXIT, seat.rank, seat.incarnation, job.generation, 5, -9
    )
    return brain.step(cluster, died, now)


def doubt(cluster: state.Cluster, name: JobId, now: float) -> None:
    """The first rank's node has obeyed what this journal has forgotten; the others are silent."""
    job = cluster.jobs[name]
    assert job.roster is not None
    seat, later = job.roster.seats[0], Generation(job.generation + 5)
    fact = wire.WorkerFact(name, seat.rank, seat.slot, seat.incarnation, later)
    secret = state.generation_secret(cluster, name, later)
    told = {str(name): belonging.word(secret, name, later, seat.node)}
    hello = wire.Hello(seat.node, "a", 1, 1, 2, "b", (fact,), obeyed={name: later}, belongs=told)
    for other in job.roster.seats[1:]:
        brain.step(cluster, events.LinkLost(other.node), now)
    brain.step(cluster, hello, now)
    assert job.unsure is not None


def phase(cluster: state.Cluster, name: JobId) -> str:
    moving = cluster.jobs[name].migration
    return moving.phase.value if moving else cluster.jobs[name].state.value


def get_through(cluster: state.Cluster, name: JobId, now: float) -> None:
    for stage in (Phase.QUIESCE, Phase.VERIFY, Phase.RESUME):
        report(cluster, name, stage, now)
    assert cluster.jobs[name].migration is None


def test_more_than_the_limit_wait_and_go_in_the_order_in_which_they_came():
    cluster = cluster_with(1)
    for at, name in enumerate(reversed(NAMES)):
        decision = kill(cluster, name, 10.0 + 0.1 * at)
    assert "a waits for its turn: no more than 1 jobs migrate at once" in decision.why
    assert [phase(cluster, name) for name in NAMES] == ["allocate"] * 3 + ["quiesce"]
    for at, name in enumerate(reversed(NAMES)):
        brain.step(cluster, events.Tick(), 11.0 + 0.1 * at)
        under_way = [name for name in NAMES if phase(cluster, name) == "quiesce"]
        assert under_way == [name]
        get_through(cluster, name, 11.0 + 0.1 * at)
    assert all(cluster.jobs[name].turn_at < 0 for name in NAMES)


def test_who_waits_for_its_turn_does_not_make_the_loop_spin():
    cluster = cluster_with(1)
    kill(cluster, NAMES[0], 10.0)
    quiet = brain.due(cluster)
    kill(cluster, NAMES[1], 10.0)
    assert brain.due(cluster) == quiet


def test_a_planned_move_waits_for_unplanned_ones_and_never_the_other_way_round():
    cluster = cluster_with(1)
    asked = events.MigrateAsked(NAMES[0], (Rank(0),), "rack work")
    brain.step(cluster, asked, 10.0)
    assert phase(cluster, NAMES[0]) == "warm"
    kill(cluster, NAMES[1], 10.1)
    assert phase(cluster, NAMES[1]) == "quiesce"
    brain.step(cluster, events.MigrateAsked(NAMES[2], (Rank(0),), "rack work"), 10.2)
    leave = cluster.jobs[NAMES[2]].leaving[Rank(0)]
    assert "no more than 1 jobs migrate at once" in leave.waits
    assert phase(cluster, NAMES[2]) == "running"


def test_a_storm_of_faults_does_not_starve_a_planned_move():
    cluster = cluster_with(1)
    kill(cluster, NAMES[0], 10.0)
    brain.step(cluster, events.MigrateAsked(NAMES[2], (Rank(0),), "rack work"), 10.2)
    brain.step(cluster, events.Tick(), 12.0)
    assert phase(cluster, NAMES[2]) == "running"
    get_through(cluster, NAMES[0], 12.0)
    kill(cluster, NAMES[1], 12.0)
    for at in range(13, 610, 4):
        report(cluster, NAMES[1], Phase.QUIESCE, float(at))
    brain.step(cluster, events.Tick(), 611.0)
    assert phase(cluster, NAMES[2]) == "warm"


def test_a_wish_that_is_taken_back_holds_up_nobody_behind_it():
    cluster = cluster_with(1)
    for at, name in enumerate(NAMES[:3]):
        brain.step(cluster, events.MigrateAsked(name, (Rank(0),), "rack work"), 10.0 + at)
    assert [phase(cluster, name) for name in NAMES[:3]] == ["warm", "running", "running"]
    brain.step(cluster, events.MigrateAsked(NAMES[1], (Rank(0),), "", cancel=True), 13.0)
    brain.step(cluster, events.MigrateAsked(NAMES[0], (Rank(0),), "", cancel=True), 14.0)
    brain.step(cluster, events.Tick(), 15.0)
    assert phase(cluster, NAMES[2]) == "warm"


def test_who_waits_for_its_turn_makes_nobody_lend():
    cluster = cluster_with(1)
    brain.step(cluster, events.MigrateAsked(NAMES[0], (Rank(0),), "rack work"), 10.0)
    brain.step(cluster, events.MigrateAsked(NAMES[1], (Rank(0),), "rack work"), 11.0)
    brain.step(cluster, events.Tick(), 12.0)
    assert all(job.loan is None for job in cluster.jobs.values())


def test_a_save_is_an_order_and_does_not_wait():
    cluster = cluster_with(1)
    kill(cluster, NAMES[0], 10.0)
    kill(cluster, NAMES[1], 10.0)
    assert phase(cluster, NAMES[1]) == "allocate"
    brain.step(cluster, events.StopAsked(NAMES[1], "SIGTERM", save=True), 11.0)
    assert phase(cluster, NAMES[1]) == "quiesce"


def test_a_planned_move_takes_so_many_ranks_along_and_the_rest_next_time():
    cluster = cluster_with(8, ranks=6, policy=Policy(moving_ranks_max=2))
    wish = events.MigrateAsked(NAMES[0], tuple(map(Rank, range(5))), "rack work")
    brain.step(cluster, wish, 10.0)
    moving = cluster.jobs[NAMES[0]].migration
    assert moving is not None
    assert sorted(moving.coming) == [0, 1]
    assert sorted(cluster.jobs[NAMES[0]].leaving) == [0, 1, 2, 3, 4]


def test_without_a_limit_nobody_waits():
    cluster = cluster_with(0)
    for name in NAMES:
        kill(cluster, name, 10.0)
    assert limits.under_way(cluster, planned=False) == len(NAMES)


def test_a_job_in_doubt_gives_its_turn_to_the_next():
    cluster = cluster_with(1)
    kill(cluster, NAMES[0], 10.0)
    kill(cluster, NAMES[1], 10.1)
    doubt(cluster, NAMES[0], 10.2)
    brain.step(cluster, events.Tick(), 10.3)
    assert cluster.jobs[NAMES[0]].unsure is not None
    assert [phase(cluster, name) for name in NAMES[:2]] == ["quiesce", "quiesce"]
    assert limits.under_way(cluster, planned=False) == 1


def test_a_job_that_waited_when_it_came_into_doubt_is_in_nobodys_way():
    cluster = cluster_with(1)
    for at, name in enumerate(NAMES[:3]):
        kill(cluster, name, 10.0 + 0.1 * at)
    doubt(cluster, NAMES[1], 10.5)
    assert cluster.jobs[NAMES[1]].turn_at < 0
    get_through(cluster, NAMES[0], 11.0)
    brain.step(cluster, events.Tick(), 11.1)
    assert phase(cluster, NAMES[2]) == "quiesce"


def test_a_term_of_an_older_release_is_replayed_by_the_rules_of_then():
    """Else the next leader thinks that others moved, and fences who trains."""
    cluster = cluster_with(1, number=0)
    kill(cluster, NAMES[0], 10.0)
    doubt(cluster, NAMES[0], 10.1)
    kill(cluster, NAMES[1], 10.2)
    kill(cluster, NAMES[2], 10.3)
    doubt(cluster, NAMES[2], 10.4)
    assert phase(cluster, NAMES[1]) == "allocate", "the first one had its turn, and keeps it"
    assert cluster.jobs[NAMES[2]].turn_at == 10.3
    # A snapshot that the new leader reads was written by the old one: without a number.
    plain = state.to_plain(cluster)
    assert plain.pop("rules") == 0
    cluster = state.from_plain(plain)
    brain.step(cluster, events.Tick(), 10.5)
    assert phase(cluster, NAMES[1]) == "allocate"
    brain.step(cluster, events.TermBegan(Term(2), 1, rules=rules.NEWEST), 11.0)
    assert state.from_plain(state.to_plain(cluster)).rules == rules.NEWEST
    assert limits.under_way(cluster, planned=False) == 0


def test_while_an_older_release_leads_a_job_in_doubt_keeps_room_as_it_did():
    for number, others in ((0, JobState.WAITING), (rules.NEWEST, JobState.STARTING)):
        cluster = cluster_with(1, number=number)
        kill(cluster, NAMES[0], 10.0)
        kill(cluster, NAMES[1], 10.1)
        doubt(cluster, NAMES[1], 10.2)
        late = JobSpec(JobId("late"), "train.py", nodes=2, spares=0)
        brain.step(cluster, events.Submitted(late), 10.3)
        assert cluster.jobs[late.job].state is others


def test_a_leader_says_by_which_rules_it_decides():
    began = ticking.term_began(Standing(Term(3), 7, "", {}), OrchestratorConfig())
    assert began.rules == rules.NEWEST
    # Who does not know these rules must not read on.
    assert (rules.NEWEST, events.VERSION) == (1, 2), "rules rise with the version"
