"""The launcher's wait: submit, follow the job's decisions, pass signals on, end with its code.

The decisions arrive as server-sent events, so a quiet job costs nothing to follow; the state is
asked for only when something was decided, and every few seconds in case a stream was lost.
"""

from __future__ import annotations

import itertools
import queue
import random
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from keepstep.cli.client import Busy, Client, Gap, Refusal
from keepstep.cli.cluster import LocalCluster
from keepstep.config import LauncherConfig
from keepstep.errors import Transient
from keepstep.model import EXIT_REQUEUE, JobSpec

EXIT_INTERRUPTED = 130
LOOK_SECONDS = 5.0
"""How often the state is asked for even if nothing was heard."""
AGAIN_SECONDS = 1.0
"""How often, while nobody answers."""
AWAY_SECONDS = 60.0
"""How often it is said that no orchestrator answers."""
BUSY_SECONDS_MIN, BUSY_SECONDS_MAX = 0.25, 2.0
"""Between two tries to submit to somebody who is too busy."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Follower:
    """What happens to one job, as one queue: decisions, and signals for the launcher."""

    def __init__(self, client: Client, job: str) -> None:
        self._client = client
        self._job = job
        self.news: queue.SimpleQueue[dict[str, Any] | signal.Signals] = queue.SimpleQueue()
        self._closed = threading.Event()
        # A daemon: it may sit in a read for seconds when the launcher has nothing left to do.
        threading.Thread(target=self._listen, name="keepstep-events", daemon=True).start()

    def signalled(self, number: int, _: FrameType | None) -> None:
        self.news.put(signal.Signals(number))

    def close(self) -> None:
        self._closed.set()

    def _listen(self) -> None:
        after = 0
        while not self._closed.is_set():
            try:
                for record in self._client.events(after):
                    if self._closed.is_set():
                        return
                    if isinstance(record, Gap):
                        # What was decided meanwhile is not told: only the state shows it.
                        after = record.after
                        self.news.put({"why": ""})
                    elif record is not None:
                        after = max(after, int(record["seq"]))
                        if self._job in record["jobs"]:
                            self.news.put(record)
            except (Transient, Refusal):
                # It is being restarted; the stream goes on where it ended.
                self._closed.wait(0.2)


def follow_to_the_end(cluster: LocalCluster, spec: JobSpec, config: LauncherConfig) -> int:
    """Start, submit, wait. Returns the exit code of the launcher."""
    cluster.start()
    follower = Follower(cluster.client, spec.job)
    before = {number: signal.signal(number, follower.signalled) for number in _SIGNALS}
    try:
        _submit(cluster, spec, follower, config)
        _say(f"job {spec.job}: {cluster.run_dir}")
        return _wait(cluster, spec, follower, config)
    finally:
        follower.close()
        for number, handler in before.items():
            signal.signal(number, handler)
        cluster.stop()


def _submit(
    cluster: LocalCluster, spec: JobSpec, follower: Follower, config: LauncherConfig
) -> None:
    """Until it is taken: hundreds of launchers may say the same while the journal is away, and not
    all of them can wait for the answer over there."""
    away = Away(config.unreachable_seconds_max)
    for tries in itertools.count():
        cluster.supervisor.check()
        try:
            cluster.client.submit(spec)
            return
        except Busy as error:
            text, over = away.missed(time.monotonic(), str(error), working=cluster.working())
            if over:
                raise
            if text:
                _say(text)
        news = _next(follower, pause(tries, random.random()))
        if isinstance(news, signal.Signals):
            # What it means is known where the job is waited for.
            follower.news.put(news)
            return


def pause(tries: int, chance: float) -> float:
    """Seconds before the next try. Jitter: those who were refused together must not come back in
    the same millisecond."""
    longest = min(BUSY_SECONDS_MAX, BUSY_SECONDS_MIN * 2.0 ** min(tries, 16))
    return longest * (0.5 + 0.5 * chance)


def _wait(cluster: LocalCluster, spec: JobSpec, follower: Follower, config: LauncherConfig) -> int:
    away = Away(config.unreachable_seconds_max)
    interrupted = at_once = False
    while True:
        cluster.supervisor.check()
        try:
            job = cluster.client.job(spec.job)
            if text := away.answered():
                _say(text)
            if job["over"]:
                return EXIT_INTERRUPTED if interrupted else _ended(job)
        except (Transient, Refusal) as error:
            # Also one that knows nothing of the job: it may have been given another journal.
            text, over = away.missed(time.monotonic(), str(error), working=cluster.working())
            if over:
                raise
            if text:
                _say(text)
        news = _next(follower, AGAIN_SECONDS if away.since else LOOK_SECONDS)
        if isinstance(news, signal.Signals):
            if at_once and news is signal.SIGINT:
                _say("stopped at once; the job may still write its last lines")
                return EXIT_INTERRUPTED
            if cluster.plan.join and _holds_nothing(cluster, spec.job):
                _say(f"{news.name}: leaving; no rank of {spec.job} is here, so the job goes on")
                return EXIT_INTERRUPTED if news is signal.SIGINT else 0
            interrupted = news is signal.SIGINT
            at_once = not _pass_on(cluster.client, spec.job, news) or interrupted
        elif news is not None and news["why"]:
            _say(str(news["why"]))


class Away:
    """An orchestrator that does not answer: training needs none, so nobody is ended for it.

    Only where no worker lives, so that nothing can be lost, is it given up after a while.
    """

    def __init__(self, unreachable_seconds_max: float) -> None:
        self._limit = unreachable_seconds_max
        self.since = 0.0
        """When the first question stayed without an answer; 0 while there are answers."""
        self._told = 0.0
        self._idle_since = 0.0

    def answered(self) -> str:
        """What there is to say about it."""
        said = bool(self._told)
        self.since = self._told = self._idle_since = 0.0
        return "the orchestrator answers again" if said else ""

    def missed(self, now: float, why: str, *, working: bool) -> tuple[str, bool]:
        """What there is to say, and whether it is given up."""
        self.since = self.since or now
        self._idle_since = 0.0 if working else self._idle_since or now
        if self._idle_since and now - self._idle_since > self._limit:
            return "", True
        # A restart takes a second or two: that is nobody's business.
        due = self._told + AWAY_SECONDS if self._told else self.since + LOOK_SECONDS
        if now < due:
            return "", False
        self._told = now
        rest = "training goes on" if working else "no worker is here"
        what = f"{why.partition('; ')[0]}, for {now - self.since:.0f} s already"
        return f"{what}; {rest}; trying again", False


def _holds_nothing(cluster: LocalCluster, job: str) -> bool:
    """No rank sits on our nodes, but some do elsewhere: a drained node, or a spare."""
    try:
        seats = cluster.client.job(job)["seats"]
    except (Transient, Refusal):
        return not cluster.ranks()
    return bool(seats) and not any(seat["node"] in cluster.nodes for seat in seats)


def _next(follower: Follower, seconds_max: float) -> dict[str, Any] | signal.Signals | None:
    try:
        return follower.news.get(timeout=seconds_max)
    except queue.Empty:
        return None


def _pass_on(client: Client, job: str, number: signal.Signals) -> bool:
    """Stop the job; False: nobody could be told."""
    save = number is signal.SIGTERM
    how = "stopping the whole job at a saved boundary" if save else "stopping; again: at once"
    _say(f"{number.name}: {how}")
    for _ in range(50):
        try:
            client.stop(job, save=save, why=f"the launcher got {number.name}")
            return True
        except Transient:
            time.sleep(0.2)
    _say("no orchestrator answers, so nothing was stopped; Ctrl-C ends the workers here at once")
    return False


def _ended(job: dict[str, Any]) -> int:
    """Say how it ended, and the exit code."""
    code = int(job["exit_code"])
    detail = str(job.get("detail") or "").strip()
    if job["state"] == "failed" and detail:
        print(detail, file=sys.stderr, flush=True)
    _say(f"job {job['id']} {job['state']}" + (f", exit code {code}" if code else ""))
    if job["state"] == "saved":
        _say(f"to go on: the same command, with --job {job['id']}")
        return EXIT_REQUEUE
    if job["state"] == "stopped":
        return EXIT_INTERRUPTED
    return code if code >= 0 else 1


def _say(text: str) -> None:
    print(f"keepstep: {text}", file=sys.stderr, flush=True)
