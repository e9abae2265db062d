"""The text of a snapshot, put together from what has not changed; and copies to try things on."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep import codec
from keepstep.chaos.fleet import Fleet
from keepstep.chaos.fleet_setting import Plan
from keepstep.model import JobId, NodeId, Rank, Roster
from keepstep.orchestrator import events, snapshots, state
from keepstep.orchestrator.copies import copy_of
from keepstep.orchestrator.snapshots import Snapshots, Texts

NODE = NodeId("n7")
SAMPLES = Path(__file__).parents[1] / "wire" / "v1"


def whole(cluster: state.Cluster) -> str:
    return codec.dumps(state.to_plain(cluster)).decode()


def cluster_of(nodes: int) -> state.Cluster:
    cluster = state.new_cluster("test")
    for number in range(nodes):
        name = NodeId(f"n{number}")
        cluster.nodes[name] = state.NodeState(name, f"ä{number}", 8, 1, 2, "b", number)
    return cluster


class Watched(Fleet):
    """A fleet whose text is compared with the whole, made anew, again and again."""

    looks = 0

    def decided(self, steps: Any) -> None:
        super().decided(steps)
        assert self.leader is not None
        if self.leader.steps % 5 == 0:
            self.looks += 1
            cluster = self.leader.cluster
            assert self.leader.texts.of(cluster) == whole(cluster)
            twin = copy_of(cluster)
            assert whole(twin) == whole(cluster)
            assert not shared(cluster, twin)


def shared(one: Any, other: Any) -> list[str]:
    """What can be changed in place, and belongs to both."""
    mine = {id(found) for found in changing(one)}
    return [repr(found)[:200] for found in changing(other) if id(found) in mine]


def changing(value: Any) -> Iterator[Any]:
    frozen = dataclasses.is_dataclass(value) and value.__dataclass_params__.frozen  # type: ignore[attr-defined]
    if frozen or isinstance(value, str):
        return
    if dataclasses.is_dataclass(value):
        yield value
        for field in dataclasses.fields(value):
            yield from changing(getattr(value, field.name))
    elif isinstance(value, dict):
        yield value
        for item in value.values():
            yield from changing(item)
    elif isinstance(value, tuple):
        for item in value:
            yield from changing(item)
    else:
        assert not isinstance(value, list | set), "a state that is a list cannot be copied"


@pytest.mark.parametrize("seed", [3, 11])
def test_it_is_the_text_of_the_whole_at_any_moment_of_a_fleet(seed: int):
    fleet = Watched(Plan(gpus=512, days=4.0, seed=seed))
    fleet.run()
    assert fleet.looks > 50
    assert fleet.tally.strikes


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(state.NodeState)])
def test_a_change_of_any_field_of_a_node_is_seen(field: str):
    cluster, texts = cluster_of(9), Texts()
    texts.of(cluster)
    node = cluster.nodes[NODE]
    before = getattr(node, field)
    if field == "uses":
        node.uses[3] = state.Occupant(JobId("train"), Rank(1))
    elif field == "labels":
        node.labels["rack"] = "r1"
    elif isinstance(before, bool):
        setattr(node, field, not before)
    else:
        setattr(node, field, before + ("x" if isinstance(before, str) else 1))
    assert texts.of(cluster) == whole(cluster)


def test_what_is_in_a_node_may_change_again_and_go():
    cluster, texts = cluster_of(9), Texts()
    uses = cluster.nodes[NODE].uses
    uses[3] = state.Occupant(JobId("train"), Rank(1))
    assert texts.of(cluster) == whole(cluster)
    uses[3] = state.Occupant(JobId("train"), Rank(1), fenced=True)
    assert texts.of(cluster) == whole(cluster)
    del uses[3]
    assert texts.of(cluster) == whole(cluster)
    del cluster.nodes[NODE]
    assert texts.of(cluster) == whole(cluster)


def test_one_of_everything_there_can_be_in_a_state():
    cluster = state.from_plain(json.loads((SAMPLES / "cluster.json").read_bytes()))
    for job in cluster.jobs.values():
        job.unsure = state.Unsure(5.0, "the journal is behind", claims={NODE: ()})
    for kind in (state.Unsure, state.Migration, state.Incident, state.Settled, state.Plan):
        assert any(type(found) is kind for found in everything(cluster))
    twin = copy_of(cluster)
    assert twin == cluster
    assert not shared(cluster, twin)
    assert Texts().of(twin) == whole(cluster)


def everything(value: Any) -> Iterator[Any]:
    yield value
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from everything(getattr(value, field.name))
    elif isinstance(value, dict | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from everything(item)


def test_nothing_frozen_holds_a_record_that_changes():
    """Else a copy would share it."""
    kinds = [kind for kind in vars(state).values() if dataclasses.is_dataclass(kind)]
    changing = [kind for kind in kinds if not kind.__dataclass_params__.frozen]
    assert state.NodeState in changing
    for kind in kinds:
        if kind not in changing:
            held = str(typing.get_type_hints(kind))
            assert not [each for each in changing if f".{each.__name__}'" in held], kind


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What texts were made of."""
    found: list[object] = []
    encode = snapshots._json

    def noted(value: object) -> str:
        found.append(value)
        return encode(value)

    monkeypatch.setattr(snapshots, "_json", noted)
    return found


