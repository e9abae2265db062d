"""A job's policy from a TOML file: what its owner decides about faults.

    hold_seconds_max = 1200          # for all jobs

    [job.llama-70b]                  # for one
    unit = "node"

    [job."eval-*"]                   # for those whose name fits
    mode = "observe"

For each key the most exact section that has it counts: a job's own name, then patterns by the
number of characters that are no wildcards, then the top of the file. Of equally exact ones the
later counts. What the command line says beats the file. A key that is unknown, a value of the
wrong kind, a number that is not above zero: the whole file is refused, with the fix, also where
the mistake is in another job's section.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keepstep.config import (
    checked,
    commented,
    explanations,
    need,
    ordered,
    positive,
    read_toml,
    toml,
)
from keepstep.errors import ConfigError
from keepstep.model import Policy

WILDCARDS = "*?[]"
SILENT_SECONDS_MIN = 1.2
"""Of silent_seconds_max: heartbeats come every 0.5 s at their fastest, and the second may be late.
A shorter silence is no silence, and a node that is well would be taken for lost again and again."""


def read(path: Path | None, job: str, explicit: Mapping[str, object] | None = None) -> Policy:
    """The policy of one job; `explicit` is what its command line says."""
    values: dict[str, Any] = dict(_for_job(path, job)) if path is not None else {}
    for key, value in (explicit or {}).items():
        values[key] = checked(Policy, key, value, "the command line")
    policy = Policy(**values)
    check(policy)
    return policy


def check(policy: Policy) -> None:
    """Raises ConfigError, which says the fix, if settings make no sense, alone or together."""
    positive(policy)
    ordered(policy, "restart_grace_seconds", "silent_seconds_max")
    need(
        policy.silent_seconds_max >= SILENT_SECONDS_MIN,
        f"silent_seconds_max is {policy.silent_seconds_max}; give {SILENT_SECONDS_MIN} or more: "
        "heartbeats come every 0.5 s, and one that is late must not look like a lost node",
    )


def _for_job(path: Path, job: str) -> dict[str, object]:
    document = read_toml(path, "--policy")
    sections = document.pop("job", {})
    if not isinstance(sections, dict):
        raise ConfigError(f"{path}: job is for sections: write [job.NAME]")
    values = _checked_table(document, str(path))
    fitting: list[tuple[tuple[bool, int], int, dict[str, object]]] = []
    for number, (name, table) in enumerate(sections.items()):
        where = f"{path}: [job.{name}]"
        if not isinstance(table, dict):
            raise ConfigError(f"{where} is no section; write [job.{name}] above its settings")
        found = _checked_table(table, where)
        if fnmatch.fnmatchcase(job, name):
            fitting.append((_exactness(name), number, found))
    for _, _, found in sorted(fitting, key=lambda fit: fit[:2]):
        values |= found
    return values


def _exactness(name: str) -> tuple[bool, int]:
    plain = len([letter for letter in name if letter not in WILDCARDS])
    return (plain == len(name), plain)


def _checked_table(table: Mapping[str, Any], where: str) -> dict[str, object]:
    values: dict[str, object] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            quoted = f'; a name with a dot is quoted: [job."NAME.{key}"]'
            fix = quoted if where.endswith("]") else ""
            raise ConfigError(f"{where}: unknown section {key!r}; sections are [job.NAME]{fix}")
        values[key] = checked(Policy, key, value, where)
        if isinstance(value, str) and not isinstance(values[key], str):
            raise ConfigError(f"{where}: {key} is text; write the number without quotes")
    try:
        # A section by itself has to make sense: nobody should have to add up to see a mistake.
        positive(dataclasses.replace(Policy(), **values))  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return values


# ---------------------------------------------------------------- telling


def explain(policy: Policy | None = None) -> str:
    """Every setting with its reason, as a TOML file; of a policy, or of the defaults."""
    reasons, shown = explanations(Policy), policy or Policy()
    lines = ["# What a job's owner may decide about faults.", ""]
    for field in dataclasses.fields(Policy):
        lines += commented(field.name, getattr(shown, field.name), reasons[field.name])
    return "\n".join(lines)


def table() -> str:
    """The same as a table for the documentation."""
    reasons = explanations(Policy)
    rows = ["| setting | default | what it decides |", "|---|---|---|"]
    for field in dataclasses.fields(Policy):
        reason = re.sub(r"\s+", " ", reasons[field.name])
        rows.append(f"| `{field.name}` | `{toml(field.default)}` | {reason} |")
    return "\n".join(rows) + "\n"
