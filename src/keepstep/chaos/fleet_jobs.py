"""Machines and jobs of the simulated fleet: what they are, and what a job does by itself.

A job trains by the clock: nothing happens per step, and where it is follows from when it began. All
its ranks hold the same state, so that what survivors say is one report for many ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from keepstep.chaos.fleet_setting import GPUS_PER_NODE, groups_seconds
from keepstep.model import Generation, JobSpec, NodeId, Phase, Rank, Term
from keepstep.orchestrator import portions
from keepstep.wire import Message, SeatReport

Use = tuple["Trainee", Rank, int]
"""A worker: whose, which rank, which incarnation."""


@dataclass(slots=True, eq=False)
class Machine:
    """One machine: eight GPUs, one agent, one worker or one standby."""

    node: NodeId
    number: int
    up: bool = True
    cut: bool = False
    """Its network is gone: nobody reaches it, and its ranks reach nobody."""
    deaf: bool = False
    """Only the orchestrator does not reach it."""
    linked: bool = False
    boot: int = 1
    term_seen: Term = Term(0)
    worker: Use | None = None
    generation: Generation = Generation(0)
    """The newest that its worker was told of."""
    standby: Trainee | None = None
    ready: bool = False
    sick: bool = False
    """Its health program says so; it is on the list for repair."""
    outbox: list[Message] = field(default_factory=list)
    """What its agent could not say yet."""

    @property
    def reachable(self) -> bool:
        return self.linked and self.up and not (self.cut or self.deaf)


@dataclass(slots=True, eq=False)
class Trainee:
    """One job as it really is."""

    spec: JobSpec
    step_seconds: float
    stage: str = "off"
    """off, starting, training, broken, stopped (at a boundary), whole (all hold it), saved."""
    generation: Generation = Generation(0)
    seats: list[tuple[Machine | None, int]] = field(default_factory=list)
    bad: set[Rank] = field(default_factory=set)
    """Ranks without a living worker that the others reach."""
    empty: set[Rank] = field(default_factory=set)
    """Joiners, who have no state yet."""
    corrupt: set[Rank] = field(default_factory=set)
    targets: dict[Rank, tuple[Machine, int]] = field(default_factory=dict)
    leavers: dict[Rank, tuple[Machine | None, int]] = field(default_factory=dict)
    unborn: bool = True
    """No step was made since its workers were last started."""
    base: int = 0
    since: float = 0.0
    committed: int = 0
    """The newest committed step while it does not train."""
    breaks: int = 0
    resumes: int = 0
    lost_steps: int = 0
    """In declared fallbacks."""
    starting: Generation = Generation(0)
    answering: dict[tuple[Phase, Generation], set[Rank] | None] = field(default_factory=dict)
    """Reports that are about to be sent: for these ranks, or for all."""

    def __post_init__(self) -> None:
        self.seats = [(None, -1)] * self.spec.world_size
        self.bad = set(map(Rank, range(self.size)))

    @property
    def size(self) -> int:
        return self.spec.world_size

    @property
    def portion(self) -> str:
        return portions.of_all(self.size)

    @property
    def groups_seconds(self) -> float:
        return groups_seconds(self.size * GPUS_PER_NODE)

    def step_at(self, now: float) -> int:
        """How far it is: the newest committed step."""
        if self.stage != "training":
            return self.committed
        return self.base + int((now - self.since) / self.step_seconds + 1e-9)

    def stop(self, now: float, stage: str) -> None:
        """It does not train any more."""
        if self.stage == "training":
            self.committed = self.step_at(now)
            self.breaks += 1
        self.stage = stage

    def train(self, now: float, boundary: int) -> None:
        """The first step from a boundary is made."""
        self.stage, self.base, self.unborn = "training", boundary + 1, False
        self.leavers.clear()
        self.committed, self.since = boundary + 1, now
        self.resumes += 1

    def seated(self, rank: Rank) -> Machine | None:
        return self.seats[rank][0]

    def refresh(self, rank: Rank) -> bool:
        """Look again at whether a seat's worker lives; True if it is bad now."""
        machine, incarnation = self.seats[rank]
        well = (
            machine is not None
            and machine.up
            and not machine.cut
            and machine.worker == (self, rank, incarnation)
        )
        if well:
            self.bad.discard(rank)
        else:
            self.bad.add(rank)
        return not well

    def report(self, phase: Phase, rank: Rank, alike: str, now: float) -> SeatReport:
        """What a rank that is well says at the end of a phase."""
        if self.unborn:
            return SeatReport(rank, alike=alike)
        at = self.step_at(now)
        digests = {self.portion: f"{self.spec.job}@{at}"} if phase is not Phase.RESUME else {}
        return SeatReport(
            rank,
            at,
            True,
            digests,
            portions=(self.portion,) if phase is Phase.RESUME else (),
            entries=(at,),
            step=at,
            step_seconds=self.step_seconds,
            groups="all",
            alike=alike,
        )


def all_but(size: int, excluded: Collection[int]) -> str:
    """The name of all ranks but these; empty if none is left."""
    runs, first = [], 0
    for rank in (*sorted(excluded), size):
        if rank > first:
            runs.append(str(first) if rank == first + 1 else f"{first}-{rank - 1}")
        first = rank + 1
    return "+".join(runs)
