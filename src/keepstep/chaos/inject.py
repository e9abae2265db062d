"""Strike: carry out one fault on a running cluster, at its window, and say when it happened.

One method per kind, found through a table. Named windows use keepstep.failpoint: a file is dropped,
the process that reaches the point claims it and kills, stops or raises itself, or waits there while
we do it. What a fault takes away comes back by itself after RETURN_SECONDS: see `tend`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.chaos.faults import RANDOM, SYNC_WINDOWS, Fault
from keepstep.chaos.flips import Flips
from keepstep.chaos.leaders import ControlPlane, Leaders
from keepstep.chaos.lender import Lender
from keepstep.chaos.network import Network
from keepstep.chaos.places import Places
from keepstep.chaos.plans import Plans
from keepstep.chaos.sight import Sight
from keepstep.chaos.strike import Missed, Strike
from keepstep.cli.cluster import LocalCluster
from keepstep.errors import Transient

RETURN_SECONDS = 5.0
"""A lost node comes back after this long."""
CLAIM_SECONDS_MAX = 20.0
"""How long a failpoint may wait to be reached. A step takes a fraction of a second."""
HOLD_SECONDS = 2.0
"""How long survivors are left holding before a node returns."""


@dataclass(slots=True)
class Away:
    """A node that is lost, cut or frozen, and how it comes back."""

    node: str
    due: float
    back: Callable[[str], None]
    held: bool = field(default=False)
    """Stays away until somebody sets this to False."""


class Injector:
    """Breaks things on one cluster."""

    def __init__(
        self,
        cluster: LocalCluster,
        network: Network | None,
        failpoints: Path,
        sight: Sight,
        lender: Lender | None = None,
        control: ControlPlane | None = None,
    ) -> None:
        self._cluster = cluster
        self._network = network
        self._failpoints = failpoints
        self._sight = sight
        self.away: list[Away] = []
        self._kinds: dict[str, Callable[[Fault], Strike]] = {
            "sigkill": self._sigkill,
            "rank0": self._sigkill,
            "sigstop": self._sigstop,
            "gil": lambda fault: self._by_failpoint(fault, "gil"),
            "exception": lambda fault: self._by_failpoint(fault, "raise"),
            "exception_once": lambda fault: self._by_failpoint(fault, "raise"),
            "exception_always": self._exception_always,
            "node_loss": self._node_loss,
            "rank0_node": self._node_loss,
            "silent_node": self._silent_node,
            "silent_after_allreduce": self._silent_node,
            "two_ranks": self._two_ranks,
            "second_failure": self._second_failure,
            "second_in_sync": self._second_in_sync,
            "joiner_dies": self._joiner_dies,
            "standby_dies": self._standby_dies,
            "orchestrator_killed": self._orchestrator_killed,
            "agent_killed": self._agent_killed,
            "store_killed": self._store_killed,
            "preload_killed": self._preload_killed,
            "returning_fenced": self._returning_fenced,
            "corrupt_source": self._corrupt_source,
            "hold": self._hold,
            "hold_timeout": self._hold_timeout,
            "sigterm": self._sigterm,
            "both_homes_lost": self._both_homes_lost,
            **Plans(cluster, sight, self).kinds(),
            **Places(cluster, sight, self, lender).kinds(),
            **Flips(cluster, sight, self).kinds(),
            **Leaders(cluster, sight, self, network, control).kinds(),
        }

    def strike(self, fault: Fault) -> Strike:
        """Carry out a fault. Raises Missed if its window did not come."""
        self._clean()
        time.sleep(fault.delay_seconds)
        try:
            return self._kinds[fault.cell.kind](fault)
        except Missed:
            self._clean()
            raise

    def tend(self, *, now: float | None = None) -> None:
        """Bring back what is due."""
        moment = time.monotonic() if now is None else now
        for away in [a for a in self.away if not a.held and moment >= a.due]:
            self.away.remove(away)
            away.back(away.node)

    def forget(self, node: str) -> None:
        """It is no part of the cluster any more, and does not come back."""
        self.away = [away for away in self.away if away.node != node]

    def release(self) -> None:
        """Whatever was kept away may come back now."""
        for away in self.away:
            away.held = False

    def quiet(self) -> None:
        """Take back what a fault left armed."""
        self._clean()

    # ------------------------------------------------------------ single strikes

    def _sigkill(self, fault: Fault) -> Strike:
        if fault.cell.window == RANDOM:
            return self._signal_rank(fault.rank, signal.SIGKILL)
        return self._by_failpoint(fault, "kill")

    def _sigstop(self, fault: Fault) -> Strike:
        if fault.cell.window == RANDOM:
            return self._signal_rank(fault.rank, signal.SIGSTOP)
        return self._by_failpoint(fault, "stop")

    def _signal_rank(self, rank: int, number: signal.Signals) -> Strike:
        pid = self._sight.pid_of(rank)
        at = time.monotonic()
        os.kill(pid, number)
        return Strike(at, (pid,))

    def _by_failpoint(self, fault: Fault, action: str) -> Strike:
        pid = self._sight.pid_of(fault.rank)
        return Strike(self.claimed(self.arm(fault.rank, fault.cell.window, action)), (pid,))

    def _exception_always(self, fault: Fault) -> Strike:
        pid = self._sight.pid_of(fault.rank)
        at = time.monotonic()
        (self._failpoints / f"rank-{fault.rank}-always").write_text("raise")
        return Strike(at, (pid,))

    def _node_loss(self, fault: Fault) -> Strike:
        node = self._sight.node_of(fault.rank)
        if fault.cell.window != RANDOM:
            self.claimed(self.arm(fault.rank, fault.cell.window, "pause"))
        return Strike(self.lose(node))

    def _silent_node(self, fault: Fault) -> Strike:
        """Cut the node's network. With a window: exactly there, and then let the rank go on."""
        network = self._network
        assert network is not None, "silent kinds are not scheduled without namespaces"
        node, pid = self._sight.node_of(fault.rank), self._sight.pid_of(fault.rank)
        armed = None
        if fault.cell.window != RANDOM:
            armed = self.arm(fault.rank, fault.cell.window, "pause")
            self.claimed(armed)
        at = time.monotonic()
        network.cut(node)
        if armed is not None:
            self.go(armed)
        self.away.append(Away(node, at + RETURN_SECONDS, network.heal, held=True))
        return Strike(at, (pid,), node=node)

    def _returning_fenced(self, fault: Fault) -> Strike:
        """A node stands still while its rank is about to publish; it wakes up replaced."""
        node, pid = self._sight.node_of(fault.rank), self._sight.pid_of(fault.rank)
        generation = self._sight.job_now()["generation"]
        armed = self.arm(fault.rank, "save", "pause")
        self.claimed(armed)
        at = time.monotonic()
        self._cluster.freeze_node(node)

        def wake(name: str) -> None:
            self.go(armed)
            self._cluster.thaw_node(name)

        self.away.append(Away(node, at + RETURN_SECONDS, wake, held=True))
        return Strike(at, (pid,), node=node, forbidden=f"-g{generation}")

    def _corrupt_source(self, fault: Fault) -> Strike:
        """A bit of another rank's weights flips just before this rank dies, after its update.

        The flip comes after the update of the step in which the rank dies: no later step can
        finish without the rank, so the corrupt state is at rest when the survivors compare. All of
        them have made that update by then: two that differ, and a third that lags, would be a tie.
        """
        node = self._sight.node_of(fault.other)
        pid = self._sight.pid_of(fault.rank)
        waiting = self.arm(fault.rank, "allreduce", "pause")
        self.claimed(waiting)
        flip = self._failpoints / f"rank-{fault.other}-flip"
        flip.write_text("flip")
        ranks = range(len(self._sight.job_now()["seats"]))
        updated = {rank: self.arm(rank, "updated", "pause") for rank in ranks}
        self.go(waiting)
        for point in (*updated.values(), flip):
            self.claimed(point)
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        for rank in ranks:
            if rank != fault.rank:
                self.go(updated[rank])
        return Strike(at, (pid,), tainted=node)

    # ------------------------------------------------------------ two at once, one after another

    def _two_ranks(self, fault: Fault) -> Strike:
        pids = (self._sight.pid_of(fault.rank), self._sight.pid_of(fault.other))
        if fault.cell.window != RANDOM:
            self.claimed(self.arm(fault.rank, fault.cell.window, "pause"))
        at = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return Strike(at, pids)

    def _second_failure(self, fault: Fault) -> Strike:
        second = self.arm(fault.other, fault.cell.window, "kill")
        strike = self._signal_rank(fault.rank, signal.SIGKILL)
        self.claimed(second)
        return strike

    def _second_in_sync(self, fault: Fault) -> Strike:
        second = self.arm(fault.other, fault.cell.window, "kill")
        pid = self._sight.pid_of(fault.rank)
        at = self.claimed(self.arm(fault.rank, SYNC_WINDOWS[1], "kill"))
        self.claimed(second)
        return Strike(at, (pid,))

    def _joiner_dies(self, fault: Fault) -> Strike:
        second = self.arm(fault.rank, fault.cell.window, "kill")
        strike = self._signal_rank(fault.rank, signal.SIGKILL)
        self.claimed(second)
        return strike

    def _standby_dies(self, fault: Fault) -> Strike:
        if fault.cell.window == "attach":
            return self._joiner_dies(fault)
        standbys = self._sight.job_now()["spares"]["standbys"]
        first = next(str(s["node"]) for s in standbys if s["ready"])
        parked = next(p.pid for p in self._sight.processes(first) if p.rank < 0)
        victim = self._sight.pid_of(fault.rank)
        at = time.monotonic()
        os.kill(parked, signal.SIGKILL)
        os.kill(victim, signal.SIGKILL)
        return Strike(at, (victim, parked))

    def _orchestrator_killed(self, fault: Fault) -> Strike:
        if fault.cell.window == "healthy":
            at = time.monotonic()
            self._cluster.kill_orchestrator()
            return Strike(at)
        point = self.drop(f"orchestrator-{fault.cell.window}", "kill")
        # The brain rests in ALLOCATE only while it waits for a death: a hung rank has to be
        # fenced first.
        how = signal.SIGSTOP if fault.cell.window == "allocate" else signal.SIGKILL
        strike = self._signal_rank(fault.rank, how)
        self.claimed(point)
        return strike

    def _agent_killed(self, fault: Fault) -> Strike:
        if fault.cell.window == "healthy":
            node = self._sight.node_of(fault.rank)
            at = time.monotonic()
            self._cluster.kill_agent(node)
            return Strike(at)
        node = self._sight.node_of(fault.other)
        return self._during_recovery(fault, lambda: self._cluster.kill_agent(node))

    def _store_killed(self, fault: Fault) -> Strike:
        def kill() -> float:
            node = str(self._sight.job_now()["store_node"])
            pid = self._sight.server_of(node, "store")
            at = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            return at

        if fault.cell.window == "healthy":
            return Strike(kill())
        return self._during_recovery(fault, kill)

    def _preload_killed(self, fault: Fault) -> Strike:
        pid = self._sight.server_of(self._sight.node_of(fault.rank), "preload")
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return Strike(at)

    def _during_recovery(self, fault: Fault, strike: Callable[[], object]) -> Strike:
        """A rank dies; while another one waits in the window of the recovery, strike."""
        waiting = self.arm(fault.other, fault.cell.window, "pause")
        first = self._signal_rank(fault.rank, signal.SIGKILL)
        self.claimed(waiting)
        strike()
        self.go(waiting)
        return first

    # ------------------------------------------------------------ hold, save, fall back

    def _hold(self, fault: Fault) -> Strike:
        strike = self._hold_timeout(fault)
        self._until_state("held")
        due = time.monotonic() + HOLD_SECONDS
        for away in self.away:
            away.due = due
        self.release()
        return strike

    def _hold_timeout(self, fault: Fault) -> Strike:
        """Every spare goes, then a node with a rank: nobody is left to take it."""
        job = self._sight.job_now()
        seated = {str(seat["node"]) for seat in job["seats"]}
        for node in sorted(self._cluster.nodes.keys() - seated):
            self.lose(node, held=True)
        self.until(lambda: self._sight.job_now()["spares"]["standbys"] == [], "no spare is left")
        return Strike(self.lose(self._sight.node_of(fault.rank), held=True))

    def _sigterm(self, fault: Fault) -> Strike:
        job = str(self._sight.job_now()["id"])

        def stop() -> None:
            self._cluster.client.stop(job, save=True, why="the campaign asked for it")

        if fault.cell.window == "healthy":
            at = time.monotonic()
            stop()
            return Strike(at)
        return self._during_recovery(fault, stop)

    def _both_homes_lost(self, fault: Fault) -> Strike:
        """A rank's node and the node that mirrors its private state, at the same moment."""
        self.until(lambda: self._sight.job_now()["published"]["step"] >= 0, "a checkpoint")
        job = self._sight.job_now()
        mirror = (fault.rank + int(job["mirror_stride"])) % int(job["world"])
        nodes = [str(job["seats"][rank]["node"]) for rank in (fault.rank, mirror)]
        if fault.cell.window != RANDOM:
            self.claimed(self.arm(fault.rank, fault.cell.window, "pause"))
        for node in nodes:
            self._cluster.freeze_node(node)
        at = time.monotonic()
        for node in nodes:
            self.lose(node)
        return Strike(at)

    # ------------------------------------------------------------ failpoints and nodes

    def arm(self, rank: int, window: str, action: str) -> Path:
        return self.drop(f"rank-{rank}-{window}", action)

    def drop(self, name: str, action: str) -> Path:
        fresh = self._failpoints / f".{name}"
        fresh.write_text(action)
        # Whole or not there: the process may look at any moment.
        fresh.replace(self._failpoints / name)
        return self._failpoints / name

    def claimed(self, point: Path, seconds_max: float = CLAIM_SECONDS_MAX) -> float:
        """When the failpoint was reached, on our monotonic clock."""
        hit = point.with_name(point.name + ".hit")
        deadline = time.monotonic() + seconds_max
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                # The rename that claims a point stamps the file's change time.
                age = time.time() - hit.stat().st_ctime
                return time.monotonic() - max(0.0, age)
            time.sleep(0.001)
        raise Missed(f"nobody reached {point.name} within {seconds_max:.0f} s")

    def go(self, point: Path) -> None:
        point.with_name(point.name + ".go").touch()

    def _clean(self) -> None:
        for path in self._failpoints.iterdir():
            path.unlink(missing_ok=True)

    def returns(self, name: str, seconds: float, back: Callable[[str], None]) -> None:
        """Whatever it is, it comes back after so long."""
        self.away.append(Away(name, time.monotonic() + seconds, back))

    def comes_back(self, node: str) -> None:
        """A node that was lost by the way comes back like any other."""
        due = time.monotonic() + RETURN_SECONDS
        self.away.append(Away(node, due, self._cluster.return_node))

    def lose(self, node: str, *, held: bool = False) -> float:
        at = time.monotonic()
        self._cluster.lose_node(node)
        self.away.append(Away(node, at + RETURN_SECONDS, self._cluster.return_node, held))
        return at

    def _until_state(self, state: str) -> None:
        self.until(lambda: self._sight.job_now()["state"] == state, f"the job is {state}")

    def until(self, holds: Callable[[], bool], what: str, seconds_max: float = 60.0) -> None:
        deadline = time.monotonic() + seconds_max
        while not holds():
            if time.monotonic() > deadline:
                raise Missed(f"waited {seconds_max:.0f} s until {what}")
            with contextlib.suppress(Transient):
                self._cluster.supervisor.check()
            time.sleep(0.02)
