"""A leader's tasks live and die together: what one of them raises is raised by the leader.

One that ended in silence would leave a leader that is half dead: it decides and keeps its lease,
and nobody's silence is judged, no budget ends, no agent is told that it leads. A leader that ends
is replaced within seconds.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

from keepstep.errors import Alone, Behind, Deposed, Transient

Log = Callable[..., None]
Work = Coroutine[Any, Any, None]

FORESEEN = (Alone, Behind, Deposed, Transient)
"""Ends of a leadership that its caller knows, and says why in a sentence of its own."""


async def until_one_ends(log: Log, work: Work, *beside: Work) -> None:
    """Run them all, and raise what the first of them to end has raised. None of them ends well.

    `work` runs in the caller's task, and what it raises is raised in that very moment: who learns
    that it is deposed has to answer nobody any more.
    """
    leader = asyncio.current_task()
    assert leader is not None
    ended: list[asyncio.Task[None]] = []
    leads = True

    def end(task: asyncio.Task[None]) -> None:
        if leads and not task.cancelled():
            ended.append(task)
            leader.cancel()

    tasks = [asyncio.create_task(each, name=_name(each)) for each in beside]
    for task in tasks:
        task.add_done_callback(end)
    try:
        await work
    except asyncio.CancelledError:
        # By one of those beside it; or by whoever wants us to leave, and that comes first.
        for _ in ended:
            leader.uncancel()
        if not ended or leader.cancelling() > 0:
            raise
        _raise_end_of(log, ended[0])
    except FORESEEN:
        raise
    except Exception as error:
        _tell(log, _name(work), error)
        raise
    finally:
        leads = False
        for task in tasks:
            task.cancel()


def _raise_end_of(log: Log, task: asyncio.Task[None]) -> None:
    error = task.exception()
    assert error is not None, f"{task.get_name()} ended, which is to go on for ever"
    _tell(log, task.get_name(), error)
    raise error


def _name(work: Work) -> str:
    return str(getattr(work, "__qualname__", ""))


def _tell(log: Log, part: str, error: BaseException) -> None:
    trace = "".join(traceback.format_exception(error))
    log("leader.failed", part=part, why=repr(error), trace=trace)
