"""One line per event: a dotted name and its facts, for people and for machines alike.

    agent.joined node=n1 term=3

A thin layer over keepstep.logs, which is configured by the process's main alone; as json if the
settings say so.
"""

from __future__ import annotations

import json
import logging

from keepstep import logs

_NAME = "keepstep.agent"


def info(event: str, **facts: object) -> None:
    """Something that was meant to happen."""
    logs.tell(_NAME, logging.INFO, event, _line(event, facts), facts)


def warning(event: str, **facts: object) -> None:
    """Something that an operator may want to know."""
    logs.tell(_NAME, logging.WARNING, event, _line(event, facts), facts)


def error(event: str, **facts: object) -> None:
    """Something that should not have happened."""
    logs.tell(_NAME, logging.ERROR, event, _line(event, facts), facts)


def _line(event: str, facts: dict[str, object]) -> str:
    told = [f"{name}={_value(value)}" for name, value in facts.items()]
    return " ".join([event, *told])


def _value(value: object) -> str:
    text = str(value)
    return json.dumps(text) if not text or any(c in text for c in ' "\n=') else text
