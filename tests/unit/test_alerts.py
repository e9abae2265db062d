"""Alerts of Alertmanager: which taint they mean, and what is said of those that mean none."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from keepstep.errors import ConfigError, WireError
from keepstep.model import REASON_CHARS_MAX, TAINT_SECONDS, NodeId, Severity
from keepstep.orchestrator import alerts
from keepstep.orchestrator.events import TaintAsked, UntaintAsked

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "alerts.toml"
NODES = {NodeId("n3"): 4, NodeId("n10"): 8}
MAPPING = """
[alert.GpuXidError]
severity = "imminent"
node_label = "Hostname"
slot_label = "gpu"
reason = "XID {xid}: {summary}"
seconds = 600
[alert.GpuXidError.when]
xid = ["79", "48"]

[alert.NodeDown]
severity = "leave"
"""


def rules(text: str = MAPPING) -> alerts.Rules:
    return alerts.rules_of(tomllib.loads(text), "alerts.toml")


def alert(name: str = "GpuXidError", status: str = "firing", **labels: str) -> dict[str, Any]:
    given = {"alertname": name, "Hostname": "n3:9400", "gpu": "1", "xid": "79", **labels}
    return {
        "status": status,
        "labels": given,
        "annotations": {"summary": "it is off the bus"},
        "startsAt": "2026-01-01T00:00:00Z",
        "endsAt": "0001-01-01T00:00:00Z",
        "fingerprint": "abc",
    }


def judged(*given: dict[str, Any], text: str = MAPPING) -> list[alerts.Verdict]:
    payload = {"version": "4", "status": "firing", "receiver": "keepstep", "alerts": list(given)}
    return alerts.judge(alerts.read(payload), rules(text), NODES)


def test_a_firing_alert_is_a_taint_of_its_device():
    (verdict,) = judged(alert())
    assert verdict.event == TaintAsked(
        NodeId("n3"),
        "XID 79: it is off the bus",
        Severity.IMMINENT,
        1,
        "alertmanager/GpuXidError",
        600.0,
    )


def test_a_resolved_alert_takes_back_what_alerts_of_its_name_said_and_nothing_else():
    (verdict,) = judged(alert(status="resolved"))
    assert verdict.event == UntaintAsked(NodeId("n3"), 1, source="alertmanager/GpuXidError")


def test_without_a_slot_label_the_whole_node_is_meant_and_the_defaults_hold():
    (verdict,) = judged(alert("NodeDown", node="n10"))
    said = "NodeDown: it is off the bus"
    assert verdict.event == TaintAsked(
        NodeId("n10"), said, Severity.LEAVE, -1, "alertmanager/NodeDown", TAINT_SECONDS
    )


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (alert("Other"), "no mapping for Other: ignored"),
        (alert(xid="31"), "no mapping for GpuXidError with these labels"),
        (alert(Hostname="n4"), "no node is called n4"),
        (alert(Hostname=""), "has no label 'Hostname'"),
        (alert(gpu="4"), "n3 has no slot 4"),
        (alert(gpu="nvidia1"), "n3 has no slot nvidia1"),
        (alert(gpu="-1"), "n3 has no slot -1"),
        (alert(gpu=""), "n3 has no slot (no label)"),
    ],
)
def test_an_alert_that_means_nothing_here_is_told_so(given: dict[str, Any], why: str):
    (verdict,) = judged(given)
    assert verdict.event is None
    assert why in verdict.why


def test_without_a_mapping_every_alert_is_told_so():
    (verdict,) = judged(alert(), text="")
    assert verdict.event is None
    assert "no mapping of alerts (--alerts)" in verdict.why


def test_of_several_alerts_of_one_name_and_place_the_worst_counts_in_any_order():
    text = """
    [[alert.X]]
    severity = "imminent"
    reason = "{xid}"
    when = {xid = ["79"]}
    [[alert.X]]
    severity = "leave"
    reason = "{xid}"
    """
    mild, bad = alert("X", node="n3", xid="63"), alert("X", node="n3", xid="79")
    gone, elsewhere = alert("X", "resolved", node="n3"), alert("X", node="n10")
    for given in ((mild, bad, gone, elsewhere), (gone, elsewhere, bad, mild)):
        found = [verdict.event for verdict in judged(*given, text=text) if verdict.event]
        assert sorted((event.node, event.reason) for event in found) == [
            ("n10", "79"),
            ("n3", "79"),
        ]
        assert all(isinstance(event, TaintAsked) for event in found)
    told = [verdict.why for verdict in judged(mild, bad, gone, text=text)]
    assert told == [
        "another X counts for n3: ignored",
        "",
        "another X counts for n3: ignored",
    ]


def test_the_first_rule_that_fits_is_taken():
    text = """
    [[alert.X]]
    severity = "imminent"
    when = {xid = ["79"], rack = ["a", "b"]}
    [[alert.X]]
    severity = "avoid"
    """
    chosen = {
        rack: verdict.event.severity
        for rack in ("a", "c")
        for verdict in judged(alert("X", node="n3", rack=rack), text=text)
        if isinstance(verdict.event, TaintAsked)
    }
    assert chosen == {"a": Severity.IMMINENT, "c": Severity.AVOID}


def test_a_reason_is_text_and_bounded_and_a_missing_name_is_a_question_mark():
    text = '[alert.X]\nseverity = "avoid"\nreason = "{a} {summary} {nothing}"\n'
    long = alert("X", node="n3", a="{summary.__class__}\n" + "x" * 600)
    (verdict,) = judged(long, text=text)
    assert isinstance(verdict.event, TaintAsked)
    assert verdict.event.reason.startswith("{summary.__class__} xxx")
    assert len(verdict.event.reason) == REASON_CHARS_MAX
    (verdict,) = judged(alert("X", node="n3", a="hot"), text=text)
    assert isinstance(verdict.event, TaintAsked)
    assert verdict.event.reason == "hot it is off the bus ?"


@pytest.mark.parametrize(
    ("payload", "word"),
    [
        ([], "no payload of Alertmanager"),
        ({"alerts": []}, "version '4'"),
        ({"version": "4"}, "alerts: expected a list"),
        ({"version": "4", "alerts": ["x"]}, r"alerts\[0\]: expected an object"),
        ({"version": "4", "alerts": [{"status": "odd"}]}, r"alerts\[0\].status"),
        ({"version": "4", "alerts": [{"status": "firing"}]}, r"alerts\[0\].labels"),
        (
            {"version": "4", "alerts": [{"status": "firing", "labels": {"gpu": 1}}]},
            r"alerts\[0\].labels: expected an object of texts",
        ),
        ({"version": "4", "alerts": [alert()] * 501}, "set max_alerts: 500 in the receiver"),
    ],
)
def test_a_payload_that_is_none_is_refused_with_what_is_wrong(payload: object, word: str):
    with pytest.raises(WireError, match=word):
        alerts.read(payload)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[alerts.X]\n", r"unknown section \[alerts\]; write \[alert.NAME\]"),
        ("alert = 3\n", "alert is a section"),
        ("alert.X = 3\n", "is a section"),
        ("alert.X = []\n", "has no rule"),
        ("[alert.X]\n", "severity is missing; give one of avoid, leave, imminent"),
        ('[alert.X]\nseverity = "iminent"\n', "did you mean 'imminent'"),
        ('[alert.X]\nseverity = ["avoid"]\n', "no severity is called"),
        ('[alert.X]\nseverity = "avoid"\nnode_lable = "x"\n', "did you mean 'node_label'"),
        ('[alert.X]\nseverity = "avoid"\nnode_label = ""\n', "give the name of a label"),
        ('[alert.X]\nseverity = "avoid"\nslot_label = 1\n', "give the name of a label"),
        ('[alert.X]\nseverity = "avoid"\nseconds = 0\n', "a number above 0"),
        ('[alert.X]\nseverity = "avoid"\nseconds = true\n', "a number above 0"),
        ('[alert.X]\nseverity = "avoid"\nseconds = 1e12\n', "up to 3.1536e[+]07"),
        ('[alert.X]\nseverity = "avoid"\nreason = "{x.y}"\n', "as {name}"),
        ('[alert.X]\nseverity = "avoid"\nreason = 1\n', "give a text"),
        ('[alert.X]\nseverity = "avoid"\nwhen = 1\n', "when is a section"),
        ('[alert.X]\nseverity = "avoid"\nwhen = {xid = [79]}\n', r'such as \["79"\]'),
        ('[alert.X]\nseverity = "avoid"\nwhen = {xid = []}\n', "a list of texts"),
        (
            '[[alert.X]]\nseverity = "avoid"\n[[alert.X]]\nseverity = "leave"\n',
            "hides those after it; put it last",
        ),
    ],
)
def test_a_bad_mapping_is_refused_with_its_fix(text: str, word: str):
    with pytest.raises(ConfigError, match=word):
        rules(text)


def test_a_mapping_that_cannot_be_read_is_the_users_mistake(tmp_path: Path):
    with pytest.raises(ConfigError, match="check --alerts"):
        alerts.load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[alert", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not TOML"):
        alerts.load(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("xid", "severity", "slot"),
    [
        ("79", Severity.IMMINENT, -1),
        ("48", Severity.IMMINENT, 1),
        ("64", Severity.LEAVE, 1),
        ("94", Severity.LEAVE, 1),
        ("154", Severity.AVOID, 1),
        ("31", None, None),
    ],
)
def test_the_example_tells_a_dying_device_from_a_users_bug(
    xid: str, severity: Severity | None, slot: int | None
):
    payload = {"version": "4", "alerts": [alert("GpuXid", xid=xid, Hostname="n3")]}
    (verdict,) = alerts.judge(alerts.read(payload), alerts.load(EXAMPLE), NODES)
    asked = verdict.event
    assert (getattr(asked, "severity", None), getattr(asked, "slot", None)) == (severity, slot)
