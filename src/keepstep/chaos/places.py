"""What befalls places: a rack is lost, taints come in a storm, ranks go home, a lender gives way.

The kinds of a campaign in which the choice of a place matters. For a loan every spare is put out of
use first, so that the only devices left belong to a job of lower priority.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from keepstep.chaos.faults import Fault
from keepstep.chaos.lender import Lender
from keepstep.chaos.plans import WHY, Failpoints
from keepstep.chaos.sight import Sight
from keepstep.chaos.strike import Missed, Strike
from keepstep.cli.cluster import LocalCluster
from keepstep.model import Severity


class Places:
    """Strikes at nodes of one cluster."""

    def __init__(
        self, cluster: LocalCluster, sight: Sight, points: Failpoints, lender: Lender | None
    ) -> None:
        self._cluster = cluster
        self._sight = sight
        self._points = points
        self._lender = lender

    def kinds(self) -> Mapping[str, Callable[[Fault], Strike]]:
        return {
            "rack": self._rack,
            "taint_storm": self._taint_storm,
            "imminent_dies": self._imminent_dies,
            "go_home": self._go_home,
            "park": self._park,
        }

    def _rack(self, fault: Fault) -> Strike:
        """Two nodes at the same moment: one incident. They are no second home of each other."""
        job = self._sight.job_now()
        world, stride = int(job["world"]), int(job["mirror_stride"])
        near = {fault.rank, (fault.rank + stride) % world, (fault.rank - stride) % world}
        apart = [rank for rank in range(world) if rank not in near]
        seats = {seat["rank"]: str(seat["node"]) for seat in job["seats"]}
        homes = {seats[rank] for rank in near}
        others = [rank for rank in apart if seats[rank] not in homes]
        if not others:
            raise Missed("no two nodes that could be lost together")
        nodes = (seats[fault.rank], seats[others[fault.other % len(others)]])
        at = time.monotonic()
        for node in nodes:
            self._points.lose(node)
        return Strike(at, one_incident=True)

    def _taint_storm(self, fault: Fault) -> Strike:
        """Two nodes are complained of, over and over, by several; in the end both are to leave."""
        chance = random.Random(fault.number)
        nodes = (self._sight.node_of(fault.rank), self._sight.node_of(fault.other))
        complaints = list(itertools.product(nodes, Severity, ("alerts", "health", "operator")))
        chance.shuffle(complaints)
        complaints += [
            (nodes[0], Severity.IMMINENT, "alerts"),
            (nodes[1], Severity.LEAVE, "health"),
        ]
        at = time.monotonic()
        for node, severity, source in complaints:
            self._taint(node, severity, source)
        return Strike(at, moved=(fault.rank, fault.other), untaint=nodes)

    def _imminent_dies(self, fault: Fault) -> Strike:
        """The place dies while its rank moves away: no step is lost, whoever is faster."""
        node = self._sight.node_of(fault.rank)
        waiting = self._points.arm(fault.rank, fault.cell.window, "pause")
        at = time.monotonic()
        self._taint(node, Severity.IMMINENT, "alerts")
        self._points.claimed(waiting)
        self._points.lose(node)
        self._points.go(waiting)
        return Strike(at, moved=(fault.rank,), untaint=(node,))

    def _go_home(self, fault: Fault) -> Strike:
        """A rank that is away goes back; if nobody can, room is made on somebody's home first."""
        job = self._sight.job_now()
        name = str(job["id"])
        if not self._can_go(job):
            settler = self._settler(job, fault.rank)
            there = self._sight.node_of(settler)
            self._cluster.client.migrate(name, {"ranks": [settler], "why": WHY})
            self._points.until(
                lambda: self._sight.node_of(settler) != there and self._quiet(), "it is away"
            )
            self._points.until(lambda: bool(self._can_go(self._sight.job_now())), "home has room")
        before = self._sight.job_now()
        going = self._can_go(before)
        if not going:
            raise Missed("no rank has a home with room to go to")
        at = time.monotonic()
        self._cluster.client.migrate(name, {"home": True, "why": WHY})
        return Strike(at, moved=going, home={rank: before["away"][str(rank)] for rank in going})

    def _settler(self, job: dict[str, Any], wanted: int) -> int:
        """A rank that sits on a node where one of this job's ranks began: its own, or another."""
        nodes = {seat["rank"]: str(seat["node"]) for seat in job["seats"]}
        homes = {str(job["away"].get(str(rank), node)) for rank, node in nodes.items()}
        there = [rank for rank, node in sorted(nodes.items()) if node in homes]
        if not there:
            raise Missed("nobody sits where one of the ranks began")
        return wanted if wanted in there else there[wanted % len(there)]

    def _can_go(self, job: dict[str, Any]) -> tuple[int, ...]:
        """Ranks whose home has a slot for them: free, or with a standby of ours."""
        nodes = (self._sight.picture() or {"nodes": {}})["nodes"]
        found = []
        for rank, home in sorted(job["away"].items()):
            node = nodes.get(home)
            uses = node["uses"] if node and node["alive"] and not node["drained"] else ()
            if any(use["job"] in (None, job["id"]) and use["rank"] is None for use in uses):
                found.append(int(rank))
        homes = [job["away"][str(rank)] for rank in found]
        return tuple(
            rank for rank, home in zip(found, homes, strict=True) if homes.count(home) == 1
        )

    def _quiet(self) -> bool:
        job = self._sight.job_now()
        return job["state"] == "running" and not job["migration"] and not job["leaving"]

    # ------------------------------------------------------------ a loan

    def _park(self, fault: Fault) -> Strike:
        lender = self._lender
        assert lender is not None, "loans are not scheduled without a lender"
        lender.wait_running("makes steps")
        loans = len(lender.loans())
        seats = lender.sight.job_now()["seats"]
        theirs = sorted({str(seat["node"]) for seat in seats})
        shut = self._no_spares(theirs)
        node, window = self._sight.node_of(fault.rank), fault.cell.window
        point = None
        if window == "orchestrator_killed":
            point = self._points.drop("orchestrator-save", "kill")
        at = time.monotonic()
        strike = Strike(at, untaint=shut, loans=loans)
        if window == "drain":
            self._cluster.client.drain(node, {"why": WHY})
            strike.moved, strike.drained = (fault.rank,), (node,)
        else:
            self._points.lose(node, held=True)
        if point is not None:
            self._points.claimed(point, 60.0)
        if window == "lenders_node_lost":
            lender.wait_parked(loans, self._cluster.supervisor.check)
            self._points.until(self._borrowed, "the borrower has what it needs")
            mine = {str(seat["node"]) for seat in self._sight.job_now()["seats"]}
            self._points.lose(next(name for name in theirs if name not in mine))
        return strike

    def _borrowed(self) -> bool:
        job = self._sight.job_now()
        return not (job["migration"] or {}).get("empty_seats") and job["state"] != "held"

    def _no_spares(self, theirs: list[str]) -> tuple[str, ...]:
        """Every node without ranks of either job is put out of use."""
        seated = {str(seat["node"]) for seat in self._sight.job_now()["seats"]}
        idle = sorted(self._cluster.nodes.keys() - seated - set(theirs))
        for node in idle:
            self._taint(node, Severity.AVOID, "operator")
        self._points.until(
            lambda: self._sight.job_now()["spares"]["standbys"] == [], "no spare is left"
        )
        return tuple(idle)

    def _taint(self, node: str, severity: Severity, source: str) -> None:
        body = {"node": node, "severity": severity.value, "source": source}
        self._cluster.client.taint({**body, "reason": f"{WHY} ({source})"})
