"""Telling a broken machine from a user's mistake, by the exception alone. Pure, without torch.

A peer's death reaches a rank as an exception out of a collective. That is nobody's bug, inside an
attempt or outside, and must not be counted as one.
"""

from __future__ import annotations

_KINDS = frozenset({"GroupsBroken", "DistBackendError", "DistNetworkError", "DistStoreError"})
_SIGNS = (
    "gloo",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL",
    "Socket closed",
    "Application timeout caused pair closure",
)


def is_communication(error: BaseException) -> bool:
    """Did a collective or a store break under this process?"""
    if not isinstance(error, RuntimeError):
        return False
    if any(kind.__name__ in _KINDS for kind in type(error).__mro__):
        return True
    text = str(error)
    return any(sign in text for sign in _SIGNS)
