"""The doctor: what will hurt is found, with its fix, and a healthy cluster gets no blame."""

from __future__ import annotations

import argparse
import copy
import json
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepstep.cli import doctor, main
from keepstep.cli.client import Refusal
from keepstep.cli.findings import (
    DAY,
    GIB,
    Certificate,
    Facts,
    Finding,
    Level,
    Reached,
    judge,
    worst,
)
from keepstep.cli.fit import fit
from keepstep.errors import Unreachable

NOW = 1_800_000_000.0
JOB: dict[str, Any] = {
    "over": False,
    "state": "running",
    "mode": "act",
    "detail": "",
    "remedies": [],
    "uncovered": [],
    "spares": {"wanted": 1, "ready": 1},
}
NODE = {
    "alive": True,
    "left": False,
    "linked": True,
    "address": "127.0.0.1",
    "peer_port": 1,
    "store_port": 2,
}
ABOUT = {"wire": 2, "release": "0.1.0", "torch": "2.13.0"}
OWN: dict[str, Any] = {
    "release": "0.1.0",
    "clock": NOW + 0.1,
    "files": {"limit": 20_000, "open": 30},
    "journal": {
        "kind": "postgresql",
        "away": False,
        "written_seconds_ago": 0.5,
        "term": 3,
        "lease_seconds": 10.0,
        "seq": 1200,
        "snapshot_seq": 1000,
        "bytes": GIB,
        "free_bytes": 50 * GIB,
    },
}
WELL = Facts(
    now=NOW,
    release="0.1.0",
    endpoints=(Reached("http://o:1", status="leading", ready=True),),
    token_mode=0o600,
    certificates=(Certificate("tls.crt", NOW + 60 * DAY),),
    picture={
        "frozen": None,
        "nodes": {"n0": dict(NODE), "n1": dict(NODE)},
        "agents": {"n0": dict(ABOUT), "n1": dict(ABOUT)},
        "jobs": {"train": JOB},
    },
    own=OWN,
    ports={"n0 peer 127.0.0.1:1": ""},
)


def but(path: str, value: object, facts: Facts = WELL) -> Facts:
    """The same facts, one of them changed: "own.journal.away"."""
    first, *rest = path.split(".")
    if not rest:
        return replace(facts, **{first: value})
    whole = copy.deepcopy(getattr(facts, first))
    inner = whole
    for name in rest[:-1]:
        inner = inner[name]
    inner[rest[-1]] = value
    return replace(facts, **{first: whole})


def trouble(facts: Facts) -> list[Finding]:
    return [finding for finding in judge(facts) if finding.level is not Level.OK]


def test_a_healthy_cluster_gets_no_blame():
    assert trouble(WELL) == []
    assert worst(judge(WELL)) is Level.OK
    assert {finding.about for finding in judge(WELL)} == {
        *("orchestrator", "token", "certificate", "clock", "version"),
        *("journal", "disk", "files", "nodes", "ports", "job train"),
    }


