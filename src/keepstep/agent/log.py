"""One line per event: a dotted name and its facts, for people and for machines alike.

    agent.joined node=n1 term=3

A thin layer over the standard library's logging, which is configured by the process's main alone.
"""

from __future__ import annotations

import json
import logging

_LOGGER = logging.getLogger("keepstep.agent")


def info(event: str, **facts: object) -> None:
    """Something that was meant to happen."""
    _LOGGER.info("%s", _line(event, facts))


def warning(event: str, **facts: object) -> None:
    """Something that an operator may want to know."""
    _LOGGER.warning("%s", _line(event, facts))


def error(event: str, **facts: object) -> None:
    """Something that should not have happened."""
    _LOGGER.error("%s", _line(event, facts))


def configure(level: int = logging.INFO) -> None:
    """Called once, by a process's main."""
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")


def _line(event: str, facts: dict[str, object]) -> str:
    told = [f"{name}={_value(value)}" for name, value in facts.items()]
    return " ".join([event, *told])


def _value(value: object) -> str:
    text = str(value)
    return json.dumps(text) if not text or any(c in text for c in ' "\n=') else text
