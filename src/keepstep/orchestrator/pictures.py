"""The cluster, or a job, as an answer: made once for all who ask before anything changes.

In the largest clusters a picture takes the better part of a second. Whoever has changed something,
or waits for a change, must see it: so one is kept until the next decision or the next agent that
comes or goes, however soon that is. What changes without a decision (pulses) is shown a moment
old, as on the board. A project's picture is its own: what it may not see is not in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from keepstep import codec
from keepstep.orchestrator import view
from keepstep.orchestrator.access import Sight
from keepstep.orchestrator.run import Orchestrator
from keepstep.orchestrator.state import Job
from keepstep.orchestrator.watching import BOARD_SECONDS_MIN, BOARD_SHARE_MAX

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Picture:
    """As it is sent, and where each of its parts is in it: a part is not written twice."""

    whole: bytes
    spans: Mapping[str, slice]

    def part(self, name: str) -> bytes:
        return b'{"%s":%s}\n' % (name.encode(), self.whole[self.spans[name]])


class Pictures:
    """The newest picture of each project, and of each job, that somebody has asked for."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._seq, self._connected = -1, 0
        self._until = float("-inf")
        self._made: dict[tuple[str, str], Any] = {}
        self._plain: dict[str, Any] | None = None

    def of(self, sight: Sight) -> Picture:
        """The whole cluster, as far as it is seen."""
        connected = hash(frozenset(self._orchestrator.connected))
        if connected != self._connected:
            self._connected, self._until = connected, float("-inf")
        return self._shared((sight.project, ""), lambda: self._picture(sight))

    def job(self, sight: Sight, job: Job) -> bytes:
        """One job: after each decision the launchers of all its nodes ask for it at once."""
        return self._shared((sight.project, job.spec.job), lambda: self._job(sight, job))

    def _shared(self, key: tuple[str, str], make: Callable[[], T]) -> T:
        here = self._orchestrator
        seq = here.history[-1]["seq"] if here.history else 0
        if seq != self._seq or here.now() >= self._until:
            # All of them: what nobody asks for any more does not stay.
            self._made, self._plain, self._seq = {}, None, seq
            self._until = here.now() + BOARD_SECONDS_MIN
        if key not in self._made:
            began = time.thread_time()
            self._made[key] = make()
            seconds = time.thread_time() - began
            self._until = max(self._until, here.now() + seconds / BOARD_SHARE_MAX)
        made: T = self._made[key]
        return made

    def _picture(self, sight: Sight) -> Picture:
        plain = self._plain or self._orchestrator.picture()
        if not sight.all:
            # Each project's is a part of it. Where there are none, the text alone is kept.
            self._plain = plain
        return encoded(sight.picture(plain))

    def _job(self, sight: Sight, job: Job) -> bytes:
        plain = view.job_view(self._orchestrator.cluster, job, self._orchestrator.now())
        return codec.dumps(sight.cleaned(plain)) + b"\n"


def encoded(plain: Mapping[str, Any]) -> Picture:
    """The same bytes as codec.dumps gives, part by part."""
    pieces, at = [b"{"], 1
    spans: dict[str, slice] = {}
    for name in sorted(plain):
        lead = b'%s"%s":' % (b"," if spans else b"", name.encode())
        body = codec.dumps(plain[name])
        spans[name] = slice(at + len(lead), at + len(lead) + len(body))
        pieces += (lead, body)
        at = spans[name].stop
    return Picture(b"".join((*pieces, b"}\n")), spans)
