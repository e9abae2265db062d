"""The signing half of Ed25519 (RFC 8032); verify.py has the other one. A key is a file of 32 bytes.

Exports and terms are signed a few times a day, so plain Python is quick enough and the package
still needs nothing but the standard library. It does not run in constant time: sign on a machine
whose other users you trust. Must never: write a key that others can read, or replace one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from keepstep.errors import ConfigError, of_disk
from keepstep.ledger import verify


@dataclass(frozen=True, slots=True)
class Signer:
    """Who signs: the secret seed, and the public key in hexadecimal."""

    seed: bytes
    public: str

    def sign(self, message: bytes) -> str:
        secret, prefix = _expand(self.seed)
        nonce = _number(hashlib.sha512(prefix + message).digest()) % verify.L
        first = _pack(verify.times(nonce, verify.BASE))
        public = bytes.fromhex(self.public)
        challenge = _number(hashlib.sha512(first + public + message).digest()) % verify.L
        answer = (nonce + challenge * secret) % verify.L
        return (first + answer.to_bytes(32, "little")).hex()

    def seal(self, job: str, links: int, head: str) -> str:
        """The last line of an export: it covers every link, and how many there are."""
        signature = self.sign(verify.seal_message(job, links, head))
        said = {"head": head, "job": job, "key": self.public, "links": links}
        return json.dumps({"seal": {**said, "signature": signature}}, sort_keys=True) + "\n"

    def seal_terms(self, raw: bytes) -> str:
        """What goes into terms.toml.sig."""
        signature = self.sign(verify.TERMS + raw)
        return json.dumps({"key": self.public, "signature": signature}) + "\n"


def signer(seed: bytes) -> Signer:
    if len(seed) != 32:
        raise ConfigError("a signing key has 32 bytes")
    secret, _ = _expand(seed)
    return Signer(seed, _pack(verify.times(secret, verify.BASE)).hex())


def load(path: Path) -> Signer:
    """The key in this file: 64 hexadecimal digits."""
    try:
        return signer(bytes.fromhex(path.read_text(encoding="utf-8").strip()))
    except OSError as error:
        raise ConfigError(f"cannot read the signing key {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no signing key: 64 hexadecimal digits") from error


def load_or_make(path: Path) -> Signer:
    """The key in this file, which is made if there is none."""
    if path.exists():
        return load(path)
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_bytes(32).hex() + "\n")
        with contextlib.suppress(FileExistsError):
            # Whole or not at all, and the first one stays: two may start at once.
            os.link(fresh, path)
        fresh.unlink()
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise of_disk(error, f"cannot write the signing key {path}") from error
    return load(path)


def _expand(seed: bytes) -> tuple[int, bytes]:
    digest = hashlib.sha512(seed).digest()
    return _number(digest[:32]) & ((1 << 254) - 8) | (1 << 254), digest[32:]


def _number(raw: bytes) -> int:
    return int.from_bytes(raw, "little")


def _pack(point: verify.Point) -> bytes:
    return (point[1] | (point[0] & 1) << 255).to_bytes(32, "little")
