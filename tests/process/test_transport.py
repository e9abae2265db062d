"""Tensors moved in place between real processes."""

from __future__ import annotations

import pytest

from tests.process import transport_jobs as jobs
from tests.process.world import World

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


@pytest.mark.parametrize("sources", [(1,), (1, 2), (2, 1)])
def test_state_arrives_in_place_bit_for_bit_and_in_few_messages(sources):
    with World() as world:
        assert world.run(3, jobs.moved, sources) == [True] * 3


@pytest.mark.parametrize("agree", [True, False])
def test_staged_state_lands_only_after_the_check_agreed(agree):
    with World() as world:
        assert world.run(2, jobs.staged, agree) == [True] * 2


def test_a_flipped_bit_at_one_source_shows_in_the_targets_own_digest():
    with World() as world:
        found = world.run(3, jobs.corrupt_source)
    assert found[0] == [0]
