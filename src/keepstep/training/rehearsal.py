"""Stand-ins for the object collectives while a joiner rehearses alone.

A loopback can invent a peer's tensor but not a peer's pickle: what would arrive is uninitialised
memory. So while a process rehearses, objects from a peer stay what the caller already has.

Must never: be installed in a process that has peers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def _rehearse_broadcast(object_list: list[Any], *_args: Any, **_kwargs: Any) -> None:
    return None


def _rehearse_scatter(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    *_args: Any,
    **_kwargs: Any,
) -> None:
    if scatter_object_input_list:
        scatter_object_output_list[0] = scatter_object_input_list[0]


def _rehearse_recv(object_list: list[Any], src: int | None = None, *_args: Any, **_kw: Any) -> int:
    return 0 if src is None else src


OBJECT_STAND_INS: dict[str, Callable[..., Any]] = {
    "broadcast_object_list": _rehearse_broadcast,
    "scatter_object_list": _rehearse_scatter,
    "recv_object_list": _rehearse_recv,
}
