"""Numbers in Prometheus' text format, and the few that every process of ours can tell of itself.

    families = [gauge("keepstep_frozen", "1 while nothing is decided.", 0.0)]
    text(families)        # HELP, TYPE and one line per series, in a fixed order

Written by hand: the format is a page long, and a client library would live in the user's
environment (docs/decisions/0039). Prometheus' naming rules are asserted where a family is made:
base units, `_total` for what only grows. Who makes families must bound their labels; a rank or a
device is no label, except in a document that somebody asked for by name.
"""

from __future__ import annotations

import bisect
import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABEL_CHARS_MAX = 128
"""A name that is longer is cut: labels are for telling series apart, not for stories."""
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_UNITS_WE_DO_NOT_USE = ("_ms", "_milliseconds", "_minutes", "_mb", "_percent")

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One series' value."""

    labels: Labels
    value: float
    suffix: str = ""
    """`_bucket`, `_sum` or `_count` of a histogram."""


@dataclass(frozen=True, slots=True)
class Family:
    """All series of one name."""

    name: str
    kind: str
    about: str
    samples: tuple[Sample, ...]

    def __post_init__(self) -> None:
        assert _NAME.fullmatch(self.name), self.name
        assert self.name.endswith("_total") == (self.kind == "counter"), self.name
        assert not self.name.endswith(_UNITS_WE_DO_NOT_USE), self.name
        assert self.about.endswith("."), self.about


def gauge(name: str, about: str, value: float) -> Family:
    """Something that goes up and down."""
    return Family(name, "gauge", about, (Sample((), value),))


def counter(name: str, about: str, value: float) -> Family:
    """Something that only grows, until its process begins anew."""
    return Family(name, "counter", about, (Sample((), value),))


def gauges(name: str, about: str, label: str, values: Mapping[str, float]) -> Family:
    """One gauge per value of one label."""
    return Family(name, "gauge", about, _by(label, values))


def counters(name: str, about: str, label: str, values: Mapping[str, float]) -> Family:
    """One counter per value of one label."""
    return Family(name, "counter", about, _by(label, values))


def info(name: str, about: str, **labels: str) -> Family:
    """What is said by labels alone; the value is 1."""
    return Family(name, "gauge", about, (Sample(tuple(sorted(labels.items())), 1.0),))


class Spread:
    """How values are spread, in as much memory as there are bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value


def histogram(name: str, about: str, spread: Spread) -> Family:
    """How many values are at most each bound."""
    samples, below = [], 0
    for bound, count in zip((*spread.bounds, math.inf), spread.counts, strict=True):
        below += count
        told = "+Inf" if bound == math.inf else _number(bound)
        samples.append(Sample((("le", told),), float(below), "_bucket"))
    samples += [Sample((), spread.sum, "_sum"), Sample((), float(below), "_count")]
    return Family(name, "histogram", about, tuple(samples))


def _by(label: str, values: Mapping[str, float]) -> tuple[Sample, ...]:
    return tuple(Sample(((label, name),), value) for name, value in sorted(values.items()))


def series(families: Iterable[Family]) -> int:
    """How many series these are for whoever scrapes them."""
    return sum(len(family.samples) for family in families)


def text(families: Iterable[Family]) -> str:
    """What is answered to GET /metrics. A family without a series is left out."""
    lines: list[str] = []
    for family in families:
        if not family.samples:
            continue
        lines.append(f"# HELP {family.name} {_escaped_help(family.about)}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        lines += [_line(family.name, sample) for sample in family.samples]
    return "\n".join(lines) + "\n"


def _line(name: str, sample: Sample) -> str:
    told = ",".join(f'{label}="{_escaped(value)}"' for label, value in sample.labels)
    return f"{name}{sample.suffix}{f'{{{told}}}' if told else ''} {_number(sample.value)}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)


def _escaped(value: str) -> str:
    cut = value[:LABEL_CHARS_MAX]
    return cut.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _escaped_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


# ---------------------------------------------------------------- of any process

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def of_process() -> list[Family]:
    """What the client libraries of Prometheus tell of a process, under the same names."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    # From the third field on, as proc(5) counts: 11 and 12 here are utime and stime.
    cpu = (int(fields[11]) + int(fields[12])) / _TICKS
    up = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    started = time.time() - (up - int(fields[19]) / _TICKS)
    about = "Of this process."
    return [
        counter("process_cpu_seconds_total", f"CPU time. {about}", cpu),
        gauge("process_resident_memory_bytes", f"Memory. {about}", float(fields[21]) * _PAGE_BYTES),
        gauge("process_start_time_seconds", f"Since the epoch. {about}", round(started, 2)),
        gauge("process_open_fds", f"Open files. {about}", float(len(os.listdir("/proc/self/fd")))),
    ]
