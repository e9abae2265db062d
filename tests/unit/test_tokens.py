"""Tokens: made once, kept by digest, read again, taken back."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from keepstep.cli import main
from keepstep.errors import ConfigError
from keepstep.model import JobId, JobSpec, JobState
from keepstep.orchestrator import admission, state, tokens
from keepstep.orchestrator.access import Rates
from keepstep.orchestrator.http import BadRequest
from keepstep.orchestrator.tokens import MAY, Caller, Role, Tokens

OWN = "the-clusters-own-token"


def test_a_token_is_known_by_its_digest_and_the_file_does_not_hold_it(tmp_path: Path):
    path = tmp_path / "tokens.json"
    text, _ = tokens.new(path, "alice", Role.OPERATOR, project="a")
    assert text.startswith("kst_")
    assert len(text) > 40
    assert text not in path.read_text(encoding="utf-8")
    assert path.stat().st_mode & 0o077 == 0
    known = Tokens(OWN, path)
    assert known.caller(text, 0.0) == Caller("alice", Role.OPERATOR, "a")
    assert known.caller(OWN, 0.0) == Caller(tokens.CLUSTER, Role.ADMIN)
    for wrong in ("", text[:-1], f"{text}x", tokens.digest(text), "ä"):
        assert known.caller(wrong, 0.0) is None


def test_one_that_was_taken_back_is_refused_and_a_new_one_accepted(tmp_path: Path):
    path = tmp_path / "tokens.json"
    old, _ = tokens.new(path, "alice", Role.VIEWER)
    known = Tokens(OWN, path)
    tokens.revoke(path, "alice")
    new, _ = tokens.new(path, "alice", Role.VIEWER)
    assert known.refresh(10.0) == ""
    assert known.caller(old, 0.0) is None
    assert known.caller(new, 0.0) == Caller("alice", Role.VIEWER)


def test_a_file_that_became_unreadable_closes_the_door_instead_of_leaving_it_ajar(tmp_path: Path):
    path = tmp_path / "tokens.json"
    text, _ = tokens.new(path, "alice", Role.ADMIN)
    known = Tokens(OWN, path)
    path.write_text("{", encoding="utf-8")
    assert "only the cluster's own token" in known.refresh(10.0)
    assert known.caller(text, 0.0) is None
    assert known.caller(OWN, 0.0) is not None
    with pytest.raises(ConfigError):
        Tokens(OWN, path)


def test_a_file_that_could_not_be_read_once_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "tokens.json"
    tokens.new(path, "alice", Role.ADMIN)
    known = Tokens(OWN, path)
    text, _ = tokens.new(path, "bob", Role.VIEWER)

    def fails(_: Path) -> tokens.TokenFile:
        raise ConfigError("the disk is slow")

    with monkeypatch.context() as patched:
        patched.setattr(tokens, "read", fails)
        assert "the disk is slow" in known.refresh(10.0)
        assert known.refresh(20.0) == "", "the same trouble is told once"
    assert known.refresh(30.0) == ""
    assert known.caller(text, 0.0) is not None


def test_a_token_may_end_by_itself(tmp_path: Path):
    path = tmp_path / "tokens.json"
    text, token = tokens.new(path, "guest", Role.VIEWER, seconds=60)
    known = Tokens(OWN, path)
    assert known.caller(text, token.expires_at - 1) is not None
    assert known.caller(text, token.expires_at) is None


def test_names_and_roles_that_make_no_sense_are_refused(tmp_path: Path):
    path = tmp_path / "tokens.json"
    tokens.new(path, "alice", Role.VIEWER)
    for name, role, project in [
        ("alice", Role.VIEWER, ""),
        ("", Role.VIEWER, ""),
        (tokens.CLUSTER, Role.VIEWER, ""),
        ("a b", Role.VIEWER, ""),
        ("bob", Role.VIEWER, "a/b"),
        ("bob", Role.WEBHOOK, "a"),
        ("bob", Role.ADMIN, "a"),
    ]:
        with pytest.raises(ConfigError):
            tokens.new(path, name, role, project=project)
    with pytest.raises(ConfigError, match="there are: alice"):
        tokens.revoke(path, "bob")


def test_no_role_but_admin_may_do_all_and_a_webhook_reads_nothing():
    assert MAY[Role.ADMIN] == frozenset(Role)
    assert MAY[Role.VIEWER] < MAY[Role.OPERATOR] < MAY[Role.ADMIN]
    assert MAY[Role.WEBHOOK] == {Role.WEBHOOK}


def test_rates_hold_on_average_and_allow_a_burst():
    rates = Rates(10.0, 20.0)
    assert [rates.allow("a", 0.0) for _ in range(21)] == [True] * 20 + [False]
    assert rates.allow("b", 0.0), "one caller's haste is not another's"
    assert [rates.allow("a", 0.1) for _ in range(2)] == [True, False]
    for number in range(10_000):
        rates.allow(str(number), 1.0)
    assert len(rates._left) <= 4096


def test_the_command_line_prints_a_token_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KEEPSTEP_ORCHESTRATOR_TOKENS_FILE", str(tmp_path / "tokens.json"))
    line = ["admin", "token", "new", "bob", "--role", "operator", "--project", "b"]
    assert main(line) == 0
    text = capsys.readouterr().out.strip()
    assert Tokens(OWN, tmp_path / "tokens.json").caller(text, 0.0) == Caller(
        "bob", Role.OPERATOR, "b"
    )
    assert main(["admin", "token", "list"]) == 0
    listed = capsys.readouterr().out
    assert listed.split() == ["bob", "operator", "b"]
    assert main(["admin", "token", "list", "-o", "json"]) == 0
    assert "sha256" not in capsys.readouterr().out
    assert main(["admin", "token", "revoke", "bob"]) == 0
    assert main(["admin", "token", "revoke", "bob"]) == 2


def spec(priority: int, **more: Any) -> JobSpec:
    return JobSpec(JobId("j"), "t.py", priority=priority, **more)


def test_a_projects_token_does_not_put_its_jobs_above_others():
    caller = Caller("alice", Role.OPERATOR, "a")
    assert admission.owned(spec(0), caller, None).project == "a"
    assert admission.owned(spec(-5), caller, None).priority == -5
    with pytest.raises(BadRequest, match="a project's highest") as refused:
        admission.owned(spec(1), caller, None)
    assert (refused.value.status, bool(refused.value.fix)) == (403, True)
    whole = Caller("root", Role.OPERATOR)
    assert admission.owned(spec(1_000_000, project="a"), whole, None).priority == 1_000_000


def test_what_was_granted_may_be_said_again_by_every_launcher():
    caller = Caller("alice", Role.OPERATOR, "a")
    known = state.Job(spec(9, project="a"), JobState.RUNNING, 0.0)
    assert admission.owned(spec(9), caller, known) == known.spec
    known.state = JobState.FINISHED
    with pytest.raises(BadRequest, match="a project's highest"):
        admission.owned(spec(9), caller, known)


def somebodys(path: Path, monkeypatch: pytest.MonkeyPatch, *, changed_by: int) -> os.stat_result:
    """A file with one token, that belongs to another user than the one who is about to change it.
    Neither is root, unless root changes it."""
    tokens.new(path, "alice", Role.VIEWER)
    if os.geteuid() == 0:
        os.chown(path, 4321, 4321)
    monkeypatch.setattr(tokens.os, "geteuid", lambda: changed_by)
    return path.stat()


def refuse(*_: object) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def test_a_file_stays_its_owners_when_root_changes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Root's, the orchestrator could not read it, and would let in nobody."""
    path, given = tmp_path / "tokens.json", []
    there = somebodys(path, monkeypatch, changed_by=0)
    monkeypatch.setattr(tokens.os, "fchown", lambda _, *ids: given.append(ids))
    tokens.revoke(path, "alice")
    assert given == [(there.st_uid, there.st_gid)]


