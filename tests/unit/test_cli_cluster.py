"""What a local cluster tells its processes about the journal; nothing is started here."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.cli.cluster import HOLDER, JOURNAL, ORCHESTRATOR, ClusterPlan, LocalCluster, NodePlan

URL = "postgresql://keepstep:secret@db/cluster"


def cluster_in(path: Path, config_file: Path | None = None) -> LocalCluster:
    (path / "token").write_text("a-token-for-tests-only", encoding="utf-8")
    plan = ClusterPlan(config_file=config_file, join="http://127.0.0.1:1")
    return LocalCluster(path, [NodePlan("n0", slots=1)], plan)


def test_the_journal_is_a_file_in_the_run_directory(tmp_path: Path):
    command = cluster_in(tmp_path)._orchestrator_program(ORCHESTRATOR).command
    assert command[command.index("--journal") + 1] == str(tmp_path / "journal.db")


def test_the_journal_is_where_the_settings_say(tmp_path: Path):
    config_file = tmp_path / "settings.toml"
    config_file.write_text(f"[orchestrator]\njournal = '{URL}'\n", encoding="utf-8")
    program = cluster_in(tmp_path, config_file)._orchestrator_program(ORCHESTRATOR)
    assert "--journal" not in program.command
    assert str(tmp_path) in program.environment[HOLDER], "two runs are two holders"
    config_file.write_text("[orchestrator]\njournal_holder = 'me'\n", encoding="utf-8")
    assert (
        HOLDER
        not in cluster_in(tmp_path, config_file)._orchestrator_program(ORCHESTRATOR).environment
    )


def test_a_password_stays_out_of_command_lines_and_of_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(JOURNAL, URL)
    monkeypatch.setenv("PGPASSWORD", "secret")
    cluster = cluster_in(tmp_path)
    orchestrator = cluster._orchestrator_program(ORCHESTRATOR)
    agent = cluster._agent_program(cluster.nodes["n0"])
    assert not any("secret" in word for word in (*orchestrator.command, *agent.command))
    for name in (JOURNAL, "PGPASSWORD"):
        assert agent.environment[name] == "", "its workers inherit what it has"
        assert name not in orchestrator.environment, "which inherits it from us"
