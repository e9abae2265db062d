"""Homes of an entry: who is asked when, and who is believed."""

from __future__ import annotations

import base64
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep import wire
from keepstep.model import Endpoint, JobId, Rank
from keepstep.training import asking, mirror
from keepstep.training.private import EntryWriter

SECONDS_MAX = 10.0
Open = Callable[..., "Home"]
ENTRY, BETTER = (EntryWriter().entry(3, {"pass": at}, []) for at in (0, 1))


class Home:
    """A peer port. It knows one secret, and answers until it is closed; a silent one never."""

    def __init__(self, secret: str, payload: bytes | None, *, silent: bool = False) -> None:
        self._secret, self._payload = secret, payload
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.at = Endpoint("127.0.0.1", self._listener.getsockname()[1])
        self.asked: list[str] = []
        if not silent:
            threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        # Frees the thread, too, which waits for the next one to come.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with peer:
                peer.settimeout(SECONDS_MAX)
                decoder = wire.Decoder()
                while data := peer.recv(1 << 16):
                    for question in decoder.feed(data):
                        peer.sendall(wire.encode(self._answer(question), wire.OLDEST))

    def _answer(self, question: wire.Message) -> wire.Entry:
        assert isinstance(question, wire.FetchEntry)
        self.asked.append(question.secret)
        if question.secret != self._secret:
            return wire.Entry(found=False, why="this node does not know that secret")
        if self._payload is None:
            return wire.Entry(found=False, why="no entry")
        return wire.Entry(found=True, payload=base64.b64encode(self._payload).decode())


@pytest.fixture
def home() -> Iterator[Open]:
    with ExitStack() as stack:

        def opened(*arguments: Any, **named: Any) -> Home:
            made = Home(*arguments, **named)
            stack.callback(made.close)
            return made

        yield opened


def fetch(tmp_path: Any, homes: list[Home], secrets: tuple[str, ...] = ("old",)) -> asking.Heard:
    place: Any = SimpleNamespace(room=tmp_path, job=JobId("job"), encrypt=False)
    told = wire.Home(Rank(3), tuple(home.at for home in homes), secrets)
    return mirror.fetch_from(place, told, 7, "new")


def test_a_home_that_cannot_be_reached_does_not_hold_up_the_next_one(tmp_path, home, monkeypatch):
    monkeypatch.setattr(asking, "NEXT_SECONDS", 0.05)
    silent, other = home("old", None, silent=True), home("old", ENTRY)
    began = time.monotonic()
    assert fetch(tmp_path, [silent, other]) == (ENTRY, f"127.0.0.1:{other.at.port}")
    assert time.monotonic() - began < asking.FETCH_SECONDS_MAX / 2


def test_the_better_home_is_believed_and_the_others_are_not_even_asked(tmp_path, home):
    better, other = home("old", BETTER), home("old", ENTRY)
    assert fetch(tmp_path, [better, other])[0] == BETTER
    assert other.asked == []


def test_each_secret_that_a_home_may_know_is_tried(tmp_path, home):
    without, late = home("old", None), home("new", ENTRY)
    assert fetch(tmp_path, [without, late])[0] == ENTRY
    assert without.asked == late.asked == ["old", "new"]


def test_a_home_that_is_late_is_waited_for_if_nobody_else_has_it(tmp_path, home, monkeypatch):
    monkeypatch.setattr(asking, "NEXT_SECONDS", 0.05)
    known = threading.Event()

    def slow(endpoint: Endpoint, question: wire.FetchEntry, *, sealed: bool) -> asking.Heard:
        if endpoint == late.at:
            assert known.wait(SECONDS_MAX)
            return ENTRY, ""
        known.set()
        return None, "no entry"

    late, other = home("old", None), home("old", None)
    monkeypatch.setattr(asking, "ask", slow)
    assert fetch(tmp_path, [late, other])[0] == ENTRY


def test_a_silent_home_is_asked_once_whatever_secrets_there_are(tmp_path, home, monkeypatch):
    monkeypatch.setattr(asking, "FETCH_SECONDS_MAX", 0.05)
    asked: list[str] = []
    real = asking.ask

    def counted(endpoint: Endpoint, question: wire.FetchEntry, *, sealed: bool) -> asking.Heard:
        asked.append(question.secret)
        return real(endpoint, question, sealed=sealed)

    monkeypatch.setattr(asking, "ask", counted)
    payload, why = fetch(tmp_path, [home("old", None, silent=True)], ("old", "older"))
    assert payload is None
    assert "no answer" in why
    assert asked == ["old"]


def test_without_any_home_it_says_so(tmp_path):
    assert fetch(tmp_path, []) == (None, "no home is left to ask")
