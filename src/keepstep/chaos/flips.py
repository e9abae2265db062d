"""Flips at rest: a bit of a parameter, a moment, a buffer or a mirror's copy, between two steps.

    at_rest   each rank looks at every step (--check-steps 1): named before it is used, bit-exact
    compared  replicas compare every K steps: named within K steps, equal again, not bit-exact

A rank's own state is flipped by the workload, by address, so that torch sees no change; a mirror's
copy is a file on its node's tmpfs and is flipped from outside.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keepstep.chaos.faults import AT_REST, Fault, Mix
from keepstep.chaos.plans import Failpoints
from keepstep.chaos.sight import Sight
from keepstep.chaos.strike import Flip, Missed, Strike
from keepstep.cli.cluster import LocalCluster
from keepstep.errors import ConfigError
from keepstep.training.kept import CAPSULE_STEPS, Kept, kept_path

ANY_BITS = (0, 32)
UPPER_MANTISSA = (16, 23)
"""Of a float: what flips there is not lost in rounding before the next comparison, and does not
make the whole job's loss infinite. A bit that is lost in rounding is a fault that mended itself."""
HEAD_BYTES = 64
LATER_STEPS = 20
_CONTAMINATED = re.compile(r"steps (\d+) to (\d+) are contaminated")


def check(mix: Mix, every: int, holders: int) -> None:
    """Can flips be found like this? Raises ConfigError, which says the fix."""
    if every < 0 or (mix is Mix.FLIPS and not every):
        raise ConfigError("--mix flips takes --check-steps 1 or more: somebody has to look")
    if mix is not Mix.FLIPS and every > 1:
        raise ConfigError("beside other faults only --check-steps 1 keeps the run exact")
    if every > 1 and holders < 3:
        raise ConfigError(
            "with --check-steps 2 or more only three holders of the same state can tell whose is "
            "wrong: --parallel ddp and --world 3 or more, or --check-steps 1"
        )


class Flips:
    """Strikes at state that nobody uses at the moment."""

    def __init__(self, cluster: LocalCluster, sight: Sight, points: Failpoints) -> None:
        self._cluster = cluster
        self._sight = sight
        self._points = points

    def kinds(self) -> Mapping[str, Callable[[Fault], Strike]]:
        return {
            "flip_parameter": lambda fault: self._state(fault, "parameter"),
            "flip_moment": lambda fault: self._state(fault, "moment"),
            "flip_buffer": lambda fault: self._state(fault, "buffer"),
            "flip_mirror": self._mirror,
        }

    def _state(self, fault: Fault, what: str) -> Strike:
        bits = ANY_BITS if fault.cell.window == AT_REST else UPPER_MANTISSA
        seed = f"{fault.number}/{fault.delay_seconds}"
        # Else all would strike equally long after a comparison: the campaign waits for the last.
        at_step = self._sight.steps.newest.finished + random.Random(seed).randrange(LATER_STEPS)
        wanted = {"what": what, "seed": seed, "bits": bits, "at": at_step}
        place = self._place(fault.rank)
        point = self._points.arm(fault.rank, "rest", json.dumps(wanted))
        at = self._points.claimed(point)
        done = json.loads(point.with_name(point.name + ".hit").read_text())
        flip = Flip(fault.rank, place, int(done["step"]), str(done["name"]))
        return Strike(at, untaint=(place,), flip=flip)

    def _mirror(self, fault: Fault) -> Strike:
        job = self._sight.job_now()
        mirror = (fault.rank + int(job["mirror_stride"])) % int(job["world"])
        room = self._cluster.room(str(job["seats"][mirror]["node"])) / str(job["id"])
        kept = Kept(kept_path(room, fault.rank))
        reach = kept.reach()
        if reach is None:
            raise Missed(f"rank {mirror} keeps nothing of rank {fault.rank}")
        chance = random.Random(f"{fault.number}/{fault.delay_seconds}")
        # The newest record and the newest capsule: older ones may not be needed any more when
        # they are looked at, and then nobody has to find it.
        boundary, grown = kept.newest()
        record = kept.record(reach[1] - 1)
        raw, what = grown, f"boundary {boundary}"
        if record is not None and (len(grown) <= HEAD_BYTES or chance.random() < 0.5):
            raw, what = record, f"step {reach[1] - 1}"
        at = time.monotonic()
        # Behind the numbers that say where a piece was to go, which nobody reads again.
        raw[chance.randrange(HEAD_BYTES, len(raw))] ^= 1 << chance.randrange(8)
        place = self._place(mirror)
        named = f"cover of rank {fault.rank}: {what}"
        flip = Flip(mirror, place, reach[1], named, steps_max=2 * CAPSULE_STEPS)
        return Strike(at, untaint=(place,), flip=flip)

    def _place(self, rank: int) -> str:
        seat = self._sight.job_now()["seats"][rank]
        return f"{seat['node']}/{seat['slot']}"


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of a flip."""

    problem: str
    """Empty: found in time, and the right one named."""
    steps: int | None = None
    """From the flip to the boundary at which it was named."""


def judge(
    flip: Flip, incidents: Sequence[Mapping[str, Any]], seen: Mapping[str, Any], every: int
) -> Finding:
    """Was it found, in time, and the right rank named? Pure."""
    if len(incidents) != 1:
        return Finding(f"one flip became {len(incidents)} incidents")
    causes = [c for c in incidents[0]["causes"] if c["sign"] == "corrupt"]
    if not causes:
        return Finding("nobody said that any state is corrupt")
    cause = causes[0]
    detail, steps = str(cause["detail"]), int(cause["step"]) - flip.step
    if cause["rank"] != flip.rank:
        return Finding(f"rank {cause['rank']} was named, and it was rank {flip.rank}", steps)
    limit = flip.steps_max if every == 1 else every
    if not 0 <= steps <= limit:
        return Finding(f"found after {steps} steps, more than {limit}", steps)
    if every == 1 and flip.name not in detail:
        return Finding(f"{flip.name} was flipped, and what was named is: {detail}", steps)
    told = _CONTAMINATED.search(detail)
    # The flip at this boundary was in use from the step of the same number on.
    used = range(flip.step, int(cause["step"]))
    if every > 1 and (told is None or not _within(used, int(told[1]), int(told[2]))):
        return Finding(f"steps {used} used it, and told is: {detail}", steps)
    if flip.place not in [taint["place"] for taint in seen.get("taints", ())]:
        return Finding(f"{flip.place} held corrupt state and is not tainted", steps)
    return Finding("", steps)


def _within(steps: range, first: int, last: int) -> bool:
    return all(first <= step <= last for step in steps)
