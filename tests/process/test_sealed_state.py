"""State that moves encrypted: the same result, and nothing for those without the secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.model import Policy
from tests.process import transport_jobs as jobs
from tests.process.job import SmallJob
from tests.process.test_session import PLAIN_BODY, check_as_bare, loop
from tests.process.world import World

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


@pytest.mark.parametrize("sources", [(1,), (2, 1)])
def test_sealed_state_arrives_in_place_bit_for_bit(sources: tuple[int, ...]) -> None:
    with World() as world:
        assert world.run(3, jobs.sealed, sources) == [True] * 3


def test_a_source_of_another_generation_gives_nothing_and_is_given_nothing() -> None:
    with World() as world:
        found = world.run(2, jobs.strangers)
    assert all("secret" in why or "sealed" in why for why in found), found


def test_a_job_whose_state_moves_sealed_loses_a_node_and_nothing_differs(tmp_path: Path) -> None:
    script = loop(PLAIN_BODY)
    policy = Policy(encrypt_state=True)
    with SmallJob(
        tmp_path, script, slots=(1, 1, 1, 1), ranks_per_node=1, nodes=3, policy=policy
    ) as job:
        job.wait_ready()
        job.wait_step(1, 20)
        job.cluster.lose_node(job.view()["seats"][1]["node"])
        assert job.end()["exit_code"] == 0
        (incident,) = job.incidents()
        assert incident["outcome"] == "resumed"
        said = "".join(path.read_text() for path in (tmp_path / "run").glob("agent-*.log"))
    assert "peer.sealed" in said, "its private state came from another node, sealed"
    check_as_bare(tmp_path, script)
