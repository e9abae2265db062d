"""The group log: every process group ever made, so that a joiner can make the same ones.

torch names groups by counting them, on every rank for itself. A joiner that has not counted along
would give its next group another name than its peers and wait for them for ever.

Must never: depend on torch's state; these are plain records, and the functions are pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from keepstep.errors import ConfigError


@dataclass(frozen=True)
class GroupRecord:
    """One group that was ever made, as every rank must make it to keep names aligned."""

    order: int
    name: str
    ranks: tuple[int, ...]
    backend: str
    timeout_seconds: float
    destroyed: bool = False

    @property
    def hashed(self) -> bool:
        """Named by a hash over its members (`use_local_synchronization`), not by a count."""
        return not self.name.isdigit()


def merge_logs(logs: Iterable[Sequence[GroupRecord]]) -> tuple[GroupRecord, ...]:
    """The union of several ranks' logs: what each of them must replay before a reform.

    Ranks leave a broken step at different points, so one may have made a group, or destroyed
    it, that another has not come to yet.
    """
    merged: dict[str, GroupRecord] = {}
    for log in logs:
        for record in log:
            known = merged.get(record.name)
            if known is None:
                merged[record.name] = record
            elif known.ranks != record.ranks:
                raise ConfigError(
                    f"group {record.name} has ranks {known.ranks} on one rank and {record.ranks} "
                    "on another: make groups in the same order on every rank"
                )
            elif record.destroyed:
                merged[record.name] = replace(known, destroyed=True)
    ordered = sorted(merged.values(), key=order_of)
    return tuple(replace(record, order=order) for order, record in enumerate(ordered))


def order_of(record: GroupRecord) -> tuple[int, int, str]:
    """An order that every rank computes alike: it decides who waits for whom in a reform."""
    return (1, 0, record.name) if record.hashed else (0, int(record.name), "")


def encode_log(records: Sequence[GroupRecord]) -> str:
    """The log as JSON, for a store or a message."""
    return json.dumps([asdict(record) for record in records])


def digest_log(records: Sequence[GroupRecord]) -> str:
    """The same for ranks that have made the same groups, in whatever order they came to know."""
    return hashlib.sha256(encode_log(merge_logs([records])).encode()).hexdigest()[:16]


def decode_log(text: str) -> tuple[GroupRecord, ...]:
    """The inverse of `encode_log`; a record that does not fit raises TypeError."""
    return tuple(
        GroupRecord(**(fields | {"ranks": tuple(fields["ranks"])})) for fields in json.loads(text)
    )
