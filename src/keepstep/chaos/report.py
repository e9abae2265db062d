"""What a campaign says: a line per fault, a bar on a terminal, the matrix, the last line, the file.

Everything but the printing is pure, so that the wording is tested without a campaign.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.agent import offspring
from keepstep.chaos.faults import Cell, Outcome, matrix
from keepstep.chaos.proof import StepLogCheck
from keepstep.chaos.reckoning import Reckoning

if TYPE_CHECKING:
    from keepstep.chaos.campaign import Plan, Record


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a campaign, compared with the fault-free run."""

    bit_exact: bool
    log: StepLogCheck
    differences: tuple[str, ...]
    steps: int
    stated: str | None = None
    """Where the end cannot be bit-exact: what is not as it was stated, or nothing. None: it can."""
    account: Reckoning = Reckoning()

    @property
    def good(self) -> bool:
        right = self.bit_exact if self.stated is None else not self.stated
        return right and self.log.sound and not self.account.problem

    @property
    def end(self) -> str:
        """The end in a few words."""
        if self.stated is None:
            return f"bit-exact {'yes' if self.bit_exact else 'no'}"
        how = self.stated or "replicas equal, contaminated steps recorded"
        return f"outcome as stated {'no' if self.stated else 'yes'} ({how})"


def say(text: str) -> None:
    _clear_bar()
    print(text, flush=True)


def one_line(record: Record, count: int) -> None:
    """One line per fault, as it happens."""
    say(fault_line(record, count))


def fault_line(record: Record, count: int) -> str:
    mark = "ok " if record.as_expected else "BAD"
    what = f"{record.kind}/{record.window}"
    outcome = record.outcome
    if outcome != record.expected:
        outcome += f" (expected {record.expected})"
    parts = " ".join(f"{name} {seconds:.2f}" for name, seconds in record.parts.items() if seconds)
    pause = "-" if record.pause_seconds is None else f"{record.pause_seconds:.2f} s"
    detect = "-" if record.detect_seconds is None else f"{record.detect_seconds:.2f} s"
    line = (
        f"{mark} {record.number + 1:>3}/{count} {what:<32} rank {record.rank} "
        f"step {record.step:<6} {outcome:<9} detected {detect:<7} pause {pause:<7}"
    )
    line += f" [{parts}]" if parts else ""
    if record.takeover_seconds is not None:
        line += f" accepted again after {record.takeover_seconds:.2f} s"
    if record.found_steps is not None:
        line += f"  {record.what}, found after {record.found_steps} steps"
    return line if record.as_expected else f"{line}  {record.why}"


def progress(done: int, count: int, what: str) -> None:
    """A bar on a terminal; nothing in a log."""
    if not sys.stdout.isatty():
        return
    width = 30
    filled = width * done // count
    text = f"[{'#' * filled}{'.' * (width - filled)}] {done}/{count}  {what}"
    columns = shutil.get_terminal_size().columns
    print(f"\r\x1b[2K{text[: columns - 1]}", end="", flush=True)


def _clear_bar() -> None:
    if sys.stdout.isatty():
        print("\r\x1b[2K", end="")


def matrix_text(cells: Sequence[Cell], struck: Sequence[Cell]) -> str:
    """Kind by kind: each window and how often it was struck."""
    rows = matrix(cells, struck)
    lines = ["coverage (kind: window count):"]
    for kind, windows in rows.items():
        counts = "  ".join(f"{window} {count}" for window, count in windows.items())
        lines.append(f"  {kind:<28}{counts}")
    hit = sum(1 for windows in rows.values() for count in windows.values() if count)
    lines.append(f"  {hit} of {sum(map(len, rows.values()))} cells hit")
    return "\n".join(lines)


def last_line(records: Sequence[Record], verdict: Verdict) -> str:
    """`20 faults, 20 as expected, 20 live, bit-exact yes, 0 committed steps lost, pause …`"""
    good = sum(1 for record in records if record.as_expected)
    counts = {
        outcome: sum(1 for record in records if record.outcome == outcome.value)
        for outcome in Outcome
    }
    named = [f"{counts[Outcome.LIVE]} live"]
    named += [
        f"{count} {outcome.value}"
        for outcome, count in counts.items()
        if count and outcome is not Outcome.LIVE
    ]
    pauses = sorted(r.pause_seconds for r in records if r.pause_seconds is not None)
    again = sorted(r.takeover_seconds for r in records if r.takeover_seconds is not None)
    takeovers = (
        f", accepted again p50 {percentile(again, 0.5):.1f} s p95 {percentile(again, 0.95):.1f} s"
        if again
        else ""
    )
    return (
        f"{len(records)} faults, {good} as expected, {', '.join(named)}, "
        f"{verdict.end}, "
        f"{verdict.log.lost} committed steps lost, "
        f"pause p50 {percentile(pauses, 0.5):.1f} s p95 {percentile(pauses, 0.95):.1f} s{takeovers}"
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The nearest-rank percentile of sorted numbers; 0 for none."""
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def whole(
    plan: Plan, cells: Sequence[Cell], records: Sequence[Record], verdict: Verdict
) -> dict[str, Any]:
    """The raw result: enough to replay the campaign and to check its last line."""
    by_name = {cell.name: cell for cell in cells}
    struck = [by_name[f"{record.kind}/{record.window}"] for record in records]
    # Where a run kept its files says nothing to whoever reads its result elsewhere.
    options = {k: v for k, v in asdict(plan).items() if not isinstance(v, Path)}
    return {
        "what": "keepstep lab chaos",
        "plan": options,
        "machine": machine(),
        # A node that comes back has its imports at once, unless it was told otherwise.
        "common_preload": os.environ.get(offspring.COMMON) != "",
        "commit": commit(),
        "finished_at": time.time(),
        "matrix": matrix(cells, struck),
        "faults": [asdict(record) for record in records],
        "verdict": {
            "bit_exact": verdict.bit_exact,
            "differences": list(verdict.differences),
            "not_as_stated": verdict.stated,
            "steps": verdict.steps,
            "step_log": asdict(verdict.log),
            "account": asdict(verdict.account),
        },
        "last_line": last_line(records, verdict),
    }


def machine() -> dict[str, Any]:
    """Where numbers come from."""
    versions = {}
    for package in ("keepstep", "torch", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = ""
    return {
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "arch": platform.machine(),
        "python": platform.python_version(),
        "load": os.getloadavg(),
        "versions": versions,
    }


def commit() -> str:
    """The commit of the code that ran, with a plus sign if it was changed."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip()


def write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1, sort_keys=True).encode()
    # Without a time stamp in it, the same result is the same file.
    data = gzip.compress(text, mtime=0) if path.suffix == ".gz" else text
    path.write_bytes(data)
