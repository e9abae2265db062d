"""Certificates for very many agents: one for each node, as mutual TLS asks for.

All share one key, which saves making 12,500 of them; nobody here is to be kept apart, and a
handshake costs the same. What names a node is its certificate, and each has its own.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from keepstep import tls
from keepstep.cli import certs

OPERATOR = "bench"
SECONDS_MAX = 60.0
DAYS = 90


def make(directory: Path, nodes: Sequence[str]) -> None:
    """The orchestrator's, an operator's, and those of all nodes: DIRECTORY/nodes/NODE.crt."""
    certs.make(directory, hosts=["127.0.0.1"], operators=[OPERATOR])
    there = directory / "nodes"
    there.mkdir(exist_ok=True)
    (there / tls.AUTHORITY).write_bytes((directory / "ca" / "ca.crt").read_bytes())
    key, request = str(there / tls.KEY), there / "csr"
    if not request.exists():
        made = ("-keyout", key, "-out", str(request), "-subj", "/CN=n")
        _openssl("req", "-new", *certs.KEY, *made)
    missing = [node for node in nodes if not _issued(there / f"{node}.crt")]
    with ThreadPoolExecutor(2) as pool:
        for _ in pool.map(lambda node: _issue(directory / "ca", there, node), missing):
            pass


def _issued(path: Path) -> bool:
    """Whole, and good for a day or more."""
    return path.exists() and path.stat().st_mtime > time.time() - (DAYS - 1) * 86_400


def _issue(authority: Path, there: Path, node: str) -> None:
    told, made = there / f"{node}.ext", there / f"{node}.new"
    told.write_text(
        f"subjectAltName=URI:{tls.node_uri(node)}\nbasicConstraints=critical,CA:FALSE\n"
        "keyUsage=critical,digitalSignature\nextendedKeyUsage=clientAuth\n",
        encoding="utf-8",
    )
    _openssl(
        *("x509", "-req", "-in", str(there / "csr"), "-out", str(made)),
        *("-CA", str(authority / "ca.crt"), "-CAkey", str(authority / "ca.key")),
        *("-days", str(DAYS)),
        *("-set_serial", f"0x{node.encode().hex()}", "-extfile", str(told)),
    )
    told.unlink()
    # Whoever finds it finds all of it.
    made.rename(there / f"{node}.crt")


def _openssl(*line: str) -> None:
    subprocess.run(["openssl", *line], check=True, capture_output=True, timeout=SECONDS_MAX)
