"""`keepstep report`: the same account on a terminal, as JSON, Markdown and one HTML file."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from keepstep.cli import main
from keepstep.ledger import guarantee, plots, report, signing, webpage
from keepstep.ledger.account import account
from keepstep.ledger.goodput import Spent
from keepstep.model import JobId
from keepstep.orchestrator.journal import Entry
from keepstep.orchestrator.journal_sqlite import SqliteJournal
from tests.unit.account_story import SIGNER, Story, usual


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    story = usual()
    (tmp_path / "export.jsonl").write_text("\n".join(story.export()) + "\n")
    (tmp_path / "steps.jsonl").write_text("\n".join(story.step_log()) + "\n")
    return ["--export", str(tmp_path / "export.jsonl"), "--steps", str(tmp_path / "steps.jsonl")]


def shown(capsys: Any, *arguments: str) -> str:
    assert main(["report", *arguments]) == 0
    return str(capsys.readouterr().out)


def test_the_first_sentences_say_what_a_manager_asks(files: list[str], capsys: Any) -> None:
    text = shown(capsys, *files)
    assert "3 of 3 failures resolved live with no lost progress: 100.0%" in text
    assert "promised 90%: kept" in text.replace("\n    ", " ")
    assert "Goodput 75.0%" in text
    assert "no committed step was made twice" in text.replace("\n    ", " ")
    assert max(map(len, text.splitlines())) <= 80


def test_all_forms_tell_the_same_numbers(files: list[str], capsys: Any) -> None:
    plain = json.loads(shown(capsys, *files, "-o", "json"))
    assert sum(plain["classes"].values()) == plain["total"]
    assert (plain["guarantee"]["resolved"], plain["guarantee"]["counted"]) == (3, 3)
    assert plain["against_restart"]["faults"] == 3
    for form in ("text", "markdown", "html"):
        text = shown(capsys, *files, "-o", form)
        assert f"{plain['goodput']:.1%}" in text, form
        assert all(f"i{n}" in text for n in (1, 2, 3)), form


def test_the_users_own_times_and_price_make_the_money(files: list[str], capsys: Any) -> None:
    options = ["--price", "10", "--checkpoint-interval", "2h", "--replacement", "20m"]
    plain = json.loads(shown(capsys, *files, *options, "-o", "json"))["against_restart"]
    assert plain["restart_seconds"] == 3 * (3600 + 1200 + 300 + 300)
    assert plain["money"] == pytest.approx(plain["device_hours"] * 10)


def test_the_page_is_one_file_that_asks_nobody_for_anything(files: list[str], capsys: Any) -> None:
    page = shown(capsys, *files, "-o", "html")
    assert not re.search(r"(src|href)\s*=|url\(|@import|<script|<link|https?://", page)
    assert "prefers-color-scheme:dark" in page
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) == 4
    for drawing in drawings:
        assert 'aria-label="' in drawing
        ET.fromstring(drawing)


def test_the_page_is_well_formed_whatever_the_job_is_called() -> None:
    class Checker(HTMLParser):
        open: list[str]

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            if tag not in ("meta", "line", "path", "polyline", "polygon", "circle"):
                self.open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            if self.open and self.open[-1] == tag:
                self.open.pop()

    story = usual()
    found = account(story.chain(), story.lines)
    page = webpage.page(replace(found, job='<b>"&'))
    checker = Checker()
    checker.open = []
    checker.feed(page)
    assert checker.open == []
    assert "<b>&quot;" not in page.replace("&lt;b&gt;", "")


def test_every_class_has_words_and_a_colour() -> None:
    names = {kind.value for kind in Spent}
    assert names == set(report.LABELS) == set(plots.GROUPS)
    assert {group for group, _ in plots.LEGEND} == set(plots.GROUPS.values())
    for group in plots.GROUPS.values():
        assert f".{group}{{fill:var(--{group})}}" in webpage.STYLE


def test_a_job_without_any_step_or_fault_can_be_reported() -> None:
    story = Story().begin()
    found = account(story.chain(), story.lines)
    assert "No failure came." in report.markdown(found)
    assert "No pause." in webpage.page(found)


def test_many_incidents_are_drawn_by_their_longest_pauses() -> None:
    story = Story().begin().train(5)
    for _ in range(plots.ROWS_MAX + 5):
        story.fault().train(2)
    found = account(story.end().chain(), story.lines)
    assert f"The {plots.ROWS_MAX} longest of {plots.ROWS_MAX + 5}." in plots.waterfall(found)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.004, "0.00 s"), (9.99, "9.99 s"), (59.9, "59.9 s"), (61, "1 min 1 s"), (7260, "2 h 1 min")],
)
def test_durations_as_people_say_them(seconds: float, text: str) -> None:
    assert report.duration(seconds) == text


# ---------------------------------------------------------------- from a run directory


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """What a run leaves: its journal with the key beside it, and the step log where it says."""
    state = tmp_path / "state"
    state.mkdir()
    story = usual()
    journal = SqliteJournal(tmp_path / "journal.db")
    standing = journal.begin_term()
    bodies = [json.loads(json.dumps(body["entry"])) for body in story.chain().bodies]
    bodies[0]["event"]["body"]["spec"]["state_directory"] = str(state)
    entries = [Entry((JobId("train"),), body) for body in bodies]
    journal.append(standing.term, standing.head, entries)
    journal.close()
    lines = [{k: v for k, v in line.items() if k != "head"} for line in story.lines]
    (state / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    signing.load_or_make(tmp_path / "account.key")
    return tmp_path


def test_a_run_directory_is_enough_and_its_export_is_signed(run_dir: Path, capsys: Any) -> None:
    assert "3 of 3 failures" in shown(capsys, "--run-dir", str(run_dir))
    export = run_dir / "export.jsonl"
    assert main(["admin", "export", "--run-dir", str(run_dir), "--out", str(export)]) == 0
    assert main(["admin", "keys", "--run-dir", str(run_dir)]) == 0
    key = capsys.readouterr().out.strip()
    steps = str(run_dir / "state" / "steps.jsonl")
    assert main(["verify", str(export), steps, "--key", key]) == 2, "no head is quoted"
    assert main(["verify", str(export), steps, "--key", key, "--unsigned"]) == 0
    assert main(["verify", str(export), steps, "--key", SIGNER.public]) == 1
    export.write_text(export.read_text().replace("because of Tick", "because of Tock", 1))
    assert main(["verify", str(export), steps, "--key", key]) == 1


def test_without_a_key_the_export_says_that_it_is_not_signed(run_dir: Path, capsys: Any) -> None:
    (run_dir / "account.key").unlink()
    assert main(["admin", "export", "--run-dir", str(run_dir)]) == 0
    assert "not signed" in capsys.readouterr().err


def test_an_unknown_job_or_an_empty_directory_says_what_to_do(run_dir: Path, capsys: Any) -> None:
    assert main(["report", "other", "--run-dir", str(run_dir)]) == 2
    assert "there are: train" in capsys.readouterr().err
    assert main(["report", "--run-dir", str(run_dir / "state")]) == 2
    assert "no journal.db" in capsys.readouterr().err


def test_terms_that_the_job_was_not_submitted_under_are_pointed_out(
    run_dir: Path, capsys: Any
) -> None:
    path = run_dir / "terms.toml"
    path.write_text(guarantee.DEFAULT)
    assert main(["admin", "terms", "--sign", str(path), "--run-dir", str(run_dir)]) == 0
    assert main(["report", "--run-dir", str(run_dir), "--terms", str(path)]) == 0
    assert "not submitted under these terms" in capsys.readouterr().err
    assert main(["admin", "terms"]) == 0
    assert capsys.readouterr().out == guarantee.DEFAULT
