"""The exception tree, and the three kinds of wrong.

    KeepstepError
      ConfigError              the user's mistake; the message says the fix
      Transient                expected trouble; try again after retry_after_seconds
        Unreachable            the other side did not answer
      Permanent                expected trouble that another try does not mend
        Deposed                a journal or an agent refused an older term
        Behind                 an agent has seen a later term than the journal has
        Alone                  a leader that nobody reaches lets others lead
        Fenced                 an older generation was refused
        WireError              a message that this version cannot accept
        NoHome                 some state has no home left

A bug of ours is an `assert`, left on.
"""

from __future__ import annotations

import errno


class KeepstepError(Exception):
    """The root: whatever Keepstep raises on purpose."""


class ConfigError(KeepstepError):
    """The user's mistake. The message says what to change."""


class Transient(KeepstepError):
    """Expected trouble that passes."""

    def __init__(self, message: str, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


def of_disk(error: OSError, what: str) -> Transient | ConfigError:
    """A disk that is full, or does not answer, may be well again; the rest is for somebody to set
    right."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return Transient(f"{what}: {error.strerror}")
    return ConfigError(f"{what}: {error.strerror}")


class Unreachable(Transient):
    """The other side did not answer in time."""


class Permanent(KeepstepError):
    """Expected trouble that another try does not mend."""


class Deposed(Permanent):
    """A higher term has been seen: this leader must stop acting."""


class Behind(Permanent):
    """The journal has forgotten a term: whoever leads begins one above it."""

    def __init__(self, term: int, node: str = "an agent") -> None:
        super().__init__(f"{node} has seen term {term}, and the journal has forgotten it")
        self.term = term


class Alone(Permanent):
    """No node is heard: somebody else may be nearer to them."""


class Fenced(Permanent):
    """A higher generation has been seen: this worker must stop acting."""


class WireError(Permanent):
    """A message that does not fit its type, its version or its bounds."""


class NoHome(Permanent):
    """State that no reachable process or memory holds any more."""
