"""The neighbours' exchange over real sockets: frames, a ring that is full, an end, a stranger."""

from __future__ import annotations

import contextlib
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


def ring(count: int, *, sealed: bool = False) -> list[Exchange]:
    """Each sends to the next one."""
    exchanges = [Exchange("127.0.0.1", *HELLO, sealed=sealed) for _ in range(count)]
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


@pytest.fixture(params=[False, True], ids=["open", "sealed"])
def two(request: pytest.FixtureRequest) -> Iterator[list[Exchange]]:
    exchanges = ring(2, sealed=request.param)
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


@pytest.mark.parametrize("sealed", [False, True])
def test_a_full_ring_does_not_stand_still(sealed: bool):
    """Nobody can send all of its frame before it takes: everybody's socket is full."""
    exchanges = ring(3, sealed=sealed)
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


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("parts", [(1, 8 << 20), (600, 11)], ids=["large", "many parts"])
def test_two_frames_of_one_turn_arrive_as_they_were_sent(sealed: bool, parts: tuple[int, int]):
    """The second one is taken while a thread pushes what is left of one's own."""
    count, size = parts
    exchanges = ring(3, sealed=sealed)
    # No two places alike: bytes that come twice, or are left out, show.
    pattern = b"".join(number.to_bytes(4, "little") for number in range(count * size // 4 + 1))
    views = [memoryview(pattern)[at * size : (at + 1) * size] for at in range(count)]
    whole, found = b"".join(views), []

    def turn(i: int) -> None:
        for step in range(2):
            exchanges[i].send_all([(step, views), (100 + step, [bytes([i]), *views])])
            for wanted in ((step, whole), (100 + step, bytes([(i - 1) % 3]) + whole)):
                number, frame = exchanges[i].take(lambda _, n: memoryview(bytearray(n)))
                found.append((number, bytes(frame)) == wanted)
            exchanges[i].flush()

    run_all(*(lambda i=i: turn(i) for i in range(3)))
    assert found == [True] * 3 * 2 * 2
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
        stranger.sendall(b"\x00\x20" + b"s" * 32)
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


class Overheard:
    """A wire between two exchanges, and somebody who listens on it."""

    def __init__(self, there: Endpoint) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint("127.0.0.1", self.server.getsockname()[1])
        self.heard = bytearray()
        self._sockets = [self.server]
        threading.Thread(target=self._listen, args=(there,), daemon=True).start()

    def _listen(self, there: Endpoint) -> None:
        near = self.server.accept()[0]
        far = socket.create_connection((there.host, there.port))
        self._sockets += [near, far]
        for one, other in ((near, far), (far, near)):
            threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                self.heard += data
                other.sendall(data)

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@pytest.mark.parametrize("sealed", [False, True])
def test_who_overhears_learns_no_secret_and_with_sealing_no_state(sealed: bool):
    one, other = (Exchange("127.0.0.1", *HELLO, sealed=sealed) for _ in range(2))
    wire = Overheard(other.endpoint)
    run_all(
        lambda: one.connect(wire.endpoint, SECONDS_MAX),
        lambda: other.connect(one.endpoint, SECONDS_MAX),
    )
    one.send(7, b"private state of one rank")
    number, payload = other.take()
    assert (number, bytes(payload)) == (7, b"private state of one rank")
    assert HELLO[0] not in wire.heard
    assert (b"private" in wire.heard) != sealed
    for each in (one, other, wire):
        each.close()


def test_a_listener_that_does_not_know_the_secret_gets_nothing():
    """Neither by saying nothing of its own, nor by giving back what it heard."""
    with socket.create_server(("127.0.0.1", 0)) as posing:
        where = Endpoint("127.0.0.1", posing.getsockname()[1])
        mine = Exchange("127.0.0.1", *HELLO)
        found: list[BaseException] = []
        connecting = threading.Thread(
            target=raised_by(lambda: mine.connect(where, SECONDS_MAX), found), daemon=True
        )
        connecting.start()
        with posing.accept()[0] as heard:
            word = heard.recv(100)
            assert len(word) == 34
            heard.sendall(b"\x00\x40" + word[2:] + word[2:])
            connecting.join(SECONDS_MAX)
        assert "secret" in str(found[0])
        mine.close()


def test_connecting_to_nobody_or_after_an_end_is_a_broken_group():
    # Bound and deaf: a port that is given back could be the very next one that is given out.
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        nobody = Endpoint("127.0.0.1", deaf.getsockname()[1])
        lonely = Exchange("127.0.0.1", *HELLO)
        with pytest.raises(GroupsBroken):
            lonely.connect(nobody, SECONDS_MAX)
        lonely.close()
        ended = Exchange("127.0.0.1", *HELLO)
        ended.cancel()
        with pytest.raises(GroupsBroken):
            ended.connect(nobody, SECONDS_MAX)
        ended.close()
