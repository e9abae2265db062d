"""Shared memory: what a reader finds after a writer died at any byte."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import Permanent
from keepstep.page import NEWEST, RING_SLOTS, Mark, Page, Ring, find_entry, mirror_path, ring_path


def test_a_page_says_what_its_worker_last_did(tmp_path: Path) -> None:
    page = Page(tmp_path / "seat-0-1.page", create=True)
    page.set_generation(3)
    page.mark(Mark.GRADS_READY, 41)
    page.set_committed(40)
    page.set_step_ns(25_000_000)
    page.set_busy("evaluation", 123)
    seen = Page(tmp_path / "seat-0-1.page").read()
    assert (seen.generation, seen.step, seen.mark) == (3, 41, Mark.GRADS_READY)
    assert (seen.committed, seen.step_ns) == (40, 25_000_000)
    assert (seen.busy, seen.busy_until_ns) == ("evaluation", 123)


def test_launches_of_an_older_generation_do_not_count(tmp_path: Path) -> None:
    page = Page(tmp_path / "p.page", create=True)
    at = Page.LAUNCHED_AT
    page.memory[at : at + 8] = (1000).to_bytes(8, "little")
    page.count_launches_from_here()
    page.memory[at : at + 8] = (1003).to_bytes(8, "little")
    assert page.read().launched == 3
    page.count_vote()
    assert page.read().launched == 4


def test_the_agent_lends_the_journal_head_to_the_step_log(tmp_path: Path) -> None:
    page = Page(tmp_path / "p.page", create=True)
    page.set_head("ab" * 32)
    assert Page(tmp_path / "p.page").head() == "ab" * 32


def test_a_file_that_is_no_page_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(4096))
    with pytest.raises(Permanent):
        Page(tmp_path / "x")


@given(st.lists(st.binary(max_size=64), min_size=1, max_size=12))
def test_a_ring_keeps_the_last_boundaries_and_no_others(
    tmp_path_factory: pytest.TempPathFactory, payloads: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("ring") / "seat-0-1.ring"
    ring = Ring(path, payload_bytes_max=64)
    for boundary, payload in enumerate(payloads):
        ring.put(boundary, payload)
    again = Ring(path)
    for boundary, payload in enumerate(payloads):
        kept = boundary >= len(payloads) - RING_SLOTS
        assert again.get(boundary) == (payload if kept else None)
    assert again.get(len(payloads)) is None


@pytest.mark.parametrize("damaged_at", range(24 + 24, 24 + 24 + 5))
def test_a_damaged_entry_is_no_entry(tmp_path: Path, damaged_at: int) -> None:
    path = tmp_path / "r.ring"
    ring = Ring(path, payload_bytes_max=16)
    ring.put(0, b"hello")
    ring.memory[damaged_at] ^= 1
    assert Ring(path).get(0) is None


def test_an_entry_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "r.ring", payload_bytes_max=4)
    ring.put(0, b"old")
    with pytest.raises(Permanent):
        ring.put(RING_SLOTS, b"too long")
    assert ring.get(0) == b"old"


def test_an_entry_is_found_in_the_seats_own_ring_or_in_a_mirror(tmp_path: Path) -> None:
    Ring(ring_path(tmp_path, 2, 1), payload_bytes_max=16).put(7, b"own")
    Ring(mirror_path(tmp_path, 3), payload_bytes_max=16).put(7, b"mirrored")
    assert find_entry(tmp_path, 2, 7) == b"own"
    assert find_entry(tmp_path, 3, 7) == b"mirrored"
    assert find_entry(tmp_path, 3, 8) is None
    assert find_entry(tmp_path, 4, 7) is None


def test_the_newest_entry_is_found_without_its_boundary(tmp_path: Path) -> None:
    own = Ring(ring_path(tmp_path, 2, 0), payload_bytes_max=64)
    own.put(6, b"six")
    own.put(7, b"seven")
    Ring(mirror_path(tmp_path, 2), payload_bytes_max=64).put(5, b"five")
    Ring(mirror_path(tmp_path, 3), payload_bytes_max=64).put(9, b"nine")
    assert find_entry(tmp_path, 2, NEWEST) == b"seven"
    assert find_entry(tmp_path, 3, NEWEST) == b"nine"
    assert find_entry(tmp_path, 4, NEWEST) is None
