"""Mutual TLS between agents, operators and orchestrators: contexts from a directory of files.

    DIR/tls.crt  DIR/tls.key  DIR/ca.crt

These are the names under which cert-manager mounts them and `keepstep admin certs` writes them.

A certificate says who its holder is by a URI among its alternative names:

    keepstep://node/NAME        an agent; it may speak for this node and no other
    keepstep://operator/NAME    a person or a program with a command line
    keepstep://orchestrator     beside the DNS names and addresses by which it is reached

Files may be renewed at any time. Each new handshake looks at them and takes the new ones; streams
that are open stay as they are, unless an authority is trusted no more that was when they began
(`forgotten`). Files that do not fit together (a certificate whose key is not there yet) are left
alone and said once: the old ones serve until the new ones are whole.

It must never fall back to an unverified connection: whoever asked for TLS gets it or an error.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from keepstep.errors import ConfigError

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
SCHEME = "keepstep"
LOOK_SECONDS = 1.0
"""Between two looks at the files: handshakes may come by the thousand."""
BUFFER_BYTES = 16 * 1024
"""One TLS record. asyncio sets aside 256 KiB for each connection otherwise; with 12,500 agents that
is 3 GiB for nothing."""
HANDSHAKE_SECONDS_MAX = 5.0

Problem = Callable[[str], None]
"""Told when renewed files cannot be read."""


def server(directory: Path, *, everybody: bool, problem: Problem) -> ssl.SSLContext:
    """For an orchestrator. `everybody`: a client without a certificate is refused at once;
    otherwise it is heard, and may do what its token says, but never speak for a node."""
    need = ssl.CERT_REQUIRED if everybody else ssl.CERT_OPTIONAL
    return _Renewed(ssl.PROTOCOL_TLS_SERVER, directory, need, problem)


def client(directory: Path, problem: Problem = lambda why: None) -> ssl.SSLContext:
    """For an agent, a command line or a worker: it shows its own certificate, and the other side's
    must come from the same authority and carry the name that was dialled."""
    return _Renewed(ssl.PROTOCOL_TLS_CLIENT, directory, ssl.CERT_REQUIRED, problem)


def small_buffers() -> None:
    """Bound what asyncio sets aside per TLS connection, in this process from now on."""
    from asyncio import sslproto

    sslproto.SSLProtocol.max_size = BUFFER_BYTES


def read(path: Path) -> dict[str, Any]:
    """What a PEM file's certificate says, as of a peer's. The one place that reads one: no chain is
    checked."""
    decoded: dict[str, Any] = ssl._ssl._test_decode_cert(str(path))  # type: ignore[attr-defined]
    return decoded


def forgotten(context: ssl.SSLContext, connection: ssl.SSLObject) -> bool:
    """Whether an authority was trusted when this connection of the context's was made, and is no
    longer. Which one the other side's certificate is of is not asked: let it show one again, and a
    handshake tells, which knows best. Where authorities were only added, nothing is forgotten."""
    if not isinstance(context, _Renewed):
        return False
    current, then = context.current(), connection.context
    return isinstance(then, _Loaded) and not then.authorities <= current.authorities


# ---------------------------------------------------------------- who is there


def node_uri(node: str) -> str:
    return f"{SCHEME}://node/{quote(node, safe='')}"


def operator_uri(name: str) -> str:
    return f"{SCHEME}://operator/{quote(name, safe='')}"


def node_of(certificate: Mapping[str, Any] | None) -> str:
    """The node that a verified certificate names; empty if it names none, or more than one."""
    names = _named(certificate, "node")
    return names[0] if len(names) == 1 else ""


def operator_of(certificate: Mapping[str, Any] | None) -> str:
    names = _named(certificate, "operator")
    return names[0] if len(names) == 1 else ""


def why_not_node(certificate: Mapping[str, Any] | None, node: str) -> str:
    """Why the holder of this certificate may not speak for a node; empty if it may."""
    if not certificate:
        return (
            "an agent needs a certificate here: give its settings tls_directory, or make one with "
            "`keepstep admin certs`"
        )
    named = node_of(certificate)
    if not named:
        return f"this certificate names no node; issue one with the URI {node_uri(node)}"
    if named != node:
        return f"this certificate is {named}'s, and does not speak for {node}"
    return ""


def _named(certificate: Mapping[str, Any] | None, kind: str) -> list[str]:
    found = []
    for what, value in (certificate or {}).get("subjectAltName", ()):
        if what != "URI":
            continue
        parts = urlsplit(value)
        if parts.scheme == SCHEME and parts.netloc == kind and len(parts.path) > 1:
            found.append(unquote(parts.path[1:]))
    return found


# ---------------------------------------------------------------- contexts that follow their files


class _Loaded(ssl.SSLContext):
    """Made from files as they were at one moment."""

    authorities: frozenset[bytes] = frozenset()
    """Those that it trusts."""


class _Renewed(ssl.SSLContext):
    """Handshakes go through a context made from the newest files that were whole.

    asyncio and http.client ask the context they were given for each connection's own object; that
    is where the files are looked at. A context cannot forget an authority, hence a new one each
    time instead of loading into this one.
    """

    def __new__(
        cls, protocol: int, directory: Path, need: ssl.VerifyMode, problem: Problem
    ) -> _Renewed:
        made = super().__new__(cls, protocol)
        assert isinstance(made, _Renewed)
        return made

    def __init__(
        self, protocol: int, directory: Path, need: ssl.VerifyMode, problem: Problem
    ) -> None:
        self._protocol, self._directory, self._need = protocol, directory, need
        self._problem = problem
        self._seen = _stamps(directory)
        self._looked_at = time.monotonic()
        self._current = _load(protocol, directory, need)
        self._said = ""

    def wrap_bio(self, *given: Any, **named: Any) -> ssl.SSLObject:
        return self.current().wrap_bio(*given, **named)

    def wrap_socket(self, *given: Any, **named: Any) -> ssl.SSLSocket:
        return self.current().wrap_socket(*given, **named)

    def current(self) -> _Loaded:
        """The one for the next handshake. Looks at the files, now and then."""
        now = time.monotonic()
        if now < self._looked_at + LOOK_SECONDS:
            return self._current
        self._looked_at = now
        stamps = _stamps(self._directory)
        if stamps == self._seen:
            return self._current
        try:
            self._current = _load(self._protocol, self._directory, self._need)
        except ConfigError as error:
            # Looked at again next time: they may be in the middle of being written.
            if str(error) != self._said:
                self._said = str(error)
                self._problem(self._said)
            return self._current
        self._seen, self._said = stamps, ""
        return self._current


def _load(protocol: int, directory: Path, need: ssl.VerifyMode) -> _Loaded:
    context = _Loaded(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if protocol == ssl.PROTOCOL_TLS_CLIENT:
        context.check_hostname = True
    else:
        # No resumption: who comes back shows a certificate that holds today.
        context.num_tickets = 0
    context.verify_mode = need
    certificate, key, authority = (directory / name for name in (CERTIFICATE, KEY, AUTHORITY))
    try:
        context.load_verify_locations(authority)
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        raise ConfigError(
            f"the certificate in {directory} cannot be used ({error.reason or error}); "
            f"{CERTIFICATE} and {KEY} must belong together, and {AUTHORITY} be PEM"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"cannot read {CERTIFICATE}, {KEY} and {AUTHORITY} in {directory}: {error.strerror}; "
            "make them with `keepstep admin certs`, or mount cert-manager's secret there"
        ) from error
    context.authorities = frozenset(context.get_ca_certs(binary_form=True))
    return context


def _stamps(directory: Path) -> tuple[tuple[int, int], ...]:
    """What changes when the files do; through symbolic links: Kubernetes swaps one of those."""
    found = []
    for name in (CERTIFICATE, KEY, AUTHORITY):
        try:
            there = os.stat(directory / name)
            found.append((there.st_mtime_ns, there.st_ino))
        except OSError:
            found.append((0, 0))
    return tuple(found)
