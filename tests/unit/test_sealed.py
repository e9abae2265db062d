"""Sealed conversations: who knows the secret, who does not, and who sits in between."""

from __future__ import annotations

import contextlib

import pytest

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
        sealed = sender.seal(message)
        assert len(sealed) == sealed_bytes(size)
        assert size < 16 or message[:16] not in sealed
        room = bytearray(size)
        receiver.open(sealed, memoryview(room))
        assert bytes(room) == message


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
