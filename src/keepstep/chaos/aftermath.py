"""What must be true after a fault: drained nodes empty, old workers dead, loans repaid."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keepstep.chaos.inject import Injector
from keepstep.chaos.lender import Lender
from keepstep.chaos.sight import Sight
from keepstep.chaos.strike import Strike
from keepstep.cli.cluster import LocalCluster
from keepstep.cli.moves import place_of
from keepstep.errors import Permanent

SECONDS_MAX = 20.0
UNTOUCHED_SECONDS = 2.5
"""How long a job must go on as if nothing had happened. A false alarm would come in this time."""


class Aftermath:
    """Looks at one cluster after each strike. Each look says what is not as it must be."""

    def __init__(
        self,
        cluster: LocalCluster,
        sight: Sight,
        injector: Injector,
        lender: Lender | None,
        tend: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._sight = sight
        self._injector = injector
        self._lender = lender
        self._tend = tend

    def look(self, strike: Strike, incidents: int) -> str:
        self._injector.release()
        if strike.lost:
            self._injector.comes_back(strike.lost)
        for place in strike.untaint:
            self._cluster.client.untaint(place_of(place))
        problem = self._emptied(strike) if strike.drained else ""
        problem = problem or (self._refused(strike) if strike.node else "")
        problem = problem or (self._repaid(strike) if strike.loans >= 0 else "")
        problem = problem or self._at_home(strike)
        if not problem and strike.one_incident and incidents != 1:
            return f"one fault became {incidents} incidents"
        return problem

    def _emptied(self, strike: Strike) -> str:
        """Drained nodes are empty; they may be switched off, and are used again afterwards."""
        deadline = time.monotonic() + SECONDS_MAX
        full = list(strike.drained)
        while full and time.monotonic() < deadline:
            self._tend()
            nodes = (self._sight.picture() or {"nodes": {}})["nodes"]
            full = [node for node in strike.drained if not nodes.get(node, {}).get("empty")]
            time.sleep(0.05)
        generation = self._sight.job_now()["generation"]
        for node in strike.drained if strike.power_off else ():
            self._cluster.lose_node(node)
            self._injector.comes_back(node)
            time.sleep(UNTOUCHED_SECONDS)
        now = self._sight.job_now()["generation"]
        for node in strike.drained:
            self._cluster.client.undrain(node, {})
        if now != generation:
            return f"{strike.drained} were empty, and switching them off was noticed"
        return f"{full} did not become empty" if full else ""

    def _refused(self, strike: Strike) -> str:
        """The old worker of a node that is back must end, and must have published nothing."""
        deadline = time.monotonic() + SECONDS_MAX
        (pid,) = strike.pids
        while time.monotonic() < deadline:
            self._tend()
            job = self._sight.job()
            if job is not None and strike.forbidden:
                path = str(job["published"]["path"])
                if path.endswith(strike.forbidden):
                    return f"a fenced worker published {path}"
            gone = not _alive(pid)
            if gone and not self._injector.away and job is not None:
                return ""
            time.sleep(0.05)
        return f"process {pid} of {strike.node} was fenced and still runs"

    def _repaid(self, strike: Strike) -> str:
        """The lender was parked, goes on, and the account has the loan."""
        assert self._lender is not None
        try:
            self._lender.wait_parked(strike.loans, self._tend)
            self._lender.wait_running("goes on", self._tend)
        except Permanent as error:
            return str(error)
        new = self._lender.loans()[strike.loans :]
        unpaid = [loan for loan in new if loan["ended_at"] is None]
        if not new or unpaid:
            return f"the account does not say that the loan is over: {new}"
        return ""

    def _at_home(self, strike: Strike) -> str:
        seats = self._sight.job_now()["seats"] if strike.home else []
        for rank, home in strike.home.items():
            if seats[rank]["node"] != home:
                return f"rank {rank} is on {seats[rank]['node']}, and its home is {home}"
        return ""


def user_error(before: dict[str, Any], after: dict[str, Any]) -> str:
    """A user's mistake ends with the user's traceback, and costs at most one spare."""
    if "ValueError" not in str(after["detail"]):
        return "the job failed without the user's traceback"
    was, became = (sum(s["incarnation"] for s in job["seats"]) for job in (before, after))
    return "" if became - was <= 1 else f"{became - was} spares were used"


def is_tainted(picture: dict[str, Any], node: str) -> bool:
    uses = picture.get("nodes", {}).get(node, {}).get("uses", ())
    return any(use["taint"] for use in uses)


def _alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
