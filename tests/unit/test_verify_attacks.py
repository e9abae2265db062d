"""What the holder of the key could write live, so that every head fits: the step log betrays it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keepstep.cli import main
from keepstep.ledger import guarantee, report, verify
from keepstep.ledger.account import account
from tests.unit.account_story import JOB, SIGNER, Story, usual


def checked(directory: Path, story: Story, *more: str, steps: str = "") -> tuple[int, str]:
    """Exit code and answer of the verifier, as JSON."""
    export, log = directory / "export.jsonl", directory / "steps.jsonl"
    export.write_text("\n".join(story.export()) + "\n")
    log.write_text(steps or "".join(json.dumps(line) + "\n" for line in story.lines))
    arguments = [str(export), str(log), "--json", *more]
    return verify.main(arguments), str(log)


def judged(story: Story, terms: verify.Terms | None = None) -> verify.Guarantee:
    return verify.guarantee(story.chain(), story.lines, terms or verify.Terms())


def standings(story: Story, terms: verify.Terms | None = None) -> list[str]:
    return [each.standing for each in judged(story, terms).incidents]


def test_a_fallback_that_the_chain_does_not_mention_is_a_miss() -> None:
    story = Story().begin().train(50)
    story.generation += 1
    story.lines.append({"fallback_to": 5})
    story.step = 5
    story.later(3600).train(50).end()
    (incident,) = judged(story).incidents
    assert (incident.standing, "went back to step 5" in incident.why) == ("missed", True)


def test_a_success_needs_a_change_of_generation_of_its_own_in_the_step_log() -> None:
    story = Story().begin().train(20).fault()
    told = {"outcome": "resumed", "generation": 2, "boundary": story.step, "recoveries": 0}
    told |= {"causes": [{"sign": "exit", "rank": 1, "node": "n"}], "causes_count": 1}
    for number in range(2, 11):
        story.incidents = number
        closed = {"id": f"i{number}", "opened_at": story.now, "closed_at": story.now, **told}
        story.entry("PhaseReport", story._report("resume"), state="running", closed=closed)
    story.train(20).end()
    found = judged(story)
    assert (found.resolved, found.counted) == (1, 10)
    assert standings(story)[1:] == ["unproven"] * 9


def test_an_incident_is_closed_once() -> None:
    story = Story().begin().train(20).fault()
    closed = story.chain().bodies[-1]["entry"]["jobs"]["train"]["closed"]
    story.entry("Tick", {}, state="running", closed=closed)
    with pytest.raises(verify.Broken, match="second time"):
        judged(story)


def test_an_open_incident_explains_one_change_and_not_for_long() -> None:
    story = Story().begin().train(20)
    story.incidents = 1
    told = {"incident": "i1", "opened_at": story.now, "state": "migrating", "phase": "hold"}
    story.entry("Observed", {"sign": "exit"}, **told)
    assert standings(story) == ["open"]
    for _ in range(3):
        story.generation += 1
        story.later(3600).entry("Tick", {}, **told).train(20)
    assert standings(story) == ["missed"] * 3


def test_what_the_step_log_does_not_show_is_unproven_and_not_resolved() -> None:
    story = Story().begin().train(20).fault().train(3)
    story.lines = [line for line in story.lines if line["generation"] < 2]
    assert standings(story) == ["unproven"]
    assert judged(story).rate == 0
    story = usual(faults=1)
    story.lines = [line for line in story.lines if line["generation"] == 2]
    assert standings(story) == ["unproven"]


def test_a_resume_whose_step_was_never_committed_is_one_with_the_next() -> None:
    story = Story().begin().train(20).fault()
    story.lines.pop()
    story.step -= 1
    story.fault().train(5).end()
    assert standings(story) == ["joined", "resolved"]


def test_a_planned_move_that_loses_steps_or_takes_hours_is_a_miss() -> None:
    planned: dict[str, Any] = {"outcome": "moved", "kind": "planned", "causes": []}
    story = Story().begin().train(50)
    story.lines.append({"fallback_to": 5})
    story.step = 5
    assert standings(story.fault(**planned).train(50).end()) == ["missed"]
    story = Story().begin().train(50).fault(detection=18_000, **planned).train(20).end()
    assert standings(story) == ["missed"]


def test_a_stop_is_an_exclusion_only_if_it_was_asked_for_before_the_fault() -> None:
    story = Story().begin().train(20).fault(outcome="stopped").end()
    assert standings(story) == ["missed"]
    story = Story().begin().train(20).entry("StopAsked", {}, state="running")
    found = judged(story.fault(outcome="stopped").end())
    assert [each.standing for each in found.incidents] == ["excluded"]
    assert "with exclusions: 0 of 1 resolved live" in found.notes


def test_one_exception_among_other_causes_is_no_user_error() -> None:
    causes = [{"sign": sign, "rank": 1, "node": "n"} for sign in ("exit", "gpu", "exception")]
    story = Story().begin().train(20).fault(outcome="failed", causes=causes).end()
    assert standings(story) == ["missed"]


def test_a_link_that_is_withheld_keeps_its_place_and_hides_no_incident(
    tmp_path: Path, capsys: Any
) -> None:
    story = usual(faults=1)
    links = [json.loads(line) for line in story.export()[:-1]]
    bodies = [json.loads(link["body"]) for link in links]

    def without(numbers: set[int]) -> verify.Chain:
        hidden = [
            {**link, "body": '{"withheld":"other jobs"}'} if at in numbers else link
            for at, link in enumerate(links)
        ]
        lines = [*map(json.dumps, hidden), story.export()[-1]]
        return verify.read_chain(lines, SIGNER.public)

    chain = without({1})
    assert (chain.withheld, len(chain.hashes)) == (1, len(links))
    assert verify.check_heads(chain, story.lines)[0] > 0
    assert verify.guarantee(chain, story.lines, verify.Terms()).resolved == 1
    of_it = {"incident", "closed"}
    told = {at for at, b in enumerate(bodies) if of_it & b["entry"]["jobs"]["train"].keys()}
    found = verify.guarantee(without(told), story.lines, verify.Terms())
    assert found.resolved == 0
    assert found.counted >= 1


def test_nothing_is_good_without_a_key_and_a_quoted_head(tmp_path: Path, capsys: Any) -> None:
    story = usual(faults=1)
    assert checked(tmp_path, story)[0] == 2
    assert not json.loads(capsys.readouterr().out)["good"]
    assert checked(tmp_path, story, "--key", "")[0] == 2
    assert checked(tmp_path, story, "--unsigned")[0] == 0
    capsys.readouterr()
    assert checked(tmp_path, story, "--key", SIGNER.public.upper())[0] == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["job"], found["key"]) == ("train", SIGNER.public)
    assert found["links_after_last_head"] == 1
    assert found["terms"]["promised"] == 0.9
    for line in story.lines:
        line.pop("head", None)
    assert checked(tmp_path, story, "--key", SIGNER.public)[0] == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line.update(busy={"x": float("nan")}),
        lambda line: line.update(at=float("nan")),
        lambda line: line.update(at="soon"),
        lambda line: line.update(busy={"x": -5.0}),
        lambda line: line.pop("at"),
    ],
)
def test_a_time_that_is_none_is_refused(change: Any, tmp_path: Path) -> None:
    story = Story().begin().train(20).later(7200).train(20).end()
    change(story.lines[20])
    assert checked(tmp_path, story, "--key", SIGNER.public)[0] == 1


def test_a_name_twice_in_one_object_is_refused() -> None:
    with pytest.raises(verify.Broken):
        verify.read_steps(['{"step": 1, "step": 2}\n'])


def test_a_declaration_excuses_no_more_than_there_was_and_is_listed() -> None:
    story = Story().begin().train(20).later(7200).train(20).end()
    story.lines[20]["busy"] = {"x": 1e9}
    assert standings(story) == ["missed"]
    story.lines[20]["busy"] = {"x": 7200}
    assert standings(story) == []
    assert any("before step 20 were declared" in note for note in judged(story).notes)


def test_few_steps_do_not_hide_a_gap() -> None:
    story = Story().begin().train(2).later(7200).train(1).end()
    assert standings(story) == ["missed"]
    assert "too few steps to say what a gap is" in judged(story).notes


def test_terms_that_the_job_names_must_be_given_and_be_those_of_every_run(
    tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "terms.toml"
    path.write_text(guarantee.DEFAULT)
    guarantee.sign(path, SIGNER)
    _, digest = guarantee.load(path)
    story = Story().begin(terms=digest).train(20).end()
    assert checked(tmp_path, story, "--key", SIGNER.public)[0] == 1
    assert checked(tmp_path, story, "--key", SIGNER.public, "--terms", str(path))[0] == 0
    story.begin(terms="bb" * 32).train(20).end()
    assert checked(tmp_path, story, "--key", SIGNER.public, "--terms", str(path))[0] == 1
    path.write_bytes(b"")
    assert checked(tmp_path, story, "--key", SIGNER.public, "--terms", str(path))[0] == 1


def test_a_fallback_goes_back_and_samples_go_on() -> None:
    story = Story().begin().train(50)
    story.lines.append({"fallback_to": 100})
    story.step = 100
    with pytest.raises(verify.Broken, match="fallback to step 100"):
        judged(story.train(50).end())
    story = Story().begin().train(4).end()
    for line, samples in zip(story.lines, ([0, 8], [8, 0], [0, 8], [8, 16]), strict=True):
        line["samples"] = samples
    with pytest.raises(verify.Broken, match="samples of step 1"):
        judged(story)


def test_only_a_line_without_an_end_may_be_torn(tmp_path: Path) -> None:
    story = usual(faults=1)
    text = "".join(json.dumps(line) + "\n" for line in story.lines)
    torn = '{"step": 25, "busy": {"a": 1.0}'
    assert checked(tmp_path, story, "--key", SIGNER.public, steps=text + torn)[0] == 0
    assert checked(tmp_path, story, "--key", SIGNER.public, steps=f"{text}{torn}\n")[0] == 1


def test_a_chain_that_does_not_end_with_the_job_is_not_finished() -> None:
    assert judged(usual(faults=1)).finished
    assert not judged(Story().begin().train(20).fault().train(5)).finished


def test_a_start_explains_a_generation_only_after_an_end(tmp_path: Path) -> None:
    story = Story().begin().train(20).end().begin().train(20).end()
    assert standings(story) == []
    story = Story().begin().train(20).begin().train(20).end()
    assert standings(story) == ["missed"]


def test_nested_json_is_answered_and_not_crashed_on() -> None:
    with pytest.raises(verify.Broken):
        verify.read_chain(["[" * 100_000])


@pytest.mark.parametrize(
    "line", ['begins = "31.01.2026"', 'promised = "0.9"', "begins = 2026-01-31"]
)
def test_terms_of_another_type_are_answered(tmp_path: Path, line: str, capsys: Any) -> None:
    path, export = tmp_path / "terms.toml", tmp_path / "export.jsonl"
    path.write_text(f"[guarantee]\n{line}\n")
    export.write_text("\n".join(usual().export()) + "\n")
    assert main(["report", "--export", str(export), "--terms", str(path)]) == 2


def test_a_report_is_made_of_a_pause_of_no_length_and_not_written_nowhere(
    tmp_path: Path, capsys: Any
) -> None:
    story = Story().begin().train(20)
    story.generation += 1
    _, log = checked(tmp_path, story.train(20).end())
    files = ["report", "--export", str(tmp_path / "export.jsonl"), "--steps", log, "-o", "html"]
    assert main(files) == 0
    assert main([*files, "--out", str(tmp_path / "nowhere" / "x")]) == 2


def test_names_steer_no_terminal_and_no_browser(tmp_path: Path, capsys: Any) -> None:
    story = usual(faults=1)
    story.lines[4]["busy"] = {"<img src=x>|\x1b[2J": 0.01}
    _, log = checked(tmp_path, story)
    capsys.readouterr()
    files = ["report", "--export", str(tmp_path / "export.jsonl"), "--steps", log]
    assert main(files) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert main([*files, "-o", "markdown"]) == 0
    assert "\\<img src=x\\>" in capsys.readouterr().out


def test_a_run_whose_clock_was_set_back_has_an_account(tmp_path: Path) -> None:
    story = usual(faults=1)
    story.now -= 500
    _, log = checked(tmp_path, story.begin().train(10).end())
    assert main(["report", "--export", str(tmp_path / "export.jsonl"), "--steps", log]) == 0


def test_a_promise_is_not_kept_before_the_job_is_over() -> None:
    running = Story().begin().train(20).fault().train(5)
    assert report.promise(account(running.chain(), running.lines)).endswith("kept so far.")
    over = usual(faults=1)
    assert report.promise(account(over.chain(), over.lines)).endswith("kept.")


def test_a_job_that_stood_still_until_it_was_stopped_did_not_end_well() -> None:
    def stopped(quiet: float) -> Story:
        story = Story().begin().train(20).later(quiet)
        return story.entry("StopAsked", {"why": "enough"}, state="stopped")

    (gap,) = judged(stopped(600.0)).incidents
    assert (gap.incident, gap.standing) == ("gap-end", "missed")
    assert gap.why == "600 s without a step, unexplained"
    assert judged(stopped(5.0)).incidents == ()
    # Submitted again, and stopped before anything ran.
    again = stopped(5.0).later(600.0).entry("Submitted", {"spec": {"job": JOB}}, state="waiting")
    again.later(600.0).entry("StopAsked", {"why": "never mind"}, state="stopped")
    assert judged(again).incidents == ()
