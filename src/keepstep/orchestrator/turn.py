"""One turn of the brain: where its parts leave the orders and the sentences of this step.

Orders have ids made of what they say (job, generation, verb, whom), so telling the same thing
again carries the same id, in a replay as after a change of leader.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from keepstep.model import Generation, JobId, NodeId, OrderId
from keepstep.orchestrator.state import STORY_LINES_MAX, Cluster, Job, Line
from keepstep.wire import Action, Order, PhaseReport, Published


@dataclass(frozen=True, slots=True)
class Note:
    """One transition and its reason: the sentence that log, API, page and journal show."""

    why: str
    job: JobId = JobId("")
    incident: str = ""
    phase: str = ""


class Turn:
    """What one event leads to. Lives for one step."""

    __slots__ = ("answers", "cluster", "counted", "ignored", "notes", "now", "orders", "touched")

    def __init__(self, cluster: Cluster, now: float) -> None:
        self.cluster = cluster
        self.now = now
        self.orders: list[Order] = []
        self.notes: list[Note] = []
        self.answers: list[tuple[NodeId, Published]] = []
        self.counted: list[PhaseReport] = []  # Of several that came together.
        self.ignored = ""
        self.touched = False

    @property
    def why(self) -> str:
        """What happened, in one line; or why nothing did."""
        told = "; ".join(note.why for note in self.notes)
        return told or ("" if self.counted else self.ignored)

    def order(
        self,
        job: Job,
        name: str,
        nodes: Iterable[NodeId],
        action: Action,
        generation: Generation | None = None,
    ) -> None:
        """Send an action to nodes; nodes without a stream get it again with their Hello."""
        told = tuple(nodes)
        if not told:
            return
        number = job.generation if generation is None else generation
        order_id = OrderId(f"{job.spec.job}/g{number}/{name}")
        self.orders.append(Order(self.cluster.term, number, order_id, job.spec.job, told, action))

    def note(self, why: str, job: Job | None = None) -> None:
        """Record a transition; it also becomes a line of the open incident's story."""
        self.touched = True
        if job is None:
            self.notes.append(Note(why))
            return
        phase = job.migration.phase.value if job.migration else job.state.value
        incident = job.incident
        self.notes.append(Note(why, job.spec.job, incident.incident if incident else "", phase))
        if incident and len(incident.story) < STORY_LINES_MAX:
            incident.story = (*incident.story, Line(self.now, phase, why))

    def ignore(self, why: str) -> None:
        """Late and duplicate events are ordinary: nothing changes, and the reason is told."""
        self.ignored = why
