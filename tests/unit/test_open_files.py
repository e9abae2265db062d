"""More files than a shell allows, and what is done when there are none left."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from keepstep import open_files
from keepstep.training import inner, lost

LIMITED = """
import resource
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
from keepstep import open_files
said = open_files.allow_many()
print(said, *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


class Limit:
    """Stands in for the kernel's."""

    def __init__(self, soft: int, hard: int, *, refuses: bool = False) -> None:
        self.now, self._refuses = (soft, hard), refuses

    def get(self, _: int) -> tuple[int, int]:
        return self.now

    def set(self, _: int, limits: tuple[int, int]) -> None:
        if self._refuses:
            raise ValueError("not allowed to raise maximum limit")
        self.now = limits


def test_the_limit_is_raised_to_the_hard_one():
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True
    )
    said, soft, hard = map(int, done.stdout.split())
    assert said == soft == min(hard, open_files.FILES_MAX)


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 4096, 4096),
        (1024, 1 << 30, open_files.FILES_MAX),
        (1024, resource.RLIM_INFINITY, open_files.FILES_MAX),
        (1 << 20, 1 << 30, 1 << 20),
        (4096, 4096, 4096),
    ],
    ids=["hard", "too much for who counts up to it", "endless", "never lowered", "as it is"],
)
def test_what_it_is_raised_to(monkeypatch, soft, hard, raised):
    limit = Limit(soft, hard)
    monkeypatch.setattr(resource, "getrlimit", limit.get)
    monkeypatch.setattr(resource, "setrlimit", limit.set)
    assert open_files.allow_many() == raised
    assert limit.now == (raised, hard)


def test_a_limit_that_cannot_be_raised_stays(monkeypatch):
    limit = Limit(1024, 4096, refuses=True)
    monkeypatch.setattr(resource, "getrlimit", limit.get)
    monkeypatch.setattr(resource, "setrlimit", limit.set)
    assert open_files.allow_many() == 1024


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of one TCP connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()[:2]) as here,
    ):
        there, _ = listener.accept()
        with there:
            here.settimeout(10.0)
            yield here, there


def none_left(*_: object, **__: object) -> int:
    raise OSError(errno.EMFILE, "too many open files")


@pytest.fixture
def full(monkeypatch) -> None:
    """No file is to be had any more, as in a process that had some for its groups before."""
    inner._spare()
    monkeypatch.setattr(os, "dup", none_left)
    monkeypatch.setattr(os, "listdir", none_left)


@pytest.mark.usefixtures("full")
def test_without_a_file_for_a_second_hold_a_socket_is_shut_down_all_the_same(pair):
    here, there = pair
    for _ in range(2):
        link = inner._link(here.fileno())
        assert inner._shut_down(here.fileno(), link) is None
    assert here.recv(1) == b""
    # Writing goes on, and nothing holds it when its owner lets go.
    here.sendall(b"x")
    assert there.recv(1) == b"x"
    here.close()
    there.settimeout(10.0)
    assert there.recv(1) == b""


@pytest.mark.usefixtures("full")
def test_without_a_file_another_socket_under_the_same_number_is_left_alone(pair):
    here, there = pair
    assert inner._shut_down(here.fileno(), "socket:[1]") is None
    there.sendall(b"x")
    assert here.recv(1) == b"x"


@pytest.mark.usefixtures("full")
def test_without_a_file_the_sockets_of_a_construction_are_found(pair):
    before = inner._Sockets()
    with socket.create_connection(pair[1].getsockname()[:2]) as made:
        made.settimeout(10.0)
        assert made.fileno() in before.settle()
        before.shut_down()
        assert made.recv(1) == b""
    before.release()


def test_threads_that_cannot_be_looked_at_are_not_taken_for_still(monkeypatch):
    monkeypatch.setattr(os, "listdir", none_left)
    assert lost.look() == {}
    monkeypatch.undo()
    monkeypatch.setattr(lost.Path, "read_text", none_left)
    assert lost.look() == {}
