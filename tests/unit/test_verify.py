"""`keepstep verify`: untouched exports pass, forged ones do not, and the rate is reckoned anew."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import tamper
from keepstep.errors import ConfigError
from keepstep.ledger import guarantee, signing, verify
from tests.unit.account_story import SIGNER, Story, usual

SOURCE = Path(verify.__file__)


def handed_over(directory: Path, story: Story) -> list[str]:
    (directory / "export.jsonl").write_text("\n".join(story.export()) + "\n")
    (directory / "steps.jsonl").write_text("\n".join(story.step_log()) + "\n")
    return [str(directory / "export.jsonl"), str(directory / "steps.jsonl")]


# ---------------------------------------------------------------- the file


def test_the_verifier_is_one_small_file_of_the_standard_library() -> None:
    text = SOURCE.read_text(encoding="utf-8")
    assert text.count("\n") < 400
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
    }
    assert imported <= sys.stdlib_module_names


def test_it_runs_without_keepstep(tmp_path: Path) -> None:
    (tmp_path / "verify.py").write_text(SOURCE.read_text(encoding="utf-8"))
    files = handed_over(tmp_path, usual())
    command = [sys.executable, "-I", "-S", str(tmp_path / "verify.py"), *files]
    done = subprocess.run(
        [*command, "--key", SIGNER.public], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 resolved live: 100.0%" in done.stdout
    assert "promised 90%: kept" in done.stdout


# ---------------------------------------------------------------- Ed25519


@pytest.mark.parametrize(
    ("seed", "public", "message", "signature"),
    [
        (
            "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
            "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
            "",
            (
                "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39"
                "701cf9b46bd25bf5f0595bbe24655141438e7a100b"
            ),
        ),
        (
            "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
            "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
            "72",
            (
                "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f36"
                "13d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
            ),
        ),
    ],
)
def test_the_test_vectors_of_rfc_8032(seed: str, public: str, message: str, signature: str) -> None:
    signer = signing.signer(bytes.fromhex(seed))
    assert signer.public == public
    assert signer.sign(bytes.fromhex(message)) == signature
    assert verify.signed(public, bytes.fromhex(message), signature)


@given(st.binary(max_size=64), st.integers(0, 511), st.binary(min_size=32, max_size=32))
@settings(max_examples=15)
def test_a_signature_with_one_bit_changed_is_none(message: bytes, bit: int, seed: bytes) -> None:
    signer = signing.signer(seed)
    raw = bytearray.fromhex(signer.sign(message))
    assert verify.signed(signer.public, message, raw.hex())
    raw[bit // 8] ^= 1 << bit % 8
    assert not verify.signed(signer.public, message, raw.hex())
    assert not verify.signed(signer.public, message + b"x", signer.sign(message))


@pytest.mark.parametrize("junk", ["", "zz", "00" * 32, "ff" * 64, "00" * 63])
def test_what_is_no_signature_is_refused_and_not_an_error(junk: str) -> None:
    assert not verify.signed(SIGNER.public, b"x", junk)
    assert not verify.signed(junk, b"x", SIGNER.sign(b"x"))


# ---------------------------------------------------------------- forgeries


def test_an_untouched_export_passes() -> None:
    story = usual(faults=4)
    assert tamper.caught(story.export(), story.lines, SIGNER.public) == ""


def test_every_kind_of_forgery_is_caught() -> None:
    story = usual(faults=4)
    found = tamper.campaign(story.export(), story.lines, SIGNER, 120, seed=7)
    missed = [each for each in found if not each["said"]]
    assert not missed
    assert len({(each["what"], each["skill"]) for each in found}) == 20


def test_a_rewrite_by_the_holder_of_the_key_is_betrayed_by_the_heads_in_the_step_log() -> None:
    told, kept = usual(faults=2), usual(faults=3)
    rewritten = told.export(SIGNER)
    verify.read_chain(rewritten, SIGNER.public)
    assert "is not in this chain" in tamper.caught(rewritten, kept.lines, SIGNER.public)


def test_a_chain_that_was_handed_over_late_may_be_longer_than_the_step_log_knows() -> None:
    story = usual(faults=2)
    kept = list(story.lines)
    story.entry("Tick", {}, state="finished")
    assert tamper.caught(story.export(), kept, SIGNER.public) == ""


def test_a_step_log_with_a_hole_or_a_repeated_sample_is_refused(tmp_path: Path) -> None:
    story = usual()
    del story.lines[5]
    assert "step 6 where 5 is due" in tamper.caught(story.export(), story.lines, SIGNER.public)
    story = usual()
    story.lines[5]["samples"] = [0, 8]
    assert "begin at 0, not at 40" in tamper.caught(story.export(), story.lines, SIGNER.public)


def test_a_last_line_that_a_death_cut_short_is_forgiven_and_no_other(tmp_path: Path) -> None:
    lines = usual().step_log()
    assert len(verify.read_steps([*lines[:-1], lines[-1][:-9]])) == len(lines) - 1
    with pytest.raises(verify.Broken):
        verify.read_steps([lines[0][:-9], *lines[1:]])


def test_a_wrong_key_says_whose_it_is(tmp_path: Path, capsys: Any) -> None:
    files = handed_over(tmp_path, usual())
    assert verify.main([*files, "--key", "ab" * 32]) == 1
    assert f"signed by {SIGNER.public}" in capsys.readouterr().out


def test_files_that_are_something_else_are_answered_and_not_crashed_on(
    tmp_path: Path, capsys: Any
) -> None:
    files = handed_over(tmp_path, usual())
    for text in ("", "[]\n", '{"number":1}\n', '{"seal":{}}\n', '{"seal":[]}\n', "\x00\n"):
        Path(files[0]).write_text(text)
        assert verify.main(files) == 1
        assert capsys.readouterr().out.startswith("BAD: ")


# ---------------------------------------------------------------- the guarantee


def judged(story: Story, terms: verify.Terms | None = None) -> verify.Guarantee:
    return verify.guarantee(story.chain(), story.lines, terms or verify.Terms())


def test_a_missed_promise_owes_the_credit() -> None:
    story = Story().begin().train(10).fault().train(5).fault(outcome="saved").train(5).end()
    found = judged(story)
    assert (found.resolved, found.counted, found.credit) == (1, 2, 0.25)
    assert found.low < 0.5 < found.high
    lenient = judged(story, verify.Terms(excluded=("no_spare",)))
    assert (lenient.resolved, lenient.counted, lenient.credit) == (1, 1, 0.0)
    assert "excluded" in {each.standing for each in lenient.incidents}


def test_what_the_user_broke_is_listed_and_does_not_count() -> None:
    causes = [{"sign": "exception", "rank": 1, "node": "n1"}]
    story = Story().begin().train(10).fault(outcome="failed", causes=causes).end()
    assert [each.standing for each in judged(story).incidents] == ["excluded"]
    assert judged(story, verify.Terms(excluded=())).counted == 1


def test_an_incident_that_is_taken_out_of_the_chain_is_still_counted_as_a_gap() -> None:
    story = usual(faults=1)
    honest = judged(story)
    told = story.chain().bodies
    bodies = [b for b in told if not {"incident", "closed"} & b["entry"]["jobs"]["train"].keys()]
    for body in bodies:
        body["entry"]["jobs"]["train"]["incidents"] = 0
    hidden = verify.Chain("train", tuple(bodies), tuple(map(str, range(len(bodies)))))
    found = verify.guarantee(hidden, story.lines, verify.Terms())
    assert (honest.resolved, honest.counted) == (1, 1)
    assert (found.resolved, found.counted) == (0, 1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda line: line.update(samples=[0, 8]), "samples of step 12 begin at 0"),
        (lambda line: line.update(step=5), "step 5 where 12 is due"),
    ],
)
def test_live_means_the_very_next_step_and_the_very_next_samples(change: Any, why: str) -> None:
    story = usual(faults=1)
    change(next(line for line in story.lines if line["generation"] == 2))
    with pytest.raises(verify.Broken, match=why):
        judged(story)


@pytest.mark.parametrize("together", [False, True])
def test_holders_that_disagreed_are_a_miss_whatever_the_outcome_says(*, together: bool) -> None:
    story = usual(faults=1)
    bodies = json.loads(json.dumps(story.chain().bodies))
    for body in bodies:
        event = body["entry"]["event"]
        if event["kind"] == "PhaseReport" and event["body"]["phase"] == "verify":
            event["body"]["seats"][1]["digests"][""] = "other"
            if together:  # As a busy leader writes what several nodes say.
                event["kind"], said = "Reports", event["body"]
                apart = [{**said, "seats": [seat]} for seat in said["seats"]]
                event["body"] = {"job": "train", "reports": apart}
    chain = verify.Chain("train", tuple(bodies), tuple(map(str, range(len(bodies)))))
    (incident,) = verify.guarantee(chain, story.lines, verify.Terms()).incidents
    assert (incident.standing, "digests" in incident.why) == ("missed", True)


def test_an_incident_that_is_never_closed_is_a_miss_unless_the_chain_ends_in_it() -> None:
    story = Story().begin().train(10)
    story.incidents += 1
    moving = {"state": "migrating", "incident": "i1", "opened_at": story.now, "phase": "quiesce"}
    story.entry("Observed", {}, **moving)
    assert [each.standing for each in judged(story).incidents] == ["open"]
    story.later(1.0).entry("Tick", {}, state="running")
    assert [each.standing for each in judged(story).incidents] == ["missed"]


def test_only_the_period_counts() -> None:
    story = usual(faults=1)
    assert judged(story, verify.Terms(begins="1970-01-01", days=1)).counted == 1
    assert judged(story, verify.Terms(begins="1970-01-02", days=1)).counted == 0


@given(st.integers(0, 300), st.integers(1, 300))
def test_wilsons_interval_holds_the_rate(good: int, of: int) -> None:
    good = min(good, of)
    low, high = verify.wilson(good, of, 0.95)
    assert 0 <= low <= good / of <= high <= 1


def test_wilsons_interval_is_the_published_one() -> None:
    low, high = verify.wilson(81, 263, 0.95)  # Newcombe 1998, table I
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)


# ---------------------------------------------------------------- terms


def test_the_default_terms_are_those_of_the_verifier(tmp_path: Path) -> None:
    path = tmp_path / "terms.toml"
    path.write_text(guarantee.DEFAULT)
    terms, _ = guarantee.load(path)
    assert replace(terms, excluded=tuple(terms.excluded)) == verify.Terms()


def test_terms_are_checked_with_their_signature_and_their_job(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "terms.toml"
    path.write_text(guarantee.DEFAULT.replace("0.90", "0.99"))
    _, digest = guarantee.load(path)
    guarantee.sign(path, SIGNER)
    story = Story().begin(terms=digest).train(10).fault().train(10).end()
    files = [*handed_over(tmp_path, story), "--terms", str(path)]
    assert guarantee.named(story.chain()) == digest
    assert verify.main([*files, "--key", SIGNER.public]) == 0
    assert "promised 99%" in capsys.readouterr().out
    path.write_text(path.read_text().replace("0.99", "0.10"))
    assert verify.main([*files, "--key", SIGNER.public]) == 1
    assert "the terms were changed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["promised = 2.0", 'excluded = ["rain"]', "gap_medians = 0", "unknown = 1", "= 3"]
)
def test_terms_that_cannot_be_kept_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "terms.toml"
    path.write_text(f"[guarantee]\n{text}\n")
    with pytest.raises(ConfigError):
        guarantee.load(path)


def test_a_key_is_made_once_and_nobody_else_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "account.key"
    first = signing.load_or_make(path)
    assert signing.load_or_make(path) == first == signing.load(path)
    assert path.stat().st_mode & 0o077 == 0
    path.write_text("no key")
    with pytest.raises(ConfigError):
        signing.load(path)
