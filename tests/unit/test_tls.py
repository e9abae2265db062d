"""Certificates: who they name, whom they are refused to, and how renewed ones are taken."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest

from keepstep import tls
from keepstep.agent.__main__ import parse
from keepstep.cli import certs
from keepstep.errors import ConfigError


def certificate(*uris: str) -> dict[str, Any]:
    return {"subjectAltName": (("DNS", "n1"), *(("URI", uri) for uri in uris))}


def test_a_certificate_names_its_node_and_speaks_for_no_other():
    shown = certificate("keepstep://node/n1")
    assert tls.node_of(shown) == "n1"
    assert tls.why_not_node(shown, "n1") == ""
    assert tls.why_not_node(shown, "n2") == "this certificate is n1's, and does not speak for n2"


@pytest.mark.parametrize(
    "shown",
    [
        None,
        {},
        certificate(),
        certificate("keepstep://operator/n1"),
        certificate("keepstep://orchestrator"),
        certificate("spiffe://cluster/node/n1"),
        certificate("keepstep://node/"),
        certificate("keepstep://node"),
        certificate("keepstep://node/n1", "keepstep://node/n2"),
        {"subjectAltName": (("DNS", "keepstep://node/n1"),)},
        {"subject": ((("commonName", "n1"),),)},
    ],
)
def test_what_does_not_name_exactly_one_node_speaks_for_none(shown: dict[str, Any] | None):
    assert tls.node_of(shown) == ""
    assert tls.why_not_node(shown, "n1")


def test_names_survive_the_way_into_a_uri():
    for name in ("n1", "a.b-c_d", "rack 7/slot", "ü"):
        assert tls.node_of(certificate(tls.node_uri(name))) == name
        assert tls.operator_of(certificate(tls.operator_uri(name))) == name


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    there = tmp_path_factory.mktemp("pki")
    certs.make(there, hosts=["127.0.0.1", "localhost"], nodes=["n1"], operators=["alice"])
    return there


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, host: str) -> dict[str, Any]:
    """The client's certificate as the server sees it; no sockets."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = client.wrap_bio(down, up, server_side=False, server_hostname=host)
    there = server.wrap_bio(up, down, server_side=True)
    waiting = [here, there]
    for _ in range(8):
        for side in tuple(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                continue
        if not waiting:
            return there.getpeercert() or {}
    raise AssertionError("no end of the handshake")


def complain(why: str) -> None:
    raise AssertionError(why)


def test_the_two_sides_know_each_other_by_the_authority(pki: Path):
    server = tls.server(pki / "orchestrator", everybody=True, problem=complain)
    shown = shake_hands(tls.client(pki / "node-n1"), server, "127.0.0.1")
    assert tls.node_of(shown) == "n1"
    shown = shake_hands(tls.client(pki / "operator-alice"), server, "localhost")
    assert (tls.node_of(shown), tls.operator_of(shown)) == ("", "alice")


def test_a_client_refuses_another_name_and_a_node_that_serves(pki: Path):
    server = tls.server(pki / "orchestrator", everybody=True, problem=complain)
    with pytest.raises(ssl.SSLCertVerificationError, match="match"):
        shake_hands(tls.client(pki / "node-n1"), server, "elsewhere")
    posing = tls.server(pki / "node-n1", everybody=False, problem=complain)
    with pytest.raises(ssl.SSLCertVerificationError, match="purpose"):
        shake_hands(tls.client(pki / "operator-alice"), posing, "127.0.0.1")


def test_strangers_are_refused_on_both_sides(pki: Path, tmp_path: Path):
    certs.make(tmp_path, hosts=["127.0.0.1"], nodes=["n1"])
    server = tls.server(pki / "orchestrator", everybody=True, problem=complain)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(tls.client(tmp_path / "node-n1"), server, "127.0.0.1")
    bare = ssl.create_default_context(cafile=str(pki / "ca" / "ca.crt"))
    with pytest.raises(ssl.SSLError, match=r"(?i)did not return a certificate"):
        shake_hands(bare, server, "127.0.0.1")
    heard = tls.server(pki / "orchestrator", everybody=False, problem=complain)
    assert tls.why_not_node(shake_hands(bare, heard, "127.0.0.1"), "n1")


def test_old_versions_of_the_protocol_are_not_spoken(pki: Path):
    server = tls.server(pki / "orchestrator", everybody=False, problem=complain)
    old = ssl.create_default_context(cafile=str(pki / "ca" / "ca.crt"))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        shake_hands(old, server, "127.0.0.1")


def test_renewed_files_are_taken_and_broken_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tls, "LOOK_SECONDS", 0.0)
    certs.make(tmp_path, hosts=["127.0.0.1"], nodes=["n1"])
    said: list[str] = []
    server = tls.server(tmp_path / "orchestrator", everybody=True, problem=said.append)
    client = tls.client(tmp_path / "node-n1")
    first = shake_hands(client, server, "127.0.0.1")["serialNumber"]
    certs.make(tmp_path, nodes=["n1"], renew=True)
    second = shake_hands(client, server, "127.0.0.1")["serialNumber"]
    assert second != first
    # A key that is not the certificate's: the old pair serves on, and it is said once.
    key = tmp_path / "orchestrator" / "tls.key"
    whole = key.read_bytes()
    key.write_bytes((tmp_path / "node-n1" / "tls.key").read_bytes())
    for _ in range(2):
        assert shake_hands(client, server, "127.0.0.1")["serialNumber"] == second
    assert len(said) == 1
    key.write_bytes(whole)
    assert shake_hands(client, server, "127.0.0.1")["serialNumber"] == second


