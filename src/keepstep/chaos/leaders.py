"""What befalls those who decide: leaders die, stop and are cut off, their database with them.

    a rank dies, or is asked to move -> in a phase of its replacement, or at any moment after, the
    leader (or the database) is struck -> somebody leads -> the replacement goes on where it was

After each strike an operator asks for something until it is accepted, which is how long a takeover
takes; in the end each of these wishes is in the journal once, whole chains and all. Each death has
to lead to one new worker and no more: an order that is lost leaves the seat empty, one that is
followed twice fills it twice. Who was asked to move has moved.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from keepstep import codec
from keepstep.chaos import network as networks
from keepstep.chaos.database import PostgresServer, programs
from keepstep.chaos.faults import RANDOM, Fault, Outcome
from keepstep.chaos.network import Network
from keepstep.chaos.plans import WHY, Failpoints
from keepstep.chaos.sight import Sight
from keepstep.chaos.strike import Missed, Strike
from keepstep.cli.client import Client
from keepstep.cli.cluster import JOURNAL, ClusterPlan, Further, LocalCluster
from keepstep.errors import ConfigError, KeepstepError, Transient
from keepstep.model import JobId, JobSpec
from keepstep.orchestrator.journal import verify
from keepstep.orchestrator.journal_postgres import PostgresJournal

RETURN_SECONDS = 3.0
"""A leader that was struck comes back after this long: longer than a lease."""
FROZEN_SECONDS = 3.0
ACCEPTED_SECONDS_MAX = 60.0
WISH_SECONDS_MAX = 1.0
"""One that is not answered by then is said again, to whoever leads then; it is the same wish."""
NODES_NEVER = 100_000
"""A job that asks for so many nodes waits for ever: it is only a wish on record."""


class ControlPlane:
    """Two orchestrators, each with a network of its own if there are any, and their database."""

    def __init__(self, network: Network | None) -> None:
        where = programs()
        if where is None:
            raise ConfigError(
                "a campaign against leaders needs a PostgreSQL server: install the Debian package "
                "postgresql"
            )
        self.server = PostgresServer(where, networks.HUB_ADDRESS if network else "")
        self.url = self.server.database()
        self.wishes: list[str] = []
        self._network = network
        self._places = [self._place(name) for name in ("o1", "o2")]

    def close(self) -> None:
        self.server.remove()

    def _place(self, name: str) -> Further:
        if self._network is None:
            return Further()
        return Further(f"{self._network.join(name)}:0", self._network.prefix(name))

    def plan(self, environment: Mapping[str, str]) -> ClusterPlan:
        first, *others = self._places
        return ClusterPlan(
            listen=first.listen,
            prefix=first.prefix,
            followers=tuple(others),
            environment={**environment, JOURNAL: self.url},
            common_preload=True,
        )

    def check(self) -> tuple[str, ...]:
        """What is not as it must be in the journal, after all is over."""
        journal = PostgresJournal(self.url)
        try:
            chains = verify(journal)
            found = [name for name in self.wishes if name not in chains]
            problems = [f"{name} was accepted and is not in the journal" for name in found]
            for name in self.wishes:
                links = [codec.loads(link.body) for link in journal.export(name)]
                kinds = [link["entry"]["event"]["kind"] for link in links]
                if kinds.count("Submitted") > 1:
                    problems.append(f"{name} is in the journal {kinds.count('Submitted')} times")
            return tuple(problems)
        except KeepstepError as error:
            return (f"the journal does not verify: {error}",)
        finally:
            journal.close()


def local_plan(
    control: ControlPlane | None, network: Network | None, environment: Mapping[str, str]
) -> ClusterPlan:
    """The orchestrators of a campaign."""
    if control is not None:
        return control.plan(environment)
    listen = f"{networks.HUB_ADDRESS}:0" if network else "127.0.0.1:0"
    return ClusterPlan(listen=listen, environment=environment, common_preload=True)


def replaced_once(strike: Strike, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """One death, one new worker. Returns what is not so."""
    if strike.takeover_seconds is None or strike.moved:
        # A move may be given up with its leader, and be made with another target.
        return ""
    new = sum(s["incarnation"] for s in after["seats"]) - sum(
        s["incarnation"] for s in before["seats"]
    )
    return "" if new == 1 else f"one rank died, and {new} workers were started for it"


class Points(Failpoints, Protocol):
    """What a strike at leaders needs of the injector besides."""

    def returns(self, name: str, seconds: float, back: Callable[[str], None]) -> None: ...
    def tend(self) -> None: ...


class Leaders:
    """Strikes at who leads one cluster, and at its database."""

    def __init__(
        self,
        cluster: LocalCluster,
        sight: Sight,
        points: Points,
        network: Network | None,
        control: ControlPlane | None,
    ) -> None:
        self._cluster = cluster
        self._sight = sight
        self._points = points
        self._network = network
        self._control_plane = control

    @property
    def _control(self) -> ControlPlane:
        assert self._control_plane is not None, "leaders are struck in a campaign of their own"
        return self._control_plane

    def kinds(self) -> Mapping[str, Callable[[Fault], Strike]]:
        return {
            "leader_killed": self._leader_killed,
            "leader_stopped": self._leader_stopped,
            "leader_cut": self._leader_cut,
            "leader_killed_moving": self._leader_killed,
            "leader_stopped_moving": self._leader_stopped,
            "leader_cut_moving": self._leader_cut,
            "leader_without_database": self._leader_without_database,
            "leader_without_agents": self._leader_without_agents,
            "database_restarted": self._database_restarted,
            "database_frozen": self._database_frozen,
        }

    def _leader_killed(self, fault: Fault) -> Strike:
        def strike(leader: str) -> None:
            self._cluster.kill_orchestrator(leader, restart=False)
            self._points.returns(leader, RETURN_SECONDS, self._cluster.start_orchestrator)

        return self._during_recovery(fault, strike)

    def _leader_stopped(self, fault: Fault) -> Strike:
        def strike(leader: str) -> None:
            pid = self._cluster.pid_of(leader)
            os.kill(pid, signal.SIGSTOP)
            wake = RETURN_SECONDS + fault.delay_seconds
            self._points.returns(leader, wake, lambda _: os.kill(pid, signal.SIGCONT))

        return self._during_recovery(fault, strike)

    def _leader_cut(self, fault: Fault) -> Strike:
        network = self._network
        assert network is not None, "cuts are not scheduled without namespaces"

        def strike(leader: str) -> None:
            place = self._place_of(leader)
            network.cut(place)
            # Agents that hear nobody leave after four seconds.
            self._points.returns(place, 2 * RETURN_SECONDS, network.heal)

        return self._during_recovery(fault, strike)

    def _leader_without_database(self, fault: Fault) -> Strike:
        """Agents and the other orchestrator are heard as ever. (And we, who ask, are not.)"""
        return self._parted(fault, [networks.HUB], leader_lives=False)

    def _leader_without_agents(self, fault: Fault) -> Strike:
        """Its lease is as good as ever, and nobody hears what it decides."""
        return self._parted(fault, list(self._cluster.nodes), leader_lives=True)

    def _parted(self, fault: Fault, others: Sequence[str], *, leader_lives: bool) -> Strike:
        network = self._network
        assert network is not None, "cuts are not scheduled without namespaces"

        def strike(leader: str) -> None:
            place = self._place_of(leader)
            network.part(place, others)
            self._points.returns(place, 3 * RETURN_SECONDS, lambda _: network.unite(place, others))

        return self._during_recovery(fault, strike, leader_lives=leader_lives)

    def _place_of(self, leader: str) -> str:
        return f"o{self._cluster.orchestrators.index(leader) + 1}"

    def _database_restarted(self, fault: Fault) -> Strike:
        return self._during_recovery(
            fault, lambda _: self._control.server.restart(), leader_lives=True
        )

    def _database_frozen(self, fault: Fault) -> Strike:
        server = self._control.server

        def strike(_: str) -> None:
            server.freeze()
            self._points.returns("database", FROZEN_SECONDS, lambda _: server.thaw())

        return self._during_recovery(fault, strike, leader_lives=True)

    def _during_recovery(
        self, fault: Fault, strike: Callable[[str], None], *, leader_lives: bool = False
    ) -> Strike:
        """A rank dies, or is to move; where its replacement is in the window, or a little later,
        strike."""
        moves = fault.cell.expected is Outcome.MOVED
        pid, point = self._sight.pid_of(fault.rank), None
        if fault.cell.window != RANDOM:
            point = self._points.drop(f"orchestrator-{fault.cell.window}", "pause")
        began = time.monotonic()
        if moves:
            leader = self._ask_to_move(fault)
        else:
            leader = self._leader()
            os.kill(pid, signal.SIGKILL)
        if point is not None:
            self._points.claimed(point)
        else:
            time.sleep(4 * fault.delay_seconds)
        at = time.monotonic()
        strike(leader)
        if point is not None:
            self._points.go(point)
        accepted = self._wish(fault, "" if leader_lives else leader)
        found = Strike(began, moved=(fault.rank,)) if moves else Strike(began, (pid,))
        found.takeover_seconds = round(accepted - at, 3)
        return found

    def _ask_to_move(self, fault: Fault) -> str:
        """Until it is accepted; by whom. Who was struck before may be about to step down."""
        known = self._cluster.client
        job = str(self._sight.job_now()["id"])
        deadline = time.monotonic() + ACCEPTED_SECONDS_MAX
        while True:
            self._points.tend()
            leader = self._leader()
            url = known.urls[self._cluster.orchestrators.index(leader)]
            asked_at = time.monotonic()
            try:
                asked = {"ranks": [fault.rank], "why": WHY}
                Client(url, known.token, WISH_SECONDS_MAX).migrate(job, asked)
            except Transient as error:
                silent = time.monotonic() - asked_at >= WISH_SECONDS_MAX
                if silent and fault.cell.window == "warm":
                    # It stands still over this very request, whose decision is on disk by then.
                    return leader
                if time.monotonic() > deadline:
                    raise Missed(f"nobody accepted the move: {error}") from error
                continue
            return leader

    def _leader(self) -> str:
        found = ""
        deadline = time.monotonic() + ACCEPTED_SECONDS_MAX
        while not found:
            if time.monotonic() > deadline:
                raise Missed("nobody leads")
            found = self._cluster.leader()
        return found

    def _wish(self, fault: Fault, struck: str) -> float:
        """Ask for something until somebody has it on disk; when that was."""
        name = f"wish-{fault.number}"
        spec = JobSpec(JobId(name), "none.py", nodes=NODES_NEVER)
        known = self._cluster.client
        names = zip(self._cluster.orchestrators, known.urls, strict=True)
        # Who was struck may take the question and never answer.
        urls = ",".join(url for one, url in names if one != struck)
        client = Client(urls, known.token, WISH_SECONDS_MAX)
        deadline = time.monotonic() + ACCEPTED_SECONDS_MAX
        while True:
            self._points.tend()
            try:
                client.submit(spec)
                self._control.wishes.append(name)
                return time.monotonic()
            except KeepstepError as error:
                if time.monotonic() > deadline:
                    raise Missed(f"nobody accepted {name}: {error}") from error
            time.sleep(0.02)
