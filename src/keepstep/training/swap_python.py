"""Groups with a swappable inner backend, in Python: used where no C++ swap was built.

The same two parts as swap/swap.cpp, with the same meaning: a `Gate` that all groups of the
process pass before each launch, and a group that forwards to an inner backend. It costs a few
microseconds per collective and takes the GIL, which the C++ one does not.

Must never: register its inner backend with torch (torch keeps the first one for ever), or
launch anything while the gate is broken.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    ProcessGroup,
    ReduceScatterOptions,
    Work,
)

NO_BACKWARD = -1
_COUNTER = struct.Struct("=Q")


class Gate:
    """Passed before every launch: counts it, refuses it while broken, calls the backward hooks."""

    def __init__(self, broken_type: type[BaseException]) -> None:
        self.broken = False
        self.launched = 0
        self.in_backward = 0
        self._broken_type = broken_type
        self._lock = threading.Lock()
        self._counter: memoryview | None = None
        self._on_backward: Callable[[], object] | None = None
        self._nth = 0
        self._nth_fn: Callable[[], object] | None = None
        # Re-entrant backwards alternate between ids, so one last id would not do.
        self._tasks: deque[int] = deque(maxlen=64)

    def check(self) -> None:
        if self.broken:
            raise self._broken_type(
                "the process groups were aborted and have not been re-formed yet"
            )

    def enter(self) -> None:
        self.check()
        with self._lock:
            self.launched += 1
            if self._counter is not None:
                _COUNTER.pack_into(self._counter, 0, self.launched)
        task = torch._C._current_graph_task_id()
        if task != NO_BACKWARD:
            self._enter_backward(task)

    def _enter_backward(self, task: int) -> None:
        with self._lock:
            self.in_backward += 1
            nth = self.in_backward
            first = task not in self._tasks
            if first:
                self._tasks.append(task)
        if first and self._on_backward is not None:
            self._on_backward()
        if nth == self._nth and self._nth_fn is not None:
            self._nth_fn()
        # The callback may have waited through an abort: do not launch into dead sockets.
        self.check()

    def bind_counter(self, buffer: Any, offset: int) -> None:
        view = memoryview(buffer).cast("B")
        if view.readonly or offset < 0 or offset % 8 or offset + 8 > len(view):
            raise ValueError("the counter needs 8 aligned, writable bytes inside the buffer")
        with self._lock:
            self._counter = view[offset : offset + 8]
            _COUNTER.pack_into(self._counter, 0, self.launched)

    def unbind_counter(self) -> None:
        with self._lock:
            if self._counter is not None:
                self._counter.release()
            self._counter = None

    def on_backward(self, fn: Callable[[], object] | None) -> None:
        self._on_backward = fn

    def before_nth(self, n: int, fn: Callable[[], object] | None) -> None:
        self._nth_fn = fn
        self._nth = n if fn is not None else 0

    def reset_backward(self) -> None:
        with self._lock:
            self.in_backward = 0
            self._tasks.clear()


class JoinedWork(Work):
    """Several works that count as one."""

    def __init__(self, works: Sequence[Any], out: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._works = list(works)
        self._out = list(out)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return all(work.wait() for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def result(self) -> list[torch.Tensor]:
        return self._out

    def get_future(self) -> Any:
        self.wait()
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._out)
        return future


# c10d's own signatures do not fit each other across groups and backends; Any keeps out of that.
_Group: Any = ProcessGroup


class SwapGroup(_Group):  # type: ignore[misc]
    """A ProcessGroup that forwards each operation to whatever its inner backend is now."""

    def __init__(self, rank: int, size: int, gate: Gate, inner: Any) -> None:
        super().__init__(rank, size)
        self._gate = gate
        self._inner = inner
        self._name = ""
        self._description = ""

    def inner(self) -> Any:
        return self._inner

    def swap(self, inner: Any) -> Any:
        old, self._inner = self._inner, inner
        return old

    def getBackendName(self) -> str:  # noqa: N802 - the name c10d calls
        return "keepstep"

    # c10d keeps names and descriptions in a group's registered backends, of which this has none.

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def getGroupName(self) -> str:  # noqa: N802 - the name c10d calls
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802 - the name c10d calls
        return self._description

    # Some names differ between c10d's groups and backends, and the coalesced tensor forms are
    # not offered by backends to Python at all.

    def all_gather_single(self, out: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> Any:
        self._gate.enter()
        return self._inner._allgather_base(out, mine, opts or AllgatherOptions())

    _allgather_base = all_gather_single

    def reduce_scatter_single(
        self, out: torch.Tensor, whole: torch.Tensor, opts: Any = None
    ) -> Any:
        self._gate.enter()
        return self._inner._reduce_scatter_base(out, whole, opts or ReduceScatterOptions())

    _reduce_scatter_base = reduce_scatter_single

    def all_gather_single_coalesced(
        self, out: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        self._gate.enter()
        opts = opts or AllgatherOptions()
        works = [self._inner._allgather_base(o, i, opts) for o, i in zip(out, tensors, strict=True)]
        return JoinedWork(works, out)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter_single_coalesced(
        self, out: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        self._gate.enter()
        opts = opts or ReduceScatterOptions()
        pairs = zip(out, tensors, strict=True)
        return JoinedWork([self._inner._reduce_scatter_base(o, i, opts) for o, i in pairs], out)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(self, *args: Any, **kwargs: Any) -> Any:
        self._gate.enter()
        return self._inner.alltoall_base(*args, **kwargs)

    alltoall_base = all_to_all_single


def _forward(name: str, counted: bool) -> Callable[..., Any]:
    def call(self: SwapGroup, *args: Any, **kwargs: Any) -> Any:
        if counted:
            self._gate.enter()
        else:
            self._gate.check()
        return getattr(self._inner, name)(*args, **kwargs)

    call.__name__ = name
    return call


def _ungated(name: str) -> Callable[..., Any]:
    def call(self: SwapGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._inner, name)(*args, **kwargs)

    call.__name__ = name
    return call


for _name in (
    "broadcast",
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "allgather",
    "allgather_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "alltoall",
    "barrier",
    "monitored_barrier",
):
    setattr(SwapGroup, _name, _forward(_name, counted=True))
for _name in ("send", "recv", "recv_anysource", "_start_coalescing", "_end_coalescing"):
    setattr(SwapGroup, _name, _forward(_name, counted=False))
for _name in (
    "set_timeout",
    "abort",
    "shutdown",
    "_get_sequence_number_for_group",
    "_set_sequence_number_for_group",
):
    setattr(SwapGroup, _name, _ungated(_name))
