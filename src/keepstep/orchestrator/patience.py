"""How long each node may say nothing. Pure.

The most impatient job that has something on a node decides, for that node alone: what one project
asks for must not have the nodes of others taken for silent. How often an agent is to speak follows
from the same limit (liveness.py): a silence shorter than a heartbeat proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from keepstep.model import JobId, NodeId
from keepstep.orchestrator.state import Cluster, NodeState
from keepstep.policy_file import SILENT_SECONDS_MIN


class Patience:
    """With each node, as the open jobs ask for it."""

    def __init__(self, usual: float, cluster: Cluster | None = None) -> None:
        """`usual`: in seconds, with a node where no job asks for less."""
        self.usual = usual
        self._nodes: Mapping[NodeId, NodeState] = cluster.nodes if cluster is not None else {}
        self._open: tuple[JobId, ...] = cluster.open_jobs if cluster is not None else ()
        known = cluster.jobs if cluster is not None else {}
        # A journal of before may hold jobs that ask for less than is let in.
        asked = (
            (name, max(known[name].spec.policy.silent_seconds_max, SILENT_SECONDS_MIN))
            for name in self._open
        )
        self._less = {name: seconds for name, seconds in asked if seconds < usual}
        self.shortest = min((usual, *self._less.values()))

    @property
    def alike(self) -> bool:
        """The same with all of them. So it mostly is, and nobody has to look at a node's users."""
        return not self._less

    def at(self, cluster: Cluster) -> Patience:
        """As it is now. It is asked for many times between two changes of the open jobs, and those
        may be thousands."""
        same = cluster.open_jobs is self._open and cluster.nodes is self._nodes
        return self if same else Patience(self.usual, cluster)

    def of(self, node: NodeId) -> float:
        """With this one: what counts is what is there, also a standby or a rank that is to end."""
        state = self._nodes.get(node) if self._less else None
        if state is None:
            return self.usual
        found, less = self.usual, self._less
        for user in state.uses.values():  # Thousands of nodes are asked about in a second.
            if user.job in less:
                found = min(found, less[user.job])
        return found
