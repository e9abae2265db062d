"""Peers that do not exist yet, imagined as equal to this rank: the Python half.

For: a joiner that builds its model, wraps it in DDP and runs a few iterations before anyone
knows it. Values stay finite and shapes right, and nothing computed here is ever kept: state
arrives from real replicas afterwards. The C++ half is `Loopback` in swap/swap.cpp.

Must never: be reachable once the groups were re-formed, or talk to another process.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import AllreduceOptions, HashStore, ProcessGroupGloo, Work

Tensors = Sequence[torch.Tensor]


class LoopbackWork(Work):
    """Work that is done before it is handed out."""

    def __init__(self, out: Tensors) -> None:
        super().__init__()
        self._out = list(out)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> list[torch.Tensor]:
        return self._out

    def get_future(self) -> Any:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._out)
        return future


class Loopback:
    """The methods of a c10d Backend, for one rank of a world that is not there."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        # DDP reads tensors out of a C++ future, which only a C++ work can give: a world of one.
        self._solo: Any = ProcessGroupGloo(HashStore(), 0, 1, timeout=timedelta(seconds=60))

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Any:
        return LoopbackWork(tensors)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        # An identity in a world of one; what the real Gloo refuses is refused here as well.
        return self._solo.allreduce(list(tensors), AllreduceOptions())

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        return LoopbackWork(tensors)

    def reduce(self, tensors: Tensors, opts: Any = None) -> Any:
        return LoopbackWork(tensors)

    def allgather(self, out: Sequence[Tensors], tensors: Tensors, opts: Any = None) -> Any:
        for outs, mine in zip(out, tensors, strict=True):
            for each in outs:
                _fill(each, mine)
        return LoopbackWork(out[0] if out else [])

    def allgather_coalesced(
        self, out: Sequence[Tensors], tensors: Tensors, opts: Any = None
    ) -> Any:
        for outs in out:
            for each, mine in zip(outs, tensors, strict=True):
                _fill(each, mine)
        return LoopbackWork([])

    def _allgather_base(self, out: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> Any:
        with torch.no_grad():
            # FSDP2 gathers from a part of the output itself: copy_ refuses what overlaps.
            out.view(self._size, -1).copy_(mine.reshape(1, -1).clone())
        return LoopbackWork([out])

    def gather(self, out: Sequence[Tensors], tensors: Tensors, opts: Any = None) -> Any:
        for outs, mine in zip(out, tensors, strict=False):
            for each in outs:
                _fill(each, mine)
        return LoopbackWork([])

    def scatter(self, out: Tensors, tensors: Sequence[Tensors], opts: Any = None) -> Any:
        for i, each in enumerate(out):
            _fill(each, tensors[i][self._rank] if tensors else each.new_zeros(0))
        return LoopbackWork(out)

    def reduce_scatter(self, out: Tensors, tensors: Sequence[Tensors], opts: Any = None) -> Any:
        for each, chunks in zip(out, tensors, strict=True):
            _fill(each, chunks[self._rank])
        return LoopbackWork(out)

    def _reduce_scatter_base(self, out: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> Any:
        _fill(out, whole.detach().reshape(self._size, -1)[self._rank].view(out.shape))
        return LoopbackWork([out])

    def alltoall_base(
        self,
        out: torch.Tensor,
        whole: torch.Tensor,
        out_splits: Sequence[int],
        splits: Sequence[int],
        opts: Any = None,
    ) -> Any:
        _fill(out, whole)
        return LoopbackWork([out])

    def alltoall(self, out: Tensors, tensors: Tensors, opts: Any = None) -> Any:
        for each in out:
            _fill(each, tensors[self._rank])
        return LoopbackWork(out)

    def send(self, tensors: Tensors, to: int, tag: int) -> Any:
        return LoopbackWork(tensors)

    def recv(self, tensors: Tensors, source: int, tag: int) -> Any:
        return LoopbackWork(tensors)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Any:
        return LoopbackWork(tensors)

    def barrier(self, opts: Any = None) -> Any:
        return LoopbackWork([])

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        return None

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def _set_sequence_number_for_group(self) -> None:
        return None

    def set_timeout(self, timeout: timedelta) -> None:
        return None

    def abort(self) -> None:
        return None

    def shutdown(self) -> None:
        return None


def _fill(out: torch.Tensor, mine: torch.Tensor) -> None:
    """Copy what fits; the rest is zero, so that nothing uninitialised is ever read."""
    with torch.no_grad():
        out, mine = out.detach(), mine.detach()
        if out.shape == mine.shape:
            out.copy_(mine)
            return
        out.zero_()
        count = min(out.numel(), mine.numel())
        if count and out.is_contiguous():
            out.view(-1)[:count].copy_(mine.reshape(-1)[:count])
