"""How many files a process may have open.

A shell and systemd allow 1,024 by default, which is made for programs that call select(). One
connection per agent, or per pair of ranks in each group, needs more.
"""

from __future__ import annotations

import contextlib
import resource

FILES_MAX = 1 << 19
"""Systemd's hard limit. Containers may have one of 2^30, and a program that a training script
starts may close every number up to its limit, one by one."""


def allow_many() -> int:
    """Raise this process's limit to the hard one; its children inherit it. Returns what it is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return FILES_MAX if soft == resource.RLIM_INFINITY else soft
    # Where it is not to be had (a sandbox), as many files as before have to do.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
