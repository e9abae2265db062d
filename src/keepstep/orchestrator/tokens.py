"""Who may ask for what: tokens with a role and a project, kept by digest in one file.

A token is 256 random bits. The file holds their SHA-256 digests, so whoever reads the file cannot
use it; a slow hash would add nothing, because there is nothing to guess. The orchestrator reads the
file again when it changes: a token that was taken back stops working within a second.

    viewer     reads
    operator   reads and acts: submits, stops, migrates, drains, taints, freezes
    webhook    delivers alerts, and nothing else
    admin      everything

A token of a project sees and touches that project's jobs only, and acts on nothing that all share:
no nodes, no taints, no freeze.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from keepstep import codec, private
from keepstep.errors import ConfigError, KeepstepError

PREFIX = "kst_"
"""So that scanners for leaked secrets can know one."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
"""Of a token and of a project."""
LOOK_SECONDS = 1.0
CLUSTER = "cluster-token"
"""What the journal calls whoever has the cluster's own token."""


class Role(StrEnum):
    VIEWER = "viewer"
    OPERATOR = "operator"
    WEBHOOK = "webhook"
    ADMIN = "admin"


MAY: dict[Role, frozenset[Role]] = {
    Role.VIEWER: frozenset({Role.VIEWER}),
    Role.OPERATOR: frozenset({Role.VIEWER, Role.OPERATOR}),
    Role.WEBHOOK: frozenset({Role.WEBHOOK}),
    Role.ADMIN: frozenset(Role),
}
"""What each role may do, by the role that a route asks for."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a request, as far as its token tells."""

    name: str
    role: Role
    project: str = ""
    """Empty: all of them."""

    @property
    def token(self) -> str:
        """The token's own name, without the operator who showed a certificate beside it."""
        return self.name.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Token:
    """One line of the file."""

    name: str
    role: Role
    sha256: str
    project: str = ""
    made_at: float = 0.0
    expires_at: float = 0.0
    """0: it does not."""


@dataclass(frozen=True, slots=True)
class TokenFile:
    tokens: tuple[Token, ...] = ()


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Tokens:
    """The callers that one orchestrator knows: by the file, and by the cluster's own token."""

    def __init__(self, cluster_token: str, path: Path | None = None) -> None:
        self._own = digest(cluster_token)
        self._path = path
        self._stamp: tuple[int, int] | None = (0, 0)
        """Of the file as it was read; None: it could not be read."""
        self._told = ""
        self._looked_at = 0.0
        self._known: dict[str, Token] = {}
        if path is not None:
            # Now: a file that makes no sense is an error at the start, not a locked door later.
            self._stamp = _stamp(path)
            self._known = _by_digest(read(path))

    def caller(self, text: str, now: float) -> Caller | None:
        """Whose token this is, at `now` on the wall clock; None: nobody's."""
        # Looked up by digest: how long it takes says nothing about a token that is nearly right.
        given = digest(text)
        if given == self._own:
            return Caller(CLUSTER, Role.ADMIN)
        token = self._known.get(given)
        if token is None or (token.expires_at and now >= token.expires_at):
            return None
        return Caller(token.name, token.role, token.project)

    def refresh(self, monotonic: float) -> str:
        """Read the file again if it has changed; returns why that could not be done, if so."""
        if self._path is None or monotonic < self._looked_at + LOOK_SECONDS:
            return ""
        self._looked_at = monotonic
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return ""
        before = self._told
        try:
            self._known = _by_digest(read(self._path))
        except ConfigError as error:
            # Closed rather than stale: a token that was just taken back must not go on working. And
            # read again at the next look: the trouble may have been the disk's, not the file's.
            self._known, self._stamp = {}, None
            self._told = f"{error}; until then only the cluster's own token is accepted"
            return self._told if self._told != before else ""
        self._stamp, self._told = stamp, ""
        return ""


