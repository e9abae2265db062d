"""A policy is what its file says, or the file is refused with the fix."""

from __future__ import annotations

import dataclasses
import os
import tomllib
from pathlib import Path

import pytest

from keepstep import policy_file
from keepstep.cli import main, parser
from keepstep.cli.run import settle
from keepstep.config import explanations
from keepstep.errors import ConfigError
from keepstep.model import Mode, Policy, Unit

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "policy.toml"
DOCUMENT = ROOT / "docs" / "policy.md"
BEGIN, END = "<!-- made from keepstep/model.py: begin -->\n", "<!-- end -->"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "policy.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_without_a_file_the_defaults_hold():
    assert policy_file.read(None, "train") == Policy()


def test_the_top_is_for_all_jobs_and_a_section_for_its_own(tmp_path: Path):
    path = written(tmp_path, 'hold_seconds_max = 7\n[job.big]\nunit = "node"\n')
    assert policy_file.read(path, "big") == Policy(hold_seconds_max=7.0, unit=Unit.NODE)
    assert policy_file.read(path, "small") == Policy(hold_seconds_max=7.0)


def test_the_most_exact_section_counts_key_by_key(tmp_path: Path):
    text = """
    [job.eval-1]
    hang_steps = 3
    [job."eval-*"]
    hang_steps = 2
    hold_seconds_max = 2
    [job."*"]
    hang_steps = 1
    hold_seconds_max = 1
    recoveries_max = 1
    """
    found = policy_file.read(written(tmp_path, text), "eval-1")
    assert (found.hang_steps, found.hold_seconds_max, found.recoveries_max) == (3.0, 2.0, 1)
    assert policy_file.read(written(tmp_path, text), "other").hang_steps == 1.0


def test_of_equally_exact_sections_the_later_counts(tmp_path: Path):
    path = written(tmp_path, '[job."a*"]\nhang_steps = 1\n[job."*b"]\nhang_steps = 2\n')
    assert policy_file.read(path, "a-b").hang_steps == 2.0


def test_the_command_line_beats_the_file(tmp_path: Path):
    (tmp_path / "train.py").write_text("", encoding="utf-8")
    written(tmp_path, "hold_seconds_max = 7\nhang_steps = 9\n[job.j]\nhold_seconds_max = 8\n")
    line = f"run --policy {tmp_path / 'policy.toml'} --hold-seconds 5 --job j train.py"
    found = settle(parser().parse_args(line.split()), {}, tmp_path).spec.policy
    assert (found.hold_seconds_max, found.hang_steps) == (5.0, 9.0)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("hold_second_max = 5\n", "did you mean 'hold_seconds_max'"),
        ("quiesce_seconds_max = 5\n", "unknown setting"),
        ("hold_seconds_max = 0\n", "hold_seconds_max is 0.0; it must be above zero"),
        ("hold_seconds_max = -1\n", "above zero"),
        ("hold_seconds_max = true\n", "give float"),
        ("hold_seconds_max = '5'\n", "without quotes"),
        ("hold_seconds_max = 'long'\n", "give a number"),
        ("recoveries_max = 1.5\n", "give int"),
        ("mode = 'watch'\n", "give one of: act, observe"),
        ("unit = 3\n", "give one of: device, node, domain"),
        ("lend = 'yes'\n", "give true or false"),
        ("lend = 1\n", "give true or false"),
        ("silent_seconds_max = 1\n", "must not be above silent_seconds_max"),
        ("silent_seconds_max = 1\nrestart_grace_seconds = 1\n", "give 1.2 or more"),
        ("job = 3\n", "write \\[job.NAME\\]"),
        ("[job]\nbig = 3\n", "write \\[job.big\\] above"),
        ("[jobs.big]\nhang_steps = 1\n", "sections are \\[job.NAME\\]"),
        ("[job.llama.v2]\nhang_steps = 1\n", 'a name with a dot is quoted: \\[job."NAME.v2"\\]'),
        ("[job.other]\nhold_second_max = 5\n", "\\[job.other\\]: unknown setting"),
        ("[job.other]\nhang_steps = 0\n", "\\[job.other\\]: hang_steps is 0.0"),
        ("[job\n", "is not TOML"),
    ],
)
def test_a_mistake_is_refused_with_the_fix(tmp_path: Path, text: str, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        policy_file.read(written(tmp_path, text), "train")


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="check --policy"):
        policy_file.read(tmp_path / "none.toml", "train")


def test_what_explain_prints_is_a_policy_file(tmp_path: Path):
    unusual = Policy(Mode.OBSERVE, hold_seconds_max=9.0, lend=False)
    path = written(tmp_path, policy_file.explain(unusual))
    assert policy_file.read(path, "train") == unusual
    assert tomllib.loads(policy_file.explain())["move_home"] is False


def test_show_prints_a_jobs_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = written(tmp_path, "[job.big]\nhang_steps = 9\n")
    assert main(["admin", "policy", "show", "--policy", str(path), "--job", "big"]) == 0
    assert "hang_steps = 9.0" in capsys.readouterr().out
    assert main(["admin", "policy", "show", "-o", "json"]) == 0
    assert '"hang_steps":4.0' in capsys.readouterr().out


def test_the_example_says_what_its_comments_say():
    assert policy_file.read(EXAMPLE, "any").hold_seconds_max == 3600.0
    assert policy_file.read(EXAMPLE, "llama-70b").unit is Unit.NODE
    assert policy_file.read(EXAMPLE, "eval-7").hold_seconds_max == 60.0
    assert policy_file.read(EXAMPLE, "newcomer").mode is Mode.OBSERVE


def test_every_setting_has_its_reason_and_is_in_the_documentation():
    names = [field.name for field in dataclasses.fields(Policy)]
    assert sorted(explanations(Policy)) == sorted(names)
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    table, _, after = rest.partition(END)
    if os.environ.get("KEEPSTEP_REWRITE"):
        DOCUMENT.write_text(before + BEGIN + policy_file.table() + END + after, encoding="utf-8")
    else:
        assert table == policy_file.table(), "say KEEPSTEP_REWRITE=1 to write it anew"
