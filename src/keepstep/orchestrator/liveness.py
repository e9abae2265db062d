"""Who is silent, judged purely: last words and `now` in, names out. Nothing here is ever stored.

A node is silent when nothing was heard of it for long enough. Two cautions come first. If our own
loop was late, the silence may be ours: every deadline moves back by as much. And if most of the
cluster falls silent at once, the likeliest cause is our own network: the sentence waits for one
more period, in which a real loss of that size will still be there.
"""

from __future__ import annotations

from collections.abc import Mapping

from keepstep.model import NodeId

MASS_NODES_MIN = 3
"""Fewer silent nodes than this are never put down to ourselves: small clusters lose two at once."""


def silent_nodes(
    last_heard: Mapping[NodeId, float], now: float, silent_seconds_max: float
) -> tuple[NodeId, ...]:
    """The nodes to give up, in the order in which they fell silent."""
    quiet = [node for node, heard in last_heard.items() if now - heard > silent_seconds_max]
    if len(quiet) >= MASS_NODES_MIN and 2 * len(quiet) > len(last_heard):
        quiet = [node for node in quiet if now - last_heard[node] > 2 * silent_seconds_max]
    return tuple(sorted(quiet, key=lambda node: (last_heard[node], node)))


def own_lateness(due: float, now: float, late_seconds_max: float) -> float:
    """By how much to push the deadlines back: nothing for ordinary jitter, else all of it."""
    late = now - due
    return late if late > late_seconds_max else 0.0
