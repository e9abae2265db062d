"""A real orchestrator with TLS and tokens, real agents, and those who are not let in."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep import tls, wire
from keepstep.cli import certs, doctor
from keepstep.cli.client import TLS_DIRECTORY, Client, Refusal
from keepstep.errors import Unreachable
from keepstep.model import JobId, JobSpec, NodeId
from keepstep.orchestrator import tokens
from keepstep.orchestrator.tokens import Role

pytestmark = pytest.mark.process

SRC = Path(__file__).resolve().parents[2] / "src"
TOKEN = "a-token-for-tests-only"
SECONDS_MAX = 20.0


class Secured:
    """One orchestrator that speaks https://, and whoever comes to it."""

    def __init__(self, here: Path) -> None:
        self.here, self.pki = here, here / "pki"
        self.started: list[subprocess.Popen[bytes]] = []
        (here / "token").write_text(TOKEN, encoding="utf-8")
        certs.make(self.pki, hosts=["127.0.0.1"], nodes=["n1", "n2"], operators=["alice"])
        self.tokens = here / "tokens.json"
        self.texts = {
            name: tokens.new(self.tokens, name, role, project=project)[0]
            for name, role, project in [
                ("ops", Role.OPERATOR, ""),
                ("hook", Role.WEBHOOK, ""),
                ("a-ops", Role.OPERATOR, "a"),
                ("a-eye", Role.VIEWER, "a"),
                ("b-ops", Role.OPERATOR, "b"),
            ]
        }
        settings = {
            "KEEPSTEP_ORCHESTRATOR_TLS_DIRECTORY": str(self.pki / "orchestrator"),
            "KEEPSTEP_ORCHESTRATOR_TOKENS_FILE": str(self.tokens),
        }
        line = ["--journal", str(here / "journal.db"), "--token-file", str(here / "token")]
        self.start("keepstep.orchestrator", *line, "--port-file", str(here / "port"), **settings)
        until((here / "port").exists, "the orchestrator's port")
        self.port = int((here / "port").read_text(encoding="utf-8"))
        self.url = f"https://127.0.0.1:{self.port}"

    def start(self, module: str, *line: str, **settings: str) -> subprocess.Popen[bytes]:
        known = {k: v for k, v in os.environ.items() if not k.startswith("KEEPSTEP_")}
        with (self.here / f"{module}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *line],
                env={**known, "PYTHONPATH": str(SRC), "KEEPSTEP_PRELOAD": "", **settings},
                stdout=log,
                stderr=log,
            )
        self.started.append(process)
        return process

    def agent(self, node: str, certificate: str) -> subprocess.Popen[bytes]:
        line = ["--node", node, "--orchestrator", self.url, "--room", str(self.here / node)]
        directory = str(self.pki / certificate)
        return self.start(
            "keepstep.agent", *line, "--no-store", KEEPSTEP_AGENT_TLS_DIRECTORY=directory
        )

    def client(self, who: str = "") -> Client:
        return Client(self.url, self.texts.get(who, who) or TOKEN)

    def connected(self) -> list[str]:
        found: list[str] = self.client().cluster()["connected"]
        return found

    def said(self, module: str) -> str:
        return (self.here / f"{module}.log").read_text(encoding="utf-8")


def until(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


@pytest.fixture
def secured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Secured]:
    # Short paths: a Unix socket's name has at most 107 bytes.
    here = Path(tempfile.mkdtemp(prefix="ks", dir="/dev/shm"))
    made = Secured(here)
    monkeypatch.setenv(TLS_DIRECTORY, str(made.pki / "operator-alice"))
    yield made
    for process in reversed(made.started):
        process.terminate()
    for process in made.started:
        process.wait(SECONDS_MAX)
    shutil.rmtree(here, ignore_errors=True)


