"""`keepstep admin certs`: a certificate authority for those who have none.

    DIR/ca/{ca.crt,ca.key}                       keep ca.key away from the cluster
    DIR/orchestrator/{tls.crt,tls.key,ca.crt}    one directory per holder, to be copied to it
    DIR/node-NAME/…  DIR/operator-NAME/…

Python's standard library reads certificates and makes none; the `openssl` program does, and is
where an administrator is. Nothing of this runs in a cluster: see docs/decisions/0034. What is there
is kept, and said to be; with --renew it is issued again under the same authority, with its names
and a new key. An authority is never made over another one, whose key may be kept elsewhere.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from keepstep import private, tls
from keepstep.errors import ConfigError, Permanent

AUTHORITY_DAYS = 3650
OPENSSL_SECONDS_MAX = 30.0
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
ORCHESTRATOR = "orchestrator"
HOLDERS = ("node-", "operator-")
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
    command.add_argument(
        "--renew", action="store_true", help="issue again what is there; without names, all of it"
    )
    command.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    done = make(
        asked.directory,
        hosts=asked.host,
        nodes=asked.node,
        operators=asked.operator,
        days=asked.days,
        renew=asked.renew,
    )
    for path in done.made:
        print(path)
    for note in done.notes:
        print(note, file=sys.stderr)
    return 0


@dataclass(frozen=True, slots=True)
class Done:
    """What became of what was asked for."""

    made: list[Path]
    """By directory."""
    notes: list[str]
    """What was kept as it is, and what to do if that was not meant."""


def make(
    directory: Path,
    *,
    hosts: Sequence[str] = (),
    nodes: Sequence[str] = (),
    operators: Sequence[str] = (),
    days: int = 90,
    renew: bool = False,
) -> Done:
    """Issue what is asked for and is missing, or with `renew` what is there: without names, all."""
    if days < 1:
        raise ConfigError(f"--days is {days}; give 1 or more")
    for name in (*nodes, *operators):
        if not NAME.fullmatch(name):
            raise ConfigError(f"{name[:80]!r} is no name; use letters, digits, dots and dashes")
    holders = _holders(directory)
    asked = [*(f"node-{n}" for n in nodes), *(f"operator-{n}" for n in operators)]
    asked += [ORCHESTRATOR] if hosts else []
    if renew and not asked:
        asked = holders
        if not asked:
            fix = "name for whom to issue with --host, --node and --operator"
            raise ConfigError(f"nothing in {directory} can be renewed; {fix}")
    notes: list[str] = []
    wanted = {place: [_uri(place)] for place in asked if place != ORCHESTRATOR}
    if ORCHESTRATOR in asked:
        there = directory / ORCHESTRATOR
        wanted[ORCHESTRATOR] = _names_of_orchestrator(there, hosts, notes, renew=renew)
    issued = [place for place in wanted if renew or place not in holders]
    if kept := [place for place in wanted if place not in issued]:
        notes.append(f"kept as they are: {', '.join(kept)}; --renew issues them again")
    made = []
    authority = directory / "ca"
    if issued or not (authority / "ca.crt").exists():
        is_new = _is_new(authority, holders)
        private.make(directory)
        if is_new:
            _make_authority(authority)
            made.append(authority)
    for place in issued:
        _issue(authority, directory / place, wanted[place], days=days)
        made.append(directory / place)
    if not (asked or made):
        notes.append(f"{authority} is there, and nothing else was asked for")
    return Done(made, notes)


def _holders(directory: Path) -> list[str]:
    """Whose certificates are there, by directory."""
    found = sorted(path.parent.name for path in directory.glob(f"*/{tls.CERTIFICATE}"))
    return [place for place in found if place == ORCHESTRATOR or place.startswith(HOLDERS)]


def _is_new(authority: Path, holders: Sequence[str]) -> bool:
    """Whether an authority is still to be made. One that somebody trusts is never replaced: its
    key may only be elsewhere, where it is safe."""
    missing = [name for name in ("ca.crt", "ca.key") if not (authority / name).exists()]
    if not missing:
        return False
    if len(missing) == 2 and not holders:
        return True
    raise ConfigError(
        f"{authority} lacks {' and '.join(missing)} of an authority that was made before: put that "
        "back for as long as this takes. For another authority choose another directory"
    )


def _uri(place: str) -> str:
    kind, _, name = place.partition("-")
    return f"URI:{tls.node_uri(name) if kind == 'node' else tls.operator_uri(name)}"


def _names_of_orchestrator(
    there: Path, hosts: Sequence[str], notes: list[str], *, renew: bool
) -> list[str]:
    """All its names: a name that clients dial must not be lost because another one is given."""
    given = [_alternative(host) for host in hosts]
    path = there / tls.CERTIFICATE
    known = []
    if path.exists():
        try:
            shown = tls.read(path)
        except (OSError, ValueError) as error:
            fix = f"remove {there} to have it issued anew"
            raise ConfigError(f"{path} cannot be read ({error}); {fix}") from error
        names = shown.get("subjectAltName", ())
        known = [_alternative(name.strip()) for kind, name in names if kind != "URI"]
        added = [name for name in given if name not in known]
        if added and not renew:
            raise ConfigError(
                f"{there} does not name {', '.join(added)}; with --renew it is issued again, with "
                "all its names"
            )
        if given and (more := [name for name in known if name not in given]):
            fix = f"to drop a name, remove {there} first, and give all others"
            notes.append(f"{there} still names {', '.join(more)}; {fix}")
    return list(dict.fromkeys([f"URI:{tls.SCHEME}://{ORCHESTRATOR}", *known, *given]))


def _alternative(host: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9*][A-Za-z0-9.-]{0,252}", host):
            raise ConfigError(f"--host {host[:80]!r} is no name or address") from None
        return f"DNS:{host.lower()}"


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


def _issue(authority: Path, there: Path, alternatives: list[str], *, days: int) -> None:
    there.mkdir(mode=0o700, exist_ok=True)
    # Only an orchestrator's may serve: a node's key must not pass for an orchestrator.
    serves = there.name == ORCHESTRATOR
    uses = "serverAuth,clientAuth" if serves else "clientAuth"
    name = there.name if serves else there.name.partition("-")[2]
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
        with private.replacing(there / tls.AUTHORITY) as copy:
            copy.write((authority / "ca.crt").read_bytes())
            # No secret: who may look at certificates needs it, too.
            os.fchmod(copy.fileno(), 0o644)
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
