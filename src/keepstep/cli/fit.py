"""Lines that fit a screen: long ones are wrapped between words, below where their text began.

A line may say where its text begins (`HANG`) and which spaces belong to a word (`GLUE`); both are
gone afterwards. Colour codes take no room. Pure.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Sequence

HANG = "\v"
"""Further lines of a wrapped line begin below this place."""
GLUE = "\u00a0"
"""A space that is no place to wrap at."""
COLUMNS = 80
_CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TEXT_COLUMNS_MIN = 24
"""With less room than this to the right, text goes to the left again."""


def columns() -> int:
    """Of the terminal; in a pipe, those that everybody has."""
    return max(40, shutil.get_terminal_size((COLUMNS, 24)).columns)


def width(text: str) -> int:
    """What is seen of a text."""
    return len(_CODE.sub("", text).replace(HANG, ""))


def glued(text: str) -> str:
    return text.replace(" ", GLUE)


def fit(lines: Iterable[str], columns_max: int = COLUMNS) -> list[str]:
    """The same lines, none of them wider than this."""
    return [line for text in lines for line in _wrapped(text, columns_max)]


def cut(line: str, columns_max: int) -> str:
    """One line of at most so many characters; what is missing shows as …"""
    if width(line) <= columns_max:
        return line
    out: list[str] = []
    seen = 0
    for part in _pieces(line):
        if part.startswith("\x1b"):
            out.append(part)
        elif seen < columns_max - 1:
            out.append(part)
            seen += 1
    coloured = any(part.startswith("\x1b") for part in out)
    return "".join(out) + "…" + ("\x1b[0m" if coloured else "")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they need to be; the last one is text, and wraps."""
    all_rows = [list(heads), *(list(row) for row in rows)]
    widths = [max(width(row[at]) for row in all_rows) + 2 for at in range(len(heads) - 1)]
    return [
        "".join(glued(padded(cell, size)) for cell, size in zip(row[:-1], widths, strict=True))
        + f"{HANG}{row[-1]}"
        for row in all_rows
    ]


def padded(text: str, size: int) -> str:
    return text + " " * (size - width(text))


def _wrapped(text: str, columns_max: int) -> list[str]:
    if width(text) <= columns_max:
        return [_plain(text).rstrip()]
    indent = len(text) - len(text.lstrip(" "))
    hang = width(text.partition(HANG)[0]) if HANG in text else indent + 4
    if hang > columns_max - _TEXT_COLUMNS_MIN:
        hang = indent + 4
    lines, line = [], ""
    for space, word in re.findall(r"([ \v]*)([^ \v]+)", text):
        room = columns_max - width(line) - len(space.replace(HANG, ""))
        if line.strip() and width(word) > room:
            lines.append(line)
            line, space = " " * hang, ""
        line += space.replace(HANG, "") + word
        while width(line) > columns_max:
            # A word that fits no line: a path, a name.
            head, line = _split(line, columns_max)
            lines.append(head)
            line = " " * hang + line
    return [_plain(part).rstrip() for part in [*lines, line]]


def _split(line: str, columns_max: int) -> tuple[str, str]:
    seen, at = 0, 0
    for part in _pieces(line):
        if not part.startswith("\x1b"):
            seen += 1
            if seen > columns_max:
                break
        at += len(part)
    return line[:at], line[at:]


def _pieces(line: str) -> list[str]:
    """Colour codes whole, everything else by character."""
    return re.findall(r"\x1b\[[0-9;]*[A-Za-z]|.", line, re.DOTALL)


def _plain(text: str) -> str:
    return text.replace(HANG, "").replace(GLUE, " ")
