"""How many jobs are let in, how large, and with which policy."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepstep import codec
from keepstep.clock import RealClock
from keepstep.config import OrchestratorConfig
from keepstep.model import JobId, JobSpec, Policy
from keepstep.orchestrator import brain, events, intake, state
from keepstep.orchestrator.http import BadRequest
from keepstep.orchestrator.intake import Intake
from keepstep.orchestrator.journal_sqlite import SqliteJournal
from keepstep.orchestrator.run import Orchestrator
from keepstep.orchestrator.tokens import Caller, Role
from tests.unit.test_access import OWN, Served, served

NODES_NEVER = 100
"""There are none: what is submitted here waits."""
HASTY = Policy(silent_seconds_max=0.3, restart_grace_seconds=0.2)


def spec_of(name: str, **more: Any) -> JobSpec:
    return JobSpec(JobId(name), "t.py", nodes=NODES_NEVER, **more)


async def submit(made: Served, who: str, name: str, **more: Any) -> tuple[int, str]:
    return await made.ask(who, "POST", "/v1/jobs", codec.to_plain(spec_of(name, **more)))


def with_bounds(
    directory: Path, project: int, total: int, scene: Callable[[Served], Awaitable[None]]
) -> None:
    async def body() -> None:
        async with served(directory) as made:
            made.orchestrator.intake = Intake(project, total)
            await scene(made)

    asyncio.run(body())


def test_a_project_has_so_many_open_jobs_and_another_one_has_its_own(tmp_path: Path):
    async def scene(made: Served) -> None:
        for name in ("mine-1", "mine-2"):
            assert (await submit(made, "operatora", name))[0] == 200
        status, why = await submit(made, "operatora", "mine-3")
        assert status == 429
        assert "project a has 2 open jobs" in why
        assert "project_open_jobs_max" in why
        assert (await submit(made, "operatorb", "other-1"))[0] == 200
        assert JobId("mine-3") not in made.orchestrator.cluster.jobs, "and it is not journaled"
        # The launchers of what is open say the same again, and nothing is changed by it.
        status, why = await submit(made, "operatora", "mine-2")
        assert (status, '"new":false' in why) == (200, True)
        assert (await made.ask("operatora", "POST", "/v1/jobs/mine-1/stop", {}))[0] == 200
        assert (await submit(made, "operatora", "mine-3"))[0] == 200
        assert (await submit(made, "operatora", "mine-1"))[0] == 429, (
            "a run that is over is no more"
        )

    with_bounds(tmp_path, 2, 10, scene)


def test_who_runs_the_cluster_is_bound_by_the_whole_alone(tmp_path: Path):
    async def scene(made: Served) -> None:
        assert (await submit(made, "operatora", "mine-1"))[0] == 200
        assert (await submit(made, "operator", "mine-2", project="a"))[0] == 200
        assert (await submit(made, "own", "ours-1"))[0] == 200
        for who in ("own", "admin", "operatorb"):
            status, why = await submit(made, who, "late-1")
            assert status == 429
            assert "no more than 3 jobs" in why
            assert "open_jobs_max" in why
        assert (await submit(made, "own", "ours-1"))[0] == 200

    with_bounds(tmp_path, 1, 3, scene)


def test_those_that_come_at_the_same_instant_are_counted_too(tmp_path: Path):
    async def scene(made: Served) -> None:
        coming = [submit(made, "operatora", f"mine-{number}") for number in range(20)]
        statuses = Counter(status for status, _ in await asyncio.gather(*coming))
        assert statuses == {200: 3, 429: 17}
        assert len(made.orchestrator.cluster.open_jobs) == 3
        assert not made.orchestrator.intake._coming

    with_bounds(tmp_path, 3, 100, scene)


def test_one_that_is_decided_and_not_on_disk_yet_counts_once():
    cluster, caller = state.new_cluster("s"), Caller("operator", Role.OPERATOR, "a")
    first, second, third = (spec_of(name, project="a") for name in ("one", "two", "three"))
    made = Intake(2, 10)
    with made.room_for(first, caller, cluster):
        brain.step(cluster, events.Submitted(first), 1.0)
        with made.room_for(second, caller, cluster):
            brain.step(cluster, events.Submitted(second), 1.0)
            with pytest.raises(BadRequest, match="has 2 open jobs"):
                made.room_for(third, caller, cluster).__enter__()


def test_all_the_launchers_of_one_job_are_one(tmp_path: Path):
    async def scene(made: Served) -> None:
        same = [submit(made, "operatora", "llama-7") for _ in range(20)]
        assert {status for status, _ in await asyncio.gather(*same)} == {200}

    with_bounds(tmp_path, 1, 1, scene)


def test_the_bounds_are_settings(tmp_path: Path):
    config = OrchestratorConfig(project_open_jobs_max=7, open_jobs_max=70)
    journal = SqliteJournal(tmp_path / "journal.db")
    made = Orchestrator(journal, config, RealClock(), OWN, lambda *_, **__: None)
    assert (made.intake._project_max, made.intake._total_max) == (7, 70)
    journal.close()


def test_a_job_is_described_in_so_many_bytes(tmp_path: Path):
    # Each of them is short enough by itself.
    large = {f"NAME_{number}": "x" * 4000 for number in range(70)}
    intake.check(spec_of("a", environment=dict(list(large.items())[:60])))

    async def scene(made: Served) -> None:
        status, why = await submit(made, "operatora", "mine-1", environment=large)
        assert status == 413
        assert f"at most {intake.SPEC_BYTES_MAX}" in why
        assert not made.orchestrator.cluster.jobs

    with_bounds(tmp_path, 2, 2, scene)


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        (HASTY, "silent_seconds_max is 0.3; give 1.2 or more"),
        (replace(HASTY, silent_seconds_max=0.1), "must not be above silent_seconds_max"),
        (Policy(silent_seconds_max=1.3), "restart_grace_seconds (1.5) must not be above"),
        (Policy(recoveries_max=0), "recoveries_max is 0; it must be above zero"),
        (Policy(hold_seconds_max=0.0), "hold_seconds_max is 0.0; it must be above zero"),
    ],
)
def test_a_policy_that_no_file_could_say_is_refused_over_http_too(policy: Policy, told: str):
    with pytest.raises(BadRequest) as refused:
        intake.check(spec_of("a", policy=policy))
    assert refused.value.status == 400
    assert told in str(refused.value)
    assert refused.value.fix
    intake.check(spec_of("a", policy=Policy(silent_seconds_max=1.2, restart_grace_seconds=1.0)))


def test_a_policy_is_refused_before_it_is_decided_and_what_is_open_stays_answered(tmp_path: Path):
    async def scene(made: Served) -> None:
        assert (await submit(made, "operatora", "mine-1", policy=HASTY))[0] == 400
        assert not made.orchestrator.cluster.jobs
        # Of an older release, that let it in: its launchers come back after the update.
        made.feed(events.Submitted(spec_of("llama-8", project="a", policy=HASTY)))
        status, why = await submit(made, "operatora", "llama-8", policy=HASTY)
        assert (status, '"new":false' in why) == (200, True)

    with_bounds(tmp_path, 2, 2, scene)
