"""What a worker finds around it."""

from __future__ import annotations

from keepstep.agent.environment import interface_of


def test_the_interface_of_an_address_is_found_by_asking_the_kernel() -> None:
    assert interface_of("127.0.0.1") == "lo"


def test_an_address_of_another_machine_has_no_interface_here() -> None:
    assert interface_of("192.0.2.7") == ""
    assert interface_of("a-name.example") == ""
