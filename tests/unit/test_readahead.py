"""What is made ahead comes in its order, is never far ahead, and ends with who takes it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from keepstep.training.readahead import ROOM, Readahead

SECONDS_MAX = 10.0


def test_everything_comes_in_its_order():
    with Readahead(iter(range(100))) as items:
        assert list(items) == list(range(100))


def test_what_making_raises_is_raised_behind_what_was_made():
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("no more")

    with Readahead(items()) as ahead:
        taking = iter(ahead)
        assert next(taking) == 1
        with pytest.raises(ValueError, match="no more"):
            next(taking)


def test_it_goes_a_few_items_ahead_and_no_more():
    made, waits = [], threading.Semaphore(0)

    def items() -> Iterator[int]:
        for number in range(20):
            made.append(number)
            waits.release()
            yield number

    with Readahead(items()) as ahead:
        taking = iter(ahead)
        for taken in range(10):
            assert next(taking) == taken
            # One that is being worked on, as many as there is room for, and one in the making.
            for _ in range(len(made), taken + ROOM + 2):
                waits.acquire(timeout=SECONDS_MAX)
            assert len(made) <= taken + ROOM + 2


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_who_leaves_in_the_middle_leaves_no_thread_behind(taken: int):
    closed, threads = threading.Event(), []

    def items() -> Iterator[int]:
        threads.append(threading.current_thread())
        try:
            yield from range(1000)
        finally:
            closed.set()

    with Readahead(items()) as ahead:
        taking = iter(ahead)
        for _ in range(taken):
            next(taking)
    assert closed.wait(SECONDS_MAX)
    threads[0].join(SECONDS_MAX)
    assert not threads[0].is_alive()


def test_what_failed_is_gone_with_whoever_heard_of_it():
    class Backend:
        """Threads that end when it is freed, and not at the next collection."""

    backend = Backend()
    seen = weakref.ref(backend)

    def items(used: Backend) -> Iterator[int]:
        yield 1
        raise RuntimeError(f"broken, with {type(used).__name__}")

    def take() -> None:
        nonlocal backend
        with Readahead(items(backend)) as ahead:
            del backend
            for _ in ahead:
                pass

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(RuntimeError, match="broken") as raised:
            take()
        del raised
        assert seen() is None
    finally:
        gc.enable()
