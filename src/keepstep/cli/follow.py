"""The launcher's wait: submit, follow the job's decisions, pass signals on, end with its code.

The decisions arrive as server-sent events, so a quiet job costs nothing to follow; the state is
asked for only when something was decided, and every few seconds in case a stream was lost.
"""

from __future__ import annotations

import queue
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from keepstep.cli.client import Client
from keepstep.cli.cluster import LocalCluster
from keepstep.config import LauncherConfig
from keepstep.errors import Transient, Unreachable
from keepstep.model import EXIT_REQUEUE, JobSpec

EXIT_INTERRUPTED = 130
LOOK_SECONDS = 5.0
"""How often the state is asked for even if nothing was heard."""
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
                    if record is not None:
                        after = max(after, int(record["seq"]))
                        if self._job in record["jobs"]:
                            self.news.put(record)
            except Transient:
                # It is being restarted; the stream goes on where it ended.
                self._closed.wait(0.2)


def follow_to_the_end(cluster: LocalCluster, spec: JobSpec, config: LauncherConfig) -> int:
    """Start, submit, wait. Returns the exit code of the launcher."""
    cluster.start()
    follower = Follower(cluster.client, spec.job)
    before = {number: signal.signal(number, follower.signalled) for number in _SIGNALS}
    try:
        cluster.client.submit(spec)
        _say(f"job {spec.job}: {cluster.run_dir}")
        return _wait(cluster, spec, follower, config)
    finally:
        follower.close()
        for number, handler in before.items():
            signal.signal(number, handler)
        cluster.stop()


def _wait(cluster: LocalCluster, spec: JobSpec, follower: Follower, config: LauncherConfig) -> int:
    answered = time.monotonic()
    interrupted = False
    while True:
        cluster.supervisor.check()
        try:
            job = cluster.client.job(spec.job)
            answered = time.monotonic()
            if job["over"]:
                return EXIT_INTERRUPTED if interrupted else _ended(job)
        except Transient as error:
            if time.monotonic() - answered > config.unreachable_seconds_max:
                raise Unreachable(str(error)) from error
        news = _next(follower)
        if isinstance(news, signal.Signals):
            if interrupted:
                _say("stopped at once; the job may still write its last lines")
                return EXIT_INTERRUPTED
            interrupted = news is signal.SIGINT
            _pass_on(cluster.client, spec.job, news)
        elif news is not None and news["why"]:
            _say(str(news["why"]))


def _next(follower: Follower) -> dict[str, Any] | signal.Signals | None:
    try:
        return follower.news.get(timeout=LOOK_SECONDS)
    except queue.Empty:
        return None


def _pass_on(client: Client, job: str, number: signal.Signals) -> None:
    save = number is signal.SIGTERM
    _say(f"{number.name}: stopping{' at a saved boundary' if save else ''}; again to leave at once")
    for _ in range(50):
        try:
            client.stop(job, save=save, why=f"the launcher got {number.name}")
            return
        except Transient:
            time.sleep(0.2)


def _ended(job: dict[str, Any]) -> int:
    """Say how it ended, and the exit code."""
    code = int(job["exit_code"])
    detail = str(job.get("detail") or "").strip()
    if job["state"] == "failed" and detail:
        print(detail, file=sys.stderr, flush=True)
    _say(f"job {job['id']} {job['state']}" + (f", exit code {code}" if code else ""))
    if job["state"] == "saved":
        return EXIT_REQUEUE
    if job["state"] == "stopped":
        return EXIT_INTERRUPTED
    return code if code >= 0 else 1


def _say(text: str) -> None:
    print(f"keepstep: {text}", file=sys.stderr, flush=True)
