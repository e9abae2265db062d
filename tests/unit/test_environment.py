"""What a worker finds around it."""

from __future__ import annotations

from pathlib import Path

from keepstep.agent.environment import SECRETS, Surroundings, interface_of, of_standby
from keepstep.model import JobId, JobSpec


def test_the_clusters_secrets_are_not_for_a_worker() -> None:
    there = Path("there")
    inherited = {**dict.fromkeys(SECRETS, "secret"), "HOME": "mine"}
    spec = JobSpec(JobId("job"), "train.py")
    given = of_standby(Surroundings(spec, there, "127.0.0.1", there, there, inherited), 0)
    assert given["HOME"] == "mine"
    assert "secret" not in given.values()


def test_the_interface_of_an_address_is_found_by_asking_the_kernel() -> None:
    assert interface_of("127.0.0.1") == "lo"


def test_an_address_of_another_machine_has_no_interface_here() -> None:
    assert interface_of("192.0.2.7") == ""
    assert interface_of("a-name.example") == ""