@pytest.mark.parametrize(
    ("path", "value", "level", "words"),
    [
        ("endpoints", (Reached("u", "refused"),), "fail", "does not answer"),
        ("endpoints", (Reached("u", status="leading"),), "fail", "journal is away"),
        (
            "endpoints",
            tuple(Reached(u, status="leading", ready=True, term=n) for n, u in enumerate("ab", 3)),
            "fail",
            "2 say that they lead: a in term 3, b in term 4",
        ),
        ("endpoints", (Reached("u", status="following", ready=True),), "fail", "nobody leads"),
        ("refused", "no token, or a wrong one", "fail", "refused"),
        ("silent", "no orchestrator answers at u (timed out)", "fail", "did not say how things"),
        ("token_mode", 0o644, "warn", "may read its file"),
        ("certificates", (Certificate("c", NOW - DAY),), "fail", "has expired 1.0 days ago"),
        ("certificates", (Certificate("c", NOW + DAY),), "warn", "expires in 1 days"),
        ("certificates", (Certificate("c", problem="gone"),), "fail", "gone"),
        ("picture.agents.n1.certificate_until", NOW + DAY, "warn", "n1: as shown when they conn"),
        ("picture.agents.n1.certificate_until", NOW - DAY, "warn", "has ended 1.0 days ago"),
        ("own.clock", NOW - 60, "warn", "differs by 60.0 s"),
        ("own.release", "0.2.0", "warn", "this command is 0.1.0, the orchestrator 0.2.0"),
        ("picture.agents.n1.wire", 1, "warn", "speak version 1 of the wire"),
        ("picture.agents.n1.release", "0.2.0", "warn", "release differs: 0.1.0: n0; 0.2.0: n1"),
        ("picture.agents.n1.torch", "2.14.0", "warn", "torch differs"),
        ("picture.agents.n1.slowed", 3, "warn", "n1: said so much that"),
        ("own.journal.away", True, "fail", "cannot be written"),
        ("own.journal.written_seconds_ago", 11.0, "fail", "was not renewed for 11 s"),
        ("own.journal.seq", 90_000, "warn", "since the last snapshot"),
        ("own.journal.free_bytes", GIB // 2, "warn", "0.5 GiB left"),
        ("own.journal.free_bytes", GIB // 100, "fail", "0.0 GiB left"),
        ("own.files.limit", 100, "warn", "30 of 100 open"),
        ("picture.frozen", {"why": "maintenance", "since": 0}, "warn", "maintenance"),
        ("picture.nodes.n1.alive", False, "warn", "lost: n1"),
        ("picture.nodes.n1.linked", False, "warn", "without an agent: n1"),
        ("ports", {"n0 peer h:1": "timed out"}, "fail", "n0 peer h:1: timed out"),
        ("picture.jobs.train.spares", {"wanted": 0, "ready": 0}, "warn", "keeps no spare"),
        ("picture.jobs.train.spares", {"wanted": 2, "ready": 1}, "warn", "1 of 2 spares"),
        ("picture.jobs.train.state", "held", "warn", "held"),
        ("picture.jobs.train.uncovered", ["0"], "warn", "have one home"),
    ],
)
def test_what_hurts_is_found_and_has_a_fix(path: str, value: object, level: str, words: str):
    found = trouble(but(path, value))
    assert [str(finding.level) for finding in found if words in finding.says] == [level], found
    assert len(found) == 1
    assert found[0].fix


def leads(*orchestrators: tuple[str, int]) -> Facts:
    """Each by the address that it advertises, if it has any, and its term."""
    found = enumerate(orchestrators)
    return but(
        "endpoints",
        tuple(
            Reached(f"http://o{i}:1", status="leading", ready=True, leader=leader, term=term)
            for i, (leader, term) in found
        ),
    )


@pytest.mark.parametrize(
    ("orchestrators", "level"),
    [
        # Two ways to one, as through a load balancer: nobody is to end it for that.
        ([("http://l:1", 7), ("http://l:1", 7)], []),
        ([("http://l:1", 7), ("http://m:1", 7)], ["fail"]),
        ([("http://l:1", 7), ("http://l:1", 8)], ["fail"]),
        # On a file nobody has an address: one, or two with journals of their own.
        ([("", 7), ("", 7)], ["warn"]),
        ([("", 7), ("", 8)], ["fail"]),
        ([("", 7), ("http://l:1", 7)], ["fail"]),
    ],
)
def test_two_ways_to_one_leader_are_not_two_leaders(
    orchestrators: list[tuple[str, int]], level: list[str]
):
    found = trouble(leads(*orchestrators))
    assert [str(finding.level) for finding in found] == level
    assert all("http://o0:1 in term 7" in finding.says and finding.fix for finding in found)


def test_a_lost_node_that_left_in_good_order_is_no_trouble():
    facts = but("picture.nodes.n1.left", True, but("picture.nodes.n1.alive", False))
    assert trouble(facts) == []


def test_with_no_orchestrator_there_is_still_an_answer():
    facts = Facts(NOW, "0.1.0", (Reached("http://o:1", "connection refused"),))
    found = judge(facts)
    assert worst(found) is Level.FAIL
    assert all(finding.fix for finding in found)


def test_a_clock_is_blamed_for_no_more_than_is_known():
    slow = but("asked_seconds", 8.0, but("own.clock", NOW + 9))
    assert trouble(slow) == []


def test_each_finding_fits_the_screen_with_its_fix_below():
    told = fit(doctor.lines(judge(but("own.journal.away", True)), lambda text, tone: text), 80)
    assert max(map(len, told)) <= 80
    (at,) = [i for i, line in enumerate(told) if "cannot be written" in line]
    assert told[at + 1].startswith("      fix: ")
    assert told[-1] == "12 ok, 0 warn, 1 fail"


def test_ports_are_tried_and_the_closed_one_says_why():
    with socket.create_server(("127.0.0.1", 0)) as open_door, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        node = {**NODE, "peer_port": open_door.getsockname()[1]}
        node["store_port"] = closed.getsockname()[1]
        found, left_out = doctor._knock({"n0": node, "lost": {**NODE, "alive": False}})
    assert left_out == 0
    assert [bool(why) for why in found.values()] == [False, True]


def test_agents_whose_certificates_last_are_counted():
    facts = but("picture.agents.n1.certificate_until", NOW + 60 * DAY)
    told = [f.says for f in judge(facts) if f.about == "certificate" and f.level is Level.OK]
    assert "of 1 agents, as shown when they connected: 60 days or more" in told


def test_that_no_certificate_was_looked_at_is_said_too():
    (told,) = [f for f in judge(but("certificates", ())) if f.about == "certificate"]
    assert (told.level, "none was looked at" in told.says) == (Level.OK, True)


def test_a_certificate_says_when_it_expires(tmp_path: Path):
    path = tmp_path / "tls.crt"
    made = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "10", "-subj", "/CN=x"),
            *("-keyout", str(tmp_path / "k"), "-out", str(path)),
        ],
        capture_output=True,
        timeout=30,
        check=False,
    )
    if made.returncode:
        pytest.skip("openssl is not installed here")
    left = doctor.certificate(path).expires_at - time.time()
    assert 9 * DAY < left <= 10 * DAY + 60
    assert "cannot be read" in doctor.certificate(tmp_path / "none").problem
    (tmp_path / "bad").write_text("x", encoding="utf-8")
    assert "cannot be read" in doctor.certificate(tmp_path / "bad").problem


