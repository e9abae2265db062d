"""The training side's link: it never waits for an agent, and no agent misses what stands."""

from __future__ import annotations

import errno
import os
import queue
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep import wire
from keepstep.model import Generation, JobId, OrderId, Phase, Rank, Term
from keepstep.training import link as link_module
from keepstep.training.inbox import Inbox
from keepstep.training.link import Link

JOB = JobId("job")
SECONDS_MAX = 10.0


class Agent:
    """The other end: listens at a path and keeps what it hears."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.settimeout(SECONDS_MAX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.decoder = wire.Decoder()
        self.waiting: list[wire.Message] = []

    def accept(self) -> None:
        self.connection, _ = self.listener.accept()
        self.connection.settimeout(SECONDS_MAX)

    def next(self) -> wire.Message:
        while not self.waiting:
            data = self.connection.recv(1 << 16)
            assert data, "the link closed"
            self.waiting += self.decoder.feed(data)
        return self.waiting.pop(0)

    def say(self, message: wire.Message) -> None:
        self.connection.sendall(wire.encode(message))

    def die(self) -> None:
        self.connection.close()
        self.listener.close()


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory) / "agent.sock"


@pytest.fixture
def heard() -> queue.Queue[wire.Message]:
    return queue.Queue()


@pytest.fixture
def link(path: Path, heard: queue.Queue[wire.Message]) -> Iterator[Link]:
    made = Link(path, lambda: wire.WorkerHello(JOB, 0, os.getpid(), Rank(3)), heard.put)
    yield made
    made.close()


def report(phase: Phase, generation: int = 1) -> wire.WorkerReport:
    return wire.WorkerReport(JOB, Generation(generation), phase, wire.SeatReport(Rank(3)))


def order(name: str) -> wire.Order:
    return wire.Order(Term(1), Generation(1), OrderId(name), JOB, (), wire.Resume(4))


def test_it_says_who_it_is_and_then_talks_both_ways(path, link, heard):
    agent = Agent(path)
    link.start()
    agent.accept()
    hello = wire.WorkerHello(JOB, 0, os.getpid(), Rank(3), speaks=wire.VERSION)
    assert agent.next() == hello
    link.send(report(Phase.QUIESCE))
    assert agent.next() == report(Phase.QUIESCE)
    agent.say(order("a"))
    assert heard.get(timeout=SECONDS_MAX) == order("a")
    agent.die()


def test_what_was_said_without_an_agent_reaches_the_first_one(path, link):
    link.start()
    link.send(report(Phase.QUIESCE))
    agent = Agent(path)
    agent.accept()
    assert isinstance(agent.next(), wire.WorkerHello)
    assert agent.next() == report(Phase.QUIESCE)
    agent.die()


def test_a_restarted_agent_hears_the_last_report_again_and_no_older_one(path, link):
    first = Agent(path)
    link.start()
    first.accept()
    first.next()
    link.send(report(Phase.QUIESCE))
    link.send(report(Phase.VERIFY))
    assert [first.next(), first.next()] == [report(Phase.QUIESCE), report(Phase.VERIFY)]
    first.die()
    second = Agent(path)
    second.accept()
    assert isinstance(second.next(), wire.WorkerHello)
    assert second.next() == report(Phase.VERIFY)
    second.die()


def test_an_agent_that_does_not_read_does_not_hold_up_training(path, link):
    agent = Agent(path)
    link.start()
    agent.accept()
    agent.next()
    big = wire.WorkerBroken(JOB, Rank(3), 0, Generation(1), 1, "x" * 1_000_000)
    done = threading.Event()

    def train() -> None:
        for _ in range(40):
            link.send(big)
        done.set()

    threading.Thread(target=train, daemon=True).start()
    assert done.wait(SECONDS_MAX), "send must never wait"
    agent.die()


def test_a_large_message_arrives_whole(path, link):
    agent = Agent(path)
    link.start()
    agent.accept()
    agent.next()
    big = wire.WorkerBroken(JOB, Rank(3), 0, Generation(1), 1, "x" * 3_000_000)
    link.send(big)
    assert agent.next() == big
    agent.die()


def test_it_connects_although_there_was_no_file_to_be_had_at_first(path, link, monkeypatch):
    agent = Agent(path)
    real, asked = socket.socket, []

    def scarce(*arguments, **named):
        asked.append(arguments)
        if len(asked) == 1:
            raise OSError(errno.EMFILE, "too many open files")
        return real(*arguments, **named)

    monkeypatch.setattr(link_module.socket, "socket", scarce)
    link.start()
    try:
        agent.accept()
        assert isinstance(agent.next(), wire.WorkerHello)
        assert len(asked) >= 2
    finally:
        agent.die()


def test_what_an_order_raises_is_told_and_the_next_one_is_heard(path, heard, capfd):
    def hear(message: wire.Message) -> None:
        heard.put(message)
        if heard.qsize() == 1:
            raise RuntimeError("no thread to be had")

    link = Link(path, lambda: wire.WorkerHello(JOB, 0, os.getpid(), Rank(3)), hear)
    agent = Agent(path)
    link.start()
    agent.accept()
    first = agent.connection
    agent.say(order("a"))
    agent.accept()
    agent.say(order("b"))
    assert [heard.get(timeout=SECONDS_MAX) for _ in "ab"] == [order("a"), order("b")]
    link.close()
    first.close()
    agent.die()
    assert "no thread to be had" in capfd.readouterr().err


def test_it_closes_without_an_agent(link):
    link.start()
    link.close()
    assert "keepstep-link" not in {thread.name for thread in threading.enumerate()}


def test_whether_an_order_comes_is_known_without_taking_it():
    inbox = Inbox(lambda: None, lambda message: None)
    assert not inbox.comes(0.0)
    order = wire.Order(Term(1), Generation(2), OrderId("o"), JOB, (), wire.Quiesce("save"))
    threading.Timer(0.05, inbox.receive, (order,)).start()
    assert inbox.comes(SECONDS_MAX)
    assert inbox.take(0.0) == order
