"""One event, one line: for people as text, for collectors as JSON."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from keepstep import logs
from keepstep.agent.__main__ import parse
from keepstep.config import AgentSettings, OrchestratorConfig, load
from keepstep.errors import ConfigError

SRC = Path(__file__).resolve().parents[2] / "src"


def line_of(facts: dict[str, Any] | None, message: str = "x", exception: Any = None) -> Any:
    record = logging.LogRecord("keepstep.x", logging.WARNING, "f", 1, message, (), exception)
    if facts is not None:
        record.keepstep_event, record.keepstep_facts = "node.silent", facts
    text = logs.JsonLines().format(record)
    assert "\n" not in text
    return json.loads(text)


def test_an_event_becomes_one_object_on_one_line():
    told = line_of({"node": "n1", "seconds": 3.5, "why": "two\nlines", "error": OSError("x")})
    assert told.pop("time").endswith("Z")
    assert told == {
        "level": "warning",
        "logger": "keepstep.x",
        "event": "node.silent",
        "node": "n1",
        "seconds": 3.5,
        "why": "two\nlines",
        "error": "x",
    }


def test_a_fact_cannot_take_the_place_of_what_every_line_has():
    told = line_of({"level": 2, "event": "mine", "time": 1})
    assert (told["level"], told["event"]) == ("warning", "node.silent")
    assert (told["level_"], told["event_"], told["time_"]) == (2, "mine", 1)


def test_what_others_write_is_an_object_too_with_its_trace():
    try:
        raise ValueError("bad")
    except ValueError:
        told = line_of(None, "Task exception\nwas never retrieved", sys.exc_info())
    assert told["event"] == "log"
    assert told["message"] == "Task exception\nwas never retrieved"
    assert "ValueError: bad" in told["trace"]


def test_the_format_is_a_setting_a_variable_and_an_option():
    assert load(OrchestratorConfig, None, {"KEEPSTEP_ORCHESTRATOR_LOG_FORMAT": "json"}).log_format
    needed = ["--orchestrator", "http://o:1", "--node", "n", "--slots", "1", "--room", "r"]
    assert parse([*needed, "--log-format", "json"], {}).settings.log_format == "json"
    assert parse(needed, {"KEEPSTEP_AGENT_LOG_FORMAT": "json"}).settings.log_format == "json"
    assert parse([*needed, "--metrics-listen", "9309"], {}).settings.metrics_listen == "9309"
    for kind in (AgentSettings, OrchestratorConfig):
        with pytest.raises(ConfigError, match="log_format: text or json"):
            kind(log_format="xml")


WRITER = """
import logging, sys
from keepstep import logs
from keepstep.agent import log
from keepstep.orchestrator.__main__ import log as orchestrators
logs.configure(sys.argv[1])
log.warning("stream.lost", host="h", why="no route")
orchestrators("decided", seq=3, why="rank 2 is gone", nothing=None)
logging.getLogger("asyncio").warning("slow\\ncallback")
"""


@pytest.mark.parametrize("form", logs.FORMATS)
def test_what_a_process_writes(form: str):
    done = subprocess.run(
        [sys.executable, "-c", WRITER, form],
        env={"PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    lines = done.stderr.splitlines()
    if form == "text":
        assert lines[0].endswith('WARNING stream.lost host=h why="no route"')
        assert lines[1].endswith('INFO decided {"seq":3,"why":"rank 2 is gone"}')
        return
    objects = [json.loads(line) for line in lines]
    assert [told["event"] for told in objects] == ["stream.lost", "decided", "log"]
    assert objects[1]["seq"] == 3
    assert "nothing" not in objects[1]
