"""Following decisions from the outside: what is told, and what is said to be missing."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from unittest.mock import patch

import pytest

from keepstep.cli import client, follow, watch
from keepstep.cli.client import Client, Gap
from keepstep.cli.follow import Follower
from keepstep.config import LauncherConfig
from keepstep.errors import Unreachable
from keepstep.model import JobId, JobSpec

GAP = [b"id: 8\n", b"event: gap\n", b'data:{"asked":3,"from":9}\n', b"\n"]
DECISION = [b"id: 9\n", b'data: {"jobs":["j"],"seq":9,"why":"because"}\n', b"\n"]
LATER = [b"event: news\n", b'data: {"of":"a later release"}\n', b"\n"]


class Ended(Exception):
    """The test has seen enough."""


class Streams:
    """What an orchestrator sends, connection by connection; and what it was asked for."""

    def __init__(self, *sent: list[bytes]) -> None:
        self._sent = list(sent)
        self.asked: list[str] = []

    @contextlib.contextmanager
    def ask(self, method: str, path: str, **_: Any) -> Iterator[list[bytes]]:
        self.asked.append(path)
        if not self._sent:
            raise Ended
        yield self._sent.pop(0)


def client_of(streams: Streams) -> Any:
    return patch.object(Client, "_ask", lambda _, *args, **named: streams.ask(*args, **named))


def test_a_gap_is_told_apart_from_decisions_and_other_kinds_are_left_out():
    streams = Streams([b": connected\n", b"\n", *GAP, *LATER, *DECISION, b": alive\n"])
    with client_of(streams):
        told = list(Client("http://o:1", "t").events(3))
    assert told == [None, Gap(3, 9), {"jobs": ["j"], "seq": 9, "why": "because"}, None]
    assert streams.asked == ["/v1/events?after=3"]


def test_a_launcher_looks_at_its_job_again_after_a_gap():
    streams = Streams(GAP, DECISION)
    with client_of(streams), patch("threading.Thread.start"):
        follower = Follower(Client("http://o:1", "t"), "j")
        with contextlib.suppress(Ended):
            follower._listen()
    assert follower.news.get_nowait() == {"why": ""}, "to look, and nothing to say"
    assert follower.news.get_nowait()["seq"] == 9  # type: ignore[index]
    assert streams.asked == [f"/v1/events?after={seq}" for seq in (0, 8, 9)], (
        "it goes on from there"
    )


def test_a_watcher_in_a_pipe_is_told_of_a_gap(capsys: pytest.CaptureFixture[str]):
    streams = Streams(GAP, DECISION)
    with client_of(streams), pytest.raises(Ended):
        watch._lines(Client("http://o:1", "t"), as_json=True, until_over=False)
    out, err = capsys.readouterr()
    assert out == '{"jobs":["j"],"seq":9,"why":"because"}\n'
    assert "decisions after 3 were missed" in err
    assert streams.asked == ["/v1/events", "/v1/events?after=8", "/v1/events?after=9"]


def test_a_watchers_screen_goes_on_after_a_gap():
    streams = Streams(GAP, DECISION)
    with client_of(streams), patch("threading.Thread.start"):
        feed = watch.Feed(Client("http://o:1", "t"))
        with contextlib.suppress(Ended):
            feed._listen()
    assert [record["seq"] for record in feed.recent()] == [9]
    assert streams.asked[1:] == ["/v1/events?after=8", "/v1/events?after=9"]


class Busy(BaseHTTPRequestHandler):
    """An orchestrator with as many jobs as it may have."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        said = b'{"error":"project a has 2 open jobs","fix":"stop some"}'
        self.send_response(429)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_: Any) -> None:
        pass


def test_what_there_is_too_much_of_is_told_in_the_orchestrators_own_words():
    with HTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        made = Client(f"http://127.0.0.1:{server.server_port}", "t")
        with pytest.raises(Unreachable, match="project a has 2 open jobs; stop some"):
            made.submit(JobSpec(JobId("j"), "t.py"))


class Crowded(Busy):
    """One that nobody can wait at for a decision at first."""

    asked = 0

    def do_POST(self) -> None:
        type(self).asked += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        said, status = b'{"job":"j"}', 200
        if self.asked <= 2:
            said, status = b'{"error":"too many requests wait","fix":"wait"}', 429
        self.send_response(status)
        if status == 429:
            self.send_header("Retry-After", "1")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)


class Quiet:
    """A launcher's cluster, and what it hears of its job."""

    def __init__(self, url: str, *, working: bool = False) -> None:
        self.client = Client(url, "t")
        self.supervisor = self
        self.news: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._working = working

    def check(self) -> None:
        pass

    def working(self) -> bool:
        return self._working


def submitted(made: Quiet, seconds_max: float) -> None:
    config = LauncherConfig(unreachable_seconds_max=seconds_max)
    follow._submit(made, JobSpec(JobId("j"), "t.py"), made, config)  # type: ignore[arg-type]


@contextlib.contextmanager
def crowded(asked: int) -> Iterator[Quiet]:
    Crowded.asked = asked
    with (
        HTTPServer(("127.0.0.1", 0), Crowded) as server,
        patch.object(follow, "pause", lambda tries, chance: 0.001),
    ):
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield Quiet(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()


def test_a_launcher_whose_submission_found_no_place_repeats_it():
    with crowded(0) as made:
        submitted(made, 60.0)
    assert Crowded.asked == 3


def test_a_launcher_without_a_rank_does_not_repeat_it_for_ever():
    with crowded(-1_000_000) as made, pytest.raises(client.Busy, match="too many requests wait"):
        submitted(made, 0.05)


def test_a_signal_ends_the_repeating_and_is_not_lost():
    with crowded(-1_000_000) as made:
        made.news.put(signal.SIGTERM)
        submitted(made, 60.0)
        assert made.news.get_nowait() is signal.SIGTERM


def test_those_who_were_refused_together_do_not_come_back_together():
    assert [follow.pause(tries, 1.0) for tries in (0, 1, 2, 3, 9)] == [0.25, 0.5, 1.0, 2.0, 2.0]
    assert follow.pause(9, 0.0) == 1.0


def test_what_somebody_has_to_change_is_not_repeated():
    with HTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        made = Quiet(f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(Unreachable, match="project a has 2 open jobs"):
            submitted(made, 60.0)
