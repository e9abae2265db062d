"""A job's chain on its way out: in parts, a few at once, and never half of it as if it were all."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from unittest.mock import patch

import pytest

from keepstep.errors import Permanent, Transient
from keepstep.orchestrator import access, exporting
from keepstep.orchestrator.access import EXPORT, Gate
from keepstep.orchestrator.exporting import in_parts
from keepstep.orchestrator.http import PIECE_BYTES, Request, Streamed
from keepstep.orchestrator.journal import Link
from keepstep.orchestrator.tokens import Caller, Role
from tests.unit.test_access import Served, in_two_projects

PATH = "/v1/jobs/mine/journal"


def parts_of(lines: list[str]) -> list[bytes]:
    async def read() -> list[bytes]:
        return [part async for part in in_parts(lines)]

    return asyncio.run(read())


def test_lines_go_out_together_up_to_a_piece():
    lines = [f"{number:>999}\n" for number in range(200)]
    with patch.object(exporting, "PART_SECONDS_MAX", 1e9):
        parts = parts_of(lines)
    assert b"".join(parts).decode() == "".join(lines)
    assert max(map(len, parts)) < PIECE_BYTES + 1000
    assert len(parts) == 4
    assert parts_of([]) == []


def test_what_takes_long_lets_others_run_after_each_line():
    with patch.object(exporting, "PART_SECONDS_MAX", 0.0):
        assert parts_of(["a\n", "b\n"]) == [b"a\n", b"b\n"]


async def export(made: Served, who: str) -> Streamed:
    headers = {"authorization": f"Bearer {made.texts[who]}"}
    reply = await made.api.handle(Request("GET", PATH, {}, headers))
    assert isinstance(reply, Streamed)
    return reply


@in_two_projects
async def test_exports_are_counted_for_as_long_as_they_last(made: Served):
    made.api._gate = Gate(made.gate._tokens, exports_max=1)
    reply = await export(made, "viewera")
    with patch.object(exporting, "PART_SECONDS_MAX", 0.0):
        assert await anext(reply.parts)
        assert (await made.ask("own", "GET", PATH))[0] == 429
        assert (await made.ask("own", "GET", "/v1/events"))[0] == 200, "another matter"
        await reply.parts.aclose()  # type: ignore[attr-defined]
    assert (await made.ask("own", "GET", PATH))[0] == 200


@in_two_projects
async def test_those_that_came_at_the_same_instant_are_counted_too(made: Served):
    made.api._gate = Gate(made.gate._tokens, exports_max=1)
    one, other = await export(made, "viewera"), await export(made, "viewera")
    with patch.object(exporting, "PART_SECONDS_MAX", 0.0):
        assert await anext(one.parts)
        with pytest.raises(Transient, match="too many"):
            await anext(other.parts)
        await one.parts.aclose()  # type: ignore[attr-defined]


def test_one_caller_leaves_exports_to_others():
    places = access.Places(8)
    caller = Caller("a", Role.VIEWER, "a")
    with places.taken(caller), places.taken(caller):
        assert places.full(caller)
        assert not places.full(Caller("b", Role.VIEWER, "b"))
    assert not places.open


@in_two_projects
async def test_an_export_whose_token_was_taken_back_does_not_look_whole(made: Served):
    reply = await export(made, "viewera")
    with patch.object(exporting, "PART_SECONDS_MAX", 0.0):
        assert await anext(reply.parts)
        made.gate._tokens._known.clear()
        with patch.object(access, "AGAIN_SECONDS", -1.0), pytest.raises(Permanent):
            await anext(reply.parts)
    assert not made.gate.streams[EXPORT].open


@in_two_projects
async def test_a_journal_that_is_away_is_not_asked(made: Served):
    made.orchestrator._away = True
    status, text = await made.ask("own", "GET", PATH)
    assert (status, "away" in text) == (503, True)


@in_two_projects
async def test_one_part_of_one_export_is_made_in_each_turn_of_the_loop(made: Served):
    """However many are under way: between two parts the loop does everything else."""
    turn, made_in = 0, []
    real = exporting.json_lines

    def lines(links: list[Link]) -> Iterable[str]:
        made_in.append(turn)
        return real(links)

    async def read(reply: Streamed) -> bytes:
        parts = []
        async for part in reply.parts:
            parts.append(part)
            await asyncio.sleep(0)  # As who sends it does.
        return b"".join(parts)

    with (
        patch.object(exporting, "PART_SECONDS_MAX", 0.0),
        patch.object(exporting, "json_lines", lines),
    ):
        reading = [asyncio.create_task(read(await export(made, "own"))) for _ in range(8)]
        while not all(task.done() for task in reading):
            turn += 1
            await asyncio.sleep(0)
    got = {await task for task in reading}
    assert len(got) == 1
    assert len(made_in) == 8 * len(got.pop().splitlines())
    assert max(Counter(made_in).values()) == 1


@in_two_projects
async def test_an_export_is_charged_and_waits_for_its_share(made: Served):
    slept = []

    async def sleep(seconds: float) -> None:
        slept.extend([seconds] if seconds else [])

    reply = await export(made, "viewera")
    with (
        patch.object(exporting, "PART_SECONDS_MAX", 0.0),
        patch.object(made.gate, "charge", wraps=made.gate.charge) as charged,
        patch.object(access, "PART_SECONDS", 3.0),
        patch.object(access.asyncio, "sleep", sleep),
    ):
        assert await anext(reply.parts)
        assert [call.args[0].name for call in charged.mock_calls] == ["viewera"]
        assert await anext(reply.parts)
    assert slept == [pytest.approx(4.0, abs=0.5)], "three of four seconds are spent: one is lacking"
    await reply.parts.aclose()  # type: ignore[attr-defined]
