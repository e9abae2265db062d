"""What an incident asks for: replace, form anew, watch, or stop because it is the user's. Pure.

Keepstep does not fight the user's bugs: a step that fails on a second worker in the same way is
the user's, and costs at most one spare. Neither does it give up on the first sign of trouble.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum

from keepstep.model import Mode, Phase, Sign
from keepstep.orchestrator.state import Cause, Cluster, Death, Job

EXCEPTION_SETTLE_SECONDS = 0.5
"""Ranks that raise at the same step do so within milliseconds: wait for the second one."""
BROKEN_SECONDS_MAX = 2.0
"""How long a broken collective waits for a culprit before the groups are formed anew."""
STALL_FRESH_SECONDS = 1.5
"""A stall report older than this says nothing any more; agents repeat theirs every 0.5 s."""
FENCE_SECONDS_MAX = 5.0
"""A kill that takes longer goes on without us: the new generation makes the old one harmless."""
IDLE_REFORMS_MAX = 3
"""Groups formed anew in a row at one step without a culprit: then the program itself stands."""

CRASHES_MAX = 2
KILLS_MAX = 5
EXITS_MAX = 3
_CRASH_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
)


class Response(StrEnum):
    """What to do about a fault."""

    REPLACE = "replace"
    REFORM_ONLY = "reform_only"
    WATCH = "watch"
    STOP = "stop"
    FALL_BACK = "fall_back"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A response and its reason."""

    response: Response
    why: str
    settle_seconds: float = 0.0


def acts(job: Job) -> bool:
    """False: what happens to this job is only told of. A save is somebody's explicit order."""
    return job.spec.policy.mode is Mode.ACT or _saves(job)


def stands_still(cluster: Cluster, job: Job) -> bool:
    """True: the cluster is frozen, or the journal has forgotten where this job is. What happens to
    it is recorded, and waits. A save waits for no freeze: it is somebody's explicit order."""
    return job.unsure is not None or (bool(cluster.frozen) and not _saves(job))


def _saves(job: Job) -> bool:
    return job.migration is not None and job.migration.purpose == "save"


def respond(job: Job, cause: Cause) -> Judgement:
    """What the end of one worker asks for."""
    if cause.sign is Sign.EXCEPTION:
        return _exception(job, cause)
    if cause.sign in (Sign.BROKEN, Sign.CORRUPT, Sign.STORE_LOST):
        return Judgement(Response.REFORM_ONLY, "nobody is gone; the groups are formed anew")
    if cause.sign is Sign.EXIT:
        return _exit(job, cause)
    return Judgement(Response.REPLACE, f"rank {cause.rank} is replaced")


def ran_out_of_memory(cause: Cause) -> bool:
    """Killed by the kernel: an end that may be the program's own, like an exception."""
    return cause.sign is Sign.EXCEPTION and cause.exit_code == -signal.SIGKILL


def _exception(job: Job, cause: Cause) -> Judgement:
    before = job.exception
    what = "ran out of memory" if ran_out_of_memory(cause) else "raised"
    if before is not None and _second(before, cause):
        who = (
            f"rank {cause.rank} {what} at step {cause.step} again, on a second worker"
            if before.rank == cause.rank
            else f"ranks {before.rank} and {cause.rank} both {what} at step {cause.step}"
        )
        return Judgement(Response.STOP, f"{who}: this is the program's own error")
    why = f"rank {cause.rank} {what} at step {cause.step} for the first time: it may be the node"
    return Judgement(Response.REPLACE, why, EXCEPTION_SETTLE_SECONDS)


def _second(before: Cause, cause: Cause) -> bool:
    """The same on a second worker. Ranks that share a node share its memory: they are one."""
    short = ran_out_of_memory(cause)
    if before.step != cause.step or ran_out_of_memory(before) != short:
        return False
    if before.rank == cause.rank:
        return before.incarnation != cause.incarnation
    return not short or before.node != cause.node


def died_joining(job: Job, cause: Cause) -> bool:
    """A joiner that died before it was told to train: that says nothing about the user's step."""
    migration = job.migration
    if migration is None or cause.rank not in migration.joined:
        return False
    return cause.step < 0 or migration.phase is not Phase.RESUME


def _exit(job: Job, cause: Cause) -> Judgement:
    if died_joining(job, cause):
        return Judgement(Response.REPLACE, f"joiner {cause.rank} is replaced")
    count = counted(job.deaths.get(cause.rank), cause).count
    if count >= deaths_max(cause.exit_code):
        why = (
            f"rank {cause.rank} ended with {ending(cause.exit_code)} at step {cause.step} "
            f"{count} times in a row: this is the program's own error"
        )
        return Judgement(Response.STOP, why)
    return Judgement(Response.REPLACE, f"rank {cause.rank} is replaced")


def counted(before: Death | None, cause: Cause) -> Death:
    """The same death at the same step counts up; any other starts anew."""
    same = before is not None and before.step == cause.step and before.exit_code == cause.exit_code
    return Death(cause.step, cause.exit_code, before.count + 1 if same and before else 1)


def deaths_max(exit_code: int) -> int:
    """How often a rank may die alike at one step. A kill may be an operator's."""
    if -exit_code in _CRASH_SIGNALS:
        return CRASHES_MAX
    return KILLS_MAX if exit_code < 0 else EXITS_MAX


def ending(exit_code: int) -> str:
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
