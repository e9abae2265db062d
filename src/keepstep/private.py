"""Directories and files for their owner alone, also where everybody may make one: /dev/shm, /tmp.

    /dev/shm          everybody may write here
      keepstep-1000   ours or root's, and nobody else may write into it
        1f0c…
          n1          ours, and for nobody else

A name below such a directory belongs to whoever comes first. `mkdir` with exist_ok takes what is
there, whosever it is, and with parents=True gives the levels between what the umask says. So each
level is made alone, looked at, and trusted before anything is made in it. Where nobody else may
write, what is there was put there by its owner, and is left as it is.

A file is made anew under a name that nobody can have known, and renamed: root, who writes it into
somebody's directory, must not write through a link that was put there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from keepstep.errors import ConfigError

OTHERS = 0o077
OTHERS_WRITE = 0o022


def make(directory: Path) -> None:
    """Make a directory and those above it. Raises ConfigError if others may meddle with it."""
    # Not resolved: a link that somebody else has put there must be seen.
    wanted = Path(os.path.abspath(directory))
    shared = False
    for level in (*reversed(wanted.parents), wanted):
        if not os.path.lexists(level):
            with contextlib.suppress(FileExistsError):  # Whoever was faster is looked at, too.
                os.mkdir(level, 0o700)
        if shared and level != wanted:
            _take_back(level)
        if shared and (why := _why_not(level, last=level == wanted)):
            raise ConfigError(
                f"{level} {why}, so somebody else could read or replace what is kept in it: "
                f"chmod 700 it if it is yours, or have it removed, or choose another place than "
                f"{wanted}"
            )
        shared = shared or bool(os.stat(level).st_mode & stat.S_IWOTH)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file of ours, which takes the place of this one if all of it could be written. If not,
    nothing is left of it. Raises OSError."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(fresh, flags, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as out:
            yield out
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def _take_back(level: Path) -> None:
    """A level of ours that an earlier release left open to its group, by the umask: close it. What
    somebody may have put there meanwhile is looked at, level by level."""
    found = os.lstat(level)
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if ours and found.st_mode & OTHERS_WRITE == stat.S_IWGRP:
        os.chmod(level, stat.S_IMODE(found.st_mode) & ~stat.S_IWGRP)


def _why_not(level: Path, *, last: bool) -> str:
    """Why a level cannot be trusted; empty if it can. Only the last one holds secrets."""
    found = os.lstat(level)
    if not stat.S_ISDIR(found.st_mode):
        return "is no directory"
    owners = {os.geteuid()} if last else {os.geteuid(), 0}
    if found.st_uid not in owners:
        return f"belongs to user {found.st_uid}"
    # Who may write into a sticky directory can neither rename nor remove what others have there.
    sticky = bool(found.st_mode & stat.S_ISVTX)
    open_to = OTHERS if last else 0 if sticky else OTHERS_WRITE
    if found.st_mode & open_to:
        return f"is open to others (mode {stat.S_IMODE(found.st_mode):04o})"
    return ""
