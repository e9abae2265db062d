"""Decisions for whoever listens: once for all, to nobody else, and never in silence."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from keepstep.clock import RealClock
from keepstep.config import OrchestratorConfig
from keepstep.model import JobId, JobSpec
from keepstep.orchestrator import access, events, telling
from keepstep.orchestrator.access import Gate, Sight
from keepstep.orchestrator.api import Api
from keepstep.orchestrator.http import Request, Streamed
from keepstep.orchestrator.journal_sqlite import SqliteJournal
from keepstep.orchestrator.run import Orchestrator
from tests.unit.test_access import OWN, SECRET, Served, in_two_projects, served


def bearer(made: Served, who: str) -> dict[str, str]:
    return {"authorization": f"Bearer {made.texts[who]}"}


async def stream(made: Served, who: str, after: str = "") -> AsyncIterator[bytes]:
    asked = Request("GET", "/v1/events", {"after": after}, bearer(made, who))
    reply = await made.api.handle(asked)
    assert isinstance(reply, Streamed)
    return reply.parts


class Listener:
    """Takes in a stream in a task of its own."""

    def __init__(self, parts: AsyncIterator[bytes]) -> None:
        self.parts: list[bytes] = []
        self._more = asyncio.Condition()
        self._task = asyncio.create_task(self._listen(parts))

    async def _listen(self, parts: AsyncIterator[bytes]) -> None:
        async for part in parts:
            self.parts.append(part)
            async with self._more:
                self._more.notify_all()

    async def heard(self, parts: int) -> None:
        async with self._more:
            await self._more.wait_for(lambda: len(self.parts) >= parts)

    @property
    def text(self) -> str:
        return b"".join(self.parts).decode()

    async def leave(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


async def settled() -> None:
    for _ in range(40):
        await asyncio.sleep(0)


def submit(made: Served, name: str, project: str) -> None:
    made.feed(events.Submitted(JobSpec(JobId(name), "x.py", nodes=1, project=project)))


def decisions(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines]


def gaps(text: str) -> list[dict[str, int]]:
    parts = [part for part in text.split("\n\n") if "event: gap\n" in part]
    return [json.loads(part.partition("\ndata:")[2]) for part in parts]


def about_both(made: Served) -> dict[str, Any]:
    """A decision that says something of A's job and something of B's."""
    newest = made.orchestrator.history[-1]
    said = (("mine", "rank 1 moves"), (SECRET, f"{SECRET} moves"))
    notes = [{"job": job, "incident": "", "phase": "", "why": why} for job, why in said]
    phases = {"mine": "hold", SECRET: "hold"}
    record = {"seq": newest["seq"] + 1, "jobs": ["mine", SECRET], "notes": notes, "phases": phases}
    return {**newest, **record, "why": f"mine makes room for {SECRET}"}


# --- who sees what --------------------------------------------------------------------------------


@in_two_projects
async def test_listeners_of_two_projects_share_what_is_made_and_never_see_each_others(made: Served):
    """Live and from what is kept, whoever comes first."""
    waiting = [Listener(await stream(made, who)) for who in ("viewera", "viewerb", "viewer")]
    await settled()
    for number in range(3):
        submit(made, f"{SECRET}{number}", "b")
        submit(made, f"mine{number}", "a")
        await settled()
    both = about_both(made)
    made.orchestrator._told.tell([both])
    await settled()
    for who in ("viewerb", "viewera", "operatora", "viewer"):
        waiting.append(Listener(await stream(made, who, "0")))
        await settled()
    ours, theirs, everything, theirs_again, *ours_again, all_again = (each.text for each in waiting)
    for text in (ours, *ours_again):
        assert SECRET not in text
        assert {job for told in decisions(text) for job in told["jobs"]} >= {"mine0", "mine2"}
        (seen,) = [told for told in decisions(text) if told["seq"] == both["seq"]]
        assert (seen["jobs"], seen["why"]) == (["mine"], access.WITHHELD)
        assert [note["why"] for note in seen["notes"]] == ["rank 1 moves"]
    for text in (theirs, theirs_again):
        assert f"{SECRET}2" in text
        assert not any(job.startswith("mine") for told in decisions(text) for job in told["jobs"])
        (seen,) = [told for told in decisions(text) if told["seq"] == both["seq"]]
        assert [note["why"] for note in seen["notes"]] == [f"{SECRET} moves"]
    assert len(decisions(everything)) >= 6
    assert len(decisions(all_again)) == len(made.orchestrator.history)
    for kept in made.api._telling._kept[telling.ALL]:
        assert SECRET.encode() not in kept.texts.get("a", b"")
        assert set(kept.texts) <= {telling.ALL, *kept.projects}
    for each in waiting:
        await each.leave()


@in_two_projects
async def test_a_name_that_was_somebody_elses_tells_nothing_of_what_was(made: Served):
    submit(made, "reused", "b")
    made.feed(events.StopAsked(JobId("reused"), "because of what B does", save=False))
    # Forgotten, and taken by another.
    cluster = made.orchestrator.cluster
    del cluster.jobs[JobId("reused")]
    cluster.open_jobs = tuple(name for name in cluster.open_jobs if name != "reused")
    submit(made, "reused", "a")
    _, text = await made.ask("viewera", "GET", "/v1/events?after=0")
    assert [told["kind"] for told in decisions(text) if told["jobs"] == ["reused"]] == ["Submitted"]
    assert "because of what B does" not in text


# --- what it costs --------------------------------------------------------------------------------


@in_two_projects
async def test_what_a_project_sees_of_a_decision_is_made_once_for_all_its_listeners(made: Served):
    listeners = [Listener(await stream(made, "viewera")) for _ in range(5)]
    await settled()
    made_for: list[str] = []
    real = made.api._telling._sight

    def sight(project: str) -> Sight:
        made_for.append(project)
        return real(project)

    made.api._telling._sight = sight
    submit(made, "mine1", "a")
    await settled()
    assert made_for == ["a"]
    assert len({each.parts[-1] for each in listeners}) == 1
    assert all(len(decisions(each.text)) == 1 for each in listeners)
    for each in listeners:
        await each.leave()


@in_two_projects
async def test_nobody_is_woken_for_a_decision_that_is_not_theirs(made: Served):
    listener = Listener(await stream(made, "viewera"))
    await settled()
    with patch.object(made.api._telling, "_next", side_effect=AssertionError("woken")):
        submit(made, "others", "b")
        await settled()
    assert decisions(listener.text) == []
    submit(made, "mine1", "a")
    await settled()
    assert [told["jobs"] for told in decisions(listener.text)] == [["mine1"]]
    await listener.leave()


@in_two_projects
async def test_who_catches_up_lets_others_run(made: Served):
    with patch.object(telling, "PART_SECONDS_MAX", 0.0):
        listener = Listener(await stream(made, "viewer", "0"))
        await settled()
    assert len(listener.parts) == 1 + len(made.orchestrator.history)
    assert [told["seq"] for told in decisions(listener.text)] == [
        record["seq"] for record in made.orchestrator.history
    ]
    await listener.leave()


@in_two_projects
async def test_what_is_made_and_sent_is_charged_to_who_listens(made: Served):
    made.api._gate = Gate(made.gate._tokens)
    with patch.object(made.api._gate, "charge") as charged:
        listener = Listener(await stream(made, "viewera"))
        await settled()
        submit(made, "mine1", "a")
        await settled()
    assert len(listener.parts) == 2
    assert {call.args[0].name for call in charged.mock_calls} == {"viewera"}
    costs = [call.args[1] for call in charged.mock_calls]
    assert costs.count(access.PART_SECONDS) == 2
    assert sum(costs) > 2 * access.PART_SECONDS, "making it is not for nothing"
    await listener.leave()


@in_two_projects
async def test_who_has_cost_too_much_is_told_later_and_all_at_once(made: Served):
    caller = made.gate.caller(Request("GET", "/", {}, bearer(made, "viewera")))
    assert caller is not None
    with patch.object(access, "PAUSE_SECONDS_MAX", 0.05):
        listener = Listener(await stream(made, "viewera"))
        made.gate.charge(caller, 3.0)
        await settled()
        for number in range(3):
            submit(made, f"mine{number}", "a")
            await settled()
        assert len(listener.parts) == 1, "it waits"
        made.gate.afford(caller)  # And may ask meanwhile.
        await asyncio.wait_for(listener.heard(2), 20)
    assert len(decisions(listener.parts[1].decode())) == 3
    await listener.leave()


# --- signs of life --------------------------------------------------------------------------------


@in_two_projects
async def test_a_sign_of_life_comes_while_only_others_have_decisions(made: Served):
    with patch.object(telling, "ALIVE_SECONDS", 0.05):
        listener = Listener(await stream(made, "viewera"))
        async with asyncio.timeout(20):
            number = 0
            while listener.text.count(": alive") < 3:
                number += 1
                submit(made, f"others{number}", "b")
                await asyncio.sleep(0.01)
    assert decisions(listener.text) == []
    await listener.leave()


@in_two_projects
async def test_time_in_which_a_listener_is_made_to_wait_counts_until_the_next_sign_of_life(
    made: Served,
):
    ahead = 0.0
    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + ahead, thread_time=time.thread_time
    )
    with patch.object(telling, "time", clock), patch.object(telling, "ALIVE_SECONDS", 600.0):
        parts = made.api._telling.events("", "a", lambda seconds: None)
        assert await anext(parts) == b": connected\n\n"
        for _ in range(2):
            ahead += 600.0
            async with asyncio.timeout(60):
                assert await anext(parts) == b": alive\n\n"


# --- what is not kept -----------------------------------------------------------------------------


def test_a_new_leader_says_what_it_cannot_tell(tmp_path: Path):
    async def body() -> None:
        async with served(tmp_path) as before:
            submit(before, "mine", "a")
            heard = before.orchestrator.history[-1]["seq"]
            submit(before, "mine2", "a")
        (tmp_path / "tokens.json").unlink()
        async with served(tmp_path) as made:
            began = made.orchestrator.history[0]["seq"]
            assert began == heard + 2
            for who in ("viewera", "viewer"):
                _, text = await made.ask(who, "GET", f"/v1/events?after={heard}")
                assert gaps(text) == [{"asked": heard, "from": began}]
                assert f"id: {began - 1}\nevent: gap\n" in text
                # Who knows all that went before has missed nothing; nor has who wants what is left.
                for after in (str(began - 1), "0", ""):
                    assert not gaps((await made.ask(who, "GET", f"/v1/events?after={after}"))[1])
            # A number that was given out by a leader whose journal was put back since.
            _, text = await made.ask("viewer", "GET", f"/v1/events?after={began + 100}")
            assert gaps(text) == [{"asked": began + 100, "from": began}]
            assert [told["seq"] for told in decisions(text)] == [began]

    asyncio.run(body())


@pytest.mark.parametrize("project", ["", "a"])
def test_who_falls_behind_what_is_kept_is_told(tmp_path: Path, project: str):
    async def body() -> None:
        journal = SqliteJournal(tmp_path / "journal.db")
        quiet: Any = lambda *_, **__: None  # noqa: E731
        config = OrchestratorConfig(history_entries_max=4)
        made = Orchestrator(journal, config, RealClock(), OWN, quiet)
        jobs = {"mine": "a", "others": "b"}
        told = telling.Telling(made, lambda who: Sight(who, jobs if who else {}))
        parts = told.events("", project, lambda seconds: None)
        assert await anext(parts) == b": connected\n\n"
        seq = made.history[-1]["seq"]
        base = {**made.history[-1], "phases": {}, "notes": []}
        made.cluster.jobs = {  # type: ignore[assignment]
            name: type("Job", (), {"spec": JobSpec(JobId(name), "x.py", project=whose)})
            for name, whose in jobs.items()
        }
        for offset, job in enumerate(("mine", "mine", *["others"] * 3), start=1):
            made._told.tell([{**base, "seq": seq + offset, "jobs": [job]}])
        text = (await anext(parts)).decode()
        # The history holds four: the first of ours is gone, and no other is missed.
        lost = seq + 1
        assert gaps(text) == [{"asked": seq, "from": lost + 1}]
        expected = [seq + 2] if project else [seq + 2, seq + 3, seq + 4, seq + 5]
        assert [told["seq"] for told in decisions(text)] == expected
        # Only others' decisions go out of mind: we miss nothing by it.
        for offset in (6, 7, 8, 9, 10):
            made._told.tell([{**base, "seq": seq + offset, "jobs": ["others"]}])
        made._told.tell([{**base, "seq": seq + 11, "jobs": ["mine"]}])
        text = (await anext(parts)).decode()
        assert bool(gaps(text)) == (not project)
        assert set(told._kept) == {telling.ALL, "a", "b"}
        assert len(told._kept[telling.ALL]) == 4
        assert len(told._kept["a"]) == 1
        journal.close()

    asyncio.run(body())


def test_a_gap_is_no_decision_to_readers_that_do_not_know_it(tmp_path: Path):
    """Of before: each line that begins with `data: ` was taken for one."""

    async def body() -> None:
        async with served(tmp_path) as made:
            text = made.api._telling._gap(3, "").decode()
            assert gaps(text)
            assert not decisions(text)
            assert not any(line.startswith("data: ") for line in text.splitlines())

    asyncio.run(body())


def test_an_api_hears_of_what_was_told_before_it_was_made(tmp_path: Path):
    async def body() -> None:
        async with served(tmp_path) as made:
            submit(made, "mine", "a")
            late = Api(made.orchestrator, made.journal, made.gate, {}, lambda *_, **__: None)
            assert [kept.seq for kept in late._telling._kept["a"]] == [
                made.orchestrator.history[-1]["seq"]
            ]

    asyncio.run(body())