def upgraded(secured: Secured, certificate: str, node: str) -> ssl.SSLSocket:
    """An agent's stream after its Hello, by hand."""
    plain = socket.create_connection(("127.0.0.1", secured.port), SECONDS_MAX)
    context = tls.client(secured.pki / certificate)
    stream = context.wrap_socket(plain, server_hostname="127.0.0.1")
    try:
        stream.sendall(b"POST /v1/agent HTTP/1.1\r\nUpgrade: keepstep-stream\r\n\r\n")
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            if not (data := stream.recv(1)):
                raise EOFError
            head += data
    except (OSError, EOFError):
        stream.close()
        raise
    stream.sendall(wire.encode(wire.Hello(NodeId(node), "127.0.0.1", 1, 1, 2, f"boot-{node}")))
    return stream


def first(stream: ssl.SSLSocket) -> wire.Message:
    decoder = wire.Decoder()
    while data := stream.recv(65536):
        if found := decoder.feed(data):
            return found[0]
    raise EOFError


def all_of(stream: ssl.SSLSocket) -> None:
    """Until it ends, which raises."""
    while True:
        first(stream)


def test_an_agent_joins_by_its_certificate_and_another_nodes_is_refused(secured: Secured):
    secured.agent("n1", "node-n1")
    until(lambda: "n1" in secured.connected(), "the agent")
    shown = secured.client().cluster()["agents"]["n1"]["certificate_until"]
    assert 89 * 86400 < shown - time.time() <= 90 * 86400 + 60
    posing = secured.agent("n3", "node-n2")
    until(lambda: "does not speak for n3" in secured.said("keepstep.orchestrator"), "a refusal")
    # The same at once, by hand: with another's certificate, with an operator's, and as another.
    for certificate, node in (("node-n2", "n1"), ("operator-alice", "n1"), ("node-n1", "n2")):
        with upgraded(secured, certificate, node) as stream:
            assert isinstance(first(stream), wire.Refused)
    with upgraded(secured, "node-n2", "n2") as stream:
        assert isinstance(first(stream), wire.Pulse)
        stream.sendall(wire.encode(wire.Heartbeat(NodeId("n1"))))
        with pytest.raises((EOFError, OSError)):
            all_of(stream)
    assert secured.connected() == ["n1"]
    assert posing.wait(SECONDS_MAX) == 2, "it is told, and ends"
    assert "does not speak for n3" in secured.said("keepstep.agent")


def test_the_doctor_looks_at_the_certificate_that_is_shown(secured: Secured, tmp_path: Path):
    seen = doctor.shown(secured.url)
    assert seen is not None
    left = seen.expires_at - time.time()
    assert 89 * 86400 < left <= 90 * 86400 + 60
    with pytest.MonkeyPatch.context() as patch:
        certs.make(tmp_path, operators=["bob"])
        patch.setenv(TLS_DIRECTORY, str(tmp_path / "operator-bob"))
        other = doctor.shown(secured.url)
    assert other is not None
    assert "cannot be trusted" in other.problem
    assert doctor.shown("https://127.0.0.1:1") is None, "that it is away is another finding"


def test_without_tls_or_from_another_authority_nobody_is_heard(secured: Secured, tmp_path: Path):
    with pytest.raises(Unreachable):
        Client(f"http://127.0.0.1:{secured.port}", TOKEN).cluster()
    certs.make(tmp_path, nodes=["n1"])
    shutil.copy(secured.pki / "ca" / "ca.crt", tmp_path / "node-n1" / "ca.crt")
    secured.pki = tmp_path
    with pytest.raises((OSError, EOFError)):
        upgraded(secured, "node-n1", "n1")
    # Who shows none is heard, for its token; but it is no node.
    context = ssl.create_default_context(cafile=str(tmp_path / "node-n1" / "ca.crt"))
    connection = http.client.HTTPSConnection("127.0.0.1", secured.port, context=context)
    connection.request("GET", "/v1/jobs", headers={"Authorization": f"Bearer {TOKEN}"})
    assert connection.getresponse().status == 200
    connection.close()


