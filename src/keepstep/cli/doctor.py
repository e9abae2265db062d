"""`keepstep admin doctor`: look at everything that an operator depends on, and say what to do.

The probes here are thin: they ask the orchestrators, knock at the nodes' ports and read files of
this machine. What the answers mean is decided in findings.py. Nothing is changed anywhere.
"""

from __future__ import annotations

import argparse
import os
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from keepstep import __version__, codec, tls
from keepstep.cli import common_options
from keepstep.cli.client import TLS_DIRECTORY, Client, Refusal, from_environment, secured
from keepstep.cli.findings import Certificate, Facts, Finding, Level, Reached, judge, worst
from keepstep.cli.fit import HANG
from keepstep.cli.show import painter, show
from keepstep.cli.view import Painter
from keepstep.errors import KeepstepError

PORT_SECONDS_MAX = 1.0
PORTS_NODES_MAX = 256
"""Nodes whose ports are tried: this machine is not to knock at ten thousand doors."""
AT_ONCE = 32
CERTIFICATES = ("tls.crt", "ca.crt")
"""As cert-manager names them, and `keepstep admin certs`."""
_TONES = {Level.OK: "good", Level.WARN: "busy", Level.FAIL: "bad"}


def add(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = groups.add_parser(
        "doctor",
        help="certificates, clocks, versions, ports, spares, the journal: what is wrong, the fix",
        description="Looks at what a cluster depends on, and says the fix. Ends with 1 if "
        "something is broken now, else with 0. Changes nothing.",
    )
    doctor.add_argument(
        "--certificates",
        action="append",
        type=Path,
        default=[],
        metavar="DIR",
        help="with tls.crt and ca.crt, besides our own; may be given several times",
    )
    common_options(doctor)
    doctor.add_argument("--json", action="store_const", const="json", dest="output")
    doctor.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    found = judge(look(asked))
    level = worst(found)
    plain = {"level": level.value, "findings": [codec.to_plain(finding) for finding in found]}
    show(asked, plain, lines(found, painter()))
    return 1 if level is Level.FAIL else 0


def lines(found: Sequence[Finding], paint: Painter) -> list[str]:
    """One line each, its fix below it."""
    told = []
    for finding in found:
        level = paint(f"{finding.level.value:4}", _TONES[finding.level])
        told.append(f"{level}  {finding.about}: {HANG}{finding.says}")
        if finding.fix:
            told.append(f"      fix: {HANG}{finding.fix}")
    counted = {level: sum(1 for f in found if f.level is level) for level in Level}
    told.append("")
    told.append(", ".join(f"{number} {level.value}" for level, number in counted.items()))
    return told


# ---------------------------------------------------------------- the probes


def look(asked: argparse.Namespace) -> Facts:
    """All the facts that can be had; what does not answer is one of them."""
    client = from_environment(asked.orchestrator, asked.token_file)
    clients = [Client(url.strip(), client.token) for url in client.url.split(",")]
    endpoints = [_reach(each) for each in clients]
    leading = ("leading", "cut off")
    if all(reached.status not in leading for reached in endpoints):
        named = dict.fromkeys(_named(reached) for reached in endpoints)
        leaders = [Client(url, client.token) for url in named if url and url not in client.urls]
        clients, endpoints = clients + leaders, endpoints + [_reach(each) for each in leaders]
    found = [(r.term, c) for c, r in zip(clients, endpoints, strict=True) if r.status in leading]
    asks = [c for _, c in sorted(found, key=lambda each: -each[0])]
    picture, own, seconds, now, refused, silent = None, None, 0.0, time.time(), "", ""
    try:
        for leader in asks[:1]:
            picture = leader.cluster()
            began = time.monotonic()
            own = leader.orchestrator()
            now, seconds = time.time(), time.monotonic() - began
    except Refusal as error:
        refused = str(error)
    except KeepstepError as error:
        # It answers, but not this: too slowly, too many ask, or it has just gone.
        silent = str(error)
    ports, left_out = _knock((picture or {"nodes": {}})["nodes"])
    return Facts(
        now=now,
        release=__version__,
        endpoints=tuple(endpoints),
        refused=refused,
        silent=silent,
        token_mode=_mode(asked.token_file or os.environ.get("KEEPSTEP_TOKEN_FILE", "")),
        certificates=_certificates(asked.certificates, [each.url for each in clients]),
        picture=picture,
        own=own,
        asked_seconds=seconds,
        ports=ports,
        ports_left_out=left_out,
    )


def _reach(client: Client) -> Reached:
    try:
        health = client.health()
        status, leader = str(health["status"]), str(health.get("leader") or "")
        term = int(health.get("term") or 0)
    except KeepstepError as error:
        return Reached(client.url, problem=str(error))
    try:
        client.ready()
    except KeepstepError as error:
        # One of a release before this has no such path, and says so.
        ready = isinstance(error, Refusal) and error.status != 503
        return Reached(client.url, status=status, ready=ready, leader=leader, term=term)
    return Reached(client.url, status=status, ready=True, leader=leader, term=term)


def _named(reached: Reached) -> str:
    """Whom one that follows sends us to, as it sends any other command: who leads is to be asked,
    though nobody named it here. The token does not follow into plain text."""
    safe = reached.leader.startswith("https:") or not reached.url.startswith("https:")
    return reached.leader if safe else ""


def _mode(token_file: str) -> int | None:
    try:
        return Path(token_file).stat().st_mode & 0o777 if token_file else None
    except OSError:
        return None


def _certificates(directories: Sequence[Path], urls: Sequence[str]) -> tuple[Certificate, ...]:
    """Those in files, this command's own among them, and what the orchestrators show."""
    own = os.environ.get(TLS_DIRECTORY, "")
    files = dict.fromkeys([*directories, *([Path(own)] if own else [])])
    found = [certificate(directory / name) for directory in files for name in CERTIFICATES]
    seen = (shown(url) for url in urls if url.startswith("https://"))
    return (*found, *(certificate for certificate in seen if certificate is not None))


def shown(url: str) -> Certificate | None:
    """What an orchestrator shows to who comes, checked as any client checks it; None if there is no
    answer, which is another finding."""
    place = urlsplit(url)
    host, named = place.hostname or "", f"the one shown by {url}"
    try:
        with (
            socket.create_connection((host, place.port or 443), PORT_SECONDS_MAX) as bare,
            secured(os.environ).wrap_socket(bare, server_hostname=host) as secure,
        ):
            ends = str((secure.getpeercert() or {})["notAfter"])
            return Certificate(named, ssl.cert_time_to_seconds(ends))
    except (ssl.SSLError, KeyError, ValueError, KeepstepError) as error:
        return Certificate(named, problem=f"cannot be trusted: {error}")
    except OSError:
        return None


def certificate(path: Path) -> Certificate:
    """When a PEM file's certificate expires. No chain is checked."""
    try:
        return Certificate(str(path), ssl.cert_time_to_seconds(tls.read(path)["notAfter"]))
    except (OSError, ValueError, KeyError) as error:
        return Certificate(str(path), problem=f"cannot be read: {error}")


def _knock(nodes: Mapping[str, Any]) -> tuple[dict[str, str], int]:
    """Each living node's peer port and store port, tried from here."""
    living = {name: node for name, node in nodes.items() if node["alive"] and "peer_port" in node}
    doors = {
        f"{name} {what} {node['address']}:{node[f'{what}_port']}": (
            node["address"],
            int(node[f"{what}_port"]),
        )
        for name, node in list(living.items())[:PORTS_NODES_MAX]
        for what in ("peer", "store")
        if node[f"{what}_port"]
    }
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = dict(zip(doors, pool.map(_door, doors.values()), strict=True))
    return found, max(0, len(living) - PORTS_NODES_MAX)


def _door(door: tuple[str, int]) -> str:
    try:
        socket.create_connection(door, PORT_SECONDS_MAX).close()
    except OSError as error:
        return str(error) or type(error).__name__
    return ""
