"""`keepstep watch`: the cluster live, with reasons as they happen.

On a terminal the screen is redrawn; in a pipe, or with -o json, each decision is a line. It needs
no terminal library: a few ANSI codes, and one write per frame so that nothing flickers.
"""

from __future__ import annotations

import argparse
import queue
import shutil
import sys
import threading
import time
from collections import deque
from typing import Any

from keepstep import codec
from keepstep.cli import common_options, view
from keepstep.cli.client import Client, Gap, from_environment
from keepstep.cli.fit import cut
from keepstep.errors import Transient

FRAME_SECONDS = 0.5
_HOME, _CLEAR_LINE, _CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("watch", help="the cluster live, with reasons as they happen")
    command.add_argument("--until-over", action="store_true", help="leave when no job runs")
    common_options(command)
    command.set_defaults(run=run)


def run(asked: argparse.Namespace) -> int:
    client = from_environment(asked.orchestrator, asked.token_file)
    client.cluster()  # A wrong address or token is an error now, not an empty screen for ever.
    if asked.output == "json" or not sys.stdout.isatty():
        return _lines(client, as_json=asked.output == "json", until_over=asked.until_over)
    return _screen(client, until_over=asked.until_over)


def _lines(client: Client, *, as_json: bool, until_over: bool) -> int:
    after: int | None = None
    while True:
        try:
            for record in client.events(after):
                if isinstance(record, Gap):
                    after = record.after
                    print(f"keepstep: {missed(record)}", file=sys.stderr, flush=True)
                elif record is not None:
                    after = int(record["seq"])
                    if as_json:
                        print(codec.dumps(record).decode(), flush=True)
                    elif record["why"]:
                        print(view.record_line(record), flush=True)
                if until_over and _all_over(client.cluster()):
                    return 0
        except Transient as error:
            print(f"keepstep: {error}; trying again", file=sys.stderr)
            time.sleep(1.0)
            if until_over:
                return 0


def missed(gap: Gap) -> str:
    return (
        f"decisions after {gap.asked} were missed: who leads now tells those from {gap.begins} on; "
        "`keepstep status` shows what became of them"
    )


def _screen(client: Client, *, until_over: bool) -> int:
    feed = Feed(client)
    sys.stdout.write(_ENTER)
    try:
        while True:
            size = shutil.get_terminal_size()
            try:
                picture = client.cluster()
            except Transient as error:
                draw([str(error), "", "trying again; Ctrl-C leaves"], size.columns)
                time.sleep(1.0)
                continue
            recent = feed.recent()
            draw(
                view.frame_lines(picture, recent, size.lines - 1, view.ansi, size.columns),
                size.columns,
            )
            if until_over and _all_over(picture):
                return 0
            feed.wait(FRAME_SECONDS)
    except KeyboardInterrupt:
        return 0
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()


def draw(lines: list[str], columns: int) -> None:
    """Put one frame on the screen, in place, with a single write."""
    short = [cut(line, columns) + _CLEAR_LINE for line in lines]
    sys.stdout.write(_HOME + "\r\n".join(short) + _CLEAR_REST)
    sys.stdout.flush()


def _all_over(picture: dict[str, Any]) -> bool:
    return all(job["over"] for job in picture["jobs"].values())


class Feed:
    """Decisions as they arrive, in a thread of its own."""

    def __init__(self, client: Client, kept_max: int = 200) -> None:
        self._client = client
        self._kept: deque[dict[str, Any]] = deque(maxlen=kept_max)
        self._news: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="keepstep-feed", daemon=True).start()

    def recent(self) -> list[dict[str, Any]]:
        while not self._news.empty():
            self._kept.append(self._news.get())
        return list(self._kept)

    def wait(self, seconds_max: float) -> None:
        """Until something was decided, or for so long."""
        try:
            self._kept.append(self._news.get(timeout=seconds_max))
        except queue.Empty:
            return

    def _listen(self) -> None:
        after = 0
        while True:
            try:
                for record in self._client.events(after):
                    if isinstance(record, Gap):
                        after = record.after
                    elif record is not None:
                        after = int(record["seq"])
                        self._news.put(record)
            except Transient:
                time.sleep(0.5)
