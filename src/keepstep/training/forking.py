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
    collects = True

    def before() -> None:
        # What others do in the child before it is our turn may collect, too.
        nonlocal collects
        collects = gc.isenabled()
        gc.disable()

    def in_parent() -> None:
        if collects:
            gc.enable()

    def in_child() -> None:
        gc.freeze()
        in_parent()

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)
