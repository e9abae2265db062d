"""A made-up job for tests of the account: its chain, as the journal writes it, and its step log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from keepstep.ledger import signing, verify
from keepstep.model import JobId, Term
from keepstep.orchestrator.journal import Entry, Link, grow, json_lines

JOB = "train"
WORLD = 4
SIGNER = signing.signer(bytes(range(32)))
STEP = 0.5


@dataclass
class Story:
    """Time goes on by itself; each verb writes what the orchestrator and rank 0 would write."""

    now: float = 1_000.0
    generation: int = 0
    step: int = 0
    term: int = 1
    incidents: int = 0
    spares: int = 1
    bodies: list[dict[str, Any]] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    seq: int = 0
    _heads: dict[str, tuple[int, str]] = field(default_factory=dict)
    _links: list[Link] = field(default_factory=list)
    _quoted: str = ""

    # ------------------------------------------------------------ what happens

    def begin(self, seconds: float = 3.0, **spec: Any) -> Story:
        submitted = {"spec": {"job": JOB, "nodes": WORLD, "ranks_per_node": 1, **spec}}
        self.entry("Submitted", submitted, state="waiting")
        self.generation += 1
        self.later(1.0).entry(
            "Hello", {}, state="starting", phase="resume", kind="start", cold=True
        )
        self.later(seconds)
        return self.entry("PhaseReport", self._report("resume"), state="running")

    def train(self, steps: int, **more: Any) -> Story:
        for _ in range(steps):
            self.later(STEP + sum(more.get("busy", {}).values()))
            self.line(**more)
        return self

    def fault(self, detection: float = 1.0, outcome: str = "resumed", **more: Any) -> Story:
        """A rank dies, and its seat is taken; every phase takes 0.2 s, and RESUME one step more."""
        self.later(detection)
        opened, self.incidents = self.now, self.incidents + 1
        told = {"incident": f"i{self.incidents}", "opened_at": opened, "causes": 1}
        moving = {"state": "migrating", "kind": more.get("kind", "unplanned"), **told}
        self.entry("Observed", {"sign": "exit"}, phase="allocate", **moving)
        self.later(0.2).entry("Tick", {}, phase="quiesce", **moving)
        self.generation += 1
        self.later(0.2).entry("PhaseReport", self._report("quiesce"), phase="reform", **moving)
        self.later(0.2).entry("PhaseReport", self._report("verify"), phase="resume", **moving)
        boundary = self.step
        self.later(0.2 + STEP).line().later(more.get("told_after", 0.0))
        causes = more.get("causes", [{"sign": "exit", "rank": 2, "node": "n2"}])
        closed = {
            "id": f"i{self.incidents}",
            "opened_at": opened,
            "closed_at": self.now,
            "outcome": outcome,
            "generation": self.generation,
            "boundary": boundary,
            "recoveries": 0,
            "seconds": more.get("seconds", {}),
            "causes": causes,
            "causes_count": len(causes),
        }
        return self.entry("PhaseReport", self._report("resume"), state="running", closed=closed)

    def end(self) -> Story:
        return self.later(0.1).entry("Observed", {"sign": "finished"}, state="finished")

    def later(self, seconds: float) -> Story:
        self.now = round(self.now + seconds, 6)
        return self

    # ------------------------------------------------------------ how it is written

    def entry(self, event_kind: str, event: Mapping[str, Any], **facts: Any) -> Story:
        standing = {
            "generation": self.generation,
            "step": self.step,
            "world": WORLD,
            "spares": self.spares,
            "ready": self.spares,
            "incidents": self.incidents,
        }
        body = {
            "event": {"kind": event_kind, "body": dict(event)},
            "jobs": {JOB: {**standing, **facts}},
            "now": self.now,
            "orders": [],
            "why": f"because of {event_kind}",
        }
        grown = grow(Term(self.term), self.seq, self._heads, [Entry((JobId(JOB),), body)])
        self._heads |= grown.heads
        self.seq = grown.seq
        number, hash_ = self._heads[JOB]
        self._links.append(Link(number, hash_, grown.entries[0][1]))
        return self

    def line(self, **more: Any) -> Story:
        head = self._heads[JOB][1]
        line = {
            "step": self.step,
            "generation": self.generation,
            "samples": [self.step * 8, self.step * 8 + 8],
            "digest": f"d{self.step}",
            "at": self.now,
            **more,
        }
        if head != self._quoted:
            line["head"] = self._quoted = head
        self.lines.append(line)
        self.step += 1
        return self

    def _report(self, phase: str) -> dict[str, Any]:
        seats = [
            {"rank": rank, "digests": {"": "abc"}, "moved_seconds": 0.1} for rank in range(WORLD)
        ]
        return {"phase": phase, "generation": self.generation, "seats": seats}

    # ------------------------------------------------------------ what is handed over

    def export(self, signer: signing.Signer = SIGNER) -> list[str]:
        lines = [line.rstrip("\n") for line in json_lines(self._links)]
        seal = signer.seal(JOB, len(self._links), self._links[-1].hash)
        return [*lines, seal.rstrip("\n")]

    def chain(self) -> verify.Chain:
        return verify.read_chain(self.export(), SIGNER.public)

    def step_log(self) -> list[str]:
        return [json.dumps(line) for line in self.lines]


def usual(faults: int = 3, steps: int = 12) -> Story:
    """Some training, some faults, a good end."""
    story = Story().begin().train(steps)
    for _ in range(faults):
        story.fault().train(steps)
    return story.end()