def _by_digest(file: TokenFile) -> dict[str, Token]:
    return {token.sha256: token for token in file.tokens}


def _stamp(path: Path) -> tuple[int, int]:
    try:
        there = os.stat(path)
    except OSError:
        return (0, 0)
    return there.st_mtime_ns, there.st_ino


# ---------------------------------------------------------------- the file


def read(path: Path) -> TokenFile:
    """Strictly; raises ConfigError, which says the fix."""
    try:
        return codec.from_plain(TokenFile, codec.loads(path.read_bytes()))
    except OSError as error:
        raise ConfigError(f"cannot read the tokens file {path}: {error.strerror}") from error
    except KeepstepError as error:
        raise ConfigError(
            f"{path} is no file of `keepstep admin token` ({error}); restore it, or make it anew"
        ) from error


def new(
    path: Path, name: str, role: Role, *, project: str = "", seconds: float = 0.0
) -> tuple[str, Token]:
    """Add a token to the file, and return its text: the only time that anybody sees it."""
    for what, text in (("name", name), ("project", project)):
        if text and not NAME.fullmatch(text):
            raise ConfigError(f"{what} is {text[:80]!r}; use up to 64 letters, digits, . _ @ and -")
    if not name or name == CLUSTER:
        raise ConfigError("give the token a name of its own: the journal names it for what it did")
    if project and role in (Role.WEBHOOK, Role.ADMIN):
        raise ConfigError(f"{role} is for the whole cluster; leave out --project")
    text = PREFIX + secrets.token_urlsafe(32)
    made = time.time()
    token = Token(name, role, digest(text), project, made, made + seconds if seconds else 0.0)
    with _changing(path):
        file = read(path) if path.exists() else TokenFile()
        if any(known.name == name for known in file.tokens):
            raise ConfigError(f"there is a token called {name}; revoke it first, or take another")
        _write(path, replace(file, tokens=(*file.tokens, token)))
    return text, token


def revoke(path: Path, name: str) -> Token:
    """Take a token back."""
    with _changing(path):
        file = read(path)
        found = [token for token in file.tokens if token.name == name]
        if not found:
            known = ", ".join(token.name for token in file.tokens[:8]) or "none"
            raise ConfigError(f"no token is called {name}; there are: {known}")
        _write(path, TokenFile(tuple(t for t in file.tokens if t.name != name)))
    return found[0]


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[None]:
    """One at a time: two commands at once must not undo each other."""
    try:
        with os.fdopen(_opened(path.with_name(f".{path.name}.lock")), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _opened(lock: Path) -> int:
    """Made by whoever comes first, and used by all who may write here; never through a link, by
    which root would make a file that somebody else chose."""
    flags = os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(lock, os.O_RDWR | flags, 0o644)
    except PermissionError:
        # Another's. A lock needs no more, but on NFS, where it has to be written.
        return os.open(lock, os.O_RDONLY | flags, 0o644)


def _write(path: Path, file: TokenFile) -> None:
    with private.replacing(path) as out:
        out.write(codec.dumps(codec.to_plain(file)) + b"\n")
        if path.exists():
            _keep_owner(out.fileno(), path, path.stat())


def _keep_owner(fresh: int, path: Path, there: os.stat_result) -> None:
    """Changed by another for a day, it must not shut out the orchestrator, whose file it is."""
    us = os.geteuid()
    if us == there.st_uid:
        return
    if us != 0:
        # Only root can give a file away. The orchestrator may be in its group.
        with contextlib.suppress(OSError):
            os.fchown(fresh, -1, there.st_gid)
            os.fchmod(fresh, stat.S_IMODE(there.st_mode) & 0o660)
        return
    try:
        os.fchown(fresh, there.st_uid, there.st_gid)
    except OSError as error:
        raise ConfigError(
            f"{path} belongs to user {there.st_uid}, and would be root's from now on, which the"
            f" orchestrator could not read ({error.strerror}): run this as that user"
        ) from error