def test_an_authority_that_was_replaced_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tls, "LOOK_SECONDS", 0.0)
    old, new = tmp_path / "old", tmp_path / "new"
    certs.make(old, hosts=["127.0.0.1"], nodes=["n1"])
    certs.make(new, hosts=["127.0.0.1"], nodes=["n1"])
    server = tls.server(old / "orchestrator", everybody=True, problem=complain)
    shake_hands(tls.client(old / "node-n1"), server, "127.0.0.1")
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (new / "orchestrator" / name).replace(old / "orchestrator" / name)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(tls.client(old / "node-n1"), server, "127.0.0.1")
    shake_hands(tls.client(new / "node-n1"), server, "127.0.0.1")


def test_files_that_are_not_there_are_the_users_mistake(tmp_path: Path):
    with pytest.raises(ConfigError, match="keepstep admin certs"):
        tls.client(tmp_path)


def test_what_was_made_is_kept_and_keys_are_for_their_owner(tmp_path: Path):
    first = certs.make(tmp_path, hosts=["h.example"], nodes=["n1"])
    assert {path.name for path in first.made} == {"ca", "orchestrator", "node-n1"}
    key = (tmp_path / "node-n1" / "tls.key").read_bytes()
    again = certs.make(tmp_path, hosts=["h.example"], nodes=["n1", "n2"])
    assert [path.name for path in again.made] == ["node-n2"]
    assert (tmp_path / "node-n1" / "tls.key").read_bytes() == key
    for path in tmp_path.rglob("*.key"):
        assert path.stat().st_mode & 0o077 == 0
    certs.make(tmp_path, nodes=["n" * 200])
    for bad in ("../n", "a b", "", "n\n", "n" * 254):
        with pytest.raises(ConfigError):
            certs.make(tmp_path, nodes=[bad])


AGENT = ["--node", "n1", "--room", "r", "--orchestrator"]


def test_an_agent_at_https_needs_its_certificate_and_never_mixes_it_with_plain_text():
    with pytest.raises(ConfigError, match="tls_directory"):
        parse([*AGENT, "https://h:1"], {})
    for name in ("KEEPSTEP_AGENT_TLS_DIRECTORY", "KEEPSTEP_TLS_DIRECTORY"):
        assert parse([*AGENT, "https://h:1,https://i:2"], {name: "/d"}).tls_directory == Path("/d")
    assert parse([*AGENT, "http://h:1"], {"KEEPSTEP_TLS_DIRECTORY": "/d"}).tls_directory is None
    for mixed in ("https://h:1,http://i:2", "ftp://h:1", "https://h"):
        with pytest.raises(ConfigError, match="https://"):
            parse([*AGENT, mixed], {"KEEPSTEP_TLS_DIRECTORY": "/d"})
