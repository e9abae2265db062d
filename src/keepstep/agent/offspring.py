"""A preload server that is forked from another one, which has its imports already.

Where many nodes share a machine (a lab, the demo, tests) each agent would import torch anew, with
seconds of a core and hundreds of megabytes for every node. Their launcher starts one common preload
server instead and tells the agents of it (KEEPSTEP_PRELOAD_FROM; empty: there is none). An agent
then asks that one for a fork that becomes the node's own server:

    common server --fork--> node's server, in the agent's namespaces --fork--> workers, store

An agent that cannot have such a fork, for whatever reason, starts a server of its own as it does
everywhere else; the common one may die at any time. What a fork shares with its parent and a fresh
process would not: see docs/decisions/0045.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import secrets
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from keepstep.agent import preload
from keepstep.agent.preload import Exited, Fork, Forked, Ready, Seen, from_line, to_line
from keepstep.agent.room import ProcessRecord, Room
from keepstep.detect import process
from keepstep.errors import Permanent, Unreachable

COMMON = "KEEPSTEP_PRELOAD_FROM"
"""The common server's socket, in the environment of agents."""
ENTRY = "keepstep.agent.offspring:main"
ANSWER_SECONDS_MAX = 60.0
"""The first one waits for the common server's imports, as its own would make it wait."""
TITLE_BYTES = 4096
"""Room in the common server's command line for those of its children."""
_JOINED = ("net", "ipc", "uts", "mnt")
_SAME = ("pid", "user", "cgroup")
_LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))
_ARGUMENTS_AT = 45
"""In /proc/PID/stat, behind the name: where the command line begins; next to it, where it ends."""
_CREDENTIALS = struct.Struct("iII")
HOME = str(Path(preload.__file__).resolve().parents[1])
"""Where this package lies."""


def command(path: Path, modules: Sequence[str]) -> tuple[str, ...]:
    """Starts a common server, which leaves with us."""
    words = preload.command(["--socket", str(path)])
    for name in (*modules, __name__):
        words += ["--import", name]
    return (*words, "--parent", str(os.getpid()), "--title", "." * TITLE_BYTES)


# ---------------------------------------------------------------- the agent's side


async def ask(
    path: str, room: Room, arguments: Sequence[str], environment: Mapping[str, str]
) -> ProcessRecord:
    """A fork of the common server; raises OSError or Unreachable where there is none to be had."""
    token = secrets.token_hex(8)
    mine = process.look(os.getpid())
    assert mine is not None, "we are in /proc"
    fork = Fork(
        key=f"preload/{token}",
        entry=ENTRY,
        arguments=(str(room.directory), token, f"{mine.pid}/{mine.start}", HOME, *arguments),
        environment=dict(environment),
        directory=os.getcwd(),
        # Opened by the fork itself, when it knows that it is wanted, and where the agent lives.
        log=os.devnull,
    )
    # Before it is asked for, and gone if we have given up: one that comes too late finds it so.
    _wanted_file(room.directory).write_text(token, encoding="utf-8")
    try:
        async with asyncio.timeout(ANSWER_SECONDS_MAX):
            reader, writer = await asyncio.open_unix_connection(path, limit=preload.LINE_BYTES_MAX)
            try:
                return await _answer(reader, writer, fork)
            finally:
                writer.close()
    except BaseException as error:
        _wanted_file(room.directory).unlink(missing_ok=True)
        if isinstance(error, TimeoutError):
            raise Unreachable(f"{path} did not answer in {ANSWER_SECONDS_MAX:.0f} s") from None
        raise


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fork: Fork
) -> ProcessRecord:
    raw = writer.get_extra_info("socket").getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
    )
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    while line := await reader.readline():
        message = from_line(line)
        if isinstance(message, Ready):
            if message.pid != pid or uid != os.getuid():
                raise Unreachable("somebody else listens there")
            if why := _hindrance(pid):
                raise Unreachable(why)
            writer.write(to_line(fork))
        elif isinstance(message, Exited):
            # Somebody's server, whose own agent sees for itself that it is gone.
            writer.write(to_line(Seen(message.pid, message.start)))
        elif isinstance(message, Forked) and message.key == fork.key:
            return ProcessRecord(message.pid, message.start)
    raise Unreachable("it closed its socket")


def _hindrance(common: int) -> str:
    """Why a child of that process cannot stand in for one of ours; empty if it can."""
    us = os.getpid()
    for name in _SAME:
        if _namespace(common, name) != _namespace(us, name):
            return f"it lives in another {name} namespace"
    if Path(f"/proc/{common}/cgroup").read_bytes() != Path("/proc/self/cgroup").read_bytes():
        return "it lives in another cgroup"
    if any(resource.prlimit(common, limit) != resource.getrlimit(limit) for limit in _LIMITS):
        return "it has other limits (ulimit)"
    if os.getpriority(os.PRIO_PROCESS, common) != os.getpriority(os.PRIO_PROCESS, us):
        return "it has another priority (nice)"
    return ""


def _namespace(pid: int, name: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{name}")


def _wanted_file(room: Path) -> Path:
    return room / "preload.wanted"


def wanted(room: Path, token: str) -> bool:
    """Does the agent of this room still wait for this fork?"""
    try:
        return _wanted_file(room).read_text(encoding="utf-8") == token
    except OSError:
        return False


# ---------------------------------------------------------------- in the fork


def main() -> int:
    """Becomes the preload server of the agent that asked for it."""
    directory, token, agent, home, *words = sys.argv[1:]
    room = Path(directory)
    pid, start = map(int, agent.split("/"))
    # First of all: whoever ends the node's processes from now on finds this one among them.
    show(preload.command(words))
    if home != HOME:
        return 1  # Another copy of this package than the agent's.
    stand_beside(pid)
    # Who is not sure that the agent lives leaves as well: it can do without.
    lives = process.life(pid, start) in (process.Life.ALIVE, process.Life.STOPPED)
    if not wanted(room, token) or not lives:
        return 0  # Its turn came too late: the agent died, or has started one by itself.
    _log_to(room / "preload.log")
    named = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[0:0] = [path for path in named if path not in sys.path]
    sys.argv = [preload.__name__, *words]
    return preload.main()


def stand_beside(pid: int) -> None:
    """Into the namespaces and onto the processors of that process."""
    directory = os.getcwd()
    differing = [name for name in _JOINED if _namespace(pid, name) != _namespace(os.getpid(), name)]
    # All are opened before one is entered: afterwards /proc may be another one.
    opened = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in differing]
    libc = ctypes.CDLL(None, use_errno=True)
    for name, descriptor in zip(differing, opened, strict=True):
        if libc.setns(descriptor, 0) != 0:
            why = os.strerror(ctypes.get_errno())
            raise Permanent(f"the {name} namespace of {pid} cannot be entered: {why}")
        os.close(descriptor)
    os.chdir(directory)
    os.sched_setaffinity(0, os.sched_getaffinity(pid))


def show(words: Sequence[str]) -> None:
    """From now on this is the command line of the process, and of what it forks.

    Not for the eye only: a node's processes are found by their room, which stands in it. The kernel
    shows the memory in which the first program's arguments lay, so there is only so much of it.
    """
    stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    begin, end = map(int, stat.rpartition(")")[2].split()[_ARGUMENTS_AT : _ARGUMENTS_AT + 2])
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    if len(text) > end - begin:
        raise Permanent(f"a command line of {len(text)} bytes needs more than {end - begin}")
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def _log_to(path: Path) -> None:
    out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
