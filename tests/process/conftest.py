"""Process tests run in a network of their own where that is possible.

torch's store looks up the name of every client. Where a name server is slow or drops queries, each
lookup may take seconds, which is no property of what is tested here. As root the tests move into a
fresh network namespace that has a loopback and nothing else; elsewhere they run where they are.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess

import pytest

CLONE_NEWNET = 0x40000000


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before any test or fixture: everything started later inherits the namespace."""
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    ip = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if os.geteuid() != 0 or ip is None:
        return
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) == 0:
        subprocess.run([ip, "link", "set", "lo", "up"], check=True, timeout=10)
