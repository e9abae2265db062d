from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest

from keepstep.config import (
    SECTIONS,
    LauncherConfig,
    OrchestratorConfig,
    explain,
    explanations,
    load,
)
from keepstep.errors import ConfigError


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "keepstep.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_without_a_file_the_defaults_hold():
    assert load(OrchestratorConfig, None, {}) == OrchestratorConfig()


def test_the_environment_overrides_the_file(tmp_path: Path):
    path = written(tmp_path, "[orchestrator]\ntick_seconds = 1\nsilent_seconds_max = 5.0\n")
    config = load(OrchestratorConfig, path, {"KEEPSTEP_ORCHESTRATOR_SILENT_SECONDS_MAX": "6"})
    assert (config.tick_seconds, config.silent_seconds_max) == (1.0, 6.0)
    assert isinstance(config.tick_seconds, float)


def test_each_process_reads_its_own_section_only(tmp_path: Path):
    path = written(tmp_path, "[launcher]\nstop_seconds_max = 1\n[agent]\nanything = 1\n")
    assert load(OrchestratorConfig, path, {}) == OrchestratorConfig()
    assert load(LauncherConfig, path, {}).stop_seconds_max == 1.0


def test_variables_of_others_are_left_alone():
    others = {"KEEPSTEP_ORCHESTRATOR": "http://x:1", "KEEPSTEP_ROOM": "/r", "HOME": "/h"}
    assert load(OrchestratorConfig, None, others) == OrchestratorConfig()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[orchestrator]\nsilent_second_max = 5\n", "did you mean 'silent_seconds_max'"),
        ("[orchestra]\n", "did you mean 'orchestrator'"),
        ("[orchestrator]\ntick_seconds = 'soon'\n", "give a number"),
        ("[orchestrator]\ntick_seconds = true\n", "give float"),
        ("[orchestrator]\nsnapshot_entries = 1.5\n", "give int"),
        ("[orchestrator]\ntick_seconds = 0\n", "tick_busy_seconds"),
        ("[orchestrator]\nbatch_events_max = 0\n", "above zero"),
        ("[orchestrator]\njournal_synchronous = 'off'\n", "full or normal"),
        ("orchestrator = 3\n", "write \\[orchestrator\\]"),
        ("[orchestrator\n", "is not TOML"),
    ],
)
def test_a_mistake_is_refused_with_its_fix(tmp_path: Path, text: str, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        load(OrchestratorConfig, written(tmp_path, text), {})


def test_timeouts_that_make_sense_only_together_are_checked_together():
    with pytest.raises(ConfigError, match="must fit three times"):
        OrchestratorConfig(pulse_seconds=2.0)
    with pytest.raises(ConfigError, match="late_seconds_max"):
        OrchestratorConfig(late_seconds_max=4.0)
    with pytest.raises(ConfigError, match="restart_seconds_min"):
        LauncherConfig(restart_seconds_min=9.0)


def test_an_unreadable_file_is_the_users_mistake(tmp_path: Path):
    with pytest.raises(ConfigError, match="check --config"):
        load(OrchestratorConfig, tmp_path / "none.toml", {})


@pytest.mark.parametrize("kind", SECTIONS)
def test_every_setting_has_its_reason(kind: type):
    assert set(explanations(kind)) == {field.name for field in dataclasses.fields(kind)}


def test_the_explanation_is_itself_a_valid_file_with_the_defaults(tmp_path: Path):
    text = explain()
    assert set(tomllib.loads(text)) == {kind.SECTION for kind in SECTIONS}
    assert load(LauncherConfig, written(tmp_path, text), {}) == LauncherConfig()
