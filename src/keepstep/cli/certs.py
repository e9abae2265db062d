"""`keepstep admin certs`: a certificate authority for those who have none.

    DIR/ca/{ca.crt,ca.key}                       keep ca.key away from the cluster
    DIR/orchestrator/{tls.crt,tls.key,ca.crt}    one directory per holder, to be copied to it
    DIR/node-NAME/…  DIR/operator-NAME/…

Python's standard library reads certificates and makes none; the `openssl` program does, and is
where an administrator is. Nothing of this runs in a cluster: see docs/decisions/0034. What is there
is kept; with --renew it is issued again under the same authority, with a new key.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from keepstep import tls
from keepstep.errors import ConfigError, Permanent

AUTHORITY_DAYS = 3650
OPENSSL_SECONDS_MAX = 30.0
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
COMMON_NAME_CHARS_MAX = 64
"""For people only, and the format has no room for more."""
KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
"""Small and quick: 12,500 handshakes after a failover are the orchestrator's work."""


def add(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = groups.add_parser(
        "certs",
        help="a certificate authority, and certificates for TLS",
        description="Make a certificate authority and certificates, or those still missing.",
    )
    command.add_argument("directory", type=Path, help="where they go; ca/ca.key is the secret")
    command.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="HOST",
        help="a name or address of the orchestrators; may be given several times",
    )
    command.add_argument("--node", action="append", default=[], metavar="NAME", help="an agent's")
    command.add_argument(
        "--operator", action="append", default=[], metavar="NAME", help="a person's or program's"
    )
    command.add_argument("--days", type=int, default=90, metavar="N", help="valid for (default 90)")
    command.add_argument("--renew", action="store_true", help="issue again what is there")
    command.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    made = make(
        asked.directory,
        hosts=asked.host,
        nodes=asked.node,
        operators=asked.operator,
        days=asked.days,
        renew=asked.renew,
    )
    for path in made:
        print(path)
    return 0


def make(
    directory: Path,
    *,
    hosts: Sequence[str] = (),
    nodes: Sequence[str] = (),
    operators: Sequence[str] = (),
    days: int = 90,
    renew: bool = False,
) -> list[Path]:
    """What was made, by directory."""
    if days < 1:
        raise ConfigError(f"--days is {days}; give 1 or more")
    for name in (*nodes, *operators):
        if not NAME.fullmatch(name):
            raise ConfigError(f"{name[:80]!r} is no name; use letters, digits, dots and dashes")
    wanted = {f"node-{n}": (n, [f"URI:{tls.node_uri(n)}"]) for n in nodes}
    wanted |= {f"operator-{n}": (n, [f"URI:{tls.operator_uri(n)}"]) for n in operators}
    if hosts:
        names = [_alternative(host) for host in hosts]
        wanted["orchestrator"] = "orchestrator", [f"URI:{tls.SCHEME}://orchestrator", *names]
    made = []
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority = directory / "ca"
    if not (authority / "ca.key").exists():
        _make_authority(authority)
        made.append(authority)
    for place, (name, alternatives) in wanted.items():
        there = directory / place
        if renew or not (there / tls.CERTIFICATE).exists():
            serves = place == "orchestrator"
            _issue(authority, there, name, alternatives, days=days, serves=serves)
            made.append(there)
    return made


def _alternative(host: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9*][A-Za-z0-9.-]{0,252}", host):
            raise ConfigError(f"--host {host[:80]!r} is no name or address") from None
        return f"DNS:{host}"


def _make_authority(there: Path) -> None:
    there.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=there) as scratch:
        key, certificate = Path(scratch) / "ca.key", Path(scratch) / "ca.crt"
        _openssl(
            *("req", "-x509", *KEY, "-keyout", str(key), "-out", str(certificate)),
            *("-days", str(AUTHORITY_DAYS), "-subj", "/CN=Keepstep cluster authority"),
            *("-addext", "basicConstraints=critical,CA:TRUE,pathlen:0"),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
        )
        certificate.replace(there / "ca.crt")
        key.replace(there / "ca.key")


def _issue(
    authority: Path, there: Path, name: str, alternatives: list[str], *, days: int, serves: bool
) -> None:
    there.mkdir(mode=0o700, exist_ok=True)
    # Only an orchestrator's may serve: a node's key must not pass for an orchestrator.
    uses = "serverAuth,clientAuth" if serves else "clientAuth"
    extensions = (
        f"subjectAltName={','.join(alternatives)}\n"
        "basicConstraints=critical,CA:FALSE\n"
        "keyUsage=critical,digitalSignature\n"
        f"extendedKeyUsage={uses}\n"
        "authorityKeyIdentifier=keyid\n"
    )
    with tempfile.TemporaryDirectory(dir=there) as scratch:
        key, asked = Path(scratch) / "key", Path(scratch) / "csr"
        certificate, told = Path(scratch) / "crt", Path(scratch) / "ext"
        told.write_text(extensions, encoding="utf-8")
        _openssl(
            "req",
            "-new",
            *KEY,
            "-keyout",
            str(key),
            "-out",
            str(asked),
            "-subj",
            f"/CN={name[:COMMON_NAME_CHARS_MAX]}",
        )
        _openssl(
            *("x509", "-req", "-in", str(asked), "-out", str(certificate), "-days", str(days)),
            *("-CA", str(authority / "ca.crt"), "-CAkey", str(authority / "ca.key")),
            *("-set_serial", f"0x{os.urandom(16).hex()}", "-extfile", str(told)),
        )
        shutil.copyfile(authority / "ca.crt", there / tls.AUTHORITY)
        # The key first: who looks in between finds a pair that does not fit, and keeps the old one.
        key.replace(there / tls.KEY)
        certificate.replace(there / tls.CERTIFICATE)


def _openssl(*arguments: str) -> None:
    program = shutil.which("openssl")
    if program is None:
        raise ConfigError(
            "there is no `openssl` here; install it (apt-get install openssl), or use certificates "
            "of your own with the URIs of docs/security.md"
        )
    # Keys are written by it: for us alone.
    done = subprocess.run(
        (program, *arguments),
        capture_output=True,
        timeout=OPENSSL_SECONDS_MAX,
        check=False,
        umask=0o077,
        text=True,
    )
    if done.returncode:
        raise Permanent(f"openssl {arguments[0]} failed: {done.stderr.strip()[-500:]}")
