"""What runs beside a leader's work ends with it, and it with them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from keepstep.errors import Deposed
from keepstep.orchestrator.together import Log, until_one_ends


async def forever() -> None:
    await asyncio.Event().wait()


async def fail(error: Exception) -> None:
    await asyncio.sleep(0)
    raise error


def play(scene: Callable[[Log], Awaitable[None]]) -> list[str]:
    """Run a scene to its end, and return what was logged."""
    logged: list[str] = []

    async def bounded() -> None:
        async with asyncio.timeout(10):
            await scene(lambda name, **facts: logged.append(f"{name} {facts['part']}"))

    asyncio.run(bounded())
    return logged


def test_whatever_fails_beside_the_work_is_raised_and_told_and_ends_the_others():
    async def scene(log: Log) -> None:
        with pytest.raises(KeyError):
            await until_one_ends(log, forever(), forever(), fail(KeyError("a bug")))
        current = asyncio.current_task()
        assert current is not None
        assert current.cancelling() == 0, "nobody asked the caller to leave"
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == {current}

    assert play(scene) == ["leader.failed fail"]


def test_one_that_merely_ends_is_a_bug_too():
    async def scene(log: Log) -> None:
        with pytest.raises(AssertionError, match="to go on for ever"):
            await until_one_ends(log, forever(), asyncio.sleep(0))

    play(scene)


def test_an_end_that_the_caller_expects_is_told_by_the_caller():
    async def scene(log: Log) -> None:
        with pytest.raises(Deposed):
            await until_one_ends(log, fail(Deposed("term 5 leads")), forever())

    assert play(scene) == []


def test_two_that_fail_at_once_end_the_leader_and_not_its_caller():
    async def scene(log: Log) -> None:
        with pytest.raises((KeyError, ValueError)):
            await until_one_ends(
                log,
                fail(KeyError("one")),
                fail(ValueError("two")),
                fail(ValueError("three")),
            )
        for _ in range(5):
            await asyncio.sleep(0)  # A call-back that came too late would end us here.

    assert len(play(scene)) == 1


def test_who_is_told_to_leave_leaves_whatever_failed_meanwhile():
    async def scene(log: Log) -> None:
        running = asyncio.create_task(until_one_ends(log, forever(), fail(KeyError("a bug"))))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    play(scene)


def test_two_that_fail_beside_the_work_pass_for_no_signal():
    async def scene(log: Log) -> None:
        with pytest.raises(ValueError, match="one"):
            await until_one_ends(log, forever(), fail(ValueError("one")), fail(KeyError("two")))
        current = asyncio.current_task()
        assert current is not None
        assert current.cancelling() == 0

    assert play(scene) == ["leader.failed fail"]
