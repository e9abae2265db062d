"""Names of portions say who holds them, shortly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep import portion
from keepstep.errors import WireError


@given(st.sets(st.integers(0, 500), min_size=1))
def test_a_name_gives_back_its_holders(holders: set[int]) -> None:
    name = portion.name_of(holders)
    assert portion.holders_of(name) == sorted(holders)
    assert all(portion.holds(name, rank) == (rank in holders) for rank in range(510))


def test_names_of_meshes_are_short() -> None:
    assert portion.name_of(range(16_384)) == "0-16383"
    assert portion.name_of(range(3, 16_384, 8)) == "3-16379/8"
    assert portion.name_of([0, 1, 4, 5]) == "0-1+4-5"
    assert portion.name_of([7]) == "7"


@pytest.mark.parametrize("name", ["", "x", "3-1", "0-3/2", "-1", "0-4/0"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(WireError):
        portion.holders_of(name)
