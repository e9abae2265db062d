"""Who is silent, judged purely: last words and `now` in, names out. Nothing here is ever stored.

A node is silent when nothing was heard of it for long enough. If our own loop was late, the silence
may be ours: every deadline moves back by as much. Many that fall silent at once are told at once,
too, with their number: the brain puts that down to ourselves, and has to hear of it in time
(suspicion.py).

How long is long enough may differ from node to node (patience.py), and so does how often they are
asked to speak.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from keepstep.model import Generation, JobId, NodeId
from keepstep.orchestrator.patience import Patience
from keepstep.wire import Heartbeat, JobPulse

BEAT_SECONDS_MIN = 0.5
BEATS_PER_SECOND_MAX = 2000
"""A quarter of what one core takes in, with TLS: the rest of it is for what happens."""
BEATS_PER_SILENCE = 2.3
"""Heartbeats that a node may send before it counts as silent: two may be late, never the third."""
QUIET_BEATS = 2
"""A node that has missed so many is looked at more often."""
QUIET_LOOK_SECONDS = 0.25
LOOKS_PER_SECOND_MAX = 5_000
"""At quiet nodes, of 10 microseconds each."""

VOUCH_STEPS = 3
"""So far ahead a rank gets only with contributions that all others made meanwhile: one step may
have been under way, and the contribution to the next one sent."""
UNWATCHED_SECONDS_MAX = 60.0
"""How long ranks may train on a node whose agent is not heard: nobody there would see them fail."""

Progress = tuple[Generation, int]


@dataclass(slots=True)
class Witness:
    """What the steps of jobs say about nodes whose agents say nothing. Never stored."""

    progress: dict[JobId, Progress] = field(default_factory=dict)
    """The furthest that any node told of."""
    _since: dict[NodeId, dict[JobId, Progress]] = field(default_factory=dict)
    """How far the jobs of a quiet node were when it was last known to be well."""

    def hear(self, pulse: JobPulse) -> None:
        if pulse.committed < 0:
            # A worker that waits to join says nothing about the steps of its generation.
            return
        known = self.progress.get(pulse.job, (Generation(-1), -1))
        self.progress[pulse.job] = max(known, (pulse.generation, pulse.step))

    def forget_others(self, jobs: Iterable[JobId]) -> None:
        """Only these jobs are still open."""
        self.progress = {job: self.progress[job] for job in jobs if job in self.progress}

    def vouches(self, quiet: Mapping[NodeId, Iterable[JobId]]) -> tuple[NodeId, ...]:
        """Of the quiet nodes (and the jobs with ranks there), those that must still be training."""
        self._since = {node: since for node, since in self._since.items() if node in quiet}
        found = []
        for node, jobs in quiet.items():
            since = self._since.setdefault(node, {})
            moved = [job for job in jobs if self._moved(since, job)]
            since.update((job, self.progress[job]) for job in moved)
            if moved:
                found.append(node)
        return tuple(found)

    def _moved(self, since: dict[JobId, Progress], job: JobId) -> bool:
        far = self.progress.get(job)
        if far is None:
            return False
        generation, step = since.setdefault(job, far)
        if far[0] != generation:
            # A new generation may have been formed without that node: it proves nothing yet.
            since[job] = far
            return False
        return far[1] >= step + VOUCH_STEPS


@dataclass(slots=True)
class Liveness:
    """Who was heard when, on the loop's monotonic clock."""

    last_heard: dict[NodeId, float] = field(default_factory=dict)
    heartbeats: dict[NodeId, Heartbeat] = field(default_factory=dict)
    witness: Witness = field(default_factory=Witness)
    vouched: dict[NodeId, float] = field(default_factory=dict)
    hastened: dict[NodeId, float] = field(default_factory=dict)
    """Since when nodes have been told to speak more often than the others."""
    _look_at: float = 0.0
    """When quiet nodes are looked at again."""

    def jobs_on(self, node: NodeId) -> tuple[JobId, ...]:
        """By its last heartbeat."""
        beat = self.heartbeats.get(node)
        return tuple(pulse.job for pulse in beat.jobs) if beat else ()

    def expect(self, nodes: Iterable[NodeId], until: float) -> None:
        """They and all others have to find us: as if they were heard a little later."""
        self.last_heard = dict.fromkeys((*self.last_heard, *nodes), until)

    def forgive(self, seconds: float, now: float) -> None:
        """Our own loop was late by so much."""
        heard = self.last_heard.items()
        self.last_heard = {node: max(at, min(now, at + seconds)) for node, at in heard}

    def fall_silent(self, now: float, patience: Patience) -> list[tuple[NodeId, float, int]]:
        """Who is silent by now: since when, and how many others are to be told of, with them or
        soon. Nobody waits for their words any more."""
        silent = self._silent(now, patience)
        crowd = 0
        if silent:
            number = len(self.last_heard)
            soon = self._overdue(now, patience, lambda limit: limit - beat_seconds(number, limit))
            crowd = len(soon) - 1
            if any(patience.of(node) < patience.usual for node in silent):
                # Who is judged sooner than others must not be alone for that: if it is our own
                # fault, they have missed their heartbeats as well, and are not due yet.
                crowd = max(crowd, len(self.quiet(now, patience).union(silent)) - 1)
        found = [
            (node, now - self.last_heard.pop(node), crowd - told)
            for told, node in enumerate(silent)
        ]
        for node in silent:
            self.heartbeats.pop(node, None)
            self.hastened.pop(node, None)
        return found

    def quiet(self, now: float, patience: Patience) -> set[NodeId]:
        """Nodes that have missed a heartbeat or two. Where those come slowly, one that is late:
        jobs need time to vouch for them."""
        number = len(self.last_heard)

        def late(limit: float) -> float:
            beat = beat_seconds(number, limit)
            return min(QUIET_BEATS * beat, beat + BEAT_SECONDS_MIN)

        return set(self._overdue(now, patience, late))

    def paces(self, patience: Patience, now: float) -> Callable[[NodeId], float]:
        """How often a node is to speak, if it is told so now."""
        number = len(self.last_heard)
        usual = beat_seconds(number, patience.usual)

        def pace(node: NodeId) -> float:
            own = beat_seconds(number, patience.of(node))
            if own < usual:
                self.hastened.setdefault(node, now)
            else:
                self.hastened.pop(node, None)
            return own

        if patience.alike:
            self.hastened.clear()
            return lambda node: usual
        return pace

    def _silent(self, now: float, patience: Patience) -> tuple[NodeId, ...]:
        """The nodes to give up, in the order in which they fell silent."""
        quiet = self._overdue(now, patience, lambda limit: limit)
        if self.vouched:
            known = {node: last_known(at, self.vouched.get(node)) for node, at in quiet.items()}
            quiet = {
                node: at
                for node, at in known.items()
                if now - at > self._limit(node, patience, now)
            }
        return tuple(sorted(quiet, key=lambda node: (quiet[node], node)))

    def _overdue(
        self, now: float, patience: Patience, after: Callable[[float], float]
    ) -> dict[NodeId, float]:
        """Who was last heard longer ago than `after` makes of its limit, and when. The higher the
        limit, the higher what `after` makes of it: who is in time by the shortest is in time."""
        least = after(patience.shortest)
        late = {node: heard for node, heard in self.last_heard.items() if now - heard > least}
        if patience.alike:
            return late
        most = after(patience.usual)
        return {
            node: heard
            for node, heard in late.items()
            if now - heard > most or now - heard > after(self._limit(node, patience, now))
        }

    def _limit(self, node: NodeId, patience: Patience, now: float) -> float:
        """How long this node may say nothing. Where it has to speak more often for that than the
        others, it has to be told first, and to have spoken since."""
        own, number = patience.of(node), len(self.last_heard)
        if own == patience.usual:
            return own
        if beat_seconds(number, own) < beat_seconds(number, patience.usual):
            since = self.hastened.get(node, now)
            return own if now >= since + patience.usual else patience.usual
        return own

    def asks_jobs(self, open_jobs: Iterable[JobId], quiet: Collection[NodeId], now: float) -> bool:
        """Whether to ask the jobs' steps about quiet nodes: not too often, if there are thousands.
        What was vouched for others is forgotten."""
        if now < self._look_at:
            return False
        self._look_at = now + len(quiet) / LOOKS_PER_SECOND_MAX
        self.witness.forget_others(open_jobs)
        self.vouched = {node: at for node, at in self.vouched.items() if node in quiet}
        return bool(self.witness.progress)

    def vouch(self, quiet: Mapping[NodeId, Iterable[JobId]], now: float) -> tuple[NodeId, ...]:
        """Of the quiet nodes (and the jobs with ranks there), those that must still be training."""
        found = self.witness.vouches(quiet)
        self.vouched.update(dict.fromkeys(found, now))
        return found

    def hear(self, beat: Heartbeat, now: float) -> None:
        self.last_heard[beat.node] = now
        self.heartbeats[beat.node] = beat
        for pulse in beat.jobs:
            self.witness.hear(pulse)


def beat_seconds(nodes: int, silent_seconds_max: float) -> float:
    """How often agents should speak: often, as long as there are not too many of them."""
    wanted = max(BEAT_SECONDS_MIN, nodes / BEATS_PER_SECOND_MAX)
    return min(wanted, silent_seconds_max / BEATS_PER_SILENCE)


def look_seconds(quiet: Collection[NodeId]) -> float:
    """How soon to look again: where thousands are quiet at once, a look at each costs time."""
    return max(QUIET_LOOK_SECONDS, len(quiet) / LOOKS_PER_SECOND_MAX)


def last_known(heard: float, vouched: float | None) -> float:
    """When a node was last known to be well: by its own word, or for a while by a job's steps."""
    return heard if vouched is None else max(heard, min(vouched, heard + UNWATCHED_SECONDS_MAX))


def own_lateness(due: float, now: float, late_seconds_max: float) -> float:
    """By how much to push the deadlines back: nothing for ordinary jitter, else all of it."""
    late = now - due
    return late if late > late_seconds_max else 0.0
