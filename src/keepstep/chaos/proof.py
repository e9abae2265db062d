"""The proof: a fault-free run of the same script without Keepstep, compared bit for bit.

Also the step log's own proof: one line per committed step, none missing, none twice, and every
sample range beginning where the last one ended. A declared fallback may go back, and must say so.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.errors import Permanent

WORKLOAD = Path(__file__).with_name("workload.py")
REFERENCE_SECONDS_MAX = 3600.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs, rank by rank."""

    same: bool
    differences: tuple[str, ...]
    sums: Mapping[str, str]
    """Of the run under faults, rank 0: what is shown to people."""
    reference_sums: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StepLogCheck:
    """What steps.jsonl proves."""

    steps: int
    lost: int
    repeated: int
    broken_ranges: int
    fallbacks: int

    @property
    def sound(self) -> bool:
        return not (self.lost or self.repeated or self.broken_ranges)


def reference_run(world: int, arguments: Sequence[str], result: Path, logs: Path) -> float:
    """Train without Keepstep and without faults; returns how long it took."""
    logs.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    port = _free_port()
    children = [
        _start_rank(rank, world, port, [*arguments, "--result", str(result)], logs)
        for rank in range(world)
    ]
    deadline = began + REFERENCE_SECONDS_MAX
    try:
        for rank, child in enumerate(children):
            code = child.wait(max(0.1, deadline - time.monotonic()))
            if code != 0:
                words = (logs / f"reference-{rank}.log").read_text(errors="replace")[-2000:]
                raise Permanent(f"rank {rank} of the fault-free run ended with {code}:\n{words}")
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
    return time.monotonic() - began


def _start_rank(
    rank: int, world: int, port: int, arguments: Sequence[str], logs: Path
) -> subprocess.Popen[bytes]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("KEEPSTEP_")}
    source = str(Path(__file__).resolve().parents[2])
    environment = {
        **inherited,
        "PYTHONPATH": os.pathsep.join(filter(None, (source, inherited.get("PYTHONPATH", "")))),
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with (logs / f"reference-{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, str(WORKLOAD), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def compare(world: int, under_faults: Path, reference: Path) -> Comparison:
    """Every part of every rank's final state."""
    differences: list[str] = []
    first: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for rank in range(world):
        mine, other = _result(under_faults, rank), _result(reference, rank)
        if rank == 0:
            first = (mine, other)
        if not mine or not other:
            differences.append(f"rank {rank} left no result")
            continue
        differences += [
            f"rank {rank}: {part} differs"
            for part in sorted(mine.keys() | other.keys())
            if mine.get(part) != other.get(part)
        ]
    texts = [{k: str(v) for k, v in result.items()} for result in first]
    return Comparison(not differences, tuple(differences), texts[0], texts[1])


CONTAMINATED = frozenset({"weights", "optimizer", "buffers"})
"""Parts that wrong gradients reach."""
REPLICATED = ("weights", "optimizer", "scheduler")


def contaminated_only(world: int, under_faults: Path, differences: Sequence[str]) -> str:
    """Where wrong gradients were used: replicas are equal, and only what they reach differs.

    Returns what is not so, or nothing.
    """
    results = [_result(under_faults, rank) for rank in range(world)]
    for part in REPLICATED:
        if len({str(result.get(part)) for result in results}) != 1:
            return f"the replicas' {part} differ"
    reached = {f"rank {rank}: {part} differs" for rank in range(world) for part in CONTAMINATED}
    beyond = [each for each in differences if each not in reached]
    return beyond[0] if beyond else ""


def _result(directory: Path, rank: int) -> dict[str, Any]:
    try:
        plain = json.loads((directory / f"rank-{rank}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return plain if isinstance(plain, dict) else {}


def check_step_log(path: Path, steps: int) -> StepLogCheck:
    """Read steps.jsonl as its owner would."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return StepLogCheck(0, steps, 0, 0, 0)
    return check_lines(text.splitlines(), steps)


def check_lines(lines: Sequence[str], steps: int) -> StepLogCheck:
    """Pure: `steps` is how many the job was to make."""
    expected, lost, repeated, broken, fallbacks = 0, 0, 0, 0, 0
    ends: dict[int, int] = {}
    for line in lines:
        record = json.loads(line)
        if "fallback_to" in record:
            fallbacks += 1
            expected = int(record["fallback_to"])
            continue
        step, (first, past) = int(record["step"]), record["samples"]
        if step < expected:
            repeated += 1
            continue
        lost += step - expected
        if first != ends.get(step, 0 if step == 0 else first):
            broken += 1
        ends[step + 1] = past
        expected = step + 1
    lost += max(0, steps - expected)
    return StepLogCheck(expected, lost, repeated, broken, fallbacks)
