"""What a forked child of a rank, such as a loader's worker, must not do with what it inherited."""

from __future__ import annotations

import functools
import gc
import os


@functools.cache
def leave_garbage_alone() -> None:
    """A child collects nothing of its parent's.

    A group that nobody needs any more may lie in a cycle of references, as after a recovery. Its
    destructor waits for threads, which a forked child does not have: the first collection there
    hung, or was a segmentation fault.
    """
    os.register_at_fork(after_in_child=gc.freeze)
