"""`keepstep admin certs`: nothing that is trusted is lost, and what was not done is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep import tls
from keepstep.cli import certs, main
from keepstep.errors import ConfigError

HOSTS = ["10.0.0.1", "keepstep.example", "fd00::1"]


@pytest.fixture
def pki(tmp_path: Path) -> Path:
    certs.make(tmp_path, hosts=HOSTS, nodes=["n1"], operators=["alice"])
    return tmp_path


def everything(directory: Path) -> dict[str, bytes]:
    found = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


def names(directory: Path) -> set[str]:
    shown = tls.read(directory / "tls.crt")["subjectAltName"]
    return {value.strip().lower() for _, value in shown}


ALL = {"keepstep://orchestrator", "10.0.0.1", "keepstep.example", "fd00:0:0:0:0:0:0:1"}


@pytest.mark.parametrize("gone", [["ca.key"], ["ca.crt"], ["ca.key", "ca.crt"]])
def test_an_authority_whose_key_is_elsewhere_is_not_replaced(pki: Path, gone: list[str]):
    aside = {name: (pki / "ca" / name).read_bytes() for name in gone}
    for name in gone:
        (pki / "ca" / name).unlink()
    before = everything(pki)
    for asked in ({"nodes": ["n3"]}, {"renew": True}):
        with pytest.raises(ConfigError, match=f"lacks {' and '.join(sorted(gone))}.*put that back"):
            certs.make(pki, **asked)
    assert everything(pki) == before
    for name, what in aside.items():
        (pki / "ca" / name).write_bytes(what)
    assert [path.name for path in certs.make(pki, nodes=["n3"]).made] == ["node-n3"]


def test_what_is_there_needs_no_key(pki: Path):
    (pki / "ca" / "ca.key").unlink()
    done = certs.make(pki, hosts=HOSTS, nodes=["n1"])
    assert done.made == []
    assert done.notes == ["kept as they are: node-n1, orchestrator; --renew issues them again"]


def test_renewing_without_names_renews_everybody_with_their_names(pki: Path):
    before = everything(pki)
    done = certs.make(pki, renew=True)
    assert {path.name for path in done.made} == {"node-n1", "operator-alice", "orchestrator"}
    after = everything(pki)
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {f"{path.name}/tls.{end}" for path in done.made for end in ("crt", "key")}
    assert names(pki / "orchestrator") == ALL
    assert names(pki / "node-n1") == {"keepstep://node/n1"}
    assert names(pki / "operator-alice") == {"keepstep://operator/alice"}


def test_there_must_be_something_to_renew(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nothing in .* can be renewed; name for whom"):
        certs.make(tmp_path / "new", renew=True)
    assert not (tmp_path / "new").exists()


def test_renewing_with_one_name_keeps_the_others_and_says_so(pki: Path):
    done = certs.make(pki, hosts=["10.0.0.1", "new.example"], renew=True)
    assert [path.name for path in done.made] == ["orchestrator"]
    assert names(pki / "orchestrator") == ALL | {"new.example"}
    (note,) = done.notes
    assert "still names DNS:keepstep.example, IP:fd00::1" in note
    assert "to drop a name" in note


def test_a_name_that_is_not_in_the_certificate_is_not_passed_over(pki: Path):
    before = everything(pki)
    with pytest.raises(ConfigError, match=r"does not name DNS:new\.example; with --renew"):
        certs.make(pki, hosts=["10.0.0.1", "new.example"], nodes=["n3"])
    assert everything(pki) == before
    certs.make(pki, hosts=["KEEPSTEP.example"])  # The same name.


def test_what_was_made_and_what_was_kept_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    line = ["admin", "certs", str(tmp_path / "pki"), "--node"]
    assert main([*line, "n1"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "pki" / p) for p in ("ca", "node-n1")]
    assert main([*line, "n1"]) == 0
    told = capsys.readouterr()
    assert told.out == ""
    assert "kept as they are: node-n1" in told.err
    assert main(line[:-1]) == 0
    assert "nothing else was asked for" in capsys.readouterr().err
