"""The log of a process: one line per event, for people (text) or for collectors (json).

    2026-11-16 05:25:14,071 INFO agent.connected {"node":"n1","workers":2}
    {"time":"2026-11-16T05:25:14.071Z","level":"info","event":"agent.connected","node":"n1",…}

In json every line is one object, whoever wrote it: what Python's own loggers say becomes the
`message` of an event called `log`. Lines are counted, for the metrics. Configured by a process's
main alone.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Mapping

from keepstep.errors import ConfigError

FORMATS = ("text", "json")
_RESERVED = frozenset({"time", "level", "logger", "event", "trace"})

lines_told: Counter[str] = Counter()
"""Lines of this process so far, by level."""
events_told: Counter[str] = Counter()
"""The same by event. Their names are in the code, so they are few."""


def configure(form: str, level: int = logging.INFO) -> None:
    """Called once, by a process's main."""
    if form not in FORMATS:
        raise ConfigError(f"--log-format is {form!r}; give text or json")
    handler = logging.StreamHandler()
    if form == "json":
        handler.setFormatter(JsonLines())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def tell(logger: str, level: int, event: str, line: str, facts: Mapping[str, object]) -> None:
    """Write one event: `line` is how its facts look as text."""
    lines_told[logging.getLevelName(level).lower()] += 1
    events_told[event] += 1
    extra = {"keepstep_event": event, "keepstep_facts": facts}
    logging.getLogger(logger).log(level, "%s", line, extra=extra)


class JsonLines(logging.Formatter):
    """One object per record, on one line."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        told: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        facts: Mapping[str, object] | None = getattr(record, "keepstep_facts", None)
        if facts is None:
            told |= {"event": "log", "message": record.getMessage()}
        else:
            told["event"] = getattr(record, "keepstep_event", "log")
            for name, value in facts.items():
                told[f"{name}_" if name in _RESERVED else name] = value
        if record.exc_info:
            told["trace"] = self.formatException(record.exc_info)
        # A line break inside a value is written as \n: a line is an object, always.
        return json.dumps(told, separators=(",", ":"), default=str, ensure_ascii=False)
