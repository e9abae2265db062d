"""Many ranks, one report: what local workers say about a phase becomes one message per node.

A report leaves as soon as all local ranks have spoken, or 50 ms after the first with those who
have; the rest follow in a later one, which repeats the earlier seats (the orchestrator merges by
rank). Only the newest generation of a job is kept. Nothing here does I/O, and `now` is a parameter.

Ranks of which the same is true are named in one word as they leave: an orchestrator hears of
thousands in each phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from keepstep import portion
from keepstep.model import Generation, JobId, NodeId, Phase, Rank
from keepstep.wire import PhaseReport, SeatReport, WorkerReport

GATHER_SECONDS_MAX = 0.05
"""How long the first rank's report waits for its neighbours."""
JOINED = frozenset({Phase.QUIESCE, Phase.VERIFY, Phase.RESUME})
"""The phases in which all ranks of a job report, most of them the same."""


@dataclass(slots=True)
class _Gathering:
    seats: dict[Rank, SeatReport] = field(default_factory=dict)
    waiting_since: float | None = None
    """When the oldest report that has not left came in."""


class Reports:
    """The phase reports of one node."""

    def __init__(self, node: NodeId) -> None:
        self._node = node
        self._generation: dict[JobId, Generation] = {}
        self._gatherings: dict[tuple[JobId, Phase], _Gathering] = {}
        self._last: dict[tuple[JobId, Rank], Phase] = {}

    def heard(self, report: WorkerReport, now: float) -> str:
        """Take one rank's report; says what became of it."""
        job, rank = report.job, report.seat.rank
        newest = self._generation.get(job)
        if newest is not None and report.generation < newest:
            return f"report of generation {report.generation} ignored; {newest} is the newest"
        if newest is None or report.generation > newest:
            self.forget_job(job)
            self._generation[job] = report.generation
        self._last[job, rank] = report.phase
        gathering = self._gatherings.setdefault((job, report.phase), _Gathering())
        if gathering.seats.get(rank) == report.seat:
            return "repeated"
        gathering.seats[rank] = report.seat
        if gathering.waiting_since is None:
            gathering.waiting_since = now
        return "gathered"

    def due(self, local: Mapping[JobId, Set[Rank]], now: float) -> list[PhaseReport]:
        """The reports that must leave now. `local` names the ranks that live on this node."""
        leaving: list[PhaseReport] = []
        for (job, phase), gathering in self._gatherings.items():
            since = gathering.waiting_since
            if since is None:
                continue
            complete = local.get(job, frozenset()) <= gathering.seats.keys()
            if complete or now >= since + GATHER_SECONDS_MAX:
                gathering.waiting_since = None
                leaving.append(self._report(job, phase))
        return leaving

    def next_due(self) -> float | None:
        """When `due` should be asked again."""
        waiting = [
            g.waiting_since for g in self._gatherings.values() if g.waiting_since is not None
        ]
        return min(waiting) + GATHER_SECONDS_MAX if waiting else None

    def standing(self, job: JobId | None = None) -> list[PhaseReport]:
        """The last word of each rank, again: after a reconnect, or for a repeated order."""
        wanted = {
            (of_job, phase)
            for (of_job, _), phase in self._last.items()
            if job is None or of_job == job
        }
        return [self._report(of_job, phase) for of_job, phase in sorted(wanted)]

    def forget_rank(self, job: JobId, rank: Rank) -> None:
        """The rank's worker is gone: what it said holds no longer."""
        self._last.pop((job, rank), None)
        for (of_job, _), gathering in self._gatherings.items():
            if of_job == job:
                gathering.seats.pop(rank, None)
                if not gathering.seats:
                    gathering.waiting_since = None

    def forget_job(self, job: JobId) -> None:
        self._generation.pop(job, None)
        for key in [key for key in self._gatherings if key[0] == job]:
            del self._gatherings[key]
        for last in [last for last in self._last if last[0] == job]:
            del self._last[last]

    def _report(self, job: JobId, phase: Phase) -> PhaseReport:
        seats = self._gatherings[job, phase].seats
        return PhaseReport(
            node=self._node,
            job=job,
            generation=self._generation[job],
            phase=phase,
            seats=tuple(seats[rank] for rank in sorted(seats)),
        )


def joined(report: PhaseReport) -> PhaseReport:
    """The same report, with one seat for all ranks of which the same is true."""
    if report.phase not in JOINED or len(report.seats) < 2:
        return report
    groups: list[tuple[SeatReport, list[SeatReport]]] = []
    for seat in report.seats:
        # Times differ a little, and nobody needs more than the longest.
        common = replace(seat, rank=Rank(-1), step_seconds=0.0)
        known = next((group for same, group in groups if same == common), None)
        if known is not None and _plain(seat, report.phase):
            known.append(seat)
        else:
            groups.append((common, [seat]))
    return replace(report, seats=tuple(_one(group) for _, group in groups))


def _plain(seat: SeatReport, phase: Phase) -> bool:
    """Only what is well can be alike; a joiner without state speaks for itself, too. Who has
    resumed is whole, and does not say so."""
    own = seat.problem or seat.covers or seat.busy_seconds or seat.unsynced or seat.alike
    own = own or seat.moved_bytes
    whole = seat.boundary >= 0 and (seat.intact or phase is Phase.RESUME)
    return whole and not (own or seat.ready or seat.unsettled)


def _one(group: list[SeatReport]) -> SeatReport:
    if len(group) == 1:
        return group[0]
    longest = max(seat.step_seconds for seat in group)
    return replace(group[0], step_seconds=longest, alike=portion.name_of(s.rank for s in group))
