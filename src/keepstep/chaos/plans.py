"""What operators do to a job that is well, and what may go wrong while it moves.

The planned kinds of a campaign. Ranks are asked to leave, by `migrate` or by a drain of their node;
a target, a leaver, a bystander, an agent or the orchestrator dies at a named moment of the move. In
the end every rank that was asked to move must have moved.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from keepstep.chaos.faults import Fault
from keepstep.chaos.sight import Sight
from keepstep.chaos.strike import Strike
from keepstep.cli.cluster import LocalCluster
from keepstep.errors import Transient

WHY = "the campaign asked for it"


class Failpoints(Protocol):
    """What a strike needs of the injector."""

    def arm(self, rank: int, window: str, action: str) -> Path: ...
    def drop(self, name: str, action: str) -> Path: ...
    def claimed(self, point: Path, seconds_max: float = ...) -> float: ...
    def go(self, point: Path) -> None: ...
    def lose(self, node: str, *, held: bool = ...) -> float: ...
    def until(self, holds: Callable[[], bool], what: str) -> None: ...


class Plans:
    """Moves on one cluster."""

    def __init__(self, cluster: LocalCluster, sight: Sight, failpoints: Failpoints) -> None:
        self._cluster = cluster
        self._sight = sight
        self._points = failpoints

    def kinds(self) -> Mapping[str, Callable[[Fault], Strike]]:
        return {
            "migrate": lambda fault: self._ask((fault.rank,)),
            "migrate_two": lambda fault: self._ask((fault.rank, fault.other)),
            "drain": lambda fault: self._drain((fault.rank,)),
            "drain_two": lambda fault: self._drain((fault.rank, fault.other)),
            "drain_and_power_off": lambda fault: self._drain((fault.rank,), power_off=True),
            "target_dies": self._target_dies,
            "leaver_dies": self._leaver_dies,
            "leavers_node_lost": self._leavers_node_lost,
            "bystander_dies": self._bystander_dies,
            "orchestrator_killed_moving": self._orchestrator_killed,
            "agent_killed_moving": self._agent_killed,
        }

    def _ask(self, ranks: tuple[int, ...]) -> Strike:
        at = time.monotonic()
        job = str(self._sight.job_now()["id"])
        self._cluster.client.migrate(job, {"ranks": sorted(ranks), "why": WHY})
        return Strike(at, moved=ranks)

    def _drain(self, ranks: tuple[int, ...], *, power_off: bool = False) -> Strike:
        nodes = tuple(self._sight.node_of(rank) for rank in ranks)
        at = time.monotonic()
        for node in nodes:
            self._cluster.client.drain(node, {"why": WHY})
        return Strike(at, moved=ranks, drained=nodes, power_off=power_off)

    def _target_dies(self, fault: Fault) -> Strike:
        """Only the target comes to these points: the leaver is told to wait before them."""
        point = self._points.arm(fault.rank, fault.cell.window, "kill")
        strike = self._ask((fault.rank,))
        self._points.claimed(point)
        return strike

    def _leaver_dies(self, fault: Fault) -> Strike:
        pid = self._sight.pid_of(fault.rank)
        return self._meanwhile(fault, lambda: os.kill(pid, signal.SIGKILL))

    def _leavers_node_lost(self, fault: Fault) -> Strike:
        node = self._sight.node_of(fault.rank)
        strike = self._meanwhile(fault, lambda: self._cluster.lose_node(node))
        strike.lost = node
        return strike

    def _bystander_dies(self, fault: Fault) -> Strike:
        pid = self._sight.pid_of(fault.other)
        return self._meanwhile(fault, lambda: os.kill(pid, signal.SIGKILL))

    def _agent_killed(self, fault: Fault) -> Strike:
        node = self._sight.node_of(fault.other)
        return self._meanwhile(fault, lambda: self._cluster.kill_agent(node))

    def _orchestrator_killed(self, fault: Fault) -> Strike:
        point = self._points.drop(f"orchestrator-{fault.cell.window}", "kill")
        at = time.monotonic()
        # In WARM it dies over this very request, whose decision is on disk by then.
        with contextlib.suppress(Transient):
            self._ask((fault.rank,))
        self._points.claimed(point)
        return Strike(at, moved=(fault.rank,))

    def _meanwhile(self, fault: Fault, act: Callable[[], object]) -> Strike:
        """Something happens while the target waits in the window."""
        waiting = self._points.arm(fault.rank, fault.cell.window, "pause")
        strike = self._ask((fault.rank,))
        self._points.claimed(waiting)
        act()
        self._points.go(waiting)
        return strike
