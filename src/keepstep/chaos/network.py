"""Nodes as network namespaces, so that a node can fall silent: no reset, no end of stream.

        hub namespace: the campaign and the orchestrator, 10.77.0.1
          br0 --+-- veth -- node n0, 10.77.0.10
                +-- veth -- node n1, 10.77.0.11      cut(n1): its port leaves the bridge

Taking a port off the bridge changes no carrier and answers nothing: to everybody else, and to the
node itself, the packets are simply gone. So it is with packets to a station that is not there: a
node can be parted from some of the others only. Needs root. Names carry our pid, and what an
earlier campaign left behind when it was killed is swept first.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from keepstep.errors import ConfigError, Permanent

HUB_ADDRESS = "10.77.0.1"
HUB = "hub"
INTERFACE = "eth0"
"""The nodes' side of each pair."""
_PREFIX = "10.77.0"
_FIRST_HOST = 10
_NOBODY = "02:00:00:00:00:01"
"""A station that is not there."""
_CLONE_NEWNET = 0x40000000
_NAMESPACES = Path("/run/netns")
_OURS = re.compile(r"keepstep-(\d+)-.+")
COMMAND_SECONDS_MAX = 60.0
"""Namespaces take milliseconds, but not on a machine that a campaign keeps busy."""


def available() -> str:
    """Why namespaces cannot be used here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the `ip` command (iproute2)"
    return ""


class Network:
    """The namespaces of one campaign. Enter it before any thread is started."""

    def __init__(self) -> None:
        self._addresses: dict[str, str] = {}
        if why := available():
            raise ConfigError(f"{why}; run as root, or leave the silent kinds out (--kinds)")
        self._hub = f"keepstep-{os.getpid()}-hub"
        self._ports: dict[str, str] = {}
        self._home = -1

    def __enter__(self) -> Network:
        _sweep()
        # What we came from, so that leaving brings us back.
        self._home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _ip("netns", "add", self._hub)
            _ip("-n", self._hub, "link", "set", "lo", "up")
            _ip("-n", self._hub, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
            _ip("-n", self._hub, "addr", "add", f"{HUB_ADDRESS}/24", "dev", "br0")
            _ip("-n", self._hub, "link", "set", "br0", "up")
            _enter(_NAMESPACES / self._hub)
        except (KeyboardInterrupt, SystemExit, Permanent, OSError):
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the hub and remove everything. Safe to repeat."""
        if self._home >= 0:
            _set_namespace(self._home)
            os.close(self._home)
            self._home = -1
        for node in list(self._ports):
            _quietly("netns", "del", self._namespace(node))
        self._ports = {}
        _quietly("netns", "del", self._hub)

    def join(self, node: str) -> str:
        """A namespace for a node; returns its address."""
        number = len(self._ports)
        address = f"{_PREFIX}.{_FIRST_HOST + number}"
        namespace, port = self._namespace(node), f"p{number}"
        self._ports[node], self._addresses[node] = port, address
        _ip("netns", "add", namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")
        _ip(
            *("-n", self._hub, "link", "add", port, "type", "veth"),
            *("peer", "name", INTERFACE, "netns", namespace),
        )
        _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", INTERFACE)
        _ip("-n", namespace, "link", "set", INTERFACE, "up")
        _ip("-n", self._hub, "link", "set", port, "master", "br0", "up")
        return address

    def prefix(self, node: str) -> tuple[str, ...]:
        """What to put before a command so that it runs on the node."""
        return ("ip", "netns", "exec", self._namespace(node))

    def cut(self, node: str) -> None:
        """From now on the node is silent, and hears nothing."""
        _ip("-n", self._hub, "link", "set", self._ports[node], "nomaster")

    def heal(self, node: str) -> None:
        """Undo a cut. Safe to repeat."""
        _ip("-n", self._hub, "link", "set", self._ports[node], "master", "br0")

    def part(self, node: str, others: Sequence[str]) -> None:
        """Whatever a node says to these (HUB: to us) is lost, and nobody tells it so."""
        for address in self._of(others):
            known = ("dev", INTERFACE, "lladdr", _NOBODY, "nud", "permanent")
            _ip("-n", self._namespace(node), "neigh", "replace", address, *known)

    def unite(self, node: str, others: Sequence[str]) -> None:
        """Undo a parting. Safe to repeat."""
        for address in self._of(others):
            whom = ("to", address, "dev", INTERFACE, "nud", "permanent")
            _ip("-n", self._namespace(node), "neigh", "flush", *whom)

    def _of(self, nodes: Sequence[str]) -> list[str]:
        return [HUB_ADDRESS if node == HUB else self._addresses[node] for node in nodes]

    def _namespace(self, node: str) -> str:
        return f"keepstep-{os.getpid()}-{node}"


def _sweep() -> None:
    """Remove the namespaces of campaigns that were killed."""
    if not _NAMESPACES.is_dir():
        return
    for path in _NAMESPACES.iterdir():
        match = _OURS.fullmatch(path.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            _quietly("netns", "del", path.name)


def _enter(namespace: Path) -> None:
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _set_namespace(descriptor)
    finally:
        os.close(descriptor)


def _set_namespace(descriptor: int) -> None:
    """The calling thread moves; threads that it starts later inherit its place."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def _ip(*arguments: str) -> None:
    done = _run(arguments)
    if done.returncode != 0:
        raise Permanent(f"`ip {' '.join(arguments)}` failed: {done.stderr.decode().strip()}")


def _quietly(*arguments: str) -> None:
    _run(arguments)


def _run(arguments: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            ["ip", *arguments], capture_output=True, timeout=COMMAND_SECONDS_MAX, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Permanent(f"`ip {' '.join(arguments)}` hangs") from error
