"""How far from its rank a mirror sits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.model import NodeId
from keepstep.orchestrator import strides

nodes_of_ranks = st.lists(st.sampled_from("abcde"), min_size=1, max_size=24).map(
    lambda names: [NodeId(name) for name in names]
)


def collisions(nodes: list[NodeId], stride: int) -> int:
    return sum(nodes[r] == nodes[(r + stride) % len(nodes)] for r in range(len(nodes)))


@given(nodes_of_ranks)
def test_the_stride_is_the_smallest_that_keeps_a_rank_and_its_mirror_apart(nodes):
    stride = strides.best(nodes)
    if len(set(nodes)) == 1:
        assert stride == 0, "a copy on the only node would go with the original"
        return
    possible = range(1, len(nodes))
    fewest = min(collisions(nodes, k) for k in possible)
    assert collisions(nodes, stride) == fewest
    assert stride == next(k for k in possible if collisions(nodes, k) == fewest)


def test_a_mirror_is_in_another_rack_if_there_is_one():
    nodes = [NodeId(f"n{rank // 4}") for rank in range(216)]
    racks = [f"r{rank // 72}" for rank in range(216)]
    stride = strides.best(nodes, racks)
    assert all(racks[rank] != racks[(rank + stride) % 216] for rank in range(216))
    assert strides.best(nodes, ["r0"] * 216) == 4, "one rack: at least another node"


def test_a_mirror_is_behind_another_switch_even_where_racks_differ():
    nodes = [NodeId(f"n{rank}") for rank in range(8)]
    racks = [f"r{rank}" for rank in range(8)]
    switches = [f"s{rank // 2 % 2}" for rank in range(8)]
    stride = strides.best(nodes, racks, switches)
    assert all(switches[rank] != switches[(rank + stride) % 8] for rank in range(8))


@given(st.lists(st.integers(0, 40), min_size=2, max_size=80), st.data())
def test_all_lanes_are_compared_at_once(numbers, data):
    nodes = [NodeId(str(number)) for number in numbers]
    stride = data.draw(st.integers(1, len(nodes) - 1))
    assert strides._Ring.of(nodes).collisions(stride) == collisions(nodes, stride)


@given(st.integers(2, 6), st.integers(1, 8))
def test_block_placement_always_has_a_stride_without_collisions(nodes, each):
    placed = [NodeId(f"n{rank // each}") for rank in range(nodes * each)]
    assert collisions(placed, strides.best(placed)) == 0
