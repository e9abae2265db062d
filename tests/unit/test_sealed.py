"""Sealed conversations: who knows the secret, who does not, and who sits in between."""

from __future__ import annotations

import contextlib
import ssl
from typing import Any

import pytest

from keepstep import sealed
from keepstep.sealed import NotSealed, Seal, sealed_bytes


def meet(one: Seal, other: Seal) -> None:
    """Words go back and forth until both are ready."""
    word = one.shake(b"")
    for _ in range(8):
        answer = other.shake(word)
        if one.ready and not answer:
            break
        word = one.shake(answer)
    assert one.ready
    assert other.ready


def pair(secret: str = "s", other: str = "s", topics: tuple[str, str] = ("t", "t")) -> list[Seal]:
    return [Seal(secret, topics[0], opens=True), Seal(other, topics[1], opens=False)]


@pytest.mark.parametrize("size", [0, 1, 16384, 16385, 1_000_003])
def test_what_is_sealed_opens_as_it_was_and_is_as_long_as_said(size: int):
    one, other = pair()
    meet(one, other)
    message = bytes(range(256)) * (size // 256) + bytes(size % 256)
    for sender, receiver in ((one, other), (other, one), (one, other)):
        text = sender.seal(message)
        assert len(text) == sealed_bytes(size)
        assert size < 16 or message[:16] not in text
        room = bytearray(size)
        receiver.open(text, memoryview(room))
        assert bytes(room) == message


RECORDS = 4 * sealed.RECORD_BYTES


@pytest.mark.parametrize("size", [0, 1, RECORDS - 1, RECORDS, RECORDS + 1, 3 * RECORDS + 5])
def test_in_slices_a_message_is_the_same(monkeypatch: pytest.MonkeyPatch, size: int):
    """Who opens it need not know how it was sliced."""
    one, other = pair()
    meet(one, other)
    message = bytes(range(251)) * (size // 251) + bytes(size % 251)
    for slices in ((RECORDS, RECORDS), (RECORDS, sealed.SLICE_BYTES), (1 << 30, RECORDS)):
        room = bytearray(size)
        monkeypatch.setattr(sealed, "SLICE_BYTES", slices[0])
        text = one.seal(memoryview(message))
        assert len(text) == sealed_bytes(size)
        monkeypatch.setattr(sealed, "SLICE_BYTES", slices[1])
        other.open(text, memoryview(room))
        assert bytes(room) == message


def test_no_more_than_a_slice_is_handed_to_tls_at_once(monkeypatch: pytest.MonkeyPatch):
    one, other = pair()
    meet(one, other)
    monkeypatch.setattr(sealed, "SLICE_BYTES", RECORDS)
    one._inside, other._incoming = Strict(one._inside), Strict(other._incoming)
    room = bytearray(10 * RECORDS)
    other.open(one.seal(bytes(10 * RECORDS)), memoryview(room))
    assert one._inside.most == RECORDS
    assert other._incoming.most == sealed_bytes(RECORDS)


@pytest.mark.parametrize("cut", [1, RECORDS, 2 * RECORDS])
def test_a_message_in_slices_that_is_cut_short_is_refused(
    monkeypatch: pytest.MonkeyPatch, cut: int
):
    one, other = pair()
    meet(one, other)
    monkeypatch.setattr(sealed, "SLICE_BYTES", RECORDS)
    text = one.seal(bytes(3 * RECORDS))
    with pytest.raises(NotSealed, match="not whole"):
        other.open(text[:-cut], memoryview(bytearray(3 * RECORDS)))


class Strict:
    """Stands before a part of TLS and sees how much is written to it at once."""

    def __init__(self, part: Any) -> None:
        self._part, self.most = part, 0

    def write(self, data: memoryview) -> int:
        self.most = max(self.most, len(data))
        return int(self._part.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


@pytest.mark.parametrize("strangers", [pair("s", "x"), pair(topics=("a>b", "b>a"))])
def test_who_does_not_know_the_secret_or_means_another_pair_is_refused(strangers: list[Seal]):
    with pytest.raises(NotSealed, match="secret"):
        meet(*strangers)


def test_somebody_in_between_is_found_though_it_passes_every_proof_on():
    """It talks TLS with both, and copies what it hears inside from one to the other."""
    one, other = pair()
    to_one, to_other = Seal("?", "t", opens=False), Seal("?", "t", opens=True)
    proof = _listen_in(one, to_one)
    with pytest.raises(NotSealed, match="secret"):
        _relay(proof, to_other, other)


def _listen_in(one: Seal, between: Seal) -> bytes:
    """What a member says inside, to somebody that it takes for the other one. It answers only once
    it has seen a proof itself, so this one gets none."""
    word = one.shake(b"")
    for _ in range(4):
        between._incoming.write(word)
        with contextlib.suppress(OSError):
            between._inside.do_handshake()
            return b"\0" * 32
        word = one.shake(between._outgoing.read())
    raise AssertionError("no end of the handshake")


def _relay(proof: bytes, to_other: Seal, other: Seal) -> None:
    word = b""
    for _ in range(8):
        to_other._incoming.write(word)
        try:
            if not to_other._shaken:
                to_other._inside.do_handshake()
                to_other._shaken = True
                to_other._inside.write(proof)
        except OSError:
            pass
        word = other.shake(to_other._outgoing.read())


def test_a_changed_missing_or_repeated_message_does_not_open():
    for spoil in (
        lambda sealed: sealed[:-1] + bytes([sealed[-1] ^ 1]),
        lambda sealed: sealed[:-1],
        lambda sealed: b"x" * len(sealed),
    ):
        one, other = pair()
        meet(one, other)
        with pytest.raises(NotSealed):
            other.open(spoil(one.seal(b"state")), memoryview(bytearray(5)))
    one, other = pair()
    meet(one, other)
    sealed = one.seal(b"state")
    other.open(sealed, memoryview(bytearray(5)))
    with pytest.raises(NotSealed):
        other.open(sealed, memoryview(bytearray(5)))


@pytest.mark.parametrize(
    "noise", [b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n" * 9, b"\x16\x03\x01\xff\xff" + b"x" * 70_000]
)
def test_noise_in_place_of_a_handshake_is_refused(noise: bytes):
    with pytest.raises(NotSealed):
        Seal("s", "t", opens=False).shake(noise)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("said", [0, sealed.PROOF_BYTES - 1])
def test_one_that_ends_in_place_of_its_proof_is_refused(said: int):
    """Anybody can say that TLS ends, without any secret; read on, it reads as nothing for ever."""
    stranger, member = Seal("?", "t", opens=True), Seal("s", "t", opens=False)
    while not _shaken(stranger):
        stranger._incoming.write(member.shake(stranger._outgoing.read()))
    stranger._inside.write(bytes(said))
    _end(stranger)
    with pytest.raises(NotSealed, match="ended"):
        member.shake(stranger._outgoing.read())


@pytest.mark.timeout(20)
def test_one_that_ends_in_the_middle_of_a_message_is_refused():
    one, other = pair()
    meet(one, other)
    text = one.seal(b"half")
    _end(one)
    with pytest.raises(NotSealed, match="not whole"):
        other.open(text + one._outgoing.read(), memoryview(bytearray(40)))


def _shaken(one: Seal) -> bool:
    with contextlib.suppress(ssl.SSLWantReadError):
        one._inside.do_handshake()
        return True
    return False


def _end(one: Seal) -> None:
    with contextlib.suppress(ssl.SSLError):  # The other side has not ended it, too.
        one._inside.unwrap()


def test_what_lies_in_torchs_store_does_not_tell_the_secret():
    """Nor what a member shows of it elsewhere."""
    prefix = sealed.store_prefix("one")
    assert prefix == sealed.store_prefix("one") != sealed.store_prefix("other")
    assert "one" not in prefix
    assert prefix[:16] != sealed.secret_id("one")
