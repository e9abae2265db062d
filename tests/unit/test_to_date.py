"""The account to date: link by link the same as the whole chain's, and read along in turns."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.chaos.fleet_journal import MemoryJournal
from keepstep.ledger import goodput, verify
from keepstep.ledger.to_date import ToDate
from keepstep.model import JobId
from keepstep.orchestrator import accounts
from keepstep.orchestrator.accounts import Accounts
from keepstep.orchestrator.journal import Entry
from tests.unit.account_story import JOB, Story, usual
from tests.unit.test_account import SECOND, any_entry


def heard(bodies: tuple[dict[str, Any], ...]) -> ToDate:
    found = ToDate(JOB)
    for body in bodies:
        found.hear(body)
    return found


@given(st.lists(any_entry(), min_size=1, max_size=30), st.integers(0, 300))
@settings(max_examples=300)
def test_it_is_what_the_whole_chain_says(bodies: list[dict[str, Any]], until: int) -> None:
    # A chain begins with a submission.
    bodies[0]["entry"]["event"]["kind"] = "Submitted"
    chain = verify.Chain(JOB, tuple(bodies), tuple(f"h{at}" for at in range(len(bodies))))
    useful = paid = 0
    for run in goodput.runs_of(chain, (), until * SECOND):
        for segment in run.segments:
            useful += segment.nanoseconds * run.world * (segment.spent is goodput.Spent.USEFUL)
            paid += segment.nanoseconds * run.world * (segment.spent not in goodput.UNPAID)
    assert heard(chain.bodies).spent(until) == (useful, paid)


def test_failures_count_as_the_verifier_counts_them() -> None:
    story = Story().begin().train(12).fault().train(12).fault(outcome="fallback").train(12)
    story.fault(outcome="moved", causes=[]).train(12)
    story.fault(outcome="failed", causes=[{"sign": "exception", "rank": 1, "node": "n1"}])
    found = heard(story.chain().bodies)
    judged = verify.guarantee(story.chain(), story.lines, verify.Terms())
    assert (found.resolved, found.counted) == (judged.resolved, judged.counted) == (1, 2)


def journal_of(jobs: int) -> MemoryJournal:
    """The same story, told of several jobs."""
    journal = MemoryJournal()
    standing = journal.begin_term()
    for number in range(jobs):
        name = f"job-{number}"
        for body in usual(faults=1).chain().bodies:
            entry = dict(body["entry"])
            entry["jobs"] = {name: entry["jobs"][JOB]}
            made = Entry((JobId(name),), entry)
            standing = journal.append(standing.term, standing.head, [made])
    return journal


def test_every_job_gets_its_turn_and_is_read_on_where_it_was_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accounts, "LINKS_PER_LOOK", 3)
    jobs = [JobId(f"job-{n}") for n in range(2 * accounts.JOBS_PER_LOOK + 1)]
    read = Accounts(journal_of(len(jobs)))
    assert read.of(jobs[0], 0.0) is None
    links = len(usual(faults=1).chain().bodies)
    rounds = 3 * -(-links // 3)
    for _ in range(rounds):
        read.look(jobs)
    found = [read.of(job, 0.0) for job in jobs]
    assert len(set(found)) == 1
    (whole,) = set(found)
    assert whole is not None
    assert (whole.live_ratio, whole.target_ratio, whole.failures) == (1.0, 0.9, 1)
    assert whole.goodput is not None
    assert 0 < whole.goodput < 1
    together = read.of_all(0.0)
    assert together is not None
    assert (together.goodput, together.failures) == (whole.goodput, len(jobs))
    read.look(jobs[1:])
    assert read.of(jobs[0], 0.0) is None, "it is gone"


def test_a_journal_that_is_away_leaves_the_accounts_as_they_were() -> None:
    journal = journal_of(1)
    read = Accounts(journal)
    read.look([JobId("job-0")])
    before = read.of(JobId("job-0"), 0.0)
    journal.away = True
    read.look([JobId("job-0")])
    assert before is not None
    assert read.of(JobId("job-0"), 0.0) == before
