"""A leader that hears nobody while it can write: others may be nearer to the agents. Pure.

Its network may be cut towards the nodes and not towards the database, and it would keep its lease
for ever. So it lets go of it, once per silence: only streams that are open count, and the next
leader has none. Agents that leave in good order close theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from keepstep.errors import Alone
from keepstep.model import NodeId

ALONE_SECONDS = 2.5
"""Five heartbeats of every node up to 4,000 of them; of more at least one each, at moments of their
own. Shorter than the silence for which a node is given up."""
NODES_MIN = 2
"""One node alone may simply be restarting its agent."""
OTHERS_SECONDS = 5.0
"""How long the others have to take the lease, before it is taken again."""


def hears_nobody(
    last_heard: Mapping[NodeId, float], connected: Collection[NodeId], now: float
) -> Alone | None:
    """Why to let go of the lease; None: somebody is heard."""
    heard = [last_heard[node] for node in connected if node in last_heard]
    if len(heard) < NODES_MIN or now - max(heard) <= ALONE_SECONDS:
        return None
    return Alone(f"none of {len(heard)} nodes was heard for {now - max(heard):.1f} s")
