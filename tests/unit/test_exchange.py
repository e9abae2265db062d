"""The neighbours' exchange over real sockets: frames, a ring that is full, an end, a stranger."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("torch")

from keepstep.model import Endpoint
from keepstep.training.exchange import Exchange
from keepstep.training.inner import GroupsBroken

HELLO = (b"h" * 32, b"h" * 32)
SECONDS_MAX = 10.0


def ring(count: int) -> list[Exchange]:
    """Each sends to the next one."""
    exchanges = [Exchange("127.0.0.1", *HELLO) for _ in range(count)]
    run_all(
        *(
            lambda e=each, there=exchanges[(i + 1) % count].endpoint: e.connect(there, SECONDS_MAX)
            for i, each in enumerate(exchanges)
        )
    )
    return exchanges


def run_all(*acts: Callable[[], object]) -> None:
    threads = [threading.Thread(target=act, daemon=True) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS_MAX)
        assert not thread.is_alive(), "a neighbour waits for ever"


@pytest.fixture
def two() -> Iterator[list[Exchange]]:
    exchanges = ring(2)
    yield exchanges
    for each in exchanges:
        each.close()


def raised_by(act: Callable[[], object], found: list[BaseException]) -> Callable[[], None]:
    def run() -> None:
        try:
            act()
        except GroupsBroken as error:
            found.append(error)

    return run


def test_frames_arrive_whole_and_in_order(two: list[Exchange]):
    one, other = two
    for boundary in range(3):
        one.send(boundary, b"x" * boundary)
    for boundary in range(3):
        number, payload = other.take()
        assert (number, bytes(payload)) == (boundary, b"x" * boundary)


def test_a_full_ring_does_not_stand_still():
    """Nobody can send all of its frame before it takes: everybody's socket is full."""
    exchanges = ring(3)
    payload = bytes(range(256)) * 65536  # 16 MiB
    taken: dict[int, bytes] = {}

    def turn(i: int) -> None:
        exchanges[i].send(i, payload)
        number, frame = exchanges[i].take()
        taken[number] = bytes(frame)
        exchanges[i].flush()

    run_all(*(lambda i=i: turn(i) for i in range(3)))
    assert taken == dict.fromkeys(range(3), payload)
    for each in exchanges:
        each.close()


def test_a_frame_leaves_although_its_sender_does_something_else():
    """The sender is back from its own take, in a collective that its neighbour has yet to join."""
    exchanges = ring(2)
    one, other = exchanges
    payload = bytes(16 << 20)
    one.send(1, payload)
    other.send(2, b"small")
    assert bytes(one.take()[1]) == b"small"
    found: list[int] = []
    run_all(lambda: found.append(len(other.take()[1])))
    assert found == [len(payload)]
    one.flush()
    for each in exchanges:
        each.close()


def test_an_end_while_a_frame_leaves_is_told_by_flush():
    exchanges = ring(2)
    one, other = exchanges
    one.send(1, bytes(16 << 20))
    other.send(2, b"small")
    one.take()
    one.cancel()
    found: list[BaseException] = []
    run_all(raised_by(one.flush, found))
    assert found
    for each in exchanges:
        each.close()


def test_cancel_frees_who_waits(two: list[Exchange]):
    found: list[BaseException] = []
    waiter = threading.Thread(target=raised_by(two[0].take, found), daemon=True)
    waiter.start()
    time.sleep(0.05)
    two[0].cancel()
    waiter.join(SECONDS_MAX)
    assert not waiter.is_alive()
    assert found


def test_a_neighbour_that_is_gone_is_a_broken_group(two: list[Exchange]):
    two[1].close()
    with pytest.raises(GroupsBroken, match="neighbour"):
        two[0].take()
    found: list[BaseException] = []
    run_all(raised_by(lambda: [two[0].send(i, bytes(100_000)) for i in range(1000)], found))
    assert "neighbour" in str(found[0])


def test_a_stranger_is_not_let_in():
    one, other = Exchange("127.0.0.1", *HELLO), Exchange("127.0.0.1", *HELLO)
    where = one.endpoint
    with socket.create_connection((where.host, where.port)) as stranger:
        stranger.sendall(b"s" * 32)
        silent = socket.create_connection((where.host, where.port))
        run_all(
            lambda: one.connect(other.endpoint, SECONDS_MAX),
            lambda: other.connect(one.endpoint, SECONDS_MAX),
        )
        other.send(7, b"mine")
        number, payload = one.take()
        assert (number, bytes(payload)) == (7, b"mine")
        silent.close()
    one.close()
    other.close()


def test_connecting_to_nobody_or_after_an_end_is_a_broken_group():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        nobody = Endpoint("127.0.0.1", gone.getsockname()[1])
    lonely = Exchange("127.0.0.1", *HELLO)
    with pytest.raises(GroupsBroken):
        lonely.connect(nobody, SECONDS_MAX)
    lonely.close()
    ended = Exchange("127.0.0.1", *HELLO)
    ended.cancel()
    with pytest.raises(GroupsBroken):
        ended.connect(nobody, SECONDS_MAX)
    ended.close()
