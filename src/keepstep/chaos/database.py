"""A real PostgreSQL server of one's own: made in a temporary directory, broken at will, removed.

    with PostgresServer(programs()) as server:
        server.database()     the URL of a fresh, empty database
        server.restart()      every connection breaks; what was committed is there
        server.freeze()       nobody answers, and nothing breaks; server.thaw() ends it
        server.replica()      another server that reads along; replica.promote() makes it the first

The server refuses to run as root, so as root it runs as `nobody`, who exists everywhere. It does
not wait for the disk, unless asked to: what is tried out is that nothing is half-written when a
*process* dies.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from keepstep.errors import Permanent

SECONDS_MAX = 60
FAST = (
    "fsync=off",
    "full_page_writes=off",
    "shared_buffers=16MB",
    "autovacuum=off",
)
DURABLE = ("shared_buffers=128MB",)
"""As it comes, and with what it is usually given."""


class PostgresServer:
    """One server with its files; stopped and removed at the end."""

    def __init__(
        self,
        programs: Path,
        address: str = "",
        settings: tuple[str, ...] = FAST,
        of: PostgresServer | None = None,
    ) -> None:
        """`of`: begin as its replica, without waiting for it: what it has not sent yet is lost."""
        self._programs = programs
        self._settings = settings
        self._address = address
        """Where it listens besides its Unix socket, on the usual port; empty: nowhere."""
        # A short path: a Unix socket's ends at 107 bytes. And none of this user's own, which
        # nobody else may enter.
        self.directory = Path(tempfile.mkdtemp(prefix="ks-pg-", dir="/tmp"))
        self._databases = 0
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(self.directory, nobody.pw_uid, nobody.pw_gid)
        try:
            if of is not None:
                there = ("--host", str(of.directory), "--username", "keepstep")
                self._run("pg_basebackup", *there, "--checkpoint=fast", "--no-sync", "-R")
            else:
                # Whatever this machine's locale is: it may not even be installed.
                how = ("--auth=trust", "--username=keepstep", "--no-sync", "--no-instructions")
                self._run("initdb", *how, "--locale=C", "--encoding=UTF8")
            if address:
                network = f"{address.rpartition('.')[0]}.0/24"
                with (self.directory / "data" / "pg_hba.conf").open("a") as rules:
                    rules.write(f"host all keepstep {network} trust\n")
            self.start()
        except BaseException:
            # Nobody else knows of it yet.
            self.remove()
            raise

    def __enter__(self) -> PostgresServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def start(self) -> None:
        options = " ".join(f"-c {setting}" for setting in self._settings)
        options += f" -c unix_socket_directories={self.directory}"
        options += f" -c listen_addresses={self._address}"
        log = str(self.directory / "log")
        self._control("start", "--log", log, "-o", options)

    def stop(self, mode: str = "immediate") -> None:
        """`immediate` is what a killed server looks like; `fast` closes every connection."""
        self._control("stop", "--mode", mode)

    def replica(self) -> PostgresServer:
        return PostgresServer(self._programs, settings=self._settings, of=self)

    def promote(self) -> None:
        """It reads along no more: from now on it can be written to."""
        self._control("promote")

    @property
    def pid(self) -> int:
        """Of the process that takes in connections."""
        written = (self.directory / "data" / "postmaster.pid").read_text(encoding="utf-8")
        return int(written.split()[0])

    def restart(self) -> None:
        self.stop()
        self.start()

    def freeze(self) -> None:
        """It answers nobody, and no connection breaks."""
        for pid in self._processes():
            _signal(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in self._processes():
            _signal(pid, signal.SIGCONT)

    def remove(self) -> None:
        try:
            if (self.directory / "data" / "postmaster.pid").exists():
                self.thaw()
                self.stop()
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)

    def url(self, database: str) -> str:
        if self._address:
            return f"postgresql://keepstep@{self._address}/{database}"
        return f"postgresql://keepstep@/{database}?host={self.directory}"

    def database(self) -> str:
        """The URL of a new database."""
        self._databases += 1
        name = f"test_{self._databases}"
        self._client("createdb", name)
        return self.url(name)

    def dump(self, url: str) -> Path:
        """A backup of a database, as an operator makes one."""
        path = self.directory / f"{_name_in(url)}.dump"
        self._client("pg_dump", "--format=custom", f"--file={path}", _name_in(url))
        return path

    def put_back(self, url: str, dump: Path) -> None:
        """What came after the backup is forgotten. Nobody may be connected."""
        self._client("dropdb", "--force", _name_in(url))
        self._client("createdb", _name_in(url))
        self._client("pg_restore", f"--dbname={_name_in(url)}", str(dump))

    def _client(self, program: str, *arguments: str) -> None:
        here = ("--host", str(self.directory), "--username", "keepstep")
        self._call(program, *here, *arguments)

    def _processes(self) -> list[int]:
        """The server and its children: one per connection, and some of its own."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        # The parent first: it must not start others meanwhile.
        return [self.pid, *map(int, children.read_text(encoding="utf-8").split())]

    def _control(self, *arguments: str) -> None:
        # It gives up, and says why, before we give up on it.
        self._run("pg_ctl", "--wait", f"--timeout={SECONDS_MAX - 5}", *arguments)

    def _run(self, program: str, *arguments: str) -> None:
        self._call(program, "--pgdata", str(self.directory / "data"), *arguments)

    def _call(self, program: str, *arguments: str) -> None:
        # As another user through the child itself: neither su nor sudo need to be there.
        user: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": ()}
        done = subprocess.run(
            [self._programs / program, *arguments],
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=SECONDS_MAX,
            check=False,
            text=True,
            **user,
        )
        if done.returncode != 0:
            raise Permanent(f"{program}: {done.stderr}")


def _name_in(url: str) -> str:
    return urlsplit(url).path.removeprefix("/")


def programs() -> Path | None:
    """Where the server's programs are: Debian keeps those of each version apart."""
    versions = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    found = sorted(versions, key=lambda path: float(path.parts[-3]))
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path else None


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