def test_renewed_certificates_are_taken_while_streams_stay(secured: Secured):
    def serial() -> object:
        context = tls.client(secured.pki / "operator-alice")
        plain = socket.create_connection(("127.0.0.1", secured.port), SECONDS_MAX)
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as stream:
            return (stream.getpeercert() or {})["serialNumber"]

    secured.agent("n1", "node-n1")
    until(lambda: "n1" in secured.connected(), "the agent")
    before = serial()
    certs.make(secured.pki, hosts=["127.0.0.1"], nodes=["n1"], renew=True)
    until(lambda: serial() != before, "the renewed certificate")
    assert secured.connected() == ["n1"]
    assert secured.said("keepstep.orchestrator").count("agent.connected") == 1
    assert "agent.disconnected" not in secured.said("keepstep.orchestrator")
    with upgraded(secured, "node-n1", "n1") as stream:
        # The name is the agent's: what matters is that the new certificate was believed.
        answer = first(stream)
        assert isinstance(answer, wire.Refused)
        assert "is here already" in answer.why


def test_a_node_whose_key_leaked_is_shut_out_by_another_authority(secured: Secured):
    """As docs/security.md tells it."""
    for node in ("n1", "n2"):
        secured.agent(node, f"node-{node}")
    until(lambda: secured.connected() == ["n1", "n2"], "both agents")
    old, new = secured.pki, secured.here / "pki2"
    certs.make(new, hosts=["127.0.0.1"], nodes=["n1"], operators=["alice"])
    both = (old / "ca" / "ca.crt").read_bytes() + (new / "ca" / "ca.crt").read_bytes()

    def put(path: Path, data: bytes) -> None:
        fresh = path.with_suffix(".fresh")
        fresh.write_bytes(data)
        fresh.replace(path)

    for who in ("orchestrator", "node-n1", "operator-alice"):
        put(old / who / "ca.crt", both)
    for who in ("orchestrator", "node-n1", "operator-alice"):
        for name in ("tls.key", "tls.crt"):
            put(old / who / name, (new / who / name).read_bytes())

    def reached() -> bool:
        try:
            return secured.connected() == ["n1", "n2"]
        except Unreachable:
            return False  # The orchestrator looks at its files now and then.

    until(reached, "an operator of the new authority")
    assert "agent.disconnected" not in secured.said("keepstep.orchestrator")
    put(old / "orchestrator" / "ca.crt", (new / "ca" / "ca.crt").read_bytes())
    until(lambda: "show a certificate" in secured.said("keepstep.orchestrator"), "their end")
    until(lambda: secured.connected() == ["n1"], "the one with a new certificate")
    with pytest.raises((OSError, EOFError)):
        upgraded(secured, "node-n2", "n2")


def test_roles_and_projects_hold_over_https_and_a_revoked_token_stops(secured: Secured):
    spec = JobSpec(JobId("mine"), "t.py")
    secured.client("a-ops").submit(spec)
    secured.client("b-ops").submit(JobSpec(JobId("theirs"), "t.py"))
    assert list(secured.client("a-eye").cluster()["jobs"]) == ["mine"]
    assert set(secured.client("ops").cluster()["jobs"]) == {"mine", "theirs"}
    for who, act, status in [
        ("a-eye", lambda client: client.stop("mine", save=False, why="x"), 403),
        ("a-ops", lambda client: client.stop("theirs", save=False, why="x"), 404),
        ("a-ops", lambda client: client.freeze({"why": "x"}), 403),
        ("hook", lambda client: client.cluster(), 403),
        ("nobody", lambda client: client.cluster(), 401),
    ]:
        with pytest.raises(Refusal) as refused:
            act(secured.client(who))
        assert refused.value.status == status, who
    secured.client("a-ops").stop("mine", save=False, why="done")
    (link,) = [
        json.loads(json.loads(line)["body"])["entry"]
        for line in secured.client("a-eye").journal("mine")
        if '\\"StopAsked\\"' in line
    ]
    # Whose token it was, and whose certificate.
    assert link["event"]["body"]["by"] == "a-ops/alice"
    tokens.revoke(secured.tokens, "a-ops")

    def is_refused() -> bool:
        try:
            secured.client("a-ops").cluster()
        except Refusal as refusal:
            return refusal.status == 401
        return False

    until(is_refused, "the end of a revoked token")
    said = secured.said("keepstep.orchestrator")
    assert not any(text in said for text in (TOKEN, *secured.texts.values()))
