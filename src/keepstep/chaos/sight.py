"""What a campaign sees of a job: the orchestrator's picture, the nodes' rooms, and the step stream.

The step stream is read from the workers' pages in shared memory by a thread of its own, so that a
pause is measured where it happens and does not depend on anybody's report. It must never disturb
the job: it reads a few dozen bytes every few milliseconds and writes nothing.
"""

from __future__ import annotations

import itertools
import json
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.cli.cluster import LocalCluster, find_job
from keepstep.errors import Permanent, Transient
from keepstep.page import Mark, Page

LOOK_SECONDS = 0.004
SEARCH_SECONDS = 0.02
"""How often new pages are looked for: a joiner makes its page well before its first step."""
BEATS_MAX = 50_000


@dataclass(frozen=True, slots=True)
class Beat:
    """The job moved on: somebody finished a step, or a new generation began to train."""

    at: float
    """On our monotonic clock."""
    generation: int
    finished: int
    """Steps finished by the furthest rank of that generation."""


@dataclass(frozen=True, slots=True)
class Occupied:
    """A process on a node, out of its agent's own records."""

    pid: int
    rank: int
    incarnation: int
    slot: int


class StepStream:
    """Samples the pages of one job, in a thread, until it is closed."""

    def __init__(self, rooms: Path, job: str) -> None:
        self._rooms = rooms
        self._job = job
        self._pages: dict[Path, Page] = {}
        self._beats: deque[Beat] = deque(maxlen=BEATS_MAX)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="keepstep-steps", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(2.0)

    def beats(self, since: float = 0.0) -> list[Beat]:
        return [beat for beat in list(self._beats) if beat.at >= since]

    @property
    def newest(self) -> Beat:
        return self._beats[-1] if self._beats else Beat(0.0, 0, 0)

    def first_finish(self, generation: int, boundary: int) -> float | None:
        """When the step at this boundary was first finished in a generation after this one."""
        for beat in list(self._beats):
            if beat.generation > generation and beat.finished > boundary:
                return beat.at
        return None

    def gap(self, since: float, until: float) -> float:
        """The longest time without a finished step in this span."""
        before = [beat.at for beat in list(self._beats) if beat.at < since][-1:]
        times = [*before, *(b.at for b in list(self._beats) if since <= b.at <= until), until]
        return max((late - early for early, late in itertools.pairwise(times)), default=0.0)

    def _watch(self) -> None:
        search_due = 0.0
        while not self._closed.wait(LOOK_SECONDS):
            now = time.monotonic()
            if now >= search_due:
                search_due = now + SEARCH_SECONDS
                self._search()
            beat = self._look(now)
            last = self.newest
            if (beat.generation, beat.finished) > (last.generation, last.finished):
                self._beats.append(beat)

    def _search(self) -> None:
        try:
            found = set(self._rooms.glob(f"*/{self._job}/seat-*.page"))
        except FileNotFoundError:
            return  # A node was lost, with its room, while we looked: look again.
        for path in self._pages.keys() - found:
            del self._pages[path]
        for path in found - self._pages.keys():
            try:
                self._pages[path] = Page(path)
            except (OSError, ValueError, Permanent):
                # It is being made, or just went with its node.
                continue

    def _look(self, now: float) -> Beat:
        newest = (0, 0)
        for page in self._pages.values():
            try:
                reading = page.read()
            except (ValueError, struct.error):
                continue
            applied = reading.mark is Mark.APPLIED
            newest = max(newest, (reading.generation, reading.step + (1 if applied else 0)))
        return Beat(now, *newest)


class Sight:
    """One job on one cluster."""

    def __init__(self, cluster: LocalCluster, job: str) -> None:
        self._cluster = cluster
        self._job = job
        self.steps = StepStream(cluster.room("x").parent, job)

    def close(self) -> None:
        self.steps.close()

    def picture(self) -> dict[str, Any] | None:
        """The cluster's picture; None while the orchestrator does not answer."""
        try:
            return self._cluster.client.cluster()
        except Transient:
            return None

    def job(self) -> dict[str, Any] | None:
        picture = self.picture()
        return None if picture is None else find_job(picture, self._job)

    def job_now(self, seconds_max: float = 30.0) -> dict[str, Any]:
        """The job's view, as soon as somebody answers."""
        deadline = time.monotonic() + seconds_max
        while True:
            found = self.job()
            if found is not None:
                return found
            if time.monotonic() > deadline:
                raise Permanent(f"nobody told of job {self._job} within {seconds_max:.0f} s")
            time.sleep(0.02)

    def node_of(self, rank: int) -> str:
        return str(self.job_now()["seats"][rank]["node"])

    def pid_of(self, rank: int) -> int:
        """The process that has this rank's seat now."""
        seat = self.job_now()["seats"][rank]
        for user in self.processes(str(seat["node"])):
            if (user.rank, user.incarnation) == (rank, seat["incarnation"]):
                return user.pid
        raise Permanent(f"no process of rank {rank} is recorded on {seat['node']}")

    def processes(self, node: str) -> list[Occupied]:
        """Workers and standbys (rank -1) that the node's agent knows."""
        return [
            Occupied(int(w["pid"]), int(w["rank"]), int(w["incarnation"]), int(w["slot"]))
            for w in self._agent_state(node).get("workers", ())
            if w["job"] == self._job
        ]

    def server_of(self, node: str, what: str) -> int:
        """The pid of a node's `preload` server or `store`."""
        record = self._agent_state(node).get(what)
        if not record:
            raise Permanent(f"{node} has no {what} process on record")
        return int(record["pid"])

    def _agent_state(self, node: str) -> dict[str, Any]:
        try:
            text = (self._cluster.room(node) / "agent-state.json").read_text(encoding="utf-8")
        except OSError:
            return {}
        plain = json.loads(text)
        return plain if isinstance(plain, dict) else {}