def test_root_that_may_not_give_a_file_to_its_owner_changes_nothing_and_says_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "tokens.json"
    there = somebodys(path, monkeypatch, changed_by=0)
    monkeypatch.setattr(tokens.os, "fchown", refuse)
    with pytest.raises(ConfigError, match=f"user {there.st_uid}.*run this as that user"):
        tokens.revoke(path, "alice")
    assert [token.name for token in tokens.read(path).tokens] == ["alice"]
    assert sorted(file.name for file in tmp_path.iterdir()) == [".tokens.json.lock", "tokens.json"]


def test_who_may_write_the_directory_changes_a_file_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, given = tmp_path / "tokens.json", []
    there = somebodys(path, monkeypatch, changed_by=there_is_no(tmp_path))
    assert there.st_uid != tokens.os.geteuid()
    path.chmod(0o664)
    with monkeypatch.context() as not_its_group:
        not_its_group.setattr(tokens.os, "fchown", refuse)
        tokens.new(path, "bob", Role.VIEWER)
    assert [token.name for token in tokens.read(path).tokens] == ["alice", "bob"]
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o664)
    monkeypatch.setattr(tokens.os, "fchown", lambda _, *ids: given.append(ids))
    tokens.revoke(path, "bob")
    assert path.stat().st_mode & 0o777 == 0o660
    assert given == [(-1, path.stat().st_gid)]


def there_is_no(directory: Path) -> int:
    """A user who is neither root nor the owner of this."""
    return directory.stat().st_uid + 7


def test_a_link_that_was_put_there_is_not_written_through(tmp_path: Path):
    path, victim = tmp_path / "tokens.json", tmp_path / "victim"
    victim.write_text("kept", encoding="utf-8")
    before = _told(victim)
    (tmp_path / ".tokens.json.new").symlink_to(victim)
    tokens.new(path, "alice", Role.VIEWER)
    assert not path.is_symlink()
    assert victim.read_text(encoding="utf-8") == "kept"
    assert _told(victim) == before
    (tmp_path / ".tokens.json.lock").unlink()
    (tmp_path / ".tokens.json.lock").symlink_to(tmp_path / "chosen")
    with pytest.raises(ConfigError, match="cannot write"):
        tokens.revoke(path, "alice")
    assert not (tmp_path / "chosen").exists()


def _told(path: Path) -> tuple[int, int, int]:
    there = path.stat()
    return there.st_uid, there.st_mode, there.st_mtime_ns
