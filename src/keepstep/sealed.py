"""An encrypted conversation between two holders of one secret, over any carrier of bytes.

For state that moves between workers, where there are no certificates: each generation of a job has
a secret of its own, and whoever knows it is a member. TLS does the ciphering; who is there is
proved by the secret.

    TLS 1.2, anonymous Diffie-Hellman (the group ffdhe3072 of RFC 7919), AES-256-GCM
    then, inside, from each side: HMAC-SHA-256(secret, role, topic, the handshake's own digest)

The handshake's digest (tls-unique, RFC 5929) differs on the two sides if somebody sits between
them, so a proof cannot be passed on. TLS 1.3 has no anonymous suites, and Python before 3.13 has no
pre-shared keys; see docs/decisions/0034.

A sealed message is longer than an open one by a known number of bytes, so that who receives knows
how much to wait for. Messages open in the order in which they were sealed, or not at all.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import secrets
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from keepstep.errors import Permanent

GROUP = Path(__file__).with_name("ffdhe3072.pem")
CIPHERS = "ADH-AES256-GCM-SHA384:@SECLEVEL=0"
"""The level refuses anonymous suites, not weak ones; the group and the cipher are given here."""
RECORD_BYTES = 16 * 1024
RECORD_EXTRA_BYTES = 29
"""Of a TLS 1.2 record with AES-GCM: 5 of head, 8 of nonce, 16 of tag."""
SLICE_BYTES = 1024 * RECORD_BYTES
"""Of a message that is handed to TLS at once; whole records, so that it shows nowhere. OpenSSL's
buffer in memory takes 1.5 GiB or so, and a message may be all that a rank holds."""
PROOF_BYTES = NONCE_BYTES = 32


class NotSealed(Permanent):
    """The other side does not know the secret, or somebody sits in between."""


def sealed_bytes(size: int) -> int:
    """How long a message of this size is once it is sealed."""
    return size + RECORD_EXTRA_BYTES * -(-size // RECORD_BYTES)


def opened_bytes(size: int) -> int:
    """The opposite: how long the message was that takes so many bytes sealed."""
    return max(0, size - RECORD_EXTRA_BYTES * -(-size // (RECORD_BYTES + RECORD_EXTRA_BYTES)))


def secret_id(secret: str) -> str:
    """Which secret is meant, for those who know it."""
    return hashlib.sha256(f"keepstep/id/{secret}".encode()).hexdigest()[:16]


def store_prefix(secret: str) -> str:
    """Under which a generation's keys lie in torch's store. Not the secret itself: the store is
    unsealed, and torch's errors tell its keys to whoever reads a log."""
    return hashlib.sha256(f"keepstep/keys/{secret}".encode()).hexdigest()[:32]


class Greeting(Protocol):
    """A handshake: words go back and forth until both sides are ready."""

    ready: bool

    def shake(self, heard: bytes) -> bytes: ...


class Challenge:
    """Both sides prove that they know a key, without saying it and without being overheard to any
    use; what follows is in the clear. `opens`: it speaks first."""

    def __init__(self, key: bytes, *, opens: bool) -> None:
        self._key, self._opens = key, opens
        self._mine, self._theirs = secrets.token_bytes(NONCE_BYTES), b""
        self.ready = False

    def shake(self, heard: bytes) -> bytes:
        """The next word after what was heard; raises NotSealed."""
        if self._opens and not heard:
            return self._mine
        if not self._opens and not self._theirs:
            if len(heard) != NONCE_BYTES:
                raise NotSealed("no greeting of ours")
            self._theirs = heard
            return self._mine + self._proof(opener=False)
        if self._opens:
            self._theirs, heard = heard[:NONCE_BYTES], heard[NONCE_BYTES:]
        if not hmac.compare_digest(heard, self._proof(opener=not self._opens)):
            raise NotSealed("the other side does not know this generation's secret")
        self.ready = True
        return self._proof(opener=True) if self._opens else b""

    def _proof(self, *, opener: bool) -> bytes:
        first, second = (self._mine, self._theirs) if self._opens else (self._theirs, self._mine)
        said = b"/".join((b"opener" if opener else b"other", first, second))
        return hmac.digest(self._key, said, hashlib.sha256)


