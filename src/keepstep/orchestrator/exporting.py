"""A job's chain as its owner gets it: one link per line, and below them the seal.

The seal is a signature over the head and the number of links (ledger/signing.py). The key lives
beside a journal that is a file, and is made with it; for a journal in a database it is the file
that `account_key_file` names, the same on every orchestrator. Without a key nothing is sealed.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

from keepstep.config import OrchestratorConfig
from keepstep.ledger import signing
from keepstep.orchestrator.http import PIECE_BYTES
from keepstep.orchestrator.journal import Link, json_lines
from keepstep.orchestrator.journals import is_database

KEY = "account.key"
"""Beside the journal."""
PART_SECONDS_MAX = 0.005
"""Of the loop's time at once. It is looked at after each link: a page, or a long link of which an
owner may not see all, takes what it takes."""


def exported(links: Iterable[Link], job: str, signer: signing.Signer | None) -> Iterator[str]:
    """The lines of an export. What is appended meanwhile is in it, or it is not: the seal knows."""
    number, head = 0, ""
    for link in links:
        number, head = link.number, link.hash
        yield from json_lines([link])
    if signer is not None and number:
        yield signer.seal(job, number, head)


async def in_parts(lines: Iterable[str]) -> AsyncIterator[bytes]:
    """The same for a connection, which lets others run after each part.

    Pages of the journal are read by the thread that writes it, as its store may be asked by no
    other: so a part is what can be had in a few milliseconds, and no more than a piece.
    """
    part, began = bytearray(), time.monotonic()
    for line in lines:
        part += line.encode()
        if len(part) >= PIECE_BYTES or time.monotonic() - began >= PART_SECONDS_MAX:
            yield bytes(part)
            part, began = bytearray(), time.monotonic()
    if part:
        yield bytes(part)


def key_path(where: str, config: OrchestratorConfig) -> Path | None:
    """Where the key of a journal is; None: it has none."""
    if config.account_key_file:
        return Path(config.account_key_file)
    return None if is_database(where) else Path(where).absolute().parent / KEY


def signer_of(where: str, config: OrchestratorConfig) -> signing.Signer | None:
    """Who signs what this journal's orchestrator exports."""
    path = key_path(where, config)
    return None if path is None else signing.load_or_make(path)
