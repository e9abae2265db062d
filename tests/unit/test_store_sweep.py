"""What generations leave in a store goes once it has served, and not before."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, TCPStore

from keepstep.training.pointed_store import PointedStore
from keepstep.training.store_sweep import (
    TRAINS,
    UNTRAINED_SECONDS,
    Sweep,
    Trained,
    mark,
    read_mark,
    served,
)


@pytest.fixture
def store() -> TCPStore:
    seconds = timedelta(seconds=10)
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=seconds)


def meet(store: TCPStore, secret: str, generation: int) -> PointedStore:
    """As Gloo does: each rank leaves its addresses."""
    for group in ("default", "keepstep-side"):
        there = PrefixStore(f"{secret}/{generation}/{group}", store)
        for rank in range(4):
            there.set(f"0/{rank}", "x" * 186)
    return PointedStore(PrefixStore(f"{secret}/{generation}/default", store))


def train(store: TCPStore, secret: str, generation: int, job: str = "job") -> None:
    meet(store, secret, generation).set(TRAINS, mark(job, generation))


def secrets(store: TCPStore) -> set[str]:
    return {key.lstrip("/").split("/")[0] for key in store.list_keys()}


def seat(room: Path, job: str) -> Path:
    page = room / job / "seat-0-0.page"
    page.parent.mkdir(exist_ok=True)
    page.touch()
    return page


def test_a_job_of_many_generations_leaves_the_keys_of_two(store: TCPStore, tmp_path: Path):
    seat(tmp_path, "job")
    sweep = Sweep(store, tmp_path)
    for generation in range(1, 20):
        train(store, f"s{generation}", generation)
        sweep.look(float(generation))
    assert secrets(store) == {"s18", "s19"}
    assert store.num_keys() == 18


def test_who_has_yet_to_train_keeps_what_all_others_wait_for(store: TCPStore, tmp_path: Path):
    seat(tmp_path, "job")
    sweep = Sweep(store, tmp_path)
    train(store, "s1", 1)
    # Moves that were begun and given up, while the first generation trains on.
    for generation in (2, 3, 4):
        meet(store, f"s{generation}", generation)
        assert sweep.look(10.0 * UNTRAINED_SECONDS * generation) == 0
    assert secrets(store) == {"s1", "s2", "s3", "s4"}


def test_a_job_that_is_over_leaves_nothing_and_another_keeps_its_own(
    store: TCPStore, tmp_path: Path
):
    page = seat(tmp_path, "job")
    seat(tmp_path, "other")
    sweep = Sweep(store, tmp_path)
    train(store, "s1", 1)
    train(store, "o7", 7, "other")
    assert sweep.look(1.0) == 0
    page.unlink()
    assert sweep.look(2.0) == 9
    assert secrets(store) == {"o7"}


def test_what_never_trained_goes_when_it_is_old_and_nobody_is_here(store: TCPStore, tmp_path: Path):
    page = seat(tmp_path, "job")
    sweep = Sweep(store, tmp_path)
    meet(store, "s1", 1)
    assert sweep.look(0.0) == 0
    assert sweep.look(2 * UNTRAINED_SECONDS) == 0, "somebody is here, and may be slow"
    page.unlink()
    meet(store, "s2", 2)
    assert sweep.look(2 * UNTRAINED_SECONDS) == 8
    assert secrets(store) == {"s2"}, "its page may be on its way"
    assert sweep.look(3 * UNTRAINED_SECONDS) == 8
    assert store.num_keys() == 0


def test_marks_are_read_as_they_are_written_and_others_are_none():
    assert read_mark(mark("a.job-1", 12).encode()) == Trained("a.job-1", 12)
    assert read_mark(b"nonsense") is None
    assert read_mark(b"x job") is None
    assert served({"s": Trained("job", 1)}, {"job"}) == set()