class Seal:
    """One side of a conversation. `opens`: it speaks first.

    seal = Seal(secret, topic, opens=True); out = seal.shake(b""); … until seal.ready
    """

    def __init__(self, secret: str, topic: str, *, opens: bool) -> None:
        self._secret, self._topic, self._opens = secret.encode(), topic, opens
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._inside = _context(server=not opens).wrap_bio(
            self._incoming, self._outgoing, server_side=not opens
        )
        self._shaken = False
        self._proof = b""
        self.ready = False

    def shake(self, heard: bytes) -> bytes:
        """The next words of the handshake after what was heard; raises NotSealed."""
        try:
            self._incoming.write(heard)
            if not self._shaken:
                self._inside.do_handshake()
                self._shaken = True
                self._inside.write(self._proof_of(opener=self._opens))
            while self._shaken and len(self._proof) < PROOF_BYTES:
                part = self._inside.read(PROOF_BYTES - len(self._proof))
                if not part:
                    # Its end of TLS, which anybody can say, reads as nothing at all, for ever.
                    raise NotSealed("the other side ended in the middle of its greeting")
                self._proof += part
        except ssl.SSLWantReadError:
            return self._outgoing.read()
        except (ssl.SSLError, OSError) as error:
            raise NotSealed(f"no sealed conversation: {error}") from error
        expected = self._proof_of(opener=not self._opens)
        if not hmac.compare_digest(self._proof, expected):
            raise NotSealed("the other side does not know this generation's secret")
        self.ready = True
        return self._outgoing.read()

    def seal(self, message: bytes | memoryview) -> bytes:
        return b"".join(self.slices(message))

    def slices(self, message: bytes | memoryview) -> Iterator[bytes]:
        """The same piece by piece, in order, for whoever need not have it in one."""
        assert self.ready, "shake hands first"
        view = memoryview(message)
        for start in range(0, len(view), SLICE_BYTES):
            self._inside.write(view[start : start + SLICE_BYTES])
            yield self._outgoing.read()

    def open(self, message: bytes | memoryview, into: memoryview) -> None:
        """Fill `into` with what was sealed as `message`, which is all of it."""
        assert self.ready, "shake hands first"
        view = memoryview(message)
        try:
            for start in range(0, len(into), SLICE_BYTES):
                room, first = into[start : start + SLICE_BYTES], sealed_bytes(start)
                self._incoming.write(view[first : first + sealed_bytes(len(room))])
                while len(room):
                    # With a buffer it says how much it read; the annotations know bytes only.
                    count: Any = self._inside.read(len(room), room)
                    if not count:
                        raise NotSealed("what arrived is not whole: the other side ended it")
                    room = room[count:]
        except (ssl.SSLError, OSError) as error:
            raise NotSealed(f"what arrived was changed or is not whole: {error}") from error

    def opened(self, message: bytes) -> bytes:
        """The same, of a message that says how long it is by its own length."""
        room = bytearray(opened_bytes(len(message)))
        self.open(message, memoryview(room))
        return bytes(room)

    def _proof_of(self, *, opener: bool) -> bytes:
        binding = self._inside.get_channel_binding("tls-unique")
        assert binding, "TLS 1.2 has one"
        said = b"/".join((b"opener" if opener else b"other", self._topic.encode(), binding))
        return hmac.digest(self._secret, said, hashlib.sha256)


def shake_hands(
    greeting: Greeting, say: Callable[[bytes], None], hear: Callable[[], bytes], *, opens: bool
) -> None:
    """The whole handshake over a carrier that keeps words apart. Raises NotSealed."""
    word = greeting.shake(b"") if opens else greeting.shake(hear())
    while True:
        if word:
            say(word)
        if greeting.ready:
            return
        word = greeting.shake(hear())


@functools.cache
def _context(*, server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    # Nobody has a certificate here: the proofs inside say who it is.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    try:
        context.set_ciphers(CIPHERS)
    except ssl.SSLError as error:
        # A build for FIPS, for one.
        raise NotSealed("this TLS library has no anonymous suites; encrypt below") from error
    if server:
        context.load_dh_params(str(GROUP))
    return context
