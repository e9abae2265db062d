"""Documents with tables that a script makes: between two marks, each at the beginning of a line.

    <!-- turns:begin -->
    …
    <!-- turns:end -->

The first mark may say more than its name, what its tables are of: `<!-- bench:begin kills -->`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from keepstep.errors import Permanent

Marks = tuple[str, str]
"""How the first one begins, and the whole of the second."""


def add_option(parser: argparse.ArgumentParser, what: str = "its table, at its marks") -> None:
    """For a script that makes tables."""
    parser.add_argument(
        "--write", action="append", type=Path, default=[], metavar="DOCUMENT", help=what
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Its lines, in Markdown."""
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]


def write(documents: Sequence[Path], marks: Marks, table_of: Callable[[str], str]) -> None:
    """All of them or none. `table_of`: a document's text to what stands between its marks then."""
    texts = [(path, path.read_text(encoding="utf-8")) for path in documents]
    whole = [(path, replaced(text, table_of(text), marks)) for path, text in texts]
    for path, text in whole:
        path.write_text(text, encoding="utf-8")


def replaced(text: str, table: str, marks: Marks) -> str:
    """A document with what is between the marks replaced."""
    before, more, _, after = _around(text, marks)
    return f"{before}{marks[0]}{more}-->\n{table}\n{marks[1]}{after}"


def between(text: str, marks: Marks) -> str:
    """What stands there now."""
    return _around(text, marks)[2]


def words(text: str, marks: Marks) -> list[str]:
    """What the first mark says beyond its name."""
    return _around(text, marks)[1].split()


def _around(text: str, marks: Marks) -> tuple[str, str, str, str]:
    """What is before the marks, what the first one says, what is between them and behind them.
    A sentence about a mark is none."""
    begin, end = map(re.escape, marks)
    found = re.search(rf"^{begin}([^>\n]*)-->\n(.*?)\n?^{end}", text, re.DOTALL | re.MULTILINE)
    if not found:
        raise Permanent(f"no {marks[0]} --> … {marks[1]} at the beginning of lines")
    return text[: found.start()], found[1], found[2].strip("\n"), text[found.end() :]
