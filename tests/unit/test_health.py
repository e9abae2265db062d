"""What a health program's run means, and when it is told."""

from __future__ import annotations

import pytest

from keepstep import wire
from keepstep.agent import health
from keepstep.agent.__main__ import parse
from keepstep.agent.health import HOLD_RUNS, RENEW_RUNS, Health, Verdict, judge
from keepstep.config import AgentSettings
from keepstep.errors import ConfigError, Permanent
from keepstep.model import REASON_CHARS_MAX, NodeId, Severity

NODE = NodeId("n1")


@pytest.mark.parametrize(
    ("code", "output", "verdict"),
    [
        (0, "slot=1 all is well\n", Verdict(None)),
        (1, "", Verdict(Severity.AVOID, -1, "the health program ended with 1")),
        (2, "first\n  second \n\n", Verdict(Severity.LEAVE, -1, "second")),
        (3, "slot=3 row remap pending", Verdict(Severity.IMMINENT, 3, "row remap pending")),
        (3, "slot=0", Verdict(Severity.IMMINENT, 0, "the health program ended with 3")),
        (3, "a slot=0 later", Verdict(Severity.IMMINENT, -1, "a slot=0 later")),
        (1, "x" * 900, Verdict(Severity.AVOID, -1, "x" * REASON_CHARS_MAX)),
    ],
)
def test_a_run_says_how_bad_the_node_is_and_why(code: int, output: str, verdict: Verdict):
    assert judge(code, output, 4) == verdict


@pytest.mark.parametrize(
    ("code", "output", "why"),
    [
        (4, "", "it ended with 4"),
        (127, "", "it ended with 127"),
        (-11, "", "it ended by signal 11"),
        (3, "slot=4 hot", "the slots here are 0 to 3"),
        (3, "slot=-1 hot", "slot=-1"),
        (3, "slot= hot", "slot=;"),
        (3, "slot=one hot", "slot=one"),
    ],
)
def test_a_run_that_fails_says_nothing_of_the_node(code: int, output: str, why: str):
    with pytest.raises(Permanent, match=why):
        judge(code, output, 4)


class Told:
    """A Health whose program's verdicts are given by hand."""

    def __init__(self) -> None:
        self.sent: list[wire.Health] = []
        settings = AgentSettings("probe", health_seconds=30.0, health_seconds_max=20.0)
        # No program is run here, so it needs no room.
        self.health = Health(NODE, 4, settings, None, self.sent.append)  # type: ignore[arg-type]

    def hear(self, now: float, severity: Severity | None, reason: str = "", slot: int = -1) -> int:
        """How many messages it makes."""
        before = len(self.sent)
        self.health._hear(Verdict(severity, slot, reason), now)
        return len(self.sent) - before


def test_a_change_is_told_at_once_and_the_same_word_only_when_it_wears_out():
    told = Told()
    assert told.hear(0.0, None) == 1
    assert told.hear(30.0, None) == 0
    assert told.hear(60.0, Severity.LEAVE, "ecc 5") == 1
    assert told.hear(90.0, Severity.LEAVE, "ecc 6") == 0
    assert told.hear(120.0, Severity.LEAVE, "ecc 7") == 0
    assert told.hear(60.0 + RENEW_RUNS * 30.0, Severity.LEAVE, "ecc 8") == 1
    assert told.hear(180.0, Severity.LEAVE, "ecc 8", slot=2) == 1
    assert told.hear(210.0, None) == 1
    assert [(news.severity, news.reason, news.slot) for news in told.sent] == [
        (None, "", -1),
        (Severity.LEAVE, "ecc 5", -1),
        (Severity.LEAVE, "ecc 8", -1),
        (Severity.LEAVE, "ecc 8", 2),
        (None, "", -1),
    ]
    assert {news.seconds for news in told.sent} == {HOLD_RUNS * 30.0}
    assert RENEW_RUNS * 2 < HOLD_RUNS


def test_what_stands_is_told_again_to_a_new_orchestrator_but_not_for_ever():
    told = Told()
    assert told.health.standing(0.0) == []
    told.hear(0.0, Severity.AVOID, "hot")
    assert told.health.standing(100.0) == told.sent
    # The program has said nothing since: it fails, and its last word has worn out.
    assert told.health.standing(HOLD_RUNS * 30.0) == []


def test_a_slow_program_is_given_longer_words():
    settings = AgentSettings("probe", health_seconds=1.0, health_seconds_max=20.0)
    sent: list[wire.Health] = []
    slow = Health(NODE, 1, settings, None, sent.append)  # type: ignore[arg-type]
    slow._hear(Verdict(Severity.AVOID), 0.0)
    assert sent[0].seconds == HOLD_RUNS * 20.0


def test_the_clusters_secrets_are_not_for_the_program(monkeypatch: pytest.MonkeyPatch):
    for name in ("KEEPSTEP_TOKEN", "KEEPSTEP_ORCHESTRATOR_JOURNAL", "PGPASSWORD"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("SOME_SETTING", "inherited")
    given = Told().health._environment()
    assert "secret" not in given.values()
    known = {name: given[name] for name in ("SOME_SETTING", "KEEPSTEP_NODE", "KEEPSTEP_SLOTS")}
    assert known == {"SOME_SETTING": "inherited", "KEEPSTEP_NODE": "n1", "KEEPSTEP_SLOTS": "4"}


REQUIRED = ["--node", "n1", "--orchestrator", "http://h:1", "--room", "r"]


def test_the_agents_settings_come_from_file_environment_and_command_line(tmp_path):
    path = tmp_path / "keepstep.toml"
    path.write_text('[agent]\nhealth_program = "probe -v"\nhealth_seconds = 5\n', encoding="utf-8")
    config = parse([*REQUIRED, "--config", str(path)], {"KEEPSTEP_AGENT_HEALTH_SECONDS": "7"})
    assert config.settings == AgentSettings("probe -v", health_seconds=7.0)
    assert config.settings.health_command() == ("probe", "-v")
    config = parse([*REQUIRED, "--health-program", "sh -c 'exit 3'"], {})
    assert config.settings.health_command() == ("sh", "-c", "exit 3")
    assert parse(REQUIRED, {}).settings.health_command() == ()
    with pytest.raises(ConfigError, match="close each quotation mark"):
        parse([*REQUIRED, "--health-program", "sh -c 'exit"], {})
    with pytest.raises(ConfigError, match="did you mean 'health_seconds'"):
        parse(REQUIRED, {"KEEPSTEP_AGENT_HEALTH_SECOND": "1"})


def test_exit_codes_are_in_the_order_of_severity():
    assert list(health.SEVERITIES.values()) == [None, *Severity]
