"""How long a node may say nothing: that is for those who have something there to say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep import policy_file, wire
from keepstep.agent import probes
from keepstep.model import JobId, JobSpec, NodeId, Policy, Term
from keepstep.orchestrator import brain, events, liveness, state
from keepstep.orchestrator.liveness import Liveness, beat_seconds
from keepstep.orchestrator.patience import Patience
from keepstep.orchestrator.pulses import Frames
from keepstep.orchestrator.state import Cluster
from tests.unit.test_coming_back import Leader, hello_of, names

USUAL = 3.5
HASTY = Policy(silent_seconds_max=1.2, restart_grace_seconds=1.0)
NEVER = Policy(silent_seconds_max=0.3, restart_grace_seconds=0.2)
"""As an older release may have let it in: shorter than any heartbeat shows."""


def cluster_of(nodes: int, *specs: JobSpec, slots: int = 1) -> Cluster:
    cluster = state.new_cluster("test")
    for number in range(nodes):
        hello = wire.Hello(NodeId(f"n{number}"), "127.0.0.1", slots, 1, 2, f"b{number}")
        brain.step(cluster, hello, 0.0)
    for spec in specs:
        brain.step(cluster, events.Submitted(spec), 1.0)
    return cluster


def test_only_jobs_with_something_on_a_node_say_how_long_it_may_be_silent():
    hasty = JobSpec(JobId("hasty"), "t.py", nodes=2, spares=1, policy=HASTY)
    waits = JobSpec(JobId("waits"), "t.py", nodes=100, policy=NEVER)
    cluster = cluster_of(5, hasty, waits)
    patience = Patience(USUAL, cluster)
    found = {node: patience.of(node) for node in cluster.nodes}
    assert sorted(found.values()) == [1.2, 1.2, 1.2, USUAL, USUAL], "two ranks and a standby"
    assert patience.of(NodeId("unheard-of")) == USUAL


def test_the_most_impatient_of_those_on_a_node_counts_and_nobody_is_more_patient_than_usual():
    long = JobSpec(JobId("long"), "t.py", policy=Policy(silent_seconds_max=60.0))
    cluster = cluster_of(1, long, slots=2)
    assert Patience(USUAL, cluster).of(NodeId("n0")) == USUAL
    assert Patience(USUAL, cluster).alike
    brain.step(cluster, events.Submitted(JobSpec(JobId("hasty"), "t.py", policy=HASTY)), 3.0)
    assert {user.job for user in cluster.nodes[NodeId("n0")].uses.values()} == {"long", "hasty"}
    assert Patience(USUAL, cluster).of(NodeId("n0")) == 1.2


def test_a_job_of_before_that_asks_for_less_than_a_heartbeat_shows_gets_what_is_shown():
    cluster = cluster_of(1, JobSpec(JobId("never"), "t.py", policy=NEVER))
    assert Patience(USUAL, cluster).of(NodeId("n0")) == policy_file.SILENT_SECONDS_MIN


def test_the_open_jobs_are_looked_through_once_for_as_long_as_they_stay_the_same():
    cluster = cluster_of(3, JobSpec(JobId("hasty"), "t.py", policy=HASTY))
    patience = Patience(USUAL).at(cluster)
    assert patience.at(cluster) is patience
    brain.step(cluster, events.Tick(), 2.0)
    assert patience.at(cluster) is patience
    brain.step(cluster, events.StopAsked(JobId("hasty"), "enough"), 3.0)
    assert patience.at(cluster).alike


def test_a_limit_is_let_in_only_if_the_fastest_heartbeat_can_show_it():
    fastest = max(liveness.BEAT_SECONDS_MIN, probes.HEARTBEAT_SECONDS, probes.PROBE_SECONDS)
    assert liveness.BEATS_PER_SILENCE * fastest <= policy_file.SILENT_SECONDS_MIN
    assert beat_seconds(10**6, policy_file.SILENT_SECONDS_MIN) >= probes.HEARTBEAT_SECONDS


# --- a real leader --------------------------------------------------------------------------------


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[Leader]:
    made = Leader(tmp_path)
    yield made
    made.loop._journal.close()


def go_on(leader: Leader, seconds: float, beats: Callable[[int], list[NodeId]]) -> list[str]:
    """Looks come every quarter of a second; `beats`: who speaks before which. Who fell silent?"""
    silent: list[str] = []

    async def pass_by() -> None:
        for look in range(round(4 * seconds)):
            leader.clock.advance_to(leader.clock.now() + 0.25)
            for node in beats(look):
                leader.loop._heard(node)
            await leader.loop._judge_silence(leader.clock.monotonic())
            while not leader.loop._inbox.empty():
                event = leader.loop._inbox.get_nowait().event
                assert isinstance(event, events.NodeSilent)
                silent.append(event.node)

    asyncio.run(pass_by())
    return silent


def submit(leader: Leader, name: str, policy: Policy, nodes: int) -> None:
    leader.feed(events.Submitted(JobSpec(JobId(name), "t.py", nodes=nodes, policy=policy)))


def test_a_job_that_never_starts_has_nobody_taken_for_silent(leader: Leader):
    everybody = names(0, 4)
    for node in everybody:
        leader.greet(hello_of(node, "old"))
    submit(leader, "never", NEVER, nodes=100)
    # Every 0.75 s: later than they are asked to, and well within what is usual.
    assert go_on(leader, 30.0, lambda look: everybody if look % 3 == 0 else []) == []
    assert sorted(leader.loop._streams) == everybody


def test_an_impatient_job_has_its_own_nodes_judged_by_its_limit_and_no_others(leader: Leader):
    for node in names(0, 4):
        leader.greet(hello_of(node, "old"))
    submit(leader, "hasty", HASTY, nodes=1)
    (own,) = [node for node, known in leader.loop.cluster.nodes.items() if known.uses]
    assert go_on(leader, 3.0, lambda _: []) == [own]
    assert sorted(go_on(leader, 3.0, lambda _: [])) == sorted({*names(0, 4)} - {own})


def test_a_name_of_one_that_may_come_back_is_kept_as_long_as_that_one_may_be_silent(leader: Leader):
    for node in names(0, 2):
        leader.greet(hello_of(node, "old"))
    submit(leader, "long", Policy(), nodes=1)
    submit(leader, "never", NEVER, nodes=100)
    leader.clock.advance_to(leader.clock.now() + 1.0)
    away = leader.why_not(hello_of(NodeId("n0"), "new"))
    assert away is not None
    assert away.for_good, "it was heard a moment ago"


# --- thousands of nodes speak less often, but for those who must be heard -------------------------


def many() -> tuple[Liveness, Patience]:
    """As many as speak every 1.5 s, one of them with an impatient job."""
    cluster = cluster_of(1, JobSpec(JobId("hasty"), "t.py", policy=HASTY))
    heard = {NodeId(f"n{number}"): 100.0 for number in range(4000)}
    return Liveness(last_heard=heard), Patience(USUAL, cluster)


def test_who_must_be_heard_more_often_is_told_to_speak_more_often_and_the_others_are_not():
    alive, patience = many()
    pace = alive.paces(patience, 100.0)
    own, other = pace(NodeId("n0")), pace(NodeId("n1"))
    assert other == pytest.approx(USUAL / liveness.BEATS_PER_SILENCE)
    assert own == pytest.approx(1.2 / liveness.BEATS_PER_SILENCE)
    frames = Frames(Term(1), {}, pace)
    told = [json.loads(frames.of(NodeId(node), [])[4:])["body"] for node in ("n0", "n1", "n2")]
    assert [body["beat_seconds"] for body in told] == [own, other, other]
    assert frames.of(NodeId("n1"), []) is frames.of(NodeId("n2"), [])


def test_a_shorter_silence_counts_once_its_node_was_told_to_speak_more_often():
    alive, patience = many()
    spoke = dict.fromkeys(alive.last_heard, 101.6)
    assert alive.fall_silent(101.5, patience) == [], "nobody has told it yet"
    alive.paces(patience, 101.5)(NodeId("n0"))
    alive.last_heard = dict(spoke)
    assert alive.fall_silent(103.0, patience) == [], "it may not have been told before it spoke"
    alive.last_heard = dict.fromkeys(spoke, 104.0)
    assert alive.quiet(105.1, patience) == {NodeId("n0")}
    assert alive.fall_silent(105.1, patience) == []
    assert [node for node, _, _ in alive.fall_silent(105.3, patience)] == ["n0"]
    assert alive.quiet(105.3, patience) == set(), "the others are in time"
    assert not alive.hastened


def test_whoever_is_vouched_for_is_silent_by_its_own_limit_too():
    alive, patience = many()
    alive.hastened = {NodeId("n0"): 0.0}
    alive.vouched = {NodeId("n0"): 101.0}
    assert alive.fall_silent(102.1, patience) == []
    assert [node for node, _, _ in alive.fall_silent(102.3, patience)] == ["n0"]


def test_where_the_job_has_left_the_node_speaks_like_the_others_again():
    cluster = cluster_of(2, *(JobSpec(JobId(name), "t.py", policy=HASTY) for name in "ab"))
    alive = Liveness(last_heard={NodeId(f"n{number}"): 100.0 for number in range(4000)})
    for open_jobs, hastened in ((2, {"n0", "n1"}), (1, {"n1"}), (0, set())):
        pace = alive.paces(Patience(USUAL, cluster), 100.0)
        found = {node for node in cluster.nodes if pace(node) < 1.0}
        assert (len(cluster.open_jobs), set(alive.hastened), found) == (
            open_jobs,
            hastened,
            hastened,
        )
        for name in cluster.open_jobs[:1]:
            brain.step(cluster, events.StopAsked(name, "enough"), 3.0)


def test_if_everybody_is_unheard_the_one_that_is_judged_first_is_not_alone():
    # 200 nodes, each heard at some moment of the half second before our own line was cut.
    cluster = cluster_of(1, JobSpec(JobId("hasty"), "t.py", policy=HASTY))
    heard = {NodeId(f"n{number}"): 100.0 + 0.5 * number / 200 for number in range(200)}
    alive, patience = Liveness(last_heard=heard), Patience(USUAL, cluster)
    [(node, _, crowd)] = alive.fall_silent(101.25, patience)
    assert node == "n0"
    assert crowd > 20, "a tenth of them, and we are the ones to be doubted"


def test_if_the_others_are_heard_the_one_that_is_judged_first_is_alone():
    cluster = cluster_of(1, JobSpec(JobId("hasty"), "t.py", policy=HASTY))
    heard = {NodeId(f"n{number}"): 101.0 for number in range(1, 200)}
    alive = Liveness(last_heard={NodeId("n0"): 100.0, **heard})
    assert [crowd for _, _, crowd in alive.fall_silent(101.25, Patience(USUAL, cluster))] == [0]
