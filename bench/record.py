"""What every bench keeps: its raw results, with the machine, the versions and the commit.

    path = record.keep("pause", {"seed": 1, "kills": [...]})

One gzip-compressed JSON file per run in bench/results/, named by bench and moment. Numbers in the
documents are read out of these files, never typed from a terminal.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from keepstep.errors import Permanent

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def keep(bench: str, results: Mapping[str, Any]) -> Path:
    """Write one run's raw results; returns the file."""
    now = datetime.now(UTC)
    whole = {
        "bench": bench,
        "at": now.isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        **results,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{bench}-{now:%Y%m%dT%H%M%SZ}.json.gz"
    part = path.with_suffix(".part")
    with gzip.open(part, "wt", encoding="utf-8") as file:
        json.dump(whole, file, separators=(",", ":"))
    # Who is killed in the middle leaves nothing that looks like a result.
    part.replace(path)
    return path


def read(path: Path) -> dict[str, Any]:
    """What `keep` wrote."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            kept: dict[str, Any] = json.load(file)
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise Permanent(f"{path} is no raw result: {error}") from None
    return kept


def fit(
    benches: tuple[str, ...], why_unfit: Callable[[Mapping[str, Any]], str]
) -> dict[Path, dict[str, Any]]:
    """The results of these benches for a document's table: all that there are, by a rule. Nobody
    picks those that came out well. What is left out is told."""
    found = {}
    for path in sorted(RESULTS.glob("*.json.gz")):
        if not path.name.startswith(benches):
            continue
        result = read(path)
        if why := why_unfit(result):
            print(f"{path.name}: left out: {why}", file=sys.stderr)
        else:
            found[path] = result
    return found


def origin(kept: Mapping[str, Any]) -> dict[str, Any]:
    """When, where, at which commit and with what a result was made, for one that goes on."""
    return {name: kept[name] for name in ("at", "commit", "machine", "versions")}


def machine() -> dict[str, Any]:
    """What the figures depend on, as far as the machine knows itself."""
    return {
        "cpu": _first_field("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "memory": _first_field("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        # Which machine it was, and since when it runs: two of one kind are two.
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
        "load": os.getloadavg(),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "keepstep"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit() -> str:
    """The commit, with `+changes` if the tree differs from it."""
    head = _git("rev-parse", "HEAD")
    if not head:
        return "none"
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return head + ("+changes" if changes else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def _first_field(path: str, name: str) -> str:
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return ""
