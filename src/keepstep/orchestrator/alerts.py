"""Alerts from outside: which taint an alert of a Prometheus Alertmanager means.

    POST /v1/webhooks/alertmanager -> read -> judge(rules, nodes) -> taint | untaint | why neither

The operator's mapping says it, in TOML, read once when the orchestrator starts:

    [alert.GpuXidError]               the alert's name; several [[alert.GpuXidError]]: the first
    severity = "imminent"             whose `when` fits
    node_label = "Hostname"           names the node (default "node"); a ":port" is cut off
    slot_label = "gpu"                names the slot; without it the whole node is meant
    reason = "XID {xid}: {summary}"   {names} of labels and annotations
    seconds = 86400                   how long the taint lasts unless it is resolved or repeated
    [alert.GpuXidError.when]          only if each of these labels has one of these values
    xid = ["79", "48"]

An alert that means nothing here is no error: Alertmanager would only send it again. All but `load`
is pure.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from keepstep.config import nearest
from keepstep.errors import ConfigError, WireError
from keepstep.model import (
    REASON_CHARS_MAX,
    TAINT_SECONDS,
    TAINT_SECONDS_MAX,
    NodeId,
    Severity,
)
from keepstep.orchestrator.events import TaintAsked, UntaintAsked
from keepstep.orchestrator.state import place_key

VERSION = "4"
"""Of Alertmanager's payload; the same since 2018."""
ALERTS_MAX = 500
"""In one request. A group of more is cut by Alertmanager itself, with max_alerts."""
SOURCE = "alertmanager"
LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_NAMED = re.compile(rf"\{{({LABEL.pattern})\}}")


@dataclass(frozen=True, slots=True)
class Rule:
    """What one alert means."""

    severity: Severity
    node_label: str = "node"
    slot_label: str = ""
    reason: str = ""
    """Empty: the alert's name and summary."""
    seconds: float = TAINT_SECONDS
    when: dict[str, tuple[str, ...]] = field(default_factory=dict)


Rules = Mapping[str, tuple[Rule, ...]]
"""By the alert's name; of several the first that fits."""


NAME_CHARS_MAX = 200
"""Of an alert: it is told in the log and in the answer, for each of hundreds."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert of a payload, as far as it matters here."""

    name: str
    firing: bool
    labels: dict[str, str]
    annotations: dict[str, str]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an alert asks of the brain, or why nothing."""

    alert: Alert
    event: TaintAsked | UntaintAsked | None = None
    why: str = ""

    @property
    def place(self) -> str:
        return place_key(self.event.node, self.event.slot) if self.event else ""


def judge(alerts: Iterable[Alert], rules: Rules, nodes: Mapping[NodeId, int]) -> list[Verdict]:
    """One verdict for each alert, in their order. `nodes` says how many slots each node has."""
    found = [_meaning(alert, rules, nodes) for alert in alerts]
    # A source has one taint of a place. Of several alerts with one name the worst counts, whatever
    # their order, so that a repetition of the payload changes nothing.
    worst: dict[tuple[str, str], Verdict] = {}
    for verdict in found:
        key = (verdict.alert.name, verdict.place)
        if verdict.event and (key not in worst or _weight(verdict) > _weight(worst[key])):
            worst[key] = verdict
    return [
        verdict
        if verdict.event is None or worst[verdict.alert.name, verdict.place] is verdict
        else replace(
            verdict,
            event=None,
            why=f"another {verdict.alert.name} counts for {verdict.place}: ignored",
        )
        for verdict in found
    ]


def _weight(verdict: Verdict) -> tuple[bool, int, str]:
    event = verdict.event
    if isinstance(event, TaintAsked):
        return (True, list(Severity).index(event.severity), event.reason)
    return (False, 0, "")


def _meaning(alert: Alert, rules: Rules, nodes: Mapping[NodeId, int]) -> Verdict:
    if not rules:
        return Verdict(alert, why="the orchestrator has no mapping of alerts (--alerts): ignored")
    if alert.name not in rules:
        return Verdict(alert, why=f"no mapping for {alert.name[:80]}: ignored")
    rule = next((rule for rule in rules[alert.name] if _fits(rule, alert)), None)
    if rule is None:
        return Verdict(alert, why=f"no mapping for {alert.name} with these labels: ignored")
    said = alert.labels.get(rule.node_label, "")
    node = NodeId(said if NodeId(said) in nodes else re.sub(r":\d+$", "", said))
    if not node:
        return Verdict(alert, why=f"{alert.name} has no label {rule.node_label!r}: ignored")
    if node not in nodes:
        return Verdict(alert, why=f"no node is called {node[:80]}: ignored")
    slot = -1
    if rule.slot_label:
        said = alert.labels.get(rule.slot_label, "")
        slot = int(said) if re.fullmatch(r"[0-9]{1,6}", said) else -1
        if not 0 <= slot < nodes[node]:
            return Verdict(alert, why=f"{node} has no slot {said[:80] or '(no label)'}: ignored")
    source = f"{SOURCE}/{alert.name}"
    if not alert.firing:
        return Verdict(alert, UntaintAsked(node, slot, source=source))
    reason = _reason(rule, alert)
    return Verdict(alert, TaintAsked(node, reason, rule.severity, slot, source, rule.seconds))


def _fits(rule: Rule, alert: Alert) -> bool:
    return all(alert.labels.get(label, "") in values for label, values in rule.when.items())


def _reason(rule: Rule, alert: Alert) -> str:
    known = {**alert.annotations, **alert.labels}
    summary = "{alertname}: {summary}" if known.get("summary") else "{alertname}"
    # Not str.format: a label must not reach into Python's objects.
    text = _NAMED.sub(lambda named: known.get(named[1], "?"), rule.reason or summary)
    return " ".join(text.split())[:REASON_CHARS_MAX]


# ---------------------------------------------------------------- the payload


def read(plain: object) -> tuple[Alert, ...]:
    """The alerts of Alertmanager's payload. What is not needed is not looked at."""
    if not isinstance(plain, dict) or plain.get("version") != VERSION:
        raise WireError(f"this is no payload of Alertmanager with version {VERSION!r}")
    alerts = plain.get("alerts")
    if not isinstance(alerts, list):
        raise WireError("alerts: expected a list")
    if len(alerts) > ALERTS_MAX:
        raise WireError(
            f"{len(alerts)} alerts in one request; set max_alerts: {ALERTS_MAX} in the receiver"
        )
    return tuple(_alert(alert, f"alerts[{number}]") for number, alert in enumerate(alerts))


