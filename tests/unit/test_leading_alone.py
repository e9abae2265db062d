"""One that leads alone, on a file: who cannot lead deposes nobody, and who finds no room waits."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep import codec
from keepstep.errors import Behind, Deposed, Transient
from keepstep.model import Term
from keepstep.orchestrator import __main__ as process
from keepstep.orchestrator import events, replica, state
from keepstep.orchestrator.http import Request, Response
from keepstep.orchestrator.journal import Entry, Loaded, Standing, write_snapshot
from keepstep.orchestrator.journal_sqlite import SqliteJournal
from keepstep.orchestrator.snapshots import body_of


def tick(now: float) -> Entry:
    return Entry((), {"event": events.to_plain(events.Tick()), "now": now})


def first_snapshot(journal: SqliteJournal) -> Standing:
    body = body_of(state.new_cluster("secret"), 0.0)
    return write_snapshot(journal, journal.begin_term(), body, 0)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[SqliteJournal]:
    opened = SqliteJournal(tmp_path / "journal.db")
    yield opened
    opened.close()


class Counted(SqliteJournal):
    """Counts how often it is read, and lets somebody write before a term begins."""

    loads = 0
    before: Any = staticmethod(lambda: None)

    def load(self) -> Loaded:
        self.loads += 1
        return super().load()

    def begin_term(self, endpoint: str = "", above: Term = Term(0)) -> Standing:
        self.before()
        return super().begin_term(endpoint, above)


def test_a_journal_is_read_once_to_lead_unless_somebody_wrote_meanwhile(
    journal: SqliteJournal, tmp_path: Path
):
    now = first_snapshot(journal)
    now = journal.append(now.term, now.head, [tick(1.0)])
    second = Counted(tmp_path / "journal.db")
    begun = replica.begin(second)
    assert (second.loads, begun.standing.term) == (1, 2)
    now = journal.begin_term()
    second.before = lambda: journal.append(now.term, now.head, [tick(5.0)])
    begun = replica.begin(second)
    assert begun.replica is not None
    assert (second.loads, begun.replica.seq, begun.replica.moment) == (3, 2, 5.0)
    second.close()


def test_two_that_begin_together_make_one_cluster(journal: SqliteJournal, tmp_path: Path):
    second = Counted(tmp_path / "journal.db")
    second.before = lambda: first_snapshot(journal)
    begun = replica.begin(second)
    assert begun.replica is not None
    assert begun.replica.cluster.secret == "secret"
    second.close()


def of_a_newer_release(journal: SqliteJournal) -> Standing:
    plain = codec.loads(body_of(state.new_cluster("secret"), 0.0))
    body = codec.dumps({**plain, "v": events.VERSION + 1}).decode()
    return write_snapshot(journal, journal.begin_term(), body, 0)


def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    """A second orchestrator on the same file, until it ends."""
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    monkeypatch.setattr(process, "_allow_many_files", lambda _: None)
    monkeypatch.setattr(process.logs, "configure", lambda _: None)
    (tmp_path / "token").write_text("a-token-for-tests-only", encoding="utf-8")
    line = ["--journal", str(tmp_path / "journal.db"), "--token-file", str(tmp_path / "token")]
    return process.main([*line, "--port-file", str(tmp_path / "port"), *options])


def test_a_second_start_whose_port_is_taken_leaves_the_first_one_leading(
    journal: SqliteJournal,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    now = first_snapshot(journal)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        assert start(tmp_path, monkeypatch, "--listen", listen) == process.EXIT_USAGE
    assert f"cannot listen on {listen}" in capsys.readouterr().err
    assert journal.append(now.term, now.head, [tick(1.0)]).term == now.term


def test_an_older_release_on_a_newer_journal_leaves_the_newer_one_leading(
    journal: SqliteJournal,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    now = of_a_newer_release(journal)
    assert start(tmp_path, monkeypatch) == process.EXIT_USAGE
    assert "written by a newer Keepstep" in capsys.readouterr().err
    assert not (tmp_path / "port").exists(), "nobody is told of one that does not lead"
    assert journal.append(now.term, now.head, [tick(1.0)]).term == now.term


# --- a start that waits ---------------------------------------------------------------------------


def test_a_leader_that_finds_no_room_waits_and_nobody_is_told_of_it_before(
    journal: SqliteJournal, monkeypatch: pytest.MonkeyPatch
):
    first_snapshot(journal)
    happened: list[object] = []
    ends: list[BaseException] = [Transient("no room", 0.0), Transient("no room", 0.0)]
    runs: list[BaseException] = [Behind(9, "n3"), Deposed("term 10 is over")]

    class Leader:
        def __init__(self, term: Term) -> None:
            self.term = term

        async def run(self) -> None:
            happened.append(("leads", self.term))
            raise runs.pop(0)

    def lead(_: object, begun: replica.Begun) -> Leader:
        if ends:
            raise ends.pop(0)
        return Leader(begun.standing.term)

    async def cut() -> None:
        happened.append("cut")

    door = process.Door()
    place: Any = SimpleNamespace(lead=lead, journal=journal)
    server: Any = SimpleNamespace(cut=cut)
    monkeypatch.setattr(process, "log", lambda event, **_: happened.append(event))
    with pytest.raises(Deposed):
        asyncio.run(
            process._lead_alone(
                place, door, server, lambda term: happened.append(("listening", term))
            )
        )
    began = ["cut", "waiting", "cut", ("listening", 4), ("leads", 4)]
    assert happened == [*began, "journal.behind", "cut", ("leads", 10)]


@pytest.mark.parametrize(("path", "status"), [("/healthz", 200), ("/readyz", 503), ("/v1/x", 503)])
def test_who_only_starts_is_alive_and_not_ready(path: str, status: int):
    reply = asyncio.run(process.Door().handle(Request("GET", path, {}, {})))
    assert isinstance(reply, Response)
    assert reply.status == status


def test_a_journal_that_cannot_be_opened_now_is_opened_later(monkeypatch: pytest.MonkeyPatch):
    told: list[object] = []
    answers: list[object] = [Transient("no room", 0.0), Transient("no room", 0.0), "a journal"]

    def opened() -> object:
        answer = answers.pop(0)
        if isinstance(answer, Transient):
            raise answer
        return answer

    monkeypatch.setattr(process, "log", lambda event, **_: told.append(event))
    assert asyncio.run(process.Waits().until(opened)) == "a journal"
    assert told == ["waiting"]


def test_a_port_is_shown_once_we_serve_and_finds_its_room_before(tmp_path: Path):
    file = tmp_path / "port"
    show = process._written_port(file, 4711)
    assert not file.exists()
    show()
    assert file.read_text() == "4711\n"
    assert list(tmp_path.iterdir()) == [file]
    (tmp_path / "other.new").symlink_to("/dev/full")
    with pytest.raises(Transient, match="No space left"):
        process._written_port(tmp_path / "other", 4711)
