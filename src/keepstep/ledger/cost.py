"""What faults cost a cluster, and what protection saves of it: arithmetic on a few numbers. Pure.

    a fault without Keepstep   half a checkpoint interval is computed again, then the job waits for
                               a replacement, a restore and its start
    a fault with Keepstep      a pause; `live` of all faults end that way, the others as above

Time that all devices lose to one fault is multiplied by price and by faults per month. Failures are
taken to come independently of each other (a Poisson process), and more often the more devices there
are: the mean time to failure is inversely proportional to their number.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from keepstep.errors import ConfigError

HOUR = 3600.0
HOURS_PER_MONTH = 730.0
SPARES_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Setting:
    """A cluster and how it deals with faults. Times are in seconds."""

    gpus: int
    price: float
    """Of one device for an hour."""
    mttf: float
    """Between two failures anywhere in the job, at this size."""
    interval: float
    """Between two checkpoints."""
    replacement: float
    restore: float
    startup: float
    save: float
    """For which training stands still when a checkpoint is taken."""
    pause: float
    live: float
    """The share of faults that end in a pause and no more."""
    node_gpus: int
    repair: float
    """Until a failed node is there again."""
    enough: float
    """With this probability a spare is there when one is needed."""

    def check(self) -> None:
        above = {
            "gpus": self.gpus,
            "mttf": self.mttf,
            "checkpoint-interval": self.interval,
            "node-gpus": self.node_gpus,
        }
        for name, value in above.items():
            if not value > 0:
                raise ConfigError(f"--{name} must be above 0")
        for name, value in {"live": self.live, "enough": self.enough}.items():
            if not 0 <= value < 1:
                raise ConfigError(f"--{name} is a share, from 0 to less than 1")


def faults_per_month(setting: Setting) -> float:
    return HOURS_PER_MONTH * HOUR / setting.mttf


def lost_by_restart(setting: Setting) -> float:
    """Seconds of the whole job that one fault costs without Keepstep."""
    return setting.interval / 2 + setting.replacement + setting.restore + setting.startup


def lost_with_keepstep(setting: Setting) -> float:
    return setting.live * setting.pause + (1 - setting.live) * lost_by_restart(setting)


def money(setting: Setting, lost: float) -> float:
    """A month of faults that cost the job so many seconds each."""
    return setting.gpus * setting.price * lost / HOUR * faults_per_month(setting)


def best_interval(setting: Setting, *, keepstep: bool) -> float:
    """Between two checkpoints, if saving and computing again are to cost least together.

    Young's square root. With Keepstep only the faults that are not live roll back.
    """
    rolled_back = (1 - setting.live) if keepstep else 1.0
    if rolled_back == 0:
        return math.inf
    return math.sqrt(2 * setting.save * setting.mttf / rolled_back)


def goodput(setting: Setting, *, keepstep: bool) -> float:
    """Useful time over all time."""
    lost = lost_with_keepstep(setting) if keepstep else lost_by_restart(setting)
    return 1 / (1 + setting.save / setting.interval + lost / setting.mttf)


def at_size(setting: Setting, gpus: int) -> Setting:
    """The same with more devices, or fewer: each fails as often as before."""
    return replace(setting, gpus=gpus, mttf=setting.mttf * setting.gpus / gpus)


def at_best(setting: Setting, *, keepstep: bool) -> Setting:
    """With the checkpoint interval that suits it; the same if saves cost nothing."""
    best = best_interval(setting, keepstep=keepstep)
    return replace(setting, interval=best) if 0 < best < math.inf else setting


def spare_nodes(setting: Setting) -> int:
    """How many nodes must wait beside the job for one to be there when it is needed.

    Nodes that are being repaired are as many as failed in a repair time: a Poisson number, which a
    fault finds as anybody else would. One more than that many are needed.
    """
    away = setting.repair / setting.mttf
    count, term = 0, math.exp(-away)
    if term == 0.0:
        # Far beyond where the sum can be formed: the normal approximation is as good there.
        deviations = statistics.NormalDist().inv_cdf(max(0.5, setting.enough))
        return 1 + math.ceil(away + deviations * math.sqrt(away))
    reached = term
    while reached < setting.enough and count < SPARES_MAX:
        count += 1
        term *= away / count
        reached += term
    return 1 + count


def mttf_of(moments: Sequence[float]) -> float:
    """From a trace: the mean time between failures, in the unit of the moments."""
    if len(moments) < 2 or max(moments) == min(moments):
        raise ConfigError("a failure trace needs two moments or more, and not the same one")
    return (max(moments) - min(moments)) / (len(moments) - 1)
