"""Show workers' output on the agent's own: tail their log files, with the rank in front.

Files are tailed, never piped: a pipe would break, or fill up, when the agent dies. And the agent
must not stop for its reader either (a pager, a full pipe): what cannot be written now is kept up
to a bound and then dropped with a word, since all of it is in the files.
"""

from __future__ import annotations

import os
import select
from dataclasses import dataclass
from pathlib import Path

READ_BYTES_MAX = 1 << 18
KEEP_BYTES_MAX = 1 << 20
LINE_BYTES_MAX = 1 << 16
"""A longer line (a progress bar without line ends) is shown in pieces."""
_ATOMIC_BYTES = 4096
"""A pipe that polls as writable takes this much without blocking."""


@dataclass(slots=True)
class _Tail:
    path: Path
    prefix: bytes
    offset: int
    rest: bytes = b""


class Tee:
    """All the tails of a node, written to one file descriptor."""

    def __init__(self, fd: int = 1) -> None:
        self._fd = fd
        self._tails: dict[Path, _Tail] = {}
        self._waiting = bytearray()

    @property
    def following(self) -> bool:
        return bool(self._tails)

    def follow(self, path: Path, rank: int) -> None:
        """Show what is appended from now on; a log that is followed already goes on as it is."""
        if path not in self._tails:
            size = path.stat().st_size if path.exists() else 0
            self._tails[path] = _Tail(path, f"[rank{rank}]: ".encode(), size)

    def leave(self, path: Path) -> None:
        """Show the last lines and stop following."""
        tail = self._tails.get(path)
        if tail is not None:
            while self._read(tail):
                pass
            if tail.rest:
                self._keep(tail.prefix + tail.rest + b"\n")
            del self._tails[path]
        self.flush()

    def pump(self) -> None:
        """Called often: move what there is, and never block."""
        for tail in self._tails.values():
            self._read(tail)
        self.flush()

    def _read(self, tail: _Tail) -> bool:
        try:
            if tail.path.stat().st_size <= tail.offset:
                return False
            with tail.path.open("rb") as file:
                file.seek(tail.offset)
                data = file.read(READ_BYTES_MAX)
        except OSError:
            return False
        tail.offset += len(data)
        *lines, tail.rest = (tail.rest + data).split(b"\n")
        if len(tail.rest) > LINE_BYTES_MAX:
            lines, tail.rest = [*lines, tail.rest], b""
        self._keep(b"".join(tail.prefix + line + b"\n" for line in lines))
        return bool(data)

    def _keep(self, data: bytes) -> None:
        self._waiting += data
        if len(self._waiting) > KEEP_BYTES_MAX:
            self._waiting[:] = b"[keepstep]: output dropped here; the log files have all of it\n"

    def flush(self) -> None:
        while self._waiting:
            try:
                if not select.select([], [self._fd], [], 0)[1]:
                    return
                written = os.write(self._fd, self._waiting[:_ATOMIC_BYTES])
            except OSError:
                # Nobody reads any more.
                self._waiting.clear()
                return
            del self._waiting[:written]