def of_kind(found: list[object], kind: type) -> list[object]:
    return [each for each in found if isinstance(each, kind)]


def test_texts_are_made_some_at_a_time_and_then_not_again(made: list[object]):
    cluster, texts = cluster_of(90), Texts()
    assert [texts.look_ahead(cluster, 40) for _ in range(3)] == [False, False, True]
    assert len(of_kind(made, state.NodeState)) == 90
    made.clear()
    assert texts.look_ahead(cluster, 40), "nothing has changed: all of them at once"
    cluster.nodes[NODE].faults = 5
    text = texts.of(cluster)
    assert of_kind(made, state.NodeState) == [cluster.nodes[NODE]]
    assert text == whole(cluster)


def test_the_text_of_a_roster_is_made_once(made: list[object]):
    fleet = Fleet(Plan(gpus=512, days=0.1, mttf_hours=1e6, seed=1))
    fleet.run()
    assert fleet.leader is not None
    cluster, texts = fleet.leader.cluster, Texts()
    made.clear()
    first = texts.of(cluster)
    assert of_kind(made, Roster)
    made.clear()
    assert texts.of(cluster) == first
    assert not of_kind(made, Roster)
    assert not of_kind(made, state.NodeState)


def test_a_snapshot_is_canonical_and_says_its_version():
    cluster = cluster_of(3)
    plain = {"cluster": state.to_plain(cluster), "now": 17.5, "v": events.VERSION}
    assert snapshots.body_of(cluster, 17.5) == codec.dumps(plain).decode()


def test_one_that_failed_is_due_again_later():
    kept, cluster = Snapshots(entries=10), cluster_of(3)
    assert not kept.prepared(cluster, 0.0)
    kept.grown = 10
    assert kept.prepared(cluster, 0.0)
    kept.failed(0.0)
    assert not kept.prepared(cluster, snapshots.AGAIN_SECONDS - 1)
    assert kept.prepared(cluster, snapshots.AGAIN_SECONDS)
    kept.wrote(4)
    assert not kept.prepared(cluster, snapshots.AGAIN_SECONDS)


@pytest.mark.parametrize(
    ("nodes", "entries", "due"),
    [(3, 1000, 1000), (1000, 400, 1000), (2000, 400, 6000), (12_500, 400, 15_000)],
)
def test_how_many_events_a_snapshot_is_worth(nodes: int, entries: int, due: int):
    kept, cluster = Snapshots(entries), cluster_of(nodes)
    while not kept.texts.look_ahead(cluster):
        pass
    kept.grown = due - 1
    assert not kept.prepared(cluster, 0.0)
    kept.grown = due
    assert kept.prepared(cluster, 0.0)


def test_a_recovery_does_not_wait_for_one_unless_it_is_long_overdue():
    kept, cluster = Snapshots(entries=10), cluster_of(3)
    cluster.doubtful[NodeId("n1")] = 5.0
    kept.grown = snapshots.OVERDUE * 10 - 1
    assert not kept.prepared(cluster, 0.0)
    kept.grown += 1
    assert kept.prepared(cluster, 0.0)


def test_a_fault_waits_for_some_texts_at_most():
    """After a change of leader all nodes have changed."""
    kept, nodes = Snapshots(entries=10), 5 * snapshots.AHEAD_NODES
    cluster = cluster_of(nodes)
    kept.grown = nodes
    asked = 1
    while not kept.prepared(cluster, 0.0):
        asked += 1
    assert asked == 5
    kept.texts = Texts()
    kept.grown = snapshots.OVERDUE * nodes
    assert kept.prepared(cluster, 0.0)
