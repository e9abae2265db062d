"""The live page's view model, its files and how they are served."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepstep import codec, wire
from keepstep.clock import RealClock
from keepstep.config import OrchestratorConfig
from keepstep.model import Generation, JobId, JobState, NodeId, Phase, Rank, Severity
from keepstep.orchestrator import board, shown, state, view, watching
from keepstep.orchestrator.access import Gate
from keepstep.orchestrator.api import ROUTES, Api
from keepstep.orchestrator.board import Account, Around
from keepstep.orchestrator.http import Request, Response
from keepstep.orchestrator.journal_sqlite import SqliteJournal
from keepstep.orchestrator.run import Orchestrator
from keepstep.orchestrator.tokens import Tokens
from tests import synthetic

TOKEN = "a-token-for-tests-only"
SMALL = synthetic.Sizes(nodes=40, largest=64, jobs=3, ranks=16, closed=5)
JOB = JobId("job-0")


def look(made: state.Cluster, **more: Any) -> board.Board:
    connected = frozenset(name for name, node in made.nodes.items() if node.alive)
    beats = synthetic.heartbeats(made).values()
    whole = board.fleet(made, connected)
    around = Around(synthetic.NOW, 9, "", beats, **more)
    return replace(board.board(made, around, whole), fleet=whole)


# --- the fleet ------------------------------------------------------------------------------------


def test_every_device_is_one_letter_in_its_rack():
    made = synthetic.cluster(SMALL)
    made.nodes[NodeId("n36")].drained = "new kernel"
    state.put_taint(made, "n37/1", state.Taint("hot", 0.0, 2e9))
    state.put_taint(made, "n0/2", state.Taint("hot", 0.0, 2e9))
    made.nodes[NodeId("n0")].uses[3] = state.Occupant(JOB, Rank(3), fenced=True)
    fleet = look(made).fleet
    assert fleet is not None
    first, second, third = fleet.groups
    assert (first.name, second.name, third.name) == ("rack r0", "rack r1", "rack r2")
    assert first.nodes[:3] == ("n0", "n1", "n2")
    assert first.cells[0] == "mmTxmmmm", "its job is being repaired; one is tainted, one fenced"
    assert third.cells[4:6] == ("!!!!!!!!", ".!......")
    assert third.marks[4:6] == "e."
    letters = set("".join(cell for group in fleet.groups for cell in group.cells))
    assert letters <= board.CELLS.keys()


def test_a_lost_node_is_marked_and_its_devices_are_gone():
    made = synthetic.cluster(SMALL)
    lost = next(name for name, node in made.nodes.items() if not node.alive)
    picture = look(made)
    assert picture.fleet is not None
    group = next(g for g in picture.fleet.groups if lost in g.nodes)
    at = group.nodes.index(lost)
    assert (group.marks[at], group.cells[at]) == ("L", "-" * 8)
    totals = picture.totals
    assert (totals.nodes, totals.nodes_ready) == (40, 39)
    assert sum(count.many for count in totals.by_word) == totals.devices == 40 * 8
    assert totals.devices_training == 2 * 16, "of the two jobs that nothing is wrong with"


def test_nodes_without_a_rack_are_shown_in_blocks():
    made = state.new_cluster("s")
    for number in range(130):
        name = NodeId(f"n{number}")
        made.nodes[name] = state.NodeState(name, "a", 1, 1, 2, "b", 0)
    fleet = look(made).fleet
    assert fleet is not None
    assert [group.name for group in fleet.groups] == ["n0 to n63", "n64 to n127", "n128 to n129"]


def test_an_agent_that_is_away_is_told_as_the_terminal_tells_it():
    made = synthetic.cluster(SMALL)
    fleet = board.fleet(made, frozenset())
    assert fleet.groups[0].marks[0] == "a"
    assert board.MARKS["a"].word == shown.node_mark(
        alive=True, left=False, connected=False, drained=False, empty=False, tainted=False
    )


# --- jobs and incidents ---------------------------------------------------------------------------


def test_each_rank_is_one_letter_for_what_is_known_of_its_seat():
    job = synthetic.cluster(SMALL).jobs[JobId("job-1")]
    assert board.rank_letters(job) == "r" * 16
    moving = state.Migration(
        *(synthetic.MigrationId("m"), "unplanned", "recover", Phase.QUIESCE, 0.0, 0.0)
    )
    moving.gone, moving.fences = {Rank(1): "killed"}, {Rank(2): 0}
    moving.fresh, moving.reports = {Rank(3): 0.0}, {Rank(4): wire.SeatReport(Rank(4))}
    job.migration, job.state, job.finished = moving, JobState.MIGRATING, {Rank(5): 0}
    assert board.rank_letters(job) == "pexjdf" + "p" * 10
    planned = replace(moving, kind="planned", phase=Phase.WARM, coming={Rank(7): None})
    job.migration = planned
    assert board.rank_letters(job)[7] == "l"


def test_every_state_and_phase_has_a_letter():
    for job_state in JobState:
        assert board._RANK_LETTERS.get(job_state.value) or job_state.over
    for phase in Phase:
        assert board._rank_letter(phase.value) in board.RANKS


def test_an_open_incident_says_which_phases_were_which_is_and_which_are_to_come():
    made = synthetic.cluster(SMALL)
    (story,) = look(made).open
    assert [(step.name, step.state) for step in story.phases] == [
        ("allocate", "done"),
        ("quiesce", "done"),
        ("reform", "done"),
        ("transfer", "now"),
        ("verify", "to come"),
        ("resume", "to come"),
    ]
    assert story.phases[3].seconds == pytest.approx(3.1)
    assert story.lasted_seconds == pytest.approx(6.2)
    assert story.pause_seconds is None
    assert story.told[1].why.startswith("ranks ")
    assert story.seen[0].startswith("exit: node on n")


def test_a_hold_is_shown_with_all_that_is_still_to_come():
    made = synthetic.cluster(SMALL)
    job = made.jobs[JOB]
    assert job.migration is not None
    assert job.incident is not None
    job.migration.phase, job.state = Phase.HOLD, JobState.HELD
    job.incident.seconds = {"allocate": 0.1}
    (story,) = look(made).open
    states = {step.name: step.state for step in story.phases}
    assert states["hold"] == "now"
    assert states["quiesce"] == states["resume"] == "to come"
    assert (story.tone, look(made).jobs[0].tone) == ("bad", "bad")


def test_a_closed_incident_has_its_pause_and_only_the_phases_that_were():
    newest = look(synthetic.cluster(SMALL)).closed[0]
    assert newest.outcome == "resumed"
    assert newest.pause_seconds == pytest.approx(newest.lasted_seconds)
    assert [step.name for step in newest.phases] == [
        *("allocate", "quiesce", "reform", "transfer", "resume")
    ]


def test_jobs_in_trouble_come_first_and_what_is_over_last():
    made = synthetic.cluster(SMALL)
    made.jobs[JobId("job-2")].state = JobState.FAILED
    made.jobs[JobId("job-2")].detail = "Traceback\nValueError: bad batch\n"
    cards = look(made).jobs
    assert [card.id for card in cards] == ["job-0", "job-1", "job-2"]
    assert cards[2].notes == ("ValueError: bad batch",)
    assert cards[1].counts == {"running": 16}


def test_there_is_no_account_unless_the_ledger_keeps_one():
    made = synthetic.cluster(SMALL)
    assert all(card.account is None for card in look(made).jobs)
    kept = Account(0.97, 0.95, 0.9, 20)
    assert look(made, account=lambda _: kept).jobs[0].account == kept


def test_the_terminal_and_the_page_have_the_same_pace():
    made = synthetic.cluster(SMALL)
    plain = view.describe(made, synthetic.NOW, synthetic.heartbeats(made).values())
    for card in look(made).jobs:
        assert plain["paces"][card.id] == codec.to_plain(card.pace)


def test_heartbeats_of_an_older_generation_are_not_believed_unless_ranks_just_move():
    job = synthetic.cluster(SMALL).jobs[JobId("job-1")]
    old = wire.JobPulse(JobId("job-1"), Generation(2), 42, 41, 0.2, "eval")
    job.step = 10
    assert shown.pace(job, [old]) == shown.Pace(10, 0.0, "")
    moving = state.Migration(
        *(synthetic.MigrationId("m"), "planned", "move", Phase.QUIESCE, 0.0, 0.0)
    )
    job.migration = moving
    assert shown.pace(job, [old]).step == 41, "no step is lost while ranks move"
    job.migration = replace(moving, kind="start")
    assert shown.pace(job, [old]).step == 10
    job.migration = replace(moving, phase=Phase.FALLBACK)
    assert shown.pace(job, [old]).step == 10


# --- how it is served -----------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def serving(directory: Path, made: state.Cluster) -> AsyncIterator[Api]:
    journal = SqliteJournal(directory / "journal.db")
    silent = lambda *_, **__: None  # noqa: E731
    orchestrator = Orchestrator(journal, OrchestratorConfig(), RealClock(), TOKEN, silent)
    orchestrator.cluster = made
    orchestrator._alive.heartbeats.update(synthetic.heartbeats(made))
    yield Api(orchestrator, journal, Gate(Tokens(TOKEN)), {}, silent)
    journal.close()


async def ask(api: Api, path: str, query: dict[str, str] | None = None) -> Response:
    headers = {"authorization": f"Bearer {TOKEN}"}
    reply = await api.handle(Request("GET", path, query or {}, headers))
    assert isinstance(reply, Response)
    return reply


def test_the_largest_fleet_is_small_enough_to_send_and_is_sent_once(tmp_path: Path):
    async def body() -> None:
        async with serving(tmp_path, synthetic.cluster()) as api:
            first = await ask(api, "/v1/board")
            whole = json.loads(first.body)
            assert len(first.body) < 600_000
            assert len(whole["jobs"]) == board.JOBS_MAX
            assert whole["jobs_not_shown"] == 200 - board.JOBS_MAX
            nodes = [node for group in whole["fleet"]["groups"] for node in group["nodes"]]
            assert len(set(nodes)) == 12_500
            known = {"fleet": whole["fleet_version"]}
            again = json.loads((await ask(api, "/v1/board", known)).body)
            assert again["fleet"] is None
            assert again["fleet_version"] == whole["fleet_version"]

    asyncio.run(body())


def test_a_board_is_made_once_for_all_who_ask_at_a_time(tmp_path: Path):
    async def body() -> None:
        async with serving(tmp_path, synthetic.cluster(SMALL)) as api:
            first = await ask(api, "/v1/board")
            api._orchestrator.cluster.frozen = "a switch is replaced"
            assert (await ask(api, "/v1/board")).body == first.body
            api.watching._next_at = float("-inf")
            assert (await ask(api, "/v1/board")).body != first.body

    asyncio.run(body())


def test_a_leader_counts_the_incidents_of_its_own_term(tmp_path: Path):
    """What was over before was counted by whoever led: to Prometheus it would be an increase."""

    async def body() -> None:
        made = synthetic.cluster(SMALL)
        assert made.closed
        async with serving(tmp_path, made) as api:
            for closed in (0, 1):
                text = (await ask(api, "/metrics")).body.decode()
                assert f"keepstep_incident_pause_seconds_count {closed}" in text.splitlines()
                new = dataclasses.replace(made.closed[-1], incident=synthetic.IncidentId("new"))
                made.closed = (*made.closed, new)

    asyncio.run(body())


def test_the_fleet_is_made_anew_with_a_decision_or_with_who_is_connected(tmp_path: Path):
    async def body() -> None:
        async with serving(tmp_path, synthetic.cluster(SMALL)) as api:
            here = api._orchestrator

            async def version() -> str:
                api.watching._next_at = float("-inf")
                return str(json.loads((await ask(api, "/v1/board")).body)["fleet_version"])

            first = await version()
            here.cluster.nodes[NodeId("n39")].drained = "x"
            assert await version() == first
            here.history.append({**here.history[-1], "seq": here.history[-1]["seq"] + 1})
            drained = await version()
            assert drained != first
            here._streams[NodeId("n3")] = None  # type: ignore[assignment]
            assert await version() not in (first, drained)
            here._streams.clear()

    asyncio.run(body())


def test_the_page_needs_no_token_loads_nothing_from_elsewhere_and_runs_no_inline_code(
    tmp_path: Path,
):
    async def body() -> None:
        async with serving(tmp_path, synthetic.cluster(SMALL)) as api:
            for path in (*watching.FILES, "//", "/page//page.js"):
                reply = await api.handle(Request("GET", path, {}, {}))
                assert isinstance(reply, Response)
                policy = reply.headers["Content-Security-Policy"]
                assert policy.startswith("default-src 'none'; ")
                assert "unsafe" not in policy
                assert "http" not in policy
                assert reply.headers["X-Content-Type-Options"] == "nosniff"

    asyncio.run(body())


def test_only_the_pages_own_files_are_open():
    opened = {route.path for route in ROUTES if route.open}
    assert opened == {"/healthz", "/readyz", "/v1/agent", *watching.FILES}


def test_the_pages_files_are_in_the_package_and_name_no_other_host():
    for name, _ in watching.FILES.values():
        text = (watching.DIRECTORY / name).read_text(encoding="utf-8")
        hosts = re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text)
        assert [host for host in hosts if "www.w3.org" not in host] == []
        assert not re.search(r"<[^>]+\s(on\w+|style)=", text), f"{name}: inline code or style"
    script = (watching.DIRECTORY / "page.js").read_text(encoding="utf-8")
    for dangerous in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert dangerous not in script
    assert "localStorage" not in script


def test_what_the_page_reads_is_what_the_board_has():
    """A renamed field would be `undefined` in the browser, and nobody would say so."""
    made = codec.to_plain(look(synthetic.cluster(SMALL), account=lambda _: Account()))
    script = (watching.DIRECTORY / "page.js").read_text(encoding="utf-8")
    for noun, sample in {
        "board": made,
        "job": made["jobs"][0],
        "story": made["open"][0],
        "totals": made["totals"],
        "taint": codec.to_plain(board.TaintLine("n1", Severity.AVOID, "operator", "hot", 1.0)),
    }.items():
        read = set(re.findall(rf"(?<![.#\w]){noun}\.([a-z_]+)", script))
        assert read, noun
        assert read - sample.keys() == set(), noun
