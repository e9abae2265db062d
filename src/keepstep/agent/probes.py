"""The probe halves of the detectors, twice a second: pages, process states, output.

Reading needs nothing of the workers: pages are shared memory and process states come from /proc.
What the readings mean is judged in keepstep.detect, which is pure.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from keepstep import wire
from keepstep.agent import log
from keepstep.agent.room import Room
from keepstep.agent.tee import Tee
from keepstep.agent.workers import Worker, Workers, open_page
from keepstep.detect import hang, process
from keepstep.model import Generation, JobId, Rank
from keepstep.page import TRAINING, Progress

PROBE_SECONDS = 0.5
"""Deaths are seen at once, by their pidfd; a hang is judged over seconds, and the look that finds
it comes when the patience ends. Each look takes time from a rank where all cores are busy."""
TEE_SECONDS = 0.25
"""Between two looks at output that somebody reads along."""
LOOK_SECONDS_MIN = 0.02
HEARTBEAT_SECONDS = 0.5
"""Until the orchestrator says otherwise; in a large cluster it wants to hear less."""
HEARTBEAT_SECONDS_MAX = 5.0
STALLED_AGAIN_SECONDS = 0.5


@dataclass(slots=True)
class _JobWatch:
    watches: Mapping[int, hang.Watch] = field(default_factory=dict)
    told_at: float = float("-inf")


class Probes:
    """Reads all local workers and tells the orchestrator what it sees."""

    def __init__(
        self, room: Room, workers: Workers, tee: Tee, send: Callable[[wire.Message], object]
    ) -> None:
        self._room = room
        self._workers = workers
        self._tee = tee
        self._send = send
        self._jobs: dict[JobId, _JobWatch] = {}
        self._heads: dict[str, str] = {}
        self._beat_seconds = HEARTBEAT_SECONDS
        self._counted: dict[tuple[JobId, Rank], int] = {}
        """Whose page was read for a rank: it has two workers here while it moves."""

    async def run(self) -> None:
        """Probe for ever. A loop that comes late has not seen the workers stand still."""
        due = time.monotonic()
        heartbeat_due = due
        while True:
            now = time.monotonic()
            if late := hang.lateness(due, now):
                log.warning("probe.late", seconds=round(late, 3))
                for job in self._jobs.values():
                    job.watches = hang.discount(job.watches, late)
            readings = self._read()
            ends = self._judge(readings, now)
            if now >= heartbeat_due:
                self._send(self._heartbeat(readings))
                heartbeat_due = now + 0.9 * self._beat_seconds
            due = min(now + PROBE_SECONDS, max(ends, now + LOOK_SECONDS_MIN))
            await self._doze(due)

    async def _doze(self, due: float) -> None:
        """Until the next look; output that is read along does not wait for it."""
        while True:
            self._tee.pump()
            left = due - time.monotonic()
            if left <= 0:
                return
            await asyncio.sleep(min(left, TEE_SECONDS) if self._tee.following else left)

    def set_pace(self, seconds: float) -> None:
        """How often to send a heartbeat."""
        self._beat_seconds = min(max(seconds, HEARTBEAT_SECONDS), HEARTBEAT_SECONDS_MAX)

    def set_heads(self, heads: Mapping[str, str]) -> None:
        """Lend the journal's heads to the pages, for the jobs' own step logs."""
        self._heads = dict(heads)
        for worker in self._workers:
            self._lend_head(worker)

    def _lend_head(self, worker: Worker) -> None:
        head = self._heads.get(worker.record.job, "")
        if worker.page is not None and head and worker.page.head() != head:
            worker.page.set_head(head)

    def _read(self) -> dict[JobId, dict[int, Progress]]:
        readings: dict[JobId, dict[int, Progress]] = {}
        self._counted.clear()
        for worker in self._workers:
            record = worker.record
            if worker.is_standby or not worker.is_alive:
                continue
            of_job = readings.setdefault(record.job, {})
            if worker.page is None:
                room = self._room.job_room(record.job)
                worker.page = open_page(room, record.rank, record.incarnation)
                self._lend_head(worker)
            if worker.page is not None:
                try:
                    reading = worker.page.read()
                except ValueError:
                    # A page that is no page: whoever wrote it is not to be judged by it.
                    continue
                # A rank that moves within this node has two workers: the one that trains counts.
                if record.rank not in of_job or reading.mark in TRAINING:
                    of_job[record.rank] = reading
                    self._counted[record.job, record.rank] = record.incarnation
        return readings

    def _judge(self, readings: dict[JobId, dict[int, Progress]], now: float) -> float:
        """Tell of those who stand still; when the patience with the next one ends."""
        ends = float("inf")
        for gone in self._jobs.keys() - readings.keys():
            del self._jobs[gone]
        for job, of_job in readings.items():
            record = self._room.jobs.get(job)
            if record is None:
                continue
            watch = self._jobs.setdefault(job, _JobWatch())
            verdict = hang.judge(watch.watches, of_job, now, record.spec.policy)
            watch.watches = verdict.watches
            ends = min(ends, verdict.due)
            if verdict.stalls and now - watch.told_at >= STALLED_AGAIN_SECONDS:
                watch.told_at = now
                log.warning("job.stalled", job=job, why=verdict.stalls[0].why)
                self._send(self._stalled(job, verdict.stalls, of_job))
        return ends

    def _stalled(
        self, job: JobId, stalls: tuple[hang.Stall, ...], of_job: dict[int, Progress]
    ) -> wire.Stalled:
        facts = []
        for worker in self._workers.seated(job):
            record = worker.record
            if not any(stall.rank == record.rank for stall in stalls):
                continue
            reading = of_job[record.rank]
            if self._counted[job, record.rank] != record.incarnation:
                # The rank's other worker, which does not train.
                continue
            stopped = process.life(record.pid, record.start) is process.Life.STOPPED
            facts.append(
                wire.StallFact(
                    rank=record.rank,
                    incarnation=record.incarnation,
                    step=reading.step,
                    launched=reading.launched,
                    stopped=stopped,
                )
            )
        return wire.Stalled(
            node=self._workers.node,
            job=job,
            generation=Generation(max(of_job[stall.rank].generation for stall in stalls)),
            ranks=tuple(facts),
            seconds=max(stall.seconds for stall in stalls),
        )

    def _heartbeat(self, readings: dict[JobId, dict[int, Progress]]) -> wire.Heartbeat:
        pulses = [
            pulse_of(job, list(of_job.values()))
            for job, of_job in sorted(readings.items())
            if of_job
        ]
        return wire.Heartbeat(self._workers.node, tuple(pulses))


def pulse_of(job: JobId, readings: list[Progress]) -> wire.JobPulse:
    """How a job fares on this node: the furthest rank's step, the middle rank's pace."""
    return wire.JobPulse(
        job=job,
        generation=Generation(max(reading.generation for reading in readings)),
        step=max(reading.step for reading in readings),
        committed=max(reading.committed for reading in readings),
        step_seconds=statistics.median(reading.step_ns for reading in readings) / 1e9,
        busy=next((reading.busy for reading in readings if reading.busy), ""),
    )
