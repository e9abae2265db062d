"""A real PostgreSQL server for the tests: made in a temporary directory, reached by a Unix socket.

    server.database()     the URL of a fresh, empty database
    server.restart()      every connection breaks; what was committed is there

The server refuses to run as root, so as root it runs as `nobody`, who exists everywhere. It does
not wait for the disk: what is tested is that nothing is half-written when a *process* dies.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SECONDS_MAX = 60
SETTINGS = (
    "listen_addresses=",
    "fsync=off",
    "full_page_writes=off",
    "shared_buffers=16MB",
    "autovacuum=off",
)


class PostgresServer:
    """One server with its files; stopped and removed at the end."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        # A short path: a Unix socket's ends at 107 bytes. And none of this user's own, which
        # nobody else may enter.
        self.directory = Path(tempfile.mkdtemp(prefix="ks-pg-", dir="/tmp"))
        self._databases = 0
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(self.directory, nobody.pw_uid, nobody.pw_gid)
        how = ("--auth=trust", "--username=keepstep", "--no-sync", "--no-instructions")
        try:
            # Whatever this machine's locale is: it may not even be installed.
            self._run("initdb", *how, "--locale=C", "--encoding=UTF8")
            self.start()
        except BaseException:
            # Nobody else knows of it yet.
            self.remove()
            raise

    def start(self) -> None:
        options = " ".join(f"-c {setting}" for setting in SETTINGS)
        options += f" -c unix_socket_directories={self.directory}"
        log = str(self.directory / "log")
        self._control("start", "--log", log, "-o", options)

    def stop(self, mode: str = "immediate") -> None:
        """`immediate` is what a killed server looks like; `fast` closes every connection."""
        self._control("stop", "--mode", mode)

    @property
    def pid(self) -> int:
        """Of the process that takes in connections."""
        written = (self.directory / "data" / "postmaster.pid").read_text(encoding="utf-8")
        return int(written.split()[0])

    def restart(self) -> None:
        self.stop()
        self.start()

    def remove(self) -> None:
        try:
            if (self.directory / "data" / "postmaster.pid").exists():
                self.stop()
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)

    def url(self, database: str) -> str:
        return f"postgresql://keepstep@/{database}?host={self.directory}"

    def database(self) -> str:
        """The URL of a new database."""
        import psycopg

        self._databases += 1
        name = f"test_{self._databases}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")  # type: ignore[call-overload]
        return self.url(name)

    def _control(self, *arguments: str) -> None:
        # It gives up, and says why, before we give up on it.
        self._run("pg_ctl", "--wait", f"--timeout={SECONDS_MAX - 5}", *arguments)

    def _run(self, program: str, *arguments: str) -> None:
        # As another user through the child itself: neither su nor sudo need to be there.
        user: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": ()}
        done = subprocess.run(
            [self._programs / program, "--pgdata", self.directory / "data", *arguments],
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=SECONDS_MAX,
            check=False,
            text=True,
            **user,
        )
        assert done.returncode == 0, f"{program}: {done.stderr}"


def programs() -> Path | None:
    """Where the server's programs are: Debian keeps those of each version apart."""
    versions = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    found = sorted(versions, key=lambda path: float(path.parts[-3]))
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path else None


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    where = programs()
    if where is None:
        why = "there is no PostgreSQL server; install the Debian package postgresql"
        # Where CI may install packages it did: a server that is not found then is a fault here.
        assert not (os.environ.get("CI") and os.geteuid() == 0), why
        pytest.skip(why)
    server = PostgresServer(where)
    try:
        yield server
    finally:
        server.remove()