def _alert(plain: object, path: str) -> Alert:
    if not isinstance(plain, dict):
        raise WireError(f"{path}: expected an object")
    status = plain.get("status")
    if status not in ("firing", "resolved"):
        raise WireError(f"{path}.status: expected firing or resolved")
    labels = _texts(plain.get("labels"), f"{path}.labels")
    annotations = _texts(plain.get("annotations", {}), f"{path}.annotations")
    name = labels.get("alertname", "")[:NAME_CHARS_MAX]
    return Alert(name, status == "firing", labels, annotations)


def _texts(plain: object, path: str) -> dict[str, str]:
    if not isinstance(plain, dict) or not all(isinstance(text, str) for text in plain.values()):
        raise WireError(f"{path}: expected an object of texts")
    return plain


# ---------------------------------------------------------------- the mapping


def load(path: Path) -> Rules:
    """The operator's mapping. Raises ConfigError, which says the fix."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; check --alerts") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    return rules_of(document, str(path))


def rules_of(document: Mapping[str, Any], where: str) -> Rules:
    """A mapping, checked: a bad one is found when the orchestrator starts, not when a GPU dies."""
    for section in document:
        _need(section == "alert", where, f"unknown section [{section}]; write [alert.NAME]")
    named = document.get("alert", {})
    _need(isinstance(named, dict), where, "alert is a section; write [alert.NAME]")
    rules: dict[str, tuple[Rule, ...]] = {}
    for name, given in named.items():
        tables = given if isinstance(given, list) else [given]
        at = f"{where}: [alert.{name}]"
        _need(bool(tables), at, "has no rule; write [[alert.NAME]]")
        rules[name] = tuple(_rule(table, at) for table in tables)
        for rule in rules[name][:-1]:
            _need(bool(rule.when), at, "a rule without `when` hides those after it; put it last")
    return rules


def _rule(table: object, at: str) -> Rule:
    _need(isinstance(table, dict), at, "is a section; write severity and the rest below it")
    assert isinstance(table, dict)
    known = list(Rule.__dataclass_fields__)
    for key in table:
        _need(key in known, at, f"unknown key {key!r}; {nearest(key, known)}")
    severities = [severity.value for severity in Severity]
    severity = table.get("severity", "")
    _need("severity" in table, at, f"severity is missing; give one of {', '.join(severities)}")
    _need(
        severity in severities,
        at,
        f"no severity is called {severity!r}; {nearest(str(severity), severities)}",
    )
    for key in ("node_label", "slot_label"):
        label = table.get(key, "node")
        fits = isinstance(label, str) and LABEL.fullmatch(label)
        _need(bool(fits), at, f"{key} is {label!r}; give the name of a label")
    seconds = table.get("seconds", TAINT_SECONDS)
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    _need(
        number and 0 < seconds <= TAINT_SECONDS_MAX,
        at,
        f"seconds is {seconds!r}; give a number above 0, up to {TAINT_SECONDS_MAX:g}",
    )
    reason = table.get("reason", "")
    plain = isinstance(reason, str) and not re.search(r"[{}]", _NAMED.sub("", reason))
    _need(plain, at, f"reason is {reason!r}; give a text, with labels and annotations as {{name}}")
    return Rule(
        Severity(severity),
        table.get("node_label", "node"),
        table.get("slot_label", ""),
        reason,
        float(seconds),
        _when(table.get("when", {}), at),
    )


def _when(table: object, at: str) -> dict[str, tuple[str, ...]]:
    _need(isinstance(table, dict), at, 'when is a section; write label = ["value", …] below it')
    assert isinstance(table, dict)
    found = {}
    for label, values in table.items():
        fits = isinstance(values, list) and values and all(isinstance(v, str) for v in values)
        # Labels are texts: 79 would never equal "79".
        _need(bool(fits), at, f'when.{label} is {values!r}; give a list of texts, such as ["79"]')
        found[label] = tuple(values)
    return found


def _need(holds: bool, at: str, fix: str) -> None:
    if not holds:
        raise ConfigError(f"{at}: {fix}")