def test_one_that_leads_and_says_no_more_is_a_finding(monkeypatch: pytest.MonkeyPatch):
    class Mute:
        def __init__(self, url: str, token: str) -> None:
            self.url, self.token, self.urls = url, token, (url,)

        def health(self) -> dict[str, str]:
            return {"status": "leading"}

        def ready(self) -> dict[str, bool]:
            return {"ready": True}

        def cluster(self) -> dict[str, Any]:
            raise Unreachable("it broke off its answer")

    monkeypatch.setattr(doctor, "Client", Mute)
    monkeypatch.setattr(doctor, "from_environment", lambda *_: Mute("http://o:1", "token"))
    asked = argparse.Namespace(orchestrator="", token_file="", certificates=[])
    (found,) = [f for f in judge(doctor.look(asked)) if f.level is Level.FAIL]
    assert "it broke off its answer" in found.says
    assert found.fix


def test_a_follower_is_asked_who_leads_and_that_one_is_looked_at(monkeypatch: pytest.MonkeyPatch):
    health: dict[str, dict[str, Any]] = {
        "http://f:1": {"status": "following", "leader": "http://l:1"},
        "http://l:1": {"status": "leading"},
        "https://f:1": {"status": "following", "leader": "http://l:1"},
        "http://alone:1": {"status": "following", "leader": None},
        "http://late:1": {"status": "following", "leader": "http://dead:1"},
    }

    class Two:
        def __init__(self, url: str, token: str) -> None:
            self.url, self.token, self.urls = url, token, (url,)

        def health(self) -> dict[str, Any]:
            if self.url not in health:
                raise Unreachable("no route")
            return health[self.url]

        def ready(self) -> dict[str, bool]:
            if health[self.url]["status"] != "leading":
                raise Refusal(503, "this orchestrator follows", "ask http://l:1")
            return {"ready": True}

        def cluster(self) -> dict[str, Any]:
            return {"frozen": None, "nodes": {}, "agents": {}, "jobs": {"train": JOB}}

        def orchestrator(self) -> dict[str, Any]:
            return {**OWN, "clock": time.time()}

    def look(url: str) -> Facts:
        monkeypatch.setattr(doctor, "from_environment", lambda *_: Two(url, "token"))
        return doctor.look(argparse.Namespace(orchestrator="", token_file="", certificates=[]))

    monkeypatch.setattr(doctor, "Client", Two)
    monkeypatch.setattr(doctor, "shown", lambda _: None)
    facts = look("http://f:1")
    assert [reached.url for reached in facts.endpoints] == ["http://f:1", "http://l:1"]
    assert facts.picture is not None, "nodes and jobs are looked at"
    assert worst(judge(facts)) is not Level.FAIL
    plain = look("https://f:1")
    assert plain.picture is None, "the token goes nowhere in plain text"
    assert worst(judge(plain)) is Level.FAIL
    assert ["nobody leads" in f.says for f in trouble(look("http://alone:1"))] == [True]
    (found,) = trouble(look("http://late:1"))
    assert "http://dead:1 does not answer" in found.says


def test_a_dead_orchestrator_ends_the_command_with_1_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    token = tmp_path / "token"
    token.write_text("a-token-for-tests-only", encoding="utf-8")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        asked = ["admin", "doctor", "--orchestrator", url, "--token-file", str(token), "--json"]
        assert main(asked) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["level"] == "fail"
    assert told["findings"][0]["about"] == "orchestrator"
